"""How the tokens of running sequences are sampled in several decode steps, as decoders need it."""

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from hybrid.decoders.vocabulary import VocabularySlice
from hybrid.generation.sampler import (
    LOGPROBS,
    SamplerOutput,
    SamplingMetadata,
    sample_sharded,
    sample_tokens_in_torch,
    samples_record,
)
from hybrid.kernels.cpu_library import Samples


@dataclass(frozen=True)
class TokenDraws:
    """`hybrid.decoders.batch.Draws` by one SamplingMetadata for all sequences.

    vocabulary: the slice that the decoder has logits of; None: the whole vocabulary.
    """

    keys: torch.Tensor
    positions: torch.Tensor
    limits: torch.Tensor
    stop_token_ids: torch.Tensor
    pad_token_id: int
    metadata: SamplingMetadata
    token_ids: torch.Tensor | None = None
    vocabulary: VocabularySlice | None = None

    def record(self, steps: int) -> tuple[Samples, SamplerOutput]:
        """The C++ kernels' record of `steps` steps, and what they write, [steps, sequences]."""
        return samples_record(self.keys, self.positions, self.metadata, steps)

    @property
    def values(self) -> torch.Tensor:
        """The settings that `sample` reads on the device, float32 [2]."""
        return torch.tensor([self.metadata.temperature, self.metadata.min_p], device=self.keys.device)

    @property
    def graph_key(self) -> Hashable:
        """Equal for draws that differ in nothing but their tensors."""
        return self.metadata

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
        if self.metadata.top_k or self.metadata.top_p < 1:
            drawn = sample_tokens_in_torch(logits, keys, positions, self.metadata)
            return drawn.tokens, *(getattr(drawn, name) for name in LOGPROBS)
        from hybrid.kernels.triton_sampling import sample

        return sample(logits, keys, positions, *(value.repeat(len(keys)) for value in values))
