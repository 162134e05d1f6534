"""Reading a model: the family whose row fits it, and what the row makes of it."""

import inspect
from collections.abc import Mapping

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from hybrid.models.checks import require_covered, require_sizes
from hybrid.models.families import FAMILIES
from hybrid.models.family import ACTIVATIONS, CHOICES, Family, Fused, Pick, Table, declares, rope_end, rope_table
from hybrid.models.modules import adapter_parameters, find, has, own_parameters, plain
from hybrid.models.spec import DecoderLayout, DecoderSpec, LayerSpec, ParamRef, UnsupportedModel


def read_decoder(model: nn.Module) -> DecoderLayout:
    """`model` as the family describes it that fits. The model may be wrapped by PEFT, and be partitioned.

    Raises Unreadable, with the reason, where no family fits, a parameter would be left out, a setting is not
    covered, or a size is not what the configuration says.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(getattr(base, "config", None), PretrainedConfig):
        raise UnsupportedModel(f"{type(base).__name__} has no Hugging Face configuration")
    found = [(family, misfits(family, base)) for family in FAMILIES]
    for family, reasons in found:
        if not reasons:
            layout = read_as(family, base)
            require_covered(model, layout)
            return layout
    # Of equally near ones the plainest, which comes last.
    nearest, reasons = min(reversed(found), key=lambda one: (find(base, one[0].layers) is None, len(one[1])))
    raise UnsupportedModel(
        f"{type(base).__name__} is of no family that is known; nearest is {nearest.name}: " + "; ".join(reasons[:3])
    )


# Which family


def misfits(family: Family, model: nn.Module) -> list[str]:
    """Why `model` is not of `family`; empty where it is."""
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
    """The embedding where it does more than look up (Gemma's scales), and the family knows of no more."""
    path = family.outer["embedding"]
    embedding = plain(find(model, path)) if has(model, path) else None
    if embedding is None or family.own_embedding or type(embedding).forward is nn.Embedding.forward:
        return []
    return [f"{path} is a {type(embedding).__name__}, with a forward of its own"]


def layer_misfits(family: Family, stack: nn.ModuleList) -> list[str]:
    """What the layers lack for `family`, or have beyond it: the first layer that does not fit, its nearest map."""
    for index, layer in enumerate(stack):
        found = [map_misfits(roles, layer, f"{family.layers}.{index}") for roles in family.layer]
        if all(found):
            return min(found, key=len)
    return []


def map_misfits(roles: Mapping[str, str | Fused], layer: nn.Module, name: str) -> list[str]:
    """What one layer lacks of a map of roles, and which parameters it has beyond them."""
    paths = [value.path if isinstance(value, Fused) else value for value in roles.values()]
    missing = [f"no {name}.{path}" for path in paths if not has(layer, path)]
    known = {param for path in paths if has(layer, path) for param in own_parameters(layer, path)}
    known |= adapter_parameters(layer)
    return missing + [f"{name}.{key} has no role" for key, param in layer.named_parameters() if param not in known]


# What the family makes of it


def read_as(family: Family, model: nn.Module) -> DecoderLayout:
    """`model`, which fits, read by the row of `family`."""
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
    """Raises UnsupportedModel where the config makes a choice that the family's row does not cover."""
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
    """The spec: what every configuration has, and what the row says."""
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
    """What the spec says of the activation that the config names; nothing where the row says it."""
    if not family.activation:
        return {}
    name = getattr(config, family.activation)
    if name not in ACTIVATIONS:
        raise UnsupportedModel(
            f"{family.name}: config.{family.activation}={name!r} is not supported; known are {', '.join(ACTIVATIONS)}"
        )
    return {"activation": ACTIVATIONS[name], "activation_stepwise": name == "gelu_new"}


def norm_eps(family: Family, model: nn.Module, maps: list) -> float:
    """The epsilon of the norms, which is one for all of them, as their kind is the row's."""
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
    """How much of a head the tables turn, which elements turn together, and whether products are rounded."""
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
    """The module of the first layer that holds the queries' matrix."""
    path = next(value for role, value in maps[0].items() if role.split()[0] == "q")
    path = path.path if isinstance(path, Fused) else path
    return model.get_submodule(family.layers)[0].get_submodule(path.rpartition(".")[0])


def interleaved(family: Family, attention: nn.Module, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether neighbours turn together, or an element of each half, which no setting says: the function that the
    attention's own forward turns with is asked what it makes of a head's first element.  cos, sin [1, rotary_dim / 2]
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
    """Where the tensors of `roles` are under `root`, by "<role>.weight" and "<role>.bias"."""
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
    """A module's weight and bias. A linear module that has no bias has a place for one all the same: an adapter may
    bring it."""
    weight = turned(pick) if isinstance(plain(module), Conv1D) else pick
    found = {f"{role}.weight": ParamRef(module, "weight", weight)}
    if hasattr(plain(module), "bias"):
        found[f"{role}.bias"] = ParamRef(module, "bias", pick)
    return found


def turned(pick: Pick | None) -> Pick:
    """`pick` for a weight that is [in, out]."""
    return (lambda weight: weight.T) if pick is None else (lambda weight: pick(weight.T))
