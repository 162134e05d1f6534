"""Reading a model: the family whose row fits it, and what the row makes of it."""

from collections.abc import Iterable, Mapping

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from hybrid.architectures.families import FAMILIES
from hybrid.architectures.family import ACTIVATIONS, CHOICES, Family, Fused, Pick, declares, rope_end, rope_table
from hybrid.architectures.spec import DecoderSpec, LayerSpec, Place, Reading, Unreadable


def read_decoder(model: nn.Module) -> Reading:
    """`model` as the family describes it that fits. The model may be wrapped by PEFT, and be partitioned.

    Raises Unreadable, with the reason, where no family fits, a parameter would be left out, a setting is not
    covered, or a size is not what the configuration says.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(getattr(base, "config", None), PretrainedConfig):
        raise Unreadable(f"{type(base).__name__} has no Hugging Face configuration")
    found = [(family, misfits(family, base)) for family in FAMILIES]
    for family, reasons in found:
        if not reasons:
            reading = read_as(family, base)
            require_covered(model, reading)
            return reading
    nearest, reasons = min(found, key=lambda one: len(one[1]))
    raise Unreadable(
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


def own_parameters(root: nn.Module, path: str) -> list[nn.Parameter]:
    """The parameters of the module at `path`, adapters aside, or the one that "path:name" names."""
    module_path, _, name = path.partition(":")
    parameters = plain(find(root, module_path))._parameters
    return [parameters[name]] if name else [param for param in parameters.values() if param is not None]


def has(root: nn.Module, path: str) -> bool:
    """Whether there is a module at `path`, with the parameter of "path:name"."""
    module_path, _, name = path.partition(":")
    module = find(root, module_path)
    return module is not None and (not name or name in plain(module)._parameters)


def find(root: nn.Module, path: str) -> nn.Module | None:
    """The module at `path`, None where there is none."""
    try:
        return root.get_submodule(path)
    except AttributeError:
        return None


def plain(module: nn.Module) -> nn.Module:
    """The module without its adapters; DeepSpeed-Chat's is its own plain one, as its weight has the usual name."""
    while isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
        module = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module.original_module
    return module


def adapter_parameters(root: nn.Module) -> set[nn.Parameter]:
    """The parameters under `root` that adapters brought: PEFT's, and DeepSpeed-Chat's."""
    found: set[nn.Parameter] = set()
    for module in root.modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            found |= set(module.parameters()) - set(plain(module).parameters())
        elif hasattr(module, "lora_left_weight") and hasattr(module, "lora_right_weight"):
            found |= {module.lora_left_weight, module.lora_right_weight}
    return found


# What the family makes of it


def read_as(family: Family, model: nn.Module) -> Reading:
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
    layers = tuple(places(layer, roles, spec) for layer, roles in zip(stack, maps, strict=True))
    reading = Reading(family.name, spec, layers, places(model, outer_map, spec), rotary)
    require_sizes(reading)
    return reading


def require_choices(family: Family, config: PretrainedConfig) -> None:
    """Raises Unreadable where the config makes a choice that the family's row does not cover."""
    if getattr(config, "is_causal", True) is False:
        raise Unreadable(f"{family.name}: config.is_causal=False; a decoder's attention looks back only")
    for words, is_so in family.refuses.items():
        if is_so(config):
            raise Unreadable(f"{family.name}: {words} is not supported")


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
        raise Unreadable(f"{family.name}: {len(maps)} layers, and the configuration says {config.num_hidden_layers}")
    fields = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "embedding_size": config.hidden_size,
        "num_heads": heads,
        "num_kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": head_dim,
        "attention_scale": head_dim**-0.5,
        "norm_eps": norm_eps(family, model, maps),
        "activation": activation(family, config),
        "gated": any("gate" in role or role == "router" for roles in maps for role in roles),
        "max_positions": positions_end(family, config, keys),
        **turning(rotary),
        **{name: value(model) if callable(value) else value for name, value in family.spec.items()},
    }
    kinds = zip(windows, keys, ("router" in roles for roles in maps), strict=True)
    return DecoderSpec(layers=tuple(LayerSpec(*kind) for kind in kinds), **fields)


def activation(family: Family, config: PretrainedConfig) -> str:
    """DecoderSpec's name of the activation that the config names."""
    if not family.activation:
        return ""
    name = getattr(config, family.activation)
    if name not in ACTIVATIONS:
        raise Unreadable(
            f"{family.name}: config.{family.activation}={name!r} is not supported; known are {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def norm_eps(family: Family, model: nn.Module, maps: list) -> float:
    """The epsilon of the norms, which is one for all of them."""
    stack = model.get_submodule(family.layers)
    owners = [(model, family.outer), *zip(stack, maps, strict=True)]
    norms = [find(root, path) for root, roles in owners for role, path in roles.items() if role.endswith("norm")]
    values = {
        getattr(module, "eps", None) or getattr(module, "variance_epsilon", None)
        for module in (plain(norm) for norm in norms if norm is not None)
    }
    if len(values) != 1 or None in values:
        raise Unreadable(f"{family.name}: its norms have the epsilons {values}, not one for all")
    return values.pop()


def positions_end(family: Family, config: PretrainedConfig, keys: list[str]) -> int:
    """DecoderSpec.max_positions."""
    if family.positions is not None:
        return family.positions(config)
    return rope_end(config) if any(keys) else 0


def turning(rotary: dict) -> dict:
    """How much of a head the tables turn, and whether their products are rounded before they are summed."""
    if not rotary:
        return {}
    rows = [table(torch.ones(1, dtype=torch.long), torch.bfloat16)[0] for table in rotary.values()]
    widths = {2 * cos.shape[-1] for cos in rows}
    if len(widths) != 1:
        raise Unreadable(f"rotary tables of different widths, {sorted(widths)}")
    rounded = all(torch.equal(cos, cos.bfloat16().float()) for cos in rows)
    return {"rotary_dim": widths.pop(), "rotary_float32": not rounded}


def places(root: nn.Module, roles: Mapping[str, str | Fused], spec: DecoderSpec) -> dict[str, Place]:
    """Where the tensors of `roles` are under `root`, by "<role>.weight" and "<role>.bias"."""
    found = {}
    for names, value in roles.items():
        if isinstance(value, Fused):
            for role, pick in zip(names.split(), value.split(spec), strict=True):
                found |= places_of(root.get_submodule(value.path), role, pick)
            continue
        path, _, name = value.partition(":")
        module = root.get_submodule(path)
        found |= {f"{names}.weight": Place(module, name)} if name else places_of(module, names)
    return found


def places_of(module: nn.Module, role: str, pick: Pick | None = None) -> dict[str, Place]:
    """A module's weight and bias. A linear module that has no bias has a place for one all the same: an adapter may
    bring it."""
    weight = turned(pick) if isinstance(plain(module), Conv1D) else pick
    found = {f"{role}.weight": Place(module, "weight", weight)}
    if hasattr(plain(module), "bias"):
        found[f"{role}.bias"] = Place(module, "bias", pick)
    return found


def turned(pick: Pick | None) -> Pick:
    """`pick` for a weight that is [in, out]."""
    return (lambda weight: weight.T) if pick is None else (lambda weight: pick(weight.T))


# What would make it wrong


def require_covered(model: nn.Module, reading: Reading) -> None:
    """Raises Unreadable where a parameter of `model` has no role and is no adapter's."""
    every = [place for roles in (reading.outer, *reading.layers) for place in roles.values()]
    covered = {param for param in map(parameter_at, every) if param is not None} | adapter_parameters(model)
    left = [name for name, param in model.named_parameters() if param not in covered]
    if left:
        raise Unreadable(f"{reading.family}: {', '.join(left[:3])} ({len(left)} in all) has no role in it")


def parameter_at(place: Place) -> nn.Parameter | None:
    """The parameter at a place; None where there is none."""
    return getattr(plain(place.module), place.parameter, None)


def require_sizes(reading: Reading) -> None:
    """Raises Unreadable where a tensor's shape is not what the spec says, or a fused one has rows left over."""
    groups = [("", reading.outer)] + [(f"layer {index} ", roles) for index, roles in enumerate(reading.layers)]
    for where, roles in groups:
        picked = {role: picked_shape(place) for role, place in roles.items() if parameter_at(place) is not None}
        expected = shapes(reading.spec, inner_size(picked))
        for role, shape in picked.items():
            want = expected[role.removesuffix(".weight")] if role.endswith(".weight") else expected[role[:-5]][:1]
            if shape != want:
                raise Unreadable(
                    f"{reading.family}: {where}{role} is {list(shape)}, and by the configuration {list(want)}"
                )
        require_whole(reading.family, where, [place for role, place in roles.items() if role in picked])


def whole_shape(place: Place) -> torch.Size:
    """The shape of the whole parameter at a place; ZeRO-3 empties a partitioned one's own."""
    param = parameter_at(place)
    return getattr(param, "ds_shape", param.shape)


def picked_shape(place: Place) -> torch.Size:
    """The shape of the role's tensor."""
    whole = torch.empty(whole_shape(place), device="meta")
    try:
        return whole.shape if place.select is None else place.select(whole).shape
    except (RuntimeError, IndexError):  # sizes that the rows cannot be shared out by
        return whole.shape


def require_whole(family: str, where: str, together: Iterable[Place]) -> None:
    """Raises Unreadable where the roles of a fused parameter are not all of it."""
    taken: dict[nn.Parameter, int] = {}
    wholes: dict[nn.Parameter, int] = {}
    for place in together:
        param = parameter_at(place)
        taken[param] = taken.get(param, 0) + picked_shape(place).numel()
        wholes[param] = whole_shape(place).numel()
    for param, whole in wholes.items():
        if taken[param] % whole:
            raise Unreadable(
                f"{family}: {where}has a fused parameter of {whole} elements; its roles take {taken[param]}"
            )


def inner_size(picked: Mapping[str, torch.Size]) -> int:
    """The MLP's inner size, which only its weights say: the columns of the matrix that leads back."""
    back = picked.get("down.weight", picked.get("experts_down.weight", (0,)))
    return back[-1]


def shapes(spec: DecoderSpec, inner: int) -> dict[str, tuple[int, ...]]:
    """What the shape of each role's weight must be."""
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
