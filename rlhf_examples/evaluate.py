"""Compare models on held-out prompts: completions of the same prompts, drawn with the same sampling keys, and scored.

The demo's policy before and after PPO, on CPUs; two models on 8 GPUs:
torchrun --nproc_per_node=2 -m rlhf_examples.evaluate --model_name_or_path runs/demo/sft/model runs/demo/ppo/model
torchrun --nproc_per_node=8 -m rlhf_examples.evaluate --model_name_or_path one other --data_path prompts.jsonl \\
    --reward my-reward-model --dtype bfloat16

With `--hf_generate true` transformers alone completes the prompts, as the models' users call it.
"""

from rlhf_examples.common.arguments import EvaluateArguments
from rlhf_examples.common.command_line import command

main = command("rlhf_examples.evaluate", EvaluateArguments)
if __name__ == "__main__":
    raise SystemExit(main())  # before the imports below, which take seconds: help and errors come first

import json
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import hybrid
from rlhf_examples.common.actor import Evaluation, in_groups, mean_score, standard_error
from rlhf_examples.common.engines import load_rollout_engine
from rlhf_examples.common.files import printable, write_atomically
from rlhf_examples.common.models import is_reward_model, load_exported, load_tokenizer, require_model
from rlhf_examples.common.ranks import device
from rlhf_examples.common.rollouts import Row
from rlhf_examples.common.run_log import Transcript, to_json_value
from rlhf_examples.common.scorers import Rewards
from rlhf_examples.common.trackers import Metrics
from rlhf_examples.data.examples import reward_columns
from rlhf_examples.data.held_out import load_prompts


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
    if args.hf_generate and is_reward_model(args.reward):
        raise ValueError(f"reward: {args.reward!r} given with hf_generate: true, which needs a function or a server")
    tokenizer = load_tokenizer(args.tokenizer_name_or_path or args.model_name_or_path[0], args.chat_template)
    examples = load_prompts(tokenizer, args, "test")
    prompts = list(islice(examples.ordered(args.seed), min(args.eval_rows, len(examples.rows))))
    attention: dict[str, Any] = {"attn_implementation": args.attn_implementation}
    rewards = Rewards.load([args.reward], args.dtype, args.per_device_eval_batch_size, **attention)
    results, load = [], partial(load_exported, **attention)
    for name in args.model_name_or_path:
        settings = prompts, [rewards], args, args.eval_num_generations, False, tuple(args.pass_at_k), args.pass_score
        if args.hf_generate:
            model, hf_tokenizer = load_as_users(name, args)
            metrics, completions, by_scorer = HFEvaluation(model, hf_tokenizer, *settings)()
        else:
            engine = load_rollout_engine(load, name, args.dtype, args.zero_stage)
            metrics, completions, by_scorer = Evaluation(engine, tokenizer, *settings)()
            engine.destroy()
        scores, num_generations = by_scorer[rewards.name], args.eval_num_generations
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


def run_step(args: EvaluateArguments) -> Metrics:
    """`run` as a pipeline's step: the figures of the first model, and those of the others with the prefix `2/`, …"""
    return {f"{f'{i}/' * (i > 1)}{name}": v for i, result in enumerate(run(args), 1) for name, v in result.items()}


def load_as_users(name: str, args: EvaluateArguments) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer, loaded by transformers alone. An adapter's directory is loaded with its base."""
    attention = {"attn_implementation": args.attn_implementation} if args.attn_implementation else {}
    model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, args.dtype), **attention)
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.to(device()).eval(), tokenizer


@dataclass
class HFEvaluation(Evaluation):
    """An evaluation by `model.generate(**tokenizer(prompt))` alone.  policy: a Hugging Face model."""

    policy: Any

    def scored(
        self, local: list[Row], params: hybrid.SamplingParams
    ) -> tuple[list[Transcript], dict[str, list[float]]]:
        """Completions of this rank's prompts, and their scores."""
        config, size = params.generation_config(self.policy, self.num_generations), self.args.per_device_eval_batch_size
        torch.manual_seed(self.args.seed + dist.get_rank())
        texts: list[str] = []
        for rows in in_groups(local, size):
            ids = [self.tokenizer(row["prompt"], add_special_tokens=not row["messages"])["input_ids"] for row in rows]
            inputs = self.tokenizer.pad({"input_ids": ids}, return_tensors="pt").to(device())
            completions = self.policy.generate(**inputs, generation_config=config)[:, inputs["input_ids"].shape[1] :]
            texts += self.tokenizer.batch_decode(completions, skip_special_tokens=True)
        prompts = [row for row in local for _ in range(self.num_generations)]
        (rewards,) = self.rewards
        return [*texts], rewards.function_scores(prompts, texts, reward_columns(prompts))


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
