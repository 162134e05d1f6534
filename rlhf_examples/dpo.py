"""Direct preference optimization: a policy from pairs of completions, without a reward model and without rollouts.

The SFT model of `make demo`, on CPUs; a model of 1B on 8 GPUs:
torchrun --nproc_per_node=2 -m rlhf_examples.dpo --model_name_or_path runs/demo/sft/model
torchrun --nproc_per_node=8 -m rlhf_examples.dpo --model_name_or_path my-sft-model --data_path pairs.jsonl \\
    --dtype bfloat16 --lora_dim 16
"""

from functools import partial

import torch

import hybrid
from rlhf_examples.common.arguments import DPOArguments
from rlhf_examples.common.command_line import run_command
from rlhf_examples.common.engines import FrozenModel, Training, load_frozen_model, make_policy_engine
from rlhf_examples.common.forwards import frozen_logps, token_logps
from rlhf_examples.common.losses import Loss, dpo_loss
from rlhf_examples.common.models import load_policy, load_tokenizer, require_model
from rlhf_examples.common.ranks import device, seed_everything
from rlhf_examples.common.rollouts import Row
from rlhf_examples.common.run_directory import begin_run
from rlhf_examples.common.trackers import Metrics
from rlhf_examples.common.training import fit, total_steps
from rlhf_examples.data.examples import collate_preference
from rlhf_examples.data.held_out import load_examples

EMBEDDED = "synthetic:preferences"
BAR = {"loss": "loss", "accuracy": "rewards/accuracies", "held out": "eval_rewards/accuracies"}


def main() -> None:
    """Train with the arguments of the command line and export the policy."""
    run_command(DPOArguments, run)


def run(args: DPOArguments) -> Metrics:
    """Train and export the policy; returns the last metrics."""
    seed_everything(args.seed)
    require_model("model_name_or_path", args.model_name_or_path, args.attn_implementation)
    tokenizer = load_tokenizer(args.tokenizer_name_or_path or args.model_name_or_path, args.chat_template)
    examples, held_out = load_examples("dpo", EMBEDDED, "preference", args.max_seq_len, tokenizer, args)
    training = Training.from_args(args, "", args.per_device_train_batch_size, total_steps(examples, args))
    begin_run(args)
    load, reference = partial(load_policy, attn_implementation=args.attn_implementation), None
    if not args.lora_dim:
        reference = load_frozen_model(load, args.model_name_or_path, args.dtype, args.offload_reference_model)
    config = training.config(args)
    loading = training.lora, training.gradient_checkpointing
    model = load(args.model_name_or_path, config, *loading, disable_dropout=args.disable_dropout)
    engine = make_policy_engine(model, args, training)

    def loss_of(rows: list[Row], denominator: float) -> Loss:
        """DPO loss of pairs, summed and divided by `denominator`."""
        batch = collate_preference(rows, tokenizer.pad_token_id)
        ids, mask, completions = (
            batch[name].to(device()) for name in ("input_ids", "attention_mask", "completion_mask")
        )
        width, loss_mask = ids.shape[1] - 1, completions[:, 1:]
        ref_logps = reference_logps(engine, reference, ids, mask, args)
        logps, _ = token_logps(engine, ids, mask, width, 1.0, args.logit_chunk, args.padding_free)
        chosen, rejected = (logps * loss_mask).sum(dim=1).chunk(2)
        ref_chosen, ref_rejected = (ref_logps * loss_mask).sum(dim=1).chunk(2)
        return dpo_loss(
            chosen,
            rejected,
            ref_chosen,
            ref_rejected,
            beta=args.beta,
            denominator=denominator,
            label_smoothing=args.label_smoothing,
        )

    metrics = fit(engine, tokenizer, examples, held_out, loss_of, len, args, "DPO", BAR)
    engine.destroy()
    if reference is not None:
        reference.destroy()
    return metrics


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
    width = ids.shape[1] - 1
    if reference is not None:
        return frozen_logps(reference, ids, mask, width, 1.0, args.per_device_train_batch_size)
    with engine.module.disable_adapter():
        return token_logps(engine, ids, mask, width, 1.0, args.logit_chunk, args.padding_free)[0]


if __name__ == "__main__":
    main()
