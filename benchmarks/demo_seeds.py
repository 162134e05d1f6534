"""The demo with several seeds: the mean of its figures, their standard error over seeds, and the range of a single run.

    python -m benchmarks.demo_seeds

Runs configs/demo.yaml with seeds 0 to 3 on two ranks, in runs/demo_seed0 and so on, and prints a table of the
summaries' figures.
"""

import json
from pathlib import Path

from benchmarks import results, tables
from benchmarks.processes import run_example

RANKS = 2


def run(seed: int, directory: Path) -> dict[str, float]:
    """Run the demo with one seed and return its summary; its output goes to `directory`.log."""
    flags = ["configs/demo.yaml", "--seed", str(seed), "--output_dir", str(directory), "--overwrite", "true"]
    run_example("rlhf_examples.pipeline", flags, RANKS, directory.with_suffix(".log"))
    return json.loads((directory / "summary.json").read_text())


def main() -> None:
    """Run the demo with every seed and print the table."""
    parser = results.parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--output_dir", default="runs", help="directory for the runs' directories")
    args = parser.parse_args()
    result = results.begin("demo_seeds", args, ranks=RANKS, threads=1)
    result["summaries"] = {str(seed): run(seed, Path(args.output_dir) / f"demo_seed{seed}") for seed in args.seeds}
    print("\n".join(tables.demo_seeds(result)))
    results.write(args.output, result)


if __name__ == "__main__":
    main()
