"""`hybrid.openai_server`: an OpenAI-compatible endpoint in a thread of the training process."""

import importlib.util
import ipaddress
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from transformers import PreTrainedTokenizerBase

from hybrid.rollout import RolloutBatch, SamplingParams
from hybrid.runtime import at_exit
from hybrid.serving.endpoint import Endpoint
from hybrid.serving.limits import SESSION_PATH, ServerLimits
from hybrid.serving.server import Server
from hybrid.serving.sessions import Sessions

START_S = STOP_S = 10


class OpenAIServer:
    """An endpoint that runs, until it is closed or its `with` block ends. Built by `hybrid.openai_server`.

    Attributes:
        base_url: for OpenAI's clients, such as "http://127.0.0.1:8000/v1".
        app: the ASGI application.
    """

    def __init__(self, app: Any, listener: socket.socket, endpoint: Endpoint, sessions: Sessions, pad_token_id: int):
        import uvicorn

        self.app, self._sessions, self._pad_token_id = app, sessions, pad_token_id
        host, port = listener.getsockname()[:2]
        self.base_url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        settings = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
        self._http = uvicorn.Server(settings)
        self.thread = threading.Thread(target=self._run, args=(listener,), name="openai-server", daemon=True)
        self.thread.start()
        at_exit.OWNERS.add(self)
        deadline = time.monotonic() + START_S
        while not self._http.started and self.thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.005)
        if not self._http.started:
            raise RuntimeError(f"the HTTP server at {self.base_url} did not start within {START_S} s")

    def _run(self, listener: socket.socket) -> None:
        """Serve until `stop`. The thread keeps this object alive, which ends it at exit."""
        self._http.run(sockets=[listener])

    def __enter__(self) -> "OpenAIServer":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def session_url(self, session: str) -> str:
        """Return the base URL whose requests belong to a session, for programs that know nothing else."""
        return f"{self.base_url.removesuffix('/v1')}{SESSION_PATH}{quote(session, safe='')}/v1"

    def rollouts(self, sessions: str | Sequence[str]) -> RolloutBatch:
        """Return what was sampled in sessions, as training rows on the CPU.

        Tokens are those that were sampled, never tokenized again. A turn whose prompt extends the row before it joins
        that row; `completion_mask` is 1 for sampled tokens, `observation_mask` for those between. A fork is a row of
        its own, whose prompt ends where it begins: a token is sampled in one row alone.

        Args:
            sessions: a name, or several.

        Returns:
            A batch whose `row_index` is the number of each row's session. The last of a row's `turn_rewards` is the
            session's reward, None without one; `turn_seconds` are those between turns.

        Raises:
            ValueError: for a session that is unknown or has no finished completion.
        """
        return self._sessions.rollouts(sessions, self._pad_token_id)

    def reward(self, session: str, value: float) -> None:
        """Set a session's reward, in the place of an earlier one. Raises ValueError for an unknown session.

        `POST /v1/sessions/NAME/reward` with `{"reward": 1.0}` does the same.
        """
        self._sessions.reward(session, value)

    def drop(self, sessions: str | Sequence[str]) -> None:
        """Forget sessions, whose memory is then free. Unknown ones are ignored."""
        self._sessions.drop(sessions)

    def stop(self) -> None:
        """Ask the endpoint to stop; does not wait."""
        self._http.should_exit = True

    def close(self) -> None:
        """Stop the endpoint; what clients still wait for ends. Does nothing the second time."""
        self.stop()
        self.thread.join(STOP_S)


def openai_server(
    server: Server,
    tokenizer: PreTrainedTokenizerBase,
    host: str = "127.0.0.1",
    port: int = 0,
    api_key: str | None = None,
    *,
    model_name: str | None = None,
    history: str = "append",
    defaults: SamplingParams | None = None,
    limits: ServerLimits | None = None,
) -> OpenAIServer:
    """Start an OpenAI-compatible endpoint over a server of `engine.serve`, in a thread of this process.

    It has `/v1/chat/completions`, `/v1/completions`, `/v1/models`, `/v1/sessions/NAME/reward`, `/health`, `/metrics`.
    Requests with a session are recorded for `rollouts`: by the header `X-Session-Id`, the field `session`, or the
    base URL `session_url(session)`.
    Logprobs are those of the distribution that was sampled from (vLLM's `processed_logprobs`).

    Args:
        server: of `engine.serve`, inside its block.
        tokenizer: the model's, with a chat template for chats.
        host: the address to listen at. Another than loopback needs an `api_key`.
        port: 0 takes a free one; the returned `base_url` has it.
        api_key: that clients must give; None: none.
        model_name: the `model` of requests; None: the tokenizer's `name_or_path`. One of `server.adapters` is another.
        history: the context of sessions whose chat template rewrites earlier turns, as for MessageEnvironment:
            "append", as it was sampled, or "template", which forks the row. Requests without a session always have the
            template's.
        defaults: the settings of requests that leave them out; with a seed, each request draws noise of its own. None:
            temperature 1, chats up to the context's end, completions of 16 tokens.
        limits: None: ServerLimits().

    Returns:
        The endpoint; close it, or use it in a `with`.

    Raises:
        ImportError: without FastAPI and uvicorn.
        ValueError: for a host other than loopback without `api_key`, for a port in use, and for an unknown history.
    """
    check_address(host, api_key)
    from hybrid.serving.openai_app import make_app

    limits = limits or ServerLimits()
    sessions = Sessions(limits.max_sessions)
    name = model_name or tokenizer.name_or_path or "model"
    endpoint = Endpoint(server, tokenizer, name, sessions, history, limits.timeout_s, defaults)
    app = make_app(endpoint, limits, api_key)
    pad_token_id = tokenizer.pad_token_id
    return OpenAIServer(app, listener_at(host, port), endpoint, sessions, 0 if pad_token_id is None else pad_token_id)


def check_address(host: str, api_key: str | None) -> None:
    """Raise ImportError without FastAPI and uvicorn, ValueError for a host that needs a key without one."""
    for package in ("fastapi", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"openai_server: {package} is not installed; pip install 'hybrid-engine[server]'")
    if api_key is None and not is_loopback(host):
        raise ValueError(
            f"host: {host!r} given without api_key; give api_key=..., or a loopback address such as '127.0.0.1'"
        )
    if api_key == "":
        raise ValueError("api_key: '' given; it must be a text, or None for a loopback address")


def is_loopback(host: str) -> bool:
    """Whether a host is one that only this machine reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listener_at(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises ValueError for an address that cannot be used."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=512)
    except (OSError, OverflowError) as error:
        raise ValueError(f"host, port: {host!r}, {port!r} given; {error}") from error
