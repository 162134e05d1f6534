"""How the tokens of running sequences are sampled in several decode steps, as decoders need it."""

import ctypes
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import torch

from hybrid.decoders.batch import mark_seen
from hybrid.decoders.vocabulary import VocabularySlice
from hybrid.generation.sampler import (
    LOGPROBS,
    SamplerOutput,
    SamplingMetadata,
    sample_sharded,
    sample_tokens,
    samples_record,
)


@dataclass(frozen=True)
class TokenDraws:
    """`hybrid.decoders.batch.Draws` by one SamplingMetadata for all sequences.

    vocabulary: the slice that the decoder has logits of; None: the whole vocabulary.
    in_kernels: whether `sample` draws, with penalties; else `sample_tokens`.
    process: draws after processors instead, by `drawn_at`'s arguments.
    """

    keys: torch.Tensor
    positions: torch.Tensor
    limits: torch.Tensor
    stop_token_ids: torch.Tensor
    pad_token_id: int
    metadata: SamplingMetadata
    token_ids: torch.Tensor | None = None
    vocabulary: VocabularySlice | None = None
    in_kernels: bool = False
    process: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], SamplerOutput] | None = None

    @property
    def needs_tokens(self) -> bool:
        """Whether a draw depends on the tokens before it."""
        return self.token_ids is not None or self.process is not None

    def record(self, steps: int) -> tuple[ctypes.Structure, SamplerOutput]:
        """The C++ kernels' record of `steps` steps, and what they write, [steps, sequences]."""
        return samples_record(self.keys, self.positions, self.metadata, steps)

    @property
    def values(self) -> torch.Tensor:
        """The settings that `sample` reads on the device, float32 [6]."""
        from hybrid.kernels.triton_sampling import sampling_values  # needs triton, which a CPU install lacks

        return sampling_values(self.metadata, self.keys.device)

    @property
    def graph_key(self) -> Hashable:
        """Equal for draws that differ in nothing but their tensors."""
        if self.vocabulary is not None:
            return self.metadata
        from hybrid.kernels.triton_sampling import sampling_features

        return sampling_features(self.metadata)

    def sample(
        self,
        logits: torch.Tensor,
        keys: torch.Tensor,
        positions: torch.Tensor,
        values: torch.Tensor,
        stop_token_ids: torch.Tensor,
        seen: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        """A token for each row of logits, int64 [rows], and its three logprobs, float32 [rows] each, on the device."""
        if self.vocabulary is not None:
            drawn = sample_sharded(logits, keys, positions, self.metadata, self.vocabulary)
            return drawn.tokens, *(getattr(drawn, name) for name in LOGPROBS)
        from hybrid.kernels.triton_sampling import sample, sampling_features

        features = sampling_features(self.metadata)
        return sample(logits, keys, positions, values, features, seen, stop_token_ids)

    def drawn_at(
        self, logits: torch.Tensor, sequences: torch.Tensor, offsets: torch.Tensor, ids: torch.Tensor
    ) -> SamplerOutput:
        """A token for each row of logits, of sequence `sequences[i]`, `offsets[i]` places after its next new token and
        after token `ids[i]`."""
        if self.process is not None:
            return self.process(logits, sequences, offsets, ids)
        keys, positions = self.keys[sequences], self.positions[sequences] + offsets
        if not self.in_kernels:
            return sample_tokens(logits, keys, positions, self.metadata, self.vocabulary)
        token_ids = None if self.token_ids is None else with_drafts(self.token_ids, sequences, offsets, ids)
        return replace(self, keys=keys, positions=positions, token_ids=token_ids).drawn(logits)

    def drawn(self, logits: torch.Tensor) -> SamplerOutput:
        """A token for each row of logits [rows, vocab]."""
        seen = None if self.token_ids is None else seen_tokens(self.token_ids, logits.shape[1])
        settings = self.keys.contiguous(), self.positions.contiguous(), self.values, self.stop_token_ids
        return SamplerOutput(*self.sample(logits, *settings, seen))


def with_drafts(
    token_ids: torch.Tensor, sequences: torch.Tensor, offsets: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """The tokens before each row of `drawn_at`, int64 [rows, n], and -1 elsewhere.  token_ids: of each sequence, up to
    the token at distance 0."""
    is_before = (sequences[:, None] == sequences) & (offsets <= offsets[:, None]) & (offsets > 0)
    return torch.cat([token_ids[sequences], torch.where(is_before, ids, -1)], dim=1)


def seen_tokens(token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Which tokens each row has, uint8 [rows, vocab].  token_ids: int64 [rows, n], with -1 for no token."""
    seen = torch.zeros(len(token_ids), vocab_size + 1, dtype=torch.uint8, device=token_ids.device)
    mark_seen(seen, token_ids)
    return seen[:, :-1]
