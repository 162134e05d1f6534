"""Reading a model: finds the family whose row fits, and makes the `DecoderLayout` from it."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from hybrid.models.checks import require_covered, require_sizes
from hybrid.models.families import FAMILIES
from hybrid.models.family import ACTIVATIONS, CHOICES, Family, Packed, Pick, Table, rope_end, rope_table
from hybrid.models.modules import adapter_parameters, find, has, hugging_face_model, own_parameters, plain
from hybrid.models.spec import DecoderLayout, DecoderSpec, LayerSpec, ParamRef, UnsupportedModel

Roles = Mapping[str, str | Packed]  # as `Family.layer`


def read_decoder(model: nn.Module) -> DecoderLayout:
    """The layout of `model`, by the first family that fits. The model may be wrapped by PEFT, and partitioned.

    Raises UnsupportedModel, with the reason, if no family fits, a parameter has no role, the family does not support a
    setting, or a size differs from the configuration.
    """
    base = hugging_face_model(model)
    if not isinstance(getattr(base, "config", None), PretrainedConfig):
        raise UnsupportedModel(f"{type(base).__name__} has no Hugging Face configuration")
    rejected = []
    for family in FAMILIES:
        reasons = misfits(family, base)
        if not reasons:
            layout = LayoutReader(family, base).layout()
            require_covered(model, layout)
            return layout
        rejected.append((family, reasons))
    # Among equally near families the most general one, which comes last in FAMILIES.
    nearest, reasons = min(reversed(rejected), key=lambda pair: (find(base, pair[0].layers) is None, len(pair[1])))
    raise UnsupportedModel(
        f"{type(base).__name__} fits no supported family; the nearest is {nearest.name}: " + "; ".join(reasons[:3])
    )


# Which family fits


def misfits(family: Family, model: nn.Module) -> list[str]:
    """The reasons why `model` does not fit `family`; empty if it does."""
    config, embedding = model.config, family.outer["embedding"]
    paths = [path for role, path in family.outer.items() if role not in family.optional]
    reasons = [f"no {path}" for path in (*paths, *filter(None, [family.rotary])) if not has(model, path)]
    layers = find(model, family.layers)
    if isinstance(layers, nn.ModuleList) and len(layers):
        reasons += layer_misfits(family, layers)
    else:
        reasons.append(f"no layers in {family.layers}")
    # Asked of the class: an instance also keeps unknown settings it was given.
    reasons += [f"the configuration has no {name}" for name in family.declares if not hasattr(type(config), name)]
    reasons += [
        f"{name}={getattr(config, name)!r} is not supported"
        for name in CHOICES
        if name not in family.understands and getattr(config, name, None) not in (None, False)
    ]
    if not family.own_embedding and has(model, embedding):
        kind = type(plain(find(model, embedding)))
        if kind.forward is not nn.Embedding.forward:  # Gemma's, for example, scales
            reasons.append(f"{embedding} is a {kind.__name__}, with a forward of its own")
    return reasons


def layer_misfits(family: Family, layers: nn.ModuleList) -> list[str]:
    """The reasons why the first layer that does not fit differs from its nearest map of `family`; empty if all fit."""
    for index, layer in enumerate(layers):
        by_map = [map_misfits(roles, layer, f"{family.layers}.{index}") for roles in family.layer]
        if all(by_map):
            return min(by_map, key=len)
    return []


def map_misfits(roles: Roles, layer: nn.Module, name: str) -> list[str]:
    """The modules of `roles` that a layer lacks, and its parameters without a role, as reasons.  name: the layer's."""
    paths = [value.path if isinstance(value, Packed) else value for value in roles.values()]
    present = [path for path in paths if has(layer, path)]
    covered = adapter_parameters(layer).union(*(own_parameters(layer, path) for path in present))
    missing = [f"no {name}.{path}" for path in paths if path not in present]
    return missing + [f"{name}.{key} has no role" for key, param in layer.named_parameters() if param not in covered]


# The layout


class LayoutReader:
    """Reads a model that fits the row of a family.

    Raises UnsupportedModel for a setting that the row does not support or a size that differs from the configuration.
    """

    def __init__(self, family: Family, model: nn.Module):
        self.family, self.model, self.config = family, model, model.config
        if getattr(self.config, "is_causal", True) is False:
            raise self._unsupported("config.is_causal=False; decoders have causal attention")
        for setting, is_set in family.refuses.items():
            if is_set(self.config):
                raise self._unsupported(f"{setting} is not supported")
        self.outer = {role: path for role, path in family.outer.items() if has(model, path)}
        layers: Any = model.get_submodule(family.layers)  # an nn.ModuleList
        self.layers = [
            (layer, next(roles for roles in family.layer if not map_misfits(roles, layer, ""))) for layer in layers
        ]
        self.rotary_keys = ["rope" if family.rotary else ""] * self.config.num_hidden_layers
        if family.rotaries is not None:
            self.rotary_keys = family.rotaries(self.config)
        self.tables: dict[str, Table] = {}
        if any(self.rotary_keys):
            source = model.get_submodule(family.rotary)
            make = family.table or rope_table
            self.tables = {key: make(source, key) for key in dict.fromkeys(self.rotary_keys) if key}

    def layout(self) -> DecoderLayout:
        """The model's layout; every size has been checked."""
        spec = self._spec()
        layers = tuple(refs(layer, roles, spec) for layer, roles in self.layers)
        layout = DecoderLayout(self.family.name, spec, layers, refs(self.model, self.outer, spec), self.tables)
        require_sizes(layout)
        return layout

    def _unsupported(self, reason: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.family.name}: {reason}")

    def _spec(self) -> DecoderSpec:
        """The spec, from the configuration's common settings and the row's `spec`, which has precedence."""
        family, config, count = self.family, self.config, len(self.layers)
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        windows = family.windows(config) if family.windows else [0] * count
        if {len(windows), len(self.rotary_keys), config.num_hidden_layers} != {count}:
            raise self._unsupported(f"{count} layers, and the configuration says {config.num_hidden_layers}")
        roles = {role for _, layer_roles in self.layers for role in layer_roles}
        positions = family.positions or (rope_end if any(self.rotary_keys) else lambda config: 0)
        fields = {
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "embedding_size": config.hidden_size,
            "num_heads": heads,
            "num_kv_heads": getattr(config, "num_key_value_heads", None) or heads,
            "head_dim": head_dim,
            "attention_scale": head_dim**-0.5,
            "norm_eps": self._norm_eps(),
            **self._activation(),
            "gated": any("gate" in role or role == "router" for role in roles),
            "max_positions": positions(config),
            **self._rotary(),
            **{name: value(self.model) if callable(value) else value for name, value in family.spec.items()},
        }
        experts = ["router" in layer_roles for _, layer_roles in self.layers]
        layers = tuple(LayerSpec(*layer) for layer in zip(windows, self.rotary_keys, experts, strict=True))
        return DecoderSpec(layers=layers, **fields)

    def _activation(self) -> dict:
        """The spec's activation fields, from the config; {} if the row's `spec` has them."""
        if not self.family.activation:
            return {}
        name = getattr(self.config, self.family.activation)
        if name not in ACTIVATIONS:
            raise self._unsupported(
                f"config.{self.family.activation}={name!r} is not supported; supported are {', '.join(ACTIVATIONS)}"
            )
        return {"activation": ACTIVATIONS[name], "activation_stepwise": name == "gelu_new"}

    def _norm_eps(self) -> float:
        """The epsilon of all norms, which must be of the row's kind (RMS or layer norm) and have the same one."""
        owners = [(self.model, self.outer), *self.layers]
        paths = [(root, path) for root, roles in owners for role, path in roles.items() if role.endswith("norm")]
        norms = [plain(root.get_submodule(path)) for root, path in paths]
        kind = "layer" if self.family.spec.get("norm") == "layer" else "RMS"
        for norm in norms:
            if isinstance(norm, nn.LayerNorm) != (kind == "layer"):
                raise self._unsupported(f"a {type(norm).__name__} where the family has {kind} norms")
        values = {getattr(norm, "eps", None) or getattr(norm, "variance_epsilon", None) for norm in norms}
        if len(values) != 1 or None in values:
            raise self._unsupported(f"its norms have the epsilons {values}, which must be one for all")
        return values.pop()

    def _rotary(self) -> dict:
        """The spec's rotary fields: `rotary_dim`, `rotary_float32` and, unless the row makes its own tables,
        `rotary_interleaved`. {} without tables."""
        if not self.tables:
            return {}
        device = next(self.model.get_submodule(self.family.rotary).buffers()).device
        position = torch.ones(1, dtype=torch.long, device=device)
        exact = [table(position, torch.float32) for table in self.tables.values()]  # cos, sin [1, rotary_dim / 2]
        widths = {2 * cos.shape[-1] for cos, _ in exact}
        if len(widths) != 1:
            raise self._unsupported(f"rotary tables of different widths, {sorted(widths)}")
        coarse = [table(position, torch.bfloat16)[0] for table in self.tables.values()]
        rounded = all(torch.equal(cos, cos.bfloat16().float()) for cos in coarse)
        fields = {"rotary_dim": widths.pop(), "rotary_float32": not rounded}
        if self.family.table is None:
            fields["rotary_interleaved"] = self._interleaved(*(table.cpu() for table in exact[0]))
        return fields

    def _interleaved(self, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        """Whether rope pairs neighbouring elements (True) or an element of each half of a head (False).

        No setting has this, so the attention's own `apply_rotary_pos_emb` is run on a head whose first element is 1.
        cos, sin: [1, rotary_dim / 2]. Raises UnsupportedModel if the function is missing, has another signature, or
        does neither.
        """
        layer, roles = self.layers[0]
        path = next(value for role, value in roles.items() if role.split()[0] == "q")
        path = path.path if isinstance(path, Packed) else path
        attention = layer.get_submodule(path.rpartition(".")[0])
        forward = inspect.unwrap(type(attention).forward)
        apply_rotary = forward.__globals__.get("apply_rotary_pos_emb")
        if apply_rotary is None:
            raise self._unsupported(f"{forward.__module__} has no apply_rotary_pos_emb")
        width = 2 * cos.shape[-1]
        x = torch.zeros(1, 1, 1, width)  # [batch, heads, tokens, head_dim]
        x[..., 0] = 1.0
        try:
            rotated = apply_rotary(x, x, torch.cat((cos, cos), -1)[None], torch.cat((sin, sin), -1)[None])[0].flatten()
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            raise self._unsupported(f"{forward.__module__}.apply_rotary_pos_emb is a different one: {error}") from error
        for interleaved in (False, True):
            expected = torch.zeros(width)
            expected[0], expected[1 if interleaved else width // 2] = cos[0, 0], sin[0, 0]
            if torch.allclose(rotated, expected):
                return interleaved
        raise self._unsupported(f"the rope of {type(attention).__name__} pairs neither halves nor neighbours of a head")


def refs(root: nn.Module, roles: Roles, spec: DecoderSpec) -> dict[str, ParamRef]:
    """The ParamRefs of `roles` under `root`, by "<role>.weight" and "<role>.bias"."""
    by_role: dict[str, ParamRef] = {}
    for names, value in roles.items():
        if isinstance(value, Packed):
            for role, pick in zip(names.split(), value.split(spec), strict=True):
                by_role |= module_refs(root.get_submodule(value.path), role, pick)
            continue
        path, _, name = value.partition(":")
        module = root.get_submodule(path)
        by_role |= {f"{names}.weight": ParamRef(module, name)} if name else module_refs(module, names)
    return by_role


def module_refs(module: nn.Module, role: str, pick: Pick | None = None) -> dict[str, ParamRef]:
    """The ParamRefs of a module's weight and bias. A linear module without bias gets a ref for it too: an adapter may
    add one."""
    weight = pick
    if isinstance(plain(module), Conv1D):  # its weight is [in, out]
        weight = (lambda whole: whole.T) if pick is None else (lambda whole: pick(whole.T))
    by_role = {f"{role}.weight": ParamRef(module, "weight", weight)}
    if hasattr(plain(module), "bias"):
        by_role[f"{role}.bias"] = ParamRef(module, "bias", pick)
    return by_role
