"""Estimated memory of a call's forward passes (logits, activations, CUDA graphs), and the cache reserved beside it."""

from dataclasses import dataclass

from hybrid.decoders.cpu_decoder import CpuDecoder
from hybrid.decoders.fused_model import AnyDecoder
from hybrid.decoders.self_check import checked_lengths
from hybrid.decoders.streamed_decoder import StreamedDecoder
from hybrid.decoders.torch_decoder import WholeDecoder
from hybrid.generation.block_pool import BlockPool, blocks_for

LOGIT_ROWS = 256  # tokens whose logits are in memory at once while sequences are scored


@dataclass(frozen=True)
class ForwardMemory:
    """Bytes on a rank, as `Need` has them."""

    logits: int
    activations: int
    graphs: int

    @property
    def total(self) -> int:
        """All bytes."""
        return self.logits + self.activations + self.graphs


def forward_memory(decoder: AnyDecoder, rows: int, tokens: int, decodes: bool = True) -> ForwardMemory:
    """Return the memory that a decoder's forward passes need.

    rows: decoded or scored in one batch, those of other ranks included.  tokens: of each.  decodes: False: rows are
        scored alone.
    """
    whole = decoder.inner if isinstance(decoder, StreamedDecoder) else decoder
    vocabulary = decoder.vocabulary  # a rank's slice
    num_logits = decoder.spec.vocab_size if vocabulary is None else vocabulary.width
    at_once = max(min(rows * tokens, decoder.prefill_tokens), sum(checked_lengths(whole)))
    graphs = whole.loop_bytes(rows, tokens) if rows and decodes and whole is decoder else 0
    logits = logit_rows(whole, max(rows, 1), tokens, decodes) * num_logits * 4
    return ForwardMemory(logits, whole.activation_bytes(at_once), graphs)


def reserve_memory(
    decoder: AnyDecoder, block_pool: BlockPool, num_seqs: int, num_blocks: int, longest: int, decodes: bool = True
) -> None:
    """Reserve a call's blocks and recurrent states. If free memory does not hold all blocks and what forward passes
    need, the pool's limit is lowered: rows wait for others' blocks.

    num_seqs, num_blocks: the most at once.  longest: tokens of the longest sequence.  decodes: as for `forward_memory`.
    """
    forwards = forward_memory(decoder, num_seqs, longest, decodes).total
    block_pool.reserve_states(num_seqs + 1, num_blocks, forwards)
    block_pool.reserve_call(num_blocks, forwards, blocks_for(longest))
    if decoder.group is not None:
        block_pool.agree_on_call(decoder.group.gather, decoder.device)


def logit_rows(decoder: WholeDecoder | None, rows: int, tokens: int, decodes: bool = True) -> int:
    """Return the rows of logits that exist at once, temporaries counted: in a decode step (`rows` sequences), if the
    call decodes, or in scoring.

    Kernels sample and score without a copy, torch's operations make temporaries of the same size. The head makes one
    more on a GPU, where its logits are converted to float32, and so do the most probable tokens of scored prompts.
    """
    for_decoding = 3 if decoder is not None and decoder.samples_in_kernel else 5
    for_scoring = 1 if isinstance(decoder, CpuDecoder) else for_decoding
    return max(for_decoding * rows * decodes, for_scoring * min(rows * tokens, LOGIT_ROWS))
