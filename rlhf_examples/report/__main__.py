"""The report of a run, or the comparison of two.

    python -m rlhf_examples.report runs/demo
    python -m rlhf_examples.report runs/a runs/b

Writes report.html into the run's directory, of two runs comparison.html into the second's, and prints its path.
"""

import argparse
import importlib
import sys
from pathlib import Path


def main() -> None:
    """Write the page; exits with 2 and one line if a directory is wrong or its logs cannot be read."""
    prog = "python -m rlhf_examples.report" if Path(sys.argv[0]).name == "__main__.py" else None  # not `hybrid report`
    parser = argparse.ArgumentParser(prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", type=Path, nargs="+", metavar="RUN", help="directory of a run; two are compared")
    directories = parser.parse_args().directories
    try:
        if len(directories) > 2:
            raise ValueError(f"{len(directories)} directories given; one gives a report, two a comparison")
        for directory in directories:
            if not directory.is_dir():
                problem = "it is a file" if directory.exists() else "there is no such directory"
                raise ValueError(f"there is no metrics.jsonl in '{directory}': {problem}; give the directory of a run")
        write = importlib.import_module("rlhf_examples.report.write")  # after the flags: pandas takes seconds
        print(write.write_report(*directories) if len(directories) == 1 else write.write_comparison(*directories))
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
