"""Reading a model: finds the family whose row fits, and makes the `DecoderLayout` from it."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from hybrid.kernels import torch_ops
from hybrid.models.checks import require_covered, require_sizes
from hybrid.models.families import FAMILIES
from hybrid.models.family import ACTIVATIONS, CHOICES, Family, Packed, Pick, Table, rope_end, rope_table
from hybrid.models.modules import (
    adapter_parameters,
    find,
    has,
    hugging_face_model,
    native_adapter,
    own_parameters,
    plain,
    text_part,
    whole_shape,
)
from hybrid.models.spec import (
    ATTENTION,
    HYBRID,
    LATENT_ATTENTION,
    NO_MIXER,
    DecoderLayout,
    DecoderSpec,
    LayerSpec,
    OtherFamily,
    ParamRef,
    UnsupportedModel,
)

Roles = Mapping[str, str | Packed]  # as `Family.layer`
LATENT_NORMS = "q_a_norm", "kv_a_norm"
GATED_NORMS = ("delta_norm", "mamba_norm")  # of a mixer, with a gate as a second input


def read_decoder(model: nn.Module) -> DecoderLayout:
    """Return the layout of `model`, by the first family that fits. The model may be wrapped by PEFT, and partitioned.
    Of a model that reads images or sound it is the layout of the part that computes text.

    Raises UnsupportedModel, with the reason, if no family fits, a parameter has no role, the family does not support a
    setting, a size differs from the configuration, or an adapter runs in the model's own modules.
    """
    if reason := native_adapter(model):
        raise UnsupportedModel(reason)
    base = hugging_face_model(model)
    if not isinstance(getattr(base, "config", None), PretrainedConfig):
        raise UnsupportedModel(f"{type(base).__name__} has no Hugging Face configuration")
    part = text_part(base)
    rejected, mismatches = [], []
    for family in FAMILIES:
        if misfits(family, part):
            rejected.append(family)
            continue
        try:
            layout = LayoutReader(family, part).layout()
        except OtherFamily as mismatch:
            mismatches.append(mismatch)
            continue
        require_covered(model if part is base else part, layout)
        return layout
    if mismatches:
        raise mismatches[-1]
    # Among equally near families the most general one, which comes last in FAMILIES.
    reasons_of = [(family, misfits(family, part, every_layer=True)) for family in reversed(rejected)]
    nearest, reasons = min(reasons_of, key=lambda pair: (find(part, pair[0].layers) is None, len(pair[1])))
    raise UnsupportedModel(
        f"{type(base).__name__} fits no supported family; the nearest is {nearest.name}: " + "; ".join(reasons[:3])
    )


# Which family fits


def misfits(family: Family, model: nn.Module, every_layer: bool = False) -> list[str]:
    """Return the reasons why `model` does not fit `family`; empty if it does.  every_layer: those of every layer, not
    of the first alone that does not fit."""
    config, embedding = model.config, family.outer["embedding"]
    varying = set(getattr(config, "per_layer_attributes", None) or ())  # reading one raises (transformers 5.23)
    paths = [path for role, path in family.outer.items() if role not in family.optional]
    reasons = [f"no {path}" for path in (*paths, *filter(None, [family.rotary])) if not has(model, path)]
    layers = find(model, family.layers)
    if isinstance(layers, nn.ModuleList) and len(layers):
        reasons += layer_misfits(family, layers, every_layer)
    else:
        reasons.append(f"no layers in {family.layers}")
    # Asked of the class: an instance also keeps unknown settings it was given.
    reasons += [f"the configuration has no {name}" for name in family.declares if not hasattr(type(config), name)]
    if unread := varying - {*family.varies}:
        reasons.append(f"{', '.join(sorted(unread))} vary by layer")
    reasons += [
        f"{name}={getattr(config, name)!r} is not supported"
        for name in CHOICES
        if name not in family.understands and name not in varying and getattr(config, name, None) not in (None, False)
    ]
    if not family.own_embedding and has(model, embedding):
        kind = type(plain(find(model, embedding)))
        if kind.forward is not nn.Embedding.forward:  # Gemma's, for example, scales
            reasons.append(f"{embedding} is a {kind.__name__}, with a forward of its own")
    return reasons


def layer_misfits(family: Family, layers: nn.ModuleList, every_layer: bool = False) -> list[str]:
    """Return the reasons why the first layer that does not fit, or every such layer, differs from its nearest map of
    `family`; empty if all fit."""
    reasons: list[str] = []
    for index, layer in enumerate(layers):
        by_map = [map_misfits(roles, layer, f"{family.layers}.{index}") for roles in family.layer]
        nearest = min(by_map, key=len)
        reasons += nearest
        if reasons and not every_layer:
            break
    return reasons


def map_misfits(roles: Roles, layer: nn.Module, name: str) -> list[str]:
    """Return the modules of `roles` that a layer lacks, and its parameters without a role, as reasons.  name: the
    layer's."""
    paths = [value.path if isinstance(value, Packed) else value for value in roles.values()]
    present = [path for path in paths if has(layer, path)]
    covered = adapter_parameters(layer).union(*(own_parameters(layer, path) for path in present))
    missing = [f"no {name}.{path}" for path in paths if path not in present]
    return missing + [f"{name}.{key} has no role" for key, param in layer.named_parameters() if param not in covered]


# The layout


class LayoutReader:
    """Reads a model that fits the row of a family.

    Raises OtherFamily if norms compute something else than the row says, and UnsupportedModel for a setting that the
    row does not support or a size that differs from the configuration.
    """

    def __init__(self, family: Family, model: nn.Module):
        self.family, self.model, self.config = family, model, model.config
        self.outer = {role: path for role, path in family.outer.items() if has(model, path)}
        layers: Any = model.get_submodule(family.layers)  # an nn.ModuleList
        self.layers = [
            (layer, next(roles for roles in family.layer if not map_misfits(roles, layer, ""))) for layer in layers
        ]
        self.norms = self._norms()
        if getattr(self.config, "is_causal", True) is False:
            raise self._unsupported("config.is_causal=False; decoders have causal attention")
        for setting, is_set in family.refuses.items():
            if is_set(self.config):
                raise self._unsupported(f"{setting} is not supported")
        self.rotary_keys = ["rope" if family.rotary else ""] * self.config.num_hidden_layers
        if family.rotaries is not None:
            self.rotary_keys = family.rotaries(self.config)
        self.tables: dict[str, Table] = {}
        if any(self.rotary_keys):
            source = model.get_submodule(family.rotary)
            make = family.table or rope_table
            self.tables = {key: make(source, key) for key in dict.fromkeys(self.rotary_keys) if key}

    def layout(self) -> DecoderLayout:
        """Return the model's layout; every size has been checked."""
        spec = self._spec()
        layers = tuple(refs(layer, roles, spec.of_layer(index)) for index, (layer, roles) in enumerate(self.layers))
        layout = DecoderLayout(self.family.name, spec, layers, refs(self.model, self.outer, spec), self.tables)
        require_sizes(layout)
        return layout

    def _unsupported(self, reason: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.family.name}: {reason}")

    def _spec(self) -> DecoderSpec:
        """Return the spec, from the configuration's common settings and the row's `spec`, which has precedence."""
        family, config, count = self.family, self.config, len(self.layers)
        heads = getattr(config, "num_attention_heads", 0)  # 0: no layer has attention
        if family.head_sizes is None:
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
            sizes, kv_heads = [(0, 0)] * count, getattr(config, "num_key_value_heads", None) or heads
        else:
            sizes = family.head_sizes(config)
            kv_heads, head_dim = (max(size) for size in zip(*sizes, strict=True))
        kv_layers = family.kv_layers(config) if family.kv_layers else [None] * count
        windows = family.windows(config) if family.windows else [0] * count
        if {len(windows), len(self.rotary_keys), config.num_hidden_layers} != {count}:
            raise self._unsupported(f"{count} layers, and the configuration says {config.num_hidden_layers}")
        roles_of = [{role for names in layer_roles for role in names.split()} for _, layer_roles in self.layers]
        roles = set().union(*roles_of)
        positions = family.positions or (rope_end if any(self.rotary_keys) else lambda config: 0)
        fields = {
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "embedding_size": config.hidden_size,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "attention_scale": head_dim**-0.5,
            **self.norms,
            **self._activation(),
            "gated": not roles.isdisjoint(("gate", "router")),
            "sinks": "sinks" in roles,
            "max_positions": positions(config),
            **self._rotary(),
            **{name: value(self.model) if callable(value) else value for name, value in family.spec.items()},
        }
        recurrent = getattr(fields.get("recurrent"), "kind", NO_MIXER)
        of_mixers = self._gated_epsilons() - {getattr(fields.get("recurrent"), "norm_eps", 0.0) or fields["norm_eps"]}
        if of_mixers:
            raise self._unsupported(
                f"the norm of its {recurrent}s has the epsilon {of_mixers}, not {fields['norm_eps']}"
            )
        # By roles that no other mixer has.
        mixers = {"q conv": HYBRID, "q": ATTENTION, "kv_b": LATENT_ATTENTION, "conv": recurrent}
        layers = tuple(
            LayerSpec(
                window,
                rotary,
                experts="router" in of_layer,
                mixer=next((kind for part, kind in mixers.items() if of_layer.issuperset(part.split())), NO_MIXER),
                feed_forward=not of_layer.isdisjoint(("down", "experts_down")),
                num_kv_heads=size[0],
                head_dim=size[1],
                kv_layer=kv_layer,
                qk_norm="q_norm" in of_layer or "q_norm" not in roles,
            )
            for window, rotary, of_layer, size, kv_layer in zip(
                windows, self.rotary_keys, roles_of, sizes, kv_layers, strict=True
            )
        )
        return DecoderSpec(layers=layers, **fields)

    def _gated_epsilons(self) -> set[float | None]:
        """Return the epsilons of the norms of recurrent mixers."""
        paths = [(layer, path) for layer, roles in self.layers for role, path in roles.items() if role in GATED_NORMS]
        return {epsilon(plain(layer.get_submodule(path))) for layer, path in paths}

    def _activation(self) -> dict:
        """Return the spec's activation fields, from the config; {} if the row's `spec` has them."""
        if not self.family.activation:
            return {}
        name = getattr(self.config, self.family.activation)
        if name not in ACTIVATIONS:
            raise self._unsupported(
                f"config.{self.family.activation}={name!r} is not supported; supported are {', '.join(ACTIVATIONS)}"
            )
        return {"activation": ACTIVATIONS[name], "activation_stepwise": name == "gelu_new"}

    def _norms(self) -> dict:
        """Return the spec's fields of norms: their epsilon, which must be the same for all but those of latents, which
        have one too, and those without parameters.

        The row says which norms they are (`norm`, `norm_offset`, `norm_eps` if no module has it); each kind of module
        is run once, to see whether it computes them. Norms with a gate, of recurrent mixers, are not among them.
        """
        row, default = self.family.spec, self.family.spec.get("norm_eps")
        owners = [(self.model, self.outer), *self.layers]
        paths = [(role, root, path) for root, roles in owners for role, path in roles.items() if role.endswith("norm")]
        norms = [(role, plain(root.get_submodule(path))) for role, root, path in paths]
        of_kind = {(type(norm), epsilon(norm) or default): norm for role, norm in norms if role not in GATED_NORMS}
        values, of_latents = (
            {
                epsilon(norm) or default
                for role, norm in norms
                if role not in GATED_NORMS and (role in LATENT_NORMS) == latent
            }
            for latent in (False, True)
        )
        if None in values | of_latents:
            raise OtherFamily(f"{self.family.name}: a norm has no epsilon")
        if len(values) != 1 or len(of_latents) > 1:
            raise self._unsupported(f"its norms have the epsilons {values | of_latents}, which must be one for all")
        is_layer, offset = row.get("norm") == "layer", row.get("norm_offset", 0.0)
        for (kind, eps), norm in of_kind.items():
            if not computes_norm(norm, self.config.hidden_size, is_layer, offset, eps):
                expected = (
                    ("layer" if is_layer else "RMS") + " norms" + (f" with weights {offset:g} + w" * bool(offset))
                )
                raise OtherFamily(f"{self.family.name}: a {kind.__name__} where the family has {expected}")
        rounds_last = {rounds_after_weight(norm, eps, offset) for (_, eps), norm in of_kind.items()} == {True}
        unweighted = dict.fromkeys(role for role, norm in norms if getattr(norm, "weight", None) is None)
        return {
            "norm_eps": values.pop(),
            "latent_norm_eps": next(iter(of_latents), 0.0),
            "norm_float32": rounds_last and not is_layer,
            "unweighted_norms": tuple(unweighted),
        }

    def _rotary(self) -> dict:
        """Return the spec's rotary fields: `rotary_dim`, `rotary_float32` and, unless the row makes its own tables,
        `rotary_interleaved`. {} without tables."""
        if not self.tables:
            return {}
        device = next(self.model.get_submodule(self.family.rotary).buffers()).device
        position = torch.ones(1, dtype=torch.long, device=device)
        exact = [table(position, torch.float32) for table in self.tables.values()]  # cos, sin [1, rotary_dim / 2]
        widths = {2 * cos.shape[-1] for cos, _ in exact}
        if len(widths) != 1 and self.family.head_sizes is None:
            raise self._unsupported(f"rotary tables of different widths, {sorted(widths)}")
        coarse = [table(position, torch.bfloat16)[0] for table in self.tables.values()]
        rounded = all(torch.equal(cos, cos.bfloat16().float()) for cos in coarse)
        fields = {"rotary_dim": max(widths), "rotary_float32": not rounded}
        if self.family.table is None:
            fields["rotary_interleaved"] = self._interleaved(*(table.cpu() for table in exact[0]))
        return fields

    def _interleaved(self, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        """Whether rope pairs neighbouring elements (True) or an element of each half of a head (False).

        No setting has this, so the attention's own `apply_rotary_pos_emb` is run on a head whose first element is 1.
        cos, sin: [1, rotary_dim / 2]. Raises UnsupportedModel if the function is missing, has another signature, or
        does neither.
        """
        layer, path = next(
            (layer, value) for layer, roles in self.layers for role, value in roles.items() if role.split()[0] == "q"
        )
        path = path.path if isinstance(path, Packed) else path
        attention = layer.get_submodule(path.rpartition(".")[0])
        forward = inspect.unwrap(type(attention).forward)
        apply_rotary = forward.__globals__.get("apply_rotary_pos_emb")
        if apply_rotary is None:
            raise self._unsupported(f"{forward.__module__} has no apply_rotary_pos_emb")
        width = 2 * cos.shape[-1]
        x = torch.zeros(1, 1, 1, width)  # [batch, heads, tokens, head_dim]
        x[..., 0] = 1.0
        names = list(inspect.signature(apply_rotary).parameters)
        heads = [x] * (names.index("cos") if "cos" in names else 2)  # queries and keys, or one of them (Gemma 4)
        try:
            output = apply_rotary(*heads, torch.cat((cos, cos), -1)[None], torch.cat((sin, sin), -1)[None])
            rotated = (output[0] if isinstance(output, tuple) else output).flatten()
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            raise self._unsupported(f"{forward.__module__}.apply_rotary_pos_emb is a different one: {error}") from error
        for interleaved in (False, True):
            expected = torch.zeros(width)
            expected[0], expected[1 if interleaved else width // 2] = cos[0, 0], sin[0, 0]
            if torch.allclose(rotated, expected):
                return interleaved
        raise self._unsupported(f"the rope of {type(attention).__name__} pairs neither halves nor neighbours of a head")


def epsilon(norm: nn.Module) -> float | None:
    """Return a norm's epsilon; None if it has none."""
    return getattr(norm, "eps", None) or getattr(norm, "variance_epsilon", None)


def rounds_after_weight(norm: nn.Module, eps: float, offset: float) -> bool:
    """Whether an RMS norm rounds to the model's dtype after its weight is applied, and not before."""
    param = norm._parameters.get("weight")
    if param is None or not is_known(norm):
        return False
    generator = torch.Generator().manual_seed(0)
    size = whole_shape(param)[-1]
    x, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in ((64, size), (size,)))
    actual = run_alone(norm, {"weight": weight}, x).float()
    first, last = (torch_ops.rms_norm(x, weight, eps, offset, after).float() for after in (False, True))
    return bool((actual - last).abs().sum() < (actual - first).abs().sum())


def is_known(norm: nn.Module) -> bool:
    """Whether a norm's forward is of transformers or torch. Others are left to the checks of foreign code."""
    return inspect.unwrap(type(norm).forward).__module__.partition(".")[0] in ("transformers", "torch")


def computes_norm(norm: nn.Module, size: int, is_layer: bool, offset: float, eps: float) -> bool:
    """Whether a module computes a layer norm or an RMS norm with weights offset + w, by its own forward.

    size: of the input if the module has no weight. The weights are others, so that the module may be partitioned.
    """
    if not is_known(norm):
        return isinstance(norm, nn.LayerNorm) == is_layer
    generator = torch.Generator().manual_seed(0)
    sizes = {name: whole_shape(param) for name, param in norm._parameters.items() if param is not None}
    size = sizes["weight"][-1] if "weight" in sizes else size
    drawn = {name: torch.rand(shape, generator=generator) for name, shape in sizes.items()}
    x = 0.01 * torch.randn(1, size, generator=generator)  # small, so that another epsilon would be seen
    centered = x - x.mean(-1, keepdim=True) if is_layer else x
    expected = centered * torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + eps)
    if "weight" in drawn:
        expected = expected * (drawn["weight"] + offset)
    expected = expected + drawn.get("bias", 0.0)
    actual = run_alone(norm, drawn, x)
    return actual.shape == x.shape and torch.allclose(actual, expected, atol=1e-4)


@torch.no_grad()
def run_alone(module: nn.Module, parameters: dict[str, torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """Return the output of a module's own forward with other parameters, on the CPU, without its hooks."""
    alone = object.__new__(type(module))
    buffers = {name: None if value is None else value.cpu() for name, value in module._buffers.items()}
    state = {"_parameters": {**dict.fromkeys(module._parameters), **parameters}, "_buffers": buffers}
    alone.__dict__ |= {**vars(module), **state}
    return type(module).forward(alone, *inputs)


def refs(root: nn.Module, roles: Roles, spec: DecoderSpec) -> dict[str, ParamRef]:
    """Return the ParamRefs of `roles` under `root`, by "<role>.weight" and "<role>.bias"."""
    by_role: dict[str, ParamRef] = {}
    picks: dict[str, Pick | None]
    for names, value in roles.items():
        if names in spec.unweighted_norms:
            continue
        if isinstance(value, Packed):
            path, picks = value.path, dict(zip(names.split(), value.split(spec), strict=True))
        else:
            path, picks = value, {names: None}
        path, _, name = path.partition(":")
        for role, pick in picks.items():
            module, key = root.get_submodule(path), role if "." in role else f"{role}.weight"
            by_role |= {key: ParamRef(module, name, pick)} if name else module_refs(module, role, pick)
    return by_role


def module_refs(module: nn.Module, role: str, pick: Pick | None = None) -> dict[str, ParamRef]:
    """Return the ParamRefs of a module's weight and bias. A linear module without bias gets a ref for it too: an
    adapter may add one."""
    weight = pick
    if isinstance(plain(module), Conv1D):  # its weight is [in, out]
        weight = (lambda whole: whole.T) if pick is None else (lambda whole: pick(whole.T))
    by_role = {f"{role}.weight": ParamRef(module, "weight", weight)}
    if hasattr(plain(module), "bias"):
        by_role[f"{role}.bias"] = ParamRef(module, "bias", pick)
    return by_role
