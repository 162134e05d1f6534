"""The arguments of every script: a YAML file, and flags that override it.

Names are DeepSpeed-Chat's if the meaning is the same, and TRL's for algorithms.
"""

# ruff: noqa: RUF009 - `about` and `listed` make the fields

import difflib
import json
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import yaml
from transformers import HfArgumentParser

from rlhf_examples.common.losses import IMPORTANCE_SAMPLING_MODES, LOSS_TYPES
from rlhf_examples.common.trackers import check_report_to
from rlhf_examples.data.texts import RecordFormat

Arguments = TypeVar("Arguments")
ATTENTION = "attention in models' own forwards: eager, sdpa, flash_attention_2, …; empty: transformers' choice"
NO_DROPOUT = "no dropout in training: ratios and scores are of the model, not of the dropout"


def about(default: Any, text: str) -> Any:
    """A field with its help text."""
    return field(default=default, metadata={"help": text})


def listed(default: list, text: str) -> Any:
    """A list field with its help text."""
    return field(default_factory=default.copy, metadata={"help": text})


@dataclass
class DataArguments:
    """Arguments of every script that reads records: how records become texts."""

    chat_template: str = about("", "file with a Jinja template for conversations; empty: the tokenizer's own")
    prompt_column: str = about("prompt", "column of prompts, texts or conversations")
    completion_column: str = about("completion", "column of completions")
    chosen_column: str = about("chosen", "column of the completions that were preferred")
    rejected_column: str = about("rejected", "column of the rejected completions")
    messages_column: str = about("messages", "column of whole conversations")
    text_column: str = about("text", "column of texts that are learned as a whole")
    margin_column: str = about(
        "margin", "column of numbers: by how much rewards of a pair should differ (loss_form last)"
    )
    input_template: str = about("", 'template around a text prompt, such as "Question: {}\\nAnswer:"; empty: nothing')

    chat_template_kwargs: str = about("", 'JSON for the chat template, such as {"enable_thinking": false}')

    def __post_init__(self):
        RecordFormat.from_args(self)  # raises ValueError for an invalid format


@dataclass
class RunArguments(DataArguments):
    """Arguments of every script that trains."""

    output_dir: str = about("runs/run", "where logs, checkpoints and trained models go")
    seed: int = about(0, "seed of data order, dropout and sampling")
    dtype: str = about("float32", "float32 or bfloat16")
    attn_implementation: str = about("", ATTENTION)
    tokenizer_name_or_path: str = about("", "directory or hub name; empty: the model's")
    data_path: list[str] = listed(
        [], "hub names, files or synthetic:… sets; empty: the set that the script is shown on"
    )
    data_split: str = about(
        "", 'shares for supervised tuning, reward model and RL, such as "2,4,4"; empty: all records'
    )
    data_output_path: str = about("", "where tokens are kept by content; empty: datasets' cache")
    streaming: bool = about(False, "read records as they are needed; nothing is counted or cached")
    eval_data_path: list[str] = listed([], "held-out records; empty: a share of data_path")
    eval_fraction: float = about(0.05, "share of the records that is held out; 0 holds none out")
    eval_every: int = about(0, "iterations between evaluations; 0 evaluates at the end alone")
    eval_rows: int = about(256, "most held-out records in an evaluation")

    offload: bool = about(False, "optimizer states, and under ZeRO-3 parameters, in host memory")
    stage3_param_persistence_threshold: int = about(0, "parameters of fewer elements stay whole under ZeRO-3")
    max_grad_norm: float = about(1.0, "gradient clipping")
    lora_alpha: int = about(16, "LoRA's alpha")
    lora_dropout: float = about(0.0, "share of a LoRA's inputs that is dropped in training forwards")
    lora_export: str = about("merged", "what of a LoRA is written: merged, a whole model, or adapter, PEFT's alone")
    enable_ema: bool = about(False, "keep an exponential moving average of the trained weights, and export it too")
    ema_beta: float = about(0.992, "share of the old average that stays at a step")
    logit_chunk: int = about(1024, "tokens whose logits exist at once in training; 0: all of a forward's")

    padding_free: bool = about(False, "pack rows without padding in training forwards; decoders with rope only")

    metric_for_best_model: str = about(
        "", "of evaluations, such as eval_loss: its best checkpoint is kept; empty: none"
    )
    greater_is_better: bool | None = about(None, "of that metric; not given: unless its name ends with loss")
    load_best_model_at_end: bool = about(False, "export the best model at the end, not the last")
    early_stopping_patience: int = about(0, "evaluations in a row without a better one that end the training; 0 is off")
    early_stopping_threshold: float = about(0.0, "least improvement of an evaluation that resets the patience")

    save_every: int = about(0, "iterations between checkpoints; 0 saves none but the best")
    keep_last: int = about(2, "checkpoints kept, in addition to the best")
    resume: bool = about(False, "resume from the newest checkpoint in output_dir")
    overwrite: bool = about(False, "delete the run that output_dir holds; without this and resume it is an error")
    peak_tflops: float = about(0.0, "peak TFLOP/s of a device in dtype, for time/mfu; 0: as known of this device")
    print_every: int = about(10, "iterations between tables in the terminal; 0 prints none")
    report_to: list[str] = listed(["tensorboard"], "tensorboard, trackio, wandb; JSON lines are always written")

    def __post_init__(self):
        check_report_to(self.report_to)
        require_one_of(
            self,
            dtype=("float32", "bfloat16"),
            lora_export=("merged", "adapter"),
        )
        require_attention_of_dtype(self)
        require_resume_or_overwrite(self)
        if self.eval_fraction == 1:
            raise ValueError("eval_fraction: 1 given, which leaves nothing to learn from; it must be below 1")
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

    model_name_or_path: str = about("", "directory or hub name; empty: a small Llama is made")
    hidden_size: int = about(256, "of the small Llama")
    num_hidden_layers: int = about(4, "of the small Llama")
    max_seq_len: int = about(512, "longest sequence in tokens; longer records are counted and left out")

    per_device_train_batch_size: int = about(16, "records in a forward and backward of a rank")
    per_device_eval_batch_size: int = about(16, "records in an evaluation's forward of a rank")
    gradient_accumulation_steps: int = about(1, "backwards in an optimizer step")
    num_train_epochs: float = about(1.0, "passes over the data")
    max_steps: int = about(0, "optimizer steps; 0: as many as num_train_epochs says")
    learning_rate: float = about(1e-4, "peak learning rate")
    weight_decay: float = about(0.0, "AdamW's")
    lr_scheduler_type: str = about("linear", "a name of transformers' schedules: linear, cosine, constant, …")
    num_warmup_steps: int = about(0, "optimizer steps in which the learning rate rises")
    zero_stage: int = about(3, "ZeRO stage, 0 to 3")
    gradient_checkpointing: bool = about(False, "activations are computed again in the backward")
    lora_dim: int = about(0, "rank of a PEFT LoRA; 0 trains the whole model")
    lora_module_name: str = about("all-linear", "PEFT's target_modules: all-linear, or names with commas between")

    def __post_init__(self):
        super().__post_init__()
        require_one_of(self, zero_stage=(0, 1, 2, 3))
        require_range(
            self,
            per_device_train_batch_size=(1, None),
            gradient_accumulation_steps=(1, None),
            max_seq_len=(2, None),
        )


@dataclass
class SFTArguments(TrainArguments):
    """Supervised fine-tuning."""

    output_dir: str = about("runs/sft", "where logs, checkpoints and the trained model go")
    only_completions: bool = about(False, "learn from completions only, where records have prompts")
    assistant_only_loss: bool = about(False, "learn from the assistant's turns only")
    packing: bool = about(False, "records share sequences of max_seq_len tokens, without seeing each other")

    def __post_init__(self):
        super().__post_init__()
        if self.packing and (self.streaming or not self.padding_free):
            raise ValueError(
                f"packing: true given with padding_free: {self.padding_free} and streaming: {self.streaming}; it needs "
                "padding_free: true, which keeps records apart, and streaming: false, for it sorts them by length"
            )


@dataclass
class RewardModelArguments(TrainArguments):
    """A reward model from preference pairs."""

    output_dir: str = about("runs/reward_model", "where logs, checkpoints and the trained model go")
    disable_dropout: bool = about(True, NO_DROPOUT)
    loss_form: str = about("last", "pairwise loss of the last token's score (last), or DeepSpeed-Chat's of every token")

    def __post_init__(self):
        super().__post_init__()
        require_one_of(self, loss_form=("last", "tokenwise"))


@dataclass
class DPOArguments(TrainArguments):
    """Direct preference optimization."""

    output_dir: str = about("runs/dpo", "where logs, checkpoints and the trained model go")
    disable_dropout: bool = about(True, NO_DROPOUT)
    beta: float = about(0.1, "how strongly the policy is held to the reference")
    label_smoothing: float = about(0.0, "probability that a pair's labels are swapped")
    offload_reference_model: bool = about(False, "the reference is partitioned by ZeRO-3, in host memory")


@dataclass
class RolloutArguments(RunArguments):
    """Arguments of a script that trains a policy on its own completions."""

    actor_model_name_or_path: str = about("", "directory or hub name of the policy")
    disable_dropout: bool = about(True, NO_DROPOUT)
    reward: list[str] = listed(
        [],
        "module:function over (prompts, completions, columns of records), addresses of reward servers, reward models",
    )
    reward_weights: list[float] = listed([], "of each reward in their sum; empty: 1")
    reward_timeout_s: float = about(60.0, "seconds that an attempt of an awaited function or a server may take")
    reward_retries: int = about(2, "retries of a failed attempt")
    eval_reward: list[str] = listed([], "as reward: what held-out completions are scored by, and training is not")
    stop_token_ids: list[int] = listed([], "end tokens besides the model's own")
    max_prompt_seq_len: int = about(256, "longest prompt in tokens; longer ones are counted and left out")
    max_answer_seq_len: int = about(32, "longest completion in tokens")
    temperature: float = about(1.0, "of sampling, and of every logprob")
    top_p: float = about(1.0, "nucleus sampling; 1 is off")
    top_k: int = about(0, "tokens that a draw chooses from; 0 is off")

    num_iterations: int = about(20, "iterations: a rollout and the updates on it")
    per_device_generation_batch_size: int = about(16, "prompts of a rank in an iteration")
    per_device_training_batch_size: int = about(8, "sequences in a forward and backward of a rank")
    max_tokens_per_batch: int = about(0, "tokens in a forward and backward, balanced; 0 goes by sequences")
    num_mini_batches: int = about(1, "optimizer steps in a pass over a rollout")
    logprob_mode: str = about("recompute", "old logprobs: recompute by a forward, or as sampled (sampling)")
    numerics_control_rows: int = about(
        2, "rows of the first mini batch on which the trainer is compared with itself, a row a forward; 0 is off"
    )
    importance_sampling_correction: bool = about(
        False, "weight each token's loss by the ratio of trainer and sampler; old logprobs are the trainer's"
    )
    importance_sampling_mode: str = about(
        "token_truncate",
        "a weight for each token, or one for all of a completion's (sequence_truncate); token_mask, sequence_mask: one "
        "outside the bounds is 0 instead of the bound",
    )
    importance_sampling_clip_max: float = about(2.0, "upper bound of those weights")
    importance_sampling_clip_min: float = about(0.0, "lower bound of those weights")

    actor_learning_rate: float = about(1e-4, "of the policy")
    actor_weight_decay: float = about(0.0, "AdamW's")
    lr_scheduler_type: str = about("constant", "a name of transformers' schedules: linear, cosine, constant, …")
    num_warmup_steps: int = about(0, "optimizer steps in which the learning rate rises")
    actor_zero_stage: int = about(3, "ZeRO stage of the policy, 0 to 3")
    actor_gradient_checkpointing: bool = about(False, "activations are computed again in the backward")
    actor_lora_dim: int = about(0, "rank of a PEFT LoRA; 0 trains the whole model")
    actor_lora_module_name: str = about("all-linear", "PEFT's target_modules: all-linear, or names with commas between")
    offload_reference_model: bool = about(False, "reference and reward model are partitioned by ZeRO-3, on the host")

    enable_hybrid_engine: bool = about(True, "false: rollouts run the model's own layers")
    inference_tp_size: int = about(1, "ranks that share one copy of the weights in rollouts")
    tp_gather_partition_size: int = about(8, "layers gathered together")
    unpin_actor_parameters: bool = about(False, "gather layer by layer in rollouts, and keep no copy")
    release_inference_cache: bool = about(False, "free the KV cache for training")
    unmerged_lora: bool = about(False, "keep adapters unmerged in rollouts, without a merged copy")

    num_samples: int = about(4, "prompts whose completions are shown before and after")
    eval_greedy: bool = about(False, "held-out completions are the most probable tokens, not drawn")
    eval_num_generations: int = about(1, "completions of a held-out prompt")
    pass_at_k: list[int] = listed([], "for each k: the share of held-out prompts that one of k completions passes")
    pass_score: float = about(1.0, "score from which a completion passes")

    def __post_init__(self):
        super().__post_init__()
        if self.reward_weights and len(self.reward_weights) != len(self.reward):
            raise ValueError(
                f"reward_weights: {self.reward_weights} given for {len(self.reward)} rewards; give a weight for each"
            )
        require_one_of(
            self,
            actor_zero_stage=(0, 1, 2, 3),
            logprob_mode=("recompute", "sampling"),
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
        if self.importance_sampling_correction and self.logprob_mode == "sampling":
            raise ValueError(
                "importance_sampling_correction: true given with logprob_mode: 'sampling', where the old logprobs are "
                "the sampler's own and every weight would be 1; use logprob_mode: 'recompute'"
            )


@dataclass
class PPOArguments(RolloutArguments):
    """Proximal policy optimization: DeepSpeed-Chat's step 3."""

    output_dir: str = about("runs/ppo", "where logs, checkpoints and the trained policy go")
    critic_model_name_or_path: str = about("", "the reward model, which the critic begins from; empty: the policy")
    ppo_epochs: int = about(1, "passes over a rollout")
    critic_learning_rate: float = about(3e-4, "of the critic")
    critic_weight_decay: float = about(0.0, "AdamW's")
    critic_zero_stage: int = about(3, "ZeRO stage of the critic, 0 to 3")
    critic_gradient_checkpointing: bool = about(False, "activations are computed again in the backward")
    critic_lora_dim: int = about(0, "rank of a PEFT LoRA; 0 trains the whole model")
    critic_lora_module_name: str = about(
        "all-linear", "PEFT's target_modules: all-linear, or names with commas between"
    )

    kl_ctl: float = about(0.1, "weight of the KL to the reference in the reward")
    adap_kl_ctrl: bool = about(False, "kl_ctl follows the KL towards kl_target")
    kl_target: float = about(6.0, "nats a sequence that the adaptive controller aims at")
    kl_horizon: int = about(10000, "horizon of the adaptive controller, sequences")
    early_stop_kl: float = about(0.0, "end an update once a mini batch's approxkl is above this; 0 is off")
    clip_reward: float = about(5.0, "scores are clipped to ± this")
    cliprange: float = about(0.2, "clipping of the ratio")
    cliprange_value: float = about(0.2, "clipping of the value around the old one")
    gamma: float = about(1.0, "discount")
    lam: float = about(0.95, "GAE's lambda")
    entropy_coef: float = about(0.0, "weight of the entropy, which is rewarded")
    whiten_rewards: bool = about(False, "scale rewards to variance 1")
    missing_eos_penalty: float = about(0.0, "taken off the score of a completion without an end token")
    unsupervised_data_path: list[str] = listed([], "texts of the ptx mixture; empty: none is mixed in")
    unsup_coef: float = about(27.8, "weight of the ptx loss")

    def __post_init__(self):
        super().__post_init__()
        require_one_of(self, critic_zero_stage=(0, 1, 2, 3))
        require_range(self, ppo_epochs=(1, None))


@dataclass
class GRPOArguments(RolloutArguments):
    """Group relative policy optimization and its variants, with verifiable rewards."""

    output_dir: str = about("runs/grpo", "where logs, checkpoints and the trained policy go")
    num_generations: int = about(8, "completions of a prompt")
    num_grpo_iterations: int = about(1, "passes over a rollout")
    loss_type: str = about("dapo", "grpo, dr_grpo, dapo or bnpo: what the sum over tokens is divided by")
    scale_rewards: str = about("group", "advantages are divided by the deviation of: group, batch, or none")
    advantages: str = about("group", "less the group's mean (group), or the mean of the others in it (rloo)")
    epsilon: float = about(0.2, "clipping of the ratio")
    epsilon_high: float = about(0.0, "clipping of the ratio above 1 (DAPO's clip-higher); 0: as epsilon")
    delta: float = about(0.0, "the ratio that is not clipped is at most this (INTELLECT-2's two-sided loss); 0 is off")
    importance_sampling_level: str = about("token", "ratios of a token, or of a sequence (GSPO)")
    beta: float = about(0.0, "weight of the KL to the reference (k3) in the loss; 0 needs no reference")
    use_bias_correction_kl: bool = about(True, "that KL times the ratio, so that its gradient is the KL's")
    entropy_coef: float = about(0.0, "weight of the mean entropy of a token, which is rewarded")
    dynamic_sampling: bool = about(
        False, "groups whose rewards are all the same are dropped, and the next prompts take their places (DAPO)"
    )
    max_num_gen_batches: int = about(10, "rollouts of an iteration at most, with dynamic_sampling")
    mask_truncated_completions: bool = about(False, "completions without an end token are masked out of the loss")
    soft_punish_cache: int = about(
        0,
        "last tokens of max_answer_seq_len over which the reward falls by up to 1 (DAPO's overlong shaping); 0 is off",
    )

    def __post_init__(self):
        super().__post_init__()
        require_one_of(
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


@dataclass
class GenerationArguments(DataArguments):
    """Arguments of a script in which a frozen model completes prompts."""

    tokenizer_name_or_path: str = about("", "directory or hub name; empty: the model's")
    max_prompt_seq_len: int = about(256, "longest prompt in tokens; longer ones are counted and left out")
    max_answer_seq_len: int = about(64, "longest completion in tokens")
    stop_token_ids: list[int] = listed([], "end tokens besides the model's own")
    temperature: float = about(1.0, "of sampling; 0 is greedy")
    top_p: float = about(1.0, "nucleus sampling; 1 is off")
    top_k: int = about(0, "tokens that a draw chooses from; 0 is off")
    seed: int = about(0, "of sampling")
    dtype: str = about("float32", "float32 or bfloat16")
    attn_implementation: str = about("", ATTENTION)

    def __post_init__(self):
        super().__post_init__()
        require_one_of(self, dtype=("float32", "bfloat16"), zero_stage=(0, 3))
        require_attention_of_dtype(self)


@dataclass
class EvaluateArguments(GenerationArguments):
    """Models compared on held-out prompts."""

    model_name_or_path: list[str] = listed([], "directories or hub names, compared on the same prompts")
    data_path: list[str] = listed(["synthetic:stories@test"], "prompts: hub names, files or synthetic:… sets")
    eval_rows: int = about(128, "most prompts")
    reward: str = about(
        "rlhf_examples.data.synthetic:gold_score",
        "module:function over (prompts, completions, columns of records), or a reward model's directory or hub name",
    )
    per_device_eval_batch_size: int = about(16, "completions in a reward model's forward")
    eval_num_generations: int = about(1, "completions of a prompt")
    pass_at_k: list[int] = listed([], "for each k: the share of prompts that one of k completions passes")
    pass_score: float = about(1.0, "score from which a completion passes")
    zero_stage: int = about(0, "3 partitions the models")
    num_samples: int = about(4, "prompts whose completions are shown")
    output_file: str = about("", "JSON file for the results; empty: none")

    def __post_init__(self):
        super().__post_init__()
        require_pass_at_k(self)


@dataclass
class PairsArguments(GenerationArguments):
    """Preference pairs from a model's own completions."""

    output_dir: str = about("runs/pairs", "where pairs.jsonl goes")
    model_name_or_path: str = about("", "directory or hub name")
    data_path: list[str] = listed(["synthetic:openings"], "prompts: hub names, files or synthetic:… sets")
    reward: str = about(
        "rlhf_examples.rewards:joyful_story",
        "module:function over (prompts, completions, columns of records), or a reward model's directory or hub name",
    )
    rounds: int = about(4, "pairs of each prompt; two completions that are equally good give none")
    per_device_eval_batch_size: int = about(16, "completions in a reward model's forward")
    zero_stage: int = about(0, "3 partitions the model")


@dataclass
class ThroughputArguments(GenerationArguments):
    """Tokens per second of rollouts, and of Hugging Face's generate."""

    model_name_or_path: str = about("", "directory or hub name")
    data_path: list[str] = listed(["synthetic:stories"], "prompts: hub names, files or synthetic:… sets")
    per_device_generation_batch_size: int = about(32, "prompts of a rank")
    rounds: int = about(3, "measurements of each, in turns")

    def __post_init__(self):
        require_one_of(self, dtype=("float32", "bfloat16"))
        require_attention_of_dtype(self)


@dataclass
class PipelineArguments:
    """Steps that run one after the other. The YAML file has, in addition to these fields: `steps`, a table of step →
    settings, among them its `script` unless that is the step's name; `common`, settings of every step that has
    them; `summary`, key → step/metric; `servers`, name → settings of a reward server, which runs as long as the
    pipeline and is the reward `server:NAME` in steps.
    """

    output_dir: str = about("runs/pipeline", "each step has a directory in it")
    seed: int = about(0, "of every step that has none of its own")
    resume: bool = about(False, "resume: steps that are done are not run again")
    overwrite: bool = about(False, "delete what the steps' directories hold; without this and resume it is an error")
    common: dict = field(default_factory=dict, init=False)
    steps: dict = field(default_factory=dict, init=False)
    summary: dict = field(default_factory=dict, init=False)
    servers: dict = field(default_factory=dict, init=False)

    def __post_init__(self):
        require_resume_or_overwrite(self)


@dataclass
class ChatArguments:
    """A conversation with a model in a terminal."""

    path: str = about("", "directory or hub name of the model; an adapter's directory too")
    system: str = about("", "a system message, for models with a chat template")
    chat_template_kwargs: str = about("", 'JSON for the chat template, such as {"enable_thinking": false}')
    max_new_tokens: int = about(128, "longest answer in tokens")
    stop_token_ids: list[int] = listed([], "end tokens besides the model's own")
    temperature: float = about(0.8, "of sampling; 0 is greedy")
    top_p: float = about(0.95, "nucleus sampling")
    seed: int = about(0, "of sampling")
    dtype: str = about("float32", "float32, bfloat16 or int8")
    attn_implementation: str = about("", ATTENTION)

    def __post_init__(self):
        require_one_of(self, dtype=("float32", "bfloat16", "int8"))
        require_attention_of_dtype(self)
        RecordFormat(chat_template_kwargs=self.chat_template_kwargs)  # raises ValueError unless it is a JSON object


@dataclass
class RewardServerArguments:
    """A reward function over HTTP."""

    reward: str = about("rlhf_examples.rewards:exact_match", "module:function over (prompts, completions, columns)")
    host: str = about("127.0.0.1", "address to listen at; 0.0.0.0: all of this machine's")
    port: int = about(8765, "0 takes a free one")
    address_file: str = about("", "file that the server's address is written to once it listens; empty: none")
    parent_pid: int = about(0, "end with this process, which has started the server; 0: with none")


def require_pass_at_k(args: Any) -> None:
    """Raises ValueError for a k above `eval_num_generations` or below 1, or several greedy completions."""
    require_range(args, eval_num_generations=(1, None))
    for k in args.pass_at_k:
        if not 1 <= k <= args.eval_num_generations:
            raise ValueError(
                f"pass_at_k: {k} given with eval_num_generations: {args.eval_num_generations}; it must be from 1 to "
                "that"
            )
    if args.eval_num_generations > 1 and getattr(args, "eval_greedy", args.temperature == 0):
        raise ValueError(
            f"eval_num_generations: {args.eval_num_generations} given with greedy completions, which would all be alike"
        )


def require_one_of(args: Any, **allowed: tuple) -> None:
    """Raises ValueError if a field's value is not among the allowed ones."""
    for name, values in allowed.items():
        if getattr(args, name) not in values:
            raise ValueError(f"{name}: {getattr(args, name)!r} given; allowed: {', '.join(map(str, values))}")


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
        raise ValueError("overwrite: true given with resume: true; give one: to delete the run there, or to go on")


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
    names = [field.name for field in fields(kind)]
    for key in settings:
        require_key(key, names)
    settings = in_lists(kind, settings)
    settings = {key: json_of_table(value, kind, key) for key, value in settings.items()}
    require_types(kind, settings)
    for flag in flags or []:
        if flag.startswith("--"):
            # The parser takes both spellings, and `--no_flag` for what is true by default.
            require_key(flag[2:].partition("=")[0].replace("-", "_"), [*names, *(f"no_{name}" for name in names)])
    parser = Parser(kind)
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


def json_of_table(value: Any, kind: type, name: str) -> Any:
    """A YAML table as JSON text, as a flag would give it, if the field is a text; else `value`."""
    return json.dumps(value) if isinstance(value, dict) and get_type_hints(kind)[name] is str else value


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
        raise ValueError(f"{path}: it holds a {type(settings).__name__}; it must be settings by name")
    return settings
