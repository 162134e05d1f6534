"""A family of decoders as a row: where each role's module is, and what the configuration chooses.

A row is knowledge; `layout.py` is what is done with it. Nothing here looks at a weight.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from hybrid.models.spec import DecoderSpec, UnsupportedModel

Pick = Callable[[torch.Tensor], torch.Tensor]  # a role's rows of a fused [rows, …] tensor
Table = Callable[[torch.Tensor, torch.dtype], tuple[torch.Tensor, torch.Tensor]]

# Settings that change what a decoder computes. One that is set, and that a family's row does not name in
# `understands`, is a reason not to read the model by that row: it would run, and be wrong.
CHOICES = (
    "alibi attention_chunk_size attention_multiplier attn_logit_softcapping clip_qkv embedding_multiplier "
    "final_logit_softcapping first_k_dense_replace kv_lora_rank layer_types lm_head_multiplier logit_scale "
    "logits_scaling mup_scaling n_routed_experts n_shared_experts no_rope_layers num_experts num_local_experts "
    "num_shared_experts parallel_attn qk_layernorm query_pre_attn_scalar residual_multiplier scale_depth "
    "sliding_window use_qk_norm use_bidirectional_attention use_parallel_residual"
).split()

ACTIVATIONS = {
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
class Fused:
    """One module whose rows belong to several roles.

    split: the spec to one `Pick` for each of the roles, in the order in which the row names them.
    """

    path: str
    split: Callable[[DecoderSpec], tuple[Pick, ...]]


@dataclass(frozen=True)
class Family:
    """How the models of one family are read. Paths are module paths; "path:name" is a parameter that is no `weight`.

    layers: the list of layers in the model.
    outer: role to path in the model; those in `optional` may be missing.
    layer: role to path in a layer, or several roles, "q k v", to `Fused`. Several maps are tried in order for each
        layer, so the one that asks for most comes first.
    activation: the setting that names it; "" where `spec` says it.
    own_embedding: the embedding's module does more than look up, and `spec` says what.
    spec: fields of DecoderSpec that are not the defaults of `layout.py`: values, or functions of the model.
    windows, rotaries: functions of the config to `LayerSpec.window` and `.rotary` for each layer.
    rotary: path of the module that has the tables, and `table` makes them: (module, key) to a `Table`.
    positions: the config's number of learned or tabled positions, 0 where there is no end.
    declares: settings that the config's class must have; `understands`: those of CHOICES that this row reads.
    refuses: words to a condition on the config under which the row would be wrong.
    """

    name: str
    layers: str
    outer: Mapping[str, str]
    layer: tuple[Mapping[str, str | Fused], ...]
    activation: str = "hidden_act"
    own_embedding: bool = False
    optional: tuple[str, ...] = ()
    spec: Mapping[str, Any] = field(default_factory=dict)
    windows: Callable[[PretrainedConfig], list[int]] | None = None
    rotaries: Callable[[PretrainedConfig], list[str]] | None = None
    rotary: str = ""
    table: Callable[[nn.Module, str], Table] | None = None
    positions: Callable[[PretrainedConfig], int] | None = None
    declares: tuple[str, ...] = ()
    understands: tuple[str, ...] = ()
    refuses: Mapping[str, Callable[[PretrainedConfig], bool]] = field(default_factory=dict)


# Functions of a model or its configuration, for rows.


def key(name: str, default: Any = None) -> Callable[[nn.Module], Any]:
    """Of a model, the setting `name`, or `default` where it is missing or None."""

    def setting(model: nn.Module) -> Any:
        value = getattr(model.config, name, None)
        return default if value is None else value

    return setting


def declares(config: PretrainedConfig, name: str) -> bool:
    """Whether the configuration's class has this setting; configs carry anything else that they were given, too."""
    return hasattr(type(config), name)


def one_window(config: PretrainedConfig) -> list[int]:
    """The same window in every layer."""
    return [config.sliding_window or 0] * config.num_hidden_layers


def windows_by_type(config: PretrainedConfig) -> list[int]:
    """A window in the layers that `layer_types` calls sliding."""
    window = {"full_attention": 0, "sliding_attention": config.sliding_window or 0}
    unknown = set(config.layer_types) - window.keys()
    if unknown:
        raise UnsupportedModel(f"config.layer_types has {sorted(unknown)}; known are {sorted(window)}")
    return [window[kind] for kind in config.layer_types]


# How fused rows are shared out.


def block(rows: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Rows `start` to `stop`, a view."""
    return rows[start:stop]


def stacked(spec: DecoderSpec) -> tuple[Pick, ...]:
    """Queries' rows, then keys', then values'."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return tuple(partial(block, start=a, stop=b) for a, b in ((0, q), (q, q + kv), (q + kv, q + 2 * kv)))


def group_part(rows: torch.Tensor, groups: int, head_dim: int, start: int, stop: int | None) -> torch.Tensor:
    """Heads `start` to `stop` of every group's, [groups · heads · head_dim, …]: a view for one group."""
    return rows.view(groups, -1, head_dim, *rows.shape[1:])[:, start:stop].flatten(0, 2)


def grouped(spec: DecoderSpec) -> tuple[Pick, ...]:
    """For each key head: its queries' rows, its own, its value's (one query: interleaved by head, as in GPT-NeoX)."""
    part = partial(group_part, groups=spec.num_kv_heads, head_dim=spec.head_dim)
    return (partial(part, start=0, stop=-2), partial(part, start=-2, stop=-1), partial(part, start=-1, stop=None))


def half(rows: torch.Tensor, index: int) -> torch.Tensor:
    """The upper (0) or lower (1) half, a view."""
    return rows.view(2, -1, *rows.shape[1:])[index]


def halves(spec: DecoderSpec) -> tuple[Pick, ...]:
    """The gate's rows, then up's."""
    return (partial(half, index=0), partial(half, index=1))


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """ALiBi's slopes (arXiv:2108.12409): powers of 2^(-8/n), n the power of two at or below the number of heads; the
    heads beyond it take the odd powers of 2^(-4/n)."""
    whole = 1 << (num_heads.bit_length() - 1)
    first = [2.0 ** (-8.0 * i / whole) for i in range(1, whole + 1)]
    rest = [2.0 ** (-4.0 * i / whole) for i in range(1, 2 * (num_heads - whole), 2)]
    return (*first, *rest)


# Where positions' tables come from, and how far they go.


def rope_table(module: nn.Module, layer_type: str) -> Table:
    """The tables of a Hugging Face rotary module, which is asked by its own forward: every scaling is its own.

    `layer_type` is given to modules that keep a table for each type (Gemma 3); "rope" is the only table of others.
    """
    kind = {} if layer_type == "rope" else {"layer_type": layer_type}
    rope_type = getattr(module, "rope_type", "default")
    rope_type = rope_type[layer_type] if isinstance(rope_type, dict) else rope_type
    # Asked on its own device: a rotary module moves its frequencies to where its input is.
    device = next(module.buffers()).device
    one = torch.ones(1, 1, dtype=torch.long, device=device)
    first, second = module.forward(torch.empty(0, device=device), one, **kind)[0].chunk(2, dim=-1)
    if not torch.equal(first, second):
        raise UnsupportedModel(f"{type(module).__name__}: the second half of its table does not repeat the first")

    def table(positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        like = torch.empty(0, dtype=dtype, device=positions.device)
        if "dynamic" in rope_type:  # it keeps the frequencies of a longer call until a short one: so make one first
            module.forward(like, torch.zeros_like(positions[:1])[None], **kind)
        cos, sin = module.forward(like, positions[None], **kind)
        halved = cos.shape[-1] // 2
        return cos[0, :, :halved].float(), sin[0, :, :halved].float()

    return table


# What the tables alone depend on. Anything else may be read by an attention's forward (Ministral 3 scales queries).
ROPE_PARAMETERS = (
    "rope_type type rope_theta factor original_max_position_embeddings max_position_embeddings partial_rotary_factor "
    "attention_factor beta_fast beta_slow mscale mscale_all_dim truncate low_freq_factor high_freq_factor "
    "short_factor long_factor"
).split()
# rope types whose table of a position is the same whatever the sequence's length (transformers 5.23)
FIXED_ROPES = ("default", "linear", "llama3", "yarn", "proportional")


def rope_end(config: PretrainedConfig) -> int:
    """Positions up to which the tables do not depend on how long a sequence is; 0: no end."""
    parameters = config.rope_parameters or {}
    nested = [value for value in parameters.values() if isinstance(value, dict) and "rope_type" in value]
    return min((end for end in map(partial(one_rope_end, config), nested or [parameters]) if end), default=0)


def one_rope_end(config: PretrainedConfig, parameters: dict) -> int:
    """`rope_end` of one set of rope parameters."""
    unknown = {name for name, value in parameters.items() if value} - set(ROPE_PARAMETERS)
    if unknown:
        raise UnsupportedModel(f"rope_parameters has {sorted(unknown)}, of which attention may make its own use")
    kind = parameters.get("rope_type", "default")
    if kind in FIXED_ROPES:
        return 0
    if kind == "dynamic":
        return config.max_position_embeddings
    if kind == "longrope":
        return parameters["original_max_position_embeddings"]
    raise UnsupportedModel(f"rope_type={kind!r}; known are {', '.join((*FIXED_ROPES, 'dynamic', 'longrope'))}")
