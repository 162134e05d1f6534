"""Prefixes of prompts whose recurrent states are worth keeping.

Keys and values of a token are one place in a block: sequences that begin alike share blocks. Recurrent states are those
after one token: what sequences share must be computed up to where they diverge, and its states copied for each.
"""

from itertools import pairwise

import torch

from hybrid.generation.block_pool import (
    BLOCK_SIZE,
    FULL_BYTES,
    TOKEN_BYTES,
    BlockPool,
    common_tokens,
)

Prefix = tuple[int, bytes]  # an adapter's number, as `PackedBatch.adapters`, and token ids, int64


def shared_prefixes(
    block_pool: BlockPool, prompts: list[torch.Tensor], adapters: list[int]
) -> list[list[tuple[int, torch.Tensor]]]:
    """Return the prefixes, in whole blocks, whose states are worth computing and keeping.

    These are the prefixes that two prompts share, and those that one prompt shares with a cached sequence that then
    diverges. There are at most as many as slots that the prompts do not need; the ones that save most tokens are
    chosen. For prefixes of a single prompt at most one kept state is evicted.

    prompts: int64 [n] each, on the host, without duplicates.  adapters: of each, as `PackedBatch.adapters`.
    Returns adapters and token ids, int64 [n]; a prefix of another one is in an earlier list.
    """
    known = list(map(block_pool.touch_state, prompts, adapters))
    num_unused = len(block_pool.free_slots) - len(prompts)
    num_available = num_unused + len(block_pool.kept_states)
    if num_available <= 0 or not block_pool.caches_prefixes:
        return []
    keys = [(adapter, ids[:-1].numpy().tobytes()) for adapter, ids in zip(adapters, prompts, strict=True)]
    saved = saved_tokens(keys, known)
    chosen = sorted(saved, key=lambda prefix: (-saved[prefix], prefix))[:num_available]
    of_cached = set[Prefix]()
    for (adapter, tokens), ids, begin in zip(keys, prompts, known, strict=True):
        length = block_pool.blocks_before_divergence(ids[:-1], adapter) * BLOCK_SIZE
        if length > begin and (adapter, tokens[: length * TOKEN_BYTES]) not in saved:
            of_cached.add((adapter, tokens[: length * TOKEN_BYTES]))
    most = max(num_unused, min(num_available, len(chosen) + 1)) - len(chosen)
    chosen += sorted(of_cached, key=lambda prefix: (-len(prefix[1]), prefix))[:most]
    return nested(chosen)


def common_to_two(sequences: list[bytes]) -> set[bytes]:
    """Return the longest prefixes that two of the sequences share: where sequences diverge, or one ends."""
    return {one[: common_tokens(one, other) * TOKEN_BYTES] for one, other in pairwise(sorted(sequences))}


def saved_tokens(keys: list[Prefix], known: list[int]) -> dict[Prefix, int]:
    """Return the full blocks that at least two of some prompts begin with, and how many tokens are not computed again
    if these are computed once.  known: how many tokens of each prompt need not be computed in any case."""
    prefixes = {
        (adapter, prefix[: len(prefix) // FULL_BYTES * FULL_BYTES])
        for adapter in {adapter for adapter, _ in keys}
        for prefix in common_to_two([tokens for other, tokens in keys if other == adapter])
        if len(prefix) >= FULL_BYTES
    }
    saved = {}
    for adapter, prefix in prefixes:
        length = len(prefix) // TOKEN_BYTES
        users = sum(
            own == adapter and begin < length and tokens.startswith(prefix)
            for (own, tokens), begin in zip(keys, known, strict=True)
        )
        if users > 1:
            saved[adapter, prefix] = (users - 1) * length
    return saved


def nested(prefixes: list[Prefix]) -> list[list[tuple[int, torch.Tensor]]]:
    """Return token ids, int64 [n], in lists, to be computed in this order: a prefix comes in an earlier list than those
    that extend it."""
    levels: list[list[Prefix]] = []
    for adapter, tokens in sorted(prefixes, key=lambda prefix: (len(prefix[1]), prefix)):
        level = max(
            (
                number + 1
                for number, others in enumerate(levels)
                for other, shorter in others
                if other == adapter and tokens.startswith(shorter)
            ),
            default=0,
        )
        levels += [[]] * (level == len(levels))
        levels[level].append((adapter, tokens))
    return [
        [(adapter, torch.frombuffer(bytearray(tokens), dtype=torch.int64)) for adapter, tokens in level]
        for level in levels
    ]
