"""PPO on a pretrained model over three seeds: the rise of the reward, the KL, and the perplexity of the completions.

    python -m benchmarks.stories --model ../shared/models/stories260K

Prints a table for full fine-tuning and LoRA: the mean score of the first and last five iterations over the seeds, a
run's rise with its standard error over seeds, the KL to the reference, and the reference model's perplexity of the
completions.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks import results, tables

RANKS = 2
FIGURES = ("objective/scores", "objective/kl", "completions/ref_nll")  # that the table needs of an iteration


def run(kind: str, model: str, seed: int, directory: Path) -> list[dict[str, float]]:
    """Run PPO on two ranks; returns FIGURES of its iterations."""
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={RANKS}", "-m", "rlhf_examples.ppo"]
    flags = ["--actor_model_name_or_path", model, "--seed", str(seed), "--output_dir", str(directory)]
    flags += ["--overwrite", "true"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu")}
    log = directory.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        command = [*launch, f"configs/stories_{kind}.yaml", *flags]
        subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT, check=True)
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in FIGURES} for row in rows]


def main() -> None:
    """Run every seed and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory of stories260K")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/stories"))
    results.add_output(parser)
    args = parser.parse_args()
    result = results.begin("stories", args, ranks=RANKS, threads=1)
    result["runs"] = {
        kind: [run(kind, args.model, seed, args.output_dir / f"{kind}-{seed}") for seed in range(args.seeds)]
        for kind in ("full", "lora")
    }
    print("\n".join(tables.stories(result)))
    results.write(args.output, result)


if __name__ == "__main__":
    main()
