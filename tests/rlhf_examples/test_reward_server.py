"""The example reward server: every request gets an answer with a reason; this machine's servers need no proxy."""

import json
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch.distributed as dist

from rlhf_examples import reward_server, rewards
from rlhf_examples.common.arguments import RewardServerArguments
from rlhf_examples.common.http_client import is_this_machine
from rlhf_examples.common.served_rewards import served_rewards
from rlhf_examples.reward_server import RewardServer
from rlhf_examples.rewards import load_reward, score_all

HERE = "tests.rlhf_examples.test_reward_server"
ONE = {"prompts": ["a"], "completions": ["b b"]}
PROXIES = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
PROXIES |= {"all_proxy": "socks5://127.0.0.1:9", "no_proxy": ""}


def words(prompts, completions, **columns) -> list[float]:
    return [float(len(completion.split())) for completion in completions]


def fails(prompts, completions, kind, **columns) -> list[float]:
    raise {"zero": ZeroDivisionError, "key": KeyError, "exit": SystemExit, "value": ValueError}[kind[0]](kind[0])


RUNNING, MOST, LEAVE = [], [], threading.Event()


def waits(prompts, completions, **columns) -> list[float]:
    RUNNING.append(None)
    MOST.append(len(RUNNING))
    LEAVE.wait(20)
    RUNNING.pop()
    return words(prompts, completions)


@contextmanager
def served(server: ThreadingHTTPServer):
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


def request(port: int, *parts: bytes, pause_s: float = 0.0) -> tuple[int, dict]:
    """The status and the JSON that answer the bytes of a request, sent in parts; OSError if nobody reads them."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(pause_s)
        answer = b""
        while received := connection.recv(1 << 16):
            answer += received
    return int(answer.split()[1]), json.loads(answer.partition(b"\r\n\r\n")[2])


def post(body: bytes, length: object = None) -> bytes:
    return f"POST / HTTP/1.1\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    ("function", "body", "status", "reason"),
    [
        ("words", b"{", 400, "JSONDecodeError"),
        ("words", b"\xff\xfe\xfd", 400, "UnicodeDecodeError"),
        ("words", b"[" * 100_000, 400, "RecursionError"),
        ("words", b"[]", 400, "TypeError"),
        ("words", b'{"prompts": []}', 400, "KeyError: 'completions'"),
        ("words", json.dumps({**ONE, "columns": 3}).encode(), 400, "TypeError"),
        ("fails", json.dumps({**ONE, "columns": {"kind": ["zero"]}}).encode(), 500, "ZeroDivisionError: zero"),
        ("fails", json.dumps({**ONE, "columns": {"kind": ["key"]}}).encode(), 500, "KeyError: 'key'"),
        ("fails", json.dumps({**ONE, "columns": {"kind": ["exit"]}}).encode(), 500, "SystemExit: exit"),
        ("fails", json.dumps({**ONE, "columns": {"kind": ["value"]}}).encode(), 400, "ValueError: value"),
    ],
)
def test_what_goes_wrong_is_answered_with_a_status_and_the_reason(function, body, status, reason):
    with served(RewardServer(f"{HERE}:{function}", "127.0.0.1", 0)) as port:
        answered, answer = request(port, post(body))
        assert answered == status and reason in answer["error"]


def test_lengths_of_bodies_are_checked(monkeypatch):
    monkeypatch.setattr(reward_server, "MAX_BODY_BYTES", 1000)
    with served(RewardServer(f"{HERE}:words", "127.0.0.1", 0)) as port:
        assert request(port, post(json.dumps(ONE).encode())) == (200, {"rewards": [2.0]})
        assert request(port, b"POST / HTTP/1.1\r\n\r\n")[0] == 411
        assert request(port, post(b"{}", -1))[0] == 411
        address = load_reward(f"http://127.0.0.1:{port}")
        with pytest.raises(ValueError, match="rejected the request: 413, .*it may have 1000"):
            score_all({"s": address}, ["a"] * 500_000, ["b"] * 500_000, {})


def test_requests_that_do_not_arrive_end_at_the_timeout(monkeypatch):
    monkeypatch.setattr(reward_server, "REQUEST_TIMEOUT_S", 0.5)
    monkeypatch.setattr(reward_server, "MAX_THREADS", 1)
    with served(RewardServer(f"{HERE}:words", "127.0.0.1", 0)) as port:
        status, answer = request(port, post(b"{", 9))
        assert status == 408 and "1 of 9 bytes" in answer["error"]
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            assert connection.recv(1) == b"", "a client that sends nothing keeps its thread"
        with pytest.raises(OSError, match="Broken pipe|reset"):  # bytes that drip do not extend the time
            request(port, post(b"{", 1000), *[b" "] * 200, pause_s=0.1)
        monkeypatch.setattr(reward_server, "scores_of", lambda *request: time.sleep(1.5) or [1.0])
        assert request(port, post(b"{}")) == (200, {"rewards": [1.0]}), "the function's time counts"


def test_threads_are_bounded_and_every_request_is_answered(monkeypatch):
    monkeypatch.setattr(reward_server, "MAX_THREADS", 2)
    LEAVE.clear(), MOST.clear()
    answers = []
    with served(RewardServer(f"{HERE}:waits", "127.0.0.1", 0)) as port:
        body = post(json.dumps(ONE).encode())
        clients = [threading.Thread(target=lambda: answers.append(request(port, body))) for _ in range(6)]
        for client in clients:
            client.start()
        while len(MOST) < 2:
            time.sleep(0.01)
        time.sleep(0.3)  # a third thread would begin now
        LEAVE.set()
        for client in clients:
            client.join()
    assert answers == [(200, {"rewards": [2.0]})] * 6 and max(MOST) == 2


def test_an_error_of_the_function_reaches_the_run(monkeypatch):
    monkeypatch.setattr(rewards, "FIRST_RETRY_DELAY_S", 0.001)
    with served(RewardServer(f"{HERE}:fails", "127.0.0.1", 0)) as port:
        reward = {"s": load_reward(f"http://127.0.0.1:{port}")}
        with pytest.raises(RuntimeError, match="failed: 500, .*ZeroDivisionError: zero.*after 1 retries"):
            score_all(reward, ["a"], ["b"], {"kind": ["zero"]}, retries=1)


def own_names() -> list[str]:
    names = ["127.0.0.1", "localhost", "127.3.2.1", "0.0.0.0"]
    try:
        socket.create_connection((socket.gethostname(), 9), timeout=5).close()
    except ConnectionRefusedError:
        names.append(socket.gethostname())
    except OSError:  # the machine does not know its own name
        pass
    return names


@pytest.mark.parametrize("host", own_names())
def test_this_machine_is_reached_without_a_proxy(host, monkeypatch):
    for name, value in PROXIES.items():
        monkeypatch.setenv(name, value)
    with served(RewardServer(f"{HERE}:words", "0.0.0.0", 0)) as port:
        assert score_all({"s": load_reward(f"http://{host}:{port}")}, ["a"], ["b b"], {}, retries=0) == {"s": [2.0]}


def test_ipv6s_loopback_is_reached_without_a_proxy(monkeypatch):
    for name, value in PROXIES.items():
        monkeypatch.setenv(name, value)
    assert is_this_machine("::1")
    try:
        server = RewardServer(f"{HERE}:words", "::1", 0)
    except OSError:
        pytest.skip("no IPv6 here")
    with served(server) as port:
        assert score_all({"s": load_reward(f"http://[::1]:{port}")}, ["a"], ["b b"], {}, retries=0) == {"s": [2.0]}


def test_other_machines_are_reached_through_the_proxy(monkeypatch):
    paths = []

    class Proxy(BaseHTTPRequestHandler):
        def do_POST(self):
            paths.append(self.path)
            self.rfile.read(int(self.headers["Content-Length"]))
            body = b'{"rewards": [7]}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with served(ThreadingHTTPServer(("127.0.0.1", 0), Proxy)) as port:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("no_proxy", "")
        assert score_all({"s": load_reward("http://rewards.invalid/x")}, ["a"], ["b"], {}, retries=0) == {"s": [7.0]}
    assert paths == ["http://rewards.invalid/x"]


def check_behind_a_proxy() -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in PROXIES.items():
            patch.setenv(name, value)
        with served_rewards({"words": RewardServerArguments(f"{HERE}:words", port=0)}):
            assert score_all({"s": load_reward("server:words")}, ["a"], ["b b"], {}, retries=0) == {"s": [2.0]}
            dist.barrier()  # the first rank ends the servers


def test_a_pipelines_servers_start_where_a_proxy_is_set(ranks):
    ranks.run(check_behind_a_proxy)


def test_an_invalid_address_is_an_error_before_the_run():
    with pytest.raises(ValueError, match="reward: 'http://host:port/x' given; it must be"):
        load_reward("http://host:port/x")
