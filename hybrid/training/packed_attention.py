"""Attention of packed rows, as a function that transformers' models call through their `AttentionInterface`.

On CPUs one flash call for each segment and one for its descendants; the softmaxes over parts of the keys are joined by
their logsumexps, as in FlashAttention-2 (arXiv 2307.08691, section 3.1) and Hydragen (arXiv 2402.05099), also in the
backward. Elsewhere, and for attention that flash kernels cannot do (a soft cap), one call for each tree, with a mask.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, PretrainedConfig

from hybrid.training.packing import AttentionCall, PackedRows
from hybrid.training.sequence_parallel import SequenceParallel


class PackedAttention:
    """An attention function for packed rows, with the arguments of transformers' attention functions.

    Args:
        packed_rows: the packing.
        reasons: gets the reasons for which a call is no attention of packed rows, and the call returns zeros; None: the
            call raises.
        ranks: the ranks that share the packed row, each with its own tokens; None: this rank has them all.
    """

    def __init__(
        self, packed_rows: PackedRows, reasons: list[str] | None = None, ranks: SequenceParallel | None = None
    ):
        self.packed_rows, self.reasons, self.ranks = packed_rows, reasons, ranks

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return the attention output, [1, tokens, heads, value dim]; tokens are this rank's.

        Args:
            module: the attention module.
            query: [1, heads, tokens, dim].
            key: [1, key-value heads, tokens, dim].
            value: [1, key-value heads, tokens, value dim].
            attention_mask: None: the packing says what a token sees.
            scaling: of the scores; None: 1 / sqrt(dim).
            sliding_window: keys that a token sees at most, its own included.
            softcap: cap of the scores: tanh(score / cap) * cap.
            s_aux: attention sinks, [heads]: one more score of each softmax, without a value.
            kwargs: other arguments, which do not change causal self-attention.

        Raises:
            NotImplementedError: for attention of another kind.
        """
        rows, dim = self.packed_rows, value.shape[-1]
        if reason := self._unsupported(module, query, key, attention_mask, kwargs):
            if self.reasons is None:
                raise NotImplementedError(f"attention of packed rows: {type(module).__name__}: {reason}")
            self.reasons.append(f"{type(module).__name__}: {reason}")
            return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], dim), None
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if self.ranks is not None:
            query, key, value = self.ranks.to_heads((query, key, value))
            s_aux = None if s_aux is None else self.ranks.local_heads(s_aux)
        if softcap is not None or query.device.type != "cpu":
            output = masked_attention(query, key, value, rows, scale, sliding_window, softcap, s_aux)
        else:
            # Multi-head latent attention has narrower values than keys; the kernel takes one width.
            value = F.pad(value, (0, query.shape[-1] - dim)) if dim < query.shape[-1] else value
            output = _FlashTree.apply(query, key, value, s_aux, rows, scale, sliding_window)[..., :dim]
        if self.ranks is not None:
            output = self.ranks.to_tokens(output)
        return output.transpose(1, 2).contiguous(), None  # as transformers' own: AFMoE views it (5.23)

    def _unsupported(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        attention_mask: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> str:
        """Return why a call is no attention of packed rows; "" if it is."""
        if attention_mask is not None or kwargs.get("position_bias") is not None:
            return "it adds a mask or a bias of its own"
        if kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
            return "it is not causal"
        if kwargs.get("dropout"):
            return "it has dropout"
        ranks = 1 if self.ranks is None else self.ranks.size
        if {query.shape[2] * ranks, key.shape[2] * ranks} != {self.packed_rows.num_tokens}:
            return "it sees other tokens than the model's"
        if query.shape[1] % ranks:
            return f"sequence_parallel_size={ranks} does not divide its {query.shape[1]} heads"
        return ""


class _FlashTree(torch.autograd.Function):
    """Attention of packed rows by flash calls on CPUs, whose softmaxes over parts of the keys are joined."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        packed_rows: PackedRows,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Return [1, heads, tokens, dim].  query, key, value as in `PackedAttention`, of one dim."""
        calls = packed_rows.attention_calls(window)
        output, logsumexp = query.new_empty(query.shape), None
        for call in calls:
            part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query[:, :, call.queries],
                key[:, :, call.keys],
                value[:, :, call.keys],
                0.0,
                call.is_causal,
                attn_mask=additive(call, query.dtype),
                scale=scale,
            )
            if logsumexp is None:
                logsumexp = part_lse.new_empty(query.shape[:3])  # in float32, or float64
            joined, joined_lse = output[:, :, call.queries], logsumexp[:, :, call.queries]
            if call.is_first:
                joined.copy_(part)
                joined_lse.copy_(part_lse)
                continue
            if call.hidden is not None:
                part_lse = part_lse.masked_fill(call.hidden, -torch.inf)  # the kernel returns 0
            join(joined, joined_lse, part, part_lse)
        assert logsumexp is not None, "a packing has a token"
        if sinks is not None:
            joined = torch.logaddexp(logsumexp, sinks[:, None].to(logsumexp.dtype))
            output.mul_((logsumexp - joined).exp().unsqueeze(-1))
            logsumexp = joined
        ctx.save_for_backward(query, key, value, sinks, output, logsumexp)
        ctx.calls, ctx.scale = calls, scale
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of query, key, value and sinks.

        With the output and logsumexp of the whole softmax, a flash backward over some keys is their part of it.
        """
        query, key, value, sinks, output, logsumexp = ctx.saved_tensors
        grads = [torch.zeros_like(tensor) for tensor in (query, key, value)]
        for call in ctx.calls:
            queries, keys = call.queries, call.keys
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad[:, :, queries],
                query[:, :, queries],
                key[:, :, keys],
                value[:, :, keys],
                output[:, :, queries],
                logsumexp[:, :, queries],
                0.0,
                call.is_causal,
                attn_mask=additive(call, query.dtype),
                scale=ctx.scale,
            )
            for total, part, where in zip(grads, parts, (queries, keys, keys), strict=True):
                total[:, :, where] += part
        sink_grad = None
        if sinks is not None:
            probability = (sinks[:, None] - logsumexp).exp()  # [1, heads, tokens]
            sink_grad = -(probability * (grad * output).sum(dim=-1)).sum(dim=(0, 2)).to(sinks.dtype)
        return *grads, sink_grad, None, None, None


def additive(call: AttentionCall, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a call's mask as the CPU kernel takes it: 0 or -inf, [1, 1, queries, keys]; None without one."""
    if call.mask is None:
        return None
    return torch.zeros(call.mask.shape, dtype=dtype).masked_fill_(~call.mask, -torch.inf)[None, None]


def join(output: torch.Tensor, logsumexp: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Join a softmax over more keys to `output`, [..., tokens, dim], and its `logsumexp`, [..., tokens], in place."""
    joined = torch.logaddexp(logsumexp, part_lse)
    before, more = ((each - joined).exp().unsqueeze(-1) for each in (logsumexp, part_lse))
    output.copy_(output * before + part * more)
    logsumexp.copy_(joined)


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed_rows: PackedRows,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return the attention of packed rows, one tree after the other, with a mask [n, n] of its tokens.

    The arguments are those of `PackedAttention`. Returns [1, heads, tokens, value dim].
    """
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    outputs = []
    for tokens in packed_rows.trees():
        q, k, v = query[:, :, tokens], key[:, :, tokens], value[:, :, tokens]
        mask = packed_rows.mask(tokens, window)
        if softcap is None and sinks is None:
            outputs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale))
            continue
        scores = q @ k.transpose(-1, -2) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~mask, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores.dtype)], dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype)
        outputs.append(weights[..., : k.shape[2]] @ v)
    return torch.cat(outputs, dim=2)


def attention_configs(modules: Iterable[nn.Module]) -> list[PretrainedConfig]:
    """Return the configurations, each once, by which modules choose their attention function."""
    configs = {id(config): config for module in modules if (config := vars(module).get("config")) is not None}
    return [config for config in configs.values() if hasattr(config, "_attn_implementation_internal")]


class AttentionReplacement:
    """The attention function that attention modules call while rows are packed.

    It is one object with one name, over the packing of the forward that runs: layers are compiled for a name and a
    function, and would be compiled again for others. They call it uncompiled.
    """

    def __init__(self) -> None:
        self.name = f"hybrid_packed_{id(self)}"
        self.attention: PackedAttention | None = None  # of the forward that runs

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch 2.13 does not annotate it
    def __call__(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        """Return what `PackedAttention` does."""
        assert self.attention is not None, "modules call it inside `over`"
        return self.attention(*args, **kwargs)

    @contextmanager
    def over(self, configs: Sequence[PretrainedConfig], attention: PackedAttention) -> Iterator[None]:
        """Inside the block attention modules with these configurations call `attention`; afterwards their own function.

        An implementation without a mask function of its own: models make no mask for it (transformers 5.23).
        """
        before, outer = [config._attn_implementation_internal for config in configs], self.attention
        AttentionInterface.register(self.name, self)  # the mapping of all instances: some models have one of their own
        self.attention = attention
        try:
            for config in configs:
                config._attn_implementation_internal = self.name
            yield
        finally:
            self.attention = outer
            for config, implementation in zip(configs, before, strict=True):
                config._attn_implementation_internal = implementation
            if outer is None:  # else a forward inside a loss of another one's logits
                del AttentionInterface._global_mapping[self.name]
