"""Joined matrices (q, k, v; gate, up) are gathered and merged into one buffer, without a second copy."""

import contextlib
from unittest import mock

import deepspeed
import peft
import pytest
import torch
import torch.distributed as dist

from hybrid.decoders.decoder_weights import DecoderWeights, MetaWeights
from hybrid.decoders.torch_decoder import TorchDecoder
from hybrid.decoders.tp_decoder import ShardedDecoder
from hybrid.models.model_info import ModelInfo
from hybrid.models.reader import read_decoder
from hybrid.runtime.parallel import InferenceGroup
from hybrid.weights import gather, lora
from hybrid.weights.gather import AsyncAllGather, whole_in
from hybrid.weights.joined import empty_rows, joined_refs, joined_view
from hybrid.weights.lora import merged_weight, read_adapters
from hybrid.weights.model_weights import read_weights
from hybrid.weights.slices import Shard, slices_of
from hybrid.weights.snapshot import Snapshot
from tests.engines import engine_of, settings, train_step
from tests.marks import slow_but
from tests.tiny_models import prompts, tiny_model, with_chat_lora, with_peft
from tests.weights.test_gather import Odd
from tests.weights.test_lora import shake

TARGETS = {"none": None, "some": ["q_proj", "v_proj", "up_proj"], "all": "all-linear"}


def adapted_model(targets: str, family: str = "llama") -> torch.nn.Module:
    model = tiny_model(family, num_key_value_heads=2)
    return model if TARGETS[targets] is None else shake(with_peft(model, target_modules=TARGETS[targets]))


def with_weights_of(engine, fresh: torch.nn.Module) -> torch.nn.Module:
    own, copy = dict(engine.module.named_parameters()), fresh.eval()
    with torch.no_grad(), deepspeed.zero.GatheredParameters(list(own.values())):
        for name, param in copy.named_parameters():
            param.copy_(own[name])
    return copy


def parameter_bytes(engine, *names: str) -> int:
    """Bytes of parameters whose names end in one of `names`."""
    params = dict(engine.module.named_parameters()).items()
    return sum(param.ds_numel * 4 for name, param in params if name.endswith(names))


def check_torch_decoder(targets: str, size: int, family: str, keeps_base: bool) -> None:
    """Tokens equal Hugging Face's with and without adapters, and the snapshot is the only copy of the weights.

    keeps_base: within a memory limit that has room for the base and the merged weights.
    """
    block = {"tp_gather_partition_size": 1, "inference_tp_size": size}
    rollout = {"containers": "fused"} | ({"memory_limit": 2**40} if keeps_base else {})
    with mock.patch("hybrid.decoders.selection.cpu_library", lambda: None):
        engine = engine_of(adapted_model(targets, family), settings(hybrid_engine=block, rollout=rollout))
        ids, mask = prompts(3, 9, padded=True, seed=dist.get_rank())
        request = {"attention_mask": mask, "max_new_tokens": 6}
        base = tiny_model(family, num_key_value_heads=2).eval()
        for step in range(2):
            expected = with_weights_of(engine, adapted_model(targets, family)).generate(ids, **request)
            assert torch.equal(engine.generate(ids, **request), expected)
            snapshot_bytes = engine.stats()["snapshot_bytes"]
            if targets != "none":
                assert torch.equal(engine.generate(ids, adapters=False, **request), base.generate(ids, **request))
                assert torch.equal(engine.generate(ids, **request), expected)
            stats = engine.stats()
            assert stats["snapshot_bytes"] == snapshot_bytes, "base or merged weights are held twice"
            assert stats["container_bytes"] == 0, "a decoder copied weights"
            plan = engine.memory_plan(3, 9, 6)
            assert (plan.needs[plan.in_use].snapshot, plan.needs[plan.in_use].containers) == (snapshot_bytes, 0)
            train_step(engine, step)
        assert {row["container"] for row in engine.coverage()} == {"fused"}
        if size == 1:
            base_bytes = sum(param.ds_numel * 4 for n, param in engine.module.named_parameters() if "lora_" not in n)
            adapted = [adapter.sources["weight"] for adapter in read_adapters(engine.module)]
            merged_bytes = sum(param.ds_numel * 4 for param in adapted)
            # k is joined with the merged q and v, gate with the merged up.
            copied_bytes = parameter_bytes(engine, "k_proj.weight", "gate_proj.weight") if targets == "some" else 0
            copied_bytes += parameter_bytes(engine, "k_proj.bias") * 0
            assert snapshot_bytes == base_bytes + (merged_bytes + copied_bytes) * keeps_base
        engine.destroy()


@pytest.mark.parametrize(
    ("size", "targets", "keeps_base"),
    slow_but(
        [(2, "all", False)],
        [
            *((size, targets, False) for size in (1, 2) for targets in TARGETS),
            *((1, targets, True) for targets in TARGETS),
        ],
    ),
)
def test_joined_matrices_are_read_in_the_gathered_buffers(ranks, targets, size, keeps_base):
    ranks.run(check_torch_decoder, targets, size, "llama", keeps_base)


@pytest.mark.parametrize("keeps_base", [False, True])
def test_joined_biases_are_read_in_the_gathered_buffers(ranks, keeps_base):
    ranks.run(check_torch_decoder, "some", 1, "qwen2", keeps_base)


def check_change(keeps_base: bool) -> None:
    """The merged parts of a joined matrix change between calls."""
    rollout = {"containers": "fused"} | ({"memory_limit": 2**40} if keeps_base else {})
    with mock.patch("hybrid.decoders.selection.cpu_library", lambda: None):
        model = adapted_model("some")
        more = peft.LoraConfig(r=2, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
        model.add_adapter("second", more)
        reference = with_peft(tiny_model("llama", num_key_value_heads=2), target_modules=TARGETS["some"])
        reference.add_adapter("second", more)
        reference.load_state_dict(model.state_dict())
        engine = engine_of(model, settings(rollout=rollout))
        ids, mask = prompts(3, 9, padded=True, seed=dist.get_rank())
        request = {"attention_mask": mask, "max_new_tokens": 6}
        for active in (["default"], ["second"], ["default", "second"], ["default"], ["second"]):
            for module in (model, reference.eval()):
                module.base_model.set_adapter(active)
            assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request)), active
            assert engine.stats()["container_bytes"] == 0


@pytest.mark.parametrize("keeps_base", [False, True])
def test_switching_adapters_on_parts_of_a_joined_matrix(ranks, keeps_base):
    ranks.run(check_change, keeps_base)


def check_staging() -> None:
    """An all-gather writes padding after the last partition, which must not overwrite the next part of a joined
    buffer."""
    engine = engine_of(Odd(), settings(3))
    params = [param for param in engine.module.parameters() if len(param.ds_shape) == 2 or param.ds_numel == 5]
    memory = torch.full((sum(param.ds_numel for param in params) + 1,), 7.0)
    storage = dict(zip(params, memory[:-1].split([param.ds_numel for param in params]), strict=True))
    with mock.patch.object(gather.dist, "get_backend", lambda group: "nccl"):
        assert gather.staging_bytes(params[0]) == 22 * 4
        fetch = AsyncAllGather(storage)
        assert fetch.staging_nbytes == (22 + 6) * 4
        fetch.wait()
    assert fetch.staging_nbytes == 0
    assert memory[-1] == 7
    with deepspeed.zero.GatheredParameters(params):
        assert all(torch.equal(whole_in(storage[param], param), param) for param in params)
    engine.destroy()


def test_all_gather_padding_does_not_overwrite_joined_buffers(ranks):
    ranks.run(check_staging)


@pytest.mark.parametrize("family", ["kimi_linear", "qwen3_5_text"])
def test_the_plan_of_slices_beside_whole_matrices_is_what_is_held(family):
    """At ZeRO 0 a matrix without a slice is read in place. It is not part of a joined buffer; the decoder copies it
    together with the slices that it reads in the same product."""
    info, shard = ModelInfo(tiny_model(family)), Shard(2, 0)
    layout, weights = info.layout, read_weights(info, layers_per_group=2)
    snapshot = Snapshot(weights, slices_of(layout, shard), decoder_only=True, joined=joined_refs(layout))
    group = InferenceGroup(2, connected=False)
    planned = ShardedDecoder(layout, MetaWeights(layout, snapshot), group)
    planned.bind()
    snapshot.refresh(lambda name: contextlib.nullcontext(), adapters=True)
    kept = [part for parts in snapshot.parts.values() for part in parts.values() if part is not None]
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in kept}
    assert snapshot.planned()[0] == snapshot.nbytes() == sum(storages.values())
    decoder = ShardedDecoder(layout, DecoderWeights(layout, snapshot, adapters=True), group)
    decoder.bind()
    assert decoder.nbytes() == planned.nbytes()


def test_as_one_joins_adjacent_views():
    parts = empty_rows([torch.empty(3, 4, device="meta"), torch.empty(2, 4, device="meta")], torch.device("cpu"))
    joined = joined_view(parts)
    assert joined.shape == (5, 4)
    assert joined.data_ptr() == parts[0].data_ptr()
    assert joined_view(parts[::-1]) is None
    assert joined_view([parts[0], torch.empty(2, 4)]) is None
    assert joined_view([parts[0][:2], parts[1]]) is None
    transposed = torch.randn(4, 6)  # as in a Conv1D
    assert torch.equal(joined_view([transposed.T[:2], transposed.T[2:]]), transposed.T)
    assert joined_view([transposed[:2].T, transposed[2:].T]) is None


def own_weights(ref):
    return getattr(ref.module, ref.parameter)


def test_decoders_of_the_same_weights_share_copies():
    """GPT-NeoX's interleaved queries, keys and values are copied, once for all decoders of the same weights."""
    model = tiny_model("gpt_neox").eval()
    other = tiny_model("gpt_neox", seed=4).eval()
    first = TorchDecoder(read_decoder(model), own_weights, torch.float32)
    second = TorchDecoder(first.layout, own_weights, torch.float32, copies=first.copies)
    fused = first.layout.layers[0]["q.weight"]
    moved = own_weights(fused).detach().clone()
    third = TorchDecoder(
        first.layout,
        lambda ref: moved if (ref.module, ref.parameter) == (fused.module, "weight") else own_weights(ref),
        torch.float32,
        copies=first.copies,
    )
    first.bind()
    copied_bytes = first.nbytes()
    second.bind()
    assert second.nbytes() == copied_bytes > 0
    assert second.blocks[0]["qkv.weight"] is first.blocks[0]["qkv.weight"]
    third.bind()
    assert third.nbytes() == copied_bytes + moved.nbytes, "one matrix differs"
    del second, third
    assert first.nbytes() == copied_bytes
    kept = first.blocks[0]["qkv.weight"].data_ptr()
    model.load_state_dict(other.state_dict())
    first.bind()
    assert first.blocks[0]["qkv.weight"].data_ptr() == kept
    fresh = TorchDecoder(read_decoder(other), own_weights, torch.float32)
    fresh.bind()
    assert torch.equal(first.blocks[0]["qkv.weight"], fresh.blocks[0]["qkv.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_merging_in_row_blocks_is_bit_identical(dtype, monkeypatch):
    torch.manual_seed(0)
    weight, a, b = torch.randn(300, 200).to(dtype), torch.randn(8, 200).to(dtype), torch.randn(300, 8).to(dtype)
    expected = merged_weight(weight, a, b, 0.5).to(dtype)
    exact = (weight.double() + 0.5 * (b.double() @ a.double())).to(dtype)
    monkeypatch.setattr(lora, "MERGE_ELEMENTS", 200 * 48)
    into = torch.full((300, 200), torch.nan, dtype=dtype)
    lora.merge_low_rank(weight, [lora.LowRank(a, b, 0.5)], into)
    assert torch.equal(into, expected)
    torch.testing.assert_close(into, exact, atol=0 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2)


class PeakStorage(torch.utils._python_dispatch.TorchDispatchMode):
    """Bytes of the largest storage allocated inside the block, without those of `excluded`."""

    def __init__(self, excluded):
        super().__init__()
        self.largest, self.excluded = 0, {tensor.untyped_storage()._cdata for tensor in excluded}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.untyped_storage()._cdata not in self.excluded:
            self.largest = max(self.largest, out.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("kind", ["linear", "transposed", "dora", "embedding", "experts", "chat"])
def test_merging_allocates_at_most_one_float32_block(kind, monkeypatch):
    """For every adapter, no temporary is larger than a block, and the results are equal."""
    family = {"transposed": "gpt2", "experts": "mixtral"}.get(kind, "llama")
    model = tiny_model(family)
    if kind == "chat":
        model = with_chat_lora(model)
    elif kind == "experts":
        names = [name for name, _ in model.named_parameters() if name.endswith(("gate_up_proj", "down_proj"))]
        names = sorted({".".join(name.split(".")[-2:]) for name in names})
        model = with_peft(model, target_modules=["q_proj"], target_parameters=names)
    else:
        targets = {"target_modules": ["embed_tokens", "q_proj"]} if kind == "embedding" else {}
        model = with_peft(model, use_dora=kind == "dora", fan_in_fan_out=kind == "transposed", **targets)
    for adapter in read_adapters(shake(model)):
        base = {name: param.detach() for name, param in adapter.sources.items()}
        with torch.no_grad():
            expected = adapter.merged(base)
            with monkeypatch.context() as patch:
                patch.setattr(lora, "MERGE_ELEMENTS", 256)
                into = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
                with PeakStorage([*base.values(), *into.values(), *model.parameters()]) as peak:
                    adapter.merge(base, into)
                row = max(max(tensor.shape[-2:]) for tensor in expected.values())
                assert 0 < peak.largest <= max(256, row) * 4 < max(tensor.nbytes for tensor in expected.values())
        for name, tensor in expected.items():
            torch.testing.assert_close(into[name], tensor, atol=2e-6, rtol=1e-6)
