"""Faults on one rank: a hook, a self-check that fails, an error, no rows, an early end, a killed process. No rank
hangs: each has a result or an error within LIMIT_S, and the engine then generates and trains as one without a fault."""

import contextlib
import datetime
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import hybrid
from hybrid.decoders import fused_model as fused
from hybrid.execution import tp_modules as shared_modules
from hybrid.models.spec import UnsupportedModel
from hybrid.runtime.parallel import RankFailedError
from tests.engines import engine_of, settings, storage_digest, train_step
from tests.marks import slow_but
from tests.rank_pool import free_port, rank_context, rank_environment
from tests.tiny_models import SIZES, prompts, tiny_model, twin

LIMIT_S = 30

# How weights are held: the model's family, and the engine's blocks.
TENSOR_PARALLEL = {"hybrid_engine": {"enabled": True, "inference_tp_size": 2}}
MODES = {
    "pinned": ("llama", 3, {}),
    "tp 2": ("llama", 3, TENSOR_PARALLEL),
    "tp 2, whole weights": ("llama", 0, TENSOR_PARALLEL),
    "streaming": ("llama", 3, {"hybrid_engine": {"enabled": True, "pin_parameters": False}}),
    "tp 2, own modules": ("starcoder2", 3, {**TENSOR_PARALLEL, "rollout": {"containers": "native"}}),
    "streaming, own modules": (
        "starcoder2",
        3,
        {"hybrid_engine": {"enabled": True, "pin_parameters": False}, "rollout": {"containers": "native"}},
    ),
}


QUICK = ("pinned", "tp 2")


class Fault(ArithmeticError):
    """The error raised on one rank."""


def model_of(mode: str) -> torch.nn.Module:
    family = MODES[mode][0]
    return tiny_model(family, sizes=None if family == "llama" else SIZES)


def engine_in(mode: str) -> hybrid.HybridEngine:
    _, stage, blocks = MODES[mode]
    return engine_of(model_of(mode), settings(stage, **{"rollout": {"containers": "fused"}, **blocks}))


class Case:
    """An engine in which a fault happens, one without, and this rank's requests, which differ between ranks."""

    def __init__(self, mode: str, compared: bool = True):
        self.rank, self.mode = dist.get_rank(), mode
        self.reference, self.hit = twin(model_of(mode)), engine_in(mode)
        self.untouched = engine_in(mode) if compared else None
        self.ids, self.mask = prompts(2, 6, padded=True, seed=self.rank)
        self.request = {"attention_mask": self.mask, "max_new_tokens": 8 + 4 * self.rank, "do_sample": False}
        self.expected = self.reference.generate(self.ids, **self.request)

    def generate(self, **changes) -> torch.Tensor:
        return self.hit.generate(**{"input_ids": self.ids, **self.request, **changes})

    def score(self) -> torch.Tensor:
        return self.hit.score(self.ids, self.mask).per_token_logps

    def expected_score(self) -> torch.Tensor:
        logps = hybrid.padded_forward(self.reference)(self.ids, self.mask).logits[:, :-1].log_softmax(-1)
        logps = logps.gather(2, self.ids[:, 1:, None])[..., 0]
        return logps * self.mask[:, 1:] * self.mask[:, :-1]

    def forward(self) -> torch.Tensor:
        self.hit.eval()
        try:
            return self.hit(self.ids, attention_mask=self.mask, use_cache=False).logits[self.mask.bool()]
        finally:
            self.hit.train()

    def expected_forward(self) -> torch.Tensor:
        return self.reference(self.ids, attention_mask=self.mask).logits[self.mask.bool()]

    def require_all(self) -> None:
        """Tokens, logprobs and logits equal Hugging Face's."""
        assert torch.equal(self.generate(), self.expected)
        with torch.no_grad():
            torch.testing.assert_close(self.score(), self.expected_score(), atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(self.forward(), self.expected_forward(), atol=1e-3, rtol=1e-4)

    def require_goes_on(self) -> None:
        """The engine with the fault generates, and its training storage equals the other engine's."""
        assert torch.equal(self.generate(), self.expected)
        assert self.hit.module.training
        assert storage_digest(self.hit) == storage_digest(self.untouched)

    def require_trains_on(self) -> None:
        losses = [train_step(engine) for engine in (self.hit, self.untouched)]
        assert torch.equal(*losses), losses
        assert storage_digest(self.hit) == storage_digest(self.untouched)
        assert torch.equal(self.generate(), self.untouched.generate(self.ids, **self.request))


@contextlib.contextmanager
def hooked(case: Case, hook: Callable, on: int) -> Iterator[None]:
    """Inside the block one rank has a hook on a module in the second layer."""
    modules = [module for name, module in case.hit.module.named_modules() if name.endswith("layers.1.mlp")]
    handles = [modules[0].register_forward_hook(hook)] if case.rank == on else []
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def hook_on_one_rank(case: Case, on: int) -> None:
    seen = []
    with hooked(case, lambda *_: seen.append(1), on):
        case.require_all()
        with case.hit.inference():
            actual, score = case.generate(), case.score()
        assert torch.equal(actual, case.expected)
        torch.testing.assert_close(score, case.expected_score(), atol=1e-4, rtol=1e-4)
    assert bool(seen) == (case.rank == on)


def verdict_differs(case: Case, on: int) -> None:
    """The self-check fails on one rank only, after all of it has run; also that of the model's own modules, where ranks
    share these."""
    verdict, own, own_difference = "a verdict of one rank", fused.require_equal, shared_modules.whole_difference

    def differs(*args) -> None:
        own(*args)
        raise UnsupportedModel(verdict)

    usual = case.hit
    if case.rank == on:
        fused.require_equal, shared_modules.whole_difference = differs, lambda *args: own_difference(*args) or verdict
    try:
        case.hit = engine_in(case.mode)
        case.require_all()
    finally:
        fused.require_equal, shared_modules.whole_difference = own, own_difference
    case.require_all()
    why = case.hit.coverage()[0]["why"]
    if case.mode in ("tp 2", "tp 2, whole weights", "streaming") or (case.mode == "pinned" and case.rank == on):
        assert verdict in why, why
    if case.mode == "tp 2, own modules":
        assert "whole on every rank" in why, why
    case.require_goes_on()
    case.hit = usual


def require_raises_on(case: Case, on: int, error: type, call: Callable, others_call: Callable) -> None:
    """`call` raises `error` on one rank; on other ranks `others_call` succeeds."""
    started = time.monotonic()
    if case.rank == on:
        with pytest.raises(error):
            call()
    else:
        others_call()
    assert time.monotonic() - started < LIMIT_S
    case.require_goes_on()


def require_expected_tokens(case: Case) -> Callable:
    return lambda: torch.testing.assert_close(case.generate(), case.expected, atol=0, rtol=0)


def error_before_weights_move(case: Case, on: int) -> None:
    """A request that raises before weights are gathered, while the other rank has to gather them."""
    for wrong, error in (
        ({"adapter_names": ["a", "b"]}, NotImplementedError),
        ({"input_ids": case.ids.float()}, ValueError),
        ({"max_new_tokens": 10**6}, ValueError),
    ):
        case.hit.mark_weights_changed()
        require_raises_on(case, on, error, lambda wrong=wrong: case.generate(**wrong), require_expected_tokens(case))
    case.hit.mark_weights_changed()
    started = time.monotonic()
    sampling = hybrid.SamplingParams(max_new_tokens=3, temperature=0)
    with pytest.raises(ValueError, match="not left padded") if case.rank == on else contextlib.nullcontext():
        case.hit.rollout(case.ids, case.mask.flip(1) if case.rank == on else case.mask, sampling)
    case.hit.mark_weights_changed()
    with pytest.raises(ValueError, match="temperature") if case.rank == on else contextlib.nullcontext():
        case.hit.score(case.ids, case.mask, temperature=-1.0 if case.rank == on else 1.0)
    assert time.monotonic() - started < LIMIT_S
    case.require_goes_on()


def exception_in_prefill(case: Case, on: int) -> None:
    require_raises_on(
        case, on, IndexError, lambda: case.generate(input_ids=case.ids + 1000), require_expected_tokens(case)
    )
    fails_in_a_hook(case, on, 1)


def exception_in_decode(case: Case, on: int) -> None:
    raising = StoppingCriteriaList([RaiseAt(9)])
    require_raises_on(case, on, Fault, lambda: case.generate(stopping_criteria=raising), require_expected_tokens(case))
    require_raises_on(case, on, Fault, lambda: case.generate(streamer=RaisingStreamer()), require_expected_tokens(case))
    fails_in_a_hook(case, on, 4)


def fails_in_a_hook(case: Case, on: int, at: int) -> None:
    """A hook raises inside the `at`-th forward of one rank. Where ranks run each other's requests the other rank gets
    an error that names it; otherwise it gets its result."""
    count = []

    def hook(*_) -> None:
        count.append(1)
        if len(count) == at:
            raise Fault("in a hook")

    started = time.monotonic()
    with hooked(case, hook, on):
        if case.rank == on:
            with pytest.raises(Fault):
                case.generate()
        elif case.mode == "tp 2, own modules":
            with contextlib.suppress(RuntimeError):  # if the failing rank's request ran first
                assert torch.equal(case.generate(), case.expected)
        else:
            assert torch.equal(case.generate(), case.expected)
    assert time.monotonic() - started < LIMIT_S
    case.require_goes_on()
    with hooked(case, raise_always, on):
        for call in (case.score, case.forward):
            if case.rank == on:
                with pytest.raises(Fault):
                    call()
            elif case.mode == "tp 2, own modules":
                with pytest.raises(RuntimeError, match="Fault: in a hook"):
                    call()
            else:
                call()
    case.require_goes_on()


def raise_always(*_) -> None:
    raise Fault("in a hook")


class RaiseAt(StoppingCriteria):
    """Raises once the sequences have `length` tokens."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] >= self.length:
            raise Fault
        return torch.zeros(len(input_ids), dtype=torch.bool)


class RaisingProcessor(LogitsProcessor):
    """Raises at the second token.  rowwise: whether it may run where rows are apart."""

    def __init__(self, rowwise: bool):
        self.rowwise, self.length = rowwise, 0

    def __call__(self, input_ids, scores):
        self.length = self.length or input_ids.shape[1]
        if input_ids.shape[1] > self.length:
            raise Fault
        return scores


class RaisingStreamer(BaseStreamer):
    """Raises at the third token."""

    def __init__(self):
        self.count = 0

    def put(self, value):
        self.count += 1
        if self.count > 3:
            raise Fault

    def end(self):
        pass


def exception_in_a_processor(case: Case, on: int) -> None:
    for rowwise in (True, False):
        processors = LogitsProcessorList([RaisingProcessor(rowwise)])
        require_raises_on(
            case,
            on,
            Fault,
            lambda logits_processor=processors: case.generate(logits_processor=logits_processor),
            require_expected_tokens(case),
        )
    # In a window of several calls too: the other rank's next call raises an error that names the fault, or succeeds.
    with contextlib.suppress(Fault), case.hit.inference():
        request = {"logits_processor": LogitsProcessorList([RaisingProcessor(True)])} if case.rank == on else {}
        actual = case.generate(**request)
        assert case.rank != on
        second, score = case.generate(), case.score()
        assert torch.equal(actual, case.expected)
        assert torch.equal(second, case.expected)
        assert score.shape == (2, 5)
    case.require_goes_on()


class Calling(LogitsProcessor):
    """Makes a call of the engine or its model at the third token."""

    def __init__(self, call: Callable):
        self.call, self.count = call, 0

    def __call__(self, input_ids, scores):
        self.count += 1
        if self.count == 3:
            self.call()
        return scores


def user_code_calls_the_model(case: Case, on: int) -> None:
    """In a decode step: forwards run, or are refused where other ranks would have to take part; requests are refused.
    So is a request by `on_rows`, whose rollout then ends on the ranks that decode it together."""
    ids, mask = case.ids, case.mask
    for call in (
        lambda: case.hit.module(input_ids=ids, attention_mask=mask, use_cache=False),
        lambda: case.hit(input_ids=ids, attention_mask=mask),
        lambda: case.hit.score(ids, mask),
        lambda: case.hit.generate(ids, attention_mask=mask, max_new_tokens=3),
        lambda: case.hit.rollout(ids, mask, hybrid.SamplingParams(max_new_tokens=3)),
    ):
        request = {"logits_processor": LogitsProcessorList([Calling(call)])} if case.rank == on else {}
        started = time.monotonic()
        try:
            assert torch.equal(case.generate(**request), case.expected)
        except NotImplementedError as error:
            assert case.rank == on and "(by a processor, criterion" in str(error)
        assert time.monotonic() - started < LIMIT_S / 3
    sampling = hybrid.SamplingParams(max_new_tokens=40, temperature=0, stop_token_ids=tuple(range(2, 97, 12)))
    expected = case.untouched.rollout(ids, mask, sampling)
    on_rows = (lambda batch: case.hit.score(ids, mask)) if case.rank == on else None
    try:
        actual = case.hit.rollout(ids, mask, sampling, on_rows=on_rows)
        assert case.rank != on or case.mode.endswith("own modules")  # whose rows come at the end
        assert torch.equal(actual.completion_ids, expected.completion_ids)
    except RuntimeError as error:  # a NotImplementedError is one
        assert case.rank == on or f"rank {on} (NotImplementedError" in str(error)
        assert "inside a call of the same engine" in str(error)
    case.require_goes_on()


def empty_rank(case: Case, on: int) -> None:
    rows = 0 if case.rank == on else 2
    sampling = hybrid.SamplingParams(max_new_tokens=5, temperature=0)
    batch = case.hit.rollout(case.ids[:rows], case.mask[:rows], sampling)
    assert batch.completion_ids.shape[0] == rows
    assert len(case.hit.score(case.ids[:rows], case.mask[:rows]).per_token_logps) == rows
    case.require_goes_on()


def one_rank_stops_early(case: Case, on: int) -> None:
    new = 1 if case.rank == on else 24
    actual = case.generate(max_new_tokens=new)
    expected = case.reference.generate(case.ids, **{**case.request, "max_new_tokens": new})
    assert torch.equal(actual, expected)
    with case.hit.inference():  # and one rank leaves its window before the other
        for _ in range(1 if case.rank == on else 3):
            assert torch.equal(case.generate(), case.expected)
    case.require_goes_on()


def serving(case: Case, on: int) -> None:
    """Servers: a request that fails, calls of the engine while requests run, and blocks that end early, by an error and
    by a signal, on one rank. The other rank's requests have their answers, or an error that names the signal."""
    if case.mode.endswith("own modules"):
        with pytest.raises(NotImplementedError, match="own layers serve no requests where ranks compute"):
            case.hit.serve().__enter__()
        case.require_goes_on()
        return
    greedy = hybrid.SamplingParams(case.request["max_new_tokens"], temperature=0)
    rows = [ids[mask.bool()].tolist() for ids, mask in zip(case.ids, case.mask, strict=True)]
    started = time.monotonic()

    def require_answers(server: hybrid.Server) -> None:
        answers = [server.submit(row, greedy) for row in rows]
        for answer, expected in zip(answers, case.expected[:, case.ids.shape[1] :].tolist(), strict=True):
            tokens = answer.result()[0].token_ids
            assert tokens == expected[: len(tokens)]

    def fail(server: hybrid.Server) -> None:
        with pytest.raises(RuntimeError, match="probability tensor"):
            server.generate_sync(rows[0], greedy, logit_bias=dict.fromkeys(range(97), float("-inf")))

    with case.hit.serve(max_num_seqs=2) as server:
        running = server.submit(rows[0], hybrid.SamplingParams(80, seed=1, min_new_tokens=80))
        if case.rank == on:
            fail(server)
            for call in (case.hit.train, case.hit.eval, case.hit.destroy, case.hit.sleep, case.generate, case.score):
                with pytest.raises(RuntimeError, match="the engine serves requests"):
                    call()
        require_answers(server)
        assert len(running.result()[0].token_ids) == 80
    with contextlib.suppress(Fault), case.hit.inference(), case.hit.serve() as server:
        left = server.submit(rows[0], hybrid.SamplingParams(80, seed=1, min_new_tokens=80))
        if case.rank == on:
            raise Fault
        require_answers(server)
        left.result()
    if case.rank == on:
        with pytest.raises(hybrid.ServerClosed):
            left.result()
    case.require_goes_on()
    if case.rank == on:
        with pytest.raises(KeyboardInterrupt), case.hit.serve() as server:
            require_answers(server)
            raise KeyboardInterrupt
    elif case.mode == "pinned":
        with case.hit.serve() as server:
            require_answers(server)
    else:
        with (
            pytest.raises(RankFailedError, match=f"rank {on} .StoppedByCaller"),
            case.hit.serve() as server,
            pytest.raises(hybrid.ServerClosed, match="RankFailedError"),
        ):
            while True:
                require_answers(server)
    assert time.monotonic() - started < LIMIT_S
    case.require_goes_on()


FAULTS = {
    fault.__name__: fault
    for fault in (
        hook_on_one_rank,
        verdict_differs,
        error_before_weights_move,
        exception_in_prefill,
        exception_in_decode,
        exception_in_a_processor,
        user_code_calls_the_model,
        empty_rank,
        one_rank_stops_early,
        serving,
    )
}


def check_fault(mode: str, names: list[str], ons: tuple[int, ...]) -> None:
    """Faults on one rank, one after another, on the same engine, which then trains."""
    case = Case(mode)
    for name in names:
        for on in ons:
            started = time.monotonic()
            FAULTS[name](case, on)
            took = time.monotonic() - started
            print(f"{mode}: {name} on rank {on}: {took:.1f} s", flush=True)
    case.require_trains_on()


@pytest.mark.parametrize("mode", QUICK)
def test_a_fault_on_the_second_rank_neither_hangs_nor_changes_results(ranks, mode):
    """Every fault, on the second rank."""
    ranks.run(check_fault, mode, list(FAULTS), (1,), timeout_s=120)


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(MODES))
def test_a_fault_on_either_rank_neither_hangs_nor_changes_results(ranks, mode):
    ranks.run(check_fault, mode, list(FAULTS), (0, 1))


# A killed rank breaks the process group for good, so these tests start their own processes.


class KillsItself(LogitsProcessor):
    """Ends its process at the third token, as a kernel does that runs out of memory."""

    rowwise = True

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return scores


def serve_until_killed(case: Case, killed: bool) -> None:
    """Serve a request; `killed`: the process ends at its first tokens."""

    def end(chunk: hybrid.Chunk) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with case.hit.serve(max_num_seqs=2) as server:
        params = hybrid.SamplingParams(80, seed=1, min_new_tokens=80)
        server.submit([5, 6, 7], params, on_chunk=end if killed else None).result()


def outlive(rank: int, port: int, mode: str, where: str, serves: bool) -> None:
    """Main function of a rank. The last rank is killed; the other writes the outcome of each call and the time to a
    file."""
    os.environ.update(rank_environment(rank, 2, port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10 * LIMIT_S))
    case = Case(mode, compared=False)
    assert torch.equal(case.generate(), case.expected)
    path, killed = Path(where), case.rank == 1
    request = {"logits_processor": LogitsProcessorList([KillsItself()])} if killed else {}
    started, outcomes = time.monotonic(), []
    decode = (
        partial(serve_until_killed, case, killed) if serves else partial(case.generate, max_new_tokens=12, **request)
    )
    for call in (decode, lambda: train_step(case.hit), case.score):
        try:
            call()
            outcomes.append("an answer")
        except RuntimeError as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    (path / f"rank{rank}").write_text(json.dumps([time.monotonic() - started, outcomes]))
    os._exit(0)


@pytest.mark.parametrize(
    ("mode", "serves"),
    slow_but(
        [("tp 2", False), ("tp 2", True)],
        [(mode, serves) for mode in MODES for serves in (False, True) if not (serves and "own modules" in mode)],
    ),
)
def test_survivor_of_a_killed_rank_raises_lost_rank_error(mode, serves, tmp_path):
    """Within the limit the survivor raises LostRankError in training and, where decoding has collectives, in generate()
    and for requests to its server; otherwise it still generates."""
    context, port = rank_context(), free_port()
    processes = [context.Process(target=outlive, args=(rank, port, mode, str(tmp_path), serves)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(300)
        assert processes[1].exitcode == -signal.SIGKILL
        took_s, outcomes = json.loads((tmp_path / "rank0").read_text())
    finally:
        for process in processes:
            process.kill()
    assert took_s < LIMIT_S
    generated, trained, _ = outcomes
    assert (
        generated == "an answer" if mode == "pinned" else "LostRankError: rank 0: another rank has ended" in generated
    )
    assert "LostRankError: rank 0: another rank has ended" in trained
