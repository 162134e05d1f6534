"""DeepSpeed's rollout interface: equal to its own HybridEngineRollout; unsupported settings raise."""

from types import SimpleNamespace

import deepspeed.runtime.rollout as deepspeed_rollout
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.rollout import (
    HybridEngineRollout,
    ResponseTokenBatch,
    RolloutBatch,
    RolloutConfig,
    RolloutEngine,
    RolloutRequest,
    SamplingConfig,
)
from deepspeed.runtime.rollout.hybrid_engine_rollout import HybridEngineRolloutConfig

import hybrid
from hybrid.sampling.sampler import Seeds
from tests.engines import CollectiveCount, engine_of, settings, storage_digest, train_step
from tests.marks import slow_but
from tests.tiny_models import ADAPTERS, prompts, tiny_model, twin

ENDS = [2, 9, 14, 23, 37, 52, 66, 81]  # enough for random models to end early
TOKENIZER = SimpleNamespace(pad_token_id=0, eos_token_id=ENDS)


def request_of(rows: int = 5, seed: int = 0) -> RolloutRequest:
    """This rank's prompts, of different lengths."""
    return RolloutRequest(*prompts(rows, 6, padded=True, seed=seed * 10 + dist.get_rank()))


def check_greedy(adapter: str, samples: int) -> int:
    """Greedy rollouts of DeepSpeed on an unpartitioned model and ours under ZeRO-3; returns the number of early
    ends."""
    model = ADAPTERS[adapter](tiny_model("llama"))
    deepspeeds = HybridEngineRollout(SimpleNamespace(module=twin(model)), TOKENIZER)
    rollout = hybrid.HybridRollout(engine_of(model, settings(3)), TOKENIZER)
    assert isinstance(rollout, RolloutEngine)
    sampling = SamplingConfig(max_new_tokens=12, temperature=0.0, n_samples_per_prompt=samples)
    ended = 0
    for seed in range(3):
        request = request_of(seed=seed)
        expected, actual = deepspeeds.generate(request, sampling), rollout.generate(request, sampling)
        assert isinstance(actual, RolloutBatch)
        assert actual.batch_size == expected.batch_size == 5 * samples
        # DeepSpeed pads to max_new_tokens; ours is as wide as the longest row.
        width = actual.seq_len
        assert torch.equal(actual.input_ids, expected.input_ids[:, :width])
        assert torch.equal(actual.attention_mask, expected.attention_mask[:, :width])
        assert (expected.attention_mask[:, width:] == 0).all() and actual.attention_mask[:, -1].any()
        assert torch.equal(actual.response_start_idx, expected.response_start_idx)
        assert actual.attention_mask.dtype == expected.attention_mask.dtype
        targets, expected_targets = (ResponseTokenBatch.from_rollout(batch) for batch in (actual, expected))
        assert torch.equal(targets.response_mask, expected_targets.response_mask[:, : width - 1])
        ended += actual.rollout.finish_reason.count("stop")
    return ended


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("adapter", slow_but(["peft"], ["none", "peft"]))
def test_greedy_rollouts_match_deepspeeds(ranks, adapter, samples):
    for ended in ranks.run(check_greedy, adapter, samples):
        assert 0 < ended < 15 * samples, "all completions have the same length: the test of masks is vacuous"


def check_continuous() -> None:
    engine = engine_of(tiny_model("llama"), settings(3))
    deepspeeds = HybridEngineRollout(SimpleNamespace(module=tiny_model("llama").eval()), TOKENIZER)
    rollout = hybrid.HybridRollout(engine, TOKENIZER)
    request = request_of(rows=5 - 2 * dist.get_rank())  # ranks have different numbers of batches
    rows, engine_rollout = [], engine.rollout
    sampling = {"max_new_tokens": 12, "temperature": 0.0}
    engine.rollout = lambda ids, *args, **kwargs: rows.append(len(ids)) or engine_rollout(ids, *args, **kwargs)
    actual = rollout.generate(request, SamplingConfig(**sampling, continuous_batch_size=2))
    assert sum(rows) == actual.batch_size and max(rows) == 2, (
        "more rows than continuous_batch_size were decoded together"
    )
    # DeepSpeed's continuous batching, which differs only in padding, does not run with transformers 5.23
    # (its cache has no get_query_offset), so its plain generation is the oracle.
    expected = deepspeeds.generate(request, SamplingConfig(**sampling))
    assert torch.equal(actual.input_ids, expected.input_ids[:, : actual.seq_len])
    assert torch.equal(actual.attention_mask, expected.attention_mask[:, : actual.seq_len])
    plain = rollout.generate(request, SamplingConfig(**sampling))
    # float32 sums over other batch shapes
    for name in ("sampling_per_token_logps", "old_per_token_logps", "raw_per_token_logps"):
        torch.testing.assert_close(getattr(actual.rollout, name), getattr(plain.rollout, name), atol=1e-5, rtol=1e-5)
    assert actual.rollout.finish_reason == plain.rollout.finish_reason
    assert actual.rollout.timings["tokens"] == actual.rollout.completion_mask.sum()


def test_continuous_batches_match_plain_ones(ranks):
    ranks.run(check_continuous, timeout_s=60)


def check_sampling() -> list:
    """Sampled rows equal those of engine.rollout with the same seed, for any batch size; ranks sample different
    tokens."""
    engine = engine_of(tiny_model("llama"), settings(3))
    rollout, ids = hybrid.HybridRollout(engine, TOKENIZER), prompts(4, 5, padded=False)[0]
    request = RolloutRequest(ids, torch.ones_like(ids, dtype=torch.bool))
    sampling = {"max_new_tokens": 10, "temperature": 1.3, "top_p": 0.9, "top_k": 40, "n_samples_per_prompt": 2}
    batches = []
    for bound in (None, 2, 5):
        engine._generator.seeds = Seeds(3)  # as for an engine built after torch.manual_seed(3)
        batches.append(rollout.generate(request, SamplingConfig(**sampling, continuous_batch_size=bound)))
        assert torch.equal(batches[-1].input_ids, batches[0].input_ids)
    engine._generator.seeds = Seeds(3)
    params = hybrid.SamplingParams(10, temperature=1.3, top_p=0.9, top_k=40, stop_token_ids=tuple(ENDS))
    direct = engine.rollout(ids, request.prompt_attention_mask, params, num_generations=2)
    batch = batches[0].rollout
    assert torch.equal(batch.completion_ids, direct.completion_ids)
    assert torch.equal(batch.sampling_per_token_logps, direct.sampling_per_token_logps)
    assert batch.weight_version == engine.weight_version == 0
    assert not torch.equal(rollout.generate(request, SamplingConfig(**sampling)).input_ids, batches[0].input_ids)
    taken = engine._generator.seeds.count
    rollout.generate(request, SamplingConfig(max_new_tokens=3, temperature=0.0))
    assert engine._generator.seeds.count == taken, "a greedy rollout consumed a seed"
    return batch.completion_ids.tolist()


def test_sampled_rollouts_match_the_engines(ranks):
    first, second = ranks.run(check_sampling)
    assert first != second, "ranks share their sampling keys"


def check_a_trainers_loop() -> None:
    """Rollouts between steps: current weights, one gather each, training storage and mode unchanged."""
    model = tiny_model("llama")
    rollout = hybrid.HybridRollout(engine := engine_of(model, settings(3)), TOKENIZER)
    request, sampling = request_of(), SamplingConfig(max_new_tokens=8, temperature=0.0, continuous_batch_size=2)
    outputs = []
    for step in range(3):
        engine.train()
        before = storage_digest(engine)
        rollout.sync_weights(step)
        batch = rollout.generate(request, sampling)
        with CollectiveCount() as collectives:
            rollout.generate(request, sampling)
        assert collectives.count == 0, "the same weights were gathered again"
        assert engine.module.training and storage_digest(engine) == before
        assert batch.rollout.weight_version == engine.weight_version == step
        outputs.append(str(batch.input_ids.tolist()))
        train_step(engine, step)
    assert len(set(outputs)) == 3, "rollouts do not follow the training"
    rollout.shutdown()


def test_rollouts_in_a_trainers_loop_follow_the_weights(ranks):
    ranks.run(check_a_trainers_loop)


def check_ranks_without_prompts(pinned: bool) -> None:
    engine = engine_of(tiny_model("llama"), settings(3, hybrid_engine={"pin_parameters": pinned}))
    request = request_of(rows=3 * dist.get_rank() or 1)
    if dist.get_rank() == 0:
        request = RolloutRequest(request.prompt_ids[:0], request.prompt_attention_mask[:0])
    sampling = SamplingConfig(max_new_tokens=7, temperature=0.7, n_samples_per_prompt=2)
    batch = hybrid.HybridRollout(engine, TOKENIZER).generate(request, sampling)
    assert batch.batch_size == len(batch.response_start_idx) == 6 * dist.get_rank()


@pytest.mark.parametrize("pinned", [True, False])
def test_a_rank_without_prompts_does_not_hang(ranks, pinned):
    ranks.run(check_ranks_without_prompts, pinned, timeout_s=60)


def check_padding_and_ends() -> None:
    """Without a tokenizer they are the model's; a tokenizer's end tokens are added, and its padding token is used."""
    engine = engine_of(tiny_model("llama", eos_token_id=ENDS, pad_token_id=5), settings(3))
    request = request_of(rows=8)
    sampling = SamplingConfig(max_new_tokens=20, temperature=1.5, continuous_batch_size=3)
    kinds = {
        "none": (None, 5, ENDS),
        "one end": (SimpleNamespace(pad_token_id=7, eos_token_id=17), 7, [*ENDS, 17]),
        "no padding": (SimpleNamespace(pad_token_id=None, eos_token_id=[11, 12]), 11, [*ENDS, 11, 12]),
        "no end": (SimpleNamespace(pad_token_id=7, eos_token_id=None), 7, ENDS),
    }
    for name, (tokenizer, pad, ends) in kinds.items():
        batch = hybrid.HybridRollout(engine, tokenizer).generate(request, sampling)
        responses, mask = batch.input_ids[:, 6:], batch.attention_mask[:, 6:]
        assert (responses[mask == 0] == pad).all(), name
        assert mask.sum(1).min() < mask.shape[1], "nothing is padded"
        for tokens, length in zip(responses.tolist(), mask.sum(1).tolist(), strict=True):
            assert not set(tokens[: length - 1]) & set(ends), name
            assert length == 20 or tokens[length - 1] in ends, name


def test_padding_and_end_tokens_of_the_tokenizer(ranks):
    ranks.run(check_padding_and_ends)


def check_profile() -> None:
    engine = engine_of(tiny_model("llama"), settings(3))
    request = request_of(rows=4)
    sampling = SamplingConfig(max_new_tokens=9, temperature=0.0, n_samples_per_prompt=2)
    silent = hybrid.HybridRollout(engine, TOKENIZER, RolloutConfig())
    silent.generate(request, sampling)
    assert silent.get_last_profile() is None
    cfg = HybridEngineRolloutConfig(enable_profiling=True)
    rollout = hybrid.HybridRollout(engine, TOKENIZER, cfg)
    deepspeeds = HybridEngineRollout(SimpleNamespace(module=tiny_model("llama").eval()), TOKENIZER, cfg)
    batch = rollout.generate(request, sampling)
    deepspeeds.generate(request, sampling)
    profile, expected = rollout.get_last_profile(), deepspeeds.get_last_profile()
    assert profile.keys() - expected.keys() == {"gather_ms"}
    for name in ("batch_size", "num_samples_per_prompt", "prompt_length"):
        assert profile[name] == expected[name], name
    assert profile["num_generated_tokens"] == batch.attention_mask[:, 6:].sum()
    assert 0 < profile["prefill_forward_ms"] + profile["decode_forward_ms"] < profile["total_ms"]


def test_profile_matches_deepspeeds_fields(ranks):
    ranks.run(check_profile)


def check_unsupported() -> None:
    engine = engine_of(tiny_model("llama"), settings(3, hybrid_engine={"enable_cuda_graph": False}))
    request, before = request_of(), storage_digest(engine)
    for cfg, message in (
        (RolloutConfig(engine="vllm"), "RolloutConfig.engine: 'vllm' given; it must be 'hybrid_engine'"),
        (RolloutConfig(use_graph_capture=True), "use_graph_capture: true given; hybrid_engine.enable_cuda_graph"),
        (HybridEngineRolloutConfig(use_shared_prefill=True), "use_shared_prefill: true given; the engine finds"),
        (HybridEngineRolloutConfig(align_decode_fronts=True), "align_decode_fronts: true given; the engine lays"),
        (HybridEngineRolloutConfig(enable_cache_trimming=True), "enable_cache_trimming: true given; the engine"),
        (HybridEngineRolloutConfig(continuous_cache_capacity=64), "continuous_cache_capacity: 64 given; the KV cache"),
    ):
        with pytest.raises((ValueError, NotImplementedError), match=message):
            hybrid.HybridRollout(engine, TOKENIZER, cfg)
    with pytest.raises(ValueError, match="neither pad_token_id nor eos_token_id"):
        hybrid.HybridRollout(engine, SimpleNamespace(pad_token_id=None, eos_token_id=None))
    rollout = hybrid.HybridRollout(engine, TOKENIZER)
    for changes, message in (
        ({"n_samples_per_prompt": 0}, "n_samples_per_prompt: 0 given; it must be at least 1"),
        ({"continuous_batch_size": 0}, "continuous_batch_size: 0 given; it must be at least n_samples_per_prompt, 1"),
        ({"continuous_batch_size": 2, "n_samples_per_prompt": 3}, "continuous_batch_size: 2 given"),
        ({"max_new_tokens": 0}, "max_new_tokens: 0 given; it must be at least 1"),
        ({"top_p": 0.0}, "top_p: 0.0 given"),
        ({"max_new_tokens": 600}, "over hybrid_engine.max_out_tokens=512"),
    ):
        with pytest.raises(ValueError, match=message):
            rollout.generate(request, SamplingConfig(**{"max_new_tokens": 4, **changes}))
    sampling, ids = SamplingConfig(max_new_tokens=4), request.prompt_ids
    with pytest.raises(ValueError, match="are empty prompts"):
        rollout.generate(RolloutRequest(ids, torch.zeros_like(ids)), sampling)
    with pytest.raises(ValueError, match="are not left padded"):
        rollout.generate(RolloutRequest(ids, request.prompt_attention_mask.flip(1)), sampling)
    streaming = engine_of(tiny_model("llama"), settings(3, hybrid_engine={"pin_parameters": False}))
    with pytest.raises(
        NotImplementedError, match="pin_parameters=false or inference_tp_size above 1 ranks decode in step"
    ):
        hybrid.HybridRollout(streaming).generate(request, SamplingConfig(4, continuous_batch_size=2))
    assert engine.module.training and storage_digest(engine) == before


def test_unsupported_rollout_settings_raise(ranks):
    ranks.run(check_unsupported)


def check_building() -> None:
    """The factory's cases; and DeepSpeed's own rollout, which calls our engine through the model's `generate`."""
    model = tiny_model("llama")
    plain = HybridEngineRollout(SimpleNamespace(module=twin(model)), TOKENIZER)
    engine = engine_of(model, settings(3))
    built = hybrid.build_rollout(RolloutConfig(), student_engine=engine, tokenizer=TOKENIZER)
    assert type(built) is hybrid.HybridRollout
    other = hybrid.build_rollout(RolloutConfig(), SimpleNamespace(module=model), TOKENIZER)
    deepspeeds = deepspeed_rollout.build_rollout(RolloutConfig(), engine, TOKENIZER)
    assert type(other) is type(deepspeeds) is HybridEngineRollout
    request = request_of(rows=3 + dist.get_rank())
    for samples in (1, 2):
        sampling = SamplingConfig(max_new_tokens=6 + 3 * dist.get_rank(), temperature=0.0, n_samples_per_prompt=samples)
        expected = plain.generate(request, sampling)
        tokens = engine.stats()["tokens"]
        for rollout in (deepspeeds, built):
            actual = rollout.generate(request, sampling)
            width = actual.seq_len
            assert torch.equal(actual.input_ids, expected.input_ids[:, :width])
            assert torch.equal(actual.attention_mask, expected.attention_mask[:, :width])
            assert torch.equal(actual.response_start_idx, expected.response_start_idx)
            assert engine.stats()["tokens"] > tokens, "the engine did not generate"
            tokens = engine.stats()["tokens"]
    for cfg, arguments, message in (
        (RolloutConfig(engine="vllm"), (engine, TOKENIZER), "Unknown rollout engine 'vllm'"),
        (RolloutConfig(), (engine, None), "needs both student_engine and tokenizer"),
        (RolloutConfig(), (None, TOKENIZER), "needs both student_engine and tokenizer"),
    ):
        with pytest.raises(ValueError, match=message):
            hybrid.build_rollout(cfg, *arguments)


def test_build_rollout_as_in_deepspeed(ranks):
    ranks.run(check_building)
