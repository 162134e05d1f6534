"""Several rewards and their weighted sum, async reward functions, and reward servers."""

import asyncio
import json
import math
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from rlhf_examples import rewards
from rlhf_examples.common.arguments import GRPOArguments
from rlhf_examples.common.parsing import arguments_of
from rlhf_examples.common.scorers import Rewards, Scorer, weighted_sum
from rlhf_examples.reward_server import RewardServer
from rlhf_examples.rewards import load_reward, reward_name, score_all
from tests.rlhf_examples.scripts import make_small_models, models_of, run_in_this_rank

HERE = "tests.rlhf_examples.common.test_scorers"
NAN = math.nan
PROMPTS, COMPLETIONS = ["a", "b", "c"], ["one", "two two", "three three three"]


def words(prompts, completions, **columns) -> list[float]:
    return [float(len(completion.split())) for completion in completions]


def only_long(prompts, completions, **columns) -> list[float | None]:
    return [10.0 if len(completion) > 3 else None for completion in completions]


async def later(prompts, completions, **columns) -> list[float]:
    await asyncio.sleep(0)
    return [0.5 for _ in completions]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(rewards, "FIRST_RETRY_DELAY_S", 0.001)


def test_async_rewards_run_concurrently_with_plain_ones():
    """Each function waits until all have started."""
    begun = {name: threading.Event() for name in ("one", "other", "plain")}

    def wait_for_all(name: str) -> None:
        begun[name].set()
        assert all(event.wait(20) for event in begun.values())

    def awaited(name: str):
        async def reward(prompts, completions, **columns):
            assert columns == {"answer": [1, 2, 3]}
            await asyncio.to_thread(wait_for_all, name)
            return [1.0] * len(completions)

        return reward

    def plain(prompts, completions, **columns):
        wait_for_all("plain")
        return [2.0] * len(completions)

    functions = {"one": awaited("one"), "plain": plain, "other": awaited("other")}
    scores = score_all(functions, PROMPTS, COMPLETIONS, {"answer": [1, 2, 3]})
    assert scores == {"one": [1.0] * 3, "plain": [2.0] * 3, "other": [1.0] * 3}
    assert list(scores) == list(functions)

    async def within_a_loop():
        return score_all({"later": later}, PROMPTS, COMPLETIONS, {})

    assert asyncio.run(within_a_loop()) == {"later": [0.5] * 3}


def test_failed_and_slow_rewards_are_retried():
    calls = []

    async def shaky(prompts, completions, **columns):
        calls.append(len(completions))
        if len(calls) == 1:
            raise ConnectionError("gone")
        if len(calls) == 2:
            await asyncio.sleep(30)
        return [1.0] * len(completions)

    start = time.perf_counter()
    assert score_all({"shaky": shaky}, PROMPTS, COMPLETIONS, {}, timeout_s=0.2)["shaky"] == [1.0] * 3
    assert time.perf_counter() - start < 20 and calls == [3, 3, 3]

    async def broken(prompts, completions, **columns):
        raise ConnectionError("gone")

    async def slow(prompts, completions, **columns):
        await asyncio.sleep(30)

    async def wrong(prompts, completions, **columns):
        calls.append("wrong")
        return [1.0]

    with pytest.raises(RuntimeError, match=r"reward: broken failed \(ConnectionError\('gone'\)\), after 1 retries"):
        score_all({"broken": broken}, PROMPTS, COMPLETIONS, {}, retries=1)
    with pytest.raises(RuntimeError, match=r"reward: slow took longer than 0.1 s, after 0 retries"):
        score_all({"slow": slow}, PROMPTS, COMPLETIONS, {}, timeout_s=0.1, retries=0)
    with pytest.raises(ValueError, match="wrong must return a list of 3 numbers"):
        score_all({"wrong": wrong}, PROMPTS, COMPLETIONS, {})
    assert calls.count("wrong") == 1, "a wrong result was retried"


@contextmanager
def served(server: ThreadingHTTPServer):
    """Serves until the block ends; gives the address."""
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_reward_server_gives_its_functions_scores():
    with served(RewardServer("rlhf_examples.rewards:exact_match", "127.0.0.1", 0)) as address:
        name = f"{address}/exact_match"
        rewards = {reward_name(name): load_reward(name)}
        scores = score_all(rewards, PROMPTS, COMPLETIONS, {"answer": ["one", "two", "three  three three"]})
        assert scores == {"exact_match": [1.0, 0.0, 1.0]}
        with pytest.raises(ValueError, match="rejected the request: 400, .*the reward needs the column"):
            score_all(rewards, PROMPTS, COMPLETIONS, {})
    with served(RewardServer(f"{HERE}:only_long", "127.0.0.1", 0)) as address:
        (scores,) = score_all({"s": load_reward(address)}, PROMPTS, COMPLETIONS, {}).values()
        assert math.isnan(scores[0]) and scores[1:] == [10.0, 10.0]
    assert reward_name("http://host:1/a/helpful/") == "helpful"
    assert reward_name("https://host") == "reward_server"


def test_errors_of_a_reward_server_are_retried_or_raised(tmp_path):
    answers = [(503, b"busy"), (200, b'{"rewards": [1, null, 2.5]}'), (200, b"<html>"), (500, b""), (500, b"")]
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status, body = answers[len(requests) - 1]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with served(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as address:
        rewards = {"s": load_reward(address)}
        scores = score_all(rewards, PROMPTS, COMPLETIONS, {"x": [1, 2, 3]})["s"]
        assert scores[0] == 1 and math.isnan(scores[1]) and scores[2] == 2.5
        assert requests[1] == {"prompts": PROMPTS, "completions": COMPLETIONS, "columns": {"x": [1, 2, 3]}}
        with pytest.raises(ValueError, match=r'must return \{"rewards": \[...\]\}; it returned b\'<html>\''):
            score_all(rewards, PROMPTS, COMPLETIONS, {})
        with pytest.raises(RuntimeError, match="reward: s failed .*500"):
            score_all(rewards, PROMPTS, COMPLETIONS, {}, retries=1)
    with pytest.raises(RuntimeError, match="reward: s failed .*ConnectError"):
        score_all(rewards, PROMPTS, COMPLETIONS, {}, retries=0)


@pytest.mark.parametrize(
    ("scores_by_reward", "weights", "total"),
    [
        ([[1.0, 2.0, NAN]], [1.0], [1.0, 2.0, NAN]),
        ([[1.0, 2.0, NAN]], [3.0], [3.0, 6.0, NAN]),
        ([[1.0, 2.0, NAN, NAN], [10.0, NAN, 20.0, NAN]], [1.0, 0.5], [6.0, 2.0, 10.0, NAN]),
    ],
)
def test_the_weighted_sum_ignores_missing_scores(scores_by_reward, weights, total):
    actual = weighted_sum([torch.tensor(values) for values in scores_by_reward], weights)
    torch.testing.assert_close(actual, torch.tensor(total), equal_nan=True)


def check_sums_and_metrics() -> None:
    """The scores of several rewards as GRPO gets them, and their metrics over ranks."""
    names = [f"{HERE}:words", f"{HERE}:only_long", f"{HERE}:later"]
    rewards = Rewards.load(names, "float32", rows=2, weights=[1.0, 0.1, 2.0])
    texts = COMPLETIONS if dist.get_rank() == 0 else ["x", "y", "z z"]
    rows = [{"prompt": prompt, "columns": "{}"} for prompt in PROMPTS]
    scores = rewards.scores_by_name(SimpleNamespace(), rows, texts)
    assert list(scores) == ["reward", "words", "only_long", "later"]
    expected = [[2.0, 4.0, 5.0], [2.0, 2.0, 3.0]][dist.get_rank()]
    torch.testing.assert_close(scores["reward"], torch.tensor(expected))
    metrics = rewards.metrics()
    everything = torch.tensor([1.0, 2.0, 3.0, 1.0, 1.0, 2.0])
    assert metrics["rewards/words/mean"] == pytest.approx(everything.mean().item())
    assert metrics["rewards/words/std"] == pytest.approx(everything.std().item())
    assert (metrics["rewards/only_long/mean"], metrics["rewards/only_long/std"]) == (10.0, 0.0)
    single = Rewards.load(names[:1], "float32", rows=2)
    assert list(single.scores_by_name(SimpleNamespace(), rows, texts)) == ["words"]
    weighted = Rewards.load(names[:1], "float32", rows=2, weights=[3.0])
    scores = weighted.scores_by_name(SimpleNamespace(), rows, texts)
    torch.testing.assert_close(scores, {"reward": 3 * scores["words"], "words": scores["words"]})
    torch.testing.assert_close(weighted(SimpleNamespace(), rows, texts), 3 * scores["words"])
    metrics = weighted.metrics()
    assert metrics["rewards/reward/mean"] == pytest.approx(3 * metrics["rewards/words/mean"])


def test_weighted_sums_and_metrics_over_ranks(ranks):
    ranks.run(check_sums_and_metrics)


def test_reward_arguments():
    assert arguments_of(GRPOArguments, {"reward": "a:f"}).reward == ["a:f"]
    args = arguments_of(GRPOArguments, {}, ["--reward", "a:f", "http://h/x", "--reward_weights", "1", "0.5"])
    assert (args.reward, args.reward_weights) == (["a:f", "http://h/x"], [1.0, 0.5])
    with pytest.raises(ValueError, match=r"reward_weights: \[1.0\] given for 2 rewards; give a weight for each"):
        GRPOArguments(reward=["a:f", "b:g"], reward_weights=[1.0])


def test_rewards_with_equal_names_are_numbered():
    rewards = Rewards.load([f"{HERE}:words", f"{HERE}:words"], "float32", rows=2)
    assert [scorer.name for scorer in rewards.scorers] == ["words", "words_2"]
    assert sys.modules[HERE].words is rewards.scorers[1].function
    Scorer.check(f"{HERE}:words", "http://127.0.0.1:1/not-asked")


def test_numbered_reward_names_are_unique():
    server = "http://127.0.0.1:1/"
    names = [f"{server}score_2", f"{server}score", f"{server}score", f"{server}reward"]
    several = Rewards.load(names, "float32", rows=2)
    assert [scorer.name for scorer in several.scorers] == ["score_2", "score", "score_3", "reward_2"]


def check_overlong(directory: str) -> None:
    """GRPO's reward is the function's less the punishment of overlong completions."""
    few = {"num_iterations": 1, "soft_punish_cache": 8, "output_dir": f"{directory}/run"}
    metrics = run_in_this_rank("grpo", {**models_of("grpo", Path(directory)), **few})
    lengths = metrics["completions/mean_length"] / 8
    assert metrics["reward"] == pytest.approx(metrics["rewards/number_of_words/mean"] - lengths, abs=1e-5)


def test_overlong_completions_reduce_the_reward(ranks, tmp_path):
    make_small_models(Path(tmp_path))
    ranks.run(check_overlong, str(tmp_path))
