"""Checks of a `DecoderLayout` before it is used: every parameter has a role, every shape agrees with the spec."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn

from hybrid.models.modules import adapter_parameters, parameter_at, whole_shape
from hybrid.models.spec import DecoderLayout, DecoderSpec, ParamRef, UnsupportedModel


def require_covered(model: nn.Module, layout: DecoderLayout) -> None:
    """Raise UnsupportedModel if a parameter of `model` has no role and does not belong to an adapter."""
    refs = [ref for roles in (layout.outer, *layout.layers) for ref in roles.values()]
    covered = adapter_parameters(model).union(map(parameter_at, refs))
    names = [name for name, param in model.named_parameters() if param not in covered]
    if names:
        raise UnsupportedModel(f"{layout.family}: {', '.join(names[:3])} ({len(names)} in all) has no role in it")


def require_sizes(layout: DecoderLayout) -> None:
    """Raise UnsupportedModel if a tensor's shape differs from the spec, a packed parameter has rows without a role, or
    the rotary tables are wider than a head."""
    if layout.spec.rotary_dim > layout.spec.head_dim:
        raise UnsupportedModel(
            f"{layout.family}: rotary_dim {layout.spec.rotary_dim} is larger than head_dim {layout.spec.head_dim}"
        )
    groups = [("", layout.outer)] + [(f"layer {index} ", roles) for index, roles in enumerate(layout.layers)]
    for where, roles in groups:
        shapes = {role: picked_shape(ref) for role, ref in roles.items() if parameter_at(ref) is not None}
        inner = shapes.get("down.weight", shapes.get("experts_down.weight", (0,)))[-1]  # the inputs of `down`
        weights = weight_shapes(layout.spec, inner)
        for role, shape in shapes.items():
            name, _, kind = role.partition(".")
            expected = weights[name] if kind == "weight" else weights[name][:1]
            if shape != expected:
                raise UnsupportedModel(
                    f"{layout.family}: {where}{role} is {list(shape)}, and by the configuration {list(expected)}"
                )
        require_whole(layout.family, where, [roles[role] for role in shapes])


def picked_shape(ref: ParamRef) -> torch.Size:
    """The shape of the tensor at `ref`, after `select`."""
    whole = torch.empty(whole_shape(parameter_at(ref)), device="meta")
    try:
        return whole.shape if ref.select is None else ref.select(whole).shape
    except (RuntimeError, IndexError):  # the rows cannot be divided by the spec's sizes
        return whole.shape


def require_whole(family: str, where: str, refs: Iterable[ParamRef]) -> None:
    """Raise UnsupportedModel if the roles of a packed parameter do not cover all of it."""
    picked: Counter[nn.Parameter] = Counter()
    sizes: dict[nn.Parameter, int] = {}
    for ref in refs:
        picked[parameter_at(ref)] += picked_shape(ref).numel()
        sizes[parameter_at(ref)] = whole_shape(parameter_at(ref)).numel()
    for param, size in sizes.items():
        if picked[param] % size:
            raise UnsupportedModel(
                f"{family}: {where}has a packed parameter of {size} elements; its roles take {picked[param]}"
            )


def weight_shapes(spec: DecoderSpec, inner: int) -> dict[str, tuple[int, ...]]:
    """The expected shape of each role's weight.  inner: the MLP's inner size."""
    hidden, experts = spec.hidden_size, spec.num_experts
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    per_head = spec.qk_norm == "head"
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
        "q_norm": (spec.head_dim if per_head else q,),
        "k_norm": (spec.head_dim if per_head else kv,),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
        "router": (experts, hidden),
        "experts_gate_up": (experts, 2 * inner, hidden),
        "experts_down": (experts, hidden, inner),
    }
