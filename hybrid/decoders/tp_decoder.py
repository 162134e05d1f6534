"""Inference tensor parallelism: makes a decoder one of a rank's slices, with sums over the ranks of its group."""

from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from hybrid.decoders.batch import PagedKV
from hybrid.decoders.decoder_weights import DecoderWeights
from hybrid.decoders.torch_decoder import Tensors, TorchDecoder
from hybrid.kernels import torch_ops
from hybrid.models.spec import DecoderLayout, ParamRef
from hybrid.runtime.parallel import InferenceGroup
from hybrid.sampling.vocabulary import VocabularySlice
from hybrid.weights.slices import Shard, shard_spec


class ShardedDecoder(TorchDecoder):
    """TorchDecoder over a rank's slices of the weights: the reference of the kernels' decoders, and what runs without
    kernels. Its functions are collectives: every rank calls them with the same tokens, and gets the same hidden states,
    and the logits of its `vocabulary`.

    weights: this rank's slices.
    group: the calling ranks. Heads, matrices and vocabulary are sharded over `group.tensor`, experts over all of it.
    more: further arguments of the decoder.
    """

    def __init__(self, layout: DecoderLayout, weights: DecoderWeights, group: InferenceGroup, **more: Any):
        self.group, self.tensor = group, group.tensor
        local = shard_spec(layout.spec, Shard(self.tensor.size, self.tensor.index))
        if self.tensor.size > 1:
            self.vocabulary = VocabularySlice(self.tensor, local.vocab_size)
        dtype = weights.embedding().dtype
        super().__init__(replace(layout, spec=local), weights.tensor, dtype, lora_deltas=weights.lora_deltas, **more)
        self.expert_shards = group.size // self.tensor.size
        self.first_expert = group.index // self.tensor.size * -(-local.num_experts // self.expert_shards)

    def _read(self, ref: ParamRef) -> torch.Tensor | None:
        return self.weights(ref)  # a slice of `select`'s result: no `select` again

    def _looked_up(self, ids: torch.Tensor) -> torch.Tensor:
        table = self.outer["embedding.weight"]
        rows = ids - self.tensor.index * len(table)
        is_own = (rows >= 0) & (rows < len(table))
        return self.tensor.sum(F.embedding(rows * is_own, table) * is_own[:, None])

    def _attention(self, index: int, x: torch.Tensor, step: Any, kv: PagedKV) -> torch.Tensor:
        return self.tensor.sum(super()._attention(index, x, step, kv))

    def _latent_attention(self, index: int, x: torch.Tensor, step: Any, kv: PagedKV) -> torch.Tensor:
        return self.tensor.sum(super()._latent_attention(index, x, step, kv))

    def _recurrent(self, index: int, x: torch.Tensor, step: Any, kv: PagedKV) -> torch.Tensor:
        return self.tensor.sum(super()._recurrent(index, x, step, kv))

    def _summed(self, x: torch.Tensor) -> torch.Tensor:
        return self.tensor.sum(x)

    def _mlp(self, index: int, x: torch.Tensor, record: torch_ops.Record | None) -> torch.Tensor:
        output = super()._mlp(index, x, record)
        return output if self.spec.layers[index].experts else self.tensor.sum(output)

    def _experts_summed(self, output: torch.Tensor) -> torch.Tensor:
        return self.group.sum(output)

    def _shared_mlp(self, block: Tensors, x: torch.Tensor) -> torch.Tensor:
        return self.tensor.sum(super()._shared_mlp(block, x))

    def _row_normed(self, block: Tensors, role: str, x: torch.Tensor) -> torch.Tensor:
        # The heads of a token are on all ranks, and so are the sums of their squares. Key heads that several ranks hold
        # are counted once for each of them, in the sum and in `size`.
        size, spec = x.shape[-1] * self.tensor.size, self.spec

        def mean_of(squares: torch.Tensor) -> torch.Tensor:
            return self.tensor.sum(squares.sum(-1, keepdim=True)) / size

        choices = spec.norm_eps, spec.norm_offset, spec.norm_float32
        return torch_ops.rms_norm(x, block[f"{role}.weight"], *choices, mean_of)
