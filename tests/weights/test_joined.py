"""What a decoder reads as one matrix is gathered and merged as one: nothing is copied a second time."""

from unittest import mock

import deepspeed
import peft
import pytest
import torch
import torch.distributed as dist

from hybrid.decoders.torch_decoder import TorchDecoder
from hybrid.models.reader import read_decoder
from hybrid.weights import gather, lora
from hybrid.weights.gather import Fetch, whole_in
from hybrid.weights.joined import as_one, one_above_another
from hybrid.weights.lora import merged_weight, read_adapters
from tests.engines import engine_of, settings, train_step
from tests.tiny_models import prompts, tiny_model, with_chat_lora, with_peft
from tests.weights.test_gather import Odd
from tests.weights.test_lora import shake

TARGETS = {"none": None, "some": ["q_proj", "v_proj", "up_proj"], "all": "all-linear"}


def made(targets: str, family: str = "llama") -> torch.nn.Module:
    model = tiny_model(family, num_key_value_heads=2)
    return model if TARGETS[targets] is None else shake(with_peft(model, target_modules=TARGETS[targets]))


def with_weights_of(engine, fresh: torch.nn.Module) -> torch.nn.Module:
    own, copy = dict(engine.module.named_parameters()), fresh.eval()
    with torch.no_grad(), deepspeed.zero.GatheredParameters(list(own.values())):
        for name, param in copy.named_parameters():
            param.copy_(own[name])
    return copy


def whole_bytes(engine, *names: str) -> int:
    """Of layers' parameters whose names end so."""
    params = dict(engine.module.named_parameters()).items()
    return sum(param.ds_numel * 4 for name, param in params if name.endswith(names))


def check_torch_decoder(targets: str, size: int, family: str) -> None:
    """Tokens are Hugging Face's, with and without adapters, and the snapshot is all that is held of the weights."""
    block = {"tp_gather_partition_size": 1, "inference_tp_size": size}
    with mock.patch("hybrid.decoders.fused_model.cpu_library", lambda: None):
        engine = engine_of(made(targets, family), settings(hybrid_engine=block, rollout={"containers": "fused"}))
        ids, mask = prompts(3, 9, padded=True, seed=dist.get_rank())
        request = {"attention_mask": mask, "max_new_tokens": 6}
        base = tiny_model(family, num_key_value_heads=2).eval()
        for step in range(2):
            expected = with_weights_of(engine, made(targets, family)).generate(ids, **request)
            assert torch.equal(engine.generate(ids, **request), expected)
            held = engine.stats()["snapshot_bytes"]
            if targets != "none":
                assert torch.equal(engine.generate(ids, adapters=False, **request), base.generate(ids, **request))
                assert torch.equal(engine.generate(ids, **request), expected)
            stats = engine.stats()
            assert stats["snapshot_bytes"] == held, "base and merged weights are not held once each"
            assert stats["container_bytes"] == 0, "a decoder copied what it reads"
            plan = engine.memory_plan(3, 9, 6)
            assert (plan.needs[plan.in_use].snapshot, plan.needs[plan.in_use].containers) == (held, 0)
            train_step(engine, step)
        assert {row["container"] for row in engine.coverage()} == {"fused"}
        if size == 1:
            carried = sum(param.ds_numel * 4 for n, param in engine.module.named_parameters() if "lora_" not in n)
            adapted = [one.sources["weight"] for one in read_adapters(engine.module)]
            merged = sum(param.ds_numel * 4 for param in adapted)
            # k among q and v, gate among up.
            fills = whole_bytes(engine, "k_proj.weight", "gate_proj.weight") if targets == "some" else 0
            fills += whole_bytes(engine, "k_proj.bias") * 0
            assert held == carried + merged + fills
        engine.destroy()


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("size", [1, 2])
def test_joined_matrices_are_read_where_they_were_gathered(ranks, targets, size):
    ranks.run(check_torch_decoder, targets, size, "llama")


def test_joined_biases_are_too(ranks):
    ranks.run(check_torch_decoder, "some", 1, "qwen2")


def check_change() -> None:
    """Which of a joined matrix' parts are merged changes from call to call, and back."""
    with mock.patch("hybrid.decoders.fused_model.cpu_library", lambda: None):
        model = made("some")
        more = peft.LoraConfig(r=2, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
        model.add_adapter("second", more)
        reference = with_peft(tiny_model("llama", num_key_value_heads=2), target_modules=TARGETS["some"])
        reference.add_adapter("second", more)
        reference.load_state_dict(model.state_dict())
        engine = engine_of(model, settings(rollout={"containers": "fused"}))
        ids, mask = prompts(3, 9, padded=True, seed=dist.get_rank())
        request = {"attention_mask": mask, "max_new_tokens": 6}
        for active in (["default"], ["second"], ["default", "second"], ["default"], ["second"]):
            for one in (model, reference.eval()):
                one.base_model.set_adapter(active)
            assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request)), active
            assert engine.stats()["container_bytes"] == 0


def test_adapters_of_other_parts_take_turns(ranks):
    ranks.run(check_change)


def check_staging() -> None:
    """An all-gather writes padding behind the last part; it must not reach what lies behind in a joined buffer."""
    engine = engine_of(Odd(), settings(3))
    params = [param for param in engine.module.parameters() if len(param.ds_shape) == 2 or param.ds_numel == 5]
    memory = torch.full((sum(param.ds_numel for param in params) + 1,), 7.0)
    storage = dict(zip(params, memory[:-1].split([param.ds_numel for param in params]), strict=True))
    with mock.patch.object(gather.dist, "get_backend", lambda group: "nccl"):
        assert gather.staging_bytes(params[0]) == 22 * 4
        fetch = Fetch(storage)
        assert fetch.staging_nbytes == (22 + 6) * 4
        fetch.wait()
    assert fetch.staging_nbytes == 0
    assert memory[-1] == 7
    with deepspeed.zero.GatheredParameters(params):
        assert all(torch.equal(whole_in(storage[param], param), param) for param in params)
    engine.destroy()


def test_padding_does_not_reach_what_lies_behind(ranks):
    ranks.run(check_staging)


def test_as_one():
    parts = one_above_another([torch.empty(3, 4, device="meta"), torch.empty(2, 4, device="meta")], torch.device("cpu"))
    joined = as_one(parts)
    assert joined.shape == (5, 4)
    assert joined.data_ptr() == parts[0].data_ptr()
    assert as_one(parts[::-1]) is None
    assert as_one([parts[0], torch.empty(2, 4)]) is None
    assert as_one([parts[0][:2], parts[1]]) is None
    turned = torch.randn(4, 6)  # a Conv1D's
    assert torch.equal(as_one([turned.T[:2], turned.T[2:]]), turned.T)
    assert as_one([turned[:2].T, turned[2:].T]) is None


def own_weights(ref):
    return getattr(ref.module, ref.parameter)


def test_decoders_share_what_they_copy():
    """GPT-NeoX' interleaved queries, keys and values have to be copied: once for decoders of the same weights."""
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
    held = first.nbytes()
    second.bind()
    assert second.nbytes() == held > 0
    assert second.blocks[0]["qkv.weight"] is first.blocks[0]["qkv.weight"]
    third.bind()
    assert third.nbytes() == held + moved.nbytes, "one matrix differs"
    del second, third
    assert first.nbytes() == held
    kept = first.blocks[0]["qkv.weight"].data_ptr()
    model.load_state_dict(other.state_dict())
    first.bind()
    assert first.blocks[0]["qkv.weight"].data_ptr() == kept
    fresh = TorchDecoder(read_decoder(other), own_weights, torch.float32)
    fresh.bind()
    assert torch.equal(first.blocks[0]["qkv.weight"], fresh.blocks[0]["qkv.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_merging_in_blocks_of_rows_gives_the_same_bits(dtype, monkeypatch):
    torch.manual_seed(0)
    weight, a, b = torch.randn(300, 200).to(dtype), torch.randn(8, 200).to(dtype), torch.randn(300, 8).to(dtype)
    whole = merged_weight(weight, a, b, 0.5).to(dtype)
    exact = (weight.double() + 0.5 * (b.double() @ a.double())).to(dtype)
    monkeypatch.setattr(lora, "MERGE_ELEMENTS", 200 * 48)
    into = torch.full((300, 200), torch.nan, dtype=dtype)
    lora.merge_low_rank(weight, [lora.LowRank(a, b, 0.5)], into)
    assert torch.equal(into, whole)
    torch.testing.assert_close(into, exact, atol=0 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2)


class Peak(torch.utils._python_dispatch.TorchDispatchMode):
    """Bytes of the largest storage that is made in the block; views of `given` are not."""

    def __init__(self, given):
        super().__init__()
        self.largest, self.given = 0, {tensor.untyped_storage()._cdata for tensor in given}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.untyped_storage()._cdata not in self.given:
            self.largest = max(self.largest, out.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("kind", ["linear", "transposed", "dora", "embedding", "experts", "chat"])
def test_merging_takes_a_block_of_float32(kind, monkeypatch):
    """Whatever the adapter, no temporary is larger than a block, and blocks change nothing."""
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
    for one in read_adapters(shake(model)):
        base = {name: param.detach() for name, param in one.sources.items()}
        with torch.no_grad():
            whole = one.merged(base)
            with monkeypatch.context() as patch:
                patch.setattr(lora, "MERGE_ELEMENTS", 256)
                into = {name: torch.empty_like(tensor) for name, tensor in whole.items()}
                with Peak([*base.values(), *into.values(), *model.parameters()]) as peak:
                    one.merge(base, into)
                row = max(max(tensor.shape[-2:]) for tensor in whole.values())
                assert 0 < peak.largest <= max(256, row) * 4 < max(tensor.nbytes for tensor in whole.values())
        for name, tensor in whole.items():
            torch.testing.assert_close(into[name], tensor, atol=2e-6, rtol=1e-6)
