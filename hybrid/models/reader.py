"""Reading a model: finds the family whose row fits, and makes the `DecoderLayout` from it."""

import inspect
from collections.abc import Mapping

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from hybrid.models.checks import require_covered, require_sizes
from hybrid.models.families import FAMILIES
from hybrid.models.family import ACTIVATIONS, CHOICES, Family, Fused, Pick, Table, declares, rope_end, rope_table
from hybrid.models.modules import adapter_parameters, find, has, hugging_face_model, own_parameters, plain
from hybrid.models.spec import DecoderLayout, DecoderSpec, LayerSpec, ParamRef, UnsupportedModel


def read_decoder(model: nn.Module) -> DecoderLayout:
    """The layout of `model`, by the first family that fits. The model may be wrapped by PEFT, and partitioned.

    Raises UnsupportedModel, with the reason, if no family fits, a parameter has no role, the family does not support a
    setting, or a size differs from the configuration.
    """
    base = hugging_face_model(model)
    if not isinstance(getattr(base, "config", None), PretrainedConfig):
        raise UnsupportedModel(f"{type(base).__name__} has no Hugging Face configuration")
    found = [(family, misfits(family, base)) for family in FAMILIES]
    for family, reasons in found:
        if not reasons:
            layout = read_as(family, base)
            require_covered(model, layout)
            return layout
    # Among equally near families the most general one, which comes last in FAMILIES.
    nearest, reasons = min(reversed(found), key=lambda one: (find(base, one[0].layers) is None, len(one[1])))
    raise UnsupportedModel(
        f"{type(base).__name__} is of no family that is known; nearest is {nearest.name}: " + "; ".join(reasons[:3])
    )


# Which family fits


def misfits(family: Family, model: nn.Module) -> list[str]:
    """The reasons why `model` does not fit `family`; empty if it does."""
    config = model.config
    paths = [path for role, path in family.outer.items() if role not in family.optional]
    paths += [family.rotary] if family.rotary else []
    missing = [f"no {path}" for path in paths if not has(model, path)]
    stack = find(model, family.layers)
    if not isinstance(stack, nn.ModuleList) or len(stack) == 0:
        missing.append(f"no layers in {family.layers}")
    else:
        missing += layer_misfits(family, stack)
    undeclared = [f"no setting {name}" for name in family.declares if not declares(config, name)]
    beyond = [
        f"{name}={getattr(config, name)!r} is a setting that it does not know"
        for name in CHOICES
        if name not in family.understands and getattr(config, name, None) not in (None, False)
    ]
    return missing + undeclared + beyond + own_ways(family, model)


def own_ways(family: Family, model: nn.Module) -> list[str]:
    """A reason if the embedding computes more than a lookup (Gemma's scales) and the family does not support that."""
    path = family.outer["embedding"]
    embedding = plain(find(model, path)) if has(model, path) else None
    if embedding is None or family.own_embedding or type(embedding).forward is nn.Embedding.forward:
        return []
    return [f"{path} is a {type(embedding).__name__}, with a forward of its own"]


def layer_misfits(family: Family, stack: nn.ModuleList) -> list[str]:
    """The reasons why the first layer that does not fit differs from its nearest map of `family`; empty if all fit."""
    for index, layer in enumerate(stack):
        found = [map_misfits(roles, layer, f"{family.layers}.{index}") for roles in family.layer]
        if all(found):
            return min(found, key=len)
    return []


def map_misfits(roles: Mapping[str, str | Fused], layer: nn.Module, name: str) -> list[str]:
    """The modules of `roles` that a layer lacks, and its parameters without a role, as reasons.  name: the layer's."""
    paths = [value.path if isinstance(value, Fused) else value for value in roles.values()]
    missing = [f"no {name}.{path}" for path in paths if not has(layer, path)]
    known = {param for path in paths if has(layer, path) for param in own_parameters(layer, path)}
    known |= adapter_parameters(layer)
    return missing + [f"{name}.{key} has no role" for key, param in layer.named_parameters() if param not in known]


# The layout


def read_as(family: Family, model: nn.Module) -> DecoderLayout:
    """The layout of `model` by the row of `family`, which fits.

    Raises UnsupportedModel for a setting that the row does not support or a size that differs from the configuration.
    """
    config = model.config
    require_choices(family, config)
    stack = model.get_submodule(family.layers)
    maps = [next(roles for roles in family.layer if not map_misfits(roles, layer, "")) for layer in stack]
    outer_map = {role: path for role, path in family.outer.items() if has(model, path)}
    keys = rotary_keys(family, config)
    rotary = {}
    if any(keys):
        source = model.get_submodule(family.rotary)
        rotary = {key: (family.table or rope_table)(source, key) for key in dict.fromkeys(keys) if key}
    spec = decoder_spec(family, model, maps, keys, rotary)
    layers = tuple(refs(layer, roles, spec) for layer, roles in zip(stack, maps, strict=True))
    layout = DecoderLayout(family.name, spec, layers, refs(model, outer_map, spec), rotary)
    require_sizes(layout)
    return layout


def require_choices(family: Family, config: PretrainedConfig) -> None:
    """Raise UnsupportedModel if the config has a value that the family's row refuses, or is_causal=False."""
    if getattr(config, "is_causal", True) is False:
        raise UnsupportedModel(f"{family.name}: config.is_causal=False; a decoder's attention looks back only")
    for words, is_so in family.refuses.items():
        if is_so(config):
            raise UnsupportedModel(f"{family.name}: {words} is not supported")


def rotary_keys(family: Family, config: PretrainedConfig) -> list[str]:
    """`LayerSpec.rotary` of every layer."""
    if family.rotaries is not None:
        return family.rotaries(config)
    return ["rope" if family.rotary else ""] * config.num_hidden_layers


def decoder_spec(family: Family, model: nn.Module, maps: list, keys: list[str], rotary: dict) -> DecoderSpec:
    """The spec, from the configuration's common settings and the row's `spec`, which has precedence.

    maps: each layer's map of roles.  keys: `LayerSpec.rotary` of each layer.  rotary: the tables by key.
    Raises UnsupportedModel if the configuration does not agree with the model.
    """
    config = model.config
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    windows = family.windows(config) if family.windows else [0] * len(maps)
    if {len(windows), len(keys), config.num_hidden_layers} != {len(maps)}:
        raise UnsupportedModel(
            f"{family.name}: {len(maps)} layers, and the configuration says {config.num_hidden_layers}"
        )
    fields = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "embedding_size": config.hidden_size,
        "num_heads": heads,
        "num_kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": head_dim,
        "attention_scale": head_dim**-0.5,
        "norm_eps": norm_eps(family, model, maps),
        **activation(family, config),
        "gated": any("gate" in role or role == "router" for roles in maps for role in roles),
        "max_positions": positions_end(family, config, keys),
        **turning(family, model, maps, rotary),
        **{name: value(model) if callable(value) else value for name, value in family.spec.items()},
    }
    kinds = zip(windows, keys, ("router" in roles for roles in maps), strict=True)
    return DecoderSpec(layers=tuple(LayerSpec(*kind) for kind in kinds), **fields)


def activation(family: Family, config: PretrainedConfig) -> dict:
    """The spec's activation fields, from the config; {} if the row's `spec` has them.

    Raises UnsupportedModel for an unknown activation.
    """
    if not family.activation:
        return {}
    name = getattr(config, family.activation)
    if name not in ACTIVATIONS:
        raise UnsupportedModel(
            f"{family.name}: config.{family.activation}={name!r} is not supported; known are {', '.join(ACTIVATIONS)}"
        )
    return {"activation": ACTIVATIONS[name], "activation_stepwise": name == "gelu_new"}


def norm_eps(family: Family, model: nn.Module, maps: list) -> float:
    """The epsilon of all norms.

    Raises UnsupportedModel if the norms differ in it, or are not of the row's kind (RMS or layer norm).
    """
    stack = model.get_submodule(family.layers)
    owners = [(model, family.outer), *zip(stack, maps, strict=True)]
    paths = [(root, path) for root, roles in owners for role, path in roles.items() if role.endswith("norm")]
    norms = [plain(norm) for norm in (find(root, path) for root, path in paths) if norm is not None]
    other = [norm for norm in norms if isinstance(norm, nn.LayerNorm) != (family.spec.get("norm") == "layer")]
    if other:
        raise UnsupportedModel(f"{family.name}: a {type(other[0]).__name__} is not the kind of norm that it has")
    values = {getattr(norm, "eps", None) or getattr(norm, "variance_epsilon", None) for norm in norms}
    if len(values) != 1 or None in values:
        raise UnsupportedModel(f"{family.name}: its norms have the epsilons {values}, not one for all")
    return values.pop()


def positions_end(family: Family, config: PretrainedConfig, keys: list[str]) -> int:
    """DecoderSpec.max_positions."""
    if family.positions is not None:
        return family.positions(config)
    return rope_end(config) if any(keys) else 0


def turning(family: Family, model: nn.Module, maps: list, rotary: Mapping[str, Table]) -> dict:
    """The spec's rotary fields: `rotary_dim`, `rotary_float32` and, unless the row makes its own tables,
    `rotary_interleaved`. {} without tables. Raises UnsupportedModel if the tables differ in width."""
    if not rotary:
        return {}
    one = torch.ones(1, dtype=torch.long, device=next(model.get_submodule(family.rotary).buffers()).device)
    widths = {2 * table(one, torch.float32)[0].shape[-1] for table in rotary.values()}
    if len(widths) != 1:
        raise UnsupportedModel(f"{family.name}: rotary tables of different widths, {sorted(widths)}")
    coarse = [table(one, torch.bfloat16)[0] for table in rotary.values()]
    rounded = all(torch.equal(cos, cos.bfloat16().float()) for cos in coarse)
    found = {"rotary_dim": widths.pop(), "rotary_float32": not rounded}
    if family.table is None:
        cos, sin = (table.cpu() for table in next(iter(rotary.values()))(one, torch.float32))
        found["rotary_interleaved"] = interleaved(family, attention_module(family, model, maps), cos, sin)
    return found


def attention_module(family: Family, model: nn.Module, maps: list) -> nn.Module:
    """The first layer's attention module: the parent of its query projection."""
    path = next(value for role, value in maps[0].items() if role.split()[0] == "q")
    path = path.path if isinstance(path, Fused) else path
    return model.get_submodule(family.layers)[0].get_submodule(path.rpartition(".")[0])


def interleaved(family: Family, attention: nn.Module, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether rope pairs neighbouring elements (True) or an element of each half of a head (False).

    No setting has this, so the attention's own `apply_rotary_pos_emb` is run on a head whose first element is 1.
    cos, sin: [1, rotary_dim / 2]. Raises UnsupportedModel if the function is missing, has another signature, or does
    neither.
    """
    forward = inspect.unwrap(type(attention).forward)
    turn = forward.__globals__.get("apply_rotary_pos_emb")
    if turn is None:
        raise UnsupportedModel(f"{family.name}: {forward.__module__} has no apply_rotary_pos_emb to be asked")
    width = 2 * cos.shape[-1]
    first = torch.zeros(1, 1, 1, width)  # [batch, heads, tokens, head_dim]
    first[..., 0] = 1.0
    try:
        made = turn(first, first, torch.cat((cos, cos), -1)[None], torch.cat((sin, sin), -1)[None])[0].flatten()
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        raise UnsupportedModel(
            f"{family.name}: {forward.__module__}.apply_rotary_pos_emb is another one: {error}"
        ) from error
    for neighbours in (False, True):
        expected = torch.zeros(width)
        expected[0], expected[1 if neighbours else width // 2] = cos[0, 0], sin[0, 0]
        if torch.allclose(made, expected):
            return neighbours
    raise UnsupportedModel(f"{family.name}: {type(attention).__name__} turns neither halves nor neighbours")


def refs(root: nn.Module, roles: Mapping[str, str | Fused], spec: DecoderSpec) -> dict[str, ParamRef]:
    """The ParamRefs of `roles` under `root`, by "<role>.weight" and "<role>.bias"."""
    found = {}
    for names, value in roles.items():
        if isinstance(value, Fused):
            for role, pick in zip(names.split(), value.split(spec), strict=True):
                found |= places_of(root.get_submodule(value.path), role, pick)
            continue
        path, _, name = value.partition(":")
        module = root.get_submodule(path)
        found |= {f"{names}.weight": ParamRef(module, name)} if name else places_of(module, names)
    return found


def places_of(module: nn.Module, role: str, pick: Pick | None = None) -> dict[str, ParamRef]:
    """The ParamRefs of a module's weight and bias. A linear module without bias gets a ref for it too: an adapter may
    add one."""
    weight = turned(pick) if isinstance(plain(module), Conv1D) else pick
    found = {f"{role}.weight": ParamRef(module, "weight", weight)}
    if hasattr(plain(module), "bias"):
        found[f"{role}.bias"] = ParamRef(module, "bias", pick)
    return found


def turned(pick: Pick | None) -> Pick:
    """`pick` applied to the transpose of a weight [in, out]."""
    return (lambda weight: weight.T) if pick is None else (lambda weight: pick(weight.T))
