"""Requests to the model in eval mode: they open the window, and ranks that compute together agree on what runs.

A rank's request may fail, or a rank may have none, at any time. If requests lead to collectives, such a rank joins
those of the other ranks with dummy steps, and raises its own error once all ranks are done.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from hybrid.decoders.fused_model import AnyDecoder, FusedModel
from hybrid.decoders.streamed_decoder import StreamedDecoder
from hybrid.execution.collective_forwards import CollectiveForwards
from hybrid.execution.group_tasks import GroupTasks, Task
from hybrid.execution.module_exchange import ModuleExchange
from hybrid.runtime.call_lock import CallLock
from hybrid.runtime.interrupts import INTERRUPTS
from hybrid.runtime.parallel import (
    InferenceGroup,
    LostRankError,
    all_gather_objects,
    described,
    is_lost_rank,
    lost_rank_reported,
    stopped,
)
from hybrid.runtime.profiling import Phase
from hybrid.runtime.waiting import waiting_to
from hybrid.weights.model_weights import adapters_text
from hybrid.weights.module_dicts import patched_attribute
from hybrid.weights.named_adapters import Adapters, RowNames, adapters_of
from hybrid.weights.weight_swap import InferenceWindow

NESTED = (
    "generate(), rollout() or score() inside a call of the same engine (by a processor, criterion, streamer, hook or "
    "on_rows): it would overwrite that call's KV cache; make it when the call has ended"
)
TURNS = "__turns__"  # among the names that ranks exchange: a rank's rows are decoded adapter by adapter


class Executor:
    """Requests of a rank that computes by itself; only the gathering of partitioned weights is a collective.

    fused: for all requests, or, with `int8`, for requests that do not decode.
    int8: for requests that decode: over int8 weights, which are refreshed as such a request begins. None: `fused`.
    lock: the engine's; the thread that runs a request holds it.
    rebuild: called before the model runs outside of a window: if its modules have changed, rebuilds what runs them, and
        gives True; these calls are then out of date.
    """

    inside = False  # a request is running: forwards of the model are part of it
    forward_thread: int | None = None  # in which a container runs the model's own forward: the lock is held there
    state: Any = None  # what a Task runs on
    exchanges_tasks = False  # ranks run each other's work, so it must not have user code
    is_joint = False  # other ranks make the same request, and its forwards have collectives

    def __init__(
        self,
        window: InferenceWindow,
        fused: FusedModel,
        lock: CallLock | None = None,
        rebuild: Callable[[], bool] = lambda: False,
        int8: FusedModel | None = None,
    ):
        self.window, self.fused, self.rebuild, self.int8 = window, fused, rebuild, int8
        self.decoding = fused if int8 is None else int8  # for requests that decode
        self.lock = CallLock() if lock is None else lock
        self.has_begun = False  # the current call has reached the exchange, or the refresh, of its request

    @contextmanager
    def call(self, adapters: Adapters | RowNames | None = None) -> Iterator[None]:
        """Wrap a user's call of at most one request, or of those of `in_turn`. If it raises before, this rank joins the
        others' collectives."""
        if self.inside:
            yield
            return
        self.has_begun = False
        try:
            yield
        except BaseException as error:
            if not self.has_begun and not INTERRUPTS.forced:
                self._join_others(self.window.resolved(adapters), error)
                self.has_begun = True  # not once more, if this call is part of another
            raise

    @property
    def is_shared(self) -> bool:
        """Whether other ranks must make the same calls, if these name adapters."""
        return self.window.is_collective

    def in_turn(self, names: Iterable[str], tokens: int | None = None) -> list[tuple[str, ...]]:
        """Return the requests of a call whose rows name adapters, and of the calls that other ranks must make with it,
        in their order: the adapters of each. A collective if `is_shared`.

        tokens: of the longest row; None: each adapter is a request of its own.
        """
        self.has_begun = True
        local: tuple[str, ...] = tuple(sorted(set(names)))
        if tokens is None or not self._decodes_fused(tokens):
            local += (TURNS,)
        agreed = self.window.agree_on(local) if self.window.is_collective else local
        return self._requests_of(agreed or ())

    def _requests_of(self, names: Iterable[str]) -> list[tuple[str, ...]]:
        """Return the requests of calls whose rows name these adapters, and TURNS if a rank's cannot be mixed."""
        adapters = tuple(name for name in names if name != TURNS)
        if TURNS not in names and self._can_mix(adapters):
            return [adapters]
        return [(name,) for name in adapters]

    @contextmanager
    def block(self, adapters: Adapters | None = None) -> Iterator[None]:
        """Open a window around the user's calls."""
        if reason := self.window.refusal():
            raise RuntimeError(reason)
        with self.window.opened(adapters, by_user=True):
            yield

    @contextmanager
    def request(
        self,
        adapters: Adapters | None = None,
        tokens: int | None = None,
        fallback_reason: str = "",
        module: str = "",
        decodes: bool = False,
    ) -> Iterator[AnyDecoder | None]:
        """Inside the block the window is open. Yields the fused decoder for sequences of up to `tokens` tokens, or None
        if the model's own modules must run.

        tokens: None if the request cannot run fused.  fallback_reason: the reason for that; "" for no warning.
        module: name of the submodule that is called directly; "" for the model.
        decodes: whether it draws tokens, and so runs over int8 weights if there are any.
        Raises NotImplementedError inside another request; RuntimeError inside a user's window in which the model was
            changed so that the call cannot run.
        """
        if self.inside:
            raise NotImplementedError(NESTED)
        if reason := self.window.refusal():
            raise RuntimeError(reason)
        self.has_begun, fused = True, self.decoding if decodes else self.fused
        together = INTERRUPTS.together() if self.is_joint else nullcontext()
        with self.window.opened(adapters) as adapters, patched_attribute(self, "inside", True), together:
            if tokens is None and fallback_reason:
                fused.note_fallback(fallback_reason)
            if fused is self.int8 and tokens is not None and not fused.fallback_reason_now(tokens):
                self._refresh_int8(fused)
            yield None if tokens is None else fused.decoder(adapters, tokens)

    def mixable_adapters(self, names: Iterable[str], tokens: int) -> tuple[str, ...]:
        """Return these adapters, but "__base__", if one request can decode the rows of all, of up to `tokens` tokens.
        Empty if it cannot, and where ranks gather or compute together."""
        requests = [] if self.is_shared else self.in_turn(names, tokens)
        adapters = adapters_of(requests[0]) if len(requests) == 1 else None
        return adapters if isinstance(adapters, tuple) else ()

    def _can_mix(self, names: Sequence[str]) -> bool:
        """Whether one request may decode rows of these adapters. All ranks of a model answer alike."""
        mixed = adapters_of(names)
        if not isinstance(mixed, tuple) or self.window.named.has_module_copies():
            return False
        with self.window.naming(mixed):
            return self.decoding.can_mix_adapters()

    def _decodes_fused(self, tokens: int) -> bool:
        """Whether the decoder has passed its self-check, which compares a window of one adapter, and rows of up to
        `tokens` tokens run fused. Runs the self-check, unless other ranks would have to open its window too."""
        fused = self.decoding
        if self.inside or fused.fallback_reason_now(tokens):
            return False
        if fused.needs_check() and not self.is_shared:
            with self.request(None, tokens, decodes=True):
                pass
        return not fused.needs_check()

    @waiting_to("refresh weights")
    def _refresh_int8(self, fused: FusedModel) -> None:
        """If `fused` runs over int8 weights, update them. Expects an open window. A collective if weights that have
        changed are partitioned."""
        adapters = self.window.uses_adapters
        if fused is not self.int8 or fused.snapshot.is_fresh(adapters):
            return
        if self.fused.stream is not None:
            self.fused.snapshot.release()  # memory of the last streamed layers
        profiler = self.window.profiler
        with lost_rank_reported("gathering the weights"):
            profiler.gathered(fused.snapshot.refresh(profiler.phase, adapters))

    def use(self, state: Any) -> None:
        """Run tasks with this worker state from now on."""
        self.state = state

    @property
    def native_group(self) -> InferenceGroup | None:
        """The ranks that run the model's own forward together for the rows of all; None: this rank alone."""
        return None

    def compute(self, decoder: AnyDecoder | None, task: Task) -> Any:
        """Return the result of work by the decoder, None for the model's own forwards, inside a request."""
        return task.run(decoder, self.state)

    def native(self, module: torch.nn.Module, forward: Callable) -> Any:
        """Return the output of a forward of the model's own, inside a request."""
        INTERRUPTS.raise_pending()
        return forward()

    def _join_others(self, adapters: Adapters | RowNames, error: BaseException) -> None:
        if not isinstance(adapters, RowNames):
            self.window.join_refresh(adapters)
        elif self.window.is_collective:
            for names in self._requests_of(self.window.agree_on(None) or ()):
                self.window.join_refresh(self.window.resolved(adapters_of(names)))


@dataclass(frozen=True)
class RequestHeader:
    """A rank's message in the exchange before a request.

    step: "request", "block" (a user's window opens), "leave" (it closes) or "names" (a request for each follows).
    adapters: of the window.
    names: of the adapters of the rank's rows.
    active: False if the rank's own request failed and it only joins with dummy steps.
    module: name of the submodule that is called directly; "" for the model.
    native, fallback_reason: whether the request cannot run fused, and why.
    needs_check: whether the rank's decoder must be checked first.
    hooked: whether the rank's forwards may fail midway, in user code.
    tokens: of the rank's longest sequence.
    rounds: of the rank's group.
    decodes: whether the request draws tokens.
    interrupt: what interrupted the rank, which ends the other ranks' calls too; "": nothing.
    weights: the active adapters, and whether weights must be refreshed.
    refusal: why the rank's request cannot run in its open window; "" if it can.
    """

    step: str
    adapters: Adapters = True
    active: bool = True
    module: str = ""
    native: bool = False
    fallback_reason: str = ""
    needs_check: bool = False
    hooked: bool = False
    tokens: int = 0
    rounds: int = 0
    decodes: bool = False
    interrupt: str = ""
    weights: str = ""
    refusal: str = ""
    names: tuple[str, ...] = ()

    @property
    def key(self) -> tuple:
        """The fields that must be equal on all ranks with a request."""
        return self.step, self.adapters, self.module, self.decodes, self.weights

    def __str__(self) -> str:
        if self.step == "leave":
            return "leaves `with engine.inference()`"
        if self.step == "names":
            return f"calls the model with an adapter for each row, {', '.join(map(repr, self.names))}"
        call = f"calls {self.module or 'the model'}" if self.step == "request" else "opens `with engine.inference()`"
        named = f"adapter={self.adapters!r}, " if isinstance(self.adapters, str) else ""
        return f"{call} with {named}{self.weights}" if self.adapters else f"{call} with adapters=False, {self.weights}"


def interrupt_of(error: BaseException | None) -> str:
    """Return the text of an error that no code has raised, but a signal; "" for others."""
    return "" if error is None or isinstance(error, Exception) else described(error)


def active_headers(headers: list[RequestHeader]) -> list[RequestHeader]:
    """Return the headers of ranks that make a request or open a window."""
    return [header for header in headers if header.step != "leave" and header.active]


def runs(headers: list[RequestHeader]) -> bool:
    """Whether the ranks' calls run. Else these ranks raise: calls differ, cannot run, or a rank was interrupted."""
    active = active_headers(headers)
    ends = any(header.interrupt or header.refusal for header in headers)
    return not ends and len({header.key for header in active}) == 1 and not active[0].module


def names_of(headers: list[RequestHeader]) -> list[str]:
    """Return the adapters for which requests follow: of the rows of all ranks."""
    return sorted({name for header in active_headers(headers) for name in header.names})


class GroupExecutor(Executor):
    """Requests of ranks that compute together: they agree on what runs, and each takes part until all are done.

    group: these ranks; None: all ranks.  native: the model's own forwards, if they are collectives.
    phase: times the wait for other ranks.
    """

    is_shared = True

    def __init__(
        self,
        window: InferenceWindow,
        fused: FusedModel,
        lock: CallLock | None,
        rebuild: Callable[[], bool],
        group: dist.ProcessGroup | None,
        native: CollectiveForwards | ModuleExchange | None,
        phase: Phase,
        int8: FusedModel | None = None,
    ):
        super().__init__(window, fused, lock, rebuild, int8)
        self.group, self.native_forwards, self.phase = group, native, phase
        self.group_tasks = None
        self.exchanges_tasks = fused.group is not None or isinstance(native, ModuleExchange)
        if fused.group is not None:
            assert window.device is not None, "ranks that compute together know their device"
            self.group_tasks = GroupTasks(fused.group, window.device)
        self.decoder: AnyDecoder | None = None  # of the running request
        self.lost = False  # a rank has ended: no further exchange is possible

    def in_turn(self, names: Iterable[str], tokens: int | None = None) -> list[tuple[str, ...]]:
        self.has_begun = True
        headers = self._exchange(self._header("names", names=tuple(names), refusal=self.window.refusal()))
        self._require_same(headers)
        return [(name,) for name in names_of(headers)]

    @contextmanager
    def block(self, adapters: Adapters | None = None) -> Iterator[None]:
        """Open a window around the user's calls. A rank that leaves it early joins the other ranks' calls until
        they leave it too.

        Raises RuntimeError, on every rank, if the ranks' calls differ; NotImplementedError inside a request with other
        `adapters`.
        """
        adapters = self.window.resolved(adapters)
        if self.inside:
            self._require_same_adapters(adapters)
            yield
            return
        self._require_same(self._exchange(RequestHeader("block", adapters, **self._state(adapters))))
        with self.window.opened(adapters, by_user=True):
            interrupt = None
            try:
                yield
            except BaseException as error:
                interrupt = error
                raise
            finally:
                if not INTERRUPTS.forced:
                    self._leave(interrupt)

    @contextmanager
    def request(
        self,
        adapters: Adapters | None = None,
        tokens: int | None = None,
        fallback_reason: str = "",
        module: str = "",
        decodes: bool = False,
    ) -> Iterator[AnyDecoder | None]:
        """As `Executor.request`. Runs fused if the decoder can run every rank's request, natively otherwise; ends when
        every rank's request has ended.

        Raises RuntimeError, on every rank, if the ranks' calls differ; LostRankError if a rank has ended;
        NotImplementedError inside another request.
        """
        if self.inside:
            raise NotImplementedError(NESTED)
        adapters = self.window.resolved(adapters)
        decodes = decodes and self.int8 is not None
        fused = self.decoding if decodes else self.fused
        if tokens is not None:
            fallback_reason = fused.fallback_reason_now(tokens)
        state = self._state(adapters)
        self.has_begun = True
        native = tokens is None or fallback_reason != ""
        needs_check = not native and fused.needs_check()
        hooked = bool(self.fused.foreign_hooks.first())
        local = self._header("request", adapters, True, module, native, fallback_reason, needs_check, hooked)
        local = replace(local, decodes=decodes, tokens=tokens or 0, **state)
        headers = self._exchange(local)
        self._require_same(headers)
        with self._running(local, headers) as decoder:
            yield decoder

    def use(self, state: Any) -> None:
        super().use(state)
        if isinstance(self.native_forwards, ModuleExchange):
            self.native_forwards.state = state

    @property
    def native_group(self) -> InferenceGroup | None:
        return self.native_forwards.group if isinstance(self.native_forwards, ModuleExchange) else None

    def compute(self, decoder: AnyDecoder | None, task: Task) -> Any:
        if decoder is None and isinstance(self.native_forwards, ModuleExchange):
            return self.native_forwards.compute(task)
        if decoder is None or self.group_tasks is None:
            return task.run(decoder, self.state)
        return self.group_tasks.run_tasks(decoder, task, self.state)

    def native(self, module: torch.nn.Module, forward: Callable) -> Any:
        if self.native_forwards is None:
            return forward()
        if self.decoder is not None:
            raise NotImplementedError(
                "the model is called inside a decode step (by a processor, criterion or streamer), where ranks decode "
                "together and its weights are not whole: other ranks would wait; use inference_tp_size 1 and "
                "pin_parameters true, or call a model of its own"
            )
        return self.native_forwards.run(module, forward)  # type: ignore[union-attr]  # a ModuleExchange's do not call this

    def _join_others(self, adapters: Adapters | RowNames, error: BaseException) -> None:
        """Join the other ranks' request, or their requests for several adapters, with dummy steps after this rank's own
        has failed."""
        if not self.lost:
            hooked, interrupt = bool(self.fused.foreign_hooks.first()), interrupt_of(error)
            header = self._header("request", active=False, hooked=hooked, interrupt=interrupt)
            headers = self._exchange(header)
            self._follow(headers)
            for _ in names_of(headers) if runs(headers) else ():
                self._follow(self._exchange(header))

    def _leave(self, error: BaseException | None = None) -> None:
        hooked, interrupt = bool(self.fused.foreign_hooks.first()), interrupt_of(error)
        while not self.lost:
            headers = self._exchange(self._header("leave", hooked=hooked, interrupt=interrupt))
            if all(header.step == "leave" for header in headers):
                return
            self._follow(headers)

    def _follow(self, headers: list[RequestHeader]) -> None:
        """Join the other ranks' request or block."""
        active = active_headers(headers)
        if not runs(headers) or active[0].step == "names":  # whose requests follow
            return
        if active[0].step == "block":
            with self.window.opened(active[0].adapters):
                self._leave()
            return
        with self._running(replace(active[0], native=False, fallback_reason="", needs_check=False), headers):
            pass

    @contextmanager
    def _running(self, local: RequestHeader, headers: list[RequestHeader]) -> Iterator[AnyDecoder | None]:
        """Run what the ranks have agreed on, and dummy steps until every rank is done. Yield the decoder, or None."""
        try:
            with (
                lost_rank_reported("computing together with it"),
                self.window.opened(local.adapters),
                patched_attribute(self, "inside", True),
                torch.no_grad(),
            ):
                self.decoder = self._agreed_decoder(local, headers)
                native = self.decoder is None
                if self.group_tasks is not None:
                    self.group_tasks.is_pending = not native
                hooked = any(header.hooked for header in headers)
                with self._native_opened(hooked, local.module) if native else nullcontext():
                    interrupt = None
                    try:
                        yield self.decoder
                    except BaseException as error:
                        self.lost = is_lost_rank(error)
                        interrupt = None if isinstance(error, Exception) else error
                        raise
                    finally:
                        if not self.lost and not INTERRUPTS.forced:
                            with self.phase("wait"):
                                self._finish(interrupt)
        except LostRankError:
            self.lost = True
            raise
        finally:
            self.decoder = None

    def _finish(self, interrupt: BaseException | None) -> None:
        """Take part in what the other ranks still want; after an interrupt, stop them."""
        if self.decoder is None:
            if self.native_forwards is not None:
                self.native_forwards.finish(interrupt)
        elif isinstance(self.decoder, StreamedDecoder):
            self.decoder.finish(interrupt)
        elif self.group_tasks is not None and self.group_tasks.is_pending:
            self.group_tasks.run_tasks(self.decoder, None, self.state)

    def _native_opened(self, guarded: bool = False, called: str = "") -> AbstractContextManager:
        return nullcontext() if self.native_forwards is None else self.native_forwards.opened(guarded, called)

    @waiting_to("check the decoder")
    def _agreed_decoder(self, local: RequestHeader, headers: list[RequestHeader]) -> AnyDecoder | None:
        fused = self.decoding if local.decodes else self.fused
        reasons = {rank: header.fallback_reason for rank, header in enumerate(headers) if header.native}
        if not reasons and fused.group is not None:
            fused.group.begin_call(header.rounds for header in headers)
        if not reasons:
            self._refresh_int8(fused)
        if not reasons and any(header.needs_check for header in headers):
            with self._native_opened(), INTERRUPTS.together():
                difference = fused.check(self.window.uses_adapters, max(header.tokens for header in headers))
            differences = all_gather_objects(difference, self.group)
            reasons = {rank: reason for rank, reason in enumerate(differences) if reason}
            if reasons:
                fused.refuse(difference or next(iter(reasons.values())))
        if not reasons:
            return fused.bound_decoder(self.window.uses_adapters)
        if not local.native:
            rank, reason = next(iter(reasons.items()))
            fused.note_fallback(
                f"a request of rank {rank}, which runs with this one's: {reason or 'it cannot run fused'}"
            )
        elif local.fallback_reason:
            fused.note_fallback(local.fallback_reason)
        return None

    def _require_same_adapters(self, adapters: Adapters) -> None:
        if adapters != self.window.adapters[-1]:
            raise NotImplementedError(
                f"adapters: {adapters} given inside a request with {self.window.adapters[-1]}, which ranks compute "
                "together; make the call after the other one"
            )

    def _state(self, adapters: Adapters) -> dict[str, Any]:
        """Return the fields of a header that say what the request computes with."""
        refusal, snapshot = self.window.refusal(), self.window.snapshot
        with self.window.naming(adapters):
            weights = adapters_text(snapshot.weights.state(bool(adapters)).adapters)
            weights += ", changed weights" * (not snapshot.is_fresh(bool(adapters)))
        return {"refusal": refusal, "weights": weights}

    def _header(self, *fields: Any, **more: Any) -> RequestHeader:
        group = self.fused.group
        more["rounds"] = 0 if group is None else group.rounds
        return RequestHeader(*fields, **more)

    @waiting_to("begin the next call")
    def _exchange(self, header: RequestHeader) -> list[RequestHeader]:
        """Every rank's header, by rank. A collective. Raises LostRankError if a rank has ended."""
        if self.lost:
            raise LostRankError("another rank has ended: nothing can be generated any more, start the run again")
        try:
            with lost_rank_reported("waiting for its next call"):
                return all_gather_objects(header, self.group)
        except LostRankError:
            self.lost = True
            raise

    def _require_same(self, headers: list[RequestHeader]) -> None:
        """Raise RuntimeError if a rank's call cannot run in its window, if calls differ, or if only some ranks call a
        submodule: it has no dummy steps; RankFailedError if a rank was interrupted."""
        if any(header.interrupt for header in headers):
            raise stopped((header.interrupt for header in headers), self.group)
        active = active_headers(headers)
        if refused := [f"rank {rank}: {header.refusal}" for rank, header in enumerate(headers) if header.refusal]:
            raise RuntimeError("; ".join(refused))
        calls_module = any(header.module for header in active)
        if len({header.key for header in active}) > 1 or (calls_module and len(active) < len(headers)):
            calls = "; ".join(f"rank {rank} {header}" for rank, header in enumerate(headers))
            raise RuntimeError(
                f"ranks make different calls: {calls}. With inference_tp_size above 1, pin_parameters=false, expert "
                "parallelism, or weight_dtype=int8 under ZeRO-3, every rank must make the same calls in the same order"
            )
