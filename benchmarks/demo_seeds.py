"""The demo with several seeds: the mean of its figures, and their standard error over seeds.

    python -m benchmarks.demo_seeds

Runs configs/demo.yaml with seeds 0, 1, 2 on two ranks, in runs/demo_seed0 and so on, and prints a table of the
summaries' figures.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

STANDARD_ERROR = "_stderr"  # suffix of figures that are the standard error, within a run, of another figure


def run(seed: int, directory: Path) -> dict[str, float]:
    """Run the demo with one seed and return its summary; its output goes to `directory`.log."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "rlhf_examples.pipeline"]
    flags = ["--seed", str(seed), "--output_dir", str(directory), "--overwrite", "true"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_suffix(".log").open("w") as output:
        command = [*launch, "configs/demo.yaml", *flags]
        subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT, check=True)
    return json.loads((directory / "summary.json").read_text())


def table(summaries: dict[int, dict[str, float]]) -> str:
    """A Markdown table: for each figure the mean ± standard error over seeds, and the value of each seed.

    summaries: by seed. Raises ValueError for fewer than two.
    """
    if len(summaries) < 2:
        raise ValueError(f"seeds: {len(summaries)} given; a standard error needs 2")
    rows = [f"| figure | mean ± standard error | {' | '.join(f'seed {seed}' for seed in summaries)} |"]
    rows.append("|---" * (2 + len(summaries)) + "|")
    for name in next(iter(summaries.values())):
        if not name.endswith(STANDARD_ERROR):
            values = [summary[name] for summary in summaries.values()]
            error = statistics.stdev(values) / math.sqrt(len(values))
            each = " | ".join(f"{value:.4g}" for value in values)
            rows.append(f"| {name} | {statistics.fmean(values):.4g} ± {error:.2g} | {each} |")
    return "\n".join(rows)


def main() -> None:
    """Run the demo with every seed and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output_dir", default="runs", help="directory for the runs' directories")
    args = parser.parse_args()
    print(table({seed: run(seed, Path(args.output_dir) / f"demo_seed{seed}") for seed in args.seeds}))


if __name__ == "__main__":
    main()
