"""The arguments of every script. Names are DeepSpeed-Chat's if the meaning is the same, and TRL's for algorithms."""

# ruff: noqa: RUF009 - `arg` returns dataclass fields

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from rlhf_examples.common.choices import (
    AdvantageName,
    ImportanceSamplingLevel,
    ImportanceSamplingMode,
    LossType,
    Optimizer,
    PreferenceLossType,
    TrainingForward,
    check_report_to,
)
from rlhf_examples.common.parsing import (
    DATA,
    ENVIRONMENT,
    FILE,
    MODEL,
    OUTPUT_FILE,
    REWARD,
    TOKENIZER,
    Names,
    ScriptArguments,
    Within,
    arg,
)
from rlhf_examples.common.refusals import (
    attention_of_another_dtype,
    refused_advantages,
    refused_bits,
    refused_losses,
    refused_optimizers,
    refused_outside_of_grpo,
    refused_pass_at_k,
    refused_preference_losses,
    resume_and_overwrite,
)
from rlhf_examples.data.texts import RecordFormat

# What values a field allows, and what they name.
Count = Annotated[int, Within(0)]
Size = Annotated[int, Within(1)]
AtLeastTwo = Annotated[int, Within(2)]
Share = Annotated[float, Within(0, 1)]
NotNegative = Annotated[float, Within(0)]
Positive = Annotated[float, Within(0.001)]
Seconds = Annotated[float, Within(0.001)]
Dtype = Literal["float32", "bfloat16"]
ZeroStage = Literal[0, 1, 2, 3]
FrozenZeroStage = Literal[0, 3]
Model = Annotated[str, Names(MODEL)]
Tokenizer = Annotated[str, Names(TOKENIZER)]
Data = Annotated[str, Names(DATA)]
File = Annotated[str, Names(FILE)]
OutputFile = Annotated[str, Names(OUTPUT_FILE)]
Reward = Annotated[str, Names(REWARD)]
EnvironmentName = Annotated[str, Names(ENVIRONMENT)]
# Subjects of `--help` that several classes have.
MODELS, RECORDS, REWARDS = "Models and tokenizer", "Records", "Rewards"
TRAINING, LORA, SAMPLING, EVALUATION = "Training", "LoRA", "Sampling", "Evaluation"
EMA, BEST_MODEL, CHECKPOINTS = "Moving average", "Best model and early stopping", "Checkpoints"
LOGPROBS = "Logprobs of sampler and trainer"
ATTENTION = "transformers' attention implementation: eager, sdpa, flash_attention_2, …; empty: its default"
NO_DROPOUT = "disable dropout in training, so that logprobs and scores do not depend on it"
NEEDS_METRIC = "greater_is_better load_best_model_at_end early_stopping_patience early_stopping_threshold".split()
# Arguments of GRPO that are about prompts and rewards of data sets.
NOT_OF_ENVIRONMENTS = """
    reward reward_weights eval_reward data_path eval_data_path data_split streaming dynamic_sampling soft_punish_cache
    overlap_rewards partial_rollout over_sampling_batch_size
""".split()
# Arguments of GRPO that `vision_grpo.py` does not follow.
NOT_OF_IMAGES = """
    streaming data_split eval_data_path eval_reward eval_every metric_for_best_model save_every resume dynamic_sampling
    partial_rollout importance_sampling_correction soft_punish_cache entropy_coef use_adaptive_entropy
    keep_sampling_mask
    max_tokens_per_batch log_rollouts
""".split()


@dataclass
class DataArguments(ScriptArguments):
    """Arguments of every script that reads records: how records are read as texts."""

    chat_template: File = arg(
        "", "file with a Jinja chat template; empty: the tokenizer's own", "Format of the records"
    )
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

    def refusals(self) -> Iterator[tuple[Any, str]]:
        yield from super().refusals()
        RecordFormat.from_args(self)  # raises ValueError for an invalid format


@dataclass
class RunArguments(DataArguments):
    """Arguments of every script that trains."""

    output_dir: str = arg("runs/run", "directory for logs, checkpoints and trained models", "Run")
    seed: int = arg(0, "seed of data order, dropout and sampling")
    dtype: Dtype = arg("float32", "float32 or bfloat16", MODELS)
    attn_implementation: str = arg("", ATTENTION)
    tokenizer_name_or_path: Tokenizer = arg("", "directory or hub name; empty: the model's")
    data_path: list[Data] = arg([], "hub names, files or synthetic:… sets; empty: the script's synthetic set", RECORDS)
    data_split: str = arg("", 'shares of the records for SFT, reward model and RL, such as "2,4,4"; empty: all records')
    data_output_path: str = arg("", "cache directory for tokenized records; empty: that of datasets")
    streaming: bool = arg(False, "read records as they are needed, without counting or caching them")
    eval_data_path: list[Data] = arg([], "held-out records; empty: eval_fraction of data_path", EVALUATION)
    eval_fraction: Share = arg(0.05, "fraction of the records that is held out; 0: none")
    eval_every: Count = arg(0, "iterations between evaluations; 0: evaluate only before and after training")
    eval_rows: Count = arg(256, "maximum number of held-out records in an evaluation")
    offload: bool = arg(False, "keep optimizer states, and under ZeRO-3 parameters, in host memory", TRAINING)
    stage3_param_persistence_threshold: int = arg(0, "parameters with fewer elements are not partitioned under ZeRO-3")
    max_grad_norm: float = arg(1.0, "maximum gradient norm, for clipping; 0: off")
    optimizer: Optimizer = arg(
        "adamw",
        "adamw (torch's), fused (DeepSpeed's AdamW: CPU Adam if states are offloaded), lion, muon (matrices; AdamW for "
        "the rest) or adamw8bit (bitsandbytes)",
    )
    muon_adam_learning_rate: NotNegative = arg(
        0.0, "peak learning rate of embeddings, heads and vectors with optimizer muon; 0: the learning rate"
    )
    decay: Literal["all", "matrices"] = arg(
        "all", "parameters to which the weight decay applies: all, or matrices alone, without biases and norms"
    )
    training_forward: TrainingForward = arg(
        "packed",
        "forward that training learns from: packed (no padding, shared prompts once), model (the model's own over "
        "padded rows), exact (the rollout's kernels: logprobs equal the sampler's)",
    )
    torch_compile: bool = arg(
        False, "compile the transformer layers for training; under ZeRO-3 each layer is then gathered as a whole"
    )
    lora_alpha: int = arg(16, "LoRA alpha", LORA)
    lora_dropout: Share = arg(0.0, "LoRA dropout probability")
    load_in_4bit: bool = arg(False, "load the policy under a LoRA in 4 bits (QLoRA, by bitsandbytes)")
    load_in_8bit: bool = arg(False, "load the policy under a LoRA in 8 bits, under ZeRO 0 to 2")
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = arg("nf4", "format of 4-bit weights")
    use_bnb_nested_quant: bool = arg(False, "quantize the scales of 4-bit weights too")
    lora_export: Literal["merged", "adapter"] = arg(
        "merged", "how a LoRA model is exported: merged (a whole model) or adapter (PEFT's files only)"
    )
    enable_ema: bool = arg(
        False, "keep an exponential moving average of the trained weights, and export it as model_ema", EMA
    )
    ema_beta: Share = arg(0.992, "decay of the moving average")
    metric_for_best_model: str = arg(
        "", "evaluation metric, such as eval_loss, whose best checkpoint is kept; empty: none", BEST_MODEL
    )
    greater_is_better: bool | None = arg(
        None, "whether a higher metric is better; not given: true unless its name ends with loss"
    )
    load_best_model_at_end: bool = arg(False, "export the best model at the end instead of the last")
    early_stopping_patience: Count = arg(
        0, "evaluations in a row without improvement after which training stops; 0: off"
    )
    early_stopping_threshold: NotNegative = arg(0.0, "minimum improvement that resets the patience")
    save_every: Count = arg(
        0, "iterations between checkpoints; 0: save only the best, if there is a metric_for_best_model", CHECKPOINTS
    )
    keep_last: Size = arg(2, "number of checkpoints kept, in addition to the best")
    resume: bool = arg(False, "resume from the latest checkpoint in output_dir")
    overwrite: bool = arg(
        False, "delete the run in output_dir; without overwrite or resume an existing run is an error"
    )
    peak_tflops: float = arg(0.0, "peak TFLOP/s of a device in dtype, for time/mfu; 0: look the device up", "Logs")
    print_every: int = arg(10, "iterations between tables of metrics in the terminal; 0: none")
    report_to: list[str] = arg(["tensorboard"], "tensorboard, trackio, wandb; metrics.jsonl is always written")

    def refusals(self) -> Iterator[tuple[Any, str]]:
        yield from super().refusals()
        check_report_to(self.report_to)
        yield attention_of_another_dtype(self)
        yield resume_and_overwrite(self)
        stages = {name: stage for name, stage in vars(self).items() if name.endswith("zero_stage")}
        yield from refused_optimizers(self, stages)
        yield from refused_bits(self)
        for name in [name for name, stage in stages.items() if stage == 3]:
            yield (
                self.torch_compile and self.training_forward == "exact",
                f"torch_compile: true given with training_forward: 'exact' and {name}: 3, where each layer is gathered "
                "as a whole; give packed, or ZeRO stage 0, 1 or 2",
            )
        yield self.eval_fraction == 1, "eval_fraction: 1 given, which leaves no records to train on; it must be below 1"
        yield (
            self.lora_dropout and self.training_forward != "model",
            f"lora_dropout: {self.lora_dropout} given with training_forward: {self.training_forward!r}, where rows "
            "share tokens; give lora_dropout: 0, or training_forward: 'model'",
        )
        metric, threshold = self.metric_for_best_model, self.early_stopping_threshold
        for name in NEEDS_METRIC:
            value = getattr(self, name)
            problem = f"{name}: {value} given without metric_for_best_model; give that too"
            yield value not in (None, 0) and not metric, problem
        yield (
            threshold and not self.early_stopping_patience,
            f"early_stopping_threshold: {threshold} given without early_stopping_patience; give that too",
        )
        yield (
            metric and not self.eval_every,
            f"metric_for_best_model: {metric!r} given with eval_every: 0; give the iterations between evaluations",
        )


@dataclass
class TrainArguments(RunArguments):
    """Arguments of a script that trains one model on records: DeepSpeed-Chat's steps 1 and 2."""

    model_name_or_path: Model = arg("", "directory or hub name; empty: a new small Llama", MODELS)
    hidden_size: int = arg(256, "of the small Llama")
    num_hidden_layers: int = arg(4, "of the small Llama")
    max_seq_len: AtLeastTwo = arg(
        512, "maximum sequence length in tokens; longer records are left out and counted", RECORDS
    )
    per_device_train_batch_size: Size = arg(16, "records per rank in a forward and backward", TRAINING)
    per_device_eval_batch_size: int = arg(16, "records per rank in a forward of an evaluation")
    gradient_accumulation_steps: Size = arg(1, "forwards and backwards per optimizer step")
    num_train_epochs: float = arg(1.0, "passes over the data")
    max_steps: int = arg(0, "optimizer steps; 0: num_train_epochs decides")
    learning_rate: float = arg(1e-4, "peak learning rate")
    weight_decay: float = arg(0.0, "weight decay")
    lr_scheduler_type: str = arg("linear", "one of transformers' schedules: linear, cosine, constant, …")
    num_warmup_steps: int = arg(0, "warm-up steps of the learning rate")
    zero_stage: ZeroStage = arg(3, "ZeRO stage, 0 to 3")
    gradient_checkpointing: bool = arg(False, "recompute activations in the backward")
    lora_dim: int = arg(0, "rank of a PEFT LoRA; 0: full fine-tuning", LORA)
    lora_module_name: str = arg("all-linear", "PEFT's target_modules: all-linear, or names separated by commas")

    def refusals(self) -> Iterator[tuple[Any, str]]:
        yield from super().refusals()
        yield (
            self.streaming and not self.max_steps,
            "max_steps: 0 given with streaming: true, where the number of records is unknown; give max_steps",
        )


@dataclass
class SFTArguments(TrainArguments):
    """Supervised fine-tuning."""

    output_dir: str = arg("runs/sft", "directory for logs, checkpoints and the trained model")
    only_completions: bool = arg(False, "compute the loss on completions only, if records have prompts")
    assistant_only_loss: bool = arg(False, "compute the loss on the assistant's turns only")
    packing: bool = arg(False, "count as a record of a batch several that together have at most max_seq_len tokens")

    def refusals(self) -> Iterator[tuple[Any, str]]:
        yield from super().refusals()
        yield (
            self.packing and self.streaming,
            "packing: true given with streaming: true; it needs streaming: false, because it sorts the records by "
            "length",
        )
        problem = "load_in_4bit or load_in_8bit: true given without model_name_or_path; give the model to quantize"
        yield (self.load_in_4bit or self.load_in_8bit) and not self.model_name_or_path, problem


@dataclass
class RewardModelArguments(TrainArguments):
    """A reward model from preference pairs."""

    output_dir: str = arg("runs/reward_model", "directory for logs, checkpoints and the trained model")
    model_name_or_path: Model = arg("", "directory or hub name", required=True)
    disable_dropout: bool = arg(True, NO_DROPOUT)
    loss_form: Literal["last", "tokenwise"] = arg(
        "last", "pairwise loss of the last tokens' scores (last), or DeepSpeed-Chat's over all tokens (tokenwise)"
    )

    def refusals(self) -> Iterator[tuple[Any, str]]:
        yield from super().refusals()
        problem = "load_in_4bit or load_in_8bit: true given for a reward model; they are for policies: leave them out"
        yield self.load_in_4bit or self.load_in_8bit, problem


@dataclass
class DPOArguments(TrainArguments):
    """Direct preference optimization."""

    output_dir: str = arg("runs/dpo", "directory for logs, checkpoints and the trained model")
    model_name_or_path: Model = arg("", "directory or hub name", required=True)
    disable_dropout: bool = arg(True, NO_DROPOUT)
    loss_type: PreferenceLossType = arg(
        "sigmoid", "DPO (sigmoid), KTO (kto) or, without a reference, SFT with an odds ratio (orpo)"
    )
    beta: float = arg(0.1, "weight of the KL to the reference in DPO's objective; of the odds ratio in orpo")
    label_smoothing: float = arg(0.0, "assumed probability that a pair's labels are swapped (sigmoid)")
    desirable_weight: NotNegative = arg(1.0, "weight of chosen completions in kto")
    undesirable_weight: NotNegative = arg(1.0, "weight of rejected completions in kto")
    offload_reference_model: bool = arg(False, "partition the reference by ZeRO-3 in host memory")

    def refusals(self) -> Iterator[tuple[Any, str]]:
        yield from super().refusals()
        yield from refused_preference_losses(self)


@dataclass
class RolloutArguments(RunArguments):
    """Arguments of a script that trains a policy on its own completions."""

    actor_model_name_or_path: Model = arg("", "directory or hub name of the policy", MODELS, required=True)
    disable_dropout: bool = arg(True, NO_DROPOUT)
    offload_reference_model: bool = arg(False, "partition the reference and the reward models by ZeRO-3 in host memory")
    reward: list[Reward] = arg(
        [], "reward functions (module:function), addresses of reward servers, or reward models", REWARDS
    )
    reward_weights: list[float] = arg([], "weight of each reward in their sum; empty: 1 for each")
    reward_timeout_s: Seconds = arg(60.0, "timeout of an attempt of an async reward function or a server, in seconds")
    reward_retries: Count = arg(2, "retries after a failed attempt")
    overlap_rewards: bool = arg(
        True,
        "run reward functions in a thread while other completions decode, with all completions of a prompt in a call; "
        "false: with the whole rollout, after it, for functions that compare completions of different prompts",
    )
    eval_reward: list[Reward] = arg([], "as reward, but only for held-out completions in evaluations")
    stop_token_ids: list[int] = arg([], "end tokens in addition to the model's own", "Rollouts")
    max_prompt_seq_len: int = arg(256, "maximum prompt length in tokens; longer prompts are left out and counted")
    max_answer_seq_len: Size = arg(32, "maximum completion length in tokens")
    temperature: float = arg(1.0, "temperature of sampling and of all logprobs")
    top_p: float = arg(1.0, "nucleus sampling; 1: off")
    top_k: int = arg(0, "number of most probable tokens to sample from; 0: off")
    num_iterations: int = arg(20, "iterations, each a rollout and the updates on it", TRAINING)
    per_device_generation_batch_size: Size = arg(16, "prompts per rank in an iteration")
    per_device_training_batch_size: Size = arg(8, "sequences per rank in a forward and backward")
    max_tokens_per_batch: Count = arg(
        0, "maximum tokens per rank in a forward and backward, balanced; 0: count sequences instead"
    )
    num_mini_batches: Size = arg(1, "optimizer steps per pass over a rollout")
    logprob_mode: Literal["recompute", "sampling"] = arg(
        "recompute", "old logprobs: recomputed by a forward (recompute), or the sampler's (sampling)", LOGPROBS
    )
    numerics_control_rows: Count = arg(
        2, "rows of the first mini batch on which the trainer's logprobs are compared with those of single rows; 0: off"
    )
    importance_sampling_correction: bool = arg(
        False, "weight the loss by the probability ratio of trainer and sampler; old logprobs are the trainer's"
    )
    importance_sampling_mode: ImportanceSamplingMode = arg(
        "token_truncate",
        "a ratio per token (token_…) or per completion (sequence_…); outside the bounds clipped (…_truncate) or set "
        "to 0 (…_mask)",
    )
    importance_sampling_clip_max: Annotated[float, Within(1)] = arg(2.0, "upper bound of these ratios")
    importance_sampling_clip_min: Share = arg(0.0, "lower bound of these ratios")
    keep_sampling_mask: bool = arg(
        False,
        "all logprobs of the policy are of the tokens that top_p and top_k kept in the rollout (DeepSeek-V3.2); false: "
        "of the whole vocabulary",
    )
    actor_learning_rate: float = arg(1e-4, "peak learning rate of the policy", TRAINING)
    actor_weight_decay: float = arg(0.0, "weight decay")
    lr_scheduler_type: str = arg("constant", "one of transformers' schedules: linear, cosine, constant, …")
    num_warmup_steps: int = arg(0, "warm-up steps of the learning rate")
    actor_zero_stage: ZeroStage = arg(3, "ZeRO stage of the policy, 0 to 3")
    actor_gradient_checkpointing: bool = arg(False, "recompute activations in the backward")
    actor_lora_dim: int = arg(0, "rank of a PEFT LoRA; 0: full fine-tuning", LORA)
    actor_lora_module_name: str = arg("all-linear", "PEFT's target_modules: all-linear, or names separated by commas")
    enable_hybrid_engine: bool = arg(True, "false: rollouts run the model's own forward", "Rollouts")
    inference_tp_size: int = arg(1, "tensor parallel size of rollouts")
    tp_gather_partition_size: int = arg(8, "layers gathered at a time")
    unpin_actor_parameters: bool = arg(False, "gather layer by layer in rollouts, without keeping a copy")
    release_inference_cache: bool = arg(False, "free the KV cache for training")
    unmerged_lora: bool = arg(False, "run LoRA adapters unmerged in rollouts, without a merged copy")
    rollout_weight_dtype: Literal["model", "int8"] = arg(
        "model",
        "weights of rollouts: the model's dtype (model), or quantized at every version (int8), which needs "
        "importance_sampling_correction",
    )
    num_samples: int = arg(4, "prompts whose completions before and after training are shown", EVALUATION)
    eval_greedy: bool = arg(False, "greedy decoding of held-out completions")
    eval_num_generations: Size = arg(1, "completions per held-out prompt")
    pass_at_k: list[int] = arg([], "values of k for pass@k on held-out prompts")
    pass_score: float = arg(1.0, "minimum score of a completion that passes")
    log_rollouts: bool = arg(
        False, "log the tokens, logprobs and sampling keys of every completion, for `hybrid replay`", "Logs"
    )

    def refusals(self) -> Iterator[tuple[Any, str]]:
        yield from super().refusals()
        yield (
            self.reward_weights and len(self.reward_weights) != len(self.reward),
            f"reward_weights: {self.reward_weights} given for {len(self.reward)} rewards; give a weight for each",
        )
        yield from refused_pass_at_k(self, self.eval_greedy)
        yield (
            self.rollout_weight_dtype == "int8" and not self.importance_sampling_correction,
            "rollout_weight_dtype: 'int8' given with importance_sampling_correction: false; the sampler is then "
            "another policy than the trainer's, and the loss must be weighted by their ratio: use true, or 'model'",
        )
        yield (
            self.importance_sampling_correction and self.logprob_mode == "sampling",
            "importance_sampling_correction: true given with logprob_mode: 'sampling', where the old logprobs are "
            "the sampler's and every ratio would be 1; use logprob_mode: 'recompute'",
        )
        yield (
            self.keep_sampling_mask and not self.truncates,
            f"keep_sampling_mask: true given with top_p: {self.top_p:g} and top_k: {self.top_k}, which leave no token "
            "out; give one of them, or leave it out",
        )

    @property
    def truncates(self) -> bool:
        """Whether completions are sampled from a truncated distribution."""
        return self.top_p < 1 or self.top_k > 0


@dataclass
class PPOArguments(RolloutArguments):
    """Proximal policy optimization: DeepSpeed-Chat's step 3."""

    output_dir: str = arg("runs/ppo", "directory for logs, checkpoints and the trained policy")
    ppo_epochs: Size = arg(1, "passes over a rollout")
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
    unsupervised_data_path: list[Data] = arg([], "pretraining texts for the ptx loss; empty: none")
    unsup_coef: float = arg(27.8, "weight of the ptx loss")
    critic_model_name_or_path: Model = arg(
        "", "the reward model, which also initializes the critic; empty: the policy initializes it", "Critic"
    )
    critic_learning_rate: float = arg(3e-4, "peak learning rate of the critic")
    critic_weight_decay: float = arg(0.0, "weight decay")
    critic_zero_stage: ZeroStage = arg(3, "ZeRO stage of the critic, 0 to 3")
    critic_gradient_checkpointing: bool = arg(False, "recompute activations in the backward")
    critic_lora_dim: int = arg(0, "rank of a PEFT LoRA; 0: full fine-tuning")
    critic_lora_module_name: str = arg("all-linear", "PEFT's target_modules: all-linear, or names separated by commas")

    def require_inputs(self, written_later: str = "") -> None:
        """See ScriptArguments; also a reward or a reward model is required."""
        super().require_inputs(written_later)
        if not self.reward and not self.critic_model_name_or_path:
            raise ValueError("reward: none given; give a function, or a reward model as critic_model_name_or_path")


@dataclass
class GRPOArguments(RolloutArguments):
    """Group relative policy optimization and its variants, with verifiable rewards."""

    output_dir: str = arg("runs/grpo", "directory for logs, checkpoints and the trained policy")
    num_generations: AtLeastTwo = arg(8, "completions per prompt")
    num_grpo_iterations: Size = arg(1, "passes over a rollout")
    sequence_parallel_size: Size = arg(
        1, "ranks that train on the same completions, each on its share of the tokens: for long ones; divides the ranks"
    )
    loss_type: LossType = arg(
        "dapo",
        "the clipped surrogate, with a normalization of the sum over tokens (grpo, dr_grpo, dapo, bnpo, luspo), or "
        "another one (cispo, sapo, vespo, gmpo, dppo_tv, dppo_kl, clip_cov, kl_cov)",
    )
    scale_rewards: Literal["group", "batch", "none"] = arg(
        "group", "divide advantages by the standard deviation of the group or the batch, or by none"
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = arg(
        "sum_then_normalize", "several rewards: summed first, or each normalized in its group first (GDPO)"
    )
    advantages: AdvantageName = arg(
        "group",
        "baseline: the group's mean (group), the mean of the other completions (rloo), the group's mean weighted by "
        "lengths (opo), the greedy completion (remax), none, or the group's mean, then whitened over tokens "
        "(reinforce_plus_plus, reinforce_plus_plus_baseline); grpo_passk: the best one's lead alone",
    )
    gamma: Share = arg(1.0, "discount of later rewards in reinforce_plus_plus")
    use_kl_in_reward: bool = arg(False, "subtract the KL to the reference (beta, k1) from the reward, not in the loss")
    epsilon: float = arg(0.2, "clip range of the ratio; of its logarithm in gmpo, of the divergence in dppo_…")
    epsilon_high: float = arg(
        0.0, "upper clip range (DAPO's clip-higher); 0: as epsilon. In cispo the upper bound of the ratio itself"
    )
    delta: NotNegative = arg(0.0, "upper bound of the unclipped ratio (INTELLECT-2's two-sided clipping); 0: off")
    sapo_temperature_pos: Positive = arg(1.0, "sapo: temperature for positive advantages")
    sapo_temperature_neg: Positive = arg(1.05, "sapo: temperature for the other advantages")
    vespo_k_pos: float = arg(2.0, "vespo: exponent of the ratio for positive advantages")
    vespo_lambda_pos: float = arg(3.0, "vespo: decay with the ratio for positive advantages")
    vespo_k_neg: float = arg(3.0, "vespo: exponent of the ratio for negative advantages")
    vespo_lambda_neg: float = arg(2.0, "vespo: decay with the ratio for negative advantages")
    clip_ratio_c: Annotated[float, Within(1)] = arg(20.0, "dppo_…: upper bound of the ratio")
    clip_cov_ratio: Share = arg(0.0002, "clip_cov: share of the tokens that are left out")
    clip_cov_lb: float = arg(1.0, "clip_cov: lower bound of the covariance of these tokens")
    clip_cov_ub: float = arg(5.0, "clip_cov: upper bound of the covariance of these tokens")
    kl_cov_ratio: Share = arg(0.0002, "kl_cov: share of the tokens that get a KL penalty")
    ppo_kl_coef: NotNegative = arg(1.0, "kl_cov: weight of this penalty")
    importance_sampling_level: ImportanceSamplingLevel = arg(
        "token", "ratios per token (token), per sequence (sequence, GSPO), or GSPO-token's (sequence_token)"
    )
    beta: float = arg(
        0.0, "KL coefficient: weight of the KL to the reference (k3) in the loss; 0: no reference is loaded"
    )
    use_bias_correction_kl: bool = arg(True, "multiply that KL by the ratio, so that its gradient is that of the KL")
    entropy_coef: float = arg(0.0, "weight of the entropy bonus, a mean over tokens")
    use_adaptive_entropy: bool = arg(
        False, "adapt entropy_coef after every step so that the entropy approaches entropy_target from below"
    )
    entropy_target: NotNegative = arg(0.2, "target entropy of use_adaptive_entropy, in nats per token")
    entropy_coef_delta: NotNegative = arg(0.005, "change of entropy_coef by a step of use_adaptive_entropy")
    entropy_coef_min: NotNegative = arg(0.0, "lower bound of entropy_coef in use_adaptive_entropy")
    entropy_coef_max: NotNegative = arg(1.0, "upper bound of entropy_coef in use_adaptive_entropy")
    dynamic_sampling: bool = arg(
        False, "drop groups whose rewards are all equal, and roll out the next prompts instead (DAPO)"
    )
    max_num_gen_batches: Size = arg(10, "maximum rollouts per iteration with dynamic_sampling")
    partial_rollout: bool = arg(
        False,
        "end a rollout once enough groups are done; the other completions go on in the next one, under its weights "
        "(needs importance_sampling_correction)",
    )
    over_sampling_batch_size: int = arg(
        0, "prompts per rank in flight with partial_rollout; 0: half as many again as per_device_generation_batch_size"
    )
    mask_truncated_completions: bool = arg(False, "mask completions without an end token out of the loss")
    soft_punish_cache: Count = arg(
        0,
        "last tokens of max_answer_seq_len over which a length penalty rises to 1 (DAPO's overlong punishment); 0: off",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.partial_rollout and not self.over_sampling_batch_size:
            self.over_sampling_batch_size = -(-3 * self.per_device_generation_batch_size // 2)

    def refusals(self) -> Iterator[tuple[Any, str]]:
        yield from super().refusals()
        yield from refused_losses(self)
        yield from refused_advantages(self)
        Within(0, self.max_answer_seq_len).check("soft_punish_cache", self.soft_punish_cache)
        yield (
            self.sequence_parallel_size > 1 and self.training_forward != "packed",
            f"sequence_parallel_size: {self.sequence_parallel_size} given with training_forward: "
            f"{self.training_forward!r}; ranks share packed rows: use 'packed', or 1",
        )
        given, min_size = self.over_sampling_batch_size, self.per_device_generation_batch_size
        yield (
            given and not self.partial_rollout,
            f"over_sampling_batch_size: {given} given with partial_rollout: false; give true, or leave it out",
        )
        yield (
            self.partial_rollout and not self.importance_sampling_correction,
            "partial_rollout: true given with importance_sampling_correction: false; completions then have tokens of "
            "older weights, and the loss must be weighted by the ratio of trainer and sampler: use true",
        )
        yield (
            self.partial_rollout and not self.enable_hybrid_engine,
            "partial_rollout: true given with enable_hybrid_engine: false; it needs the fused decoder",
        )
        yield (
            given and given < min_size,
            f"over_sampling_batch_size: {given} given; it must be at least per_device_generation_batch_size, "
            f"{min_size}",
        )
        yield (
            self.partial_rollout and self.dynamic_sampling and self.offload_reference_model,
            "partial_rollout: true given with dynamic_sampling and offload_reference_model; ranks then score different "
            "numbers of groups, which partitioned reward models cannot: leave one of the three out",
        )

    def require_inputs(self, written_later: str = "") -> None:
        """See ScriptArguments; also a reward is required."""
        super().require_inputs(written_later)
        if not self.reward and not isinstance(self, AgentArguments):  # there the environment rewards
            raise ValueError("reward: none given; give functions, addresses of servers, or reward models")


@dataclass
class DistillArguments(RolloutArguments):
    """On-policy distillation: a teacher's distributions on the student's own completions."""

    output_dir: str = arg("runs/distill", "directory for logs, checkpoints and the trained student")
    teacher_model_name_or_path: list[Model] = arg(
        [], "directory or hub name of the teacher, or one for each data_path; with the student's tokenizer", "Teacher"
    )
    self_teacher: Literal["", "policy", "base"] = arg(
        "",
        "in place of another model, the student's own weights: as they are (policy), on the prompts of "
        "teacher_prompt_column, or without their adapter (base)",
    )
    teacher_prompt_column: str = arg(
        "",
        "column of the teacher's prompts, texts or conversations, which say more than the student's: the answer, a "
        "hint, feedback; empty: the student's prompts",
    )
    sleeping_teacher: bool = arg(False, "the teachers' weights leave the device while the student rolls out")
    distillation_mode: Literal["full_logits", "topk_logits", "sampled_token"] = arg(
        "full_logits",
        "what is compared: full_logits (whole distributions), topk_logits (the most probable tokens) or "
        "sampled_token (logprobs of the sampled tokens)",
        "Divergence",
    )
    beta: Share = arg(1.0, "the divergence: 0 forward KL, 1 reverse KL, between: generalized Jensen-Shannon")
    distillation_topk: Size = arg(100, "number of most probable tokens with topk_logits")
    distillation_topk_support: Literal["student", "teacher"] = arg(
        "teacher", "whose most probable tokens these are; the student's need all of the teacher's logits, by chunks"
    )
    distillation_add_tail: bool = arg(
        True, "the other tokens count as one; false: the probabilities of these are divided by their sum"
    )
    num_generations: Size = arg(1, "completions per prompt", "Rollouts")

    @property
    def compares_logits(self) -> bool:
        """Whether the loss needs the teacher's logits, not only top logprobs or logprobs."""
        of_student = self.distillation_mode == "topk_logits" and self.distillation_topk_support == "student"
        return self.distillation_mode == "full_logits" or of_student

    def refusals(self) -> Iterator[tuple[Any, str]]:
        yield from super().refusals()
        names, teacher, mode = self.teacher_model_name_or_path, self.self_teacher, self.distillation_mode
        yield (
            names and teacher,
            f"self_teacher: {teacher!r} given with teacher_model_name_or_path: {names}; give one of the two",
        )
        count = len(self.data_path)
        yield (
            len(names) > 1 and len(names) != count,
            f"teacher_model_name_or_path: {len(names)} given for {count} entries of data_path; give one, or one each",
        )
        yield (
            teacher == "policy" and not self.teacher_prompt_column,
            "self_teacher: 'policy' given without teacher_prompt_column; on the same prompts it is the student: give "
            "the column of the teacher's prompts",
        )
        yield (
            teacher == "base" and not self.actor_lora_dim,
            "self_teacher: 'base' given with actor_lora_dim: 0; the base is what an adapter is trained on: give its "
            "rank, or 'policy'",
        )
        instead = "give distillation_mode: 'topk_logits' with distillation_topk_support: 'teacher', or 'sampled_token'"
        yield (
            teacher == "base" and self.compares_logits,
            f"self_teacher: 'base' given with distillation_mode: {mode!r}; its logits exist in the rollout's window "
            f"only: {instead}",
        )
        yield (
            self.offload_reference_model and self.compares_logits,
            f"offload_reference_model: true given with distillation_mode: {mode!r}, which needs the teacher's whole "
            f"head on every rank: {instead}",
        )
        yield (
            self.sleeping_teacher and (self.offload_reference_model or not names),
            "sleeping_teacher: true given; it needs teacher_model_name_or_path, and offload_reference_model: false",
        )
        yield (
            mode == "sampled_token" and self.beta != 1,
            f"beta: {self.beta} given with distillation_mode: 'sampled_token', which estimates the reverse KL; give 1",
        )
        yield (
            mode != "sampled_token" and self.training_forward == "exact",
            f"training_forward: 'exact' given with distillation_mode: {mode!r}, whose loss is of logits that the exact "
            "forward does not compute; give 'packed', or distillation_mode: 'sampled_token'",
        )
        yield (
            teacher == "policy" and self.compares_logits and self.training_forward != "packed",
            f"training_forward: {self.training_forward!r} given with self_teacher: 'policy' and distillation_mode: "
            f"{mode!r}; give 'packed', or another mode",
        )
        yield (
            self.importance_sampling_correction,
            "importance_sampling_correction: true given; the loss of distillation has no ratio to weight: leave it out",
        )
        yield (
            self.keep_sampling_mask,
            "keep_sampling_mask: true given; distillation compares whole distributions: leave it out",
        )

    def require_inputs(self, written_later: str = "") -> None:
        """See ScriptArguments; also a teacher is required."""
        super().require_inputs(written_later)
        if not self.teacher_model_name_or_path and not self.self_teacher:
            raise ValueError("teacher_model_name_or_path: none given; give a model, or self_teacher")


@dataclass
class AgentArguments(GRPOArguments):
    """GRPO over several turns, rewarded by an environment."""

    output_dir: str = arg("runs/agent", "directory for logs, checkpoints and the trained policy")
    environment: EnvironmentName = arg(
        "calculator", "calculator, guessing, or module:name of an rlhf_examples.environments.Environment"
    )
    harness: EnvironmentName = arg(
        "",
        "module:name of a function (base_url, record) that plays a record of the environment through OpenAI's API and "
        "returns the reward; empty: the environment plays. Needs the extra server",
    )
    max_turns: Size = arg(8, "maximum turns of a conversation")
    max_turn_tokens: Count = arg(0, "maximum tokens of a turn; 0: max_answer_seq_len, which is of all turns together")
    step_timeout_s: Seconds = arg(60.0, "timeout of an environment's reset or step, in seconds")
    overlap_rewards: bool = arg(False, "not used: an environment rewards its conversations while others decode")

    def refusals(self) -> Iterator[tuple[Any, str]]:
        for name in NOT_OF_ENVIRONMENTS:
            value = getattr(self, name)
            yield value, f"{name}: {value} given; prompts and rewards are the environment's: leave it out"
        yield from refused_outside_of_grpo(self)
        yield from super().refusals()
        yield (
            self.harness and self.log_rollouts,
            f"log_rollouts: true given with harness: {self.harness!r}; each request of a program has a sampling key of "
            "its own, which its rows do not keep: leave one of the two out",
        )
        yield (
            self.harness and self.keep_sampling_mask,
            f"keep_sampling_mask: true given with harness: {self.harness!r}; rows of requests have no mask: leave one "
            "of the two out",
        )


@dataclass
class RayGRPOArguments(GRPOArguments):
    """GRPO in Ray actors."""

    num_ranks: int = arg(2, "actors, each with a rank, and with a GPU if the cluster has any")
    sleeps: bool = arg(True, "an engine is on the device only while it computes")


@dataclass
class ThreadedGRPOArguments(GRPOArguments):
    """GRPO with rewards in a thread."""

    num_rollouts: int = arg(4, "rollouts of an iteration, each of per_device_generation_batch_size prompts per rank")
    threaded: bool = arg(True, "compute rewards while the next rollout decodes; false waits for them")


@dataclass
class VisionGRPOArguments(GRPOArguments):
    """GRPO on prompts with images."""

    output_dir: str = arg("runs/vision_grpo", "directory for the trained policy")
    tokenizer_name_or_path: Tokenizer = arg("", "directory or hub name of the processor; empty: the model's")
    data_path: list[Data] = arg(
        [], "JSON-lines files with the columns prompt, and image (a path from the file's folder) or images (several)"
    )
    max_prompt_seq_len: int = arg(
        1024, "maximum prompt length in tokens, those of images included; longer prompts are left out and counted"
    )
    training_forward: Literal["model"] = arg("model", "model (the model's own): rows with images are not packed")

    def refusals(self) -> Iterator[tuple[Any, str]]:
        for name in NOT_OF_IMAGES:
            value = getattr(self, name)
            yield value, f"{name}: {value} given; leave it out here, or run rlhf_examples.grpo on prompts of text"
        yield from refused_outside_of_grpo(self)
        yield from super().refusals()
        rows = self.per_device_generation_batch_size * self.num_generations
        yield (
            self.num_mini_batches > rows,
            f"num_mini_batches: {self.num_mini_batches} given; a rank has {rows} completions, so give at most that",
        )

    def require_inputs(self, written_later: str = "") -> None:
        """See ScriptArguments; also records are required."""
        super().require_inputs(written_later)
        if not self.data_path:
            raise ValueError("data_path: none given; give JSON-lines files with the columns prompt and image")


@dataclass
class GenerationArguments(DataArguments):
    """Arguments of a script in which a frozen model completes prompts."""

    tokenizer_name_or_path: Tokenizer = arg("", "directory or hub name; empty: the model's", MODELS)
    dtype: Dtype = arg("float32", "float32 or bfloat16")
    attn_implementation: str = arg("", ATTENTION)
    max_prompt_seq_len: int = arg(
        256, "maximum prompt length in tokens; longer prompts are left out and counted", SAMPLING
    )
    max_answer_seq_len: Size = arg(64, "maximum completion length in tokens")
    stop_token_ids: list[int] = arg([], "end tokens in addition to the model's own")
    temperature: float = arg(1.0, "sampling temperature; 0: greedy")
    top_p: float = arg(1.0, "nucleus sampling; 1: off")
    top_k: int = arg(0, "number of most probable tokens to sample from; 0: off")
    seed: int = arg(0, "seed of sampling")

    def refusals(self) -> Iterator[tuple[Any, str]]:
        yield from super().refusals()
        yield attention_of_another_dtype(self)


@dataclass
class EvaluateArguments(GenerationArguments):
    """Models compared on held-out prompts."""

    model_name_or_path: list[Model] = arg(
        [], "directories or hub names of the models to compare", MODELS, required=True
    )
    zero_stage: FrozenZeroStage = arg(0, "3: partition the models")
    data_path: list[Data] = arg(["synthetic:stories@test"], "prompts: hub names, files or synthetic:… sets", RECORDS)
    eval_rows: Count = arg(128, "maximum number of prompts")
    reward: Reward = arg(
        "rlhf_examples.data.synthetic:gold_score",
        "reward function (module:function), or a reward model's directory or hub name",
        REWARDS,
    )
    per_device_eval_batch_size: int = arg(16, "completions per rank in a forward of a reward model")
    eval_num_generations: Size = arg(1, "completions per prompt", EVALUATION)
    pass_at_k: list[int] = arg([], "values of k for pass@k")
    pass_score: float = arg(1.0, "minimum score of a completion that passes")
    hf_generate: bool = arg(False, "complete by transformers' generate over tokenizer(prompt), as the models' users do")
    num_samples: int = arg(4, "prompts whose completions are shown")
    output_file: OutputFile = arg("", "JSON file for the results; empty: none")

    def refusals(self) -> Iterator[tuple[Any, str]]:
        yield from super().refusals()
        yield from refused_pass_at_k(self, self.temperature == 0)
        for name in ("zero_stage", "tokenizer_name_or_path", "chat_template"):
            value = getattr(self, name)
            yield (
                self.hf_generate and value,
                f"{name}: {value!r} given with hf_generate: true, where transformers loads models and tokenizers as "
                "they are; leave it out",
            )


@dataclass
class PairsArguments(GenerationArguments):
    """Preference pairs from a model's own completions."""

    output_dir: str = arg("runs/pairs", "directory for pairs.jsonl", "Run")
    model_name_or_path: Model = arg("", "directory or hub name", MODELS, required=True)
    zero_stage: FrozenZeroStage = arg(0, "3: partition the model")
    data_path: list[Data] = arg(["synthetic:openings"], "prompts: hub names, files or synthetic:… sets", RECORDS)
    reward: Reward = arg(
        "rlhf_examples.rewards:joyful_story",
        "reward function (module:function), or a reward model's directory or hub name",
        REWARDS,
    )
    rounds: int = arg(4, "pairs per prompt; two completions with equal scores give none")
    per_device_eval_batch_size: int = arg(16, "completions per rank in a forward of a reward model")


@dataclass
class ThroughputArguments(GenerationArguments):
    """Tokens per second of rollouts, and of Hugging Face's generate."""

    model_name_or_path: Model = arg("", "directory or hub name", MODELS, required=True)
    data_path: list[Data] = arg(["synthetic:stories"], "prompts: hub names, files or synthetic:… sets", RECORDS)
    per_device_generation_batch_size: Size = arg(32, "prompts per rank", "Rounds")
    rounds: int = arg(3, "measurements of each, in alternation")


@dataclass
class PipelineArguments(ScriptArguments):
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

    def refusals(self) -> Iterator[tuple[Any, str]]:
        yield from super().refusals()
        yield resume_and_overwrite(self)

    def output_directories(self) -> list[str]:
        """See ScriptArguments; a step, run by itself, must not write there either."""
        return [self.output_dir, *(f"{self.output_dir}/{step}" for step in self.steps)]


@dataclass
class ChatArguments(ScriptArguments):
    """A conversation with a model in a terminal."""

    path: Model = arg("", "directory or hub name of a model or an adapter", MODELS, required=True)
    compare: Model = arg("", "a second model; its answers are shown next to the first model's")
    system: str = arg("", "system message, for models with a chat template", "Conversation")
    chat_template_kwargs: str = arg(
        "", 'JSON object of arguments for the chat template, such as {"enable_thinking": false}'
    )
    max_new_tokens: Size = arg(128, "maximum length of an answer in tokens", SAMPLING)
    stop_token_ids: list[int] = arg([], "end tokens in addition to the model's own")
    temperature: NotNegative = arg(0.8, "sampling temperature; 0: greedy")
    top_p: Annotated[float, Within(0.01, 1)] = arg(0.95, "nucleus sampling; 1: off")
    seed: int = arg(0, "seed of sampling")
    dtype: Literal["float32", "bfloat16", "int8"] = arg("float32", "float32, bfloat16 or int8", MODELS)
    attn_implementation: str = arg("", ATTENTION)

    def refusals(self) -> Iterator[tuple[Any, str]]:
        yield from super().refusals()
        yield (
            self.compare and not self.path,
            f"compare: {self.compare!r} given without path, the model to compare it with",
        )
        yield attention_of_another_dtype(self)
        RecordFormat(chat_template_kwargs=self.chat_template_kwargs)  # raises ValueError unless it is a JSON object


@dataclass
class RewardServerArguments(ScriptArguments):
    """A reward function over HTTP."""

    reward: Reward = arg("rlhf_examples.rewards:exact_match", "reward function, module:function")
    host: str = arg("127.0.0.1", "address to listen on; 0.0.0.0: all of this machine's")
    port: int = arg(8765, "port to listen on; 0: a free one")
    address_file: OutputFile = arg("", "file to write the server's address to once it listens; empty: none")
    parent_pid: int = arg(0, "exit when this parent process ends; 0: never")
