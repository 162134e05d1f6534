"""The contenders of the rollout benchmark, on the same weights and requests: this engine, Hugging Face's ways, vLLM."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from transformers import CompileConfig, GenerationConfig
from transformers.generation import ContinuousBatchingConfig

import hybrid
from benchmarks.cases import MOST_TOKENS, PAD, EndAtLength, Request
from benchmarks.vllm_contender import VLLM, VLLMSettings

PAGE_SIZE = 256  # tokens of a block in continuous batching's cache; transformers' default
TOKENS_PER_FORWARD = 2048  # a decode step is slower with the default of 8192, because the mask has as many rows
WAIT_S = 1.0


@dataclass(frozen=True)
class Outcome:
    """The result of a run.  lengths: tokens of each completion.  phases: seconds by phase, if they are reported."""

    lengths: list[int]
    phases: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Contender:
    """A way to run requests, by the name that it has in the table.

    about: its version, if it is not this process's.  compiles: whether a request of new sizes is compiled first.
    note: why its runs so far were slower than they could be; "" if they were not.
    """

    name: str
    run: Callable[[Request], Outcome]
    close: Callable[[], None] = lambda: None
    about: str = ""
    compiles: bool = False
    note: Callable[[], str] = lambda: ""


@dataclass(frozen=True)
class Setting:
    """What contenders are built from.

    model: whole, in eval mode.  engine: with the same weights.
    most_rows, most_tokens: completions of the largest request, and tokens of the longest sequence.
    """

    model: nn.Module
    engine: hybrid.HybridEngine
    most_rows: int
    most_tokens: int
    vllm: VLLMSettings

    @property
    def vocab_size(self) -> int:
        """The size of the model's vocabulary."""
        return self.model.config.get_text_config().vocab_size


def make_engine(model: nn.Module, weight_dtype: str = "model") -> hybrid.HybridEngine:
    """A ZeRO-3 engine with a copy of `model`; asserts that the weights are the same.

    weight_dtype: of rollouts.
    The optimizer has no state: it is not measured, and the states of a 7B model would fill the device.
    """
    module = copy.deepcopy(model)
    engine = hybrid.initialize(
        model=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=1e-4),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "bf16": {"enabled": model.dtype == torch.bfloat16},
            "hybrid_engine": {"enabled": True, "max_out_tokens": MOST_TOKENS},
            # Repetitions have equal prompts, which must be computed each time.
            "rollout": {"weight_dtype": weight_dtype, "enable_prefix_caching": False},
        },
    )[0]
    for whole, partitioned in zip(model.parameters(), engine.module.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters([partitioned]):
            assert torch.equal(whole, partitioned), "contenders have different weights"
    return engine


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
    own = None if weight_dtype == "model" else make_engine(setting.model, weight_dtype)
    engine = own or setting.engine

    def run(request: Request) -> Outcome:
        if new_weights:
            engine.mark_weights_changed()
        sampling = hybrid.SamplingParams(max_new_tokens=request.new_tokens)
        mask, limits = torch.ones_like(request.prompt_ids), torch.tensor(request.lengths)
        batch = engine.rollout(request.prompt_ids, mask, sampling, num_generations=request.group, max_new_tokens=limits)
        return Outcome(batch.completion_mask.sum(dim=1).tolist(), dict(batch.timings))

    return Contender(name, run, own.destroy if own else lambda: None)


def hugging_face(name: str, generate: Callable, **more) -> Contender:
    """Hugging Face's generate, called through `generate` with the arguments `more`."""

    def run(request: Request) -> Outcome:
        return outcome_of(generate(request.prompt_ids, **generate_arguments(request), **more), request)

    return Contender(name, run, compiles="compile_config" in more)


def compiled_static_cache() -> dict:
    """Arguments of `generate` for a static cache and compiled decode steps, which transformers compiles by itself on
    GPUs only."""
    compiling = CompileConfig(fullgraph=False)
    compiling._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": compiling}


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
            # The class's method: the instance's own calls the engine.
            return type(engine.module).generate(engine.module, ids, synced_gpus=False, **request)

    return generate


class ContinuousBatching:
    """transformers' continuous batching. Its manager is kept between runs, to exclude set-up and tear-down from the
    timings; while idle its thread polls ten times per second, which is negligible.
    """

    def __init__(self, setting: Setting):
        self.model = setting.model
        blocks = setting.most_rows * (math.ceil(setting.most_tokens / PAGE_SIZE) + 1)
        self.config = ContinuousBatchingConfig(
            page_size=PAGE_SIZE, num_blocks=blocks, max_batch_tokens=TOKENS_PER_FORWARD
        )
        self.manager = None
        self.group = 0  # of the current manager

    def run(self, request: Request) -> Outcome:
        """Each completion gets its length as `max_new_tokens`, which is less work than a logits processor."""
        if request.group != self.group:
            self.close()
            self.manager, self.group = self._start(request.group), request.group
        for row, (prompt, length) in enumerate(zip(request.prompt_ids.tolist(), request.lengths, strict=True)):
            self.manager.add_request(prompt, request_id=str(row), max_new_tokens=length)
        results = self._results(len(request.completion_lengths))
        return Outcome([len(results[key].generated_tokens) for key in sorted(results, key=order)])

    def close(self) -> None:
        """End the manager's thread and free its cache."""
        if self.manager is not None:
            self.manager.stop(block=True)
            self.manager.destroy()
            self.manager = None

    def _start(self, group: int):
        manager = self.model.init_continuous_batching(
            GenerationConfig(
                do_sample=True, temperature=1.0, top_k=0, top_p=1.0, num_return_sequences=group, eos_token_id=-1
            ),
            self.config,
        )
        manager.warmup()
        manager.start()
        return manager

    def _results(self, count: int) -> dict:
        """`count` results by request id. Raises RuntimeError if the manager's thread has died."""
        results = {}
        while len(results) < count:
            result = self.manager.get_result(timeout=WAIT_S)
            if result is not None and result.is_finished():
                results[result.request_id] = result
            elif result is None and not self.manager.is_running():
                raise RuntimeError("transformers' continuous batching ended before its requests did; see its log")
        return results


def order(request_id: str) -> tuple[int, str]:
    """The sorting key of request ids such as "3" and its child "3__child#0": by row, then child."""
    row, _, child = request_id.partition("__")
    return int(row), child


def continuous_batching(name: str, setting: Setting) -> Contender:
    """transformers' `generate_batch`."""
    batching = ContinuousBatching(setting)
    return Contender(name, batching.run, batching.close)


def vllm(name: str, setting: Setting, eager: bool) -> Contender:
    """vLLM in a separate process, from an environment with its CPU build."""
    if setting.model.device.type != "cpu" or dist.get_world_size() > 1:
        raise ValueError(
            f"{name} on {dist.get_world_size()} ranks on {setting.model.device.type}: the environment of "
            "`make bench-vllm` has vLLM for one process on a CPU; leave it out of --contenders"
        )
    server = VLLM(setting.vllm, setting.model, setting.most_rows, setting.most_tokens, eager)
    return Contender(name, lambda request: Outcome(server.run(request)), server.close, server.about)


# By their names on the command line and in the table, whose ratios are relative to "hf".
CONTENDERS: dict[str, Callable[[Setting], Contender]] = {
    "hybrid": lambda setting: hybrid_rollouts("hybrid", setting, new_weights=False),
    "hybrid-new-weights": lambda setting: hybrid_rollouts("hybrid-new-weights", setting, new_weights=True),
    "hybrid-int8": lambda setting: hybrid_rollouts("hybrid-int8", setting, False, "int8"),
    "hybrid-int8-new-weights": lambda setting: hybrid_rollouts("hybrid-int8-new-weights", setting, True, "int8"),
    "hf": lambda setting: hugging_face("hf", setting.model.generate),
    "hf-static": lambda setting: hugging_face("hf-static", setting.model.generate, **compiled_static_cache()),
    "zero3-gathered": lambda setting: hugging_face("zero3-gathered", gathered_generate(setting.engine)),
    "hf-continuous": lambda setting: continuous_batching("hf-continuous", setting),
    "vllm": lambda setting: vllm("vllm", setting, eager=False),
    "vllm-eager": lambda setting: vllm("vllm-eager", setting, eager=True),
}
