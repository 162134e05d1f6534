"""What a rank logs that waits for others, and the limit of a wait."""

import ast
import contextlib
import datetime
import json
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import logger
from transformers import LogitsProcessor, LogitsProcessorList

from hybrid import HybridEngine, SamplingParams
from hybrid.execution.rank_waits import POLL_INTERVAL_S, waiting_message
from hybrid.runtime.waiting import PURPOSES, WAITS, collective, waiting_to
from tests.engines import engine_of, settings, train_step
from tests.rank_pool import free_port, rank_context, rank_environment
from tests.tiny_models import prompts, tiny_model

REPORT_S = 1.0
LATE_S = 2 * REPORT_S + 3 * POLL_INTERVAL_S  # long enough for a report and its repetition
SAMPLING = SamplingParams(max_new_tokens=4, seed=3)


class Lines(logging.Handler):
    """Keeps what a rank's engines log about waits."""

    def __init__(self):
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if re.search("waiting for rank|all ranks have joined", record.getMessage()):
            self.texts.append(record.getMessage())


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    lines = Lines()
    logger.addHandler(lines)
    try:
        yield lines.texts
    finally:
        logger.removeHandler(lines)


def require_report(texts: list[str], purpose: str) -> None:
    """Rank 0 has logged more than once that it waits for rank 1, at doubled times; rank 1 nothing."""
    if dist.get_rank() == 1:
        assert not texts
        return
    waits = [re.fullmatch(rf"hybrid: waiting for rank 1 to {purpose} \((\d+) s\)", text) for text in texts]
    assert len(waits) >= 2 and all(waits), texts
    assert all(int(wait[1]) >= 2**count * REPORT_S for count, wait in enumerate(waits))


def engine(**blocks) -> HybridEngine:
    rollout = {"wait_report_s": REPORT_S, **blocks.pop("rollout", {})}
    return engine_of(tiny_model("llama"), settings(rollout=rollout, **blocks))


def rollout(of: HybridEngine) -> None:
    of.rollout(*prompts(2, 5, padded=False, seed=dist.get_rank()), SAMPLING)


def check_late_for_weights() -> None:
    of = engine()
    rollout(of)
    train_step(of)
    with logged() as texts:
        if dist.get_rank() == 1:
            time.sleep(LATE_S)
        rollout(of)
    require_report(texts, "refresh weights")
    with logged() as texts:  # fresh weights: rank 0 does not wait, however late rank 1 is
        time.sleep(3 * dist.get_rank())
        rollout(of)
    assert not texts
    of.destroy()


def test_a_rank_that_is_late_for_a_refresh_is_named(ranks):
    ranks.run(check_late_for_weights)


def check_late_for_a_group() -> None:
    of = engine(hybrid_engine={"enabled": True, "inference_tp_size": 2})
    rollout(of)
    with logged() as texts:
        if dist.get_rank() == 1:
            time.sleep(LATE_S)
        rollout(of)
    require_report(texts, "begin the next call")
    with logged() as texts:
        if dist.get_rank() == 1:
            time.sleep(LATE_S)
        with of.serve() as server:
            assert len(server.generate_sync([5, 6, 7], SAMPLING)[0].token_ids) <= 4
            time.sleep(LATE_S * (dist.get_rank() == 1))  # rank 0 closes first: its waits are short exchanges
    require_report(texts, "begin the next call")
    group = of._runtime.fused.group
    group.begin_call([group.rounds])
    with logged() as texts, of.call_lock:  # as inside a step, which one call of the kernels runs
        if dist.get_rank() == 1:
            time.sleep(LATE_S)
        assert group.sum(torch.ones(4)).tolist() == [2.0] * 4
    require_report(texts, "decode together")
    of.destroy()


@pytest.mark.slow
def test_a_rank_that_is_late_for_its_group_is_named(ranks):
    ranks.run(check_late_for_a_group)


class Sleeps(LogitsProcessor):
    """Takes long at the second token."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls == 2:
            time.sleep(LATE_S)
        return scores


def check_late_in_user_code(hybrid_engine: dict, purpose: str) -> None:
    of, (ids, mask) = engine(hybrid_engine={"enabled": True, **hybrid_engine}), prompts(2, 5, padded=True)
    settings_of_call = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    expected = of.generate(ids, **settings_of_call)
    late = {"logits_processor": LogitsProcessorList([Sleeps()])} if dist.get_rank() == 1 else {}
    with logged() as texts:
        assert torch.equal(of.generate(ids, **settings_of_call, **late), expected)
    require_report(texts, purpose)
    of.destroy()


@pytest.mark.parametrize(
    ("hybrid_engine", "purpose"),
    [
        ({"inference_tp_size": 2}, "decode together"),
        ({"pin_parameters": False}, "decode with streamed weights"),
    ],
)
def test_a_rank_whose_user_code_takes_long_is_named(ranks, hybrid_engine, purpose):
    ranks.run(check_late_in_user_code, hybrid_engine, purpose)


def check_silence() -> None:
    of = engine(rollout={"wait_report_s": None})
    train_step(of)
    with logged() as texts:
        if dist.get_rank() == 1:
            time.sleep(LATE_S)
        rollout(of)
    assert not texts
    of.destroy()


def test_null_logs_nothing(ranks):
    ranks.run(check_silence)


def test_a_wait_is_known_again_and_keeps_nothing_alive():
    """Looks at one call give one key, looks at two calls two. What a call held is free when it ends, and no mark of
    its thread is left."""

    @waiting_to("test")
    def blocked(entered: threading.Event, end: threading.Event) -> None:
        held = torch.ones(4)
        refs.append(weakref.ref(held))
        with collective("blocked", None):
            entered.set()
            end.wait()

    refs, keys = [], []
    for _ in range(2):
        entered, end = threading.Event(), threading.Event()
        thread = threading.Thread(target=blocked, args=(entered, end))
        thread.start()
        entered.wait()
        waits = [WAITS[thread.ident] for _ in range(2)]
        assert waits[0] == waits[1]
        assert (waits[0].purpose, waits[0].group) == ("test", None)
        keys.append(waits[0].key)
        end.set()
        thread.join()
        assert refs[-1]() is None
        assert not {thread.ident} & (WAITS.keys() | PURPOSES.keys())
    assert keys[0] != keys[1]


def test_the_innermost_purpose_counts_also_after_an_error():
    me = threading.get_ident()
    with waiting_to("outer"):
        with pytest.raises(ZeroDivisionError), waiting_to("inner"), collective("sum", None):
            assert WAITS[me].purpose == "inner"
            1 / 0  # noqa: B018
        with collective("sum", None):
            assert WAITS[me].purpose == "outer"
    with collective("sum", None):
        assert WAITS[me].purpose == "run sum"
    assert me not in WAITS


WAITING = (
    "all_reduce broadcast all_gather all_gather_object broadcast_object_list barrier all_to_all_single wait".split()
)
STARTED = {"SliceExchange.__init__"}  # asynchronous
ELSEWHERE = {"doctor.py", "deepspeed_moe.py"}  # processes of its own; DeepSpeed's forwards


def is_marked(node: ast.AST) -> bool:
    """Whether a node is a `with` block of a `collective`."""
    contexts = [item.context_expr for item in node.items] if isinstance(node, ast.With) else []
    return any(isinstance(context, ast.Call) and ast.unparse(context.func) == "collective" for context in contexts)


def test_every_collective_is_watched():
    """Each call of a collective of torch.distributed in the engine is in a block that the log knows."""
    unmarked, marked = set(), set()
    for path in sorted((Path(__file__).resolve().parents[2] / "hybrid").rglob("*.py")):
        scopes = [("", False, ast.parse(path.read_text()))] if path.name not in ELSEWHERE else []
        for name, is_known, scope in scopes:
            for node in ast.iter_child_nodes(scope):
                inner = f"{name}{node.name}." if isinstance(node, ast.ClassDef | ast.FunctionDef) else name
                scopes.append((inner, is_known or is_marked(node), node))
            if isinstance(scope, ast.Call) and isinstance(called := scope.func, ast.Attribute):
                is_dist = ast.unparse(called.value) in ("dist", "work", "self.work")
                if is_dist and called.attr in WAITING:
                    (marked if is_known else unmarked).add(name.rstrip("."))
    assert unmarked == STARTED
    assert {"any_rank", "InferenceGroup.sum", "AsyncAllGather.finish_transfers", "SliceExchange.finish"} <= marked


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        ({1: "", 3: ""}, "waiting for ranks 1, 3 to refresh weights (12 s)"),
        (
            {3: "begin the next call"},
            "waiting for rank 3 to refresh weights (12 s); rank 3 waits to begin the next call: every rank must make "
            "the same calls in the same order",
        ),
        (dict.fromkeys(range(1, 512), ""), "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 503 more to refresh weights (12 s)"),
        ({}, "all ranks have joined the collective to refresh weights; it has taken 12 s"),
    ],
)
def test_messages(missing, text):
    assert waiting_message("refresh weights", 12.3, missing).endswith(text)


def limited(rank: int, port: int, tp_size: int, where: str) -> None:
    """Main function of a rank. Rank 1 does not come to the second rollout; rank 0 writes what it raised, and when."""
    os.environ.update(rank_environment(rank, 2, port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
    of = engine(hybrid_engine={"enabled": True, "inference_tp_size": tp_size}, rollout={"wait_timeout_s": 3})
    rollout(of)
    train_step(of)
    started = time.monotonic()
    if rank == 1:
        time.sleep(60)
        os._exit(0)
    with pytest.raises(RuntimeError) as raised:
        rollout(of)
    outcome = [time.monotonic() - started, f"{type(raised.value).__name__}: {raised.value}"]
    (Path(where) / "outcome").write_text(json.dumps(outcome))
    os._exit(0)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_wait_ends_at_its_limit(tmp_path, tp_size):
    """A process group is of no use afterwards, so these ranks are the test's own."""
    context, port = rank_context(), free_port()
    processes = [context.Process(target=limited, args=(rank, port, tp_size, str(tmp_path))) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        processes[0].join(200)
        took_s, error = json.loads((tmp_path / "outcome").read_text())
    finally:
        for process in processes:
            process.kill()
    assert 2 < took_s < 20
    assert error.startswith("LostRankError: rank 0: another rank has ended, or does not answer")
