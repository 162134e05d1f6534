"""Compare models on held-out prompts: completions of the same prompts, drawn with the same sampling keys, and scored.

The demo's policy before and after PPO, on CPUs; two models on 8 GPUs:
torchrun --nproc_per_node=2 -m rlhf_examples.evaluate --model_name_or_path runs/demo/sft/model runs/demo/ppo/model
torchrun --nproc_per_node=8 -m rlhf_examples.evaluate --model_name_or_path one other --data_path prompts.jsonl \\
    --reward my-reward-model --dtype bfloat16
"""

import json
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_examples.common.actor import Evaluation, in_groups, mean_score, standard_error
from rlhf_examples.common.arguments import EvaluateArguments
from rlhf_examples.common.command_line import run_command
from rlhf_examples.common.engines import load_rollout_engine
from rlhf_examples.common.files import printable, write_atomically
from rlhf_examples.common.models import load_exported, load_tokenizer, require_model
from rlhf_examples.common.run_log import to_json_value
from rlhf_examples.common.scorers import Rewards
from rlhf_examples.data.examples import tokenize_records
from rlhf_examples.data.records import load_records
from rlhf_examples.data.texts import RecordFormat


def main() -> None:
    """Evaluate with the arguments of the command line, print the scores and write the output file."""
    run_command(EvaluateArguments, run, report)


def report(args: EvaluateArguments, results: list[dict]) -> None:
    """Print the scores, and write them to `output_file` if it is given."""
    show(results, args.num_samples)
    if args.output_file:
        write_atomically(Path(args.output_file), json.dumps(to_json_value(results), indent=1))


def run(args: EvaluateArguments) -> list[dict]:
    """Evaluate each model. Returns a dict for each: its name, mean score, the standard error of the mean over
    prompts, pass@k shares, and prompts with completions and scores.
    """
    for name in args.model_name_or_path or [""]:
        require_model("model_name_or_path", name, args.attn_implementation)
    tokenizer = load_tokenizer(args.tokenizer_name_or_path or args.model_name_or_path[0], args.chat_template)
    records, record_format = load_records(args.data_path, "test"), RecordFormat.from_args(args)
    examples = tokenize_records(records, tokenizer, "prompt", args.max_prompt_seq_len, record_format=record_format)
    prompts = list(islice(examples.ordered(args.seed), min(args.eval_rows, len(examples.rows))))
    attention: dict[str, Any] = {"attn_implementation": args.attn_implementation}
    rewards = Rewards.load([args.reward], args.dtype, args.per_device_eval_batch_size, **attention)
    results, load = [], partial(load_exported, **attention)
    for name in args.model_name_or_path:
        engine = load_rollout_engine(load, name, args.dtype, args.zero_stage)
        evaluation_settings = args.eval_num_generations, False, tuple(args.pass_at_k), args.pass_score
        evaluate = Evaluation(engine, tokenizer, prompts, [rewards], args, *evaluation_settings)
        metrics, completions, by_scorer = evaluate()
        scores, num_generations = by_scorer[rewards.name], args.eval_num_generations
        engine.destroy()
        texts = [row["prompt"] for row in prompts for _ in range(num_generations)]
        columns = {"prompt": texts, "completion": completions, "score": scores}
        pass_rates = {name.rpartition("/")[2]: rate for name, rate in metrics.items() if "/pass@" in name}
        results.append(
            {
                "model": name,
                rewards.name: mean_score(scores),
                "standard_error": standard_error(in_groups(scores, num_generations)),
                **pass_rates,
                "samples": [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)],
            }
        )
    rewards.destroy()
    return results


def show(results: list[dict], samples: int) -> None:
    """Print the scores, and every model's completions of the first `samples` prompts."""
    console = Console(width=110)
    metrics = [name for name in results[0] if name not in ("model", "samples")]
    scores, texts = Table("model", *metrics), Table("prompt", "model", "completion", show_lines=True)
    for result in results:
        scores.add_row(result["model"], *(f"{result[name]:.4g}" for name in metrics))
    for i in range(min(samples, len(results[0]["samples"]))):
        for result in results:
            sample = result["samples"][i]
            # As Text, because rich would read "[...]" in a completion as markup.
            row = (sample["prompt"], result["model"], sample["completion"])
            texts.add_row(*(Text(printable(text)) for text in row))
    console.print(texts)
    console.print(scores)


if __name__ == "__main__":
    main()
