"""Reward servers started by a pipeline give their functions' scores, and end with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest
import torch.distributed as dist

from rlhf_examples import pipeline
from rlhf_examples.common.arguments import RewardServerArguments
from rlhf_examples.common.daemon_threads import running
from rlhf_examples.common.http_client import fetch
from rlhf_examples.common.ranks import gather_objects
from rlhf_examples.common.served_rewards import served_rewards
from rlhf_examples.common.steps import parse
from rlhf_examples.rewards import SERVERS, address_of, load_reward, reward_name
from tests.marks import slow_but
from tests.rlhf_examples.scripts import TINY, logged, make_small_models, models_of

REWARD = "tests.rlhf_examples.scripts:number_of_words"
SUMS = "rlhf_examples.rewards:exact_match"


def responds(address: str) -> bool:
    try:
        with running(fetch(address)) as response:
            return response.result(5).is_success
    except httpx2.HTTPError:  # connection refused or reset
        return False


def require_ended(address: str) -> None:
    deadline = time.monotonic() + 10
    while responds(address):
        assert time.monotonic() < deadline, "the server still responds"
        time.sleep(0.1)


def check_grpo(directory: str) -> None:
    settings = {**TINY["grpo"], **models_of("grpo", Path(directory)), "num_iterations": 2, "script": "grpo"}
    steps = {"here": {**settings, "reward": REWARD}, "asked": {**settings, "reward": "server:words"}}
    servers = {"words": {"reward": REWARD}}
    pipeline.run(parse({"output_dir": f"{directory}/run", "steps": steps, "servers": servers}, []))
    local, served = (logged(Path(directory) / "run" / name) for name in steps)
    assert len(local) == 2 and local == served, "metrics differ between local and served rewards"
    assert SERVERS not in os.environ


@pytest.mark.slow
def test_grpo_trains_alike_with_a_served_reward(ranks, tmp_path):
    make_small_models(tmp_path)
    ranks.run(check_grpo, str(tmp_path))


def check_lifetime() -> None:
    """The first rank of a host starts a server for all its ranks; it ends with the block, also after an exception."""
    with pytest.raises(KeyError, match="mine"), served_rewards({"sums": RewardServerArguments(SUMS, port=0)}):
        address = address_of("server:sums")
        assert len(set(gather_objects(address))) == 1 and responds(address)
        assert reward_name("server:sums") == "exact_match"
        with pytest.raises(ValueError, match="'server:other' given; reward servers of this pipeline: server:sums"):
            load_reward("server:other")
        dist.barrier()
        raise KeyError("mine")
    dist.barrier()
    assert not responds(address)
    with (
        pytest.raises(ValueError, match="servers.sums: the server for 'nowhere:f' did not start"),
        served_rewards({"sums": RewardServerArguments("nowhere:f", port=0)}),
    ):
        raise AssertionError("the block was entered")


def test_a_reward_server_runs_until_its_block_ends(ranks):
    ranks.run(check_lifetime)


HOLDING = f"""
import time, torch.distributed as dist
from rlhf_examples.common.arguments import (RewardServerArguments)
from rlhf_examples.rewards import address_of
from rlhf_examples.common.served_rewards import served_rewards
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
with served_rewards({{"sums": RewardServerArguments({SUMS!r}, port=0)}}):
    print(address_of("server:sums"), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", slow_but([signal.SIGKILL], [signal.SIGTERM, signal.SIGKILL]))
def test_a_reward_server_ends_with_its_parent_process(number):
    holder = subprocess.Popen([sys.executable, "-c", HOLDING], stdout=subprocess.PIPE, text=True)
    try:
        address = next(line.strip() for line in holder.stdout if line.startswith("http"))
        assert responds(address)
        holder.send_signal(number)
        assert holder.wait(20) == -number
        require_ended(address)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def test_invalid_server_settings_raise_before_the_pipeline_starts():
    steps = {"grpo": {"reward": "server:sum"}}
    with pytest.raises(ValueError, match="steps.grpo: 'server:sum' given, and the file defines no servers"):
        parse({"steps": steps}, [])
    with pytest.raises(ValueError, match="steps.grpo: unknown key 'sum'; the nearest known key is 'sums'"):
        parse({"steps": steps, "servers": {"sums": {"reward": SUMS}}}, [])
    with pytest.raises(ValueError, match="servers.sums: unknown key 'rewards'"):
        parse({"steps": {"grpo": {}}, "servers": {"sums": {"rewards": SUMS}}}, [])
