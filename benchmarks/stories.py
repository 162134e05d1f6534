"""PPO on a pretrained model over three seeds: the rise of the reward, the KL, and the perplexity of the completions.

    python -m benchmarks.stories --model ../shared/models/stories260K

Prints a table for full fine-tuning and LoRA: the mean score of the first and last five iterations over the seeds, a
run's rise with its standard error over seeds, the KL to the reference, and the reference model's perplexity of the
completions.
"""

import json
from pathlib import Path

from benchmarks import results, tables
from benchmarks.processes import run_example

RANKS = 2
FIGURES = ("objective/scores", "objective/kl", "completions/ref_nll")  # that the table needs of an iteration


def run(kind: str, model: str, seed: int, directory: Path) -> list[dict[str, float]]:
    """Run PPO on two ranks; returns FIGURES of its iterations."""
    flags = [f"configs/stories_{kind}.yaml", "--actor_model_name_or_path", model, "--seed", str(seed)]
    flags += ["--output_dir", str(directory), "--overwrite", "true"]
    run_example("rlhf_examples.ppo", flags, RANKS, directory.with_suffix(".log"))
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in FIGURES} for row in rows if row["iteration"]]


def main() -> None:
    """Run every seed and print the table."""
    parser = results.parser(__doc__, seeds=3)
    parser.add_argument("--model", required=True, help="directory of stories260K")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/stories"))
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
