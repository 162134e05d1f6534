"""Streaming (pin_parameters: false) gives the results of an engine with a snapshot, gathering one layer at a time;
ranks may have different batches."""

import pytest
import torch
import torch.distributed as dist

import hybrid
from hybrid.decoders.cpu_decoder import CpuDecoder
from hybrid.kernels import host_memory
from hybrid.kernels.cpu_library import cpu_library
from hybrid.weights.gather import AsyncAllGather
from tests.engines import (
    LARGE,
    engine_of,
    require_matches_hugging_face,
    require_same_rollouts,
    settings,
    storage_digest,
    train_step,
)
from tests.marks import slow_but
from tests.tiny_models import ADAPTERS, ALL_FAMILIES, PER_LAYER_INPUTS, prompts, tiny_model, twin


def streaming(threshold: int = 0, **blocks) -> dict:
    """Settings of an engine without a snapshot."""
    blocks["rollout"] = {"containers": "fused", **blocks.get("rollout", {})}
    return settings(3, threshold, hybrid_engine={"pin_parameters": False}, **blocks)


def check_family(family: str, adapter: str) -> None:
    model = ADAPTERS[adapter](tiny_model(family))
    reference = twin(model)
    engine = engine_of(model, streaming())
    require_matches_hugging_face(engine, reference, tolerance=1e-3)
    assert all("gathered layer by layer" in row["why"] and row["container"] == "fused" for row in engine.coverage())
    engine.destroy()


MIXED = ("glm4_moe", "afmoe", "mimo_v2_flash", "deepseek_v3")
QUICK = [("qwen3_moe", "none"), ("gpt2", "peft"), ("llama", "chat")]
CASES = [
    *((family, "none") for family in (*ALL_FAMILIES, *MIXED) if family not in PER_LAYER_INPUTS),
    ("gpt2", "peft"),
    ("llama", "chat"),
]


@pytest.mark.parametrize(("family", "adapter"), slow_but(QUICK, CASES))
def test_tokens_match_hugging_face(ranks, family, adapter):
    ranks.run(check_family, family, adapter)


def check_rollouts(adapter: str, threshold: int, lora: str) -> None:
    """Rollouts, their logprobs and scores equal those of an engine with a snapshot, before and after a step."""
    rollout = {"containers": "fused", "lora": lora}
    pinned, streamed = (
        engine_of(ADAPTERS[adapter](tiny_model("llama")), config)
        for config in (settings(3, threshold, rollout=rollout), streaming(threshold, rollout=rollout))
    )
    require_same_rollouts(pinned, streamed, 37, adapter != "none", tolerance=0)


@pytest.mark.parametrize(
    ("adapter", "threshold", "lora"),
    slow_but(
        [("peft", 0, "unmerged")],
        [
            ("none", 0, "merged"),
            ("none", LARGE, "merged"),
            ("peft", 0, "merged"),
            ("peft", 200, "merged"),
            ("peft", 0, "unmerged"),
            ("chat", LARGE, "unmerged"),
        ],
    ),
)
def test_rollouts_are_bit_identical_to_an_engine_with_a_snapshot(ranks, adapter, threshold, lora):
    """Bit-identical: the same kernels run on the same weights."""
    ranks.run(check_rollouts, adapter, threshold, lora)


def check_idle_and_failing_ranks() -> None:
    """A rank without rows, and one that raises during a forward: no rank hangs, and no training storage changes."""
    model = tiny_model("llama")
    reference = twin(model)
    engine = engine_of(model, streaming())
    rank = dist.get_rank()
    ids, mask = prompts(2, 6, padded=True, seed=rank)
    rows = 2 * rank
    batch = engine.rollout(ids[:rows], mask[:rows], hybrid.SamplingParams(max_new_tokens=12, temperature=0))
    assert len(batch.completion_ids) == rows
    assert len(engine.score(ids[:rows], mask[:rows]).per_token_logps) == rows
    digest = storage_digest(engine)
    request = {"attention_mask": mask, "max_new_tokens": 8}
    if rank == 0:
        with pytest.raises(IndexError, match="token ids"):
            engine.generate(ids + 1000, **request)
    else:
        assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))
    assert engine.module.training
    assert storage_digest(engine) == digest
    assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))
    train_step(engine)


def test_idle_and_failing_ranks_do_not_hang_streaming(ranks):
    ranks.run(check_idle_and_failing_ranks)


def check_bytes() -> None:
    """Live besides the partitions: two layers, the embedding and the head. A forward gathers every weight."""
    engine = engine_of(tiny_model("llama", num_hidden_layers=6), streaming())
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    engine.eval()
    engine.generate(ids, attention_mask=mask, max_new_tokens=3)  # the self-check is done
    engine.train()
    assert engine.stats()["snapshot_bytes"] == 0
    train_step(engine)
    engine.eval()
    engine.generate(ids, attention_mask=mask, max_new_tokens=4)
    stats = engine.stats()
    layer = sum(p.ds_numel * 4 for p in engine.module.model.layers[0].parameters())
    everything = sum(p.ds_numel * 4 for p in engine.module.parameters())
    outer = everything - 6 * layer
    buffers = stats["kv_bytes"] + stats["container_bytes"] + engine._runtime.fused.peak_activation_bytes()
    assert 2 * layer < stats["peak_bytes"] - buffers <= 2 * layer + outer
    assert stats["gathered_bytes"] == 4 * everything  # the prompts, and three new tokens
    engine.train()


def test_at_most_two_layers_are_gathered(ranks):
    ranks.run(check_bytes)


def check_native() -> None:
    """Calls that the decoder does not support run in the model's own layers, also with adapters=False."""
    model = ADAPTERS["peft"](tiny_model("llama"))
    reference = twin(model)
    engine = engine_of(model, streaming())
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    request = {"attention_mask": mask, "max_new_tokens": 3, "return_dict_in_generate": True, "output_scores": True}
    actual, expected = engine.generate(ids, **request), reference.generate(ids, **request)
    assert torch.equal(actual.sequences, expected.sequences)
    with reference.disable_adapter():
        expected = reference.generate(ids, **request)
    actual = engine.generate(ids, adapters=False, **request)
    assert torch.equal(actual.sequences, expected.sequences)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(actual.scores, expected.scores, strict=True))


def check_agreement() -> None:
    """Ranks with different lengths agree every `sync_interval` tokens whether all are done. A rank that is done goes on
    gathering."""
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    request = {"attention_mask": mask, "max_new_tokens": 3 + 7 * dist.get_rank()}
    model = tiny_model("llama")
    expected = twin(model).generate(ids, **request)
    counts = {}
    for interval in (1, 4):
        engine = engine_of(tiny_model("llama"), streaming(rollout={"containers": "native", "sync_interval": interval}))
        assert torch.equal(engine.generate(ids, **request), expected)
        everything = sum(p.ds_numel * 4 for p in engine.module.parameters())
        # a rank that is done gathers without computing
        counts[interval] = engine.stats()["gathered_bytes"] / everything
    assert counts == {1: 10, 4: 12}, counts  # the longest row has ten tokens; ranks agree after twelve forwards


def test_ranks_agree_every_sync_interval_tokens_whether_all_are_done(ranks):
    ranks.run(check_agreement)


def test_calls_without_a_fused_path_run_in_the_models_own_layers(ranks):
    ranks.run(check_native)


def check_submodules_in_processors() -> None:
    """Only rank 1's processor calls the embedding and a layer: rank 0 takes part in each such call."""
    model = tiny_model("llama")
    reference, engine = twin(model), engine_of(model, streaming(rollout={"containers": "native"}))
    rank = dist.get_rank()

    def request(model: torch.nn.Module) -> dict:
        embed, layer = model.get_input_embeddings(), model.model.layers[1]

        def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if rank == 0:
                return scores
            hidden = embed(ids)
            positions = torch.arange(ids.shape[1])[None]
            hidden = layer(hidden, position_embeddings=model.model.rotary_emb(hidden, positions))
            return scores + hidden[:, -1].mean(1, keepdim=True) * torch.arange(scores.shape[1])

        return {"max_new_tokens": 4 + rank, "do_sample": False, "logits_processor": [processor]}

    ids = prompts(2 + rank, 6, padded=False, seed=rank)[0]
    expected = reference.generate(ids, **request(reference))
    assert torch.equal(engine.generate(ids, **request(model)), expected)
    engine.eval()
    before = engine.stats()["gathered_bytes"]
    embedded = model.get_input_embeddings()(ids)  # on every rank: nothing else is gathered
    assert torch.equal(embedded, reference.get_input_embeddings()(ids))
    assert engine.stats()["gathered_bytes"] - before == reference.get_input_embeddings().weight.nbytes


def test_a_ranks_processor_may_call_a_module_of_the_model(ranks):
    ranks.run(check_submodules_in_processors)


def check_overlap() -> None:
    """A trace of a forward between ranks that share no memory: layer n + 1 is on its way while layer n is computed."""
    trace: list[tuple[str, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_memory, "host_key", lambda: None)
        engine = engine_of(tiny_model("llama", num_hidden_layers=4), streaming())
        ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
        engine.score(ids, mask)  # the self-check is done
        layers = [next(layer.parameters()) for layer in engine.module.model.layers]
        owns = AsyncAllGather.__init__, AsyncAllGather.wait, CpuDecoder.layers

        def start(fetch, storage, host=None):
            owns[0](fetch, storage, host)
            trace.extend(("start", index) for index, param in enumerate(layers) if param in storage)

        def wait(fetch):
            trace.extend(("wait", index) for index, param in enumerate(layers) if param in fetch.storage)
            owns[1](fetch)

        def run(decoder, hidden, batch, kv, first, last, **more):
            trace.append(("compute", first))
            return owns[2](decoder, hidden, batch, kv, first, last, **more)

        patch.setattr(AsyncAllGather, "__init__", start)
        patch.setattr(AsyncAllGather, "wait", wait)
        patch.setattr(CpuDecoder, "layers", run)
        engine.score(ids, mask)
    at = {event: trace.index(event) for event in trace}
    for index in range(3):
        assert at["start", index + 1] < at["compute", index] < at["wait", index + 1] < at["compute", index + 1], trace


@pytest.mark.skipif(cpu_library() is None, reason="no C++ compiler here")
def test_the_next_layer_is_gathered_while_a_layer_is_computed(ranks):
    ranks.run(check_overlap)
