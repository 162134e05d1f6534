"""The tokens whose keys and values blocks hold, as a tree: which blocks a prompt can begin with."""

from collections.abc import Hashable

import torch

from hybrid.decoders.batch import BLOCK_SIZE, KVWeights

TOKEN_BYTES = 8  # int64
FULL_BYTES = BLOCK_SIZE * TOKEN_BYTES


class CachedBlock:
    """A block's place in the tree.  tokens: the bytes of its token ids, int64, at most BLOCK_SIZE of them.  parent: the
    block before it in its sequence.  children: blocks that may follow, by their tokens; only a full block has any."""

    __slots__ = ("block", "children", "parent", "tokens")

    def __init__(self, parent: "CachedBlock | None" = None, tokens: bytes = b"", block: int = 0):
        self.parent, self.tokens, self.block = parent, tokens, block
        self.children: dict[bytes, CachedBlock] = {}

    def subtree(self) -> "list[CachedBlock]":
        """This block and all that follow it. Long sequences are deeper than Python's recursion."""
        found, index = [self], 0
        while index < len(found):
            found += found[index].children.values()
            index += 1
        return found


class PrefixCache:
    """Finds blocks by their content: the weights, all tokens before the block, and its own. Compared token by token."""

    def __init__(self) -> None:
        self.version: Hashable = None
        self.roots: dict[Hashable, CachedBlock] = {}  # by variant of the weights
        self.by_block: dict[int, CachedBlock] = {}
        self.root = CachedBlock()

    def __contains__(self, block: int) -> bool:
        return block in self.by_block

    def __len__(self) -> int:
        return len(self.by_block)

    def use(self, weights: KVWeights | None) -> list[int]:
        """Find and insert blocks that these weights compute, from now on; None: unknown ones. Forgets, and gives, the
        blocks that another version has computed."""
        removed = []
        if weights is None or weights.version != self.version:
            removed = list(self.by_block)
            self.roots, self.by_block = {}, {}
        self.version, variant = (None, None) if weights is None else (weights.version, weights.variant)
        self.root = self.roots.setdefault(variant, CachedBlock())
        return removed

    def match(self, token_ids: torch.Tensor) -> tuple[list[int], int | None, int]:
        """What a sequence, int64 [n] on the host, can begin with.

        Gives the blocks that hold its first tokens, BLOCK_SIZE each; the block whose content continues them the
        longest, None if none does; and how many of its tokens do.
        """
        tokens = token_ids.numpy().tobytes()
        path = self._full_blocks(tokens)
        rest, node = tokens[len(path) * FULL_BYTES :], path[-1] if path else self.root
        common, partial = max(
            ((common_tokens(child.tokens, rest), child.block) for child in node.children.values()), default=(0, None)
        )
        return [node.block for node in path], partial if common else None, common

    def num_full_blocks(self, token_ids: torch.Tensor) -> int:
        """How many full blocks of a sequence, int64 [n] on the host, are cached."""
        return len(self._full_blocks(token_ids.numpy().tobytes()))

    def _full_blocks(self, tokens: bytes) -> list[CachedBlock]:
        path, node = [], self.root
        for begin in range(0, len(tokens) - FULL_BYTES + 1, FULL_BYTES):
            node = node.children.get(tokens[begin : begin + FULL_BYTES])
            if node is None:
                break
            path.append(node)
        return path

    def insert(self, token_ids: torch.Tensor, blocks: list[int]) -> None:
        """Remember the blocks of a sequence, int64 [n] on the host. Of two of equal content the first is kept."""
        tokens, node = token_ids.numpy().tobytes(), self.root
        for begin, block in zip(range(0, len(tokens), FULL_BYTES), blocks, strict=True):
            own = tokens[begin : begin + FULL_BYTES]
            if own not in node.children:
                node.children[own] = self.by_block[block] = CachedBlock(node, own, block)
            node = node.children[own]

    def remove(self, block: int) -> list[int]:
        """Forget a block and all that follow it; gives them."""
        node = self.by_block[block]
        del node.parent.children[node.tokens]
        removed = [below.block for below in node.subtree()]
        for below in removed:
            del self.by_block[below]
        return removed


def common_tokens(tokens: bytes, others: bytes) -> int:
    """How many tokens two sequences, as bytes of int64, begin with in common."""
    if tokens[:TOKEN_BYTES] != others[:TOKEN_BYTES]:  # the usual case, and fast
        return 0
    count = min(len(tokens), len(others)) // TOKEN_BYTES
    if tokens[: count * TOKEN_BYTES] == others[: count * TOKEN_BYTES]:
        return count
    pairs = zip(memoryview(tokens).cast("q"), memoryview(others).cast("q"), strict=False)
    return next(index for index, (own, other) in enumerate(pairs) if own != other)
