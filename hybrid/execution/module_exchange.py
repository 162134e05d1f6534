"""Runs a model's own modules tensor-parallel: all ranks run every rank's work as one batch, and single calls in rank
order.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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

from hybrid.execution.group_tasks import Task, packed_task, run_tasks, unpacked_task
from hybrid.kernels.host_group import on_host
from hybrid.runtime.interrupts import INTERRUPTS
from hybrid.runtime.parallel import (
    Guard,
    InferenceGroup,
    LostRankError,
    all_gather_objects,
    described,
    lost_rank_reported,
    stopped,
)
from hybrid.runtime.waiting import waiting_to
from hybrid.weights.module_dicts import patched_attribute


@dataclass(frozen=True)
class SentCache:
    """A reference to a KV cache, by its owner's number. Every rank of the group holds its own heads of the cache."""

    number: int


@dataclass(frozen=True)
class Call:
    """A rank's call of a module.

    part: the module's name.  autocast: its dtype; None: off.  fresh: the number for a cache that the model makes.
    """

    part: str
    args: tuple
    kwargs: dict[str, Any]
    autocast: torch.dtype | None
    fresh: int


class ModuleExchange:
    """Exchanges of module calls among the ranks of a group.

    Every rank holds its own heads of every rank's caches. A cache is made when its owner first uses it, and freed when
    the owner frees its own or the engine leaves eval mode.
    parts: the modules that may be called, by name. A call of one of them on a rank must go through `call`.
    new_cache: makes an empty cache of the kind that the model's `generate()` makes.
    """

    def __init__(self, group: InferenceGroup, device: torch.device, new_cache: Callable[[], Cache]):
        self.group, self.device, self.new_cache = on_host(group, device), device, new_cache
        self.guard = Guard(device, group.group)
        self.parts: dict[str, nn.Module] = {}
        self.running = False  # a module runs on every rank: the modules that it calls need no exchange
        self.caches: WeakKeyDictionary[Cache, tuple[int, int]] = (
            WeakKeyDictionary()
        )  # number, tokens after the last call
        self.others: dict[tuple[int, int], Cache] = {}  # other ranks' caches, by rank and number
        self.freed: list[int] = []  # numbers of own caches that have been freed
        self.state: Any = None  # what work runs on, from `GroupExecutor.use`
        self.numbers = count()

    def call(self, part: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the output of a module for this rank's arguments. Returns once every rank has joined and its call has
        run.

        Raises what the module raised; RuntimeError if it failed on another rank; LostRankError if a rank has ended;
        NotImplementedError for a cache that the other ranks do not hold.
        """
        autocast = torch.get_autocast_dtype(self.device.type) if torch.is_autocast_enabled(self.device.type) else None
        INTERRUPTS.raise_pending()
        sent_args, sent_kwargs = tree_map(self._sent, (args, kwargs), is_leaf=is_cache)
        call = Call(part, sent_args, sent_kwargs, autocast, next(self.numbers))
        _, output, failure = self._exchange(call, args, kwargs)
        if failure is not None:
            raise failure
        return output

    def compute(self, task: Task) -> Any:
        """Return the result of work by the model's own forwards, which every rank runs on all ranks' rows. As
        `call`."""
        INTERRUPTS.raise_pending()
        _, result, failure = self._exchange(task)
        if failure is not None:
            raise failure
        return result

    def finish(self, interrupt: BaseException | None = None) -> None:
        """Run the other ranks' calls until every rank is done; after an interrupt of this rank, stop the others. An
        error is raised on the rank that made the call."""
        while self._exchange(None, interrupt="" if interrupt is None else described(interrupt))[0]:
            pass

    def opened(self, guarded: bool, called: str = "") -> AbstractContextManager:
        """Inside the block, requests may be made.  guarded, called: as for `CollectiveForwards.opened`."""
        self.guard.is_on = guarded
        return nullcontext()

    def release(self) -> None:
        """Drop all caches. A cache that a caller still holds cannot be continued."""
        self.caches.clear()
        self.others.clear()

    def nbytes(self) -> int:
        """Return the bytes of this rank's heads of other ranks' caches."""
        layers = [layer for cache in self.others.values() for layer in cache.layers]
        held = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def together(self) -> AbstractContextManager:
        """Inside the block, all ranks run the same modules without an exchange."""
        return patched_attribute(self, "running", True)

    @waiting_to("exchange prompts")
    def _exchange(
        self,
        own_call: Call | Task | None,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
        interrupt: str = "",
    ) -> tuple[bool, Any, Exception | None]:
        """Run the ranks' calls and tasks. Return whether there was any, the output of this rank's, and its error.

        Raises RankFailedError if another rank was interrupted.
        """
        freed = self.freed.copy()
        del self.freed[: len(freed)]
        with lost_rank_reported("waiting for its next request"):
            message = own_call, freed, self.group.rounds, self.state.profiler.refresh_s(), interrupt
            messages = all_gather_objects(packed_task(message), self.group.group)
        messages = [unpacked_task(message, self.device) for message in messages]
        self.group.begin_call(rounds for _, _, rounds, *_ in messages)
        self.state.profiler.group_refreshed(seconds for *_, seconds, _ in messages)
        for rank, (_, freed, *_) in enumerate(messages):
            for number in freed:
                self.others.pop((rank, number), None)
        wanted, interrupts = any(call is not None for call, *_ in messages), [text for *_, text in messages]
        if wanted and any(interrupts):
            if interrupt:
                return True, None, None
            raise stopped(interrupts, self.group.group)
        tasks = [call if isinstance(call, Task) else None for call, *_ in messages]
        own_task = own_call if isinstance(own_call, Task) else None
        own_output, failure = self._compute(tasks, own_task)
        for rank, (call, *_) in enumerate(messages):
            if not isinstance(call, Call):
                continue
            is_local = rank == self.group.index
            inputs = (args, kwargs) if is_local else tree_map(partial(self._received, rank), (call.args, call.kwargs))
            try:
                output = self._run(call, *inputs)
            except LostRankError:
                raise
            except Exception as error:  # on every rank; the calling rank and the rank where it arose raise it
                failure = error if is_local or self.guard.failed_here else failure
                continue
            self._keep_caches((*inputs, output), rank, call.fresh)
            own_output = output if is_local else own_output
        return wanted, own_output, failure

    def _compute(self, tasks: list[Task | None], local: Task | None) -> tuple[Any, Exception | None]:
        """Run the ranks' tasks. Return the result of this rank's task, and its error."""
        try:
            with lost_rank_reported("computing together with it"), self.together(), INTERRUPTS.together():
                run = partial(run_tasks, tasks, local, self.group.index, None, self.state)
                return self.guard.run(run) if any(tasks) else (None, None)
        except LostRankError:
            raise
        except Exception as error:  # on every rank; the ranks with work and the rank where it arose raise it
            return None, error if local is not None or self.guard.failed_here else None

    def _run(self, call: Call, args: tuple, kwargs: dict[str, Any]) -> Any:
        autocast = torch.autocast(self.device.type, call.autocast, enabled=call.autocast is not None)
        with lost_rank_reported("computing together with it"), self.together(), INTERRUPTS.together(), autocast:
            return self.guard.run(lambda: self.parts[call.part].forward(*args, **kwargs))

    def _sent(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().clone()  # a view would be sent with all of its storage
        if not isinstance(leaf, Cache):
            return leaf
        tokens = leaf.get_seq_length()
        if leaf not in self.caches and type(leaf) is DynamicCache and tokens == 0:
            self._number(leaf, next(self.numbers))
        if leaf not in self.caches or self.caches[leaf][1] != tokens:
            raise NotImplementedError(
                f"past_key_values: a {type(leaf).__name__} of {tokens} tokens given, which ranks of "
                "hybrid_engine.inference_tp_size do not hold their heads of; allowed are DynamicCaches that are empty, "
                "or that only this engine has filled since eval()"
            )
        return SentCache(self.caches[leaf][0])

    def _received(self, rank: int, leaf: Any) -> Any:
        if not isinstance(leaf, SentCache):
            return leaf
        if (rank, leaf.number) not in self.others:
            self.others[rank, leaf.number] = self.new_cache()
        return self.others[rank, leaf.number]

    def _keep_caches(self, tree: Any, rank: int, fresh: int) -> None:
        """Record the caches of a call: this rank's own, or this rank's heads of another rank's."""
        for cache in filter(is_cache, tree_leaves(tree, is_leaf=is_cache)):
            if rank == self.group.index:
                if cache not in self.caches:
                    self._number(cache, fresh)
                self.caches[cache] = (self.caches[cache][0], cache.get_seq_length())
            elif not any(cache is other for other in self.others.values()):
                self.others[rank, fresh] = cache

    def _number(self, cache: Cache, number: int) -> None:
        self.caches[cache] = (number, 0)
        finalize(cache, self.freed.append, number)


def is_cache(leaf: Any) -> bool:
    """Whether `leaf` is a Hugging Face KV cache."""
    return isinstance(leaf, Cache)
