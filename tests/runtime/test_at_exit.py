"""Scripts that end while threads of an engine work: the interpreter's exit ends the threads and aborts nothing."""

import threading
import time
import weakref
from pathlib import Path

import pytest

from hybrid.runtime import at_exit
from tests.marks import slow_but
from tests.rank_pool import run_script

ROOT = str(Path(__file__).resolve().parents[2])
BUILD = """
import time
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import hybrid
from hybrid.execution import rank_waits
from tests.engines import engine_of, settings

dist.init_process_group("gloo")
sizes = dict(hidden_size=64, intermediate_size=128, num_attention_heads=2, num_hidden_layers=4, vocab_size=128)
model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=65536, **sizes))
blocks = {"rollout": {"containers": "native"}, "hybrid_engine": {"enabled": True, "max_out_tokens": 65536}}
engine = engine_of(model, settings(0, **blocks))
ids, sampling = torch.ones(4, 8, dtype=torch.int64), hybrid.SamplingParams(max_new_tokens=60000, min_new_tokens=60000)
"""
# Each without what ends it in time: `close()`, or its `with` block.
STARTS = {
    "stream": "stream = engine.rollout_iter(ids, torch.ones_like(ids), sampling)",
    "server": "server = engine.serve(max_model_len=65536).__enter__()\nserver.submit(ids[0].tolist(), sampling)",
    # A look of each turn publishes, as it does where ranks wait for each other at the end.
    "waits": """
texts = iter(range(10**9))
rank_waits.POLL_INTERVAL_S = 0.0
rank_waits.RankWaits.look = lambda waits: waits._publish(str(next(texts)))
time.sleep(1.0)
""",
}


@pytest.mark.parametrize("name", slow_but([next(iter(STARTS))], STARTS))
def test_threads_at_work_do_not_abort_the_exit(tmp_path, name):
    script = tmp_path / "script.py"
    script.write_text(f"{BUILD}{STARTS[name]}\ntime.sleep(1.0)\nprint('the end', flush=True)\n")
    ranks = 2 if name == "waits" else 1
    done = run_script([str(script)], ranks, timeout_s=120, env={"PYTHONPATH": ROOT})
    assert done.returncode == 0 and done.stdout.count("the end") == ranks, done.stdout


class Owner:
    def __init__(self, ends: bool):
        self.asked = threading.Event()
        self.thread = threading.Thread(target=self.asked.wait if ends else threading.Event().wait, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.asked.set()


def test_a_thread_that_does_not_end_delays_the_exit_no_longer_than_the_limit(monkeypatch):
    owners = [Owner(ends=False), Owner(ends=True), Owner(ends=False)]
    monkeypatch.setattr(at_exit, "OWNERS", weakref.WeakSet(owners))
    monkeypatch.setattr(at_exit, "EXIT_S", 0.5)
    start = time.monotonic()
    at_exit.end_threads()
    assert 0.5 <= time.monotonic() - start < 2.0
    assert all(owner.asked.is_set() for owner in owners) and not owners[1].thread.is_alive()
