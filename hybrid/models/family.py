"""A family of decoders as a row of data: the module path of each role, and the meaning of the configuration.

`reader.py` applies the rows to models. Nothing here reads a weight.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from hybrid.models.spec import DecoderSpec, OtherFamily, UnsupportedModel

Pick = Callable[[torch.Tensor], torch.Tensor]  # a packed tensor [rows, …] to one role's rows
Table = Callable[[torch.Tensor, torch.dtype], tuple[torch.Tensor, torch.Tensor]]

# Settings that change what a decoder computes. If one is set and a row's `understands` does not name it, the row does
# not fit: the decoder would run and give wrong results.
CHOICES = (
    "alibi attention_chunk_size attention_multiplier attn_logit_softcapping clip_qkv embedding_multiplier "
    "final_logit_softcapping first_k_dense_replace kv_lora_rank layer_types lm_head_multiplier logit_scale "
    "logits_scaling mup_scaling n_routed_experts n_shared_experts no_rope_layers num_experts num_local_experts "
    "num_shared_experts parallel_attn qk_layernorm query_pre_attn_scalar residual_multiplier scale_depth "
    "sliding_window use_qk_norm use_bidirectional_attention use_parallel_residual"
).split()

ACTIVATIONS = {
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
}


@dataclass(frozen=True)
class Packed:
    """A parameter whose rows belong to several roles, or in another order or shape than the role's: the weight of a
    module, or "path:name".

    split: returns one `Pick` per role for a spec, in the order in which the row names the roles.
    """

    path: str
    split: Callable[[DecoderSpec], tuple[Pick, ...]]


@dataclass(frozen=True)
class Family:
    """Rules for reading the models of one family. Paths are module paths; "path:name" is a parameter not called
    `weight`.

    layers: path of the list of layers in the model.
    outer: role to path in the model; roles in `optional` may be missing.
    layer: role to path in a layer, or several roles, "q k v", to `Packed`. Several maps are tried in order for each
        layer, so the most specific comes first.
    activation: the config's setting with the activation; "" if `spec` has it.
    own_embedding: the embedding module computes more than a lookup, and `spec` describes it.
    spec: fields of DecoderSpec that `reader.LayoutReader` would set otherwise: values, or functions of the model.
    windows, rotaries: functions of the config that give `LayerSpec.window` and `.rotary` for each layer.
    varies: settings that may vary by layer (`per_layer_attributes`), which `head_sizes` reads.
    head_sizes: function of the config: the numbers of key and value heads, and the heads' sizes, of each layer.
    kv_layers: function of the config: `LayerSpec.kv_layer` of each layer.
    rotary: path of the module with the rotary tables.  table: (module, key) to a `Table`; None: `rope_table`.
    positions: function of the config: the number of learned or tabled positions, 0 for no limit.
    declares: settings that the config's class must have.  understands: those of CHOICES that this row reads.
    refuses: error text to a condition on the config under which the row would be wrong.
    """

    name: str
    layers: str
    outer: Mapping[str, str]
    layer: tuple[Mapping[str, str | Packed], ...]
    activation: str = "hidden_act"
    own_embedding: bool = False
    optional: tuple[str, ...] = ()
    spec: Mapping[str, Any] = field(default_factory=dict)
    windows: Callable[[PretrainedConfig], list[int]] | None = None
    rotaries: Callable[[PretrainedConfig], list[str]] | None = None
    varies: tuple[str, ...] = ()
    head_sizes: Callable[[PretrainedConfig], list[tuple[int, int]]] | None = None
    kv_layers: Callable[[PretrainedConfig], list[int | None]] | None = None
    rotary: str = ""
    table: Callable[[nn.Module, str], Table] | None = None
    positions: Callable[[PretrainedConfig], int] | None = None
    declares: tuple[str, ...] = ()
    understands: tuple[str, ...] = ()
    refuses: Mapping[str, Callable[[PretrainedConfig], bool]] = field(default_factory=dict)


# Functions of a model or its configuration, used in rows.


def key(name: str, default: Any = None) -> Callable[[nn.Module], Any]:
    """Return a function that returns a model's setting `name`, or `default` if it is missing or None."""

    def setting(model: nn.Module) -> Any:
        value = getattr(model.config, name, None)
        return default if value is None else value

    return setting


def same_window(config: PretrainedConfig) -> list[int]:
    """`LayerSpec.window` of every layer: the same window."""
    return [config.sliding_window or 0] * config.num_hidden_layers


def windows_by_type(config: PretrainedConfig) -> list[int]:
    """`LayerSpec.window` of every layer: the window of sliding attention, 0 for full attention."""
    return by_layer_type(config, {"full_attention": 0, "sliding_attention": config.sliding_window or 0})


def by_layer_type(config: PretrainedConfig, values: Mapping[str, Any]) -> list[Any]:
    """Return the value of every layer's type. Raises UnsupportedModel if `layer_types` has a type without a value."""
    unknown = set(config.layer_types) - values.keys()
    if unknown:
        raise UnsupportedModel(f"config.layer_types has {sorted(unknown)}; supported are {sorted(values)}")
    return [values[kind] for kind in config.layer_types]


# How the rows of a packed weight are divided among roles.


def stacked(spec: DecoderSpec) -> tuple[Pick, ...]:
    """Return the picks for rows in the order: all queries, all keys, all values. They give views."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return (lambda rows: rows[:q], lambda rows: rows[q : q + kv], lambda rows: rows[q + kv : q + 2 * kv])


def grouped(spec: DecoderSpec) -> tuple[Pick, ...]:
    """Return the picks for rows grouped by key head: its queries, the key, the value. With one query per key head this
    is GPT-NeoX's interleaving by head. They give views for one group."""

    def heads(start: int | None, stop: int | None) -> Pick:
        grouped_by = (spec.num_kv_heads, -1, spec.head_dim)
        return lambda rows: rows.view(*grouped_by, *rows.shape[1:])[:, start:stop].flatten(0, 2)

    return heads(None, -2), heads(-2, -1), heads(-1, None)


def halves(spec: DecoderSpec) -> tuple[Pick, ...]:
    """Return the picks for rows in the order: gate, up. They give views."""
    return tuple(lambda rows, index=index: rows.view(2, -1, *rows.shape[1:])[index] for index in (0, 1))


def delta_by_key_head(spec: DecoderSpec) -> tuple[Pick, ...]:
    """Return the picks for rows grouped by key head: its query, the key, its values, and their gates. They give
    copies."""
    net: Any = spec.recurrent
    of_values = net.values // net.key_heads
    sizes = [net.key_dim, net.key_dim, of_values, of_values]

    def parts(rows: torch.Tensor) -> list[torch.Tensor]:
        by_head = rows.view(net.key_heads, -1, *rows.shape[1:]).split(sizes, dim=1)
        return [part.flatten(0, 1) for part in by_head]

    return (lambda rows: torch.cat(parts(rows)[:3]), lambda rows: parts(rows)[3])


def halves_by_key_head(spec: DecoderSpec) -> tuple[Pick, ...]:
    """Return the picks for rows grouped by key head: those of its value heads for one role, then for another. They give
    copies."""
    net: Any = spec.recurrent
    heads = net.key_heads
    return tuple(
        lambda rows, index=index: rows.view(heads, 2, -1, *rows.shape[1:])[:, index].flatten(0, 1) for index in (0, 1)
    )


def over_channels(spec: DecoderSpec) -> tuple[Pick, ...]:
    """Return the pick that makes [conv_width, channels] of a convolution's weight [channels, 1, conv_width]; its bias
    stays as it is."""
    return (lambda rows: rows if rows.dim() == 1 else rows.squeeze(1).T,)


def transposed_experts(spec: DecoderSpec) -> tuple[Pick, ...]:
    """Return the pick for experts' matrices [experts, in, out]. It gives a view."""
    return (lambda matrices: matrices.transpose(1, 2),)


def interleaved_experts(spec: DecoderSpec) -> tuple[Pick, ...]:
    """Return the pick for experts' matrices [experts, in, 2 · inner] whose columns are gate, up, gate, up, … It gives a
    copy."""
    return (lambda matrices: matrices.unflatten(2, (-1, 2)).permute(0, 3, 2, 1).flatten(1, 2),)


def expert_biases(spec: DecoderSpec) -> tuple[Pick, ...]:
    """Return the pick for experts' biases [experts, out]. It gives a view."""
    return (lambda biases: biases.unsqueeze(-1),)


def interleaved_biases(spec: DecoderSpec) -> tuple[Pick, ...]:
    """Return the pick for experts' biases [experts, 2 · inner] in the order gate, up, gate, up, … It gives a copy."""
    return (lambda biases: biases.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)[..., None],)


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """ALiBi's slopes (arXiv:2108.12409), one per head: powers of 2^(-8/n), with n the largest power of two up to the
    number of heads; further heads get the odd powers of 2^(-4/n)."""
    whole = 1 << (num_heads.bit_length() - 1)
    first = [2.0 ** (-8.0 * i / whole) for i in range(1, whole + 1)]
    rest = [2.0 ** (-4.0 * i / whole) for i in range(1, 2 * (num_heads - whole), 2)]
    return (*first, *rest)


# Rotary tables, and the positions for which they are exact.


def rope_table(module: nn.Module, layer_type: str) -> Table:
    """Return the tables of a Hugging Face rotary module, computed by its own forward, so that every scaling is the
    module's.

    layer_type: passed to modules with one table per layer type (Gemma 3); "rope" for modules with one table.
    Raises OtherFamily if the second half of the module's table does not repeat the first.
    """
    kind = {} if layer_type == "rope" else {"layer_type": layer_type}
    rope_type = getattr(module, "rope_type", "default")
    rope_type = rope_type[layer_type] if isinstance(rope_type, dict) else rope_type
    first, second = cosines_at_one(module, **kind).chunk(2, dim=-1)
    if not torch.equal(first, second):
        raise OtherFamily(f"{type(module).__name__}: the second half of its table does not repeat the first")

    def table(positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        like = torch.empty(0, dtype=dtype, device=positions.device)
        if "dynamic" in rope_type:  # the module keeps a longer call's frequencies; a call of length 1 resets them
            module.forward(like, torch.zeros_like(positions[:1])[None], **kind)
        cos, sin = module.forward(like, positions[None], **kind)
        halved = cos.shape[-1] // 2
        return cos[0, :, :halved].float(), sin[0, :, :halved].float()

    return table


def cosines_at_one(module: nn.Module, **kind: str) -> torch.Tensor:
    """Return a rotary module's cosines of position 1, float32 [1, 1, n].  kind: its `layer_type`, if it takes one."""
    # Called on the module's own device: its forward moves the frequencies to the device of the input.
    device = next(module.buffers()).device
    position = torch.ones(1, 1, dtype=torch.long, device=device)
    return module.forward(torch.empty(0, device=device), position, **kind)[0]


def every_nth(module: nn.Module, step: int) -> Table:
    """Return the tables of a module by its own forward, with every `step`-th of its columns."""

    def table(positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = module.forward(torch.empty(0, dtype=dtype, device=positions.device), positions[None])
        return cos[0, :, ::step].float(), sin[0, :, ::step].float()

    return table


def paired_table(module: nn.Module, layer_type: str) -> Table:
    """As `rope_table`, of a module whose table has each angle twice in a row (Cohere, GLM-4.1V)."""
    cosines = cosines_at_one(module)
    if not torch.equal(cosines[..., ::2], cosines[..., 1::2]):
        raise OtherFamily(f"{type(module).__name__}: its table does not have each angle twice in a row")
    return every_nth(module, 2)


def half_table(module: nn.Module, layer_type: str) -> Table:
    """As `rope_table`, of a module whose table has each angle once (GPT-OSS)."""
    return every_nth(module, 1)


def complex_table(module: nn.Module, layer_type: str) -> Table:
    """As `rope_table`, of a module whose table has complex numbers (DeepSeek V2)."""

    def table(positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        turns = module.forward(torch.empty(0, dtype=dtype, device=positions.device), positions[None])[0]
        return turns.real.contiguous(), turns.imag.contiguous()

    return table


def negated_table(module: nn.Module, layer_type: str) -> Table:
    """As `rope_table`, with the angles negated: for attentions that turn the other way (NanoChat)."""
    rope = rope_table(module, layer_type)

    def table(positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = rope(positions, dtype)
        return cos, -sin

    return table


# Parameters that only the tables read; of text, mrope's are without effect. Any other may be read by an attention's
# forward (Ministral 3 scales queries).
ROPE_PARAMETERS = (
    "rope_type type rope_theta factor original_max_position_embeddings max_position_embeddings partial_rotary_factor "
    "attention_factor beta_fast beta_slow mscale mscale_all_dim truncate low_freq_factor high_freq_factor "
    "short_factor long_factor mrope_section mrope_interleaved"
).split()
# rope types whose table does not depend on the sequence's length (transformers 5.23)
FIXED_ROPES = ("default", "linear", "llama3", "yarn", "proportional")


def rope_end(config: PretrainedConfig, understood: Collection[str] = ()) -> int:
    """Return the number of positions for which the tables do not depend on the sequence's length; 0: no limit.

    understood: parameters that the row reads besides ROPE_PARAMETERS.  Raises UnsupportedModel for unknown rope types
    or parameters.
    """
    by_type = config.rope_parameters or {}
    nested = [value for value in by_type.values() if isinstance(value, dict) and "rope_type" in value]
    limits = []
    for parameters in nested or [by_type]:
        unknown = {name for name, value in parameters.items() if value} - {*ROPE_PARAMETERS, *understood}
        if unknown:
            raise UnsupportedModel(f"rope_parameters has {sorted(unknown)}, of which attention may make its own use")
        rope_type = parameters.get("rope_type", "default")
        if rope_type == "dynamic":
            limits.append(config.max_position_embeddings)
        elif rope_type == "longrope":
            limits.append(parameters["original_max_position_embeddings"])
        elif rope_type not in FIXED_ROPES:
            supported = ", ".join((*FIXED_ROPES, "dynamic", "longrope"))
            raise UnsupportedModel(f"rope_type={rope_type!r}; supported are {supported}")
    return min(filter(None, limits), default=0)
