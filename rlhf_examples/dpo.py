"""Direct preference optimization, KTO and ORPO: a policy from pairs of completions, without a reward model and without
rollouts.

The SFT model of `make demo`, on CPUs; a model of 1B on 8 GPUs:
torchrun --nproc_per_node=2 -m rlhf_examples.dpo --model_name_or_path runs/demo/sft/model
torchrun --nproc_per_node=8 -m rlhf_examples.dpo --model_name_or_path my-sft-model --data_path pairs.jsonl \\
    --dtype bfloat16 --lora_dim 16
"""

from rlhf_examples.common.arguments import DPOArguments
from rlhf_examples.common.command_line import command

main = command("rlhf_examples.dpo", DPOArguments)
if __name__ == "__main__":
    raise SystemExit(main())  # before the imports below, which take seconds: help and errors come first

import torch

import hybrid
from rlhf_examples.common.engines import FrozenModel, Training, load_policy_and_reference
from rlhf_examples.common.losses import Loss
from rlhf_examples.common.models import tokenizer_of
from rlhf_examples.common.preference_losses import dpo_loss, kto_loss, orpo_loss
from rlhf_examples.common.ranks import device, over_ranks
from rlhf_examples.common.rollouts import Row
from rlhf_examples.common.run import Run
from rlhf_examples.common.trackers import Metrics
from rlhf_examples.common.training import fit, total_steps
from rlhf_examples.data.examples import collate_preference
from rlhf_examples.data.held_out import load_examples

EMBEDDED = "synthetic:preferences"
BAR = {"loss": "loss", "accuracy": "rewards/accuracies", "held out": "eval_rewards/accuracies"}


def run(args: DPOArguments) -> Metrics:
    """Train and export the policy; returns the last metrics."""
    tokenizer = tokenizer_of(args, "model_name_or_path")
    examples, held_out = load_examples("dpo", EMBEDDED, "preference", args.max_seq_len, tokenizer, args)
    training = Training.from_args(args, "", args.per_device_train_batch_size, total_steps(examples, args))

    def loss_of(rows: list[Row], denominator: float) -> Loss:
        """The loss of pairs, summed and divided by `denominator`."""
        ids, mask, loss_mask = sequences_of(rows, tokenizer.pad_token_id)
        if args.loss_type == "orpo":
            logps = engine.logps(ids, mask, loss_mask, forward=args.training_forward).per_token_logps
            chosen, rejected = ((logps * loss_mask).sum(dim=1) / loss_mask.sum(dim=1)).chunk(2)
            return orpo_loss(chosen, rejected, beta=args.beta, denominator=denominator)
        kl = mismatched_kl(rows) if args.loss_type == "kto" else None
        ref_logps = reference_logps(engine, reference, ids, mask, args)
        logps = engine.logps(ids, mask, loss_mask, forward=args.training_forward).per_token_logps
        chosen, rejected = (logps * loss_mask).sum(dim=1).chunk(2)
        ref_chosen, ref_rejected = (ref_logps * loss_mask).sum(dim=1).chunk(2)
        if kl is not None:
            return kto_loss(
                chosen,
                rejected,
                ref_chosen,
                ref_rejected,
                kl,
                beta=args.beta,
                denominator=denominator,
                desirable_weight=args.desirable_weight,
                undesirable_weight=args.undesirable_weight,
            )
        return dpo_loss(
            chosen,
            rejected,
            ref_chosen,
            ref_rejected,
            beta=args.beta,
            denominator=denominator,
            label_smoothing=args.label_smoothing,
        )

    @torch.no_grad()
    def mismatched_kl(rows: list[Row]) -> torch.Tensor:
        """KTO's reference point: the mean log ratio of policy and reference, over all ranks, of completions that belong
        to the next prompt; at least 0. float32 scalar
        """
        ids, mask, loss_mask = sequences_of(mismatched(rows, args.max_seq_len), tokenizer.pad_token_id)
        ref_logps = reference_logps(engine, reference, ids, mask, args)
        logps = engine.logps(ids, mask, loss_mask, forward=args.training_forward).per_token_logps
        total = ((logps - ref_logps) * loss_mask).sum()
        total, count = over_ranks(torch.stack([total, total.new_tensor(len(ids))]))
        return (total / count).clamp(min=0)

    with Run(args, "DPO", BAR, training.total_steps) as run:
        needs_reference = args.loss_type != "orpo"
        engine, reference = load_policy_and_reference(args.model_name_or_path, args, training, needs_reference)
        fit(run, engine, tokenizer, examples, held_out, loss_of, len, args)
    engine.destroy()
    if reference is not None:
        reference.destroy()
    return run.metrics


def sequences_of(rows: list[Row], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids and mask of the chosen sequences, then of the rejected ones, int64 [2 · rows, tokens], and the mask of the
    completions' tokens [2 · rows, tokens - 1].
    """
    batch = collate_preference(rows, pad_token_id)
    ids, mask, completions = (batch[name].to(device()) for name in ("input_ids", "attention_mask", "completion_mask"))
    return ids, mask, completions[:, 1:]


def mismatched(rows: list[Row], max_seq_len: int) -> list[Row]:
    """The rows with the completions of the row before, cut to `max_seq_len` with the prompt; at least a token stays."""
    pairs = zip(rows, [rows[-1], *rows[:-1]], strict=True)
    names = ("chosen_ids", "rejected_ids")
    return [
        {**row, **{name: other[name][: max(max_seq_len - len(row["prompt_ids"]), 1)] for name in names}}
        for row, other in pairs
    ]


@torch.no_grad()
def reference_logps(
    engine: hybrid.HybridEngine,
    reference: FrozenModel | None,
    ids: torch.Tensor,
    mask: torch.Tensor,
    args: DPOArguments,
) -> torch.Tensor:
    """Logprobs of every token but the first under the reference: a frozen model, or the policy without its adapter.

    ids, mask int64 [rows, tokens]; returns float32 [rows, tokens - 1].
    """
    if reference is not None:
        return reference.score(ids, mask, rows_per_forward=args.per_device_train_batch_size).per_token_logps
    if args.training_forward == "exact":  # the kernels' values, as the policy's are
        return engine.score(ids, mask, adapters=False).per_token_logps
    with engine.module.disable_adapter():
        return engine.logps(ids, mask, forward=args.training_forward).per_token_logps
