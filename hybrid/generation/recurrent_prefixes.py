"""Prefixes of prompts whose recurrent states are worth keeping.

Keys and values of a token are one place in a block: sequences that begin alike share blocks. Recurrent states are those
after one token: what sequences share must be computed up to where they part, and its states copied for each.
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
    """Return full blocks that two prompts begin with, or one prompt and a cached sequence, whose states are not kept.

    They are at most as many as slots that the prompts do not need; those that spare most tokens are preferred. Kept
    states are forgotten only for what two prompts begin with.

    prompts: int64 [n] each, on the host, without duplicates.  adapters: of each, as `PackedBatch.adapters`.
    Returns adapters and token ids, int64 [n]; a prefix of another one is in an earlier list.
    """
    known = list(map(block_pool.touch_state, prompts, adapters))
    num_unused = len(block_pool.free_slots) - len(prompts)
    num_available = num_unused + len(block_pool.kept_states)
    if num_available <= 0 or not block_pool.caches_prefixes:
        return []
    keys = [(adapter, ids[:-1].numpy().tobytes()) for adapter, ids in zip(adapters, prompts, strict=True)]
    spared = spared_tokens(keys, known)
    chosen = sorted(spared, key=lambda prefix: (-spared[prefix], prefix))[:num_available]
    of_cached = set[Prefix]()
    for (adapter, tokens), ids, begin in zip(keys, prompts, known, strict=True):
        length = block_pool.blocks_before_parting(ids[:-1], adapter) * BLOCK_SIZE
        if length > begin and (adapter, tokens[: length * TOKEN_BYTES]) not in spared:
            of_cached.add((adapter, tokens[: length * TOKEN_BYTES]))
    chosen += sorted(of_cached)[: max(num_unused - len(chosen), 0)]
    return nested(chosen)


def spared_tokens(keys: list[Prefix], known: list[int]) -> dict[Prefix, int]:
    """Return the full blocks that at least two of some prompts begin with, and how many tokens are not computed again
    if these are computed once.  known: how many tokens of each prompt need not be computed in any case."""
    prefixes = set[Prefix]()
    for (adapter, tokens), (other, others) in pairwise(sorted(keys)):
        num_blocks = common_tokens(tokens, others) // BLOCK_SIZE
        if adapter == other and num_blocks:
            prefixes.add((adapter, tokens[: num_blocks * FULL_BYTES]))
    spared = {}
    for adapter, prefix in prefixes:
        length = len(prefix) // TOKEN_BYTES
        users = sum(
            own == adapter and begin < length and tokens.startswith(prefix)
            for (own, tokens), begin in zip(keys, known, strict=True)
        )
        if users > 1:
            spared[adapter, prefix] = (users - 1) * length
    return spared


def nested(prefixes: list[Prefix]) -> list[list[tuple[int, torch.Tensor]]]:
    """Return token ids, int64 [n], in lists: those that begin with another one are in a later list."""
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
