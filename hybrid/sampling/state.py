"""The sampling of running sequences in decode steps."""

import ctypes
from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch

from hybrid.sampling.params import RowParams
from hybrid.sampling.sampler import SamplerOutput, in_fields, sample_sharded, sample_tokens, samples_record
from hybrid.sampling.vocabulary import VocabularySlice


@dataclass(frozen=True)
class SamplingState:
    """The sampling of running sequences in one or more decode steps.

    keys: int64 [sequences], of the RNG.
    positions: int64 [sequences], the index of the next new token in each sequence's completion.
    limits: int64 [sequences], the most new tokens.
    stop_token_ids: int64 [n].
    pad_token_id: of ended sequences.
    params: of the sequences.
    token_ids: int64 [sequences, n], each sequence's tokens so far, and -1 elsewhere; None if no sequence has a
        repetition penalty.
    vocabulary: the slice that the decoder has logits of; None: the whole vocabulary.
    in_kernels: whether `sample_in_kernels` samples, with penalties; else `sample_tokens`.
    """

    keys: torch.Tensor
    positions: torch.Tensor
    limits: torch.Tensor
    stop_token_ids: torch.Tensor
    pad_token_id: int
    params: RowParams
    token_ids: torch.Tensor | None = None
    vocabulary: VocabularySlice | None = None
    in_kernels: bool = False

    def record(self, steps: int) -> tuple[ctypes.Structure, SamplerOutput]:
        """Return the C++ kernels' record of `steps` steps, and the output that they write, [steps, sequences]."""
        return samples_record(self.keys, self.positions, self.params, steps)

    @property
    def values(self) -> torch.Tensor:
        """The settings that `sample_in_kernels` reads on the device, float32 [sequences, 6]."""
        from hybrid.kernels.triton_sampling import values_of_rows  # needs triton, which a CPU install lacks

        return values_of_rows(self.params.table, self.params.index, len(self.keys), self.keys.device)

    @property
    def graph_key(self) -> Hashable:
        """Equal for states that differ in nothing but their tensors."""
        if self.vocabulary is not None:
            return self.params.key
        from hybrid.kernels.triton_sampling import sampling_features

        return sampling_features(self.params.table)

    def sample_in_kernels(
        self,
        logits: torch.Tensor,
        keys: torch.Tensor,
        positions: torch.Tensor,
        values: torch.Tensor,
        stop_token_ids: torch.Tensor,
        seen: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        """Sample on the device, without waiting for it.

        Args:
            logits: [rows, vocab], of any floating type.
            keys: as the field's, of each row; likewise positions.
            positions: int64 [rows].
            values: float32 [rows, 6], as the property's.
            stop_token_ids: int64 [n].
            seen: uint8 [rows, vocab], 1 for the tokens of `token_ids`; None without them.

        Returns:
            A token for each row, int64 [rows], its three logprobs and its sampling mask, float32 [rows] each.
        """
        if self.vocabulary is not None:
            assert self.params.is_uniform, (
                "a graph samples from slices of the vocabulary with the same settings in each row"
            )
            return in_fields(sample_sharded(logits.float(), keys, positions, self.params, self.vocabulary, values))
        from hybrid.kernels.triton_sampling import sample, sampling_features

        features = sampling_features(self.params.table)
        return sample(logits, keys, positions, values, features, seen, stop_token_ids)

    def sample_at(self, logits: torch.Tensor, sequences: torch.Tensor, offsets: torch.Tensor) -> SamplerOutput:
        """Sample a token for each row of logits, where sequences have several rows. Expects no `token_ids`.

        Args:
            logits: float32 [rows, vocab].
            sequences: int64 [rows], the sequence of each row.
            offsets: int64 [rows], the distance of each row's token from the sequence's next new token.
        """
        keys, positions = self.keys[sequences], self.positions[sequences] + offsets
        params = self.params.select(sequences)
        if not self.in_kernels:
            return sample_tokens(logits, keys, positions, params, self.vocabulary)
        return replace(self, keys=keys, positions=positions, params=params).sample(logits)

    def sample(self, logits: torch.Tensor) -> SamplerOutput:
        """Sample a token for each sequence from logits, float32 [sequences, vocab]."""
        seen = None if self.token_ids is None else seen_tokens(self.token_ids, logits.shape[1])
        settings = self.keys.contiguous(), self.positions.contiguous(), self.values, self.stop_token_ids
        return SamplerOutput(*self.sample_in_kernels(logits, *settings, seen))


def seen_tokens(token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return 1 for each row's tokens, uint8 [rows, vocab].  token_ids: int64 [rows, n], with -1 for no token."""
    seen = torch.zeros(len(token_ids), vocab_size + 1, dtype=torch.uint8, device=token_ids.device)
    mark_seen(seen, token_ids)
    return seen[:, :-1]


def mark_seen(seen: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Set the tokens that each row has to 1.  seen: uint8 [rows, vocab + 1], its last column for no token.  token_ids:
    int64 [rows, n], with -1 for no token."""
    seen.scatter_(1, token_ids.masked_fill(token_ids < 0, seen.shape[1] - 1), 1)
