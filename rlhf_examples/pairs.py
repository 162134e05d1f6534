"""Preference pairs from a model's own completions: two for each prompt, ranked by a reward.

Stories of a small pretrained model, on CPUs; a model of 7B on 8 GPUs:
torchrun --nproc_per_node=2 -m rlhf_examples.pairs --model_name_or_path ../shared/models/stories260K \\
    --stop_token_ids 1 2 --reward rlhf_examples.rewards:joyful_story
torchrun --nproc_per_node=8 -m rlhf_examples.pairs --model_name_or_path my-model --data_path prompts.jsonl \\
    --reward my_rewards:prefers --zero_stage 3 --dtype bfloat16
"""

from rlhf_examples.common.arguments import PairsArguments
from rlhf_examples.common.command_line import command

main = command("rlhf_examples.pairs", PairsArguments)
if __name__ == "__main__":
    raise SystemExit(main())  # before the imports below, which take seconds: help and errors come first

import json
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_examples.common.actor import Evaluation
from rlhf_examples.common.engines import load_rollout_engine
from rlhf_examples.common.files import PAIRS, write_atomically
from rlhf_examples.common.models import load_exported, tokenizer_of
from rlhf_examples.common.ranks import barrier, is_main_process
from rlhf_examples.common.rollouts import Row
from rlhf_examples.common.scorers import Rewards
from rlhf_examples.common.trackers import Metrics
from rlhf_examples.data.held_out import load_prompts
from rlhf_examples.data.synthetic import preference_pairs
from rlhf_examples.data.texts import template_columns


def run(args: PairsArguments) -> Metrics:
    """Write pairs.jsonl; returns the number of pairs and of completions. Each of `rounds` passes draws two
    completions of every prompt with seeds of its own.
    """
    tokenizer = tokenizer_of(args, "model_name_or_path")
    examples = load_prompts(tokenizer, args)
    rows, texts = list(examples.rows), [row["prompt"] for row in examples.rows]
    attention: dict[str, Any] = {"attn_implementation": args.attn_implementation}
    rewards = Rewards.load([args.reward], args.dtype, args.per_device_eval_batch_size, **attention)
    engine = load_rollout_engine(
        partial(load_exported, **attention), args.model_name_or_path, args.dtype, args.zero_stage
    )
    pairs = []
    for round_number in range(args.rounds):
        sampled: list[tuple[list, list[float]]] = []
        for sample in range(2):
            evaluate = Evaluation(engine, tokenizer, rows, [rewards], args)
            _, completions, scores = evaluate(2 * round_number + sample)
            sampled.append((completions, scores[rewards.name]))
        (first, first_scores), (second, second_scores) = sampled
        score_of = dict(zip(zip(texts * 2, first + second, strict=True), first_scores + second_scores, strict=True))

        def score(prompts: list[str], completions: list[str], score_of: dict = score_of) -> list[float]:
            return [score_of[key] for key in zip(prompts, completions, strict=True)]

        pairs += preference_pairs(texts, first, second, score)
    row_by_prompt = {row["prompt"]: row for row in rows}
    pairs = [as_record(pair, row_by_prompt[pair["prompt"]]) for pair in pairs]
    engine.destroy()
    rewards.destroy()
    if is_main_process():
        directory = Path(args.output_dir)
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / PAIRS, "".join(json.dumps(pair) + "\n" for pair in pairs))
    barrier()
    return {"pairs": len(pairs), "completions": 2 * args.rounds * len(rows)}


def report(args: PairsArguments, result: Metrics) -> None:
    """Print the numbers of pairs and of completions."""
    print(json.dumps(result))


def as_record(pair: dict[str, str], row: Row) -> dict[str, Any]:
    """A pair of texts as a record of the same form as its prompt's: a conversation keeps its messages, tools and
    settings.

    A conversation is not written as the text of the chat template: read again, its answers would not end with the turn.
    """
    if not row["messages"]:
        return pair
    answers = {name: [{"role": "assistant", "content": pair[name]}] for name in ("chosen", "rejected")}
    return {"prompt": json.loads(row["messages"]), **answers, **template_columns(json.loads(row["columns"]))}
