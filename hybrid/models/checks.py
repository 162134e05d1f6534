"""Checks of a `DecoderLayout` before it is used: every parameter has a role, every shape agrees with the spec."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn

from hybrid.models.modules import adapter_parameters, parameter_at, plain, whole_shape
from hybrid.models.spec import BUFFERS, DecoderLayout, DecoderSpec, ParamRef, UnsupportedModel


def require_covered(model: nn.Module, layout: DecoderLayout) -> None:
    """Raise UnsupportedModel if a parameter of `model` has no role and does not belong to an adapter, or if the tensor
    of a role is no parameter, but a buffer or computed: a snapshot has copies of parameters. Those of
    BUFFERS may be buffers, which are read in place."""
    by_role = [(role, ref) for roles in (layout.outer, *layout.layers) for role, ref in roles.items()]
    refs = [ref for _, ref in by_role]
    for role, ref in by_role:
        module = plain(ref.module)
        tensor = parameter_at(ref)
        if role in BUFFERS and ref.parameter in module._buffers:
            continue
        if tensor is not module._parameters.get(ref.parameter) or (tensor is None and ref.parameter == "weight"):
            name = next(name for name, other in model.named_modules() if other is module)
            raise UnsupportedModel(f"{layout.family}: {name}.{ref.parameter} is not a parameter")
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
    spec, layers = layout.spec, enumerate(layout.layers)
    groups = [("", layout.outer, spec)] + [(f"layer {index} ", roles, spec.of_layer(index)) for index, roles in layers]
    for where, roles, of_layer in groups:
        shapes = {role: picked_shape(ref) for role, ref in roles.items() if parameter_at(ref) is not None}
        inner = shapes.get("down.weight", shapes.get("experts_down.weight", (0,)))[-1]  # the inputs of `down`
        shared = shapes.get("shared_down.weight", (0,))[-1]
        weights = weight_shapes(of_layer, inner, shared)
        for role, shape in shapes.items():
            name, _, kind = role.partition(".")
            expected = weights[name] if kind == "weight" else weights[name][:1]
            if name.startswith("experts_") and kind == "bias":
                expected = (*weights[name][:2], 1)
            if name == "conv" and kind == "bias":
                expected = weights[name][1:]
            if shape != expected:
                raise UnsupportedModel(
                    f"{layout.family}: {where}{role} is {list(shape)}, and by the configuration {list(expected)}"
                )
        require_whole(layout.family, where, [roles[role] for role in shapes])


def picked_shape(ref: ParamRef) -> torch.Size:
    """Return the shape of the tensor at `ref`, after `select`."""
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


def weight_shapes(spec: DecoderSpec, inner: int, shared: int) -> dict[str, tuple[int, ...]]:
    """Return the expected shape of each role's weight.  inner: the MLP's inner size.  shared: that of shared
    experts."""
    hidden, experts = spec.hidden_size, spec.num_experts
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    per_head = spec.qk_norm == "head"
    latent, plain_dim, value_dim = spec.latent_dim, spec.head_dim - spec.rotary_dim, spec.value_dim or spec.head_dim
    expert_size = spec.latent_size or hidden
    norms = (
        "attention_norm attention_post_norm mlp_norm mlp_post_norm embedding_norm final_norm router_scale experts_norm "
        "experts_post_norm shared_post_norm per_layer_post_norm"
    ).split()
    per_layer, all_layers = spec.per_layer_input_size, spec.per_layer_input_size * len(spec.layers)
    return {
        **dict.fromkeys(norms, (hidden,)),
        "embedding": (spec.vocab_size, spec.embedding_size),
        "positions": (spec.max_positions + spec.position_offset, hidden),
        "project_in": (hidden, spec.embedding_size),
        "project_out": (spec.embedding_size, hidden),
        "head": (spec.vocab_size, spec.embedding_size),
        "q": (q * (1 + spec.output_gate), hidden),
        "k": (kv, hidden),
        "v": (spec.num_kv_heads * value_dim, hidden),
        "attention_gate": (spec.num_heads * spec.gate_dim, hidden),
        "o": (hidden, spec.num_heads * value_dim),
        "q_a": (spec.query_rank, hidden),
        "q_a_norm": (spec.query_rank,),
        "q_b": (q, spec.query_rank or hidden),
        "kv_a": (latent + spec.rotary_dim, hidden),
        "kv_a_norm": (latent,),
        "kv_b": (spec.num_heads * (plain_dim + spec.value_dim), latent),
        "q_norm": (spec.head_dim if per_head else q,),
        "k_norm": (spec.head_dim if per_head else kv,),
        **({} if spec.recurrent is None else spec.recurrent.weight_shapes(hidden)),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
        "xielu_positive": (1,),
        "xielu_negative": (1,),
        "sinks": (spec.num_heads,),
        "router": (experts, hidden),
        "correction": (experts,),
        "expert_scale": (experts,),
        "per_layer_input_gate": (per_layer, hidden),
        "per_layer_projection": (hidden, per_layer),
        "layer_scalar": (1,),
        "per_layer_embedding": (spec.vocab_size, all_layers),
        "per_layer_model_projection": (all_layers, hidden),
        "per_layer_projection_norm": (per_layer,),
        "shared_gate": (shared, hidden),
        "shared_up": (shared, hidden),
        "shared_down": (hidden, shared),
        "shared_router": (1, hidden),
        "latent_in": (expert_size, hidden),
        "experts_gate_up": (experts, (1 + spec.gated) * inner, expert_size),
        "experts_down": (experts, expert_size, inner),
        "latent_out": (hidden, expert_size),
    }
