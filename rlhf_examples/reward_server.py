"""Serves a reward function over HTTP, for runs on other machines or in other environments.

python -m rlhf_examples.reward_server --reward rlhf_examples.rewards:exact_match --port 8765
torchrun --nproc_per_node=2 -m rlhf_examples.grpo --reward http://127.0.0.1:8765/exact_match ...

POST {"prompts": [text, ...], "completions": [text, ...], "columns": {name: [value, ...]}} returns
{"rewards": [number or null, ...]}, null where a completion cannot be scored. Other statuses come with {"error": text}:
400 for a request that is not of this form, and for a ValueError or TypeError of the function; 408 for one that takes
longer than `REQUEST_TIMEOUT_S` to arrive; 413 for more than `MAX_BODY_BYTES`; 500 for any other exception of the
function. GET returns the reward's name, as a health check. A pipeline starts those of its `servers` itself.
"""

import json
import math
import os
import socket
import threading
import time
import traceback
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rlhf_examples.common.arguments import RewardServerArguments
from rlhf_examples.common.command_line import checked_arguments
from rlhf_examples.common.files import write_atomically
from rlhf_examples.common.input_errors import input_errors_reported
from rlhf_examples.rewards import Reward, load_reward, reward_name, score_all

POLL_S = 0.5  # between checks that the parent process is alive
MAX_BODY_BYTES = 256 << 20
REQUEST_TIMEOUT_S = 60.0  # for a whole request to arrive; the function may take longer
MAX_THREADS = 32  # requests at once; further ones wait for a connection


def main() -> None:
    """Serve until interrupted, or until the process `parent_pid` has ended."""
    with input_errors_reported():
        args = checked_arguments(RewardServerArguments)
        server = RewardServer(args.reward, args.host, args.port)
    if args.parent_pid:
        threading.Thread(target=exit_with_parent, args=(args.parent_pid,), daemon=True).start()
    host = f"[{args.host}]" if ":" in args.host else args.host
    address = f"http://{host}:{server.server_port}/{reward_name(args.reward)}"
    print(f"{args.reward} at {address}", flush=True)
    if args.address_file:
        write_atomically(Path(args.address_file), address)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


def exit_with_parent(parent_pid: int) -> None:
    """Exit when the parent process has ended, whatever ended it: a killed parent cannot stop its servers."""
    while os.getppid() == parent_pid:
        time.sleep(POLL_S)
    os._exit(0)


class RequestError(Exception):
    """A request that is not answered with rewards.  status: of the answer."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status


class RewardServer(ThreadingHTTPServer):
    """An HTTP server of a reward, with a thread for each of up to `MAX_THREADS` requests."""

    def __init__(self, name: str, host: str, port: int):
        self.name, self.reward = name, load_reward(name)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.free_threads = threading.Semaphore(MAX_THREADS)
        super().__init__((host, port), Handler)

    def process_request(self, *request: Any) -> None:
        """Answer a request in a thread, as soon as one is free."""
        self.free_threads.acquire()
        super().process_request(*request)

    def process_request_thread(self, *request: Any) -> None:
        """The code of that thread."""
        try:
            super().process_request_thread(*request)
        finally:
            self.free_threads.release()


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: RewardServer

    def handle(self) -> None:
        """Read the request and answer it; what has not arrived in time is taken to be missing."""
        self.reading = threading.Timer(REQUEST_TIMEOUT_S, self.stop_reading)
        self.reading.daemon = True
        self.reading.start()
        self.connection.settimeout(2 * REQUEST_TIMEOUT_S)  # for a client that does not take its answer
        try:
            with suppress(ConnectionError, TimeoutError):  # the client has gone
                super().handle()
        finally:
            self.reading.cancel()

    def stop_reading(self) -> None:
        """End the requests's reads, in progress and later ones, as if the client had closed its side."""
        with suppress(OSError):  # the connection is closed
            self.connection.shutdown(socket.SHUT_RD)

    def do_GET(self) -> None:
        self.answer(200, {"reward": self.server.name})

    def do_POST(self) -> None:
        try:
            body = self.body()
            self.reading.cancel()
            self.answer(200, {"rewards": scores_of(self.server.reward, self.server.name, body)})
        except RequestError as error:
            self.answer(error.status, {"error": str(error)})

    def body(self) -> bytes:
        """The request's body. Raises RequestError if it is too long or does not arrive."""
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            raise RequestError(411, f"Content-Length: {length!r} given; it must be the number of bytes of the body")
        if int(length) > MAX_BODY_BYTES:
            self.skip(int(length))  # a client that is still writing would not read the answer
            raise RequestError(413, f"a body of {length} bytes given; it may have {MAX_BODY_BYTES}: send fewer rows")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise RequestError(408, f"{len(body)} of {length} bytes came within {REQUEST_TIMEOUT_S} s")
        return body

    def skip(self, count: int) -> None:
        """Read bytes of the body and drop them."""
        while count > 0 and (part := self.rfile.read(min(count, 1 << 16))):
            count -= len(part)

    def answer(self, status: int, answer: dict) -> None:
        """Send a status and JSON."""
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """No access log: a line for each request would drown the run's output."""


def scores_of(reward: Reward, name: str, body: bytes) -> list[float | None]:
    """The scores that answer a request's JSON body; None where a completion cannot be scored.

    Raises RequestError with the status and the reason if the request is invalid or the function raises.
    """
    try:
        request = json.loads(body)
        prompts, completions, columns = request["prompts"], request["completions"], request.get("columns", {})
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RequestError(400, f"not a request for rewards: {type(error).__name__}: {error}") from error
    try:
        scores = score_all({name: reward}, prompts, completions, columns)[name]
    except BaseException as error:  # of the function, whatever it is: the client must get the reason
        traceback.print_exc()
        status = 400 if isinstance(error, ValueError | TypeError) else 500  # a retry would not help against these
        raise RequestError(status, f"{type(error).__name__}: {error}") from error
    return [None if math.isnan(score) else score for score in scores]


if __name__ == "__main__":
    main()
