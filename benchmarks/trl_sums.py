"""TRL's GRPO and ours on the demo's sums: rewards during training, and exact match on held-out sums.

    python -m benchmarks.trl_sums

For each seed the demo's supervised model is trained once, by configs/demo.yaml. From it start `rlhf_examples.grpo`, on
two ranks, and TRL's GRPOTrainer, in one process and without `hybrid.install()`: the same reward function, prompts and
completions per iteration, optimizer steps, learning rate and schedule, temperature and KL. Both models are then
evaluated by transformers alone, on the same held-out sums. Needs TRL 1.16 (`pip install trl`).
"""

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from datasets import Dataset

from benchmarks import results, tables
from benchmarks.processes import run_example
from rlhf_examples.data.records import load_records
from rlhf_examples.rewards import exact_match

RANKS = 2
STEPS = "sums", "grpo", "exported"  # of the demo: the supervised model, our GRPO, its evaluation
OURS, TRL = "rlhf_examples.grpo", "TRL's GRPOTrainer"


def main() -> None:
    """Run every seed and print the table."""
    args = parse()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    demo = yaml.safe_load(Path("configs/demo.yaml").read_text())
    result = results.begin("trl_sums", args, ranks=RANKS, threads=1)
    runs = [run(seed, demo, args.output_dir / f"seed{seed}") for seed in args.seeds]
    result["ways"] = {way: [each[way] for each in runs] for way in (OURS, TRL)}
    print("\n".join(tables.trl_sums(result)))
    results.write(args.output, result)


def run(seed: int, demo: dict[str, Any], directory: Path) -> dict[str, dict[str, Any]]:
    """Train with both from one supervised model; returns each one's rewards by iteration and held-out exact match."""
    train_ours(seed, demo, directory)
    rows = [json.loads(line) for line in (directory / "grpo" / "metrics.jsonl").read_text().splitlines()]
    done = json.loads((directory / "summary.json").read_text())
    ours = {"rewards": [row["reward"] for row in rows if row["iteration"]], **done}
    theirs = {"rewards": train_trl(seed, demo["steps"]["grpo"], directory / "sums" / "model", directory / "trl")}
    return {OURS: ours, TRL: {**theirs, **evaluated(seed, demo["steps"]["exported"], directory / "trl")}}


def train_ours(seed: int, demo: dict[str, Any], directory: Path) -> None:
    """Run the demo's steps in STEPS."""
    part = {
        **{key: demo[key] for key in ("common", "servers")},
        "steps": {name: demo["steps"][name] for name in STEPS},
        "summary": {"exact_match": "exported/exact_match", "standard_error": "exported/standard_error"},
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "steps.yaml").write_text(yaml.safe_dump(part, sort_keys=False))
    flags = [str(directory / "steps.yaml"), "--seed", str(seed), "--output_dir", str(directory), "--overwrite", "true"]
    run_example("rlhf_examples.pipeline", flags, RANKS, directory / "ours.log")


def train_trl(seed: int, step: dict[str, Any], start: Path, directory: Path) -> list[float]:
    """Train with TRL by the settings of the demo's step, and save the model; returns the mean reward by iteration."""
    import trl  # an optional package

    mini_batches, completions = step["num_mini_batches"], step["num_generations"]
    rows = RANKS * step["per_device_generation_batch_size"] * completions
    records = [json.loads(row["record"]) for row in load_records(step["data_path"])]
    tokenizer = transformers.AutoTokenizer.from_pretrained(start, padding_side="left")
    trainer = trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32),
        reward_funcs=exact_match,
        args=trl.GRPOConfig(
            str(directory),
            per_device_train_batch_size=rows // mini_batches,
            steps_per_generation=mini_batches,
            max_steps=mini_batches * step["num_iterations"],
            num_generations=completions,
            max_completion_length=step["max_answer_seq_len"],
            learning_rate=step["actor_learning_rate"],
            lr_scheduler_type=step.get("lr_scheduler_type", "constant"),
            beta=step.get("beta", 0.0),
            loss_type="dapo",  # the default of both
            temperature=1.0,
            seed=seed,
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=mini_batches,  # an iteration
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{name: record[name] for name in ("prompt", "answer")} for record in records]),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model(str(directory / "model"))
    return [row["reward"] for row in trainer.state.log_history if "reward" in row]


def evaluated(seed: int, step: dict[str, Any], directory: Path) -> dict[str, float]:
    """Evaluate TRL's model as the demo's step evaluates ours; returns the exact match and its standard error."""
    output = directory / "evaluation.json"
    settings = {**step, "model_name_or_path": directory / "model", "output_file": output, "seed": seed}
    flags = [text for name, value in settings.items() if name != "script" for text in (f"--{name}", str(value))]
    run_example("rlhf_examples.evaluate", flags, RANKS, directory / "evaluation.log")
    (figures,) = json.loads(output.read_text())
    return {name: figures[name] for name in ("exact_match", "standard_error")}


def parse() -> argparse.Namespace:
    """The flags."""
    parser = results.parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output_dir", type=Path, default=Path("runs/trl_sums"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
