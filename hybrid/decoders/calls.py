"""Requests to the model in eval mode: what opens the window for them, and what ranks that compute together agree on.

A rank may fail, or have nothing to do, at any moment. Where requests lead to collectives it takes part in those of the
others all the same, and raises its own error when all are done.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hybrid.call_lock import CallLock
from hybrid.parallel import LostRankError, all_objects, is_lost_rank, lost_rank_reported
from hybrid.profiling import Phase
from hybrid.weights.lend import Window


class Fused(Protocol):
    """What a request asks of the fused decoder's owner."""

    def decoder(self, adapters: bool, tokens: int) -> Any:
        """The decoder for sequences of so many tokens, checked by this rank alone; None where there is none."""

    def bound_decoder(self, adapters: bool) -> Any:
        """The decoder, which has been checked before."""

    def fallback_reason_for(self, tokens: int) -> str:
        """Why the decoder cannot run sequences of so many tokens now; "" where it can."""

    def needs_check(self) -> bool:
        """Whether the decoder must be compared with the model's own layers before it runs."""

    def check(self, adapters: bool) -> str:
        """Compare it; what differs, "" where nothing does."""

    def refuse(self, reason: str) -> None:
        """There is no decoder from now on."""

    def note_native(self, reason: str) -> None:
        """A request runs natively."""

    def has_foreign_hooks(self) -> bool:
        """Whether somebody else's code runs within the model's forwards, and may raise there."""


class Steps(Protocol):
    """Forwards that ranks run together: a decoder that they share, or the model's own modules."""

    def finish(self) -> None:
        """Run dummy steps until every rank is done."""


class NativeSteps(Steps, Protocol):
    """The model's own forwards, where they are collectives."""

    def opened(self, guarded: bool) -> AbstractContextManager:
        """Inside the block the model's own forwards run by `run`.  guarded: one may fail in the middle on one rank."""

    def run(self, module: torch.nn.Module, forward: Callable) -> Any:
        """A forward of a module, together with those of the others."""


class Calls:
    """Requests of a rank that computes by itself.

    Gathering partitioned weights is a collective all the same.  join_refresh: called where a request failed before the
    window opened, with whether it would have used adapters: takes part if the other ranks gather.
    lock: the engine's, which the thread that runs a request holds.
    """

    def __init__(
        self, window: Window, fused: Fused, join_refresh: Callable[[bool], None], lock: CallLock | None = None
    ):
        self.window, self.fused, self.join_refresh = window, fused, join_refresh
        self.lock = CallLock() if lock is None else lock
        self.inside = False  # a request runs: forwards of the model are part of it
        self.has_begun = False  # the call that runs has come to the point where ranks meet

    @contextmanager
    def call(self, adapters: bool | None = None) -> Iterator[None]:
        """The whole of a user's call, in which `request` comes at most once: where the call fails before that, the
        other ranks do not wait for this one."""
        if self.inside:
            yield
            return
        self.has_begun = False
        try:
            yield
        except Exception:
            if not self.has_begun:
                self._stand_aside(self.window.resolved(adapters))
            raise

    @contextmanager
    def block(self, adapters: bool | None = None) -> Iterator[None]:
        """A window of the user's own, around calls."""
        with self.window.opened(adapters):
            yield

    @contextmanager
    def request(
        self, adapters: bool | None = None, tokens: int | None = None, why_native: str = "", module: str = ""
    ) -> Iterator[Any]:
        """Inside the block the window is open. Gives the fused decoder for sequences of up to `tokens`, or None where
        the model's own modules must run.

        tokens: None where the request cannot run fused; `why_native` is why, "" where nobody needs to know.
        module: the name of a part of the model that is called by itself.
        """
        self.has_begun = True
        with self.window.opened(adapters), self._inside():
            yield self._own_decoder(tokens, why_native)

    def native(self, module: torch.nn.Module, forward: Callable) -> Any:
        """A forward of the model's own, inside a request."""
        return forward()

    def _own_decoder(self, tokens: int | None, why_native: str) -> Any:
        if tokens is not None:
            return self.fused.decoder(self.window.uses_adapters, tokens)
        if why_native:
            self.fused.note_native(why_native)
        return None

    @contextmanager
    def _inside(self) -> Iterator[None]:
        before, self.inside = self.inside, True
        try:
            yield
        finally:
            self.inside = before

    def _stand_aside(self, adapters: bool) -> None:
        self.join_refresh(adapters)


@dataclass(frozen=True)
class Note:
    """What a rank tells the others where they meet.

    step: "request", "block" (a window of the user's opens) or "leave" (one closes).  adapters: of the window.
    wants: false for a rank whose request failed before, and which takes part for the others alone.
    module: the name of a part that is called by itself.  native, why_native: its request cannot run fused, and why.
    needs_check: whether its decoder must be checked first.  hooked: its forwards may fail in the middle.
    """

    step: str
    adapters: bool = True
    wants: bool = True
    module: str = ""
    native: bool = False
    why_native: str = ""
    needs_check: bool = False
    hooked: bool = False

    @property
    def key(self) -> tuple:
        """What must be the same on all ranks that want anything."""
        return self.step, self.adapters, self.module

    def __str__(self) -> str:
        if self.step == "leave":
            return "leaves `with engine.inference()`"
        what = {"request": f"calls {self.module or 'the model'}", "block": "opens `with engine.inference()`"}[self.step]
        return what if self.adapters else f"{what} with adapters=False"


class SharedCalls(Calls):
    """Requests of ranks that compute together: they agree on what runs, and each takes part until all are done.

    group: these ranks; None is all of them.  native: the model's own forwards, where they are collectives.
    phase: times the waiting.
    """

    def __init__(
        self,
        window: Window,
        fused: Fused,
        join_refresh: Callable[[bool], None],
        lock: CallLock | None,
        group: dist.ProcessGroup | None,
        native: NativeSteps | None,
        phase: Phase,
    ):
        super().__init__(window, fused, join_refresh, lock)
        self.group, self.native_steps, self.phase = group, native, phase
        self.steps: Steps | None = None  # of the request that runs
        self.decoder: Any = None
        self.lost = False  # a rank has ended: nothing can be agreed on any more

    @contextmanager
    def block(self, adapters: bool | None = None) -> Iterator[None]:
        """A window of the user's own. A rank that leaves it before the others takes part in their calls until they
        leave it too."""
        adapters = self.window.resolved(adapters)
        if self.inside:
            self._require_same_adapters(adapters)
            yield
            return
        self._require_same(self._exchange(Note("block", adapters)))
        with self.window.opened(adapters):
            try:
                yield
            finally:
                self._leave()

    @contextmanager
    def request(
        self, adapters: bool | None = None, tokens: int | None = None, why_native: str = "", module: str = ""
    ) -> Iterator[Any]:
        """As Calls'. Fused where the decoder can run every rank's request, natively otherwise. Ends when every rank's
        request has."""
        adapters = self.window.resolved(adapters)
        if tokens is not None:
            why_native = self.fused.fallback_reason_for(tokens)
        if self.inside:
            yield self._nested(adapters, tokens, why_native)
            return
        self.has_begun = True
        native = tokens is None or why_native != ""
        needs_check = not native and self.fused.needs_check()
        own = Note("request", adapters, True, module, native, why_native, needs_check, self.fused.has_foreign_hooks())
        notes = self._exchange(own)
        self._require_same(notes)
        with self._running(own, notes) as decoder:
            yield decoder

    def native(self, module: torch.nn.Module, forward: Callable) -> Any:
        return forward() if self.native_steps is None else self.native_steps.run(module, forward)

    def _stand_aside(self, adapters: bool) -> None:
        """Take part in a request that failed on this rank alone, for the others."""
        if not self.lost:
            hooked = self.fused.has_foreign_hooks()
            self._follow(self._exchange(Note("request", adapters, wants=False, hooked=hooked)))

    def _leave(self) -> None:
        while not self.lost:
            notes = self._exchange(Note("leave", hooked=self.fused.has_foreign_hooks()))
            if all(note.step == "leave" for note in notes):
                return
            self._follow(notes)

    def _follow(self, notes: list[Note]) -> None:
        """Take part in what others want, where they want the same; otherwise they raise."""
        wanted = [note for note in notes if note.step != "leave" and note.wants]
        if len({note.key for note in wanted}) != 1 or wanted[0].module:
            return
        if wanted[0].step == "block":
            with self.window.opened(wanted[0].adapters):
                self._leave()
            return
        with self._running(replace(wanted[0], native=False, why_native="", needs_check=False), notes):
            pass

    @contextmanager
    def _running(self, own: Note, notes: list[Note]) -> Iterator[Any]:
        """What the ranks have agreed on, to its end."""
        try:
            with (
                lost_rank_reported("computing together with it"),
                self.window.opened(own.adapters),
                self._inside(),
                torch.no_grad(),
            ):
                guarded = any(note.hooked for note in notes)
                self.decoder = self._agreed_decoder(own, notes)
                with self._forwards(guarded) if self.decoder is None else nullcontext():
                    self.steps = self.native_steps if self.decoder is None else self.decoder
                    try:
                        yield self.decoder
                    except BaseException as error:
                        self.lost = is_lost_rank(error)
                        raise
                    finally:
                        if self.steps is not None and not self.lost:
                            with self.phase("wait"):
                                self.steps.finish()
        except LostRankError:
            self.lost = True
            raise
        finally:
            self.decoder = self.steps = None

    def _forwards(self, guarded: bool = False) -> AbstractContextManager:
        return nullcontext() if self.native_steps is None else self.native_steps.opened(guarded)

    def _agreed_decoder(self, own: Note, notes: list[Note]) -> Any:
        reasons = {rank: note.why_native for rank, note in enumerate(notes) if note.native}
        if not reasons and any(note.needs_check for note in notes):
            with self._forwards():
                differs = self.fused.check(own.adapters)
            verdicts = all_objects(differs, self.group)
            reasons = {rank: verdict for rank, verdict in enumerate(verdicts) if verdict}
            if reasons:
                self.fused.refuse(differs or next(iter(reasons.values())))
        if not reasons:
            return self.fused.bound_decoder(own.adapters)
        if not own.native:
            rank, reason = next(iter(reasons.items()))
            self.fused.note_native(f"a request of rank {rank}, which runs with this one's: {reason or 'it asks so'}")
        elif own.why_native:
            self.fused.note_native(own.why_native)
        return None

    def _nested(self, adapters: bool, tokens: int | None, why_native: str) -> Any:
        """The decoder for a request that is made while another runs."""
        self._require_same_adapters(adapters)
        if self.decoder is not None and (tokens is None or why_native):
            raise NotImplementedError(
                f"a request inside another one, whose decoder ranks run together, cannot run natively: {why_native}"
            )
        return self.decoder

    def _require_same_adapters(self, adapters: bool) -> None:
        if adapters != self.window.uses_adapters:
            raise NotImplementedError(
                f"adapters: {adapters} given inside a request with {self.window.uses_adapters}, which ranks compute "
                "together; make the call after the other one"
            )

    def _exchange(self, note: Note) -> list[Note]:
        """Every rank's note."""
        if self.lost:
            raise LostRankError("another rank has ended: nothing can be generated any more, start the run again")
        try:
            with lost_rank_reported("waiting for its next call"):
                return all_objects(note, self.group)
        except LostRankError:
            self.lost = True
            raise

    def _require_same(self, notes: list[Note]) -> None:
        """Raise RuntimeError, on every rank that wants anything, where they want different things. A part of the model
        is called by all or none: for it there are no dummy steps."""
        wanted = [note for note in notes if note.step != "leave" and note.wants]
        with_part = any(note.module for note in wanted)
        if len({note.key for note in wanted}) > 1 or (with_part and len(wanted) < len(notes)):
            said = "; ".join(f"rank {rank} {note}" for rank, note in enumerate(notes))
            raise RuntimeError(
                f"ranks make different calls: {said}. With inference_tp_size above 1, pin_parameters=false or expert "
                "parallelism, every rank must make the same calls in the same order"
            )
