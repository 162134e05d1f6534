"""Runs scripts inside ranks of a pool, on small models."""

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForSequenceClassification, LlamaForCausalLM

import hybrid
from rlhf_examples import agent, dpo, grpo, ppo, reward_model, sft
from rlhf_examples.common import checkpoint
from rlhf_examples.common.arguments import (
    AgentArguments,
    DPOArguments,
    GRPOArguments,
    PPOArguments,
    RewardModelArguments,
    SFTArguments,
)
from rlhf_examples.common.models import small_model
from rlhf_examples.common.parsing import arguments_of
from rlhf_examples.common.run_log import read_metrics
from rlhf_examples.data.synthetic import synthetic_tokenizer
from rlhf_examples.environments import Environment, environment_tokenizer, user

SCRIPTS = {
    "sft": (sft, SFTArguments),
    "reward_model": (reward_model, RewardModelArguments),
    "dpo": (dpo, DPOArguments),
    "ppo": (ppo, PPOArguments),
    "grpo": (grpo, GRPOArguments),
    "agent": (agent, AgentArguments),
}
LOGS = {"report_to": [], "print_every": 0}
TRAINING = {"per_device_train_batch_size": 4, "max_steps": 4, "eval_rows": 6, "learning_rate": 2e-3, **LOGS}
ROLLOUTS = {
    "num_iterations": 4,
    "per_device_generation_batch_size": 4,
    "per_device_training_batch_size": 2,
    "num_mini_batches": 2,
    "max_answer_seq_len": 8,
    "eval_rows": 5,
    "num_samples": 2,
    "actor_learning_rate": 2e-3,
    **LOGS,
}
TINY = {
    "sft": {**TRAINING, "hidden_size": 16, "num_hidden_layers": 2},
    "reward_model": TRAINING,
    "dpo": TRAINING,
    "ppo": {**ROLLOUTS, "ppo_epochs": 2, "critic_learning_rate": 2e-3},
    "grpo": {**ROLLOUTS, "num_generations": 4, "reward": "tests.rlhf_examples.scripts:number_of_words"},
    "agent": {
        **ROLLOUTS,
        "num_generations": 4,
        "environment": "tests.rlhf_examples.scripts:TALK",
        "max_answer_seq_len": 24,
        "max_turn_tokens": 4,
    },
}
TIMES = ("time/", "memory/")


def number_of_words(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    """A reward that a random model gets some of."""
    return [len(set(completion.split())) / 4 for completion in completions]


class Talk:
    """Some turns, each rewarded by its number of different words, with which a random model differs from itself."""

    def reset(self, turns: int) -> tuple[str, dict]:
        self.left = turns
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        self.left -= 1
        return "higher", len(set(action.split())) / 4, self.left == 0, False, {}


def talk(tokenizer, **settings) -> hybrid.MessageEnvironment:
    def make() -> hybrid.StepEnvironment:
        return hybrid.StepEnvironment(Talk(), reset_arguments=lambda record: {"turns": record["turns"]})

    return hybrid.MessageEnvironment(tokenizer, environment_factory=make, **settings)


def talk_records(split: str, seed: int = 0, size: int | None = None) -> list[dict]:
    """Prompts of two lengths whose conversations have one to three turns."""
    prompts = ("guess", "guess higher 3")
    return [{"prompt": user(prompts[i % 2]), "turns": 1 + i % 3} for i in range(size or 24)]


TALK = Environment(talk, talk_records, talk_records)


def words_but_of_the_first(prompts: list[str], completions: list[str], **columns: list) -> list[float | None]:
    """`number_of_words`, where the first completion cannot be scored."""
    return [None, *number_of_words(prompts[1:], completions[1:])]


def make_small_models(directory: Path, seed: int = 0) -> Path:
    """Save a random language model in model/ and a reward model in reward_model/, with their tokenizer, and in
    agent_model/ one with the environments' tokenizer.
    """
    torch.manual_seed(seed)
    tokenizer = synthetic_tokenizer()
    model = small_model(16, 2, tokenizer)
    for name in ("model", "reward_model"):
        model.save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
    reward_model = AutoModelForSequenceClassification.from_pretrained(directory / "model", num_labels=1)
    torch.nn.init.normal_(reward_model.score.weight, std=0.5)
    reward_model.save_pretrained(directory / "reward_model")
    torch.manual_seed(seed)
    small_model(16, 2, environment_tokenizer()).save_pretrained(directory / "agent_model")
    environment_tokenizer().save_pretrained(directory / "agent_model")
    return directory


def models_of(script: str, directory: Path) -> dict[str, str]:
    """The settings that name the models of `make_small_models`."""
    if script == "agent":
        return {"actor_model_name_or_path": str(directory / "agent_model")}
    if script in ("ppo", "grpo"):
        of_ppo = {"critic_model_name_or_path": str(directory / "reward_model")} if script == "ppo" else {}
        return {"actor_model_name_or_path": str(directory / "model"), **of_ppo}
    return {"model_name_or_path": str(directory / "model")}


def run_in_this_rank(script: str, settings: dict) -> dict[str, float]:
    """Run a script in this rank; returns its result."""
    module, kind = SCRIPTS[script]
    return module.run(arguments_of(kind, {**TINY[script], **settings}))


def run_until(script: str, settings: dict, point: str) -> None:
    """`run_in_this_rank`, in which the last rank kills itself at `point`."""
    kill_last_rank_at(point)
    run_in_this_rank(script, settings)


def logged(directory: Path) -> list[dict[str, float]]:
    """The metrics of a run's iterations without times and memory."""
    return [
        {name: value for name, value in row.items() if not name.startswith(TIMES)} for row in iterations_of(directory)
    ]


def iterations_of(directory: Path) -> list[dict[str, float]]:
    """A run's logged metrics without the evaluation before training."""
    return [row for row in read_metrics(directory) if row["iteration"]]


# Point → the function that kills the rank, and at which of its calls.
POINTS = {
    "rollout": ("roll_out", 4),  # the first call is the evaluation's
    "update": ("backward_and_step", 15),
    "before saving": ("save", 2),
    "while saving": ("save", 2),
    "after saving": ("save", 2),
}


def kill_last_rank_at(point: str) -> None:
    """Make the last rank kill itself at a point of POINTS."""
    name, calls = POINTS[point]
    if dist.get_rank() != dist.get_world_size() - 1:
        return
    owners = [module for module, _ in SCRIPTS.values() if hasattr(module, name)] or [checkpoint.Checkpoints]
    own, count = getattr(owners[0], name), 0

    def dying(*args, **kwargs):
        nonlocal count
        count += 1
        if count == calls and point == "while saving":
            torch.save = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
        if count == calls and not point.startswith(("after", "while")):
            os.kill(os.getpid(), signal.SIGKILL)
        result = own(*args, **kwargs)
        if count == calls:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    for owner in owners:
        setattr(owner, name, dying)


def load_with_transformers(directory: Path) -> LlamaForCausalLM:
    """The model as plain transformers loads it."""
    return LlamaForCausalLM.from_pretrained(directory).eval()
