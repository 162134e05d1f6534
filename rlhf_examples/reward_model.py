"""Train a reward model on preference pairs, step 2 of RLHF.

The SFT model of `make demo`, on CPUs; a model of 1B on 8 GPUs:
torchrun --nproc_per_node=2 -m rlhf_examples.reward_model --model_name_or_path runs/demo/sft/model
torchrun --nproc_per_node=8 -m rlhf_examples.reward_model --model_name_or_path my-sft-model --data_path pairs.jsonl \\
    --dtype bfloat16
"""

from rlhf_examples.common.arguments import RewardModelArguments
from rlhf_examples.common.command_line import command

main = command("rlhf_examples.reward_model", RewardModelArguments)
if __name__ == "__main__":
    raise SystemExit(main())  # before the imports below, which take seconds: help and errors come first

from rlhf_examples.common.engines import Training, make_value_engine
from rlhf_examples.common.forwards import values_of_tokens
from rlhf_examples.common.losses import Loss, last_token_values, pairwise_reward_loss, tokenwise_pairwise_reward_loss
from rlhf_examples.common.models import load_value_model, tokenizer_of
from rlhf_examples.common.ranks import device
from rlhf_examples.common.rollouts import Row
from rlhf_examples.common.run import Run
from rlhf_examples.common.trackers import Metrics
from rlhf_examples.common.training import fit, total_steps
from rlhf_examples.data.examples import collate_preference
from rlhf_examples.data.held_out import load_examples

EMBEDDED = "synthetic:preferences"
BAR = {"loss": "loss", "accuracy": "accuracy", "held out": "eval_accuracy"}


def run(args: RewardModelArguments) -> Metrics:
    """Train and export the reward model; returns the last metrics."""
    tokenizer = tokenizer_of(args, "model_name_or_path")
    examples, held_out = load_examples("reward_model", EMBEDDED, "preference", args.max_seq_len, tokenizer, args)
    training = Training.from_args(args, "", args.per_device_train_batch_size, total_steps(examples, args))

    def loss_of(rows: list[Row], denominator: float) -> Loss:
        """-log σ(chosen - rejected - margin) of pairs, summed and divided by `denominator`."""
        batch = collate_preference(rows, tokenizer.pad_token_id)
        ids, mask, margin = (batch[name].to(device()) for name in ("input_ids", "attention_mask", "margin"))
        values = values_of_tokens(engine, ids, mask, args.training_forward)  # [2 · pairs, tokens]
        if args.loss_form == "tokenwise":
            (values_a, values_b), (ids_a, ids_b), (mask_a, mask_b) = (part.chunk(2) for part in (values, ids, mask))
            return tokenwise_pairwise_reward_loss(values_a, values_b, ids_a, ids_b, mask_a, mask_b, denominator)
        chosen, rejected = last_token_values(values, mask).chunk(2)
        return pairwise_reward_loss(chosen, rejected, denominator=denominator, margin=margin)

    with Run(args, "reward model", BAR, training.total_steps) as run:
        loading = training.lora, training.gradient_checkpointing, args.disable_dropout, args.attn_implementation
        model = load_value_model(args.model_name_or_path, training.config(args), *loading)
        engine = make_value_engine(model, args, training)
        fit(run, engine, tokenizer, examples, held_out, loss_of, len, args)
    engine.destroy()
    return run.metrics
