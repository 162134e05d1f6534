"""Ranks that run a model's own modules together, on batches of their own: whoever wants a forward waits for the others
to bring what they want, if only company, and then everybody runs everybody's in turn."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import DynamicCache
from transformers.cache_utils import Cache

from hybrid.parallel import Guard, InferenceGroup, LostRankError, lost_rank_reported


@dataclass(frozen=True)
class SentTensor:
    """A tensor on its way.  on_device: whether it was where the model is, not on the host."""

    content: torch.Tensor
    on_device: bool


@dataclass(frozen=True)
class SentCache:
    """A key-value cache, of which every rank of the group has its heads, by its owner's number."""

    number: int


@dataclass(frozen=True)
class Call:
    """What a rank wants run.  part: by name.  autocast: the dtype, None where it is off.  fresh: the number of the
    cache that the model may make."""

    part: str
    args: tuple
    kwargs: dict[str, Any]
    autocast: torch.dtype | None
    fresh: int


class Meetings:
    """The meetings of a group.

    Every rank has its heads of every rank's caches: made as their owner uses them, and gone as the owner lets go, or as
    the engine leaves eval mode: nobody holds another's cache while it trains.
    parts: the modules that may be called, by name; one of them called on a rank must come here.
    new_cache: makes an empty cache of the kind that the model's `generate()` makes.
    """

    def __init__(self, group: InferenceGroup, device: torch.device, new_cache: Callable[[], Cache]):
        self.group, self.device, self.new_cache = group, device, new_cache
        self.guard = Guard(device, group.group)
        self.parts: dict[str, nn.Module] = {}
        self.running = False  # a part: what it calls runs on every rank as it is
        self.own: WeakKeyDictionary[Cache, tuple[int, int]] = WeakKeyDictionary()  # number, and tokens when last seen
        self.others: dict[tuple[int, int], Cache] = {}  # by rank and number
        self.gone: list[int] = []  # numbers of own caches that nobody holds any more
        self.numbers = count()

    def call(self, part: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What a part makes of this rank's arguments. Returns when every rank has come, and has what it wanted."""
        autocast = torch.get_autocast_dtype(self.device.type) if torch.is_autocast_enabled(self.device.type) else None
        sent_args, sent_kwargs = tree_map(self._sent, (args, kwargs), is_leaf=is_cache)
        call = Call(part, sent_args, sent_kwargs, autocast, next(self.numbers))
        _, output, failure = self._meet(call, args, kwargs)
        if failure is not None:
            raise failure
        return output

    def finish(self) -> None:
        """Run the others' forwards until every rank is done. What fails in them is raised where they came from."""
        while self._meet(None)[0]:
            pass

    def opened(self, guarded: bool) -> AbstractContextManager:
        """Inside the block requests may be made.  guarded: a forward may fail in the middle on one rank alone."""
        self.guard.is_on = guarded
        return nullcontext()

    def release(self) -> None:
        """Forget every cache: whoever still holds one cannot go on from it."""
        self.own.clear()
        self.others.clear()

    def nbytes(self) -> int:
        """Bytes of this rank's heads of others' caches."""
        layers = [layer for cache in self.others.values() for layer in cache.layers]
        held = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside the block all ranks run the same."""
        before, self.running = self.running, True
        try:
            yield
        finally:
            self.running = before

    def _meet(
        self, wanted: Call | None, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> tuple[bool, Any, Exception | None]:
        """Whether anybody wanted anything; the output of this rank's own call; and the error of this rank, if any."""
        leaving = self.gone.copy()
        del self.gone[: len(leaving)]
        with lost_rank_reported("waiting for its next request"):
            brought = self.group.gather_objects((wanted, leaving))
        outcome = failure = None
        for rank, (call, gone) in enumerate(brought):
            for number in gone:
                self.others.pop((rank, number), None)
            if call is None:
                continue
            own = rank == self.group.index
            given = (args, kwargs) if own else tree_map(partial(self._received, rank), (call.args, call.kwargs))
            try:
                output = self._run(call, *given)
            except LostRankError:
                raise
            except Exception as error:  # on every rank; it is raised where the call came from, and where it arose
                failure = error if own or self.guard.failed_here else failure
                continue
            self._keep_caches((*given, output), rank, call.fresh)
            outcome = output if own else outcome
        return any(call is not None for call, _ in brought), outcome, failure

    def _run(self, call: Call, args: tuple, kwargs: dict[str, Any]) -> Any:
        doing = lost_rank_reported("computing together with it")
        with doing, self.together(), torch.autocast(self.device.type, call.autocast, enabled=call.autocast is not None):
            return self.guard.run(lambda: self.parts[call.part].forward(*args, **kwargs))

    def _sent(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return SentTensor(leaf.detach().cpu(), leaf.device.type != "cpu")
        if not isinstance(leaf, Cache):
            return leaf
        tokens = leaf.get_seq_length()
        if leaf not in self.own and type(leaf) is DynamicCache and tokens == 0:
            self._number(leaf, next(self.numbers))
        if leaf not in self.own or self.own[leaf][1] != tokens:
            raise NotImplementedError(
                f"past_key_values: a {type(leaf).__name__} of {tokens} tokens given, which ranks of "
                "hybrid_engine.inference_tp_size do not have their heads of; what can go on are DynamicCaches that are "
                "empty, or that this engine filled since it is in eval mode and nobody has changed"
            )
        return SentCache(self.own[leaf][0])

    def _received(self, rank: int, leaf: Any) -> Any:
        if isinstance(leaf, SentTensor):
            return leaf.content.to(self.device) if leaf.on_device else leaf.content
        if not isinstance(leaf, SentCache):
            return leaf
        if (rank, leaf.number) not in self.others:
            self.others[rank, leaf.number] = self.new_cache()
        return self.others[rank, leaf.number]

    def _keep_caches(self, tree: Any, rank: int, fresh: int) -> None:
        """Note what a call did to caches: one rank's own, or those that this rank has for another."""
        for cache in filter(is_cache, tree_leaves(tree, is_leaf=is_cache)):
            if rank == self.group.index:
                if cache not in self.own:
                    self._number(cache, fresh)
                self.own[cache] = (self.own[cache][0], cache.get_seq_length())
            elif not any(cache is known for known in self.others.values()):
                self.others[rank, fresh] = cache

    def _number(self, cache: Cache, number: int) -> None:
        self.own[cache] = (number, 0)
        finalize(cache, self.gone.append, number)


def is_cache(leaf: Any) -> bool:
    """Whether something is a Hugging Face key-value cache."""
    return isinstance(leaf, Cache)
