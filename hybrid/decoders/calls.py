"""Requests to the model in eval mode: they open the window, and ranks that compute together agree on what runs.

A rank's request may fail, or a rank may have none, at any time. If requests lead to collectives, such a rank joins
those of the other ranks with dummy steps, and raises its own error once all ranks are done.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from hybrid.call_lock import CallLock
from hybrid.decoders.collective_forwards import CollectiveForwards
from hybrid.decoders.fused_model import AnyDecoder, FusedModel
from hybrid.decoders.group_work import GroupWork, Work
from hybrid.decoders.streamed_decoder import StreamedDecoder
from hybrid.decoders.tp_forwards import ModuleExchange
from hybrid.parallel import LostRankError, all_gather_objects, is_lost_rank, lost_rank_reported
from hybrid.profiling import Phase
from hybrid.weights.lend import Window
from hybrid.weights.module_tables import attribute


class Calls:
    """Requests of a rank that computes by itself; only the gathering of partitioned weights is a collective.

    fused: for all requests, or, with `int8`, for those that do not decode.
    int8: for requests that decode: over int8 weights, which are refreshed as such a request begins. None: `fused`.
    lock: the engine's; the thread that runs a request holds it.
    rebuild: called before the model runs outside of a window: if its modules have changed, rebuilds what runs them, and
        gives True; these calls are then out of date.
    """

    inside = False  # a request is running: forwards of the model are part of it
    resources: Any = None  # what a Work runs on
    exchanges_work = False  # ranks run each other's work, so it must not have user code

    def __init__(
        self,
        window: Window,
        fused: FusedModel,
        lock: CallLock | None = None,
        rebuild: Callable[[], bool] = lambda: False,
        int8: FusedModel | None = None,
    ):
        self.window, self.fused, self.rebuild, self.int8 = window, fused, rebuild, int8
        self.lock = CallLock() if lock is None else lock
        self.has_begun = False  # the current call has reached the exchange, or the refresh, of its request

    @contextmanager
    def call(self, adapters: bool | None = None) -> Iterator[None]:
        """Wraps a user's call of at most one request. If it raises before, this rank joins the others' collectives."""
        if self.inside:
            yield
            return
        self.has_begun = False
        try:
            yield
        except Exception:
            if not self.has_begun:
                self._join_others(self.window.resolved(adapters))
            raise

    @contextmanager
    def block(self, adapters: bool | None = None) -> Iterator[None]:
        """A window that the user opens around calls."""
        with self.window.opened(adapters):
            yield

    @contextmanager
    def request(
        self,
        adapters: bool | None = None,
        tokens: int | None = None,
        fallback_reason: str = "",
        module: str = "",
        decodes: bool = False,
    ) -> Iterator[AnyDecoder | None]:
        """Inside the block the window is open. Gives the fused decoder for sequences of up to `tokens` tokens, or None
        if the model's own modules must run.

        tokens: None if the request cannot run fused.  fallback_reason: the reason for that; "" for no warning.
        module: name of the submodule that is called directly; "" for the model.
        decodes: whether it draws tokens, and so runs over int8 weights if there are any.
        """
        self.has_begun, fused = True, self.fused_for(decodes)
        with self.window.opened(adapters), attribute(self, "inside", True):
            if tokens is None and fallback_reason:
                fused.note_fallback(fallback_reason)
            if fused is self.int8 and tokens is not None and not fused.fallback_reason_now(tokens):
                self._refresh_int8(fused)
            yield None if tokens is None else fused.decoder(self.window.uses_adapters, tokens)

    def fused_for(self, decodes: bool) -> FusedModel:
        """What runs requests that decode, or those that do not."""
        return self.int8 if decodes and self.int8 is not None else self.fused

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

    def use(self, resources: Any) -> None:
        """Run work on these resources from now on."""
        self.resources = resources

    def compute(self, decoder: AnyDecoder | None, work: Work) -> Any:
        """The result of work by the decoder, None for the model's own forwards, inside a request."""
        return work.run(decoder, self.resources)

    def native(self, module: torch.nn.Module, forward: Callable) -> Any:
        """The output of a forward of the model's own, inside a request."""
        return forward()

    def _join_others(self, adapters: bool) -> None:
        self.window.join_refresh(adapters)


@dataclass(frozen=True)
class RequestHeader:
    """A rank's message in the exchange before a request.

    step: "request", "block" (a user's window opens) or "leave" (it closes).
    adapters: of the window.
    active: False if the rank's own request failed and it only joins with dummy steps.
    module: name of the submodule that is called directly; "" for the model.
    native, fallback_reason: whether the request cannot run fused, and why.
    needs_check: whether the rank's decoder must be checked first.
    hooked: whether the rank's forwards may fail midway, in user code.
    rounds: of the rank's group.
    decodes: whether the request draws tokens.
    """

    step: str
    adapters: bool = True
    active: bool = True
    module: str = ""
    native: bool = False
    fallback_reason: str = ""
    needs_check: bool = False
    hooked: bool = False
    rounds: int = 0
    decodes: bool = False

    @property
    def key(self) -> tuple:
        """The fields that must be equal on all ranks with a request."""
        return self.step, self.adapters, self.module, self.decodes

    def __str__(self) -> str:
        if self.step == "leave":
            return "leaves `with engine.inference()`"
        call = f"calls {self.module or 'the model'}" if self.step == "request" else "opens `with engine.inference()`"
        return call if self.adapters else f"{call} with adapters=False"


def active_headers(headers: list[RequestHeader]) -> list[RequestHeader]:
    """The headers of ranks that make a request or open a window."""
    return [header for header in headers if header.step != "leave" and header.active]


class SharedCalls(Calls):
    """Requests of ranks that compute together: they agree on what runs, and each takes part until all are done.

    group: these ranks; None: all ranks.  native: the model's own forwards, if they are collectives.
    phase: times the wait for other ranks.
    """

    def __init__(
        self,
        window: Window,
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
        self.group_work = None
        self.exchanges_work = fused.group is not None or isinstance(native, ModuleExchange)
        if fused.group is not None:
            self.group_work = GroupWork(fused.group, window.device)
        self.decoder: AnyDecoder | None = None  # of the running request
        self.lost = False  # a rank has ended: no further exchange is possible

    @contextmanager
    def block(self, adapters: bool | None = None) -> Iterator[None]:
        """A window that the user opens around calls. A rank that leaves it early joins the other ranks' calls until
        they leave it too.

        Raises RuntimeError, on every rank, if the ranks' calls differ; NotImplementedError inside a request with other
        `adapters`.
        """
        adapters = self.window.resolved(adapters)
        if self.inside:
            self._require_same_adapters(adapters)
            yield
            return
        self._require_same(self._exchange(RequestHeader("block", adapters)))
        with self.window.opened(adapters):
            try:
                yield
            finally:
                self._leave()

    @contextmanager
    def request(
        self,
        adapters: bool | None = None,
        tokens: int | None = None,
        fallback_reason: str = "",
        module: str = "",
        decodes: bool = False,
    ) -> Iterator[AnyDecoder | None]:
        """As `Calls.request`. Runs fused if the decoder can run every rank's request, natively otherwise; ends when
        every rank's request has ended.

        Raises RuntimeError, on every rank, if the ranks' calls differ; LostRankError if a rank has ended;
        NotImplementedError for a nested request that cannot run with the outer one's decoder or adapters.
        """
        adapters = self.window.resolved(adapters)
        decodes = decodes and self.int8 is not None
        fused = self.fused_for(decodes)
        if tokens is not None:
            fallback_reason = fused.fallback_reason_now(tokens)
        if self.inside:
            yield self._nested(adapters, tokens, fallback_reason)
            return
        self.has_begun = True
        native = tokens is None or fallback_reason != ""
        needs_check = not native and fused.needs_check()
        hooked = bool(self.fused.foreign_hooks.first())
        own = self._header("request", adapters, True, module, native, fallback_reason, needs_check, hooked)
        own = replace(own, decodes=decodes)
        headers = self._exchange(own)
        self._require_same(headers)
        with self._running(own, headers) as decoder:
            yield decoder

    def use(self, resources: Any) -> None:
        super().use(resources)
        if isinstance(self.native_forwards, ModuleExchange):
            self.native_forwards.resources = resources

    def compute(self, decoder: AnyDecoder | None, work: Work) -> Any:
        if decoder is None and isinstance(self.native_forwards, ModuleExchange):
            return self.native_forwards.compute(work)
        if decoder is None or self.group_work is None:
            return work.run(decoder, self.resources)
        return self._compute_together(decoder, work)

    def _compute_together(self, decoder: AnyDecoder, work: Work | None) -> Any:
        if work is not None and not self.group_work.is_pending:
            raise NotImplementedError(
                "a request inside another one cannot run where ranks decode together (inference_tp_size above 1); make "
                "it after the other one"
            )
        return self.group_work.run(decoder, work, self.resources)

    def native(self, module: torch.nn.Module, forward: Callable) -> Any:
        if self.native_forwards is None:
            return forward()
        return self.native_forwards.run(module, forward)  # type: ignore[union-attr]  # a ModuleExchange's do not call this

    def _join_others(self, adapters: bool) -> None:
        """Join the other ranks' request with dummy steps after this rank's own has failed."""
        if not self.lost:
            hooked = bool(self.fused.foreign_hooks.first())
            self._follow(self._exchange(self._header("request", adapters, active=False, hooked=hooked)))

    def _leave(self) -> None:
        while not self.lost:
            headers = self._exchange(self._header("leave", hooked=bool(self.fused.foreign_hooks.first())))
            if all(header.step == "leave" for header in headers):
                return
            self._follow(headers)

    def _follow(self, headers: list[RequestHeader]) -> None:
        """Join the other ranks' request or block. Does nothing if their calls differ: they raise then."""
        active = active_headers(headers)
        if len({header.key for header in active}) != 1 or active[0].module:
            return
        if active[0].step == "block":
            with self.window.opened(active[0].adapters):
                self._leave()
            return
        with self._running(replace(active[0], native=False, fallback_reason="", needs_check=False), headers):
            pass

    @contextmanager
    def _running(self, own: RequestHeader, headers: list[RequestHeader]) -> Iterator[AnyDecoder | None]:
        """Run what the ranks have agreed on, and dummy steps until every rank is done. Gives the decoder, or None."""
        try:
            with (
                lost_rank_reported("computing together with it"),
                self.window.opened(own.adapters),
                attribute(self, "inside", True),
                torch.no_grad(),
            ):
                self.decoder = self._agreed_decoder(own, headers)
                native = self.decoder is None
                if self.group_work is not None:
                    self.group_work.is_pending = not native
                with self._native_opened(any(header.hooked for header in headers)) if native else nullcontext():
                    try:
                        yield self.decoder
                    except BaseException as error:
                        self.lost = is_lost_rank(error)
                        raise
                    finally:
                        if not self.lost:
                            with self.phase("wait"):
                                self._finish()
        except LostRankError:
            self.lost = True
            raise
        finally:
            self.decoder = None

    def _finish(self) -> None:
        """Take part in what the other ranks still want."""
        if self.decoder is None:
            if self.native_forwards is not None:
                self.native_forwards.finish()
        elif isinstance(self.decoder, StreamedDecoder):
            self.decoder.finish()
        elif self.group_work is not None and self.group_work.is_pending:
            self._compute_together(self.decoder, None)

    def _native_opened(self, guarded: bool = False) -> AbstractContextManager:
        return nullcontext() if self.native_forwards is None else self.native_forwards.opened(guarded)

    def _agreed_decoder(self, own: RequestHeader, headers: list[RequestHeader]) -> AnyDecoder | None:
        fused = self.fused_for(own.decodes)
        reasons = {rank: header.fallback_reason for rank, header in enumerate(headers) if header.native}
        if not reasons and fused.group is not None:
            fused.group.begin_call(header.rounds for header in headers)
        if not reasons:
            self._refresh_int8(fused)
        if not reasons and any(header.needs_check for header in headers):
            with self._native_opened():
                difference = fused.check(own.adapters)
            differences = all_gather_objects(difference, self.group)
            reasons = {rank: reason for rank, reason in enumerate(differences) if reason}
            if reasons:
                fused.refuse(difference or next(iter(reasons.values())))
        if not reasons:
            return fused.bound_decoder(own.adapters)
        if not own.native:
            rank, reason = next(iter(reasons.items()))
            fused.note_fallback(
                f"a request of rank {rank}, which runs with this one's: {reason or 'it cannot run fused'}"
            )
        elif own.fallback_reason:
            fused.note_fallback(own.fallback_reason)
        return None

    def _nested(self, adapters: bool, tokens: int | None, fallback_reason: str) -> AnyDecoder | None:
        """The decoder for a request that is made inside another one."""
        self._require_same_adapters(adapters)
        if self.decoder is not None and (tokens is None or fallback_reason):
            raise NotImplementedError(
                "a request inside another one, whose decoder ranks run together, cannot run natively: "
                f"{fallback_reason}"
            )
        return self.decoder

    def _require_same_adapters(self, adapters: bool) -> None:
        if adapters != self.window.uses_adapters:
            raise NotImplementedError(
                f"adapters: {adapters} given inside a request with {self.window.uses_adapters}, which ranks compute "
                "together; make the call after the other one"
            )

    def _header(self, *fields: Any, **more: Any) -> RequestHeader:
        group = self.fused.group
        more["rounds"] = 0 if group is None else group.rounds
        return RequestHeader(*fields, **more)

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
        """Raise RuntimeError if calls differ, or if only some ranks call a submodule: it has no dummy steps."""
        active = active_headers(headers)
        calls_module = any(header.module for header in active)
        if len({header.key for header in active}) > 1 or (calls_module and len(active) < len(headers)):
            calls = "; ".join(f"rank {rank} {header}" for rank, header in enumerate(headers))
            raise RuntimeError(
                f"ranks make different calls: {calls}. With inference_tp_size above 1, pin_parameters=false, expert "
                "parallelism, or weight_dtype=int8 under ZeRO-3, every rank must make the same calls in the same order"
            )
