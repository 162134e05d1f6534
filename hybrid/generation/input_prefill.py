"""Prompts with inputs besides token ids, such as images, before a fused decoder: the model's own forward computes them,
and the decoder goes on from its keys, values and recurrent states.
"""

from typing import Any

import torch
from torch.nn import functional as F

from hybrid.decoders.batch import packed
from hybrid.generation.block_pool import BlockPool, blocks_for
from hybrid.generation.hf_cache import RECURRENT_LAYERS, STATES, has_keys, layers_of
from hybrid.generation.native_check import difference, largest_difference
from hybrid.generation.native_rows import NativeRows
from hybrid.generation.native_scheduler import NativeModel
from hybrid.kernels import torch_ops
from hybrid.kernels.torch_delta_net import GatedDeltaNet
from hybrid.kernels.torch_short_conv import ShortConv
from hybrid.models.model_inputs import RowInputs
from hybrid.models.spec import DecoderSpec, RopeTable


def unsupported(spec: DecoderSpec) -> str:
    """Return why a decoder cannot go on from what the model's own forward has computed; "" if it can."""
    if spec.latent_dim:
        return "latent attention keeps its own latents"
    if spec.recurrent is not None and not isinstance(spec.recurrent, GatedDeltaNet | ShortConv):
        return spec.recurrent_reason("have states of another layout than the model's own")
    return ""


class InputPrefill:
    """Prefill by the model's own forward, a prompt at a time, so that a row's tokens do not depend on other prompts.

    Blocks of such prompts are not kept for later calls: equal placeholders may stand for other images.

    native: the model.  decoder: a WholeDecoder, for what follows, over the blocks of `block_pool`.
    """

    def __init__(self, native: NativeModel, decoder: Any, block_pool: BlockPool):
        self.native, self.decoder, self.block_pool = native, decoder, block_pool

    def prefill(
        self, prompt: torch.Tensor, model_inputs: RowInputs, state_slot: int = 0
    ) -> tuple[list[int], torch.Tensor]:
        """Run a prompt, int64 [n] on the host, with its inputs; returns its blocks, and the logits after it, float32
        [vocab].  state_slot: for its recurrent states, if there are any."""
        rows, logits = self.native.prefill([prompt], [model_inputs])
        blocks = self.block_pool.allocate(blocks_for(len(prompt)))
        self.block_pool.prefilled_tokens += len(prompt)
        self._write(rows, prompt, blocks, state_slot)
        return blocks, logits[0]

    def _write(self, rows: NativeRows, prompt: torch.Tensor, blocks: list[int], state_slot: int) -> None:
        """Write the one row's keys, values and states to its blocks and its slot.

        A sliding window's layer has the latest tokens alone. Those before are never attended to, but kernels multiply
        their values by 0: they are 0.
        """
        spec, rotary, kv = self.decoder.spec, self.decoder.layout.rotary, self.block_pool.kv
        batch = packed([prompt], [0], [blocks], self.decoder.device)
        shift = len(prompt) - next_position(rows, len(prompt))
        assert not shift or not spec.query_scale_positions, "the scale of a query depends on its position"
        for index, (layer, filled) in enumerate(zip(spec.layers, layers_of(rows.forward.cache), strict=True)):
            if has_keys(filled):
                keys, values = (part[0].transpose(0, 1) for part in (filled.keys, filled.values))
                if shift and layer.rotary:
                    keys = moved(keys, shift, rotary[layer.rotary], spec.rotary_interleaved)
                whole = (F.pad(part, (0, 0, 0, 0, len(prompt) - len(part), 0)) for part in (keys, values))
                self.decoder.write_kv(batch, kv, index, *whole)
            if isinstance(filled, RECURRENT_LAYERS):
                states = [state for name in STATES for state in getattr(filled, name).values() if state is not None]
                latest, *matrices = (state[0] for state in states)
                *of_matrices, of_latest = kv.states[index]
                for held, matrix in zip(of_matrices, matrices, strict=True):
                    held[state_slot].zero_()[..., : matrix.shape[-1]].copy_(matrix)  # the rest pads it to whole vectors
                inputs = latest[:, -of_latest.shape[1] :].T
                if self.decoder.latest_is_ring:
                    inputs = in_ring(inputs, len(prompt), of_latest.shape[1])
                of_latest[state_slot].copy_(inputs)

    def difference(self, prompt: torch.Tensor, model_inputs: RowInputs) -> float:
        """Return how far a decode step of a prompt's last token is from the model's own forward over all of them, in
        nats.  The last two tokens must not be placeholders."""
        pool, length = self.block_pool, len(prompt)
        self.decoder.reserve(length)
        slots = pool.allocate_states(1)
        blocks, _ = self.prefill(prompt[:-1], model_inputs, slots[0])
        blocks += pool.allocate(blocks_for(length) - len(blocks))
        states = None if pool.shares_prefixes else slots
        batch = packed([prompt[-1:]], [length - 1], [blocks], self.decoder.device, states)
        logits = self.decoder.logits(self.decoder.forward(batch, pool.kv))
        pool.free(blocks)
        pool.free_states(slots)
        return difference(logits, self.native.prefill([prompt], [model_inputs])[1])

    def refusal(self, prompt: torch.Tensor, model_inputs: RowInputs) -> str:
        """Return why decoding must not go on from such a prompt, by the self-check; "" if it may."""
        nats = self.difference(prompt, model_inputs)
        if nats <= largest_difference(self.native.model):
            return ""
        return f"self-check: a decode step behind an image differs from the model's own forward by {nats:.2g} nats"


def in_ring(latest: torch.Tensor, length: int, size: int) -> torch.Tensor:
    """Return a convolution's latest inputs of a sequence of `length` tokens, [n, channels], in the order of a ring of
    `size`, at least n: those before them are 0."""
    return F.pad(latest, (0, 0, size - len(latest), 0)).roll(length, dims=0)


def next_position(rows: NativeRows, length: int) -> int:
    """Return the position that the model gives the token after a row of `length` tokens. The tokens of an image may
    have fewer positions than they are, on several axes (arXiv:2409.12191); text has the same on all."""
    positions = rows.forward.kwargs.get("position_ids")
    return length if positions is None else int(positions.flatten(0, -2)[-1, -1])


def moved(keys: torch.Tensor, by: int, table: RopeTable, interleaved: bool) -> torch.Tensor:
    """Return keys [tokens, kv_heads, head_dim] after rope, each at `by` positions more.

    Attention sees differences of positions alone: behind keys so moved, a decoder's positions count tokens.
    """
    cos, sin = table(torch.tensor([by], device=keys.device), torch.float32)
    scale = torch.rsqrt(cos * cos + sin * sin)  # of a table that scales attention, as YaRN's: keys have it already
    return torch_ops.rotated(keys.float(), cos * scale, sin * scale, interleaved).to(keys.dtype)
