"""python -m rlhf_examples.report DIRECTORY"""

import sys
from pathlib import Path

from rlhf_examples.report.write import write_report

if len(sys.argv) != 2:
    sys.exit(__doc__)
print(write_report(Path(sys.argv[1])))
