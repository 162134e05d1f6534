"""The description of a decoder: its sizes, choices and parameters; all that an inference container needs to know."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from hybrid.kernels.recurrent import RecurrentMixer
from hybrid.kernels.router import Router

RopeTable = Callable[[torch.Tensor, torch.dtype], tuple[torch.Tensor, torch.Tensor]]


# Kinds of mixers, in addition to those of `RecurrentMixer`.
ATTENTION, LATENT_ATTENTION, NO_MIXER = "attention", "latent attention", ""
HYBRID = "attention and a recurrent mixer"  # of the same input, their outputs summed (Falcon-H1)


class UnsupportedModel(ValueError):
    """No family describes this model or a part of it. `coverage()` shows the message as the reason."""


class OtherFamily(UnsupportedModel):
    """A model has the modules of a row, which compute something else than the row says. A later row may fit."""


@dataclass(frozen=True)
class LayerSpec:
    """The settings that may differ between the layers of one decoder.

    window: number of tokens that a query attends to, itself included; 0: all tokens before it; below 0: those of its
        chunk of -window tokens, of which the first begins at position 0 (Llama 4).
    rotary: the key, in `DecoderLayout.rotary`, of the rotary table for queries and keys; "": no rope.
    experts: whether the MLP is a mixture of experts.
    mixer: ATTENTION, with keys and values in blocks; LATENT_ATTENTION (arXiv:2405.04434), with the latents in blocks
        of which each head's keys and values are made; the kind of `DecoderSpec.recurrent`, with a state of fixed size
        for each sequence; HYBRID; or NO_MIXER.
    feed_forward: whether it has an MLP or a mixture of experts, behind the mixer if there is one.
    num_kv_heads, head_dim: of its attention, if they vary by layer (Gemma 4); 0: the decoder's.
    kv_layer: the index of the layer whose keys and values it reads; None: it has its own.
    qk_norm: whether it has the norms of `DecoderSpec.qk_norm`.
    """

    window: int = 0
    rotary: str = ""
    experts: bool = False
    mixer: str = ATTENTION
    feed_forward: bool = True
    num_kv_heads: int = 0
    head_dim: int = 0
    kv_layer: int | None = None
    qk_norm: bool = True


@dataclass(frozen=True)
class DecoderSpec:
    """Sizes and choices of a decoder. The roles of its `DecoderLayout` show which norms and biases it has.

    num_kv_heads, head_dim: the largest, if they vary by layer; `of_layer` has a layer's own.
    embedding_size: width of the token embedding; differs from hidden_size if the model projects in and out (OPT).
    norm: "rms" or "layer".  norm_offset: added to the norm's weight (Gemma's 1 + w).
    norm_float32: the norm's weight is applied before rounding to the model's dtype (Gemma, OLMo2), not after (Llama).
    activation: "silu", "gelu", "gelu_tanh", "relu", "relu2" (its square) or "xielu" (two parameters a layer: Apertus).
        "swiglu_clamped" (GPT-OSS), gated: (up + 1) · gate · sigmoid(swiglu_alpha · gate), of gate up to `swiglu_limit`
        and up between -swiglu_limit and swiglu_limit; rounded at every step.
    activation_stepwise: computed as a formula in Python, rounded at every step (gelu_new: GPT-2, GPT-J).
    gated: the MLP is down(act(gate) * up), not down(act(up)).
    attention_scale: factor of q·k.  attention_softcap, logits_softcap: c·tanh(x / c); 0: off.
    alibi: None, or for each query head its slope: slope · key position is added to the scaled score.
    alibi_bfloat16: position, slope / attention_scale and their product are rounded to bfloat16 (Falcon); otherwise
        slope · position is rounded to the dtype of the computation.
    sinks: whether layers have the role `sinks`.
    rotary_dim: number of leading elements of a head that rope is applied to; of the last ones in latent attention, also
        in layers without rope (Kimi-Linear).
    rotary_interleaved: rope pairs neighbouring elements (GPT-J), not an element of each half.
    rotary_float32: tables are not rounded to the model's dtype, and rope rounds only its result (OLMo2).
    qk_norm: "", "head" (each head by itself) or "row" (all heads of a token together).  qk_norm_last: after rope
        (Hunyuan), not before it.
    qkv_clip: queries, keys and values are clamped to ±qkv_clip (OLMo 1); 0: off.
    query_scale_beta, query_scale_positions: queries are multiplied by 1 + beta · ln(1 + ⌊position / positions⌋) after
        rope (Ministral 3); 0: off.  query_scale_unrotated: in layers without rope alone, by a factor of position + 1
        that is not rounded (Llama 4).
    output_gate: q has for each head the rows of its queries, then those of a gate: the attention's output is multiplied
        by the gate's sigmoid (Qwen3-Next).
    gate_dim: elements of a head's gate in the role `attention_gate`, whose sigmoid multiplies its output: head_dim
        (AFMoE), or 1; 0: there is no such role.
    latent_dim: elements of a token's latent in latent attention; 0: every layer has keys and values. Its queries have
        heads of `head_dim` elements, of which the last `rotary_dim` are compared with a key that all heads share; its
        values have `value_dim`. To the cache, latent and shared key are the key of one head, the latent its value.
        Without latents `value_dim` is that of values, if it is not head_dim (MiMo-V2).
        query_rank: elements of the latent that queries are made of; 0: they are made of the layer's input.
        latent_norm_eps: of the norms of latents.
    recurrent: the kind and the sizes of the mixers that are not attention; None: there are none.
    residual_float32: the residual stream is in float32, and rounded to the model's dtype before the layers' norms alone
        (Mamba 2).
    parallel: attention and MLP read the same residual; without an `mlp_norm` they share `attention_norm`.
    attention_first: their outputs are added to the residual one after the other, attention's first (Cohere); otherwise
        their sum is.
    unweighted_norms: roles of norms that have no parameters (OLMo 1).
    position_offset: added to a position for its row in the table of learned positions (OPT's 2).
    per_layer_input_size: every layer ends with a gated MLP of this width over an input of its own, made of the token's
        row in a second table and of a projection of its embedding (Gemma 4); 0: none.
    embedding_multiplier, residual_multiplier, logits_divisor: Granite's and Gemma's factors; 1: none.
    value_multiplier: a factor of values (MiMo-V2).
    attention_in_multiplier, attention_out_multiplier, key_multiplier, gate_multiplier, mlp_multiplier: Falcon-H1's
        factors: of a HYBRID layer's attention, of keys before rope, of the MLP's gate before the activation, and of the
        MLP's output.
    num_experts, experts_per_token, router: a mixture of experts, and the choice of each token's experts.
    latent_size: width of the experts' inputs and outputs, if they differ from the hidden state's (Nemotron 3); else 0.
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
    sinks: bool = False
    rotary_dim: int = 0
    rotary_interleaved: bool = False
    rotary_float32: bool = False
    qk_norm: str = ""
    qk_norm_last: bool = False
    qkv_clip: float = 0.0
    query_scale_beta: float = 0.0
    query_scale_positions: int = 0
    query_scale_unrotated: bool = False
    output_gate: bool = False
    gate_dim: int = 0
    latent_dim: int = 0
    value_dim: int = 0
    query_rank: int = 0
    latent_norm_eps: float = 0.0
    recurrent: RecurrentMixer | None = None
    residual_float32: bool = False
    parallel: bool = False
    attention_first: bool = False
    unweighted_norms: tuple[str, ...] = ()
    position_offset: int = 0
    per_layer_input_size: int = 0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    value_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    key_multiplier: float = 1.0
    gate_multiplier: float = 1.0
    mlp_multiplier: float = 1.0
    num_experts: int = 0
    experts_per_token: int = 0
    latent_size: int = 0
    router: Router = field(default_factory=Router)
    swiglu_alpha: float = 0.0
    swiglu_limit: float = 0.0
    max_positions: int = 0

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with experts."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.experts)

    @property
    def is_chain(self) -> bool:
        """Whether every layer reads the output of the one before alone: no other layer's keys and values, and no input
        of its own."""
        return not self.per_layer_input_size and all(layer.kv_layer is None for layer in self.layers)

    @property
    def kv_head_counts(self) -> tuple[int, ...]:
        """The different numbers of key and value heads of its layers."""
        return tuple(sorted({layer.num_kv_heads or self.num_kv_heads for layer in self.layers}))

    def of_layer(self, index: int) -> "DecoderSpec":
        """Return this spec with the sizes of a layer's attention."""
        layer = self.layers[index]
        if not layer.head_dim:
            return self
        return replace(self, num_kv_heads=layer.num_kv_heads, head_dim=layer.head_dim)

    @cached_property
    def is_recurrent(self) -> bool:
        """Whether a layer has a state of fixed size for each sequence."""
        return self.recurrent is not None

    @property
    def cached_dims(self) -> tuple[int, int]:
        """Elements of a key and of a value in the cache, for each of `num_kv_heads`."""
        if self.latent_dim:
            return self.latent_dim + self.rotary_dim, self.latent_dim
        return self.head_dim, self.value_dim or self.head_dim

    def recurrent_reason(self, reason: str) -> str:
        """Return `reason` as a sentence about the recurrent layers: "its … are not …"."""
        return f"its {self.recurrent.kind}s {reason}"


@dataclass(frozen=True)
class ParamRef:
    """A reference to a role's tensor: `parameter` of `module`, which is the wrapper if the module is adapted.

    select: returns the role's part of the parameter, transposed to [out, in] if needed, as a view where possible. None:
        the whole parameter.
    """

    module: nn.Module
    parameter: str
    select: Callable[[torch.Tensor], torch.Tensor] | None = None


# Roles of a layer, with the suffix ".weight" or ".bias". Matrices are [out, in]; those of experts [experts, out, in],
# with the gate's rows before up's in `experts_gate_up` (up's alone without a gate), and their biases [experts, out, 1].
# sinks: a logit for each query head, which takes part in the softmax of its scores without a value.
# correction: added to the router's scores for the choice of experts only, [experts]; it may be a buffer.
# shared_gate, shared_up, shared_down: an MLP that runs for all tokens; its output is multiplied by the sigmoid
# of `shared_router` [1, hidden], if there is one.
# Of latent attention: q_a and q_b make the queries, through a latent with the norm q_a_norm, or q_b alone does; kv_a
# makes the latent, with the norm kv_a_norm, and the shared key; kv_b makes of the latent each head's key and value,
# [heads · (head_dim - rotary_dim + value_dim), latent_dim].
# router_norm, router_scale, expert_scale: if the router reads the residual stream: its norm, a factor of each of its
# inputs, [hidden], and one of each expert's weights, [experts]. The experts' input then has a norm of its own,
# experts_norm; experts_post_norm and shared_post_norm are of the outputs, before they are added (Gemma 4).
# per_layer_input_gate, per_layer_projection, per_layer_post_norm: the MLP of per-layer inputs. layer_scalar: the factor
# of a layer's output, [1]; it may be a buffer.
# latent_in, latent_out: the projections before and after the routed experts.
# Of a gated delta net: delta_qkv, what its convolution reads, or delta_q, delta_k and delta_v; delta_z, the gate of its
# output; delta_b, of which beta is made, and delta_a, of which the decay is made, with dt_bias and a_log; conv,
# [conv_width, channels]. Of a Kimi delta attention: decays are made by delta_forget_a and delta_forget_b, the output's
# gates by delta_z_a and delta_z_b.
# Of a Mamba 2 mixer: mamba_in, with the rows of the gate, of the convolution's input (heads, B, C), and of each head's
# time step; skip, Mamba 2's D: the output gets the heads' inputs times it.
# Of a short convolution: conv_in, with the rows of the gate of its input, of the gate of its output, and of its input.
LAYER_ROLES = (
    "attention_norm q k v attention_gate q_norm k_norm v_norm sinks o attention_post_norm "
    "q_a q_a_norm q_b kv_a kv_a_norm kv_b "
    "delta_qkv delta_q delta_k delta_v delta_z delta_b delta_a delta_forget_a delta_forget_b delta_z_a delta_z_b "
    "conv dt_bias a_log delta_norm delta_o mamba_in skip mamba_norm mamba_o conv_in conv_o "
    "mlp_norm gate up down mlp_post_norm router correction latent_in experts_gate_up experts_down latent_out "
    "shared_gate shared_up shared_down shared_router xielu_positive xielu_negative "
    "router_norm router_scale expert_scale experts_norm experts_post_norm shared_post_norm "
    "per_layer_input_gate per_layer_projection per_layer_post_norm layer_scalar"
).split()
XIELU = ("xielu_positive", "xielu_negative")  # the activation's parameters
# Matrices with the same input: a decoder may read them as one, in this order. A layer with the first may lack others.
JOINED = {
    "qkv": ("q", "k", "v"),
    "gate_up": ("gate", "up"),
    "shared_gate_up": ("shared_gate", "shared_up"),
    "delta_in": ("delta_qkv", "delta_z"),
    "delta_conv_in": ("delta_q", "delta_k", "delta_v"),
    "delta_ba": ("delta_b", "delta_a", "delta_forget_a", "delta_z_a"),
}
# Of per-layer inputs: per_layer_embedding, [vocabulary, layers · per_layer_input_size]; per_layer_model_projection,
# [layers · per_layer_input_size, hidden]; and its norm.
OUTER_ROLES = (
    "embedding positions embedding_norm project_in final_norm project_out head "
    "per_layer_embedding per_layer_model_projection per_layer_projection_norm"
).split()
BUFFERS = ("correction.weight", "layer_scalar.weight")  # roles whose tensor may be a buffer, which is read in place


@dataclass(frozen=True)
class DecoderLayout:
    """A model as its family describes it.

    family: the family's name.
    layers: for each layer, `"<role>.weight"` and `"<role>.bias"` to their ParamRefs; roles of LAYER_ROLES.
    outer: the same for parameters outside the layers; roles of OUTER_ROLES.
    rotary: for each key of `LayerSpec.rotary`, the model's own table: a function of positions, int64 [n], and a dtype
        that returns cos and sin, float32 [n, rotary_dim / 2], with the values rounded to the dtype as in the model.
    """

    family: str
    spec: DecoderSpec
    layers: tuple[dict[str, ParamRef], ...]
    outer: dict[str, ParamRef]
    rotary: dict[str, RopeTable]
