"""PPO on a pretrained model over three seeds: the rise of the reward, the KL, and the perplexity of the completions.

    python -m benchmarks.stories --model ../shared/models/stories260K

Prints a table for full fine-tuning and LoRA: the mean score of the first and last five iterations over the seeds, a
run's rise with its standard error over seeds, the KL to the reference, and the reference model's perplexity of the
completions.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

EDGE = 5  # iterations at the beginning and at the end that are compared


def rise(runs: list[list[dict[str, float]]]) -> tuple[float, float]:
    """The rise of the score from a run's first iterations to its last: the mean over runs, and its standard error.

    The iterations of a run are correlated, so a run counts as one sample. Raises ValueError for fewer than two.
    """
    if len(runs) < 2:
        raise ValueError(f"seeds: {len(runs)} given; a standard error needs 2")
    scores = [[row["objective/scores"] for row in rows] for rows in runs]
    rises = [statistics.mean(of_run[-EDGE:]) - statistics.mean(of_run[:EDGE]) for of_run in scores]
    return statistics.mean(rises), statistics.stdev(rises) / math.sqrt(len(rises))


def run(kind: str, model: str, seed: int, directory: Path) -> list[dict[str, float]]:
    """Run PPO on two ranks; returns the metrics of its iterations."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "rlhf_examples.ppo"]
    flags = ["--actor_model_name_or_path", model, "--seed", str(seed), "--output_dir", str(directory)]
    flags += ["--overwrite", "true"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu")}
    log = directory.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        command = [*launch, f"configs/stories_{kind}.yaml", *flags]
        subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT, check=True)
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    """Run every seed and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory of stories260K")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/stories"))
    args = parser.parse_args()
    print(
        f"| training | score, first {EDGE} | score, last {EDGE} | rise ± standard error | KL, last {EDGE}, and most |"
        " reference perplexity, first and last |"
    )
    print("|---|---|---|---|---|---|")
    for kind in ("full", "lora"):
        runs = [run(kind, args.model, seed, args.output_dir / f"{kind}-{seed}") for seed in range(args.seeds)]
        first = [row["objective/scores"] for rows in runs for row in rows[:EDGE]]
        last = [row["objective/scores"] for rows in runs for row in rows[-EDGE:]]
        rises, error = rise(runs)
        kl = [row["objective/kl"] for rows in runs for row in rows[-EDGE:]]
        most = max(row["objective/kl"] for rows in runs for row in rows)
        perplexities = [math.exp(statistics.mean(rows[i]["completions/ref_nll"] for rows in runs)) for i in (0, -1)]
        print(
            f"| {kind} | {statistics.mean(first):.2f} | {statistics.mean(last):.2f} | {rises:.2f} ± {error:.2f} "
            f"| {statistics.mean(kl):.1f}, {most:.1f} nats a sequence | {perplexities[0]:.2f}, {perplexities[1]:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
