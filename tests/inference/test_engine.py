"""The inference engine at one rank: Hugging Face's forward and generate, DeepSpeed's profiling, errors, several
engines."""

import copy
import time

import numpy as np
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.inference.config import DeepSpeedInferenceConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import GenerationConfig, PreTrainedTokenizerFast, pipeline

import hybrid
from hybrid.inference.loader import Cast, cast_model
from tests.marks import slow_but
from tests.tiny_models import (
    ALL_FAMILIES,
    CROSSED,
    NON_DECODERS,
    prompts,
    tiny_model,
    tiny_non_decoder,
    twin,
    with_peft,
)

IDS, MASK = prompts(3, 7, padded=True)


def engine_of(model, **settings) -> hybrid.InferenceEngine:
    return hybrid.init_inference(model, **{"dtype": torch.float32, "kernel_inject": True, **settings})


def logits_of(model, ids=IDS, mask=MASK, **more) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, attention_mask=mask, **more).logits


@pytest.mark.parametrize(
    "config",
    [
        DeepSpeedInferenceConfig(dtype=torch.float32, kernel_inject=True, max_tokens=64),
        {"dtype": "fp32", "kernel_inject": True, "max_tokens": 64},
    ],
    ids=["DeepSpeed's object", "dict"],
)
def test_constructor_and_attributes_match_deepspeed(config):
    """The attributes that callers of DeepSpeed's engine read have the same names and values."""
    model = tiny_model("llama")
    reference = twin(model)
    engine = hybrid.InferenceEngine(model, config=config)
    assert torch.equal(engine(IDS, attention_mask=MASK).logits[MASK.bool()].argmax(-1), argmaxes(reference))
    assert engine.module is model and engine.config is model.config
    for name in ("local_cuda_graph", "cuda_graph_created", "model_profile_enabled", "is_compiled"):
        assert getattr(engine, name) is False, name
    for name in ("mp_group", "mpu", "ep_group", "expert_mp_group", "injection_dict", "quantization_scales"):
        assert getattr(engine, name) is None, name
    engine.profile_model_time(use_cuda_events=False)
    assert engine.model_profile_enabled and engine.quantize_merge_count == 1
    with pytest.raises(NotImplementedError, match="compile a model that is in no engine"):
        engine.compile()
    assert "forward" in model.__dict__
    broken = tiny_model("llama")
    with pytest.raises(ValueError, match="min_out_tokens: 9 given"):
        hybrid.InferenceEngine(broken, {"dtype": "fp32", "max_tokens": 8, "min_tokens": 9})
    assert "forward" not in broken.__dict__


def argmaxes(reference) -> torch.Tensor:
    return logits_of(reference)[MASK.bool()].argmax(-1)


def test_too_long_inputs_raise_runtime_and_value_error():
    """RuntimeError as in DeepSpeed's engine, and ValueError as for any invalid argument."""
    engine = engine_of(tiny_model("llama"), max_tokens=8)
    for ids, new in ((torch.ones(1, 9, dtype=torch.int64), 1), (torch.ones(1, 6, dtype=torch.int64), 3)):
        for error in (RuntimeError, ValueError):
            with pytest.raises(error, match="max_out_tokens=8"):
                engine.generate(ids, max_new_tokens=new)


def test_ep_group_without_an_effect_warns():
    with pytest.warns(UserWarning, match="moe.ep_group: given with ep_size=1; it has no effect"):
        engine_of(tiny_model("mixtral"), moe={"ep_group": object()})


@pytest.mark.parametrize("inject", [True, False])
@pytest.mark.parametrize("family", slow_but(CROSSED, ALL_FAMILIES))
def test_decoders_match_hugging_face(family, inject):
    model = tiny_model(family)
    reference = twin(model)
    engine = engine_of(model, kernel_inject=inject)
    request = {"attention_mask": MASK, "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(engine.generate(IDS, **request), reference.generate(IDS, **request))
    real = MASK.bool()
    torch.testing.assert_close(
        engine(IDS, attention_mask=MASK).logits[real], logits_of(reference)[real], atol=1e-3, rtol=1e-4
    )
    container = {row["container"] for row in engine.coverage()}
    assert container == {"fused" if inject else "native"}
    engine.destroy()
    assert "forward" not in model.__dict__


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NON_DECODERS)
def test_encoders_and_encoder_decoders_run_natively(name, dtype):
    reference = tiny_non_decoder(name)
    more = {"decoder_input_ids": IDS} if name == "t5" else {}
    model = copy.deepcopy(reference)
    engine = engine_of(model, dtype=dtype)
    expected = logits_of(reference.to(dtype), **more)
    actual = engine(IDS, attention_mask=MASK, **more).logits
    assert actual.dtype == dtype
    assert torch.equal(actual, expected)
    assert "native" in engine.coverage()[0]["why"] or engine.coverage()[0]["container"] == "native"
    if name == "t5":
        request = {"attention_mask": MASK, "max_new_tokens": 6}
        assert torch.equal(engine.generate(IDS, **request), reference.generate(IDS, **request))


@pytest.mark.parametrize("family", ["llama", "gptj", "gemma3_text"])
def test_a_cast_model_equals_from_pretrained_with_that_dtype(tmp_path, family):
    """Rotary frequencies are buffers that stay in float32: rounding them would move every position."""
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    built = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    engine = engine_of(model, dtype="bf16", kernel_inject=False)
    actual = dict((*model.named_parameters(), *model.named_buffers()))
    for name, tensor in (*built.named_parameters(), *built.named_buffers()):
        assert torch.equal(actual[name].to(tensor.dtype), tensor), name
    assert torch.equal(engine(IDS, attention_mask=MASK).logits, logits_of(built))


def test_modules_kept_in_float32(tmp_path):
    """T5's `wo` with half precision, as from_pretrained keeps it."""
    reference = tiny_non_decoder("t5")
    reference.save_pretrained(tmp_path)
    built = type(reference).from_pretrained(tmp_path, dtype=torch.float16)
    cast_model(reference, Cast(reference, torch.float16, None))
    assert {n: p.dtype for n, p in reference.named_parameters()} == {n: p.dtype for n, p in built.named_parameters()}
    assert torch.float32 in {p.dtype for p in reference.parameters()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["t5", "strict"])
def test_modules_kept_in_float32_in_an_engine(tmp_path, monkeypatch, name, dtype):
    """From the model's own weights and from a file; `from_pretrained` is the oracle, for modules kept in float32 with
    float16 (T5's `wo`) and with both half dtypes ("strict")."""
    monkeypatch.setattr(get_accelerator(), "supported_dtypes", lambda: [dtype])  # DeepSpeed's CPUs have no float16
    reference = tiny_non_decoder("t5")
    if name == "strict":
        monkeypatch.setattr(type(reference), "_keep_in_fp32_modules", None)
        monkeypatch.setattr(type(reference), "_keep_in_fp32_modules_strict", {"wo"})
    reference = type(reference).from_pretrained(saved(reference, tmp_path)).eval()
    built = type(reference).from_pretrained(tmp_path, dtype=dtype).eval()
    kept = {key for key, param in built.named_parameters() if param.dtype == torch.float32}
    assert bool(kept) == (dtype == torch.float32 or dtype == torch.float16 or name == "strict")
    with torch.device("meta"):
        empty = type(reference)(reference.config)
    with torch.no_grad():
        expected = built(IDS, attention_mask=MASK, decoder_input_ids=IDS).logits
    for model, checkpoint in ((reference, None), (empty, str(tmp_path))):
        engine = engine_of(model, dtype=dtype, checkpoint=checkpoint)
        for key, param in built.named_parameters():
            assert dict(model.named_parameters())[key].dtype == param.dtype, key
        assert torch.equal(engine(IDS, attention_mask=MASK, decoder_input_ids=IDS).logits, expected)


def saved(model, path) -> str:
    """The directory in which the model is saved."""
    model.save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("stay", [True, False])
def test_keep_module_on_host(tmp_path, monkeypatch, stay, checkpoint):
    """The meta device stands in for an accelerator, to which weights move unless keep_module_on_host."""
    reference = tiny_non_decoder("bert")
    folder = saved(reference, tmp_path) if checkpoint else None
    model = tiny_non_decoder("bert", seed=1) if checkpoint else twin(reference)
    monkeypatch.setattr(get_accelerator(), "current_device_name", lambda: "meta")
    if not stay:
        with pytest.raises(RuntimeError, match="incompatible tensor type"):  # a host tensor cannot become meta
            engine_of(model, checkpoint=folder)
        return
    engine = engine_of(model, keep_module_on_host=True, checkpoint=folder)
    assert torch.equal(engine(IDS, attention_mask=MASK).logits, logits_of(reference))


def test_return_tuple():
    """True returns the model's output, false its first tensor."""
    reference = tiny_non_decoder("bert")
    engine = engine_of(copy.deepcopy(reference), return_tuple=False)
    assert torch.equal(engine(IDS, attention_mask=MASK), logits_of(reference))
    assert torch.equal(engine(IDS, attention_mask=MASK, labels=IDS), logits_of(reference))
    assert torch.equal(engine(IDS, attention_mask=MASK, return_dict=False), logits_of(reference))
    assert torch.equal(engine_of(copy.deepcopy(reference))(IDS, attention_mask=MASK).logits, logits_of(reference))


def test_use_cache_returns_a_cache_to_continue_from():
    model = tiny_model("llama")
    reference, engine = twin(model), engine_of(model)
    assert engine(IDS, attention_mask=MASK).past_key_values is None
    first = engine(IDS, attention_mask=MASK, use_cache=True)
    actual = engine(IDS[:, :1], past_key_values=first.past_key_values, attention_mask=MASK.new_ones(3, 8)).logits
    with torch.no_grad():
        cache = reference(IDS, attention_mask=MASK, use_cache=True).past_key_values
        expected = reference(IDS[:, :1], past_key_values=cache, attention_mask=MASK.new_ones(3, 8)).logits
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("inject", [True, False])
def test_positional_arguments_match_hugging_face(inject):
    """In Hugging Face's order: ids, mask, positions, cache, embeddings, labels, use_cache."""
    model = tiny_model("llama")
    reference, engine = twin(model), engine_of(model, kernel_inject=inject)
    positions = (MASK.cumsum(1) - 1).clamp(min=0)
    for use_cache in (True, False):
        args = (IDS, MASK, positions, None, None, None, use_cache)
        with torch.no_grad():
            expected = reference(*args)
        actual = engine(*args)
        torch.testing.assert_close(actual.logits[MASK.bool()], expected.logits[MASK.bool()], atol=1e-3, rtol=1e-4)
        assert (actual.past_key_values is None) == (expected.past_key_values is None) == (not use_cache)
    with torch.no_grad():
        cache = reference(IDS, MASK, use_cache=True).past_key_values
        expected = reference(IDS[:, :1], MASK.new_ones(3, 8), None, copy.deepcopy(cache))
    actual = engine(IDS[:, :1], MASK.new_ones(3, 8), None, cache)
    torch.testing.assert_close(actual.logits, expected.logits, atol=1e-4, rtol=1e-4)
    assert actual.past_key_values.get_seq_length() == 8
    with pytest.raises(TypeError, match="given|argument"):
        engine(*args, *args)


def test_use_cache_is_passed_only_to_models_that_take_it():
    """Also with a graph, which is replaced here since it needs a device."""
    model = torch.nn.Linear(2, 2)
    engine = engine_of(model)
    engine._graphs = model
    assert torch.equal(engine(torch.ones(1, 2)), model(torch.ones(1, 2)))
    calls = []
    engine = engine_of(tiny_model("llama"))
    engine._graphs = lambda *args, **kwargs: calls.append(kwargs)
    engine(IDS)
    engine(IDS, use_cache=True)
    assert [kwargs["use_cache"] for kwargs in calls] == [False, True]


def test_config_is_the_models():
    model = tiny_model("llama")
    assert engine_of(model).config is model.config
    assert engine_of(model, config={"args": {"mine": 1}}).config == {"mine": 1}
    assert engine_of(model).module is model


LONG = GenerationConfig(max_new_tokens=10, eos_token_id=None)
BEAMS = GenerationConfig(max_new_tokens=3, num_beams=2)
INVALID = {
    "beams": ({"num_beams": 2, "max_new_tokens": 3}, NotImplementedError, "beam_search"),
    "beams in a configuration": ({"generation_config": BEAMS}, NotImplementedError, "beam_search"),
    "assistance": ({"prompt_lookup_num_tokens": 2, "max_new_tokens": 3}, NotImplementedError, "assisted_generation"),
    "too many tokens": ({"max_new_tokens": 10}, ValueError, r"7 tokens \+ 10 new.* over max_out_tokens=16"),
    "too many by length": ({"max_length": 17}, ValueError, "over max_out_tokens=16"),
    "too many in a configuration": ({"generation_config": LONG}, ValueError, "over max_out_tokens=16"),
}


@pytest.mark.parametrize("inject", [True, False])
@pytest.mark.parametrize("name", INVALID)
def test_unsupported_generate_arguments_raise(name, inject):
    kwargs, error, message = INVALID[name]
    engine = engine_of(tiny_model("llama"), max_out_tokens=16, kernel_inject=inject)
    for args, more in (((IDS,), {}), ((), {"input_ids": IDS}), ((), {"inputs": IDS})):
        with pytest.raises(error, match=message):
            engine.generate(*args, attention_mask=MASK, **more, **kwargs)
    engine.module.generation_config.num_beams = 3
    with pytest.raises(NotImplementedError, match="num_beams=3"):
        engine.generate(IDS, attention_mask=MASK, max_new_tokens=3)


def test_min_out_tokens_must_fit():
    engine = engine_of(tiny_model("llama"), max_out_tokens=16, min_out_tokens=9)
    engine.generate(IDS, attention_mask=MASK, max_new_tokens=3)
    for args, kwargs in (((IDS.repeat(1, 2)[:, :8],), {}), ((), {"input_ids": IDS.repeat(1, 2)[:, :8]})):
        with pytest.raises(ValueError, match="prompt of 8 tokens there is no room for min_out_tokens=9"):
            engine.generate(*args, max_new_tokens=1, **kwargs)


def test_generate_and_train_of_other_modules():
    engine = engine_of(tiny_non_decoder("bert"))
    assert not engine.module.training
    with pytest.raises(RuntimeError, match="does not train; hybrid.initialize"):
        engine.train()
    encoder = engine_of(copy.deepcopy(engine.module).bert)
    encoder.eval()
    with pytest.raises(ValueError, match="BertModel has no generate"):
        engine_of(torch.nn.Linear(2, 2)).generate(IDS) if hasattr(encoder.module, "generate") else encoder.generate(IDS)


def test_several_engines_are_independent():
    """Engines with different sizes and limits, called alternately; destroying one does not affect another."""
    engines = []
    for family, hidden, limit in (("llama", 32, 20), ("llama", 64, 40), ("gpt2", 32, 30)):
        model = tiny_model(family, **({"hidden_size": hidden} if family == "llama" else {}))
        engines.append((engine_of(model, max_out_tokens=limit), twin(model), limit))
    for _ in range(2):
        for engine, reference, limit in engines:
            request = {"attention_mask": MASK, "max_new_tokens": limit - 7, "min_new_tokens": limit - 7}
            assert torch.equal(engine.generate(IDS, **request), reference.generate(IDS, **request))
    engines[0][0].destroy()
    engine, reference, _ = engines[1]
    request = {"attention_mask": MASK, "max_new_tokens": 6}
    assert torch.equal(engine.generate(IDS, **request), reference.generate(IDS, **request))


def test_samples_depend_on_torchs_seed():
    """Same seed, same tokens; another seed, other tokens. torch's seed holds per run, and its generator is not drawn
    from; a `seed` argument holds per call."""
    request = {"attention_mask": MASK, "max_new_tokens": 9, "do_sample": True, "top_k": 0}
    model = tiny_model("llama")
    runs = []
    for seed in (5, 6, 5):
        torch.manual_seed(seed)
        engine, state = engine_of(twin(model)), torch.get_rng_state()
        runs.append([engine.generate(IDS, **request) for _ in range(2)])
        assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(*pair) for pair in zip(runs[0], runs[2], strict=True))
    assert not torch.equal(*runs[0])
    assert not torch.equal(runs[0][0], runs[1][0])
    torch.manual_seed(6)  # also for an engine that has sampled before
    assert torch.equal(engine.generate(IDS, **request), runs[1][0])
    seeded = [engine.generate(IDS, seed=seed, **request) for seed in (3, 4, 3)]
    assert torch.equal(seeded[0], seeded[2])
    assert not torch.equal(seeded[0], seeded[1])


# Profiling, as DeepSpeed's tests/unit/inference/test_model_profiling.py tests it


@pytest.mark.parametrize("use_cuda_events", [True, False])
@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("inject", [True, False])
def test_profiling_matches_deepspeed(name, use_cuda_events, inject):
    engine = engine_of(tiny_non_decoder(name) if name in NON_DECODERS else tiny_model(name), kernel_inject=inject)
    with pytest.raises(AssertionError, match="model profiling is not enabled"):
        engine.model_times()
    engine.profile_model_time(use_cuda_events=use_cuda_events)
    engine.profile_model_time(use_cuda_events=use_cuda_events)  # once is enough
    times = []
    for _ in range(10):
        engine(IDS, attention_mask=MASK)
        times.extend(engine.model_times())
    assert len(times) == 10
    assert np.all(times)
    assert engine.model_times() == []
    if name == "llama":
        assert engine.coverage()[0]["container"] == ("fused" if inject else "native"), "timing counts as a user's hook"
        engine.generate(IDS, attention_mask=MASK, max_new_tokens=5, min_new_tokens=5)
        assert len(engine.model_times()) == 5  # the prompt's forward, and one for each token but the last
        engine.generate(IDS, attention_mask=MASK, max_new_tokens=5, min_new_tokens=5, stopping_criteria=[never_stop])
        assert len(engine.model_times()) == 5


class ClockEvent:
    """Stands in for a device's event, timed by the clock."""

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, other) -> float:
        return (other.at - self.at) * 1e3


def word_pipeline(task: str, model):
    """A transformers pipeline with a word-level tokenizer."""
    vocabulary = {"[PAD]": 0, "[BOS]": 1, "[EOS]": 2, "[UNK]": 3, "[MASK]": 4, "I": 5, "am": 6, "a": 7, "model": 8}
    vocabulary |= {f"w{n}": n for n in range(9, 97)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    special = {"pad_token": "[PAD]", "mask_token": "[MASK]", "unk_token": "[UNK]", "eos_token": "[EOS]"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    return pipeline(task, model=model, tokenizer=tokenizer, device="cpu")


@pytest.mark.parametrize("events", [True, False])
@pytest.mark.parametrize("use_cuda_events", [True, False])
@pytest.mark.parametrize("task", ["fill-mask", "text-generation"])
def test_deepspeeds_own_profiling_test_passes(task, use_cuda_events, events):
    """DeepSpeed's tests/unit/inference/test_model_profiling.py with `hybrid.init_inference`: `pipe.model` is the
    engine, and forwards take no longer than the whole call. With and without device events."""
    created_events = []
    model = tiny_non_decoder("bert") if task == "fill-mask" else tiny_model("llama").eval()
    query = "I am a [MASK] model" if task == "fill-mask" else "I am a"
    more = {} if task == "fill-mask" else {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    forwards = 1 if task == "fill-mask" else 4
    pipe = word_pipeline(task, model)
    expected = pipe(query, **more)
    pipe.model = hybrid.init_inference(pipe.model, dtype=torch.float32, mp_size=1, replace_with_kernel_inject=True)
    pipe.model._times.make_event = (
        (lambda: created_events.append(ClockEvent()) or created_events[-1]) if events else None
    )
    with pytest.raises(AssertionError, match="model profiling is not enabled"):
        pipe.model.model_times()
    pipe.model.profile_model_time(use_cuda_events=use_cuda_events)
    e2e_times, model_times = [], []
    for _ in range(10):
        start = time.perf_counter_ns()
        actual = pipe(query, **more)
        e2e_times.append((time.perf_counter_ns() - start) / 1e6)
        times = pipe.model.model_times()
        assert len(times) == forwards
        model_times.append(sum(times))
    assert pipe.model.model_times() == []
    for e2e_t, model_t in zip(e2e_times, model_times, strict=True):
        assert e2e_t >= model_t > 0
    assert bool(created_events) == (events and use_cuda_events)
    assert str(actual)[:60] == str(expected)[:60]


@pytest.mark.parametrize(
    ("task", "dtype"),
    [(task, dtype) for task in ("fill-mask", "text-generation") for dtype in ("float32", "bfloat16")]
    + [("text-generation", "int8")],
)
def test_device_and_dtype_are_those_of_a_model(task, dtype):
    """`tok(...).to(engine.device)` works, and an engine is the model of a Hugging Face pipeline from the start."""
    model = tiny_non_decoder("bert") if task == "fill-mask" else tiny_model("llama").eval()
    own = twin(model) if dtype == "int8" else twin(model).to(getattr(torch, dtype))
    reference = word_pipeline(task, own)
    engine = engine_of(model, dtype=dtype)
    assert (engine.device, engine.dtype) == (own.device, own.dtype)
    assert engine.can_generate() == own.can_generate()
    pipe = pipeline(task, model=engine, tokenizer=reference.tokenizer)
    assert (pipe.model, pipe.device, pipe.dtype) == (engine, own.device, own.dtype)
    query, more = (
        ("I am a [MASK] model", {}) if task == "fill-mask" else ("I am a", {"max_new_tokens": 4, "do_sample": False})
    )
    if dtype == "float32":
        assert str(pipe(query, **more))[:60] == str(reference(query, **more))[:60]
    ids = reference.tokenizer(query, return_tensors="pt").to(engine.device)
    assert engine(**ids).logits.dtype == engine.dtype


def test_a_model_without_generate_cannot_generate():
    assert engine_of(torch.nn.Linear(2, 2), kernel_inject=False).can_generate() is False


def never_stop(input_ids, scores, **kwargs):
    return torch.zeros(len(input_ids), dtype=torch.bool)


def test_adapters_follow_pefts_switches():
    """Merged in fused containers; switched with PEFT's own functions."""
    model = with_peft(tiny_model("llama"))
    reference = twin(model)
    engine = engine_of(model)
    request = {"attention_mask": MASK, "max_new_tokens": 6}
    assert torch.equal(engine.generate(IDS, **request), reference.generate(IDS, **request))
    with model.disable_adapter(), reference.disable_adapter():
        assert torch.equal(engine.generate(IDS, **request), reference.generate(IDS, **request))


def test_free_memory_bounds_what_is_reserved_for_keys_and_values(monkeypatch):
    """Rows that end early fit where their limits do not; the tokens are the same."""
    ends = list(range(97))
    settings = {"attention_mask": MASK, "max_new_tokens": 900, "eos_token_id": ends, "do_sample": False}
    engine = engine_of(tiny_model("llama"), max_out_tokens=1024)
    expected = engine.generate(IDS, **settings)
    monkeypatch.setattr("hybrid.inference.engine.free_bytes", lambda: 0)
    short = engine_of(tiny_model("llama"), max_out_tokens=1024)
    assert torch.equal(short.generate(IDS, **settings), expected)
    blocks, of_short = (each._generator.block_pool.peak_bytes for each in (engine, short))
    assert 0 < of_short < blocks / 2
    assert torch.equal(*(each.generate(IDS, attention_mask=MASK, max_new_tokens=600) for each in (engine, short)))
