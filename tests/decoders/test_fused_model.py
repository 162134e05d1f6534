"""The fused container replaces the model's forward only after its self-check, and only for forwards that it
supports."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import peft
import pytest
import torch
from deepspeed.profiling.flops_profiler import FlopsProfiler
from torch import nn
from torch.nn import functional as F
from transformers.integrations.neftune import activate_neftune

from hybrid.config import HybridEngineConfig, RolloutConfig
from hybrid.decoders.cpu_decoder import CpuDecoder
from hybrid.decoders.fused_model import FusedModel
from hybrid.decoders.self_check import STEPS, require_equal
from hybrid.decoders.torch_decoder import TorchDecoder
from hybrid.execution.containers import FusedContainer, plain_call
from hybrid.execution.executor import Executor as Requests
from hybrid.execution.generator import Generator
from hybrid.generation.block_pool import BlockPool
from hybrid.models.model_info import ModelInfo
from hybrid.models.structure import Part
from hybrid.runtime.profiling import Profiler
from hybrid.weights.model_weights import read_weights
from hybrid.weights.snapshot import Snapshot
from hybrid.weights.weight_swap import InferenceWindow
from tests.marks import slow_but
from tests.tiny_models import ALL_FAMILIES, CROSSED, prompts, tiny_model, twin, with_chat_lora, with_peft


@contextlib.contextmanager
def no_phase(_name: str) -> Iterator[None]:
    """A phase that is not timed."""
    yield


class SmallEngine:
    """The engine's treatment of a model in eval mode, without DeepSpeed."""

    def __init__(self, model: nn.Module, trusts_forwards: bool = False):
        self.model = model.eval()
        info = ModelInfo(model)
        self.snapshot = Snapshot(read_weights(info, layers_per_group=2))
        device = next(model.parameters()).device
        self.window = InferenceWindow(model, self.snapshot, Profiler("", lambda: None), True, True, device=device)
        self.fused = FusedModel(info, self.snapshot, trusts_forwards=trusts_forwards)
        self.requests = Requests(self.window, self.fused)
        self.generator = Generator(
            Profiler("miniature", lambda: None),
            BlockPool(32),
            HybridEngineConfig(max_out_tokens=512),
            RolloutConfig(kv_step=32, max_num_seqs=100),
        )
        self.generator.attach(info, self.requests, expands=True)
        self.container = FusedContainer(Part("", model, "model"), self.requests)
        self.container.install()

    def generate(self, ids: torch.Tensor, adapters: bool | None = None, **kwargs) -> torch.Tensor:
        """Hugging Face's `generate` with our decoding."""
        return self.generator.generate((ids,), kwargs, adapters, seed=0)


class Calls:
    """Counts forwards of decoders since the last `taken()`."""

    def __init__(self):
        self.count, self.checking = 0, False

    def taken(self) -> int:
        count, self.count = self.count, 0
        return count


@pytest.fixture
def calls(monkeypatch) -> Calls:
    """Counts the forwards of fused decoders, except those of the self-check."""
    counter = Calls()
    for kind in (CpuDecoder, TorchDecoder):

        def counted(self, *args, _own=kind.forward):
            counter.count += not counter.checking
            return _own(self, *args)

        monkeypatch.setattr(kind, "forward", counted)

    def counted_steps(self, *args, _own=CpuDecoder.decode_steps):
        tokens, logps = _own(self, *args)
        counter.count += len(tokens)
        return tokens, logps

    monkeypatch.setattr(CpuDecoder, "decode_steps", counted_steps)

    def checked(*args):
        counter.checking = True
        try:
            require_equal(*args)
        finally:
            counter.checking = False

    monkeypatch.setattr("hybrid.decoders.fused_model.require_equal", checked)
    return counter


@pytest.fixture(autouse=True)
def warnings_are_errors():
    """A model that runs natively warns: an unexpected warning fails the test."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the model runs in native containers")
        yield


IDS, MASK = prompts(3, 9, padded=True)
REQUEST = {"attention_mask": MASK, "max_new_tokens": 6, "do_sample": False}


def require_native(engine: SmallEngine, reference: nn.Module, calls: Calls, tolerance: float = 0) -> None:
    """Tokens and logits equal the reference's, and no decoder has run; tolerance: for merged adapters."""
    calls.taken()
    assert torch.equal(engine.generate(IDS, **REQUEST), reference.generate(IDS, **REQUEST))
    forward = {"attention_mask": MASK, "position_ids": (MASK.cumsum(1) - 1).clamp(min=0), "use_cache": False}
    with torch.no_grad():
        actual, expected = engine.model(IDS, **forward).logits, reference(IDS, **forward).logits
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)
    assert calls.taken() == 0


def require_fused(engine: SmallEngine, reference: nn.Module, calls: Calls) -> None:
    """Tokens and logits equal the reference's, computed by a decoder."""
    calls.taken()
    assert torch.equal(engine.generate(IDS, **REQUEST), reference.generate(IDS, **REQUEST))
    assert calls.taken() >= 6
    forward = {"attention_mask": MASK, "position_ids": (MASK.cumsum(1) - 1).clamp(min=0), "use_cache": False}
    with torch.no_grad():
        actual, expected = engine.model(IDS, **forward).logits, reference(IDS, **forward).logits
    # float32 sums in another order, and of merged adapters, of logits that span tens
    torch.testing.assert_close(actual[MASK.bool()], expected[MASK.bool()], atol=1e-3, rtol=1e-4)
    assert calls.taken() == 1


@pytest.mark.parametrize("family", slow_but(CROSSED, ALL_FAMILIES))
def test_every_family_runs_fused(family, calls):
    model = tiny_model(family)
    require_fused(SmallEngine(model), twin(tiny_model(family)), calls)


# The self-check


def scaled(module: nn.Module, factor: float) -> None:
    """Multiply a module's outputs by `factor`."""
    own = module.forward
    module.forward = lambda *args, **kwargs: own(*args, **kwargs) * factor


def without_window(attention: nn.Module) -> None:
    """Make an attention ignore its sliding window."""
    own = attention.forward

    def forward(hidden_states, position_embeddings, attention_mask=None, **kwargs):
        length = hidden_states.shape[1]
        end = length if attention_mask is None else attention_mask.shape[-1]
        every = torch.ones(length, end, dtype=torch.bool).tril(end - length)[None, None]
        return own(hidden_states, position_embeddings, every, **kwargs)

    attention.forward = forward


# Name → family, a change of its model by a factor, and the part that then differs.
CHANGES = {
    "an mlp": ("llama", lambda model, factor: scaled(model.model.layers[1].mlp, factor), "layer 1"),
    "an activation": ("llama", lambda model, _: setattr(model.model.layers[2].mlp, "act_fn", nn.Tanh()), "layer 2"),
    "a window": ("mistral", lambda model, _: without_window(model.model.layers[1].self_attn), "layer 1"),
    "the embedding": ("llama", lambda model, factor: scaled(model.model.embed_tokens, factor), "the embedding"),
    "the head": ("qwen2", lambda model, factor: scaled(model.lm_head, factor), "the head"),
    "the last norm": ("gpt2", lambda model, factor: scaled(model.transformer.ln_f, factor), "the head"),
    "experts": ("mixtral", lambda model, factor: scaled(model.model.layers[0].mlp.experts, factor), "layer 0"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_unlike_its_family_runs_natively(change, dtype, calls):
    family, apply, where = CHANGES[change]
    model, reference = (tiny_model(family, dtype=dtype).eval() for _ in range(2))
    for module in (model, reference):
        # bfloat16's rounding is some percent of a layer's output
        apply(module, 1.01 if dtype == torch.float32 else 2.0)
    engine = SmallEngine(model, trusts_forwards=True)
    message = (
        rf"native containers: {where} of the fused container differs from the model's own by \d.*, where \d.* allowed"
    )
    with pytest.warns(UserWarning, match=message):
        engine.generate(IDS, **REQUEST)
    assert where in engine.fused.fallback_reason_now(), "coverage lacks the reason"
    require_native(engine, reference, calls)


def test_the_self_check_finds_a_decoder_that_is_wrong_in_decode_steps(calls, monkeypatch):
    """The second part of the self-check: decode steps over cached keys and values."""
    own = CpuDecoder.layers

    def wrong(self, hidden, batch, kv, first, last):
        delta = own(self, hidden, batch, kv, first, last) - hidden
        single_tokens = batch.cu_seqlens.diff().max() == 1
        return hidden + delta * (1.01 if single_tokens and first == 2 else 1.0)

    monkeypatch.setattr(CpuDecoder, "layers", wrong)
    engine = SmallEngine(tiny_model("llama"))
    with pytest.warns(UserWarning, match="layer 2, in decode steps, of the fused container differs"):
        engine.generate(IDS, **REQUEST)
    require_native(engine, tiny_model("llama").eval(), calls)


def test_the_self_check_runs_once(calls, monkeypatch):
    counter, own = Calls(), CpuDecoder.layers

    def counted(*args):
        counter.count += 1
        return own(*args)

    monkeypatch.setattr(CpuDecoder, "layers", counted)
    engine = SmallEngine(tiny_model("llama"))
    require_fused(engine, tiny_model("llama").eval(), calls)
    assert counter.taken() == 3 * (2 + STEPS + 1), (
        "two prefills and the decode steps, one of them in two, of three layers"
    )
    engine.snapshot.weights.version.loads += 1
    require_fused(engine, tiny_model("llama").eval(), calls)
    assert counter.taken() == 0


def test_an_exception_in_the_self_check_is_no_verdict(calls, monkeypatch):
    own = CpuDecoder.layers
    engine = SmallEngine(tiny_model("llama"))

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(CpuDecoder, "layers", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(IDS, **REQUEST)
    monkeypatch.setattr(CpuDecoder, "layers", own)
    assert all(not module._forward_hooks for module in engine.model.modules())
    require_fused(engine, tiny_model("llama").eval(), calls)


# Reasons to run natively, permanently or for a while


def test_mixed_dtypes_run_natively(calls):
    def mixed() -> nn.Module:
        model = tiny_model("llama", dtype=torch.bfloat16).eval()
        head = model.lm_head.float()
        head.forward = lambda hidden: F.linear(hidden.float(), head.weight)
        return model

    engine = SmallEngine(mixed(), trusts_forwards=True)
    with pytest.warns(UserWarning, match=r"a matrix is torch\.float32 where the embedding is torch\.bfloat16"):
        engine.generate(IDS, **REQUEST)
    require_native(engine, mixed(), calls)


def test_float16_runs_in_the_torch_decoder(calls):
    """There are no CPU kernels for float16; the torch decoder supports it."""
    model = tiny_model("llama", dtype=torch.float16)
    engine = SmallEngine(model)
    assert torch.equal(
        engine.generate(IDS, **REQUEST), tiny_model("llama", dtype=torch.float16).eval().generate(IDS, **REQUEST)
    )
    assert calls.taken() >= 6
    assert type(engine.fused.bound[False].decoder) is TorchDecoder


@pytest.mark.parametrize("on", ["the module", "its class"])
def test_a_forward_replaced_after_the_self_check_is_checked_again(on, calls, monkeypatch):
    engine = SmallEngine(tiny_model("llama"), trusts_forwards=True)
    ids = prompts(1, 5, padded=False)[0]
    engine.generate(ids, max_new_tokens=2)
    assert calls.taken() > 0
    mlp = engine.model.model.layers[1].mlp
    own = type(mlp).forward
    if on == "the module":
        monkeypatch.setattr(mlp, "forward", lambda x: own(mlp, x), raising=False)
    else:
        monkeypatch.setattr(type(mlp), "forward", lambda self, x: own(self, x))
    engine.generate(ids, max_new_tokens=2)
    assert calls.taken() > 0, "an equivalent function runs natively"
    if on == "the module":
        monkeypatch.setattr(mlp, "forward", lambda x: 2 * own(mlp, x), raising=False)
    else:
        monkeypatch.setattr(type(mlp), "forward", lambda self, x: 2 * own(self, x))
    with pytest.warns(UserWarning, match="layer [01]"):
        actual = engine.generate(ids, max_new_tokens=6)
    assert calls.taken() == 0
    assert torch.equal(actual, twin_generate(engine, ids))


def twin_generate(engine: SmallEngine, ids: torch.Tensor) -> torch.Tensor:
    """Six greedy tokens of Hugging Face's generate with the engine's own model."""
    engine.container.uninstall()
    return engine.model.generate(ids, max_new_tokens=6, do_sample=False)


@pytest.mark.parametrize("before", [False, True], ids=["forward hook", "pre hook"])
def test_user_hooks_run_the_model_natively_until_removed(before, calls):
    model, hook_calls = tiny_model("llama"), []
    engine, reference = SmallEngine(model), tiny_model("llama").eval()
    require_fused(engine, reference, calls)
    mlp = model.model.layers[1].mlp
    register = mlp.register_forward_pre_hook if before else mlp.register_forward_hook
    handle = register(lambda *args: hook_calls.append(1))
    with pytest.warns(
        UserWarning, match=r"the model's own modules: .*<lambda> on model\.layers\.1\.mlp \(remove them"
    ) as warned:
        require_native(engine, reference, calls)
        engine.generate(IDS, **REQUEST)
        del hook_calls[6:12]
    assert len(warned) == 1, "a reason is warned of more than once"
    assert engine.fused.reasons.last == engine.fused.fallback_reason_now()
    assert len(hook_calls) == 7  # a prefill, five steps and a forward
    handle.remove()
    assert engine.fused.fallback_reason_now() == ""
    require_fused(engine, reference, calls)
    assert len(hook_calls) == 7


def input_gradients(model: nn.Module) -> None:
    model.enable_input_require_grads()


def checkpointed(model: nn.Module) -> None:
    model.gradient_checkpointing_enable()


def on_and_off_and_on(model: nn.Module) -> None:
    """As TRL does around every `generate`, leaving a hook each time (transformers 5.23)."""
    model.gradient_checkpointing_enable()
    model.gradient_checkpointing_disable()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()


def prepared_by_peft(model: nn.Module) -> None:
    """PEFT's own hook, for models without the method."""
    peft.PeftModel._prepare_model_for_gradient_checkpointing(SimpleNamespace(), Embedder(model))


class Embedder:
    """A model without `enable_input_require_grads`, on which PEFT registers its own hook."""

    def __init__(self, model: nn.Module):
        self.get_input_embeddings = model.get_input_embeddings


def from_a_tutorial(model: nn.Module) -> None:
    def make_inputs_require_grad(module, input, output):
        output.requires_grad_(True)

    model.get_input_embeddings().register_forward_hook(make_inputs_require_grad)


def noisy_embeddings(model: nn.Module) -> None:
    activate_neftune(model, 5.0)


def profiled_by_deepspeed(model: nn.Module) -> Callable[[], None]:
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    return profiler.end_profile


def has_given_hidden_states(model: nn.Module) -> None:
    """transformers leaves hooks on every layer after the first forward with output_hidden_states (5.23)."""
    model(IDS, output_hidden_states=True)


FRAMEWORKS_HOOKS = (
    input_gradients,
    checkpointed,
    on_and_off_and_on,
    prepared_by_peft,
    from_a_tutorial,
    noisy_embeddings,
    profiled_by_deepspeed,
    has_given_hidden_states,
)


@pytest.mark.parametrize("add", FRAMEWORKS_HOOKS)
def test_frameworks_own_hooks_keep_the_fused_decoder(add, calls):
    model, reference = tiny_model("llama"), tiny_model("llama").eval()
    end = add(model)
    try:
        assert any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        engine = SmallEngine(model)
        require_fused(engine, reference, calls)
        assert engine.fused.reasons.last == ""
        # Nor do they affect the model's own layers on the native path.
        engine.fused.fallback_reason, engine.fused.warns = "the test wants it", False
        require_native(engine, reference, calls)
    finally:
        if end is not None:  # DeepSpeed's profiler patches torch's functions too
            end()


@pytest.mark.parametrize("probe", ["does more", "has another name"])
def test_a_hook_that_only_resembles_a_frameworks_runs_natively(probe):
    def make_inputs_require_grads(module, input, output):
        output.requires_grad_(True).mul_(2)

    def some_hook(module, input, output):
        output.requires_grad_(True)

    model = tiny_model("llama")
    model.get_input_embeddings().register_forward_hook(make_inputs_require_grads if probe == "does more" else some_hook)
    assert "hooks" in SmallEngine(model).fused.fallback_reason_now()


def test_float64_runs_natively(calls):
    model, reference = (tiny_model("llama", dtype=torch.float64).eval() for _ in range(2))
    engine = SmallEngine(model)
    with pytest.warns(UserWarning, match=r"weights are torch\.float64, .* \(cast the model to one of these"):
        require_native(engine, reference, calls)
    assert engine.fused.bytes_in_cache() == (0, 0)


def test_autocast_runs_natively_while_it_is_on(calls):
    engine, reference = SmallEngine(tiny_model("llama")), tiny_model("llama").eval()
    require_fused(engine, reference, calls)
    expected_warning = pytest.warns(UserWarning, match=r"autocast chooses .* \(generate outside of torch\.autocast")
    with torch.autocast("cpu", torch.bfloat16), expected_warning:
        require_native(engine, reference, calls)
    require_fused(engine, reference, calls)


@pytest.mark.parametrize("make", [with_peft, with_chat_lora])
def test_adapters_run_fused_merged_and_can_be_disabled(make, calls):
    model = make(tiny_model("llama"))
    reference, base = twin(model), tiny_model("llama").eval()
    engine = SmallEngine(model)
    require_fused(engine, reference, calls)
    plain = engine.generate(IDS, adapters=False, **REQUEST)
    assert torch.equal(plain, base.generate(IDS, **REQUEST))
    assert not torch.equal(plain, engine.generate(IDS, **REQUEST))
    require_fused(engine, reference, calls)


def test_modules_to_save_run_fused(calls):
    model = with_peft(tiny_model("llama"), modules_to_save=["lm_head", "embed_tokens"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    reference = twin(model)
    engine = SmallEngine(model)
    require_fused(engine, reference, calls)
    plain = engine.generate(IDS, adapters=False, **REQUEST)
    assert torch.equal(plain, tiny_model("llama").eval().generate(IDS, **REQUEST))
    assert calls.taken() >= 6
    with engine.model.disable_adapter(), reference.disable_adapter():
        require_fused(engine, reference, calls)
    require_fused(engine, reference, calls)


def test_trainable_tokens_run_natively(calls):
    model = with_peft(tiny_model("llama"), trainable_token_indices={"embed_tokens": [3, 4, 5]})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "token_adapter" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    reference = twin(model)
    engine = SmallEngine(model)
    with pytest.warns(UserWarning, match="TrainableTokensWrapper changes a module as it runs .*modules_to_save"):
        require_native(engine, reference, calls, tolerance=1e-3)


def test_sequences_beyond_the_rope_table_run_natively(calls):
    """And shorter ones are fused, before and after."""
    longer = {
        "max_position_embeddings": 40,
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    }
    engine, reference = SmallEngine(tiny_model("llama", **longer)), tiny_model("llama", **longer).eval()
    require_fused(engine, reference, calls)
    # Padding does not count.
    wide, wide_mask = (F.pad(tensor, (40, 0)) for tensor in (IDS, MASK))
    request = {**REQUEST, "attention_mask": wide_mask}
    assert torch.equal(engine.generate(wide, **request), reference.generate(wide, **request))
    assert calls.taken() >= 6
    request = {**REQUEST, "max_new_tokens": 60, "eos_token_id": None}
    with pytest.warns(UserWarning, match=r"beyond 40 tokens.* \(ask for shorter sequences\)"):
        actual = engine.generate(IDS, **request)
    assert torch.equal(actual, reference.generate(IDS, **request))
    assert calls.taken() == 0
    # A new reference: dynamic rope keeps the frequencies of a long sequence (transformers 5.23).
    require_fused(engine, tiny_model("llama", **longer).eval(), calls)


# Binding


def test_replaced_weight_storage_is_bound_again(calls):
    engine, reference = SmallEngine(tiny_model("llama")), tiny_model("llama").eval()
    require_fused(engine, reference, calls)
    other = tiny_model("llama", seed=4).eval()
    for param, other_param in zip(engine.model.parameters(), other.parameters(), strict=True):
        param.data = other_param.data.clone()
    require_fused(engine, other, calls)


def test_transposed_copies_are_refreshed_for_a_new_version(calls):
    """GPT-2's matrices are copied, so that in-place changes need a new version, as a step makes."""
    engine, other = SmallEngine(tiny_model("gpt2")), tiny_model("gpt2", seed=4).eval()
    require_fused(engine, tiny_model("gpt2").eval(), calls)
    copied_bytes = engine.fused.nbytes()
    assert copied_bytes > 0
    engine.model.load_state_dict(other.state_dict())
    engine.snapshot.weights.version.steps += 1
    require_fused(engine, other, calls)
    assert engine.fused.nbytes() == copied_bytes
    engine.fused.release()
    assert engine.fused.nbytes() == 0
    require_fused(engine, other, calls)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", slow_but(CROSSED, ALL_FAMILIES))
def test_block_bytes_are_an_upper_bound(family, dtype):
    engine = SmallEngine(tiny_model(family, dtype=dtype))
    before, _ = engine.fused.bytes_in_cache()
    with engine.window.opened():
        decoder = engine.fused.decoder(adapters=True, tokens=40)
    kv = decoder.kv(3)
    taken = sum(tensor.nbytes for tensor in (*kv.keys, *kv.values))
    assert taken <= 3 * before == 3 * engine.fused.bytes_in_cache()[0]
    assert 3 * before <= 2 * taken  # head_dim 8 is counted as 16


# Forwards that run fused


def positions_of(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)


RIGHT = MASK.flip(1)
BOTH_SIDES = MASK * RIGHT
PLAIN = {
    "without a mask": {},
    "a mask of ones": {"attention_mask": torch.ones_like(IDS)},
    "padded on the left": {"attention_mask": MASK, "position_ids": positions_of(MASK)},
    "padded on the right": {"attention_mask": RIGHT},
    "padded on the right, with positions": {"attention_mask": RIGHT, "position_ids": positions_of(RIGHT)},
    "padded on both sides": {"attention_mask": BOTH_SIDES, "position_ids": positions_of(BOTH_SIDES)},
    "a mask of bools": {"attention_mask": RIGHT.bool()},
    "positions of one row": {"position_ids": torch.arange(9)[None]},
    "switches that are off": {
        "output_attentions": False,
        "output_hidden_states": False,
        "logits_to_keep": 0,
        "labels": None,
    },
    "asking for an object": {"return_dict": True},
}


@pytest.mark.parametrize("call", PLAIN)
def test_forwards_for_logits_run_fused(call, calls):
    model = tiny_model("llama")
    engine, reference = SmallEngine(model), tiny_model("llama").eval()
    kwargs = {**PLAIN[call], "use_cache": False}
    mask = kwargs.get("attention_mask", torch.ones_like(IDS)).bool()
    with torch.no_grad():
        expected = reference(IDS, **kwargs).logits
    for args, keywords in (((IDS,), kwargs), ((), {**kwargs, "input_ids": IDS})):
        output = engine.model(*args, **keywords)
        assert calls.taken() == 1
        assert output.logits.dtype == expected.dtype
        # float32 sums in another order, of logits that span tens
        torch.testing.assert_close(output.logits[mask], expected[mask], atol=1e-4, rtol=1e-4)
        assert (output.logits[~mask] == 0).all()
        assert output.past_key_values is None
        assert output.loss is None
        assert not output.logits.requires_grad


HOLES = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1]] * 3)
UNSUPPORTED = {
    "use_cache is None": {"use_cache": None},
    "use_cache": {"use_cache": True},
    "labels": {"labels": IDS},
    "labels of zero": {"labels": torch.zeros_like(IDS)},
    "hidden states": {"output_hidden_states": True},
    "attentions": {"output_attentions": True},
    "a tuple": {"return_dict": False},
    "few logits": {"logits_to_keep": 1},
    "few logits, by index": {"logits_to_keep": torch.tensor([3, 4])},
    "embeddings": {"input_ids": None, "inputs_embeds": torch.randn(3, 9, 32)},
    "a mask for each query": {"attention_mask": torch.ones(9, 9, dtype=torch.bool).tril().expand(3, 1, 9, 9)},
    "holes in the mask": {"attention_mask": HOLES},
    "padded on the left without positions": {"attention_mask": MASK},
    "other positions": {"position_ids": torch.arange(9)[None] * 2},
    "positions that count padding": {"attention_mask": MASK, "position_ids": torch.arange(9)[None].expand(3, 9)},
}


def everything(output: object) -> list[torch.Tensor]:
    """Every tensor of an output except its cache."""
    if isinstance(output, torch.Tensor):
        return [output]
    values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else ()
    return [tensor for value in values for tensor in everything(value)]


@pytest.mark.parametrize("call", UNSUPPORTED)
def test_other_forwards_run_natively(call, calls):
    engine, reference = SmallEngine(tiny_model("llama")), tiny_model("llama").eval()
    for module in (engine.model, reference):
        module.set_attn_implementation("eager")  # gives attentions
    kwargs = {"input_ids": IDS, "use_cache": False, **UNSUPPORTED[call]}
    expected_warning = pytest.warns(UserWarning, match=r"gives more than logits back.* \(pass use_cache=False")
    with torch.no_grad(), expected_warning if kwargs["use_cache"] is None else contextlib.nullcontext():
        actual, expected = engine.model(**kwargs), reference(**kwargs)
    assert calls.taken() == 0
    assert type(actual) is type(expected)
    actual, expected = everything(actual), everything(expected)
    assert len(actual) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize(
    ("family", "setting"),
    [
        ("llama", {"output_hidden_states": True}),
        ("mixtral", {"output_router_logits": True}),
    ],
)
def test_outputs_enabled_in_the_model_config_run_natively(family, setting, calls):
    engine, reference = SmallEngine(tiny_model(family, **setting)), tiny_model(family, **setting).eval()
    with torch.no_grad(), pytest.warns(UserWarning, match="gives more than logits back.* of the model's configuration"):
        actual, expected = (everything(module(IDS, use_cache=False)) for module in (engine.model, reference))
    assert calls.taken() == 0
    assert len(actual) == len(expected) > 1
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_a_forward_with_an_unknown_argument_runs_natively():
    assert plain_call((IDS,), {"use_cache": False}) is not None
    for name, value in (("cache_position", torch.arange(9)), ("some_switch", True), ("a_name", "text"), ("a_size", 4)):
        assert plain_call((IDS,), {"use_cache": False, name: value}) is None
    assert plain_call((IDS, MASK), {"use_cache": False}) is None
    assert plain_call((), {"use_cache": False}) is None


def test_token_ids_outside_the_vocabulary_raise_as_hugging_face():
    engine, reference = SmallEngine(tiny_model("llama")), tiny_model("llama").eval()
    wrong = IDS.clone()
    wrong[1, 8] = 97
    for call in (reference.generate, engine.generate):
        with pytest.raises(IndexError):
            call(wrong, **REQUEST)
    with pytest.raises(IndexError, match="97"):
        engine.model(wrong, use_cache=False)
    require = engine.generate(IDS, **REQUEST)
    assert torch.equal(require, reference.generate(IDS, **REQUEST)), "the error was not cleaned up"


def test_a_module_that_is_no_language_model_runs_unchanged():
    torch.manual_seed(0)
    engine, x = SmallEngine(nn.Sequential(nn.Linear(4, 3), nn.ReLU())), torch.randn(2, 4)
    assert engine.fused.fallback_reason_now()
    assert torch.equal(engine.model(x), torch.relu(F.linear(x, engine.model[0].weight, engine.model[0].bias)))
