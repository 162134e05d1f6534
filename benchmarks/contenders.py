"""The contenders of the rollout benchmark, on the same weights and requests: this engine, Hugging Face's ways, vLLM."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import hybrid
from benchmarks.cases import MAX_TOKENS, PAD, EndAtLength, Request
from benchmarks.vllm_contender import VLLM, VLLMSettings


@dataclass(frozen=True)
class Outcome:
    """The result of a run.  lengths: tokens of each completion.  phases: seconds by phase, if they are reported."""

    lengths: list[int]
    phases: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Contender:
    """A way to run requests, by the name that it has in the table.

    about: its version, if it is not this process's.
    note: why its runs so far were slower than they could be; "" if they were not.
    """

    name: str
    run: Callable[[Request], Outcome]
    close: Callable[[], None] = lambda: None
    about: str = ""
    note: Callable[[], str] = lambda: ""


@dataclass(frozen=True)
class Setting:
    """The arguments of contenders.

    model: whole, in eval mode.  engine: with the same weights.
    max_rows, max_tokens: completions of the largest request, and tokens of the longest sequence.
    """

    model: nn.Module
    engine: hybrid.HybridEngine
    max_rows: int
    max_tokens: int
    vllm: VLLMSettings

    @property
    def vocab_size(self) -> int:
        """The size of the model's vocabulary."""
        return self.model.config.get_text_config().vocab_size


def make_engine(model: nn.Module, weight_dtype: str = "model") -> hybrid.HybridEngine:
    """A ZeRO-3 engine with a copy of `model`; asserts that the weights are the same.

    weight_dtype: of rollouts.
    """
    engine = zero3_engine(copy.deepcopy(model), MAX_TOKENS, rollout={"weight_dtype": weight_dtype})
    for whole, partitioned in zip(model.parameters(), engine.module.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters([partitioned]):
            assert torch.equal(whole, partitioned), "contenders have different weights"
    return engine


def zero3_engine(
    model: nn.Module, max_out_tokens: int, lr: float = 1e-4, **blocks: dict[str, Any]
) -> hybrid.HybridEngine:
    """A ZeRO-3 engine that partitions everything.  blocks: more settings of `zero_optimization`, `hybrid_engine` and
    `rollout`.

    The optimizer has no state: it is not measured, and the states of a 7B model would fill the device.
    """
    zero, hybrid_engine, rollout = (blocks.get(name, {}) for name in ("zero_optimization", "hybrid_engine", "rollout"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return hybrid.initialize(
        model=model,
        optimizer=torch.optim.SGD(trained, lr=lr),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
            "bf16": {"enabled": trained[0].dtype == torch.bfloat16},
            "hybrid_engine": {"enabled": True, "max_out_tokens": max_out_tokens, **hybrid_engine},
            # Repetitions have equal prompts, which must be computed each time.
            "rollout": {"enable_prefix_caching": False, **rollout},
        },
    )[0]


def generate_arguments(request: Request) -> dict:
    """Arguments of Hugging Face's generate, for plain sampling at temperature 1."""
    arguments = {
        "attention_mask": torch.ones_like(request.prompt_ids),
        "max_new_tokens": request.new_tokens,
        "num_return_sequences": request.group,
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "pad_token_id": PAD,
    }
    if request.ends:
        arguments |= {"eos_token_id": request.end, "logits_processor": [EndAtLength(request)]}
    return arguments


def outcome_of(sequences: torch.Tensor, request: Request) -> Outcome:
    """The outcome of `generate`.  sequences int64 [rows, tokens]: completions end with the end token, or at the end."""
    completions = sequences[:, request.prompt_ids.shape[1] :]
    if not request.ends:
        return Outcome([completions.shape[1]] * len(completions))
    return Outcome(((completions == request.end).int().argmax(dim=1) + 1).tolist())


def hybrid_rollouts(name: str, setting: Setting, new_weights: bool, weight_dtype: str = "model") -> Contender:
    """This engine.  new_weights: every run refreshes the snapshot, as after an optimizer step.

    weight_dtype: "int8" for an engine of its own, whose rollouts run over int8 weights.
    """
    separate = None if weight_dtype == "model" else make_engine(setting.model, weight_dtype)
    engine = separate or setting.engine

    def run(request: Request) -> Outcome:
        if new_weights:
            engine.mark_weights_changed()
        sampling = hybrid.SamplingParams(max_new_tokens=request.new_tokens)
        mask, limits = torch.ones_like(request.prompt_ids), torch.tensor(request.lengths)
        batch = engine.rollout(request.prompt_ids, mask, sampling, num_generations=request.group, max_new_tokens=limits)
        return Outcome(batch.completion_mask.sum(dim=1).tolist(), dict(batch.timings))

    return Contender(name, run, separate.destroy if separate else lambda: None)


def hugging_face(name: str, generate: Callable) -> Contender:
    """Hugging Face's generate, called through `generate`."""
    return Contender(name, lambda r: outcome_of(generate(r.prompt_ids, **generate_arguments(r)), r))


@contextmanager
def gathered(engine: hybrid.HybridEngine) -> Iterator[None]:
    """As TRL does it: inside the block every parameter is gathered, and ZeRO's hooks are removed."""
    offload = engine.optimizer.parameter_offload
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())), eval_mode(engine.module):
        offload._remove_module_hooks()
        offload.forward_hooks, offload.backward_hooks = [], []
        try:
            yield
        finally:
            offload.setup_zero_stage3_hooks()


@contextmanager
def eval_mode(module: torch.nn.Module) -> Iterator[None]:
    """Inside the block the module is in eval mode; afterwards in train mode."""
    module.eval()
    try:
        yield
    finally:
        module.train()


def gathered_generate(engine: hybrid.HybridEngine) -> Callable:
    """Hugging Face's generate on gathered weights."""

    def generate(ids: torch.Tensor, **request) -> torch.Tensor:
        with gathered(engine):
            # The class's method: the instance's method calls the engine.
            return type(engine.module).generate(engine.module, ids, synced_gpus=False, **request)

    return generate


def vllm(name: str, setting: Setting, eager: bool) -> Contender:
    """vLLM in a separate process, from an environment with its CPU build."""
    if setting.model.device.type != "cpu" or dist.get_world_size() > 1:
        raise ValueError(
            f"{name} on {dist.get_world_size()} ranks on {setting.model.device.type}: the environment of "
            "`make bench-vllm` has vLLM for one process on a CPU; leave it out of --contenders"
        )
    server = VLLM(setting.vllm, setting.model, setting.max_rows, setting.max_tokens, eager)
    return Contender(name, lambda request: Outcome(server.run(request)), server.close, server.about)


# By their names on the command line and in the table, whose ratios are relative to "hf".
CONTENDERS: dict[str, Callable[[Setting], Contender]] = {
    "hybrid": lambda setting: hybrid_rollouts("hybrid", setting, new_weights=False),
    "hybrid-new-weights": lambda setting: hybrid_rollouts("hybrid-new-weights", setting, new_weights=True),
    "hybrid-int8": lambda setting: hybrid_rollouts("hybrid-int8", setting, False, "int8"),
    "hybrid-int8-new-weights": lambda setting: hybrid_rollouts("hybrid-int8-new-weights", setting, True, "int8"),
    "hf": lambda setting: hugging_face("hf", setting.model.generate),
    "zero3-gathered": lambda setting: hugging_face("zero3-gathered", gathered_generate(setting.engine)),
    "vllm": lambda setting: vllm("vllm", setting, eager=False),
    "vllm-eager": lambda setting: vllm("vllm-eager", setting, eager=True),
}
