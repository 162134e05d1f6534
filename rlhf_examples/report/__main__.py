"""The report of a run, or the comparison of two.

    python -m rlhf_examples.report runs/demo
    python -m rlhf_examples.report runs/a runs/b

Writes report.html into the run's directory, of two runs comparison.html into the second's, and prints its path.
"""

import argparse
from pathlib import Path

from rlhf_examples.report.write import write_comparison, write_report


def main() -> None:
    """Write the page; exits with 2 if a directory is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", type=Path, nargs="+", metavar="RUN", help="directory of a run; two are compared")
    directories = parser.parse_args().directories
    if len(directories) > 2:
        parser.error(f"{len(directories)} directories given; one gives a report, two a comparison")
    try:
        print(write_report(*directories) if len(directories) == 1 else write_comparison(*directories))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
