"""The arguments of a run: a YAML file, and flags that override it."""

import difflib
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path

import yaml
from transformers import HfArgumentParser


def about(default, text: str):
    """A field with its help text."""
    return field(default=default, metadata={"help": text})


@dataclass
class PPOArguments:
    """Names are TRL's where TRL has one."""

    output_dir: str = about("runs/ppo", "where logs, checkpoints and the trained policy go")
    model: str = about("", "directory or hub name of the policy; empty: a small one is made and supervised first")
    tokenizer: str = about("", "directory or hub name; empty: the model's")
    prompts: str = about("", "text file, a prompt a line; empty: prompts that belong to the embedded corpus or stories")
    reward: str = about(
        "rlhf_examples.rewards:cheerful",
        "module:function over (prompts, completions), or the directory of a sequence classifier",
    )
    stop_token_ids: list[int] = field(default_factory=list, metadata={"help": "end tokens besides the model's own"})
    seed: int = about(0, "of everything random in the run")

    dtype: str = about("float32", "float32 or bfloat16")
    zero_stage: int = about(3, "ZeRO stage of policy and critic, 0 to 3")
    persistence_threshold: int = about(0, "stage3_param_persistence_threshold")
    lora_r: int = about(0, "rank of a PEFT LoRA on every linear layer; 0 trains the whole model")
    lora_alpha: int = about(16, "LoRA's alpha")

    num_iterations: int = about(20, "iterations: a rollout and the updates on it")
    per_device_rollout_batch_size: int = about(16, "prompts of a rank in an iteration")
    response_length: int = about(32, "longest completion in tokens")
    temperature: float = about(1.0, "of sampling, and of every logprob")
    top_p: float = about(1.0, "nucleus sampling; 1 is off")
    logprob_mode: str = about("recompute", "old logprobs: recompute by a forward, or as sampled (sampling)")
    importance_sampling_correction: bool = about(
        False,
        "weigh each token's loss by exp(old logprob - sampling logprob), with old logprobs of the training forward; "
        "needs logprob_mode recompute",
    )
    importance_sampling_cap: float = about(2.0, "those weights are at most this")
    numerics_control_rows: int = about(
        2, "rows of the first mini batch on which the trainer is compared with itself, a row a forward; 0 is off"
    )

    learning_rate: float = about(1e-4, "of the policy")
    critic_learning_rate: float = about(3e-4, "of the critic")
    num_ppo_epochs: int = about(2, "passes over a rollout")
    num_mini_batches: int = about(2, "optimizer steps in a pass")
    per_device_train_batch_size: int = about(8, "sequences in a forward and backward; the rest is accumulated")
    max_grad_norm: float = about(1.0, "gradient clipping")
    kl_coef: float = about(0.05, "weight of the KL to the reference in the reward")
    cliprange: float = about(0.2, "PPO's clipping of the ratio")
    cliprange_value: float = about(0.2, "clipping of the value around the old one")
    gamma: float = about(1.0, "discount")
    lam: float = about(0.95, "GAE's lambda")
    whiten_rewards: bool = about(False, "scale rewards to variance 1")
    clip_reward: float = about(5.0, "scores are clipped to ± this")
    missing_eos_penalty: float = about(0.0, "taken off the score of a completion without an end token")

    save_every: int = about(10, "iterations between checkpoints; 0 saves none")
    keep_last: int = about(2, "checkpoints kept")
    resume: bool = about(False, "go on from the newest checkpoint in output_dir")
    print_every: int = about(1, "iterations between tables in the terminal")

    sft_steps: int = about(90, "embedded model: supervised steps")
    sft_learning_rate: float = about(2e-3, "embedded model: learning rate of the supervised steps")
    sft_batch_size: int = about(16, "embedded model: stories in a rank's step")
    hidden_size: int = about(256, "embedded model: hidden size")
    num_hidden_layers: int = about(4, "embedded model: layers")

    def __post_init__(self):
        allowed = {
            "dtype": ("float32", "bfloat16"),
            "logprob_mode": ("recompute", "sampling"),
            "zero_stage": (0, 1, 2, 3),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name}: {getattr(self, name)!r} given; allowed: {', '.join(map(str, values))}")
        if self.importance_sampling_correction and self.logprob_mode == "sampling":
            raise ValueError(
                "importance_sampling_correction: true given with logprob_mode: 'sampling', where the old logprobs are "
                "the sampler's own and every weight would be 1; use logprob_mode: 'recompute'"
            )
        lowest = {"importance_sampling_cap": 1, "numerics_control_rows": 0}
        for name, least in lowest.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}: {getattr(self, name)!r} given; it must be at least {least}")
        if self.mini_batch_rows * self.num_mini_batches != self.per_device_rollout_batch_size:
            raise ValueError(
                f"per_device_rollout_batch_size: {self.per_device_rollout_batch_size} given; it must be a multiple "
                f"of num_mini_batches, {self.num_mini_batches}"
            )
        if self.mini_batch_rows % self.per_device_train_batch_size:
            raise ValueError(
                f"per_device_train_batch_size: {self.per_device_train_batch_size} given; it must divide a mini "
                f"batch's {self.mini_batch_rows} sequences"
            )

    @property
    def mini_batch_rows(self) -> int:
        """Sequences of a rank in an optimizer step."""
        return self.per_device_rollout_batch_size // self.num_mini_batches

    @property
    def gradient_accumulation_steps(self) -> int:
        """Backwards in an optimizer step."""
        return self.mini_batch_rows // self.per_device_train_batch_size


def parse_arguments(argv: list[str] | None = None) -> PPOArguments:
    """The arguments from `[file.yaml] [--flag value ...]`.

    Raises ValueError for a key of the file that is not known, naming the nearest.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    # The `deepspeed` launcher gives its rank as a flag; it is in the environment too.
    argv = [text for text in argv if not text.startswith("--local_rank=")]
    parser = HfArgumentParser(PPOArguments)
    if argv and argv[0].endswith((".yaml", ".yml")):
        parser.set_defaults(**read_yaml(Path(argv.pop(0))))
    (arguments,) = parser.parse_args_into_dataclasses(args=argv)
    return arguments


def read_yaml(path: Path) -> dict:
    """The settings in a file, every key known."""
    if not path.is_file():
        raise ValueError(f"no file at {str(path)!r}")
    settings, known = yaml.safe_load(path.read_text()) or {}, [field.name for field in fields(PPOArguments)]
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0)[0]
            raise ValueError(f"{path}: unknown key {key!r}; the nearest known key is {near!r}")
    return settings
