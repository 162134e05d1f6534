"""`engine.compile()`: layers compiled for training, against the same engine without it. Eval mode stays as it was."""

import copy
from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from accelerate.utils import TorchDynamoPlugin
from torch._dynamo.utils import counters
from transformers import AttentionInterface

import hybrid
from hybrid.training.compiled_layers import CompiledForward, CompiledLayers
from hybrid.training.logps import TrainingForwards
from hybrid.training.packed_attention import AttentionReplacement
from hybrid.training.packed_forwards import target_tokens
from tests.engines import engine_of, settings
from tests.tiny_models import tiny_model, twin, with_peft
from tests.training.grouped_rows import grouped_rows

LEAVES = {"leaf_module": {"classes": ["LlamaDecoderLayer", "MixtralDecoderLayer"]}}
AT_ONCE = {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0, "stage3_prefetch_bucket_size": 0}
# AdamW makes whole steps of gradients that are rounding.
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_allow_untested_optimizer": True}
SAMPLING = hybrid.SamplingParams(max_new_tokens=5, min_new_tokens=5, seed=3)  # without padding, in every turn


class CountingBackend:
    """A backend of `torch.compile` that runs graphs as they are: the bits are those of the uncompiled layers."""

    def __init__(self) -> None:
        self.graphs = self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, _inputs: list) -> Callable:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph(*args)

        return run


def frames() -> int:
    """The forwards, and parts of forwards, that torch compiled in this process so far."""
    return counters["stats"]["unique_graphs"]


def config_of(stage: int, family: str) -> dict:
    config = settings(stage, rollout={"return_router_indices": family == "mixtral"})
    if stage == 3:
        config["zero_optimization"] |= {**LEAVES, **AT_ONCE}
    return config


@pytest.mark.parametrize(("packed", "checkpointing"), [(False, False), (True, True)])
def test_layers_are_compiled_once_for_rows_of_any_length(packed, checkpointing, monkeypatch):
    """With one row or more, also as many and as long as the model's sizes, in a forward and what it recomputes."""
    compiled, plain = tiny_model("llama").train(), tiny_model("llama").train()
    if packed:  # its attention, which is not compiled
        attention = AttentionReplacement()
        attention.attention = AttentionInterface()["sdpa"]
        monkeypatch.setitem(AttentionInterface._global_mapping, attention.name, attention)
        compiled.config._attn_implementation_internal = attention.name
    for model in (compiled, plain) if checkpointing else ():
        model.gradient_checkpointing_enable({"use_reentrant": False})
    backend = CountingBackend()
    layers = CompiledLayers(list(compiled.model.layers), False, {"backend": backend, "dynamic": True})
    hidden_size, head_dim = compiled.config.hidden_size, compiled.config.head_dim
    graphs = []
    for rows, length in [(1, 9), (7, hidden_size), (head_dim, head_dim), (12, 12), (7, 9), (12, hidden_size)]:
        ids, runs = torch.randint(3, 90, (rows, length)), backend.runs
        grads = []
        for model in (compiled, plain):
            loss = model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.square().mean()
            grads.append(torch.autograd.grad(loss, list(model.parameters())))
        assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))
        graphs.append(backend.graphs)
        assert backend.runs - runs == len(layers.layers) * graphs[0] * (2 if checkpointing else 1)
    assert graphs[1:] == [2 * graphs[0]] * (len(graphs) - 1), "one row, and more"


def test_packed_recurrent_layers_are_compiled_once():
    """Mixers' functions are other ones while rows are packed: a graph for each, and none after the first round."""
    compiled, plain = tiny_model("qwen3_5_text").train(), tiny_model("qwen3_5_text").train()
    for model in (compiled, plain):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    backend, graphs = CountingBackend(), []
    CompiledLayers(list(compiled.model.layers), False, {"backend": backend, "dynamic": True})
    ways = [TrainingForwards(model, model, model) for model in (compiled, plain)]
    for seed in range(3):
        ids, mask, completion_mask = grouped_rows(seed, groups=1 + seed)
        rows = target_tokens(ids, mask, completion_mask, None, torch.device("cpu"))
        for forward in ("packed", "model"):
            runs, grads = backend.runs, []
            for way in ways:
                loss = way.logps(rows, 1.0, False, forward).per_token_logps.sum()
                way.model.zero_grad()
                loss.backward()
                grads.append([parameter.grad for parameter in way.model.parameters()])
                assert way.packed_reason() == ""
            assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))
            assert backend.runs > runs
        graphs.append(backend.graphs)
    assert len(set(graphs)) == 1, graphs


def engines_of(stage: int, family: str, adapted: bool, checkpointing: bool, count: int = 2, **blocks: Any) -> list:
    """Engines over the same weights.  blocks: of the configuration."""
    model = tiny_model(family)
    model = (with_peft(model) if adapted else model).train()
    models = [model, *(twin(model).train() for _ in range(count - 1))]
    for each in models if checkpointing else ():
        each.gradient_checkpointing_enable({"use_reentrant": False})
    return [engine_of(each, {**config_of(stage, family), **blocks}) for each in models]


def train_step(engine: hybrid.HybridEngine, forward: str, turn: int) -> torch.Tensor:
    """A step on this rank's rows, other ones and another number of them in each turn; returns the logprobs."""
    ids, mask, completion_mask = grouped_rows(seed=turn * 10 + dist.get_rank(), groups=1 + turn % 4)
    logps = engine.logps(ids, mask, completion_mask, forward=forward).per_token_logps
    engine.backward((logps * torch.linspace(-1, 1, logps.numel()).view(logps.shape)).sum())
    engine.step()
    return logps.detach()


def check_bits(stage: int, family: str, adapted: bool, checkpointing: bool) -> None:
    compiled, plain = engines_of(stage, family, adapted, checkpointing)
    backend = CountingBackend()
    compiled.compile(backend=backend)
    compiled.compile(backend=backend)  # nothing more
    assert compiled.is_compiled
    prompt_ids, prompt_mask = torch.randint(3, 90, (2, 7)), torch.ones(2, 7, dtype=torch.int64)
    graphs, forwards = [], ["packed", "model"] if stage == 3 else ["packed", "model", "exact"]
    for turn, forward in enumerate(forwards * 2):
        logps = [train_step(engine, forward, turn) for engine in (compiled, plain)]
        assert torch.equal(*logps), (forward, turn)
        runs = backend.runs
        batches = [engine.rollout(prompt_ids, prompt_mask, SAMPLING) for engine in (compiled, plain)]
        assert torch.equal(*(batch.sequences for batch in batches))
        assert torch.equal(*(batch.old_per_token_logps for batch in batches))
        scores = [engine.score(batches[0].sequences, batches[0].attention_mask) for engine in (compiled, plain)]
        assert torch.equal(*(score.per_token_logps for score in scores))
        assert backend.runs == runs > 0, "eval mode ran compiled code"
        # A mixture replays the experts of the rollout.
        assert torch.equal(*(engine.logps(batches[0], forward=forward)[0] for engine in (compiled, plain)))
        assert backend.runs > runs or forward == "exact", "exact runs the layers in its backward alone"
        graphs.append(backend.graphs)
    again = graphs[-1] - graphs[len(forwards) - 1]
    # An expert that gets one token alone has a graph of its own.
    assert again <= (1 if family == "mixtral" else 0), f"layers were compiled again: {graphs}"
    pairs = zip(compiled.module.parameters(), plain.module.parameters(), strict=True)
    assert all(torch.equal(*(getattr(each, "ds_tensor", each) for each in pair)) for pair in pairs)
    layer = compiled._builder.info.text_layers[0]
    assert isinstance(layer.forward, CompiledForward)
    if stage < 3:
        copied = copy.deepcopy(layer)
        assert copied.forward.__self__ is copied
    compiled.destroy()
    assert "forward" not in vars(layer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "family", "adapted", "checkpointing"),
    [
        (3, "llama", False, False),
        (3, "llama", True, True),
        (0, "llama", True, False),
        (1, "llama", False, True),
        (2, "llama", False, False),
        (2, "mixtral", False, False),
    ],
)
def test_compiled_layers_train_and_roll_out_to_the_same_bits(ranks, stage, family, adapted, checkpointing):
    ranks.run(check_bits, stage, family, adapted, checkpointing)


def check_refusals() -> None:
    ids, mask, completion_mask = grouped_rows(seed=0)
    engine = engine_of(tiny_model("llama").train(), settings(3))
    with pytest.raises(NotImplementedError, match=r'"leaf_module": {"classes": \["LlamaDecoderLayer"\]}'):
        engine.compile()
    with pytest.raises(NotImplementedError, match="DeepCompile"):
        engine.compile(schedule=[])
    with pytest.raises(NotImplementedError, match="compiled_autograd_enabled=True"):
        engine.compile(compiled_autograd_enabled=True)
    engine.eval()
    with pytest.raises(RuntimeError, match=r"call engine.train\(\) first"):
        engine.compile()
    assert not engine.is_compiled
    leaves = engine_of(tiny_model("llama").train(), config_of(3, "llama"))
    with pytest.raises(NotImplementedError, match="'exact' is not available with layers that are leaf modules"):
        leaves.logps(ids, mask, completion_mask, forward="exact")
    patched = engine_of(tiny_model("llama").train(), settings(2))
    layer = patched.module.model.layers[1]
    layer.forward = layer.forward
    with pytest.raises(NotImplementedError, match="a forward was set on a LlamaDecoderLayer instance"):
        patched.compile()


def test_what_cannot_be_compiled_is_refused(ranks):
    ranks.run(check_refusals)


def check_accelerates_arguments() -> None:
    """`torch_compile=True` of transformers and TRL: accelerate's call, with the plugin's default values."""
    engine = engine_of(tiny_model("llama").train(), settings(2))
    given = TorchDynamoPlugin(backend="eager").to_kwargs()
    engine.compile(backend=given.pop("backend"), compile_kwargs=given)
    assert engine._compile_kwargs["dynamic"] is True
    train_step(engine, "packed", 0)


@pytest.mark.slow
def test_accelerates_arguments(ranks):
    ranks.run(check_accelerates_arguments)


def check_inductor(stage: int, adapted: bool, checkpointing: bool, forwards: list[str]) -> None:
    """Compiled code has other sums: the oracle is the engine without it. Rollouts between steps change nothing."""
    rolling, compiled, plain = engines_of(stage, "llama", adapted, checkpointing, count=3, **SGD)
    rolling.compile()
    compiled.compile()
    prompt_ids, prompt_mask = torch.randint(3, 90, (2, 7)), torch.ones(2, 7, dtype=torch.int64)
    counted = []
    for turn, forward in enumerate(forwards * 2):
        ids, mask, completion_mask = grouped_rows(seed=turn * 10 + dist.get_rank(), groups=1 + turn % 4)
        grads = []
        for engine in (rolling, compiled, plain):
            logps = engine.logps(ids, mask, completion_mask, forward=forward).per_token_logps
            engine.backward((logps * torch.linspace(-1, 1, logps.numel()).view(logps.shape)).sum())
            trained = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
            grads.append([logps.detach(), *(deepspeed.utils.safe_get_full_grad(each).clone() for each in trained)])
        assert all(torch.equal(*pair) for pair in zip(*grads[:2], strict=True)), (turn, "a rollout changed training")
        for actual, expected in zip(*grads[1:], strict=True):
            assert (actual - expected).norm() < 1e-5 * expected.norm().clamp(min=0.1), (turn, forward)
        for engine in (rolling, compiled, plain):
            engine.step()
        rolling.rollout(prompt_ids, prompt_mask, SAMPLING)
        rolling.train()
        counted.append(frames())
    assert counted[len(forwards) - 1] == counted[-1] > 0, f"layers were compiled again: {counted}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "adapted", "checkpointing", "forwards"),
    [
        (0, False, True, ["packed", "model", "exact"]),
        (2, True, False, ["packed"]),
        (3, False, False, ["packed", "model"]),
        (3, True, True, ["packed"]),
    ],
)
def test_inductors_code_computes_the_same_function(ranks, stage, adapted, checkpointing, forwards):
    ranks.run(check_inductor, stage, adapted, checkpointing, forwards, timeout_s=580)
