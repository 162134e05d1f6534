"""The description of a decoder: its sizes, choices and parameters; all that an inference container needs to know."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

RopeTable = Callable[[torch.Tensor, torch.dtype], tuple[torch.Tensor, torch.Tensor]]


class UnsupportedModel(ValueError):
    """No family describes this model or a part of it. `coverage()` shows the message as the reason."""


@dataclass(frozen=True)
class LayerSpec:
    """The settings that may differ between the layers of one decoder.

    window: number of tokens that a query attends to, itself included; 0: all tokens before it.
    rotary: the key, in `DecoderLayout.rotary`, of the rotary table for queries and keys; "": no rope.
    experts: whether the MLP is a mixture of experts.
    """

    window: int = 0
    rotary: str = ""
    experts: bool = False


@dataclass(frozen=True)
class DecoderSpec:
    """Sizes and choices of a decoder. The roles of its `DecoderLayout` show which norms and biases it has.

    embedding_size: width of the token embedding; differs from hidden_size if the model projects in and out (OPT).
    norm: "rms" or "layer".  norm_offset: added to the norm's weight (Gemma's 1 + w).
    norm_float32: the norm's weight is applied before rounding to the model's dtype (Gemma, OLMo2), not after (Llama).
    activation: "silu", "gelu", "gelu_tanh" or "relu".  activation_stepwise: computed as a formula in Python, rounded at
        every step (gelu_new: GPT-2, GPT-J).  gated: the MLP is down(act(gate) * up), not down(act(up)).
    attention_scale: factor of q·k.  attention_softcap, logits_softcap: c·tanh(x / c); 0: off.
    alibi: None, or for each query head its slope: slope · key position is added to the scaled score.
    alibi_bfloat16: position, slope / attention_scale and their product are rounded to bfloat16 (Falcon); otherwise
        slope · position is rounded to the dtype of the computation.
    rotary_dim: number of leading elements of a head that rope is applied to.
    rotary_interleaved: rope pairs neighbouring elements (GPT-J), not an element of each half.
    rotary_float32: tables are not rounded to the model's dtype, and rope rounds only its result (OLMo2).
    qk_norm: "", "head" (each head by itself) or "row" (all heads of a token together).
    parallel: attention and MLP read the same residual; without an `mlp_norm` they share `attention_norm`.
    position_offset: added to a position for its row in the table of learned positions (OPT's 2).
    embedding_multiplier, residual_multiplier, logits_divisor: Granite's and Gemma's factors; 1: none.
    num_experts, experts_per_token, normalize_experts: a mixture of experts. The router's softmax is over all experts.
        With `normalize_experts` the chosen experts' weights are divided by their sum. They are rounded to the model's
        dtype before they scale the experts' outputs, unless `experts_float32` (Mixtral).
    max_positions: number of positions for which the model's tables are exact (learned tables, length-dependent rope
        scalings); 0: no limit.
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

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with experts."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.experts)


@dataclass(frozen=True)
class ParamRef:
    """A reference to a role's tensor: `parameter` of `module`, which is the wrapper if the module is adapted.

    select: gives the role's part of the parameter, transposed to [out, in] if needed, as a view where possible. None:
        the whole parameter.
    """

    module: nn.Module
    parameter: str
    select: Callable[[torch.Tensor], torch.Tensor] | None = None


# Roles of a layer, with the suffix ".weight" or ".bias". Matrices are [out, in]; those of experts [experts, out, in],
# with the gate's rows before up's in `experts_gate_up`.
LAYER_ROLES = (
    "attention_norm q k v q_norm k_norm o attention_post_norm "
    "mlp_norm gate up down mlp_post_norm router experts_gate_up experts_down"
).split()
# Matrices with the same input: a decoder may read them as one, in this order.
JOINED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
OUTER_ROLES = "embedding positions embedding_norm project_in final_norm project_out head".split()


@dataclass(frozen=True)
class DecoderLayout:
    """A model as its family describes it.

    family: the family's name.
    layers: for each layer, `"<role>.weight"` and `"<role>.bias"` to their ParamRefs; roles of LAYER_ROLES.
    outer: the same for parameters outside the layers; roles of OUTER_ROLES.
    rotary: for each key of `LayerSpec.rotary`, the model's own table: a function of positions, int64 [n], and a dtype
        that gives cos and sin, float32 [n, rotary_dim / 2], with the values rounded to the dtype as in the model.
    """

    family: str
    spec: DecoderSpec
    layers: tuple[dict[str, ParamRef], ...]
    outer: dict[str, ParamRef]
    rotary: dict[str, RopeTable]
