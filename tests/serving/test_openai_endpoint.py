"""The endpoint over HTTP, with a scripted server: OpenAI's forms, settings, stop strings, errors and limits."""

import asyncio
import gc
import json
import subprocess
import sys

import httpx2 as httpx
import pytest

import hybrid
from hybrid.runtime import at_exit
from hybrid.serving.openai_server import ServerLimits
from tests.rlhf_examples.chat_models import tokenizer_of
from tests.serving.scripted_server import ScriptedServer

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALL = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
USER = [{"role": "user", "content": "1 + 2?"}]


def test_an_endpoint_that_nobody_holds_still_ends_at_the_programs_end():
    base_url = Service("a", server={}).endpoint.base_url
    gc.collect()
    (endpoint,) = [each for each in at_exit.OWNERS if getattr(each, "base_url", "") == base_url]
    endpoint.stop()
    endpoint.thread.join(10)
    assert not endpoint.thread.is_alive()


class Service:
    """An endpoint over a scripted server, and a client of its application."""

    def __init__(self, *turns: str, family="qwen2_5", ended=True, server: dict | None = None, **settings):
        self.tokenizer = tokenizer_of(family)
        end = [hybrid.turn_end_token(self.tokenizer)] if ended else []
        self.turns = [self.tokenizer(turn)["input_ids"] + end for turn in turns]
        self.server = ScriptedServer(self.script, **(server or {}))
        self.endpoint = hybrid.openai_server(self.server, self.tokenizer, model_name="tiny", **settings)

    def script(self, prompt: list[int], sample: int) -> list[int]:
        return self.turns[(len(self.server.requests) - 1 + sample) % len(self.turns)]

    def client(self, **settings) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.endpoint.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://test", **settings)

    def send(self, path: str, content: dict | None = None, method: str = "POST", **settings) -> httpx.Response:
        async def run() -> httpx.Response:
            async with self.client() as client:
                body = {} if method == "GET" else {"json": content}
                return await client.request(method, path, **body, **settings)

        return asyncio.run(run())

    def chat(self, messages=USER, **fields) -> dict:
        answer = self.send("/v1/chat/completions", {"model": "tiny", "messages": messages, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def complete(self, **fields) -> dict:
        answer = self.send("/v1/completions", {"model": "tiny", **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture
def service():
    """Makes services that are closed after the test."""
    services = []

    def make(*turns: str, **settings) -> Service:
        services.append(Service(*turns, **settings))
        return services[-1]

    yield make
    for each in services:
        each.endpoint.close()


def events(response: httpx.Response) -> list[dict]:
    """The chunks of a stream, which ends with [DONE]."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def joined(lists) -> list:
    """The items of all lists."""
    return [item for each in lists for item in each]


def test_a_chat_is_the_template_and_the_sampled_tokens(service):
    tiny = service("It is 3.")
    answer = tiny.chat(return_token_ids=True)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "It is 3."}
    assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
    expected = tiny.tokenizer.apply_chat_template(USER, add_generation_prompt=True, return_dict=False)
    assert answer["prompt_token_ids"] == tiny.server.requests[0]["prompt_ids"] == expected
    assert choice["token_ids"] == tiny.turns[0], "the end token too"
    assert answer["usage"] == {
        "prompt_tokens": len(expected),
        "completion_tokens": len(tiny.turns[0]),
        "total_tokens": len(expected) + len(tiny.turns[0]),
    }
    assert answer["object"] == "chat.completion" and answer["model"] == "tiny"


def test_settings_reach_the_sampler(service):
    tiny = service("yes")
    tiny.chat(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, min_tokens=2, repetition_penalty=1.2, seed=4, n=2,
        max_completion_tokens=9, stop_token_ids=[5], logit_bias={"3": 1.5}, priority=2, user="me",
    )  # fmt: skip
    request = tiny.server.requests[0]
    end = hybrid.turn_end_token(tiny.tokenizer)
    assert request["params"] == hybrid.SamplingParams(
        max_new_tokens=9, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, min_new_tokens=2, repetition_penalty=1.2,
        seed=4, stop_token_ids=(5, end),
    )  # fmt: skip
    assert (request["n"], request["logit_bias"], request["priority"], request["client"]) == (2, {3: 1.5}, 2, "me")
    tiny.chat()
    assert tiny.server.requests[1]["params"].temperature == 1.0, "OpenAI's default"
    left = tiny.server.max_model_len - len(tiny.server.requests[1]["prompt_ids"])
    assert tiny.server.requests[1]["params"].max_new_tokens == left, "up to the context's end"


def test_defaults_are_the_settings_that_a_request_leaves_out(service):
    defaults = hybrid.SamplingParams(20, temperature=0.3, top_p=0.8, seed=5)
    tiny = service("yes", defaults=defaults)
    tiny.chat(top_p=0.7, session="a")
    tiny.chat(temperature=0, seed=6, max_tokens=3)
    tiny.complete(prompt="a", session="a")
    first, second, third = (request["params"] for request in tiny.server.requests)
    end = (hybrid.turn_end_token(tiny.tokenizer),)
    assert first == hybrid.SamplingParams(20, temperature=0.3, top_p=0.7, seed=5, stop_token_ids=end)
    assert second == hybrid.SamplingParams(3, temperature=0, top_p=0.8, seed=6, stop_token_ids=end)
    assert third == defaults
    rows = [request["row_id"] for request in tiny.server.requests]
    assert rows[1] is None and rows[0] != rows[2], "under a default seed each request draws noise of its own"


def test_logprobs_are_those_of_the_sampled_tokens(service):
    tiny = service("ab")
    content = tiny.chat(logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [(each["token"], each["logprob"], each["bytes"]) for each in content] == [
        ("a", -0.5, [97]),
        ("b", -1.0, [98]),
        ("<|im_end|>", -1.5, list(b"<|im_end|>")),
    ]
    logprobs = tiny.complete(prompt="x", logprobs=0, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{token}" for token in tiny.turns[0]]
    assert logprobs["token_logprobs"] == [-0.5, -1.0, -1.5]
    assert "top_logprobs" not in logprobs and not tiny.server.scored


def test_echo_gives_the_prompts_logprobs(service):
    """As evaluation harnesses ask for them: the prompt's tokens, then the sampled ones."""
    tiny = service("ab")
    (choice,) = tiny.complete(prompt="xyz", echo=True, logprobs=0)["choices"]
    prompt_ids = tiny.tokenizer("xyz")["input_ids"]
    assert choice["text"] == "xyzab"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["x", "y", "z", "a", "b", "<|im_end|>"]
    assert logprobs["token_logprobs"] == [None, -1.0, -2.0, -0.5, -1.0, -1.5], "the sampled ones as they were drawn"
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4, 5]
    assert tiny.server.scored[-1][:2] == (prompt_ids + tiny.turns[0], 0)
    choice = tiny.complete(prompt=[prompt_ids] * 2, echo=True, logprobs=2, max_tokens=0, session="a")["choices"][1]
    assert choice["text"] == "xyz" and choice["finish_reason"] == "length" and len(tiny.server.requests) == 1
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
    names = [tiny.tokenizer.decode([token]) for token in (10, 11)]
    first, second, third = choice["logprobs"]["top_logprobs"]
    assert first is None and second == {names[0]: -0.1, names[1]: -0.2, "y": -1.0}
    assert third == {names[0]: -0.1, names[1]: -0.2, "z": -2.0}
    assert not tiny.complete(prompt="x", echo=True, max_tokens=0)["choices"][0]["logprobs"]
    assert len(tiny.server.scored) == 3
    with pytest.raises(ValueError, match="have no finished completion"):
        tiny.endpoint.rollouts("a")  # a scored prompt is no turn


def test_top_logprobs_of_sampled_tokens(service):
    tiny = service("ab")
    answer = tiny.chat(logprobs=True, top_logprobs=1, user="me", priority=4, return_token_ids=True)
    content = answer["choices"][0]["logprobs"]["content"]
    prompt = answer["prompt_token_ids"]
    assert tiny.server.scored == [(prompt + tiny.turns[0], 1, 4, "me", None)]
    top = tiny.tokenizer.decode([10])
    for place, (each, token) in enumerate(zip(content, ("a", "b", "<|im_end|>"), strict=True)):
        assert each["logprob"] == -0.5 * (place + 1)
        expected = [(top, -0.1), (token, -float(len(prompt) + place))]
        assert [(other["token"], other["logprob"]) for other in each["top_logprobs"]] == expected
    logprobs = tiny.complete(prompt="x", logprobs=1, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"][1] == {"token_id:10": -0.1, f"token_id:{tiny.turns[0][1]}": -2.0}


def test_tools_are_rendered_and_calls_parsed(service):
    tiny = service(CALL)
    answer = tiny.chat(tools=[TOOL])
    message, reason = answer["choices"][0]["message"], answer["choices"][0]["finish_reason"]
    assert reason == "tool_calls" and message["content"].strip() == "Let me see."
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "add" and json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert "Add numbers." in tiny.tokenizer.decode(tiny.server.requests[0]["prompt_ids"])
    for given in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        plain = tiny.chat(**given)["choices"][0]
        assert plain["message"] == {"role": "assistant", "content": CALL} and plain["finish_reason"] == "stop"


def test_tool_messages_are_what_the_template_takes(service):
    """Arguments as text or object, contents as text or parts, null contents, and names of tools by their call."""
    tiny = service("3", family="llama3_1")
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    tiny.chat(messages, tools=[TOOL])
    as_objects = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    expected = tiny.tokenizer.apply_chat_template(
        [
            {"role": "system", "content": "Be brief."},
            *USER,
            {"role": "assistant", "content": "", "tool_calls": [as_objects]},
            {"role": "tool", "name": "add", "content": "3"},
        ],
        tools=[TOOL],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert tiny.server.requests[0]["prompt_ids"] == expected


@pytest.mark.parametrize("step", [1, 3, 50])
@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_gives_the_text_of_the_whole_answer(service, step, n):
    tiny = service("Grüße 🙂!", "no", "perhaps", server={"step": step})
    body = {"model": "tiny", "messages": USER, "n": n, "logprobs": True, "return_token_ids": True}
    whole = tiny.send("/v1/chat/completions", body).json()
    tiny.server.requests.clear()
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    response = tiny.send("/v1/chat/completions", streamed)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events(response)
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    for index, expected in enumerate(whole["choices"]):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"]["content"] for choice in own) == expected["message"]["content"]
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["stop"]
        assert joined(choice.get("token_ids", []) for choice in own) == expected["token_ids"]
        content = joined(choice["logprobs"]["content"] for choice in own[1:])
        assert content == expected["logprobs"]["content"]


def test_a_streamed_turn_with_tools_comes_whole(service):
    tiny = service(CALL)
    body = {"model": "tiny", "messages": USER, "tools": [TOOL], "stream": True}
    first, last = (chunk["choices"][0] for chunk in events(tiny.send("/v1/chat/completions", body)))
    assert first["delta"]["role"] == "assistant"
    (call,) = last["delta"]["tool_calls"]
    assert call["index"] == 0 and json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
    assert last["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("step", [1, 4])
def test_a_stop_string_ends_its_sample_alone(service, stream, step):
    tiny = service("Thought: six\nObservation: never", "Other", server={"step": step})
    body = {"model": "tiny", "messages": USER, "n": 2, "stop": ["\nObservation:"], "return_token_ids": True}
    response = tiny.send("/v1/chat/completions", {**body, "stream": stream})
    if stream:
        choices = [chunk["choices"][0] for chunk in events(response)]
        own = [[choice for choice in choices if choice["index"] == index] for index in (0, 1)]
        texts = ["".join(choice["delta"]["content"] for choice in each) for each in own]
        ids = [joined(choice.get("token_ids", []) for choice in each) for each in own]
    else:
        texts = [choice["message"]["content"] for choice in response.json()["choices"]]
        ids = [choice["token_ids"] for choice in response.json()["choices"]]
    assert texts == ["Thought: six", "Other"]
    assert tiny.tokenizer.decode(ids[0]) == "Thought: six\nObservation:", "the token ids are kept"
    assert ids[1] == tiny.turns[1]
    assert [index for _, index in tiny.server.aborted] == [0], "the other sample goes on"


def test_completions_of_ids_and_texts(service):
    tiny = service("xyz", ended=False)
    ids = tiny.tokenizer("ab")["input_ids"]
    (choice,) = tiny.complete(prompt=ids, max_tokens=2, return_token_ids=True)["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("xy", tiny.turns[0][:2], "length")
    assert choice["prompt_token_ids"] == tiny.server.requests[0]["prompt_ids"] == ids
    answer = tiny.complete(prompt=["a", "b"], n=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [request["prompt_ids"] for request in tiny.server.requests[1:]] == [ids[:1], ids[1:]]
    assert tiny.server.requests[1]["params"].max_new_tokens == 16, "OpenAI's default"
    assert answer["usage"]["completion_tokens"] == 12
    assert len(tiny.complete(prompt=[ids, ids])["choices"]) == 2


def test_echo_has_the_prompt_before_the_text(service):
    tiny = service("xyz", ended=False)
    assert tiny.complete(prompt="ab", echo=True)["choices"][0]["text"] == "abxyz"


WRONG = {
    "no messages": ({"messages": []}, "messages: [] given; List should have at least 1 item"),
    "no role": ({"messages": [{"content": "a"}]}, "messages.0.role: None given"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "it must be a text, or text parts",
    ),
    "temperature": ({"temperature": "hot"}, "temperature: 'hot' given; Input should be a valid number"),
    "top_p": ({"top_p": 2}, "top_p: 2.0 given; it must be in (0, 1]"),
    "n": ({"n": 0}, "n: 0 given; Input should be greater than or equal to 1"),
    "model": ({"model": "gpt-4o"}, "model: 'gpt-4o' given; it must be 'tiny'"),
    "unknown": ({"temprature": 1}, "temprature: unknown; a request may have chat_template_kwargs, "),
    "format": ({"response_format": {"type": "json_object"}}, "it must be {'type': 'text'}, left out: constrained"),
    "top_logprobs": ({"top_logprobs": 3}, "top_logprobs: 3 given without logprobs=true"),
    "many": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: 21 given; Input should be less than"),
    "penalty": ({"frequency_penalty": 1}, "frequency_penalty: 1 given; it must be 0, left out: use repetition_penalty"),
    "choice": ({"tool_choice": "required"}, "tool_choice: 'required' given; Input should be 'auto' or 'none'"),
    "tools": ({"tools": [{"name": "add"}]}, "tools: {'name': 'add'} given; it must be"),
    "too long": ({"max_tokens": 10**6}, "max_tokens: 1000000 given; the context is of 4096 tokens, with room for "),
    "long prompt": ({"messages": [{"role": "user", "content": "x" * 5000}]}, "a prompt of 5"),
    "calls": ({"messages": [*USER, {"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages.1.tool_calls: {"),
    "bias": ({"logit_bias": {"x": 1}}, "logit_bias.x.[key]: 'x' given"),
    "stops": ({"stop": [""]}, "stop.0: '' given"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_request_says_what_is_allowed(service, name, stream):
    fields, words = WRONG[name]
    answer = service("x").send("/v1/chat/completions", {"messages": USER, "stream": stream, **fields})
    assert answer.status_code == (404 if name == "model" else 400), answer.text
    error = answer.json()["error"]
    assert words in error["message"] and error["type"] == "invalid_request_error"
    assert error["param"] is not None or name in ("top_p",)


def test_wrong_completions(service):
    tiny = service("x")
    for fields, words in (
        ({}, "prompt: nothing given; Field required"),
        ({"prompt": ""}, "prompt: an empty one given"),
        ({"prompt": [[1], []]}, "prompt: an empty one given"),
        ({"prompt": "a", "logprobs": 21}, "logprobs: 21 given; it must be from 0 to 20"),
        ({"prompt": "a", "logprobs": 1, "stream": True}, "stream: true given with the logprobs of other tokens"),
        ({"prompt": ["a", "b"], "stream": True}, "stream: true given with echo or several prompts"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens: 0 given without echo=true; it must be at least 1"),
        ({"prompt": [5] * 5000, "max_tokens": 0, "echo": True, "logprobs": 0}, "a prompt of 5000 tokens is over"),
        ({"prompt": [5000]}, "prompt_ids: 5000 given"),
    ):
        answer = tiny.send("/v1/completions", fields)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


def test_a_full_queue_and_a_closed_server(service):
    tiny = service("x", server={"max_queue": 0})
    body = {"messages": USER}
    for stream in (False, True):
        answer = tiny.send("/v1/chat/completions", {**body, "stream": stream})
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"] == {
            "message": "max_queue=0", "type": "server_error", "param": None, "code": "ServerBusy"
        }  # fmt: skip
    assert tiny.send("/health", method="GET").status_code == 200
    tiny.server.closed = True
    assert tiny.send("/v1/chat/completions", body).status_code == 503
    assert tiny.send("/health", method="GET").status_code == 503


def test_a_request_that_takes_too_long_ends(service):
    tiny = service("x", limits=ServerLimits(timeout_s=0.05))
    tiny.server.held = asyncio.Event()
    answer = tiny.send("/v1/chat/completions", {"messages": USER})
    assert answer.status_code == 504 and "ServerLimits.timeout_s=0.05" in answer.json()["error"]["message"]
    assert len(tiny.server.aborted) == 1 and not tiny.server.running


def test_a_client_that_leaves_ends_its_request(service):
    tiny = service("x")

    async def run(stream: bool) -> None:
        tiny.server.held = asyncio.Event()
        left = asyncio.Event()
        sent = [{"type": "http.request", "body": json.dumps({"messages": USER, "stream": stream}).encode()}]

        async def receive() -> dict:
            if sent:
                return sent.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict) -> None:
            pass

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
        scope |= {"query_string": b"", "http_version": "1.1", "client": ("127.0.0.1", 1)}
        task = asyncio.ensure_future(tiny.endpoint.app(scope, receive, send))
        while not tiny.server.running:
            await asyncio.sleep(0.001)
        left.set()
        await asyncio.wait_for(task, 5)
        assert not tiny.server.running

    for stream in (False, True):
        asyncio.run(run(stream))
        assert tiny.server.aborted.pop()[1] is None


def test_the_model_of_a_request_may_be_an_adapter(service):
    """As vLLM serves LoRA: adapters are models with a parent, and unknown ones are not found."""
    tiny = service("xyz")
    tiny.server.adapters = ["alice", "__base__"]
    models = tiny.send("/v1/models", method="GET").json()["data"]
    parents = {model["id"]: model["parent"] for model in models}
    assert parents == {"tiny": None, "alice": "tiny", "__base__": "tiny"} and models[0]["id"] == "tiny"
    for model in ("alice", "__base__", "tiny", None):
        response = tiny.chat(model=model, logprobs=True, top_logprobs=1)
        assert response["model"] == (model or "tiny")
        adapter = None if model == "tiny" else model
        assert tiny.server.requests[-1]["adapter"] == adapter and tiny.server.scored[-1][-1] == adapter
    answer = tiny.send("/v1/completions", {"model": "bob", "prompt": "a"})
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
    expected = "model: 'bob' given; it must be one of 'tiny', 'alice', '__base__'"
    assert answer.json()["error"]["message"] == expected


def test_keys_limits_and_types_of_content(service):
    limits = ServerLimits(max_body_bytes=200, requests_per_minute=3)
    tiny = service("x", api_key="secret", limits=limits)
    models = {"path": "/v1/models", "method": "GET"}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
        answer = tiny.send(**models, headers=headers)
        assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"
        assert "secret" not in answer.text
    key = {"Authorization": "Bearer secret"}
    (model,) = tiny.send(**models, headers=key).json()["data"]
    assert model["id"] == "tiny" and model["max_model_len"] == 4096
    long = tiny.send("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 300}]}, headers=key)
    assert long.status_code == 413 and "max_body_bytes=200" in long.json()["error"]["message"]
    typed = tiny.send("/v1/chat/completions", {"messages": USER}, headers={**key, "Content-Type": "text/plain"})
    assert typed.status_code == 415, "a web page cannot send this without asking"
    limited = tiny.send(**models, headers=key)
    assert limited.status_code == 429 and "requests_per_minute=3" in limited.json()["error"]["message"]
    assert tiny.send("/health", method="GET").status_code == 200


@pytest.mark.parametrize("body", [b"{", b"[" * 100_000, b"\xff", b"[]", b"null"])
def test_a_body_that_is_no_request(service, body):
    tiny = service("x")

    async def run() -> httpx.Response:
        async with tiny.client() as client:
            headers = {"Content-Type": "application/json"}
            return await client.post("/v1/chat/completions", content=body, headers=headers)

    answer = asyncio.run(run())
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


def test_unknown_paths_and_methods(service):
    tiny = service("x")
    assert tiny.send("/v1/embeddings", {}).status_code == 404
    assert tiny.send("/v1/chat/completions", method="GET").json()["error"]["message"].endswith("Method Not Allowed")


def test_metrics_have_vllms_names(service):
    tiny = service("x")
    tiny.chat(max_tokens=1)
    text = tiny.send("/metrics", method="GET").text
    assert 'vllm:num_requests_running{model_name="tiny"} 0' in text.splitlines()
    assert 'vllm:request_success_total{model_name="tiny",finished_reason="length"} 1' in text.splitlines()
    assert 'hybrid:weight_version{model_name="tiny"} 3' in text.splitlines()
    assert text.count("# TYPE") == text.count("# HELP") == 7


def test_other_addresses_than_loopback_need_a_key(service):
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(ValueError, match="without api_key; give api_key"):
            service("x", host=host)
    with pytest.raises(ValueError, match="api_key: '' given"):
        service("x", api_key="")
    assert service("x", host="0.0.0.0", api_key="k").endpoint.base_url.startswith("http://0.0.0.0:")
    port = int(service("x").endpoint.base_url.split(":")[2].split("/")[0])
    with pytest.raises(ValueError, match=f"host, port: '127.0.0.1', {port} given"):
        service("x", port=port)
    with pytest.raises(ValueError, match="history: 'x' given; it must be one of 'append', 'template'"):
        service("x", history="x")


def test_hybrid_is_imported_without_the_extra():
    """A missing extra is one line, and nothing else needs it."""
    code = (
        "import importlib.util as util, sys; find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'fastapi' else find(name, *rest)\n"
        "import hybrid; hybrid.SamplingParams; assert 'starlette' not in sys.modules\n"
        "try: hybrid.openai_server(None, None)\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (
        done.stdout.splitlines()[-1] == "openai_server: fastapi is not installed; pip install 'hybrid-engine[server]'"
    ), done
