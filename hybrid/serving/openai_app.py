"""The endpoint over HTTP: FastAPI's routes, limits, the key, and server-sent events. Needs the extra `server`."""

import asyncio
import hmac
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from hybrid.serving.endpoint import Endpoint, Generation
from hybrid.serving.limits import SESSION_PATH, ServerLimits
from hybrid.serving.protocol import ApiError, shortened
from hybrid.serving.server import ServerClosed

SESSION_HEADER = "x-session-id"
MAX_CLIENTS = 10_000  # whose rates are remembered
# vLLM's names where a number means the same, so that its dashboards and autoscalers read them; `hybrid:` otherwise.
METRICS = (
    ("vllm:num_requests_running", "gauge", "Samples that are decoded now.", "running"),
    ("vllm:num_requests_waiting", "gauge", "Samples in the queue.", "waiting"),
    ("vllm:kv_cache_usage_perc", "gauge", "Used share of the KV cache, 0 to 1.", "kv_cache_usage"),
    ("vllm:prompt_tokens_total", "counter", "Tokens of prompts.", "prompt_tokens"),
    ("vllm:generation_tokens_total", "counter", "Sampled tokens.", "generation_tokens"),
    ("hybrid:weight_version", "gauge", "Version of the weights that sample.", "weight_version"),
)
FINISHED = "vllm:request_success_total"


@dataclass
class RateLimit:
    """Counts the requests of each client as a bucket that refills at `per_minute`; None: no limit."""

    per_minute: int | None
    buckets: dict[str, tuple[float, float]] = field(default_factory=dict)  # requests left, and when

    def require(self, client: str) -> None:
        """Count a request. Raises ApiError if the client has none left."""
        if self.per_minute is None:
            return
        now, rate = time.monotonic(), self.per_minute / 60
        left, then = self.buckets.pop(client, (float(self.per_minute), now))
        left = min(self.per_minute, left + (now - then) * rate)
        if len(self.buckets) >= MAX_CLIENTS:
            self.buckets.pop(next(iter(self.buckets)))
        self.buckets[client] = (max(left - 1, left if left < 1 else 0), now)
        if left < 1:
            raise ApiError(
                f"more requests than ServerLimits.requests_per_minute={self.per_minute} allows; wait "
                f"{(1 - left) / rate:.1f} s",
                429,
                code="rate_limit_exceeded",
            )


def make_app(endpoint: Endpoint, limits: ServerLimits, api_key: str | None) -> FastAPI:
    """Return the application of an endpoint."""
    app = FastAPI(title="hybrid-engine", docs_url=None, redoc_url=None, openapi_url=None)
    rates = RateLimit(limits.requests_per_minute)

    async def admitted(request: Request) -> tuple[Any, str, str]:
        """Return a request's JSON, its session and its client. Raises ApiError if it is refused."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if api_key is not None and not (
            scheme.lower() == "bearer" and hmac.compare_digest(key.encode(), api_key.encode())
        ):
            raise ApiError("Authorization: no valid key given; it must be 'Bearer ' and the api_key", 401)
        client = request.client.host if request.client else ""
        rates.require(client)
        session = request.scope.get("session") or request.headers.get(SESSION_HEADER, "")
        return await content_of(request, limits.max_body_bytes), session, client

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> JSONResponse:
        headers = {"Retry-After": "1"} if error.status in (429, 503) else None
        return JSONResponse(error.body(), error.status, headers)

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> JSONResponse:
        text = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse(ApiError(text).body(), error.status_code)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(ApiError(f"{type(error).__name__}: {error}", 500).body(), 500)

    @app.get("/health")
    async def health() -> Response:
        try:
            endpoint.server.stats()
        except ServerClosed as error:
            raise ApiError(str(error), 503) from error
        return Response()

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(metrics_text(endpoint), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        await admitted(request)
        return JSONResponse(endpoint.models())

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        generation = endpoint.chat(*await admitted(request))
        if generation.request.stream:
            return await streamed(request, endpoint.chunks(generation))
        return JSONResponse(await unless_disconnected(request, endpoint.chat_response(generation)))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        generations: list[Generation] = endpoint.completions(*await admitted(request))
        if generations[0].request.stream:
            return await streamed(request, endpoint.chunks(generations[0]))
        return JSONResponse(await unless_disconnected(request, endpoint.completions_response(generations)))

    @app.post("/v1/sessions/{session}/reward")
    async def reward(request: Request, session: str) -> Response:
        content, _, _ = await admitted(request)
        value = content.get("reward") if isinstance(content, dict) else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ApiError(f"reward: {shortened(value)} given; it must be a number", param="reward")
        try:
            endpoint.sessions.reward(session, value)
        except ValueError as error:
            raise ApiError(str(error), 404, "session") from error
        return JSONResponse({"session": session, "reward": value})

    app.add_middleware(SessionPaths)
    return app


class SessionPaths:
    """Middleware that takes the session from paths such as /sessions/NAME/v1/chat/completions."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        raw = scope.get("raw_path") or scope.get("path", "").encode()
        if scope["type"] == "http" and raw.startswith(SESSION_PATH.encode()):
            name, _, rest = raw[len(SESSION_PATH) :].partition(b"/")
            paths = {"path": f"/{unquote(rest.decode('latin-1'))}", "raw_path": b"/" + rest}
            scope = {**scope, **paths, "session": unquote(name.decode("latin-1"))}
        await self.app(scope, receive, send)


async def content_of(request: Request, max_bytes: int) -> Any:
    """Return the JSON of a request's body, None without one. Raises ApiError if it is too long or no JSON."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise ApiError(f"the body: more than ServerLimits.max_body_bytes={max_bytes} given", 413)
    if request.method == "GET":
        return None
    if not request.headers.get("content-type", "").startswith("application/json"):  # which browsers ask leave for
        raise ApiError("Content-Type: it must be application/json", 415)
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is no JSON: {error}") from error


async def unless_disconnected(request: Request, work: Awaitable[Any]) -> Any:
    """Return the result of `work`, which is cancelled if the client disconnects."""
    task, left = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError("the client has disconnected", 499)
        return task.result()
    finally:
        left.cancel()
        task.cancel()
        with suppress(asyncio.CancelledError, ApiError):
            await task


async def disconnected(request: Request) -> None:
    """Return once the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def streamed(request: Request, chunks: AsyncGenerator[dict[str, Any], None]) -> Response:
    """Return chunks as server-sent events. Raises ApiError if the request is refused before its first chunk."""
    first = await unless_disconnected(request, anext(chunks))

    async def events() -> AsyncIterator[str]:
        yield event(first)
        try:
            async for chunk in chunks:
                yield event(chunk)
        except ApiError as error:
            yield event(error.body())
        else:
            yield "data: [DONE]\n\n"
        finally:
            await chunks.aclose()

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def event(content: dict[str, Any]) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(content)}\n\n"


def metrics_text(endpoint: Endpoint) -> str:
    """Return the server's counts in Prometheus' text format."""
    stats, lines = endpoint.server.stats(), []
    name = endpoint.model_name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    for metric, kind, text, field_name in METRICS:
        lines += [f"# HELP {metric} {text}", f"# TYPE {metric} {kind}"]
        lines.append(f'{metric}{{model_name="{name}"}} {getattr(stats, field_name)}')
    lines += [f"# HELP {FINISHED} Samples that ended.", f"# TYPE {FINISHED} counter"]
    for reason, count in endpoint.finished.items():
        lines.append(f'{FINISHED}{{model_name="{name}",finished_reason="{reason}"}} {count}')
    return "\n".join([*lines, ""])
