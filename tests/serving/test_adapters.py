"""Servers whose requests name adapters. The oracle is `engine.rollout` with the same adapter and key, to the bit."""

import asyncio
import random
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hybrid
from hybrid.serving import server as server_module
from tests.engines import engine_of, settings, storage_digest, train_step
from tests.marks import slow_but
from tests.serving.requests import mixed_calls, served, values
from tests.serving.test_ranks import rolled_out
from tests.serving.test_server import LONG, PROMPT, SHORT, slowly  # noqa: F401  a fixture
from tests.tiny_models import tiny_model
from tests.training.test_named_adapters import ADAPTERS, with_adapters

NAMES = [None, *ADAPTERS, "__base__"]
MODES = {"merged": {}, "unmerged": {"rollout": {"lora": "unmerged"}}, "int8": {"rollout": {"weight_dtype": "int8"}}}


@pytest.fixture
def short_turns(monkeypatch):
    """Adapters take turns of 20 ms."""
    monkeypatch.setattr(server_module, "TURN_S", 0.02)


@pytest.fixture(scope="module")
def engine() -> hybrid.InferenceEngine:
    return hybrid.init_inference(with_adapters(tiny_model("llama")), dtype="fp32", kernel_inject=True)


def named_calls(count: int, seed: int) -> list:
    """Arguments of `Server.generate`, with an adapter each."""
    return [
        (prompt, params, {**more, "adapter": NAMES[index % len(NAMES)]})
        for index, (prompt, params, more) in enumerate(mixed_calls(count, seed))
    ]


def check_adapters(blocks: dict[str, Any]) -> None:
    """Ranks serve different requests of all adapters; each gets what the rollout of its adapter and key gives."""
    rank = dist.get_rank()
    engine = engine_of(with_adapters(tiny_model("llama")), settings(1, **blocks))
    calls = named_calls(20 + 5 * rank, seed=rank)
    server_module.TURN_S, turn_s = 0.02, server_module.TURN_S
    try:
        for step in range(2):
            before = storage_digest(engine)
            actual = served(engine, calls, max_num_seqs=4 + rank, gap_s=0.001)
            shuffled = random.Random(step).sample(calls, len(calls))
            assert served(engine, shuffled, max_num_seqs=3, at_once=7) == actual
            assert storage_digest(engine) == before
            for index, (prompt, params, more) in enumerate(calls):
                if index % 10 not in (7, 8):  # without a row id, or with what rollouts do not have
                    expected = rolled_out(engine, prompt, params, more, adapter=more["adapter"])
                    assert actual[more["request_id"]] == expected, (more, params)
            train_step(engine, step)
    finally:
        server_module.TURN_S = turn_s


@pytest.mark.parametrize("mode", slow_but(["unmerged"], MODES))
def test_requests_get_what_rollouts_of_their_adapters_give(ranks, mode):
    ranks.run(check_adapters, MODES[mode])


def check_refusals() -> None:
    """Ranks that gather weights serve one adapter, and say so."""
    engine = engine_of(with_adapters(tiny_model("llama")), settings(3))
    with engine.serve(adapter="bob") as server:
        named = server.generate_sync(PROMPT, SHORT, adapter="bob")
        assert values(named) == values(server.generate_sync(PROMPT, SHORT)) and not server.adapters
        with pytest.raises(NotImplementedError, match=r"open it with engine.serve\(adapter='ref'\)"):
            server.submit(PROMPT, SHORT, adapter="ref")
    ids = torch.tensor([PROMPT])
    batch = engine.rollout(ids, torch.ones_like(ids), SHORT, row_ids=torch.zeros(1, dtype=torch.int64), adapter="bob")
    assert batch.completion_ids[0].tolist() == named[0].token_ids


def test_ranks_that_gather_serve_one_adapter(ranks):
    ranks.run(check_refusals)


def test_a_frozen_models_adapters(engine, short_turns):
    """Each adapter's completions and scores are those of an engine that has it active."""
    with engine.serve() as server:
        assert server.adapters == ["alice", "bob", "ref", "__base__"]
        futures = {name: server.submit(PROMPT, SHORT, adapter=name) for name in NAMES * 2}
        made = {name: values(future.result()) for name, future in futures.items()}
        scores = {name: asyncio.run(server.score(PROMPT, adapter=name)).logps for name in NAMES}
    assert made[None] == made["alice"], "the active one"
    assert len({str(of_name[0][0]) for of_name in made.values()}) == len(ADAPTERS) + 1
    for name in ("alice", "bob", "ref"):
        model = with_adapters(tiny_model("llama"))
        model.set_adapter(name)
        alone = hybrid.init_inference(model, dtype="fp32", kernel_inject=True)
        with alone.serve() as server:
            assert values(server.generate_sync(PROMPT, SHORT)) == made[name], name
        expected = alone.score(torch.tensor([PROMPT]), torch.ones(1, len(PROMPT)))
        assert scores[name] == expected.per_token_logps[0].tolist(), name


def test_no_adapter_keeps_another_waiting(engine, slowly, short_turns):  # noqa: F811
    """Beside clients that always have a request for one adapter, one for another adapter is answered."""

    async def main() -> tuple[int, float]:
        async with engine.serve(max_num_seqs=2) as server:
            sent, stopped = 0, False

            async def endless(client: str) -> None:
                nonlocal sent
                while not stopped:
                    sent += 1
                    await server.generate(PROMPT, SHORT, adapter="bob", client=client)

            tasks = [asyncio.ensure_future(endless(str(number))) for number in range(6)]
            await asyncio.sleep(0.3)
            before, start = sent, time.monotonic()
            await server.generate(PROMPT, SHORT, adapter="ref")
            between, seconds = sent - before, time.monotonic() - start
            stopped = True
            await asyncio.gather(*tasks)
            assert server.stats().waiting == server.stats().running == 0
            return between, seconds

    between, _ = asyncio.run(main())
    assert between <= 6, "rows that were running, and rows that arrived meanwhile"


def check_together() -> None:
    """Unmerged rows of all adapters run at once: none waits for another one's, and scores name adapters too."""
    engine = engine_of(with_adapters(tiny_model("llama")), settings(1, rollout={"lora": "unmerged"}))
    server_module.TURN_S, turn_s = 1000.0, server_module.TURN_S
    try:
        with engine.serve(max_num_seqs=4) as server:
            running = server.submit(PROMPT, replace(LONG, max_new_tokens=300, min_new_tokens=300), adapter="bob")
            futures = {name: server.submit(PROMPT, SHORT, adapter=name) for name in NAMES}
            completions = {name: values(future.result(60)) for name, future in futures.items()}
            scores = {name: asyncio.run(server.score(PROMPT, adapter=name)).logps for name in NAMES}
            assert not running.done(), "rows of other adapters had to wait"
            long = values(running.result(60))
        assert completions[None] == completions["alice"], "the active one"
        for name in NAMES:
            more = {} if name is None else {"adapter": name}
            ids = torch.tensor([PROMPT])
            expected = engine.score(ids, torch.ones_like(ids), **more).per_token_logps[0]
            assert scores[name] == expected.tolist(), name
            with engine.serve(**more) as server:
                assert values(server.generate_sync(PROMPT, SHORT)) == completions[name], name
        with engine.serve(adapter="bob") as server:
            assert values(server.generate_sync(PROMPT, replace(LONG, max_new_tokens=300, min_new_tokens=300))) == long
            assert values(server.generate_sync(PROMPT, SHORT)) == completions["bob"], "the server's own"
    finally:
        server_module.TURN_S = turn_s


def test_unmerged_rows_of_all_adapters_run_together(ranks):
    ranks.run(check_together)


def test_a_request_that_waits_for_its_turn_can_be_aborted(engine, slowly):  # noqa: F811
    with engine.serve(max_num_seqs=1) as server:
        running = server.submit(PROMPT, LONG, adapter="bob", request_id="running")
        time.sleep(0.1)
        waiting = server.submit(PROMPT, SHORT, adapter="ref", request_id="waiting")
        time.sleep(0.1)
        server.cancel("waiting")
        assert [each.finish_reason for each in waiting.result(5)] == ["abort"] and not running.done()
        server.cancel("running")
        assert running.result(5)[0].finish_reason == "abort"


def test_wrong_names(engine):
    with engine.serve() as server:
        with pytest.raises(ValueError, match="adapter: 'carol' given; it must be one of 'alice', 'bob', 'ref', or "):
            server.submit(PROMPT, SHORT, adapter="carol")
        with pytest.raises(TypeError, match="adapter: 3 given"):
            server.submit(PROMPT, SHORT, adapter=3)
        assert server.stats().waiting == 0 and len(server.generate_sync(PROMPT, SHORT)) == 1


def test_a_turn_that_cannot_begin_fails_its_requests_alone(engine, monkeypatch):
    serve = type(engine._generator).serve

    def refusing(generator: Any, source: Any, slots: int, longest: int, adapters: Any, begin: Any) -> None:
        if adapters == "ref":
            raise NotImplementedError("ref cannot run")
        serve(generator, source, slots, longest, adapters, begin)

    monkeypatch.setattr(type(engine._generator), "serve", refusing)
    with engine.serve() as server:
        with pytest.raises(NotImplementedError, match="ref cannot run"):
            server.generate_sync(PROMPT, SHORT, adapter="ref", n=2)
        assert len(server.generate_sync(PROMPT, SHORT, adapter="bob")) == 1
        assert server.stats().failed == 1 and server.stats().waiting == 0
