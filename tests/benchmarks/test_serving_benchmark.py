"""The serving benchmark: its agents' turns, its figures, and the process of `vllm serve` with a stand-in for it."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from threading import Thread

import pytest

from benchmarks import serving_clients
from benchmarks.cases import make_model
from benchmarks.results import ROOT
from benchmarks.serving import figures_of, number_tokenizer
from benchmarks.vllm_contender import VLLMServer, VLLMSettings
from tests.marks import slow_but


class Counting(BaseHTTPRequestHandler):
    """Answers a request with tokens 0, 1, 2, ..., two in a chunk if it is streamed, and notes it at its server."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        self.send_response(200)
        self.end_headers()
        tokens, step = list(range(body["max_tokens"])), 2 if body["stream"] else body["max_tokens"]
        for begin in range(0, len(tokens), step):
            chunk = json.dumps({"choices": [{"token_ids": tokens[begin : begin + step]}]})
            self.wfile.write(f"data: {chunk}\n\n".encode() if body["stream"] else chunk.encode())
        self.wfile.write(b"data: [DONE]\n\n" if body["stream"] else b"")

    def log_message(self, *_) -> None: ...


@pytest.fixture
def counting():
    """The base URL of a server that counts, and its requests."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Counting) as server:
        server.requests = []
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1", server.requests
        server.shutdown()


def test_a_turns_prompt_is_the_conversation_so_far(counting):
    url, requests = counting
    turns = asyncio.run(serving_clients.agent(url, "a", vocabulary=100, prompt=5, new=8))
    assert serving_clients.TURNS[0] <= len(turns) == len(requests) <= serving_clients.TURNS[1]
    for before, after in pairwise(requests):
        sampled = before["prompt"] + list(range(before["max_tokens"]))
        assert after["prompt"][: len(sampled)] == sampled
        assert len(after["prompt"]) == len(sampled) + serving_clients.USER_TOKENS
    assert [len(times) - 1 for times in turns] == [each["max_tokens"] for each in requests]
    asyncio.run(serving_clients.agent(url, "b", vocabulary=100, prompt=5, new=8))
    assert requests[len(turns)]["prompt"] != requests[0]["prompt"], "no cache helps another agent"


def test_the_figures_are_of_all_turns():
    # Two turns: a first token after 1 s and 3 s, then one each 0.5 s and each 1 s; 7 tokens in 5 s.
    figures = figures_of([[10.0, 11.0, 11.5, 12.0, 12.5], [10.0, 13.0, 14.0, 15.0]])
    assert figures["tokens_per_s"] == 7 / 5 and figures["turns"] == 2
    assert (figures["first_token_p50_s"], figures["first_token_p99_s"]) == (2.0, 3.0)
    assert (figures["token_p50_s"], figures["token_p99_s"]) == (0.75, 1.0)


# A stand-in for vLLM's server: prints its arguments, and answers /version.
STAND_IN = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Version(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"version": "9.8.7"}).encode())
print(sys.argv[1:], flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Version).serve_forever()
"""


@pytest.fixture
def vllm(tmp_path, monkeypatch) -> Callable[[str], VLLMServer]:
    """Starts a program in the place of vLLM's server."""
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def start(program: str) -> VLLMServer:
        (package / "api_server.py").write_text(program)
        settings = VLLMSettings(Path(sys.executable), tmp_path, threads=1)
        return VLLMServer(settings, make_model("micro", "f32", "cpu"), number_tokenizer(512), 6, 40)

    return start


def test_vllms_server_is_started_and_ended(vllm):
    server = vllm(STAND_IN)
    folder = Path(server.weights.name)
    assert server.about == "vllm 9.8.7" and (folder / "config.json").exists() and (folder / "tokenizer.json").exists()
    server.close()
    assert "'--max-model-len', '40', '--max-num-seqs', '6'" in server.log.read_text()
    assert server.process.returncode is not None and not folder.exists()


def test_a_vllm_server_that_dies_raises_with_its_output(vllm):
    with pytest.raises(RuntimeError, match=r"(?s)ended with code 1; .*no such model"):
        vllm("raise SystemExit('no such model')")


@pytest.mark.parametrize("what", slow_but(["overhead"], ["overhead", "agents"]))
def test_a_tiny_run(what, tmp_path):
    output = tmp_path / "serving.json"
    flags = f"--what {what} --shape micro --agents 2 --rounds 1 --rows 3 --prompt 8 --new 8 --repetitions 1 --threads 1"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.serving", *flags.split(), "--output", str(output)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    assert len(result["agents"]) == (what == "agents")
    assert list(result["overhead"]) == ["rollout", "requests", "endpoint", "endpoint, streamed"] * (what == "overhead")
