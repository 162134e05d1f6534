"""Serves a reward function over HTTP, for runs on other machines or in other environments.

python -m rlhf_examples.reward_server --reward rlhf_examples.rewards:exact_match --port 8765
torchrun --nproc_per_node=2 -m rlhf_examples.grpo --reward http://127.0.0.1:8765/exact_match ...

POST {"prompts": [text, ...], "completions": [text, ...], "columns": {name: [value, ...]}} returns
{"rewards": [number or null, ...]}, null where a completion cannot be scored. An invalid request gets status 400 and
{"error": text}. GET returns the reward's name, as a health check. A pipeline starts those of its `servers` itself.
"""

import json
import math
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rlhf_examples.common.arguments import RewardServerArguments, parse_arguments
from rlhf_examples.common.command_line import input_errors_reported
from rlhf_examples.common.files import write_atomically
from rlhf_examples.rewards import Reward, load_reward, reward_name, score_all

POLL_S = 0.5  # between checks that the parent process is alive


def main() -> None:
    """Serve until interrupted, or until the process `parent_pid` has ended."""
    with input_errors_reported():
        args = parse_arguments(RewardServerArguments)
        server = make_server(args.reward, args.host, args.port)
    if args.parent_pid:
        threading.Thread(target=exit_with_parent, args=(args.parent_pid,), daemon=True).start()
    address = f"http://{args.host}:{server.server_port}/{reward_name(args.reward)}"
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


def make_server(name: str, host: str, port: int) -> ThreadingHTTPServer:
    """An HTTP server of the reward called `name`, with a thread for each request.  port: 0 takes a free one."""
    reward = load_reward(name)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, {"reward": name})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            try:
                answer: dict[str, Any] = {"rewards": scores_of(reward, name, body)}
                status = 200
            except (ValueError, KeyError, TypeError) as error:
                status, answer = 400, {"error": f"{type(error).__name__}: {error}"}
            self.answer(status, answer)

        def answer(self, status: int, answer: dict) -> None:
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """No access log: a line for each request would drown the run's output."""

    return ThreadingHTTPServer((host, port), Handler)


def scores_of(reward: Reward, name: str, body: bytes) -> list[float | None]:
    """The scores that answer a request's JSON body; None where a completion cannot be scored."""
    request = json.loads(body)
    prompts, completions, columns = request["prompts"], request["completions"], request.get("columns", {})
    scores = score_all({name: reward}, prompts, completions, columns)[name]
    return [None if math.isnan(score) else score for score in scores]


if __name__ == "__main__":
    main()
