"""The server of one rank. The oracle of tokens and logprobs is the same request alone, or the same key's `generate`."""

import asyncio
import gc
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import torch

import hybrid
from hybrid import SamplingParams
from hybrid.generation.scheduler import Scheduler
from hybrid.generation.serving_scheduler import AdmissionQueue, IncomingRow
from tests.serving.requests import mixed_calls, served, values
from tests.tiny_models import VOCABULARY, tiny_model

PROMPT = [5, 6, 7]
LONG = SamplingParams(max_new_tokens=150, seed=3, min_new_tokens=150)
SHORT = SamplingParams(max_new_tokens=12, seed=3)


def built(**settings: Any) -> hybrid.InferenceEngine:
    return hybrid.init_inference(tiny_model("llama"), dtype="fp32", **{"kernel_inject": True, **settings})


@pytest.fixture(scope="module")
def engine():
    return built()


@pytest.fixture
def slowly(monkeypatch):
    """Decode steps take 10 ms."""
    decode = Scheduler.decode

    def slow(scheduler: Scheduler) -> None:
        time.sleep(0.01)
        decode(scheduler)

    monkeypatch.setattr(Scheduler, "decode", slow)


def test_completions_depend_neither_on_order_nor_on_load(engine):
    """200 requests in three orders and at three loads give the same bits: tokens, three logprobs, reasons."""
    calls = mixed_calls(200)
    alone = served(engine, calls, max_num_seqs=1, at_once=1)
    assert len(alone) == 200
    shuffled = random.Random(3).sample(calls, len(calls))
    for order, load in (
        (calls, {"max_num_seqs": 16}),
        (calls[::-1], {"max_num_seqs": 64, "gap_s": 0.002}),
        (shuffled, {"max_num_seqs": 5, "at_once": 12}),
    ):
        again = served(engine, order, **load)
        for request_id, expected in alone.items():
            assert again[request_id] == expected, request_id


def test_a_request_with_a_seed_gives_what_generate_gives(engine):
    with engine.serve() as server:
        completion = server.generate_sync(PROMPT, SHORT)[0]
        greedy = server.generate_sync(torch.tensor(PROMPT), SamplingParams(9, temperature=0.0))[0]
    assert completion.sampling_key == (3, 0, 0) and completion.prompt_ids == PROMPT
    expected = engine.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=True, top_k=0, seed=3)
    assert completion.token_ids == expected[0, 3:].tolist()
    expected = engine.generate(torch.tensor([PROMPT]), max_new_tokens=9, do_sample=False)
    assert greedy.token_ids == expected[0, 3:].tolist()


def test_a_response_prefix_continues_a_completion_of_the_same_key(engine):
    params = SamplingParams(max_new_tokens=30, seed=4, min_new_tokens=30)
    rest = SamplingParams(max_new_tokens=18, seed=4, min_new_tokens=18)
    with engine.serve() as server:
        whole = server.generate_sync(PROMPT, params)[0]
        more = server.generate_sync(PROMPT, rest, response_prefix=whole.token_ids[:12])[0]
    assert more.token_ids == whole.token_ids[12:]
    assert more.logps == whole.logps[12:]


def test_scores_are_the_engines(engine, slowly):
    """Between the steps of other requests, several at once, also prompts longer than a forward, to the bit."""
    draw = random.Random(0)
    texts = [[draw.randrange(3, VOCABULARY) for _ in range(length)] for length in (2, 1, 40, 17, 40, 300)]

    async def main() -> tuple[list[hybrid.TokenScores], hybrid.Completion]:
        async with engine.serve(max_num_seqs=3) as server:
            running = asyncio.ensure_future(server.generate(PROMPT, LONG))
            await asyncio.sleep(0.1)
            scores = await asyncio.gather(*(server.score(ids, index % 3) for index, ids in enumerate(texts)))
            assert not running.done()
            completion = (await running)[0]
            await server.score(PROMPT)
            assert server.stats().kv_cache_usage == 0, "blocks of scored prompts are free again"
            return scores, completion

    scores, beside = asyncio.run(main())
    for index, (ids, actual) in enumerate(zip(texts, scores, strict=True)):
        expected = engine.score(torch.tensor([ids]), torch.ones(1, len(ids)), top_logprobs=index % 3)
        assert actual.token_ids == ids and actual.logps == expected.per_token_logps[0].tolist()
        if index % 3:
            assert actual.top_token_ids == expected.top_ids[0].tolist()
            assert actual.top_logps == expected.top_logprobs[0].tolist()
            assert all(actual.top(place)[ids[place]] == actual.logps[place - 1] for place in range(1, len(ids)))
        else:
            assert actual.top_token_ids == [[]] * (len(ids) - 1)
    with engine.serve() as server:
        assert server.generate_sync(PROMPT, LONG)[0].token_ids == beside.token_ids


def test_what_cannot_be_scored_is_refused(engine, slowly):
    async def main() -> None:
        async with engine.serve(max_num_seqs=1) as server:
            for ids, top, words in (
                ([], 0, "prompt_ids: no tokens given"),
                ([5] * (server.max_model_len + 1), 0, "is over max_model_len"),
                ([VOCABULARY], 0, "a request gave token ids from 97 to 97"),
                (PROMPT, -1, "top_logprobs: -1 given; it must be from 0"),
            ):
                with pytest.raises(ValueError, match=words):
                    await server.score(ids, top)
            running = asyncio.ensure_future(server.generate(PROMPT, LONG))
            waiting = asyncio.ensure_future(server.score(PROMPT, request_id="a"))
            await asyncio.sleep(0.1)
            await server.abort("a")
            with pytest.raises(RuntimeError, match="score: request 'a' was aborted"):
                await waiting
            running.cancel()

    asyncio.run(main())


def test_settings_of_a_request_are_its_own(engine):
    with engine.serve(max_num_seqs=4) as server:
        plain = server.submit(PROMPT, LONG, n=2)
        stopped = server.submit(PROMPT, SamplingParams(40, seed=3, stop_token_ids=(86,)))
        biased = server.submit(PROMPT, SamplingParams(5, seed=3), logit_bias={11: 200.0})
        assert [each.token_ids for each in biased.result()] == [[11] * 5]
        assert stopped.result()[0].token_ids == [33, 86] and stopped.result()[0].finish_reason == "stop"
        first, second = plain.result()
        assert len(first.token_ids) == len(second.token_ids) == 150 and first.token_ids != second.token_ids
        assert first.finish_reason == "length" and [first.index, second.index] == [0, 1]
        assert 86 in first.token_ids[:5]


def test_a_stream_gives_the_tokens_as_they_are_drawn(engine):
    async def main() -> None:
        async with engine.serve() as server:
            whole = await server.generate(PROMPT, LONG, n=2)
            chunks: dict[int, list[hybrid.Chunk]] = {0: [], 1: []}
            async for chunk in server.stream(PROMPT, LONG, n=2, request_id="a"):
                chunks[chunk.index].append(chunk)
            for completion in whole:
                of_sample = chunks[completion.index]
                assert len(of_sample) > 5
                assert [token for chunk in of_sample for token in chunk.token_ids] == completion.token_ids
                assert [logp for chunk in of_sample for logp in chunk.logps] == completion.logps
                assert [chunk.finish_reason for chunk in of_sample] == [None] * (len(of_sample) - 1) + ["length"]

    asyncio.run(main())


def test_a_turn_that_continues_another_computes_its_new_tokens_alone(engine):
    params = SamplingParams(max_new_tokens=48, seed=1, min_new_tokens=48)
    with engine.serve(max_num_seqs=2) as server:
        ids = list(range(3, 83))
        alone = server.generate_sync(ids, params)[0].token_ids
        for turn in range(3):
            before = server.stats().cached_tokens
            answer = server.generate_sync(ids, params, row_id=turn)[0].token_ids
            cached = server.stats().cached_tokens - before
            assert cached >= len(ids) - 5, (turn, cached)
            ids = ids + answer + [9, 10, 11]
        assert server.generate_sync(list(range(3, 83)), params)[0].token_ids == alone


def test_an_aborted_request_has_the_tokens_so_far(engine, slowly):
    async def main() -> None:
        async with engine.serve(max_num_seqs=1) as server:
            running = asyncio.ensure_future(server.generate(PROMPT, LONG, request_id="running"))
            waiting = asyncio.ensure_future(server.generate(PROMPT, LONG, request_id="waiting"))
            await asyncio.sleep(0.3)
            assert (server.stats().running, server.stats().waiting) == (1, 1)
            for request_id in ("waiting", "running", "unknown"):
                await server.abort(request_id)
            (ended,), (never,) = await running, await waiting
            assert ended.finish_reason == never.finish_reason == "abort"
            assert 0 < len(ended.token_ids) == len(ended.logps) < 150 and never.token_ids == []
            assert ended.token_ids == (await server.generate(PROMPT, LONG))[0].token_ids[: len(ended.token_ids)]
            # A task that is cancelled, and a stream that is left, end their requests.
            task = asyncio.ensure_future(server.generate(PROMPT, LONG))
            await asyncio.sleep(0.05)
            task.cancel()
            async for _ in server.stream(PROMPT, LONG):
                break
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len((await server.generate(PROMPT, SHORT))[0].token_ids) == 12
            await asyncio.sleep(0.1)
            assert server.stats().running == server.stats().waiting == 0

    asyncio.run(main())


def test_a_full_queue_refuses(engine, slowly):
    with engine.serve(max_num_seqs=1, max_queue=3) as server:
        futures = [server.submit(PROMPT, SHORT) for _ in range(2)]
        while server.stats().running == 0:
            time.sleep(0.01)
        futures += [server.submit(PROMPT, SHORT, n=2)]
        with pytest.raises(hybrid.ServerBusy, match="3 samples wait, and 1 more are over max_queue=3"):
            server.submit(PROMPT, SHORT)
        assert [len(future.result()) for future in futures] == [1, 1, 2]
        assert server.generate_sync(PROMPT, SHORT)


def row(number: int, priority: int, client: str) -> IncomingRow:
    return IncomingRow(number, torch.tensor(PROMPT), (), SHORT, (), 0, (), priority, client)


def test_clients_take_turns_within_a_priority():
    """A client with many requests does not delay another one's; a lower priority comes first."""
    queue = AdmissionQueue()
    for number in range(4):
        queue.add((0, number), row(number, 0, "many"))
    for number, client in ((4, "few"), (5, "few"), (6, "other")):
        queue.add((0, number), row(number, 0, client))
    queue.add((0, 7), row(7, -1, "many"))
    queue.add((0, 8), row(8, 3, "few"))
    assert queue.remove((0, 2)) and not queue.remove((1, 3))
    order = []
    while queue:
        order.append(queue.pop()[1].number)
    assert order == [7, 0, 4, 6, 1, 5, 3, 8]


def test_a_small_client_is_served_beside_a_large_one(engine, slowly):
    with engine.serve(max_num_seqs=2) as server:
        ended: list[str] = []
        large = [server.submit(PROMPT, SHORT, client="large") for _ in range(20)]
        small = [server.submit(PROMPT, SHORT, client="small") for _ in range(2)]
        for name, futures in (("large", large), ("small", small)):
            for future in futures:
                future.add_done_callback(lambda _, name=name: ended.append(name))
        for future in large + small:
            future.result()
        assert "small" not in ended[-14:]


REFUSED = [
    (([], SHORT), {}, ValueError, "prompt_ids: no tokens given"),
    (([3, VOCABULARY], SHORT), {}, ValueError, "token ids from 3 to 97; the model's are 0 to 96"),
    (([3.5], SHORT), {}, TypeError, "float"),
    ((PROMPT, {"temperature": 1}), {}, TypeError, "must be hybrid.SamplingParams"),
    ((PROMPT, SamplingParams(2000)), {}, ValueError, "over max_model_len=1024"),
    ((PROMPT, SHORT), {"n": 0}, ValueError, "n: 0 given; it must be at least 1"),
    ((PROMPT, SHORT), {"logit_bias": {5: float("nan")}}, ValueError, "logit_bias: nan given"),
    ((PROMPT, SHORT), {"logit_bias": {500: 1.0}}, ValueError, "logit_bias gave token ids"),
    ((PROMPT, SHORT), {"priority": "high"}, ValueError, "priority: 'high' given"),
    ((PROMPT, SHORT), {"client": 3}, TypeError, "client: 3 given"),
]


def test_a_request_that_fails_fails_alone(engine, slowly):
    banned = dict.fromkeys(range(VOCABULARY), float("-inf"))
    with engine.serve(max_num_seqs=4) as server:
        others = [server.submit(PROMPT, LONG, row_id=index, request_id=f"other {index}") for index in range(2)]
        for arguments, more, error, text in REFUSED:
            with pytest.raises(error, match=text):
                server.submit(*arguments, **more)
        with pytest.raises(ValueError, match="'other 0' given, which a request without a result has"):
            server.submit(PROMPT, SHORT, request_id="other 0")
        with pytest.raises(RuntimeError, match="row 0 at step 0, under weight version 0"):
            server.generate_sync(PROMPT, SHORT, n=3, logit_bias=banned)
        assert not any(future.done() for future in others)
        assert server.stats().failed == 1
        actual = [values(future.result()) for future in others]
    with engine.serve() as server:
        assert actual == [values(server.generate_sync(PROMPT, LONG, row_id=index)) for index in range(2)]


def test_threads_and_tasks_send_requests_together(engine):
    calls = mixed_calls(24)
    expected = served(engine, calls, max_num_seqs=1, at_once=1)

    async def main() -> None:
        async with engine.serve(max_num_seqs=6) as server:
            server._seed = 5
            tasks = [server.generate(prompt, params, **more) for prompt, params, more in calls[:12]]
            with ThreadPoolExecutor(6) as pool:
                loop = asyncio.get_running_loop()
                by_threads = [
                    loop.run_in_executor(pool, lambda call=call: server.generate_sync(call[0], call[1], **call[2]))
                    for call in calls[12:]
                ]
                results = await asyncio.gather(*tasks, *by_threads)
        for (_, _, more), completions in zip(calls, results, strict=True):
            assert values(completions) == expected[more["request_id"]]

    asyncio.run(main())


def test_finished_requests_leave_no_memory():
    """After 600 requests, 3,000 more leave no records, and less than 200 bytes each."""
    engine, process = built(), psutil.Process()

    async def send(server: hybrid.Server, count: int) -> int:
        for first in range(0, count, 100):
            prompts = [[3 + (first + index) % 90, 5, 8, 3 + index % 50] for index in range(100)]
            await asyncio.gather(*(server.generate(prompt, SamplingParams(6)) for prompt in prompts))
        gc.collect()
        return process.memory_info().rss

    async def main() -> None:
        async with engine.serve(max_num_seqs=32, max_model_len=16) as server:  # the prefix cache is full soon
            before = await send(server, 600)
            assert await send(server, 3000) - before < 3000 * 200
            table = server._table
            assert not (table.requests or table.by_number or table.waiting or table.arrived or table.aborted)
            assert server.stats().finished == 3600

    asyncio.run(main())


def test_numbers_of_a_server_are_checked(engine):
    for settings, text in (
        ({"max_num_seqs": 0}, "max_num_seqs: 0 given; it must be at least 1"),
        ({"max_model_len": 10**6}, "max_model_len: 1000000 given; it must be between 2 and max_out_tokens=1024"),
        ({"max_queue": None}, "max_queue: None given"),
    ):
        with pytest.raises(ValueError, match=text):
            engine.serve(**settings)


def test_calls_of_the_engine_are_refused_while_it_serves(slowly):
    engine = built()
    expected = engine.generate(torch.tensor([PROMPT]), max_new_tokens=4)
    ids = torch.tensor([PROMPT])
    with engine.serve() as server:
        future = server.submit(PROMPT, LONG)
        for call in (
            lambda: engine.generate(ids, max_new_tokens=4),
            lambda: engine.score(ids, torch.ones_like(ids)),
            lambda: engine(ids),
            engine.sleep,
            engine.wake,
            engine.destroy,
            lambda: engine.serve().__enter__(),
        ):
            with pytest.raises(RuntimeError, match="the engine serves requests, and its weights stay"):
                call()
        with ThreadPoolExecutor() as pool, pytest.raises(RuntimeError, match="the engine serves requests"):
            pool.submit(engine.sleep).result(10)
        assert not future.done()
    with pytest.raises(hybrid.ServerClosed, match="the server has been closed"):
        future.result()
    with pytest.raises(hybrid.ServerClosed, match="the server has been closed"):
        server.submit(PROMPT, SHORT)
    with pytest.raises(hybrid.ServerClosed, match="the server is not started"):
        engine.serve().submit(PROMPT, SHORT)
    with pytest.raises(RuntimeError, match="a server has one block"):
        server.__enter__()
    assert torch.equal(engine.generate(ids, max_new_tokens=4), expected)
    engine.sleep()
    with pytest.raises(RuntimeError, match="asleep|sleeps"):
        engine.serve().__enter__()
    engine.wake()
    assert served(engine, mixed_calls(5), max_num_seqs=2)
    engine.destroy()
    with pytest.raises(RuntimeError, match="destroy"):
        engine.serve().__enter__()


def test_ctrl_c_ends_the_server_and_its_requests(engine, slowly):
    futures = []

    async def main() -> None:
        async with engine.serve(max_num_seqs=2) as server:
            futures.extend(server.submit(PROMPT, LONG) for _ in range(3))
            await asyncio.sleep(0.2)
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(60)

    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert time.monotonic() - begin < 5
    for future in futures:
        with pytest.raises(hybrid.ServerClosed):
            future.result(1)
    assert engine.generate(torch.tensor([PROMPT]), max_new_tokens=2).shape == (1, 5)


def test_an_error_of_the_scheduler_ends_every_request(engine, monkeypatch):
    """Such as lost memory or a lost rank: the block raises it, requests raise ServerClosed, the engine goes on."""
    decode, count = Scheduler.decode, []

    def failing(scheduler: Scheduler) -> None:
        count.append(1)
        if len(count) == 4:
            raise MemoryError("in a step")
        decode(scheduler)

    monkeypatch.setattr(Scheduler, "decode", failing)
    with pytest.raises(MemoryError, match="in a step"), engine.serve() as server:
        future = server.submit(PROMPT, LONG)
        with pytest.raises(hybrid.ServerClosed, match="the server has ended by MemoryError: in a step"):
            future.result()
        with pytest.raises(hybrid.ServerClosed, match="MemoryError"):
            server.submit(PROMPT, SHORT)
    with engine.serve() as server:
        assert len(server.generate_sync(PROMPT, SHORT)[0].token_ids) == 12
