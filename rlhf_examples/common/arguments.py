"""The arguments of every script: a YAML file, and flags that override it.

Names are DeepSpeed-Chat's if the meaning is the same, and TRL's for algorithms.
"""

# ruff: noqa: RUF009 - `arg` and `list_arg` return dataclass fields

import difflib
import json
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import yaml
from transformers import HfArgumentParser

from rlhf_examples.common.losses import IMPORTANCE_SAMPLING_MODES, LOSS_TYPES, require_choice
from rlhf_examples.common.trackers import check_report_to
from rlhf_examples.data.texts import RecordFormat

Arguments = TypeVar("Arguments")
ATTENTION = "transformers' attention implementation: eager, sdpa, flash_attention_2, …; empty: its default"
# Arguments of GRPO that are about prompts and rewards of data sets.
NOT_OF_ENVIRONMENTS = (
    "reward",
    "reward_weights",
    "eval_reward",
    "data_path",
    "eval_data_path",
    "data_split",
    "streaming",
    "dynamic_sampling",
    "soft_punish_cache",
    "overlap_rewards",
    "partial_rollout",
    "over_sampling_batch_size",
)
NO_DROPOUT = "disable dropout in training, so that logprobs and scores do not depend on it"


def arg(default: Any, text: str) -> Any:
    """A field with its help text."""
    return field(default=default, metadata={"help": text})


def list_arg(default: list, text: str) -> Any:
    """A list field with its help text."""
    return field(default_factory=default.copy, metadata={"help": text})


@dataclass
class DataArguments:
    """Arguments of every script that reads records: how records are read as texts."""

    chat_template: str = arg("", "file with a Jinja chat template; empty: the tokenizer's own")
    prompt_column: str = arg("prompt", "column of prompts, texts or conversations")
    completion_column: str = arg("completion", "column of completions")
    chosen_column: str = arg("chosen", "column of the preferred completions")
    rejected_column: str = arg("rejected", "column of the rejected completions")
    messages_column: str = arg("messages", "column of whole conversations")
    text_column: str = arg("text", "column of texts without a prompt")
    margin_column: str = arg("margin", "column of margins between the rewards of a pair (loss_form last)")
    input_template: str = arg("", 'template for text prompts, such as "Question: {}\\nAnswer:"; empty: none')

    chat_template_kwargs: str = arg(
        "", 'JSON object of arguments for the chat template, such as {"enable_thinking": false}'
    )

    def __post_init__(self) -> None:
        RecordFormat.from_args(self)  # raises ValueError for an invalid format


@dataclass
class RunArguments(DataArguments):
    """Arguments of every script that trains."""

    output_dir: str = arg("runs/run", "directory for logs, checkpoints and trained models")
    seed: int = arg(0, "seed of data order, dropout and sampling")
    dtype: str = arg("float32", "float32 or bfloat16")
    attn_implementation: str = arg("", ATTENTION)
    tokenizer_name_or_path: str = arg("", "directory or hub name; empty: the model's")
    data_path: list[str] = list_arg([], "hub names, files or synthetic:… sets; empty: the script's synthetic set")
    data_split: str = arg("", 'shares of the records for SFT, reward model and RL, such as "2,4,4"; empty: all records')
    data_output_path: str = arg("", "cache directory for tokenized records; empty: that of datasets")
    streaming: bool = arg(False, "read records as they are needed, without counting or caching them")
    eval_data_path: list[str] = list_arg([], "held-out records; empty: eval_fraction of data_path")
    eval_fraction: float = arg(0.05, "fraction of the records that is held out; 0: none")
    eval_every: int = arg(0, "iterations between evaluations; 0: evaluate only at the end")
    eval_rows: int = arg(256, "maximum number of held-out records in an evaluation")

    offload: bool = arg(False, "keep optimizer states, and under ZeRO-3 parameters, in host memory")
    stage3_param_persistence_threshold: int = arg(0, "parameters with fewer elements are not partitioned under ZeRO-3")
    max_grad_norm: float = arg(1.0, "maximum gradient norm, for clipping")
    lora_alpha: int = arg(16, "LoRA alpha")
    lora_dropout: float = arg(0.0, "LoRA dropout probability")
    lora_export: str = arg(
        "merged", "how a LoRA model is exported: merged (a whole model) or adapter (PEFT's files only)"
    )
    enable_ema: bool = arg(
        False, "keep an exponential moving average of the trained weights, and export it as model_ema"
    )
    ema_beta: float = arg(0.992, "decay of the moving average")
    logit_chunk: int = arg(1024, "tokens whose logits are in memory at once in training; 0: all of a forward")

    padding_free: bool = arg(False, "pack rows without padding in training forwards; only for decoders with RoPE")

    metric_for_best_model: str = arg(
        "", "evaluation metric, such as eval_loss, whose best checkpoint is kept; empty: none"
    )
    greater_is_better: bool | None = arg(
        None, "whether a higher metric is better; not given: true unless its name ends with loss"
    )
    load_best_model_at_end: bool = arg(False, "export the best model at the end instead of the last")
    early_stopping_patience: int = arg(0, "evaluations in a row without improvement after which training stops; 0: off")
    early_stopping_threshold: float = arg(0.0, "minimum improvement that resets the patience")

    save_every: int = arg(
        0, "iterations between checkpoints; 0: save only the best, if there is a metric_for_best_model"
    )
    keep_last: int = arg(2, "number of checkpoints kept, in addition to the best")
    resume: bool = arg(False, "resume from the latest checkpoint in output_dir")
    overwrite: bool = arg(
        False, "delete the run in output_dir; without overwrite or resume an existing run is an error"
    )
    peak_tflops: float = arg(0.0, "peak TFLOP/s of a device in dtype, for time/mfu; 0: look the device up")
    print_every: int = arg(10, "iterations between tables of metrics in the terminal; 0: none")
    report_to: list[str] = list_arg(["tensorboard"], "tensorboard, trackio, wandb; metrics.jsonl is always written")

    def __post_init__(self) -> None:
        check_report_to(self.report_to)
        require_choices(
            self,
            dtype=("float32", "bfloat16"),
            lora_export=("merged", "adapter"),
        )
        require_attention_of_dtype(self)
        require_resume_or_overwrite(self)
        if self.eval_fraction == 1:
            raise ValueError("eval_fraction: 1 given, which leaves no records to train on; it must be below 1")
        if self.padding_free and not self.logit_chunk:
            raise ValueError("padding_free: true given with logit_chunk: 0; give a logit_chunk")
        require_range(
            self,
            eval_fraction=(0, 1),
            eval_rows=(0, None),
            ema_beta=(0, 1),
            lora_dropout=(0, 1),
            logit_chunk=(0, None),
            keep_last=(1, None),
            save_every=(0, None),
            eval_every=(0, None),
            early_stopping_patience=(0, None),
            early_stopping_threshold=(0, None),
        )
        require_best_model(self)


@dataclass
class TrainArguments(RunArguments):
    """Arguments of a script that trains one model on records: DeepSpeed-Chat's steps 1 and 2."""

    model_name_or_path: str = arg("", "directory or hub name; empty: a new small Llama")
    hidden_size: int = arg(256, "of the small Llama")
    num_hidden_layers: int = arg(4, "of the small Llama")
    max_seq_len: int = arg(512, "maximum sequence length in tokens; longer records are left out and counted")

    per_device_train_batch_size: int = arg(16, "records per rank in a forward and backward")
    per_device_eval_batch_size: int = arg(16, "records per rank in a forward of an evaluation")
    gradient_accumulation_steps: int = arg(1, "forwards and backwards per optimizer step")
    num_train_epochs: float = arg(1.0, "passes over the data")
    max_steps: int = arg(0, "optimizer steps; 0: num_train_epochs decides")
    learning_rate: float = arg(1e-4, "peak learning rate")
    weight_decay: float = arg(0.0, "AdamW's weight decay")
    lr_scheduler_type: str = arg("linear", "one of transformers' schedules: linear, cosine, constant, …")
    num_warmup_steps: int = arg(0, "warm-up steps of the learning rate")
    zero_stage: int = arg(3, "ZeRO stage, 0 to 3")
    gradient_checkpointing: bool = arg(False, "recompute activations in the backward")
    lora_dim: int = arg(0, "rank of a PEFT LoRA; 0: full fine-tuning")
    lora_module_name: str = arg("all-linear", "PEFT's target_modules: all-linear, or names separated by commas")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choices(self, zero_stage=(0, 1, 2, 3))
        require_range(
            self,
            per_device_train_batch_size=(1, None),
            gradient_accumulation_steps=(1, None),
            max_seq_len=(2, None),
        )


@dataclass
class SFTArguments(TrainArguments):
    """Supervised fine-tuning."""

    output_dir: str = arg("runs/sft", "directory for logs, checkpoints and the trained model")
    only_completions: bool = arg(False, "compute the loss on completions only, if records have prompts")
    assistant_only_loss: bool = arg(False, "compute the loss on the assistant's turns only")
    packing: bool = arg(
        False, "pack several records into a sequence of max_seq_len tokens, without attention between them"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packing and (self.streaming or not self.padding_free):
            raise ValueError(
                f"packing: true given with padding_free: {self.padding_free} and streaming: {self.streaming}; it needs "
                "padding_free: true, which separates the records, and streaming: false, because it sorts them by length"
            )


@dataclass
class RewardModelArguments(TrainArguments):
    """A reward model from preference pairs."""

    output_dir: str = arg("runs/reward_model", "directory for logs, checkpoints and the trained model")
    disable_dropout: bool = arg(True, NO_DROPOUT)
    loss_form: str = arg(
        "last", "pairwise loss of the last tokens' scores (last), or DeepSpeed-Chat's over all tokens (tokenwise)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choices(self, loss_form=("last", "tokenwise"))


@dataclass
class DPOArguments(TrainArguments):
    """Direct preference optimization."""

    output_dir: str = arg("runs/dpo", "directory for logs, checkpoints and the trained model")
    disable_dropout: bool = arg(True, NO_DROPOUT)
    beta: float = arg(0.1, "weight of the KL to the reference in DPO's objective")
    label_smoothing: float = arg(0.0, "assumed probability that a pair's labels are swapped")
    offload_reference_model: bool = arg(False, "partition the reference by ZeRO-3 in host memory")


@dataclass
class RolloutArguments(RunArguments):
    """Arguments of a script that trains a policy on its own completions."""

    actor_model_name_or_path: str = arg("", "directory or hub name of the policy")
    disable_dropout: bool = arg(True, NO_DROPOUT)
    reward: list[str] = list_arg(
        [],
        "reward functions (module:function), addresses of reward servers, or reward models",
    )
    reward_weights: list[float] = list_arg([], "weight of each reward in their sum; empty: 1 for each")
    reward_timeout_s: float = arg(60.0, "timeout of an attempt of an async reward function or a server, in seconds")
    reward_retries: int = arg(2, "retries after a failed attempt")
    overlap_rewards: bool = arg(
        True,
        "run reward functions in a thread while other completions decode, with all completions of a prompt in a call; "
        "false: with the whole rollout, after it, for functions that compare completions of different prompts",
    )
    eval_reward: list[str] = list_arg([], "as reward, but only for held-out completions in evaluations")
    stop_token_ids: list[int] = list_arg([], "end tokens in addition to the model's own")
    max_prompt_seq_len: int = arg(256, "maximum prompt length in tokens; longer prompts are left out and counted")
    max_answer_seq_len: int = arg(32, "maximum completion length in tokens")
    temperature: float = arg(1.0, "temperature of sampling and of all logprobs")
    top_p: float = arg(1.0, "nucleus sampling; 1: off")
    top_k: int = arg(0, "number of most probable tokens to sample from; 0: off")

    num_iterations: int = arg(20, "iterations, each a rollout and the updates on it")
    per_device_generation_batch_size: int = arg(16, "prompts per rank in an iteration")
    per_device_training_batch_size: int = arg(8, "sequences per rank in a forward and backward")
    max_tokens_per_batch: int = arg(
        0, "maximum tokens per rank in a forward and backward, balanced; 0: count sequences instead"
    )
    num_mini_batches: int = arg(1, "optimizer steps per pass over a rollout")
    logprob_mode: str = arg(
        "recompute", "old logprobs: recomputed by a forward (recompute), or the sampler's (sampling)"
    )
    numerics_control_rows: int = arg(
        2, "rows of the first mini batch on which the trainer's logprobs are compared with those of single rows; 0: off"
    )
    importance_sampling_correction: bool = arg(
        False, "weight the loss by the probability ratio of trainer and sampler; old logprobs are the trainer's"
    )
    importance_sampling_mode: str = arg(
        "token_truncate",
        "a ratio per token (token_…) or per completion (sequence_…); outside the bounds clipped (…_truncate) or set "
        "to 0 (…_mask)",
    )
    importance_sampling_clip_max: float = arg(2.0, "upper bound of these ratios")
    importance_sampling_clip_min: float = arg(0.0, "lower bound of these ratios")

    actor_learning_rate: float = arg(1e-4, "peak learning rate of the policy")
    actor_weight_decay: float = arg(0.0, "AdamW's weight decay")
    lr_scheduler_type: str = arg("constant", "one of transformers' schedules: linear, cosine, constant, …")
    num_warmup_steps: int = arg(0, "warm-up steps of the learning rate")
    actor_zero_stage: int = arg(3, "ZeRO stage of the policy, 0 to 3")
    actor_gradient_checkpointing: bool = arg(False, "recompute activations in the backward")
    actor_lora_dim: int = arg(0, "rank of a PEFT LoRA; 0: full fine-tuning")
    actor_lora_module_name: str = arg("all-linear", "PEFT's target_modules: all-linear, or names separated by commas")
    offload_reference_model: bool = arg(False, "partition the reference and the reward models by ZeRO-3 in host memory")

    enable_hybrid_engine: bool = arg(True, "false: rollouts run the model's own forward")
    inference_tp_size: int = arg(1, "tensor parallel size of rollouts")
    tp_gather_partition_size: int = arg(8, "layers gathered at a time")
    unpin_actor_parameters: bool = arg(False, "gather layer by layer in rollouts, without keeping a copy")
    release_inference_cache: bool = arg(False, "free the KV cache for training")
    unmerged_lora: bool = arg(False, "run LoRA adapters unmerged in rollouts, without a merged copy")
    rollout_weight_dtype: str = arg(
        "model",
        "weights of rollouts: the model's dtype (model), or quantized at every version (int8), which needs "
        "importance_sampling_correction",
    )

    num_samples: int = arg(4, "prompts whose completions before and after training are shown")
    eval_greedy: bool = arg(False, "greedy decoding of held-out completions")
    eval_num_generations: int = arg(1, "completions per held-out prompt")
    pass_at_k: list[int] = list_arg([], "values of k for pass@k on held-out prompts")
    pass_score: float = arg(1.0, "minimum score of a completion that passes")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward_weights and len(self.reward_weights) != len(self.reward):
            raise ValueError(
                f"reward_weights: {self.reward_weights} given for {len(self.reward)} rewards; give a weight for each"
            )
        require_choices(
            self,
            actor_zero_stage=(0, 1, 2, 3),
            logprob_mode=("recompute", "sampling"),
            rollout_weight_dtype=("model", "int8"),
            importance_sampling_mode=IMPORTANCE_SAMPLING_MODES,
        )
        require_range(
            self,
            numerics_control_rows=(0, None),
            per_device_generation_batch_size=(1, None),
            per_device_training_batch_size=(1, None),
            max_tokens_per_batch=(0, None),
            num_mini_batches=(1, None),
            importance_sampling_clip_max=(1, None),
            importance_sampling_clip_min=(0, 1),
            max_answer_seq_len=(1, None),
            reward_timeout_s=(0.001, None),
            reward_retries=(0, None),
        )
        require_pass_at_k(self)
        if self.rollout_weight_dtype == "int8" and not self.importance_sampling_correction:
            raise ValueError(
                "rollout_weight_dtype: 'int8' given with importance_sampling_correction: false; the sampler is then "
                "another policy than the trainer's, and the loss must be weighted by their ratio: use true, or 'model'"
            )
        if self.importance_sampling_correction and self.logprob_mode == "sampling":
            raise ValueError(
                "importance_sampling_correction: true given with logprob_mode: 'sampling', where the old logprobs are "
                "the sampler's and every ratio would be 1; use logprob_mode: 'recompute'"
            )


@dataclass
class PPOArguments(RolloutArguments):
    """Proximal policy optimization: DeepSpeed-Chat's step 3."""

    output_dir: str = arg("runs/ppo", "directory for logs, checkpoints and the trained policy")
    critic_model_name_or_path: str = arg(
        "", "the reward model, which also initializes the critic; empty: the policy initializes it"
    )
    ppo_epochs: int = arg(1, "passes over a rollout")
    critic_learning_rate: float = arg(3e-4, "peak learning rate of the critic")
    critic_weight_decay: float = arg(0.0, "AdamW's weight decay")
    critic_zero_stage: int = arg(3, "ZeRO stage of the critic, 0 to 3")
    critic_gradient_checkpointing: bool = arg(False, "recompute activations in the backward")
    critic_lora_dim: int = arg(0, "rank of a PEFT LoRA; 0: full fine-tuning")
    critic_lora_module_name: str = arg("all-linear", "PEFT's target_modules: all-linear, or names separated by commas")

    kl_ctl: float = arg(0.1, "KL coefficient: weight of the KL to the reference in the reward")
    adap_kl_ctrl: bool = arg(False, "adapt the KL coefficient so that the KL approaches kl_target")
    kl_target: float = arg(6.0, "target KL of the adaptive controller, in nats per sequence")
    kl_horizon: int = arg(10000, "horizon of the adaptive controller, in sequences")
    early_stop_kl: float = arg(0.0, "end an update after a mini batch whose approxkl is above this; 0: off")
    clip_reward: float = arg(5.0, "scores are clipped to ± this")
    cliprange: float = arg(0.2, "clip range of the ratio")
    cliprange_value: float = arg(0.2, "clip range of the value around the old value")
    gamma: float = arg(1.0, "discount factor")
    lam: float = arg(0.95, "lambda of GAE")
    entropy_coef: float = arg(0.0, "weight of the entropy bonus")
    whiten_rewards: bool = arg(False, "scale rewards to variance 1")
    missing_eos_penalty: float = arg(0.0, "subtracted from the score of a completion without an end token")
    unsupervised_data_path: list[str] = list_arg([], "pretraining texts for the ptx loss; empty: none")
    unsup_coef: float = arg(27.8, "weight of the ptx loss")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choices(self, critic_zero_stage=(0, 1, 2, 3))
        require_range(self, ppo_epochs=(1, None))


@dataclass
class GRPOArguments(RolloutArguments):
    """Group relative policy optimization and its variants, with verifiable rewards."""

    output_dir: str = arg("runs/grpo", "directory for logs, checkpoints and the trained policy")
    num_generations: int = arg(8, "completions per prompt")
    num_grpo_iterations: int = arg(1, "passes over a rollout")
    loss_type: str = arg("dapo", "normalization of the sum over tokens: grpo, dr_grpo, dapo or bnpo")
    scale_rewards: str = arg(
        "group", "divide advantages by the standard deviation of the group or the batch, or by none"
    )
    advantages: str = arg("group", "baseline: the group's mean (group), or the mean of the other completions (rloo)")
    epsilon: float = arg(0.2, "clip range of the ratio")
    epsilon_high: float = arg(0.0, "upper clip range of the ratio (DAPO's clip-higher); 0: as epsilon")
    delta: float = arg(0.0, "upper bound of the unclipped ratio (INTELLECT-2's two-sided clipping); 0: off")
    importance_sampling_level: str = arg("token", "ratios per token (token) or per sequence (sequence, GSPO)")
    beta: float = arg(
        0.0, "KL coefficient: weight of the KL to the reference (k3) in the loss; 0: no reference is loaded"
    )
    use_bias_correction_kl: bool = arg(True, "multiply that KL by the ratio, so that its gradient is that of the KL")
    entropy_coef: float = arg(0.0, "weight of the entropy bonus, a mean over tokens")
    dynamic_sampling: bool = arg(
        False, "drop groups whose rewards are all equal, and roll out the next prompts instead (DAPO)"
    )
    max_num_gen_batches: int = arg(10, "maximum rollouts per iteration with dynamic_sampling")
    partial_rollout: bool = arg(
        False,
        "end a rollout once enough groups are done; the other completions go on in the next one, under its weights "
        "(needs importance_sampling_correction)",
    )
    over_sampling_batch_size: int = arg(
        0, "prompts per rank in flight with partial_rollout; 0: half as many again as per_device_generation_batch_size"
    )
    mask_truncated_completions: bool = arg(False, "mask completions without an end token out of the loss")
    soft_punish_cache: int = arg(
        0,
        "last tokens of max_answer_seq_len over which a length penalty rises to 1 (DAPO's overlong punishment); 0: off",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choices(
            self,
            loss_type=LOSS_TYPES,
            scale_rewards=("group", "batch", "none"),
            advantages=("group", "rloo"),
            importance_sampling_level=("token", "sequence"),
        )
        require_range(
            self,
            num_generations=(2, None),
            num_grpo_iterations=(1, None),
            delta=(0, None),
            max_num_gen_batches=(1, None),
            soft_punish_cache=(0, self.max_answer_seq_len),
        )
        require_partial_rollout(self)
        if self.partial_rollout and not self.over_sampling_batch_size:
            self.over_sampling_batch_size = -(-3 * self.per_device_generation_batch_size // 2)


@dataclass
class AgentArguments(GRPOArguments):
    """GRPO over several turns, rewarded by an environment."""

    output_dir: str = arg("runs/agent", "directory for logs, checkpoints and the trained policy")
    environment: str = arg(
        "calculator", "calculator, guessing, or module:name of an rlhf_examples.environments.Environment"
    )
    max_turns: int = arg(8, "maximum turns of a conversation")
    max_turn_tokens: int = arg(0, "maximum tokens of a turn; 0: max_answer_seq_len, which is of all turns together")
    step_timeout_s: float = arg(60.0, "timeout of an environment's reset or step, in seconds")
    overlap_rewards: bool = arg(False, "not used: an environment rewards its conversations while others decode")

    def __post_init__(self) -> None:
        for name in NOT_OF_ENVIRONMENTS:
            if value := getattr(self, name):
                raise ValueError(f"{name}: {value} given; prompts and rewards are the environment's: leave it out")
        super().__post_init__()
        require_range(self, max_turns=(1, None), max_turn_tokens=(0, None), step_timeout_s=(0.001, None))


@dataclass
class GenerationArguments(DataArguments):
    """Arguments of a script in which a frozen model completes prompts."""

    tokenizer_name_or_path: str = arg("", "directory or hub name; empty: the model's")
    max_prompt_seq_len: int = arg(256, "maximum prompt length in tokens; longer prompts are left out and counted")
    max_answer_seq_len: int = arg(64, "maximum completion length in tokens")
    stop_token_ids: list[int] = list_arg([], "end tokens in addition to the model's own")
    temperature: float = arg(1.0, "sampling temperature; 0: greedy")
    top_p: float = arg(1.0, "nucleus sampling; 1: off")
    top_k: int = arg(0, "number of most probable tokens to sample from; 0: off")
    seed: int = arg(0, "seed of sampling")
    dtype: str = arg("float32", "float32 or bfloat16")
    attn_implementation: str = arg("", ATTENTION)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choices(self, dtype=("float32", "bfloat16"), zero_stage=(0, 3))
        require_attention_of_dtype(self)


@dataclass
class EvaluateArguments(GenerationArguments):
    """Models compared on held-out prompts."""

    model_name_or_path: list[str] = list_arg([], "directories or hub names of the models to compare")
    data_path: list[str] = list_arg(["synthetic:stories@test"], "prompts: hub names, files or synthetic:… sets")
    eval_rows: int = arg(128, "maximum number of prompts")
    reward: str = arg(
        "rlhf_examples.data.synthetic:gold_score",
        "reward function (module:function), or a reward model's directory or hub name",
    )
    per_device_eval_batch_size: int = arg(16, "completions per rank in a forward of a reward model")
    eval_num_generations: int = arg(1, "completions per prompt")
    pass_at_k: list[int] = list_arg([], "values of k for pass@k")
    pass_score: float = arg(1.0, "minimum score of a completion that passes")
    zero_stage: int = arg(0, "3: partition the models")
    num_samples: int = arg(4, "prompts whose completions are shown")
    output_file: str = arg("", "JSON file for the results; empty: none")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_pass_at_k(self)


@dataclass
class PairsArguments(GenerationArguments):
    """Preference pairs from a model's own completions."""

    output_dir: str = arg("runs/pairs", "directory for pairs.jsonl")
    model_name_or_path: str = arg("", "directory or hub name")
    data_path: list[str] = list_arg(["synthetic:openings"], "prompts: hub names, files or synthetic:… sets")
    reward: str = arg(
        "rlhf_examples.rewards:joyful_story",
        "reward function (module:function), or a reward model's directory or hub name",
    )
    rounds: int = arg(4, "pairs per prompt; two completions with equal scores give none")
    per_device_eval_batch_size: int = arg(16, "completions per rank in a forward of a reward model")
    zero_stage: int = arg(0, "3: partition the model")


@dataclass
class ThroughputArguments(GenerationArguments):
    """Tokens per second of rollouts, and of Hugging Face's generate."""

    model_name_or_path: str = arg("", "directory or hub name")
    data_path: list[str] = list_arg(["synthetic:stories"], "prompts: hub names, files or synthetic:… sets")
    per_device_generation_batch_size: int = arg(32, "prompts per rank")
    rounds: int = arg(3, "measurements of each, in alternation")

    def __post_init__(self) -> None:
        require_choices(self, dtype=("float32", "bfloat16"))
        require_attention_of_dtype(self)


@dataclass
class PipelineArguments:
    """Steps that run one after the other. The YAML file has, in addition to these fields: `steps`, a table of step →
    settings, among them its `script` unless that is the step's name; `common`, settings of every step that has
    them; `summary`, key → step/metric; `servers`, name → settings of a reward server, which runs as long as the
    pipeline and is the reward `server:NAME` in steps.
    """

    output_dir: str = arg("runs/pipeline", "directory of the steps' directories")
    seed: int = arg(0, "seed of the steps that set none")
    resume: bool = arg(False, "skip finished steps and resume the interrupted one")
    overwrite: bool = arg(
        False, "delete the results in the steps' directories; without overwrite or resume they are an error"
    )
    common: dict = field(default_factory=dict, init=False)
    steps: dict = field(default_factory=dict, init=False)
    summary: dict = field(default_factory=dict, init=False)
    servers: dict = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        require_resume_or_overwrite(self)


@dataclass
class ChatArguments:
    """A conversation with a model in a terminal."""

    path: str = arg("", "directory or hub name of a model or an adapter")
    compare: str = arg("", "a second model, whose answers are shown beside the first one's")
    system: str = arg("", "system message, for models with a chat template")
    chat_template_kwargs: str = arg(
        "", 'JSON object of arguments for the chat template, such as {"enable_thinking": false}'
    )
    max_new_tokens: int = arg(128, "maximum length of an answer in tokens")
    stop_token_ids: list[int] = list_arg([], "end tokens in addition to the model's own")
    temperature: float = arg(0.8, "sampling temperature; 0: greedy")
    top_p: float = arg(0.95, "nucleus sampling; 1: off")
    seed: int = arg(0, "seed of sampling")
    dtype: str = arg("float32", "float32, bfloat16 or int8")
    attn_implementation: str = arg("", ATTENTION)

    def __post_init__(self) -> None:
        if self.compare and not self.path:
            raise ValueError(f"compare: {self.compare!r} given without path, the model to compare it with")
        require_choices(self, dtype=("float32", "bfloat16", "int8"))
        require_range(self, max_new_tokens=(1, None), temperature=(0, None), top_p=(0.01, 1))
        require_attention_of_dtype(self)
        RecordFormat(chat_template_kwargs=self.chat_template_kwargs)  # raises ValueError unless it is a JSON object


@dataclass
class RewardServerArguments:
    """A reward function over HTTP."""

    reward: str = arg("rlhf_examples.rewards:exact_match", "reward function, module:function")
    host: str = arg("127.0.0.1", "address to listen on; 0.0.0.0: all of this machine's")
    port: int = arg(8765, "port to listen on; 0: a free one")
    address_file: str = arg("", "file to write the server's address to once it listens; empty: none")
    parent_pid: int = arg(0, "exit when this parent process ends; 0: never")


def require_partial_rollout(args: GRPOArguments) -> None:
    """Raises ValueError for partial rollouts without what they need, or for their settings without them."""
    given, least = args.over_sampling_batch_size, args.per_device_generation_batch_size
    if not args.partial_rollout:
        if given:
            raise ValueError(
                f"over_sampling_batch_size: {given} given with partial_rollout: false; give true, or leave it out"
            )
        return
    if not args.importance_sampling_correction:
        raise ValueError(
            "partial_rollout: true given with importance_sampling_correction: false; completions then have tokens of "
            "older weights, and the loss must be weighted by the ratio of trainer and sampler: use true"
        )
    if not args.enable_hybrid_engine:
        raise ValueError("partial_rollout: true given with enable_hybrid_engine: false; it needs the fused decoder")
    if given and given < least:
        raise ValueError(
            f"over_sampling_batch_size: {given} given; it must be at least per_device_generation_batch_size, {least}"
        )
    if args.dynamic_sampling and args.offload_reference_model:
        raise ValueError(
            "partial_rollout: true given with dynamic_sampling and offload_reference_model; ranks then score different "
            "numbers of groups, which partitioned reward models cannot: leave one of the three out"
        )


def require_pass_at_k(args: Any) -> None:
    """Raises ValueError for a k above `eval_num_generations` or below 1, or several greedy completions."""
    require_range(args, eval_num_generations=(1, None))
    for k in args.pass_at_k:
        if not 1 <= k <= args.eval_num_generations:
            raise ValueError(
                f"pass_at_k: {k} given with eval_num_generations: {args.eval_num_generations}; it must be from 1 to "
                f"{args.eval_num_generations}"
            )
    if args.eval_num_generations > 1 and getattr(args, "eval_greedy", args.temperature == 0):
        raise ValueError(
            f"eval_num_generations: {args.eval_num_generations} given with greedy decoding, where they are all equal"
        )


def require_choices(args: Any, **allowed: tuple) -> None:
    """Raises ValueError if a field's value is not among the allowed ones."""
    for name, values in allowed.items():
        require_choice(name, getattr(args, name), values)


def require_attention_of_dtype(args: Any) -> None:
    """Raises ValueError for FlashAttention in another dtype than bfloat16: its kernels compute in 16 bits only."""
    if args.attn_implementation.startswith("flash_attention") and args.dtype != "bfloat16":
        raise ValueError(
            f"attn_implementation: {args.attn_implementation!r} given with dtype: {args.dtype!r}; it needs bfloat16, "
            "or give eager, sdpa or flex_attention"
        )


def require_best_model(args: Any) -> None:
    """Raises ValueError for settings of the best model without a metric or without evaluations."""
    for name in ("greater_is_better", "load_best_model_at_end", "early_stopping_patience", "early_stopping_threshold"):
        if getattr(args, name) not in (None, 0) and not args.metric_for_best_model:
            raise ValueError(f"{name}: {getattr(args, name)} given without metric_for_best_model; give that too")
    if args.early_stopping_threshold and not args.early_stopping_patience:
        raise ValueError(
            f"early_stopping_threshold: {args.early_stopping_threshold} given without early_stopping_patience; give "
            "that too"
        )
    if args.metric_for_best_model and not args.eval_every:
        raise ValueError(
            f"metric_for_best_model: {args.metric_for_best_model!r} given with eval_every: 0; give the iterations "
            "between evaluations"
        )


def require_resume_or_overwrite(args: Any) -> None:
    """Raises ValueError if both `resume` and `overwrite` are given."""
    if args.resume and args.overwrite:
        raise ValueError(
            "overwrite: true given with resume: true; give overwrite to delete the old run, or resume to continue it"
        )


def require_range(args: Any, **limits: tuple[float, float | None]) -> None:
    """Raises ValueError if a field's value is below its lower or above its upper limit."""
    for name, (minimum, maximum) in limits.items():
        value = getattr(args, name)
        if value < minimum:
            raise ValueError(f"{name}: {value!r} given; it must be at least {minimum}")
        if maximum is not None and value > maximum:
            raise ValueError(f"{name}: {value!r} given; it must be at most {maximum}")


def parse_arguments(kind: type[Arguments], argv: list[str] | None = None) -> Arguments:
    """Arguments of a kind from the command line `[file.yaml] [--flag value ...]`.

    Raises ValueError for an unknown key of the file or an unknown flag, with the nearest known name.
    """
    settings, flags = split_command_line(argv)
    return arguments_of(kind, settings, flags)


def split_command_line(argv: list[str] | None = None) -> tuple[dict[str, Any], list[str]]:
    """The settings of the YAML file that a command line may begin with, and the flags."""
    argv = list(sys.argv[1:] if argv is None else argv)
    # The `deepspeed` launcher passes the local rank as a flag; LOCAL_RANK in the environment has it too.
    argv = [text for text in argv if not text.startswith("--local_rank=")]
    settings = read_yaml(Path(argv.pop(0))) if argv and argv[0].endswith((".yaml", ".yml")) else {}
    return settings, argv


def arguments_of(kind: type[Arguments], settings: dict[str, Any], flags: list[str] | None = None) -> Arguments:
    """Arguments of a kind from settings by name, overridden by flags.

    Raises ValueError for an unknown name, with the nearest known one, and for a value of the wrong type.
    """
    dataclass_type: Any = kind
    names = [field.name for field in fields(dataclass_type)]
    for key in settings:
        require_key(key, names)
    settings = in_lists(kind, settings)
    hints = get_type_hints(kind)
    settings = {  # a YAML table for a text becomes JSON, as a flag would give it
        key: json.dumps(value) if isinstance(value, dict) and hints[key] is str else value
        for key, value in settings.items()
    }
    require_types(kind, settings)
    for flag in flags or []:
        if flag.startswith("--"):
            # The parser takes both spellings, and `--no_flag` for what is true by default.
            require_key(flag[2:].partition("=")[0].replace("-", "_"), [*names, *(f"no_{name}" for name in names)])
    parser = Parser(dataclass_type)
    parser.set_defaults(**settings)
    (arguments,) = parser.parse_args_into_dataclasses(args=flags or [])
    return arguments


class Parser(HfArgumentParser):
    """Raises ValueError where argparse would print all flags and exit on every rank."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def in_lists(kind: type, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings in which a single text becomes a list if its field is a list of texts."""
    hints = get_type_hints(kind)
    return {
        name: [value] if isinstance(value, str) and value and hints[name] == list[str] else value
        for name, value in settings.items()
    }


def require_types(kind: type, settings: dict[str, Any]) -> None:
    """Raises ValueError for a setting of another type than its field. Numbers and bools may be text."""
    hints = get_type_hints(kind)
    for name, value in settings.items():
        inner = get_args(hints[name]) if get_origin(hints[name]) is list else ()
        expected = next(hint for hint in inner or get_args(hints[name]) or (hints[name],) if hint is not NoneType)
        allowed = {float: (float, int, str), int: (int, str), bool: (bool, str)}.get(expected, (expected,))
        values = value if inner and isinstance(value, list) else [value]
        if isinstance(value, list) != bool(inner) or not all(isinstance(item, allowed) for item in values):
            raise ValueError(f"{name}: {value!r} given; it must be {'a list of ' * bool(inner)}{expected.__name__}")


def require_key(key: str, allowed: list[str], where: str = "") -> None:
    """Raises ValueError for an unknown name, with the nearest known one.  where: prefix of the error message."""
    if key not in allowed:
        nearest = difflib.get_close_matches(key, allowed, n=1, cutoff=0)[0]
        raise ValueError(f"{where}{': ' * bool(where)}unknown key {key!r}; the nearest known key is {nearest!r}")


def read_yaml(path: Path) -> dict[str, Any]:
    """The settings in a file. Raises ValueError if the file does not exist or holds no mapping."""
    if not path.is_file():
        raise ValueError(f"no file at {str(path)!r}")
    settings = yaml.safe_load(path.read_text())
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: it contains a {type(settings).__name__}; it must be a mapping of settings")
    return settings
