"""python -m rlhf_examples.report DIRECTORY [DIRECTORY]: the report of a run, or the comparison of two"""

import sys
from pathlib import Path

from rlhf_examples.report.write import write_comparison, write_report

if len(sys.argv) not in (2, 3) or "--help" in sys.argv:
    sys.exit(__doc__)
directories = [Path(argument) for argument in sys.argv[1:]]
print(write_report(*directories) if len(directories) == 1 else write_comparison(*directories))
