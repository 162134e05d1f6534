"""What a decoder is, said in sizes and choices: all that an inference container needs to know of a family."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


class UnsupportedModel(ValueError):
    """A model, or a part of it, that no family describes. The text says which, and is shown by `coverage()`."""


@dataclass(frozen=True)
class LayerSpec:
    """What may differ between the layers of one decoder.

    window: tokens that a query sees, itself included; 0: all before it.
    rotary: the key of the rotary table that turns queries and keys; "": none.
    experts: whether the MLP is a mixture of experts.
    """

    window: int = 0
    rotary: str = ""
    experts: bool = False


@dataclass(frozen=True)
class DecoderSpec:
    """Sizes and choices of a decoder.  Which norms and biases there are is told by the roles that a reading has.

    embedding_size: of the token embedding; other than hidden_size where the model projects in and out (OPT).
    norm: "rms" or "layer".  norm_offset: added to the norm's weight (Gemma's 1 + w).
    norm_float32: the norm's weight is applied before rounding to the model's dtype (Gemma, OLMo2), not after (Llama).
    activation: "silu", "gelu", "gelu_tanh" or "relu".  activation_stepwise: it is a formula in Python, rounded at every
        step (gelu_new: GPT-2, GPT-J).  gated: the MLP is down(act(gate) * up), not down(act(up)).
    attention_scale: factor of q·k.  attention_softcap, logits_softcap: c·tanh(x / c); 0: off.
    alibi: None, or for each query head the slope by which a key's position counts in its (scaled) score.
    alibi_bfloat16: position, slope / attention_scale and their product are rounded to bfloat16 (Falcon); otherwise
        slope · position is rounded to the dtype that is computed in.
    rotary_dim: leading elements of a head that are turned.
    rotary_interleaved: the pairs that turn together are neighbours (GPT-J), not an element of each half.
    rotary_float32: tables are not rounded to the model's dtype, and turning rounds only its result (OLMo2).
    qk_norm: "", "head" (each head by itself) or "row" (all heads of a token together).
    parallel: attention and MLP read the same residual; without an `mlp_norm` they share `attention_norm`.
    embedding_multiplier, residual_multiplier, logits_divisor: Granite's and Gemma's factors; 1 where there are none.
    num_experts, experts_per_token, normalize_experts: of a mixture; the router's softmax is over all experts, and
        the chosen ones' weights are divided by their sum where `normalize_experts`, and rounded to the model's dtype
        before they scale what the experts make unless `experts_float32` (Mixtral).
    max_positions: positions that the model's tables are exact for (learned tables, length-dependent rope scalings);
        0: no end.
    """

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    embedding_size: int = 0
    norm: str = "rms"
    norm_offset: float = 0.0
    norm_float32: bool = False
    activation: str = "silu"
    activation_stepwise: bool = False
    gated: bool = True
    attention_scale: float = 1.0
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0
    alibi: tuple[float, ...] | None = None
    alibi_bfloat16: bool = False
    rotary_dim: int = 0
    rotary_interleaved: bool = False
    rotary_float32: bool = False
    qk_norm: str = ""
    parallel: bool = False
    position_offset: int = 0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    num_experts: int = 0
    experts_per_token: int = 0
    normalize_experts: bool = False
    experts_float32: bool = False
    max_positions: int = 0


@dataclass(frozen=True)
class ParamRef:
    """Where a role's tensor is: `parameter` of `module` (an adapter's wrapper where one sits there), and `select`,
    which picks the role's part of it and turns it to [out, in]: a view where that is possible. None: as it is."""

    module: nn.Module
    parameter: str
    select: Callable[[torch.Tensor], torch.Tensor] | None = None


# Roles of a layer. "q.weight" and the like may each have a ".bias".  Matrices are [out, in]; experts' are
# [experts, out, in], with gate above up in `experts_gate_up`.
LAYER_ROLES = (
    "attention_norm q k v q_norm k_norm o attention_post_norm "
    "mlp_norm gate up down mlp_post_norm router experts_gate_up experts_down"
).split()
# Matrices that read the same input: a decoder may hold them as one, in this order.
JOINED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
OUTER_ROLES = "embedding positions embedding_norm project_in final_norm project_out head".split()


@dataclass(frozen=True)
class DecoderLayout:
    """A model as its family describes it.

    family: the family's name.
    layers: for each layer, `"<role>.weight"` and `"<role>.bias"` to their places; roles of LAYER_ROLES.
    outer: the same outside the layers; roles of OUTER_ROLES.
    rotary: for each key of `LayerSpec.rotary`, the model's own tables: positions int64 [n] and a dtype to cos and sin,
        [n, rotary_dim / 2] each, rounded to the dtype as the model rounds them, in float32.
    """

    family: str
    spec: DecoderSpec
    layers: tuple[dict[str, ParamRef], ...]
    outer: dict[str, ParamRef]
    rotary: dict[str, Callable[[torch.Tensor, torch.dtype], tuple[torch.Tensor, torch.Tensor]]]
