"""A script's training examples, held-out rows and prompts."""

import warnings
from itertools import islice
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from rlhf_examples.common.arguments import RunArguments
from rlhf_examples.data.examples import Examples, tokenize_records
from rlhf_examples.data.records import Rows, load_records, share
from rlhf_examples.data.texts import RecordFormat

SHARE_OF_STEP = {
    "sft": 0,
    "reward_model": 1,
    "dpo": 1,
    "ppo": 2,
    "grpo": 2,
    "distill": 2,
}  # index of the share in data_split


def load_examples(
    step: str, embedded: str, form: str, max_length: int, tokenizer: PreTrainedTokenizerBase, args: RunArguments
) -> tuple[Examples, list[dict[str, Any]]]:
    """The training examples of a step, and at most `eval_rows` held-out rows; none if `eval_fraction` is 0 and there is
    no `eval_data_path`.

    step: a key of SHARE_OF_STEP.  embedded: the synthetic set for an empty `data_path`.  form, max_length: as in
        `tokenize_records`.
    Rank 0 prints which records were left out, and why. Raises ValueError if there are no records to train on, or none
    to evaluate on.
    """
    embedded_names = ([f"{embedded}@train"], [f"{embedded}@test"])
    names, eval_names = (args.data_path, args.eval_data_path) if args.data_path else embedded_names
    records = load_records(names, streaming=args.streaming, cache_dir=args.data_output_path or None)
    if args.data_split:
        records = share(records, args.data_split, SHARE_OF_STEP[step], args.seed)
    if eval_names:
        held_out = load_records(eval_names, "test", streaming=args.streaming, cache_dir=args.data_output_path or None)
    else:
        records, held_out = held_out_share(records, args)
    cache_dir, record_format = args.data_output_path or None, RecordFormat.from_args(args)
    train, *evaluated = (
        tokenize_records(rows, tokenizer, form, max_length, cache_dir, record_format=record_format)
        for rows in (records, held_out)
        if rows is not None
    )
    rows = [row for examples in evaluated for row in first_rows(examples, args)]
    for examples in (train, *evaluated):
        if dist.get_rank() == 0 and examples.skipped.counts:
            print(examples.skipped)
    if not args.streaming:
        warn_if_larger(rows, len(train))
    return train, rows


def load_prompts(tokenizer: PreTrainedTokenizerBase, args: Any, split: str = "train") -> Examples:
    """The prompts of a script in which a frozen model completes them.  args: GenerationArguments with `data_path`."""
    records, record_format = load_records(args.data_path, split), RecordFormat.from_args(args)
    return tokenize_records(records, tokenizer, "prompt", args.max_prompt_seq_len, record_format=record_format)


def warn_if_larger(held_out: list[dict[str, Any]], num_examples: int) -> None:
    """Warn on rank 0 if an evaluation has more rows than there are training examples."""
    if dist.get_rank() == 0 and len(held_out) > num_examples:
        warnings.warn(
            f"an evaluation has {len(held_out)} rows, and there are {num_examples} training examples; give a smaller "
            "eval_rows, or more data_path",
            stacklevel=3,
        )


def held_out_share(records: Rows, args: RunArguments) -> tuple[Rows, Rows | None]:
    """Training records, and a share of `eval_fraction` for evaluation, None if that is 0.

    Raises ValueError if one of the two would be empty.
    """
    if not args.eval_fraction:
        return records, None
    weights = f"{1 - args.eval_fraction},{args.eval_fraction}"
    try:
        first, second = (share(records, weights, part, args.seed, purpose="held out ") for part in (0, 1))
        return first, second
    except ValueError as error:
        raise ValueError(
            f"eval_fraction: {args.eval_fraction} of {len(records)} records leaves none for training or none for "
            "evaluation; give another fraction, an eval_data_path, or 0 to hold none out"
        ) from error


def first_rows(examples: Examples, args: RunArguments) -> list[dict[str, Any]]:
    """At most `eval_rows` rows, in the seed's order."""
    count = args.eval_rows if args.streaming else min(args.eval_rows, len(examples.rows))
    return list(islice(examples.ordered(args.seed), count))
