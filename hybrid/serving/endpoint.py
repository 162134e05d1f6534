"""OpenAI's endpoints over a `Server`, without HTTP: requests in, responses and chunks of them out."""

import asyncio
import itertools
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid.sampling.params import SamplingParams
from hybrid.serving.chat import ChatPrompt, Chats
from hybrid.serving.protocol import ApiError, ChatRequest, CompletionRequest, GenerationRequest, checked
from hybrid.serving.server import Chunk, Completion, Server, ServerBusy, ServerClosed, TokenScores, row_of
from hybrid.serving.sessions import SampledTurn, Session, Sessions
from hybrid.serving.text_stream import TextStream

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, of /v1/completions


@dataclass
class Sample:
    """One sample of a request so far: its text, tokens and logprobs.  scores: of prompt and tokens, where wanted."""

    index: int
    text: TextStream
    logps: tuple[list[float], list[float], list[float]] = field(default_factory=lambda: ([], [], []))
    finish_reason: str | None = None
    weight_version: int = 0
    sampling_key: tuple[int, int, int] = (0, 0, 0)
    scores: TokenScores | None = None

    @property
    def ids(self) -> list[int]:
        """The sampled tokens, up to the one that completed a stop string."""
        return self.text.ids

    def add(self, piece: Completion | Chunk) -> str:
        """Append the server's next tokens; returns the text that is final by them."""
        new = self.text.push(piece.token_ids, piece.finish_reason)
        for values, more in zip(self.logps, (piece.logps, piece.old_logps, piece.raw_logps), strict=True):
            values += more[: len(self.ids) - len(values)]
        self.finish_reason = "stop" if self.text.stopped else piece.finish_reason
        self.weight_version, self.sampling_key = piece.weight_version, piece.sampling_key
        return new


@dataclass(frozen=True)
class Generation:
    """One prompt with its settings.

    sampling: None: the prompt is scored, and nothing is sampled.
    session: that records it.
    chat: None for a plain completion.
    """

    request: GenerationRequest
    prompt_ids: list[int]
    sampling: SamplingParams | None
    client: str
    request_id: str
    session: Session | None = None
    chat: ChatPrompt | None = None
    start: float = field(default_factory=time.monotonic)


class Endpoint:
    """Answers requests.

    Args:
        server: of `engine.serve`.
        tokenizer: of the model.
        model_name: that clients give as `model`.
        sessions: records requests with a session.
        history, defaults: as for `openai_server`.
        timeout_s: of a request.
    """

    def __init__(
        self,
        server: Server,
        tokenizer: PreTrainedTokenizerBase,
        model_name: str,
        sessions: Sessions,
        history: str,
        timeout_s: float,
        defaults: SamplingParams | None,
    ):
        self.server, self.tokenizer, self.model_name = server, tokenizer, model_name
        self.sessions, self.timeout_s = sessions, timeout_s
        self.chats = Chats(tokenizer, history)
        self.defaults = defaults or SamplingParams(DEFAULT_COMPLETION_TOKENS)
        self.default_chat_tokens = None if defaults is None else defaults.max_new_tokens
        self.created = int(time.time())
        self.finished: dict[str, int] = dict.fromkeys(("stop", "length", "abort"), 0)

    def models(self) -> dict[str, Any]:
        """Return the list of models: this one, and its adapters with it as their `parent`, as vLLM does."""
        parents = dict.fromkeys(self.server.adapters, self.model_name) | {self.model_name: None}
        common = {"object": "model", "created": self.created, "owned_by": "hybrid-engine"}
        common["max_model_len"] = self.server.max_model_len
        data = [{"id": name, "parent": parent, **common} for name, parent in parents.items()]
        return {"object": "list", "data": sorted(data, key=lambda model: model["parent"] is not None)}

    def chat(self, content: Any, session: str, client: str) -> Generation:
        """Return the generation of a chat request. Raises ApiError for what it has wrong."""
        request = self._checked(ChatRequest, content, session)
        recorded = self._session(request)
        prompt = self.chats.prompt(request, recorded)
        name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        sizes = self.default_chat_tokens, len(prompt.ids), self.server.max_model_len
        tokens = request.allowed_tokens(name, getattr(request, name), *sizes)
        sampling = request.sampling(self.defaults, tokens, (prompt.format.template.turn_end,))
        owner, request_id = request.user or request.session or client, request_id_of(recorded, prompt.ids)
        return Generation(request, prompt.ids, sampling, owner, request_id, recorded, prompt)

    def completions(self, content: Any, session: str, client: str) -> list[Generation]:
        """Return the generations of a request of /v1/completions, one for each prompt. Raises ApiError."""
        request = self._checked(CompletionRequest, content, session)
        recorded = self._session(request)
        generations = []
        for prompt in request.prompts():
            ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
            sampling = None
            if request.max_tokens != 0:
                sizes = self.defaults.max_new_tokens, len(ids), self.server.max_model_len
                tokens = request.allowed_tokens("max_tokens", request.max_tokens, *sizes)
                sampling = request.sampling(self.defaults, tokens)
            owner, request_id = request.user or request.session or client, request_id_of(recorded, ids)
            generations.append(Generation(request, ids, sampling, owner, request_id, recorded))
        if request.stream and (len(generations) > 1 or request.echo):
            raise ApiError("stream: true given with echo or several prompts; send a request for each", param="stream")
        return generations

    async def chat_response(self, generation: Generation) -> dict[str, Any]:
        """Return the response to a chat request."""
        samples, choices = await self._samples(generation), []
        for sample in samples:
            ends, message = self._ends(generation, sample)
            choices.append({"index": sample.index, "message": openai_message(message), **ends})
        response = self._response(generation, "chat.completion", choices)
        if generation.request.return_token_ids:
            response["prompt_token_ids"] = generation.prompt_ids
        return response | {"usage": usage([generation], [samples])}

    async def completions_response(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """Return the response to a request of /v1/completions."""
        samples = await asyncio.gather(*(self._samples(generation) for generation in generations))
        choices, request = list[dict[str, Any]](), generations[0].request
        assert isinstance(request, CompletionRequest)
        for generation, of_prompt in zip(generations, samples, strict=True):
            prompt_ids = generation.prompt_ids
            echoed = self.tokenizer.decode(prompt_ids, skip_special_tokens=True) if request.echo else ""
            of_request = {"prompt_token_ids": prompt_ids} if request.return_token_ids else {}
            for sample in of_prompt:
                ends, _ = self._ends(generation, sample)
                choices.append({"index": len(choices), "text": echoed + sample.text.text, **ends, **of_request})
        response = self._response(generations[0], "text_completion", choices)
        return response | {"usage": usage(generations, samples)}

    async def chunks(self, generation: Generation) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of a streamed response.

        A turn that may have tool calls or reasoning comes in one piece at its end.
        """
        chat = generation.chat
        whole = chat is not None and chat.format.parser.response_template is not None
        kind = "text_completion" if chat is None else "chat.completion.chunk"
        samples = self._new_samples(generation)
        sent: dict[int, int] = {}  # tokens
        async for sample, text in self._pieces(generation, samples):
            if chat is not None and sample.index not in sent:
                first = {"index": sample.index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                yield self._response(generation, kind, [first])
            begin = sent.setdefault(sample.index, 0)
            if sample.finish_reason is None and (whole or not text):
                continue
            ends, message = self._ends(generation, sample, begin)
            sent[sample.index] = len(sample.ids)
            delta = streamed_message(message) if whole else {"content": text}
            content = {"text": text} if chat is None else {"delta": delta}
            yield self._response(generation, kind, [{"index": sample.index, **content, **ends}])
        if generation.request.stream_options.include_usage:
            yield self._response(generation, kind, []) | {"usage": usage([generation], [samples])}

    def _checked(self, kind: type[GenerationRequest], content: Any, session: str) -> Any:
        """Return a request, with the session of the header if it has none. Raises ApiError."""
        if session and isinstance(content, dict) and content.get("session") is None:
            content = {**content, "session": session}
        request = checked(kind, content)
        if request.model not in (None, *(names := [self.model_name, *self.server.adapters])):
            allowed = "one of " * (len(names) > 1) + ", ".join(map(repr, names))
            raise ApiError(f"model: {request.model!r} given; it must be {allowed}", 404, "model", "model_not_found")
        return request

    def _adapter(self, request: GenerationRequest) -> str | None:
        """Return the adapter that a request names as its model; None: the server's own."""
        return None if request.model == self.model_name else request.model

    def _session(self, request: GenerationRequest) -> Session | None:
        """Return the session of a request, None without one. Raises ApiError if there are too many."""
        try:
            return self.sessions.open(request.session) if request.session else None
        except ValueError as error:
            raise ApiError(str(error), 429, "session") from error

    def _new_samples(self, generation: Generation) -> list[Sample]:
        """Return the samples of a generation before their first tokens."""
        request = generation.request
        return [Sample(index, TextStream(self.tokenizer, request.stop)) for index in range(request.n)]

    async def _samples(self, generation: Generation) -> list[Sample]:
        """Return the finished samples of a generation, with their scores where wanted."""
        samples = self._new_samples(generation)
        if generation.sampling is None:
            for sample in samples:
                sample.finish_reason = "length"
        else:
            async for _ in self._pieces(generation, samples):
                pass
        if generation.request.wants_scores:
            await asyncio.gather(*(self._score(generation, sample) for sample in samples))
        return samples

    async def _score(self, generation: Generation, sample: Sample) -> None:
        """Score a sample's tokens and its prompt's. Raises ApiError for what the server refuses, and after a
        timeout."""
        request, ids = generation.request, generation.prompt_ids + sample.ids
        order: dict[str, Any] = {"priority": request.priority, "client": generation.client}
        order["adapter"] = self._adapter(request)
        try:
            with api_errors():
                scoring = self.server.score(ids, request.top_logprobs, **order)
                sample.scores = await asyncio.wait_for(scoring, self.timeout_s)
        except asyncio.TimeoutError as error:
            raise self._timed_out() from error

    async def _pieces(self, generation: Generation, samples: list[Sample]) -> AsyncIterator[tuple[Sample, str]]:
        """Run a generation; yield each sample that got tokens, with the text that is final by them.

        Aborts what is still running at the end: after a stop string, a timeout, an error or a cancelled iteration.
        Raises ApiError for what the server refuses, and after a timeout.
        """
        request, request_id, sampling = generation.request, generation.request_id, generation.sampling
        assert sampling is not None, "tokens are to be sampled"
        loop, expired = asyncio.get_running_loop(), []

        def expire() -> None:
            expired.append(loop.create_task(self.server.abort(request_id)))

        timer = loop.call_later(self.timeout_s, expire)
        arguments: dict[str, Any] = {
            "request_id": request_id,
            "n": request.n,
            "priority": request.priority,
            "client": generation.client,
            "adapter": self._adapter(request),
            "logit_bias": request.logit_bias or None,
            "row_id": None if request.seed is not None else row_of(request_id),
        }
        try:
            with api_errors():
                if request.stream or request.stop:
                    async for chunk in self.server.stream(generation.prompt_ids, sampling, **arguments):
                        sample = samples[chunk.index]
                        if sample.finish_reason is not None:
                            continue  # sampled after a stop string, before the abort
                        text = sample.add(chunk)
                        if sample.finish_reason is not None and chunk.finish_reason is None:
                            await self.server.abort(request_id, chunk.index)
                        yield sample, text
                else:
                    for done in await self.server.generate(generation.prompt_ids, sampling, **arguments):
                        yield samples[done.index], samples[done.index].add(done)
        finally:
            timer.cancel()
            if any(sample.finish_reason is None for sample in samples):
                await self.server.abort(request_id)
            for sample in samples:
                reason = sample.finish_reason or "abort"
                self.finished[reason] = self.finished.get(reason, 0) + 1
        if expired:
            raise self._timed_out()

    def _timed_out(self) -> ApiError:
        return ApiError(f"the request took longer than ServerLimits.timeout_s={self.timeout_s:g}", 504)

    def _ends(self, generation: Generation, sample: Sample, begin: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what choices of chats and completions share, for the sample's tokens from `begin` on, and the message
        of a finished chat. Records a finished sample in its session."""
        request, ids = generation.request, sample.ids[begin:]
        message = {} if sample.finish_reason is None else self._recorded(generation, sample)
        has_called = sample.finish_reason == "stop" and "tool_calls" in message
        ends: dict[str, Any] = {"finish_reason": "tool_calls" if has_called else sample.finish_reason, "logprobs": None}
        if request.logprobs:
            ends["logprobs"] = self._logprobs(generation, sample, begin)
        if request.return_token_ids:
            ends["token_ids"] = ids
        return ends, message

    def _logprobs(self, generation: Generation, sample: Sample, begin: int) -> dict[str, Any]:
        """Return the logprobs of a sample's tokens from `begin` on, as chats or plain completions have them.

        With `echo` those of the prompt come first: under the model's logits, and none for its first token.
        """
        request, scores, before = generation.request, sample.scores, len(generation.prompt_ids)
        ids, first = sample.ids[begin:], before + begin
        logps: list[float | None] = [*sample.logps[0][begin:]]
        if isinstance(request, CompletionRequest) and request.echo and scores is not None:
            ids, first, logps = scores.token_ids, 0, [None, *scores.logps[: before - 1], *logps]

        def name(token: int) -> str:
            return f"token_id:{token}" if request.return_tokens_as_token_ids else self.tokenizer.decode([token])

        tops: list[dict[int, float]] = [{} for _ in ids]
        if scores is not None and request.top_logprobs:
            tops = [scores.top(place) if place else {} for place in range(first, first + len(ids))]
        names = [name(token) for token in ids]
        if generation.chat is None:
            offsets = [0, *itertools.accumulate(map(len, names))][:-1]
            logprobs: dict[str, Any] = {"tokens": names, "token_logprobs": logps, "text_offset": offsets}
            if request.top_logprobs:
                by_name = [{name(token): logp for token, logp in reversed(top.items())} for top in tops]
                logprobs["top_logprobs"] = [top or None for top in by_name]
            return logprobs

        def entry(token: str, logp: float | None) -> dict[str, Any]:
            return {"token": token, "logprob": logp, "bytes": list(token.encode())}

        content = [
            {**entry(token, logp), "top_logprobs": [entry(name(other), value) for other, value in top.items()]}
            for token, logp, top in zip(names, logps, tops, strict=True)
        ]
        return {"content": content}

    def _recorded(self, generation: Generation, sample: Sample) -> dict[str, Any]:
        """Return the message of a finished sample, {} without a chat, and record the sample in its session."""
        chat, message = generation.chat, dict[str, Any]()
        if chat is not None:
            cut_text = sample.text.text if sample.text.stopped else None
            message = chat.message_of(sample.ids, sample.finish_reason or "", cut_text)
        if generation.session is not None and sample.finish_reason != "abort" and generation.sampling is not None:
            turn = SampledTurn(
                generation.prompt_ids,
                sample.ids,
                sample.logps,
                sample.finish_reason or "",
                sample.weight_version,
                sample.sampling_key,
                (generation.start, time.monotonic()),
                message,
                "" if chat is None else chat.text,
            )
            self.sessions.record(generation.session, turn, "" if chat is None else chat.digest(message))
        return message

    def _response(self, generation: Generation, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a response, or a chunk of one."""
        name = "cmpl" if kind == "text_completion" else "chatcmpl"
        response = {"id": f"{name}-{generation.request_id}", "object": kind, "created": int(time.time())}
        return {**response, "model": generation.request.model or self.model_name, "choices": choices}


@contextmanager
def api_errors() -> Iterator[None]:
    """Raise what the server refuses in the block as ApiError."""
    try:
        yield
    except (ServerBusy, ServerClosed) as error:
        raise ApiError(str(error), 503, code=type(error).__name__) from error
    except (ValueError, NotImplementedError, IndexError) as error:
        raise ApiError(str(error)) from error
    except RuntimeError as error:  # logits without a softmax
        raise ApiError(f"{type(error).__name__}: {error}", 500) from error


def request_id_of(session: Session | None, prompt_ids: list[int]) -> str:
    """Return the id of a request."""
    return uuid.uuid4().hex if session is None else session.request_id(prompt_ids)


def streamed_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a whole message as the delta of a chunk."""
    delta = openai_message(message)
    for number, call in enumerate(delta.get("tool_calls", [])):
        call["index"] = number
    return delta


def openai_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return an assistant message as OpenAI's clients read it: the arguments of calls as JSON."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or []
    ]
    content = message.get("content") or (None if calls else "")
    return {**message, "content": content, **({"tool_calls": calls} if calls else {})}


def usage(generations: Sequence[Generation], samples: Sequence[Sequence[Sample]]) -> dict[str, int]:
    """Return the numbers of tokens of a request."""
    prompt = sum(len(generation.prompt_ids) for generation in generations)
    completion = sum(len(sample.ids) for of_prompt in samples for sample in of_prompt)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
