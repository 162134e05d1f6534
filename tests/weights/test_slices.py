"""Slices of every family's weights cover each parameter once; sizes that do not divide the heads raise."""

import pytest
import torch
from torch.nn import functional as F

from hybrid.models.reader import read_decoder
from hybrid.models.spec import DecoderLayout, ParamRef
from hybrid.weights.slices import Shard, chunk, require_divisible, shard_spec, slices_of
from tests.tiny_models import ALL_FAMILIES, tiny_model


def slices_by_rank(layout: DecoderLayout, ref: ParamRef, size: int) -> list[torch.Tensor | None]:
    """The ranks' slices of a parameter."""
    parameter = getattr(ref.module, ref.parameter)
    return [slices_of(layout, Shard(size, index))[ref].of(parameter) for index in range(size)]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_slices_cover_every_parameter_once(family, size):
    """Rows, columns and heads of every role, once each; other parameters are replicated."""
    layout = read_decoder(tiny_model(family))
    spec = layout.spec
    for layer in (layout.outer, *layout.layers):
        for role, ref in layer.items():
            parameter = getattr(ref.module, ref.parameter)
            if parameter is None:
                continue
            selected = parameter if ref.select is None else ref.select(parameter)
            slices = slices_by_rank(layout, ref, size)
            name, _, kind = role.partition(".")
            name = name.removeprefix("shared_")
            if name in ("q", "attention_gate", "q_b", "kv_b", "sinks", "gate", "up", "embedding", "head"):
                assert torch.equal(torch.cat(slices)[: len(selected)], selected), role
                assert not torch.cat(slices)[len(selected) :].any(), role
            elif name in ("k", "v"):
                copies = max(size // spec.num_kv_heads, 1)
                assert torch.equal(torch.cat(slices[::copies]), selected), role
            elif name in ("o", "down") and kind == "weight":
                assert torch.equal(torch.cat(slices, dim=1)[:, : selected.shape[1]], selected), role
            elif name in ("o", "down", "experts_down") and kind == "bias":
                assert torch.equal(slices[0], selected), role
                assert slices[1:] == [None] * (size - 1), role
            elif name == "experts_down":
                assert torch.equal(torch.cat(slices, dim=2), selected), role
            elif name == "experts_gate_up":
                halves = [
                    torch.cat(half, dim=1) for half in zip(*(part.chunk(2, dim=1) for part in slices), strict=True)
                ]
                assert torch.equal(torch.cat(halves, dim=1), selected), role
            elif not (name in ("q_norm", "k_norm") and spec.qk_norm == "row"):
                assert all(torch.equal(part, selected) for part in slices), role


def test_units_that_do_not_divide_are_padded_with_zeros():
    tensor = torch.arange(1.0, 11).view(5, 2)
    assert [chunk(tensor, 0, Shard(3, index)).tolist() for index in range(3)] == [
        [[1, 2], [3, 4]],
        [[5, 6], [7, 8]],
        [[9, 10], [0, 0]],
    ]
    assert chunk(tensor, 0, Shard(4, 3)).tolist() == [[0, 0], [0, 0]]
    # A unit of zeros adds nothing, whatever the activation.
    zero = torch.zeros(1)
    assert all(act(zero) == 0 for act in (F.silu, F.gelu, F.relu))


def test_heads_by_rank():
    spec = read_decoder(tiny_model("bloom")).spec
    assert [shard_spec(spec, Shard(2, index)).alibi for index in range(2)] == [spec.alibi[:2], spec.alibi[2:]]
    spec = read_decoder(tiny_model("llama")).spec  # 4 heads, 2 key heads
    assert [(shard_spec(spec, Shard(n, 0)).num_heads, shard_spec(spec, Shard(n, 0)).num_kv_heads) for n in (2, 4)] == [
        (2, 1),
        (1, 1),
    ]


@pytest.mark.parametrize("size", [3, 8])
def test_heads_that_tp_size_does_not_divide_raise(size):
    spec = read_decoder(tiny_model("llama")).spec
    with pytest.raises(ValueError, match=rf"inference_tp_size: {size} given; .*4 attention heads.*by 1, 2, 4"):
        require_divisible(size, spec.num_heads, spec.num_kv_heads)
