"""Decoding methods that a training engine runs in Hugging Face's own loop: the same tokens from the snapshot, one
warning, torch's generators unchanged. And the cache is freed after every call."""

import warnings

import pytest
import torch
import torch.distributed as dist
from transformers import GenerationConfig

import hybrid
from tests.engines import engine_of, settings, storage_digest, train_step
from tests.marks import slow_but
from tests.tiny_models import SIZES, prompts, tiny_model, tiny_non_decoder, twin, with_peft

IDS, MASK = prompts(2, 6, padded=True)
REQUEST = {"attention_mask": MASK, "max_new_tokens": 7, "do_sample": False}


def greedy_by_hand(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
    """A custom decoding method: three tokens with the highest logits."""
    for _ in range(3):
        logits = model(input_ids, attention_mask=torch.ones_like(input_ids)).logits[:, -1]
        input_ids = torch.cat([input_ids, logits.argmax(dim=-1, keepdim=True)], dim=1)
    return input_ids


def methods() -> dict[str, dict]:
    return {
        "beams": {**REQUEST, "num_beams": 3},
        "beams in a config": {
            "attention_mask": MASK,
            "generation_config": GenerationConfig(max_new_tokens=7, num_beams=2, num_return_sequences=2),
        },
        "prompt lookup": {"max_new_tokens": 7, "do_sample": False, "prompt_lookup_num_tokens": 2},
        "an assistant": {
            "max_new_tokens": 7,
            "do_sample": False,
            "assistant_model": tiny_model("llama", seed=3).eval(),
        },
        "another loop": {"custom_generate": greedy_by_hand},
    }


def check_methods(stage: int, tp_size: int, pinned: bool) -> None:
    model = with_peft(tiny_model("llama"))
    reference = twin(model)
    block = {"enabled": True, "inference_tp_size": tp_size, "pin_parameters": pinned}
    engine = engine_of(model, settings(stage, hybrid_engine=block, rollout={"containers": "fused"}))
    requests, digest = methods(), storage_digest(engine)
    state = torch.get_rng_state()
    for name, request in requests.items():
        ids = IDS[:1] if name in ("prompt lookup", "an assistant") else IDS
        expected = reference.generate(input_ids=ids, **request)
        assert torch.equal(engine.generate(input_ids=ids, **request), expected), name
        assert "by Hugging Face's own loop" in engine.stats()["fallback_reason"], name
    sampled = [engine.generate(IDS, **{**REQUEST, "num_beams": 2, "do_sample": True}, seed=5) for _ in range(2)]
    assert torch.equal(*sampled)
    assert torch.equal(torch.get_rng_state(), state)
    assert storage_digest(engine) == digest
    assert torch.equal(engine.generate(IDS, **REQUEST), reference.generate(IDS, **REQUEST))  # fused again
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the model runs in native")  # it was warned of before
        engine.generate(IDS, **REQUEST, num_beams=3)
    engine.train()
    train_step(engine)


@pytest.mark.parametrize(
    ("stage", "tp_size", "pinned"),
    slow_but([(3, 1, True)], [(3, 1, True), (3, 2, True), (3, 1, False), (0, 1, False)]),
)
def test_other_decoding_methods_match_hugging_face(ranks, stage, tp_size, pinned):
    ranks.run(check_methods, stage, tp_size, pinned)


def check_shared_modules() -> None:
    """Ranks that share the model's own modules hold slices of each other's caches, which beam search must not
    reorder."""
    model = tiny_model("starcoder2", sizes=SIZES)
    reference = twin(model)
    tensor_parallel = {"enabled": True, "inference_tp_size": 2}
    engine = engine_of(model, settings(3, hybrid_engine=tensor_parallel, rollout={"containers": "native"}))
    assert engine.coverage()[0]["why"].startswith("the Hugging Face module itself, sharded over ranks")
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    request = {**REQUEST, "attention_mask": mask, "num_beams": 3, "max_new_tokens": 6 + 2 * dist.get_rank()}
    assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))
    with pytest.raises(ValueError, match="use_cache"):
        engine.generate(ids[:1], prompt_lookup_num_tokens=2, max_new_tokens=4)


def test_beam_search_where_ranks_share_the_models_modules(ranks):
    ranks.run(check_shared_modules)


def check_seq2seq() -> None:
    """As Seq2SeqTrainer calls it under ZeRO-3, with `synced_gpus`."""
    model = tiny_non_decoder("t5")
    reference = twin(model)
    engine = engine_of(model, settings(3))
    expected = reference.generate(IDS, **REQUEST, num_beams=3)
    assert torch.equal(engine.generate(IDS, **REQUEST, num_beams=3, synced_gpus=True), expected)
    assert torch.equal(engine.module.generate(IDS, **REQUEST, num_beams=3), expected)


def test_beam_search_of_an_encoder_decoder(ranks):
    ranks.run(check_seq2seq)


def test_inference_engine_raises_for_other_decoding_methods():
    """As DeepSpeed's engine does."""
    engine = hybrid.init_inference(tiny_model("llama"), dtype="fp32")
    with pytest.raises(NotImplementedError, match=r"num_beams=2.*greedy"):
        engine.generate(IDS, **REQUEST, num_beams=2)
    with pytest.raises(NotImplementedError, match="assistant_model is not available"):
        engine.generate(IDS[:1], assistant_model=tiny_model("llama"))


def check_released(stage: int) -> None:
    """After every call, also in eval mode; inside a window at its end. The same with `pin_parameters: false`."""
    model = tiny_model("llama")
    model.resets = 0
    type(model).reset_cache = count_reset
    try:
        block = {"enabled": True, "release_inference_cache": True, "pin_parameters": stage == 3}
        engine = engine_of(model, settings(stage, hybrid_engine=block))
        engine.eval()
        engine.generate(IDS, **REQUEST)
        assert engine.stats()["kv_bytes"] == 0 and model.resets == 1
        with engine.inference():
            engine.generate(IDS, **REQUEST)
            assert engine.stats()["kv_bytes"] > 0
        assert engine.stats()["kv_bytes"] == 0
        engine.train()
        train_step(engine)
    finally:
        del type(model).reset_cache


def count_reset(model) -> None:
    """`reset_cache` of a model with its own cache, as in DeepSpeed's examples."""
    model.resets += 1


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_cache_is_freed_after_every_call(ranks, stage):
    ranks.run(check_released, stage)


CONTRASTIVE = {**REQUEST, "penalty_alpha": 0.6, "top_k": 4}


def error_of(call, *args, **kwargs) -> tuple[type, str]:
    with pytest.raises(Exception) as raised:
        call(*args, **kwargs)
    return raised.type, str(raised.value)


def check_contrastive() -> None:
    """transformers keeps contrastive search on its hub, and requires `trust_remote_code` to run it."""
    model = tiny_model("llama")
    reference = twin(model)
    engine = engine_of(model, settings(3))
    digest = storage_digest(engine)
    expected = error_of(reference.generate, IDS, **CONTRASTIVE)
    assert "trust_remote_code=True" in expected[1]
    assert error_of(engine.generate, IDS, **CONTRASTIVE) == expected
    assert storage_digest(engine) == digest
    assert torch.equal(engine.generate(IDS, **REQUEST), reference.generate(IDS, **REQUEST))  # fused again


def test_contrastive_search_raises_hugging_faces_error(ranks):
    ranks.run(check_contrastive)
