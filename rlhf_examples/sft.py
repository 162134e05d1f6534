"""Supervised fine-tuning of a language model, step 1 of RLHF.

A small model on synthetic stories, on CPUs; a model of 1B on 8 GPUs:
torchrun --nproc_per_node=2 -m rlhf_examples.sft --num_train_epochs 1
torchrun --nproc_per_node=8 -m rlhf_examples.sft --model_name_or_path my-model --data_path my.jsonl --dtype bfloat16
"""

from rlhf_examples.common.arguments import SFTArguments
from rlhf_examples.common.command_line import command

main = command("rlhf_examples.sft", SFTArguments)
if __name__ == "__main__":
    raise SystemExit(main())  # before the imports below, which take seconds: help and errors come first

from typing import Any

import torch
from transformers import LlamaConfig

from rlhf_examples.common.engines import Training, make_policy_engine
from rlhf_examples.common.losses import Loss, language_model_loss
from rlhf_examples.common.models import load_policy, load_tokenizer, require_attention, small_model, tokenizer_of
from rlhf_examples.common.ranks import device
from rlhf_examples.common.rollouts import Row
from rlhf_examples.common.run import Run
from rlhf_examples.common.trackers import Metrics
from rlhf_examples.common.training import fit, total_steps
from rlhf_examples.data.examples import PackedExamples, collate_supervised
from rlhf_examples.data.held_out import load_examples
from rlhf_examples.data.synthetic import synthetic_tokenizer

EMBEDDED = "synthetic:stories"
BAR = {"loss": "loss", "held out": "eval_loss"}


def run(args: SFTArguments) -> Metrics:
    """Train and export the model; returns the last metrics."""
    if args.model_name_or_path:
        tokenizer = tokenizer_of(args, "model_name_or_path")
    else:
        require_attention(LlamaConfig(), args.attn_implementation)
        name = args.tokenizer_name_or_path
        tokenizer = load_tokenizer(name, args.chat_template) if name else synthetic_tokenizer()
    form = "turns" if args.assistant_only_loss else "supervised"
    examples, held_out = load_examples("sft", EMBEDDED, form, args.max_seq_len, tokenizer, args)
    if args.packing:
        examples = PackedExamples.of(examples, args.max_seq_len)
    training = Training.from_args(args, "", args.per_device_train_batch_size, total_steps(examples, args))

    def collate(rows: list[Row | list[Row]]) -> dict[str, torch.Tensor]:
        """`collate_supervised` for rows, or for packs of rows."""
        flat = [row for pack in rows for row in (pack if isinstance(pack, list) else [pack])]
        return collate_supervised(flat, tokenizer.pad_token_id, args.only_completions)

    def loss_of(rows: list[Any], denominator: float) -> Loss:
        """-log p of the labels, summed over tokens and divided by `denominator`."""
        batch = {name: tensor.to(device()) for name, tensor in collate(rows).items()}
        ids, mask, labels = (batch[name] for name in ("input_ids", "attention_mask", "labels"))
        learned = labels[:, 1:] != -100
        logps = engine.logps(ids, mask, learned, forward=args.training_forward).per_token_logps
        return language_model_loss(logps, learned, denominator)

    def num_loss_tokens(rows: list[Any]) -> int:
        """The number of tokens that `loss_of` sums over."""
        return int((collate(rows)["labels"][:, 1:] != -100).sum())

    with Run(args, "SFT", BAR, training.total_steps) as run:
        if args.model_name_or_path:
            loading = training.config(args), training.lora, training.gradient_checkpointing
            model = load_policy(args.model_name_or_path, *loading, attn_implementation=args.attn_implementation)
        else:
            model = small_model(args.hidden_size, args.num_hidden_layers, tokenizer, args.attn_implementation)
        engine = make_policy_engine(model, args, training)
        fit(run, engine, tokenizer, examples, held_out, loss_of, num_loss_tokens, args)
    engine.destroy()
    return run.metrics
