"""Supervised fine-tuning of a language model, step 1 of RLHF.

A small model on synthetic stories, on CPUs; a model of 1B on 8 GPUs:
torchrun --nproc_per_node=2 -m rlhf_examples.sft --num_train_epochs 1
torchrun --nproc_per_node=8 -m rlhf_examples.sft --model_name_or_path my-model --data_path my.jsonl --dtype bfloat16
"""

from typing import Any

import torch
from transformers import LlamaConfig

from rlhf_examples.common.arguments import SFTArguments
from rlhf_examples.common.command_line import run_command
from rlhf_examples.common.engines import Training, make_policy_engine
from rlhf_examples.common.forwards import token_logps
from rlhf_examples.common.losses import Loss, language_model_loss
from rlhf_examples.common.models import load_policy, load_tokenizer, require_attention, require_model, small_model
from rlhf_examples.common.ranks import device, seed_everything
from rlhf_examples.common.rollouts import Row
from rlhf_examples.common.run_directory import begin_run
from rlhf_examples.common.trackers import Metrics
from rlhf_examples.common.training import fit, total_steps
from rlhf_examples.data.examples import PackedExamples, collate_supervised
from rlhf_examples.data.held_out import load_examples
from rlhf_examples.data.synthetic import synthetic_tokenizer

EMBEDDED = "synthetic:stories"
BAR = {"loss": "loss", "held out": "eval_loss"}


def main() -> None:
    """Train with the arguments of the command line and export the model."""
    run_command(SFTArguments, run)


def run(args: SFTArguments) -> Metrics:
    """Train and export the model; returns the last metrics."""
    seed_everything(args.seed)
    if args.model_name_or_path:
        require_model("model_name_or_path", args.model_name_or_path, args.attn_implementation)
    else:
        require_attention(LlamaConfig(), args.attn_implementation)
    tokenizer_name = args.tokenizer_name_or_path or args.model_name_or_path
    tokenizer = load_tokenizer(tokenizer_name, args.chat_template) if tokenizer_name else synthetic_tokenizer()
    form = "turns" if args.assistant_only_loss else "supervised"
    examples, held_out = load_examples("sft", EMBEDDED, form, args.max_seq_len, tokenizer, args)
    if args.packing:
        examples = PackedExamples.of(examples, args.max_seq_len)
    training = Training.from_args(args, "", args.per_device_train_batch_size, total_steps(examples, args))
    begin_run(args)
    if args.model_name_or_path:
        loading = training.config(args), training.lora, training.gradient_checkpointing
        model = load_policy(args.model_name_or_path, *loading, attn_implementation=args.attn_implementation)
    else:
        model = small_model(args.hidden_size, args.num_hidden_layers, tokenizer, args.attn_implementation)
    engine = make_policy_engine(model, args, training)

    def collate(rows: list[Row | list[Row]]) -> dict[str, torch.Tensor]:
        """`collate_supervised` for rows, or for packs of rows."""
        flat = [row for pack in rows for row in (pack if isinstance(pack, list) else [pack])]
        return collate_supervised(flat, tokenizer.pad_token_id, args.only_completions)

    def loss_of(rows: list[Any], denominator: float) -> Loss:
        """-log p of the labels, summed over tokens and divided by `denominator`."""
        batch = {name: tensor.to(device()) for name, tensor in collate(rows).items()}
        ids, mask, labels = (batch[name] for name in ("input_ids", "attention_mask", "labels"))
        forward = (1.0, args.logit_chunk, args.padding_free)
        logps, _ = token_logps(engine, ids, mask, ids.shape[1] - 1, *forward)
        return language_model_loss(logps, labels[:, 1:] != -100, denominator)

    def num_loss_tokens(rows: list[Any]) -> int:
        """The number of tokens that `loss_of` sums over."""
        return int((collate(rows)["labels"][:, 1:] != -100).sum())

    metrics = fit(engine, tokenizer, examples, held_out, loss_of, num_loss_tokens, args, "SFT", BAR)
    engine.destroy()
    return metrics


if __name__ == "__main__":
    main()
