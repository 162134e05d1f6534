"""Checks of a `DecoderLayout` before it is used: every parameter has a role, every shape agrees with the spec."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from hybrid.models.modules import adapter_parameters, parameter_at, whole_shape
from hybrid.models.spec import DecoderLayout, DecoderSpec, ParamRef, UnsupportedModel


def require_covered(model: nn.Module, layout: DecoderLayout) -> None:
    """Raise UnsupportedModel if a parameter of `model` has no role and does not belong to an adapter."""
    every = [ref for roles in (layout.outer, *layout.layers) for ref in roles.values()]
    covered = {param for param in map(parameter_at, every) if param is not None} | adapter_parameters(model)
    left = [name for name, param in model.named_parameters() if param not in covered]
    if left:
        raise UnsupportedModel(f"{layout.family}: {', '.join(left[:3])} ({len(left)} in all) has no role in it")


def require_sizes(layout: DecoderLayout) -> None:
    """Raise UnsupportedModel if a tensor's shape differs from the spec, a fused parameter has rows without a role, or
    the rotary tables are wider than a head."""
    if layout.spec.rotary_dim > layout.spec.head_dim:
        raise UnsupportedModel(
            f"{layout.family}: tables turn {layout.spec.rotary_dim} elements of heads of {layout.spec.head_dim}"
        )
    groups = [("", layout.outer)] + [(f"layer {index} ", roles) for index, roles in enumerate(layout.layers)]
    for where, roles in groups:
        picked = {role: picked_shape(ref) for role, ref in roles.items() if parameter_at(ref) is not None}
        expected = shapes(layout.spec, inner_size(picked))
        for role, shape in picked.items():
            want = expected[role.removesuffix(".weight")] if role.endswith(".weight") else expected[role[:-5]][:1]
            if shape != want:
                raise UnsupportedModel(
                    f"{layout.family}: {where}{role} is {list(shape)}, and by the configuration {list(want)}"
                )
        require_whole(layout.family, where, [ref for role, ref in roles.items() if role in picked])


def picked_shape(ref: ParamRef) -> torch.Size:
    """The shape of the tensor at `ref`, after `select`."""
    whole = torch.empty(whole_shape(ref), device="meta")
    try:
        return whole.shape if ref.select is None else ref.select(whole).shape
    except (RuntimeError, IndexError):  # the rows cannot be divided by the spec's sizes
        return whole.shape


def require_whole(family: str, where: str, together: Iterable[ParamRef]) -> None:
    """Raise UnsupportedModel if the roles of a fused parameter do not cover all of it."""
    taken: dict[nn.Parameter, int] = {}
    wholes: dict[nn.Parameter, int] = {}
    for ref in together:
        param = parameter_at(ref)
        taken[param] = taken.get(param, 0) + picked_shape(ref).numel()
        wholes[param] = whole_shape(ref).numel()
    for param, whole in wholes.items():
        if taken[param] % whole:
            raise UnsupportedModel(
                f"{family}: {where}has a fused parameter of {whole} elements; its roles take {taken[param]}"
            )


def inner_size(picked: Mapping[str, torch.Size]) -> int:
    """The MLP's inner size, taken from the inputs of its down projection; 0 without one."""
    back = picked.get("down.weight", picked.get("experts_down.weight", (0,)))
    return back[-1]


def shapes(spec: DecoderSpec, inner: int) -> dict[str, tuple[int, ...]]:
    """The expected shape of each role's weight.  inner: the MLP's inner size."""
    hidden, experts = spec.hidden_size, spec.num_experts
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    one_head = spec.qk_norm == "head"
    norms = "attention_norm attention_post_norm mlp_norm mlp_post_norm embedding_norm final_norm".split()
    return {
        **dict.fromkeys(norms, (hidden,)),
        "embedding": (spec.vocab_size, spec.embedding_size),
        "positions": (spec.max_positions + spec.position_offset, hidden),
        "project_in": (hidden, spec.embedding_size),
        "project_out": (spec.embedding_size, hidden),
        "head": (spec.vocab_size, spec.embedding_size),
        "q": (q, hidden),
        "k": (kv, hidden),
        "v": (kv, hidden),
        "o": (hidden, q),
        "q_norm": (spec.head_dim if one_head else q,),
        "k_norm": (spec.head_dim if one_head else kv,),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
        "router": (experts, hidden),
        "experts_gate_up": (experts, 2 * inner, hidden),
        "experts_down": (experts, hidden, inner),
    }
