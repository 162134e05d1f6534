"""Train a reward model on preference pairs, step 2 of RLHF.

The SFT model of `make demo`, on CPUs; a model of 1B on 8 GPUs:
torchrun --nproc_per_node=2 -m rlhf_examples.reward_model --model_name_or_path runs/demo/sft/model
torchrun --nproc_per_node=8 -m rlhf_examples.reward_model --model_name_or_path my-sft-model --data_path pairs.jsonl \\
    --dtype bfloat16
"""

from rlhf_examples.common.arguments import RewardModelArguments
from rlhf_examples.common.command_line import run_command
from rlhf_examples.common.engines import Training, make_engine
from rlhf_examples.common.losses import Loss, last_token_values, pairwise_reward_loss, tokenwise_pairwise_reward_loss
from rlhf_examples.common.models import load_tokenizer, load_value_model, require_model
from rlhf_examples.common.ranks import device, seed_everything
from rlhf_examples.common.rollouts import Row
from rlhf_examples.common.run_directory import begin_run
from rlhf_examples.common.trackers import Metrics
from rlhf_examples.common.training import fit, total_steps
from rlhf_examples.data.examples import collate_preference
from rlhf_examples.data.held_out import load_examples

EMBEDDED = "synthetic:preferences"
BAR = {"loss": "loss", "accuracy": "accuracy", "held out": "eval_accuracy"}


def main() -> None:
    """Train with the arguments of the command line and export the reward model."""
    run_command(RewardModelArguments, run)


def run(args: RewardModelArguments) -> Metrics:
    """Train and export the reward model; returns the last metrics."""
    seed_everything(args.seed)
    require_model("model_name_or_path", args.model_name_or_path, args.attn_implementation)
    tokenizer = load_tokenizer(args.tokenizer_name_or_path or args.model_name_or_path, args.chat_template)
    examples, held_out = load_examples("reward_model", EMBEDDED, "preference", args.max_seq_len, tokenizer, args)
    training = Training.from_args(args, "", args.per_device_train_batch_size, total_steps(examples, args))
    begin_run(args)
    config = training.config(args)
    loading = training.lora, training.gradient_checkpointing, args.disable_dropout, args.attn_implementation
    model = load_value_model(args.model_name_or_path, config, *loading)
    engine = make_engine(model, args, training)

    def loss_of(rows: list[Row], denominator: float) -> Loss:
        """-log σ(chosen - rejected - margin) of pairs, summed and divided by `denominator`."""
        batch = collate_preference(rows, tokenizer.pad_token_id)
        ids, mask, margin = (batch[name].to(device()) for name in ("input_ids", "attention_mask", "margin"))
        values = engine(input_ids=ids, attention_mask=mask).logits[..., 0]  # [2 · pairs, tokens]
        if args.loss_form == "tokenwise":
            (values_a, values_b), (ids_a, ids_b), (mask_a, mask_b) = (part.chunk(2) for part in (values, ids, mask))
            return tokenwise_pairwise_reward_loss(values_a, values_b, ids_a, ids_b, mask_a, mask_b, denominator)
        chosen, rejected = last_token_values(values, mask).chunk(2)
        return pairwise_reward_loss(chosen, rejected, denominator=denominator, margin=margin)

    metrics = fit(engine, tokenizer, examples, held_out, loss_of, len, args, "reward model", BAR)
    engine.destroy()
    return metrics


if __name__ == "__main__":
    main()
