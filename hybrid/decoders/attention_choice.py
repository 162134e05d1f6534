"""Chooses the kernels of a decoder's attention on a GPU: ours in Triton or FlashInfer's, and gives the reason."""

from dataclasses import dataclass

import torch

from hybrid.decoders.batch import BLOCK_SIZE
from hybrid.kernels.attention_backend import AttentionSettings
from hybrid.kernels.flashinfer_attention import flashinfer_reason
from hybrid.models.spec import DecoderSpec


@dataclass(frozen=True)
class AttentionChoice:
    """The kernels of prefill and of decode steps outside of CUDA graphs. Graphs always have ours.

    flashinfer: whether they are FlashInfer's.  reason: why they are not; "" if they are.
    """

    flashinfer: bool
    reason: str

    def describe(self, graphs: bool) -> str:
        """Return a description for `coverage()`.  graphs: whether decode steps are CUDA graphs."""
        if not self.flashinfer:
            return f"attention by Triton ({self.reason})"
        in_graphs = ", and by Triton in decode steps (FlashInfer plans each step on the host, a graph does not)"
        return "attention by FlashInfer" + in_graphs * graphs


def attention_settings(spec: DecoderSpec, dtype: torch.dtype) -> AttentionSettings:
    """Return the settings of a decoder's attention in `dtype`."""
    # Hugging Face's eager attention, which models with soft caps and BLOOM use, rounds the scores.
    rounded = spec.attention_softcap > 0 or (spec.alibi is not None and not spec.alibi_bfloat16)
    return AttentionSettings(
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        dtype,
        BLOCK_SIZE,
        spec.attention_scale,
        spec.attention_softcap,
        windows=tuple(sorted({layer.window for layer in spec.layers})),
        alibi=spec.alibi is not None,
        rounded=rounded,
        sinks=spec.sinks,
        latent_dim=spec.latent_dim,
    )


def choose_attention(requested: str, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> AttentionChoice:
    """Return the choice for a model.  requested: `rollout.attention_backend`."""
    if requested == "triton":
        return AttentionChoice(False, "rollout.attention_backend is triton")
    reason = flashinfer_reason(attention_settings(spec, dtype), device)
    return AttentionChoice(not reason, reason)
