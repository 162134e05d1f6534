"""SamplingParams alone decide a rollout: of a checkpoint's generation_config it takes only the special tokens."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from transformers import CompileConfig, GenerationConfig, WatermarkingConfig

import hybrid
from tests.engines import engine_of, settings
from tests.marks import slow_but
from tests.tiny_models import VOCABULARY, prompts, tiny_model, with_peft

SPECIAL = {"pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"}
# For every other field of GenerationConfig (transformers 5.23) a value that would change a rollout, or that must have
# no effect. A field in neither list fails the test: decide which it is.
HOSTILE = {
    "max_length": 7,
    "max_new_tokens": 1,
    "min_length": 30,
    "min_new_tokens": 9,
    "early_stopping": True,
    "max_time": 1e-9,
    "stop_strings": ["a"],
    "do_sample": False,
    "num_beams": 3,
    "use_mtp": True,
    "use_cache": False,
    "cache_implementation": "static",
    "cache_config": {"backend": "quanto"},
    "max_cache_len": 4,
    "temperature": 0.1,
    "top_k": 1,
    "top_p": 0.01,
    "min_p": 0.9,
    "top_h": 0.1,
    "typical_p": 0.1,
    "epsilon_cutoff": 0.5,
    "eta_cutoff": 0.5,
    "repetition_penalty": 9.0,
    "encoder_repetition_penalty": 9.0,
    "length_penalty": 3.0,
    "no_repeat_ngram_size": 1,
    "bad_words_ids": [[token] for token in range(3, 60)],
    "renormalize_logits": True,
    "forced_bos_token_id": 5,
    "forced_eos_token_id": 7,
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": (0, 5.0),
    "suppress_tokens": list(range(3, 60)),
    "begin_suppress_tokens": list(range(3, 60)),
    "sequence_bias": [[[token], -50.0] for token in range(3, 60)],
    "token_healing": True,
    "guidance_scale": 3.0,
    "watermarking_config": WatermarkingConfig(bias=20.0),
    "num_return_sequences": 3,
    "output_attentions": True,
    "output_hidden_states": True,
    "output_scores": True,
    "output_logits": True,
    "return_dict_in_generate": True,
    "encoder_no_repeat_ngram_size": 1,
    "is_assistant": True,
    "num_assistant_tokens": 5,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.9,
    "prompt_lookup_num_tokens": 3,
    "max_matching_ngram_size": 2,
    "assistant_early_exit": 1,
    "assistant_lookbehind": 3,
    "target_lookbehind": 3,
    "assistant_ensemble_weight": 0.5,
    "speculation_type": "mtp",
    "compile_config": CompileConfig(),
    "disable_compile": True,
    "continuous_batching_config": {"page_size": 16},
    "low_memory": True,
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "diversity_penalty": 1.0,
    "num_beam_groups": 2,
    "constraints": ["a constraint"],
    "force_words_ids": [[5]],
    "prefill_chunk_size": 2,
    "_from_model_config": True,
    "transformers_version": "1.0",
}
DRAWS = (
    hybrid.SamplingParams(max_new_tokens=5, seed=3),
    hybrid.SamplingParams(max_new_tokens=5, temperature=0.0),
    hybrid.SamplingParams(max_new_tokens=5, min_new_tokens=3, temperature=1.4, top_k=9, top_p=0.9, min_p=0.02, seed=3),
)


def check_nothing_is_inherited(containers: str) -> None:
    engine = engine_of(with_peft(tiny_model("llama")), settings(3, rollout={"containers": containers}))
    own = engine.module.generation_config
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())

    def rollouts() -> list[torch.Tensor]:
        with engine.inference():
            batches = [
                engine.rollout(ids, mask, params, num_generations=1 + (params.seed or 0) % 2) for params in DRAWS
            ]
        return [value for batch in batches for value in vars(batch).values() if isinstance(value, torch.Tensor)]

    expected = rollouts()
    assert vars(GenerationConfig()).keys() == HOSTILE.keys() | SPECIAL
    neutral = dict(vars(own))
    cases = {name: {name: value} for name, value in HOSTILE.items()}
    cases |= {"all": HOSTILE, "a field of the checkpoint's own": {"no_timestamps_token_id": 5}}
    for case, hostile in cases.items():
        vars(own).update(copy.deepcopy(hostile))
        before = dict(vars(own))
        actual = rollouts()
        assert engine.module.generation_config is own
        assert vars(own) == before, f"{case}: the model's own configuration was changed"
        assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True)), f"{case} is inherited"
        vars(own).clear()
        vars(own).update(neutral)


@pytest.mark.parametrize("containers", slow_but(["fused"], ["fused", "native"]))
def test_a_rollout_inherits_only_special_tokens(ranks, containers):
    ranks.run(check_nothing_is_inherited, containers)


def check_fused_rollouts() -> None:
    """A rollout makes its request of SamplingParams alone; Hugging Face's `generate`, given the equivalent
    GenerationConfig and the same seed, gives the same tokens. A native rollout builds a greedy GenerationConfig, with
    which Hugging Face prepares the caches."""
    engine = engine_of(with_peft(tiny_model("llama")), settings(3, rollout={"containers": "fused"}))
    ids, mask = prompts(3, 6, padded=True, seed=dist.get_rank())
    built, own = [], hybrid.SamplingParams.generation_config

    def counted(params: hybrid.SamplingParams, model: torch.nn.Module, num_generations: int) -> GenerationConfig:
        built.append(params)
        return own(params, model, num_generations)

    more = hybrid.SamplingParams(9, temperature=0.8, repetition_penalty=1.3, min_new_tokens=4, stop_token_ids=(5, 6, 7))
    for params in (*DRAWS, replace(more, seed=5), replace(more, temperature=0.0)):
        samples = 2 if params.temperature else 1
        with patch.object(hybrid.SamplingParams, "generation_config", counted):
            batch = engine.rollout(ids, mask, params, samples)
        config = params.generation_config(engine.module, samples)
        with engine.inference():
            sequences = engine.generate(ids, attention_mask=mask, generation_config=config, seed=params.seed)
        assert torch.equal(batch.sequences, sequences), params
    assert built == [], "a fused rollout built a GenerationConfig"
    with patch.object(hybrid.SamplingParams, "generation_config", counted), hooked(engine.module):
        native = engine.rollout(ids, mask, DRAWS[0])
    greedy = hybrid.SamplingParams(DRAWS[0].max_new_tokens, temperature=0.0)
    assert [replace(params, stop_token_ids=greedy.stop_token_ids) for params in built] == [greedy]
    assert torch.equal(native.completion_ids, engine.rollout(ids, mask, DRAWS[0]).completion_ids)


@contextmanager
def hooked(model: torch.nn.Module) -> Iterator[None]:
    """With a hook on a module of the model, for which rollouts run natively."""
    handle = model.base_model.model.lm_head.register_forward_hook(lambda *args: None)
    try:
        yield
    finally:
        handle.remove()


def test_a_fused_rollout_builds_no_generation_config(ranks):
    ranks.run(check_fused_rollouts)


def check_greedy_samples() -> None:
    for containers in ("fused", "native"):
        engine = engine_of(tiny_model("llama"), settings(3, rollout={"containers": containers}))
        ids, mask = prompts(2, 6, padded=False)
        with pytest.raises(ValueError, match="num_generations: 2 given with temperature=0; it must be 1"):
            engine.rollout(ids, mask, hybrid.SamplingParams(3, temperature=0), num_generations=2)


def test_several_greedy_samples_of_a_prompt_raise(ranks):
    ranks.run(check_greedy_samples)


def test_special_tokens_are_the_models():
    model = tiny_model("llama")
    model.generation_config = GenerationConfig(eos_token_id=[5, 6], pad_token_id=4, bos_token_id=3)
    config = hybrid.SamplingParams(max_new_tokens=4, stop_token_ids=(9,)).generation_config(model, 2)
    assert config.eos_token_id == [5, 6, 2, 9]  # 2 is the model's configuration's
    assert (config.pad_token_id, config.bos_token_id) == (4, 3)
    assert max(HOSTILE["suppress_tokens"]) < VOCABULARY
