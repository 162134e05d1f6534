"""Sessions as training rows: what was sampled, to the token, in the rows that its turns make."""

import json

import pytest
import torch

import hybrid
from tests.serving.test_openai_endpoint import CALL, TOOL, USER, joined, service

__all__ = ["service"]  # a fixture


def answered(tiny, messages, replies, **fields):
    """The conversation with the model's next turn, and `replies` to it; a client keeps what the answer says."""
    message = tiny.chat(messages, **fields)["choices"][0]["message"]
    return [*messages, {name: value for name, value in message.items() if name != "reasoning_content"}, *replies]


def rows_of(batch: hybrid.RolloutBatch) -> list[tuple[list[int], list[int], list[int]]]:
    """Each row's prompt, completion and mask, without padding."""
    rows = []
    for row in range(len(batch.prompt_ids)):
        real = batch.turn_ids[row] >= 0
        masks = batch.completion_mask[row], batch.observation_mask[row]
        assert torch.equal(masks[0] + masks[1], real.long())
        prompt = batch.prompt_ids[row][batch.prompt_mask[row] > 0]
        rows.append((prompt.tolist(), batch.completion_ids[row][real].tolist(), masks[0][real].tolist()))
    return rows


@pytest.mark.parametrize("family", ["qwen2_5", "llama3_1", "gemma3", "phi3"])
def test_turns_that_extend_each_other_are_one_row(service, family):
    tiny = service("one", " two ", "three", family=family)
    with_session = {"session": "a", "n": 1}
    messages = answered(tiny, USER, [{"role": "user", "content": "and then?"}], **with_session)
    messages = answered(tiny, messages, [{"role": "user", "content": "more"}], **with_session)
    tiny.chat(messages, **with_session)
    tiny.endpoint.reward("a", 2.5)
    batch = tiny.endpoint.rollouts("a")
    ((prompt, completion, mask),) = rows_of(batch)
    last = tiny.server.requests[-1]["prompt_ids"] + tiny.turns[2]
    assert prompt + completion == last, "the last request has all tokens before it"
    assert prompt == tiny.server.requests[0]["prompt_ids"]
    sampled = [token for token, is_sampled in zip(completion, mask, strict=True) if is_sampled]
    assert sampled == tiny.turns[0] + tiny.turns[1] + tiny.turns[2], "never tokenized again"
    rendered = tiny.tokenizer.decode(last)
    whole = [*messages, {"role": "assistant", "content": "three"}]
    expected = tiny.tokenizer.apply_chat_template(whole, tokenize=False)
    assert "".join(rendered.split()) == "".join(expected.split())[: len("".join(rendered.split()))]
    lengths = [len(turn) for turn in tiny.turns]
    for name, factor in (("sampling", -0.5), ("old", -1.0), ("raw", -2.0)):
        logps = getattr(batch, f"{name}_per_token_logps")[0]
        expected = [factor * place for length in lengths for place in range(1, length + 1)]
        assert logps[batch.completion_mask[0] > 0].tolist() == expected
        assert not logps[batch.completion_mask[0] == 0].any()
    assert batch.turn_rewards == [[None, None, 2.5]] and len(batch.turn_seconds[0]) == 3
    assert batch.weight_version == 3 and batch.finish_reason == ["stop"] and batch.errors == [""]
    assert batch.turn_ids[0].unique().tolist() == [0, 1, 2]


def test_calls_and_their_results_are_one_row(service):
    """The client changes the call's JSON and leaves reasoning out; the sampled text stays as it was."""
    tiny = service(CALL, "It is 3.")
    message = tiny.chat(tools=[TOOL], session="a")["choices"][0]["message"]
    (call,) = message["tool_calls"]
    call["function"]["arguments"] = json.dumps({"b": 2, "a": 1}, indent=2)
    result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
    messages = [*USER, {"role": "assistant", "content": message["content"], "tool_calls": [call]}, result]
    tiny.chat(messages, tools=[TOOL], session="a")
    ((prompt, completion, mask),) = rows_of(tiny.endpoint.rollouts("a"))
    assert prompt + completion == tiny.server.requests[1]["prompt_ids"] + tiny.turns[1]
    assert [token for token, sampled in zip(completion, mask, strict=True) if sampled] == joined(tiny.turns)
    assert "<tool_response>\n3\n</tool_response>" in tiny.tokenizer.decode(completion)


def test_forks_are_rows_whose_prompt_ends_where_they_begin(service):
    tiny = service("one", "two", "three", "four")
    messages = answered(tiny, USER, [], session="a")
    left = answered(tiny, [*messages, {"role": "user", "content": "left"}], [], session="a")
    right = answered(tiny, [*messages, {"role": "user", "content": "right"}], [], session="a")
    tiny.chat([*left, {"role": "user", "content": "on"}], session="a")
    batch = tiny.endpoint.rollouts("a")
    first, second = rows_of(batch)
    assert first[0] + first[1] == tiny.server.requests[3]["prompt_ids"] + tiny.turns[3]
    assert second[0] == tiny.server.requests[2]["prompt_ids"] and second[1] == tiny.turns[2]
    assert right[-1]["content"] == "three"
    assert int(batch.completion_mask.sum()) == sum(map(len, tiny.turns)), "every token is in the loss once"
    assert batch.row_index.tolist() == [0, 0]


def test_samples_with_one_text_are_continued_by_their_calls_ids(service):
    """Two samples write the same call with other spaces: the client's message fits both, its id one."""
    spaced = CALL.replace("{", "{ ")
    tiny = service(CALL, spaced, "after the second", "after the first")
    choices = tiny.chat(tools=[TOOL], session="a", n=2)["choices"]
    del tiny.turns[0]
    for choice in reversed(choices):
        message = choice["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
        tiny.chat([*USER, message, result], tools=[TOOL], session="a")
    rows = rows_of(tiny.endpoint.rollouts("a"))
    texts = [tiny.tokenizer.decode(completion, skip_special_tokens=True) for _, completion, _ in rows]
    assert [text.startswith(call) for text, call in zip(texts, (CALL, spaced), strict=True)] == [True, True]
    assert texts[0].endswith("after the first") and texts[1].endswith("after the second")


def test_completions_by_token_ids_extend_rows_too(service):
    tiny = service("abc", "de", ended=False)
    first = tiny.complete(prompt=[5, 6, 7], session="a", return_token_ids=True, max_tokens=2)["choices"][0]["token_ids"]
    tiny.complete(prompt=[5, 6, 7, *first, 9, 9], session="a")
    ((prompt, completion, mask),) = rows_of(tiny.endpoint.rollouts("a"))
    assert (prompt, completion, mask) == ([5, 6, 7], [*first, 9, 9, *tiny.turns[1]], [1, 1, 0, 0, 1, 1])


def test_a_text_before_a_stop_string_is_found_again_with_all_its_tokens(service):
    tiny = service("Thought: six\nObservation: never", "done")
    messages = answered(tiny, USER, [{"role": "user", "content": "7"}], stop="\nObservation:", session="a")
    assert messages[1]["content"] == "Thought: six"
    tiny.chat(messages, session="a")
    ((_, completion, mask),) = rows_of(tiny.endpoint.rollouts("a"))
    kept = tiny.tokenizer("Thought: six\nObservation:")["input_ids"]
    assert completion[: len(kept)] == kept and mask[: len(kept)] == [1] * len(kept) and mask[len(kept)] == 0


@pytest.mark.parametrize("change", ["edited", "other tools", "other session", "none"])
def test_what_was_not_sampled_is_a_prompt(service, change):
    tiny = service("one", "two")
    messages = answered(tiny, USER, [{"role": "user", "content": "next"}], session="a")
    if change == "edited":
        messages[1] = {"role": "assistant", "content": "One."}
    fields = {"tools": [TOOL]} if change == "other tools" else {}
    name = {"other session": "b", "none": ""}.get(change, "a")
    tiny.chat(messages, session=name, **fields)
    expected = tiny.tokenizer.apply_chat_template(
        messages, tools=fields.get("tools"), add_generation_prompt=True, return_dict=False
    )
    assert tiny.server.requests[1]["prompt_ids"] == expected
    assert len(rows_of(tiny.endpoint.rollouts("a"))) == (1 if change in ("other session", "none") else 2)


@pytest.mark.parametrize("history", ["append", "template"])
def test_a_template_that_rewrites_earlier_turns(service, history):
    """Qwen 3's drops their reasoning once a user's message follows."""
    tiny = service("<think>\nhm\n</think>\n\none", "two", family="qwen3", history=history)
    messages = answered(tiny, USER, [{"role": "user", "content": "next"}], session="a")
    tiny.chat(messages, session="a")
    rows = rows_of(tiny.endpoint.rollouts("a"))
    assert len(rows) == (1 if history == "append" else 2)
    text = tiny.tokenizer.decode(tiny.server.requests[1]["prompt_ids"])
    assert ("hm" in text) == (history == "append")


@pytest.mark.parametrize("stream", [False, True])
def test_the_header_names_a_session_and_http_its_reward(service, stream):
    tiny = service("one")
    body = {"messages": USER, "stream": stream}
    tiny.send("/v1/chat/completions", body, headers={"X-Session-Id": "h"})
    assert tiny.server.requests[0]["client"] == "h"
    answer = tiny.send("/v1/sessions/h/reward", {"reward": 1})
    assert answer.json() == {"session": "h", "reward": 1}
    assert tiny.send("/v1/sessions/h/reward", {"reward": 0.5}).status_code == 200, "a repeated call replaces it"
    assert tiny.endpoint.rollouts("h").turn_rewards == [[0.5]]
    for path, content, status, words in (
        ("/v1/sessions/x/reward", {"reward": 1}, 404, "session: 'x' given; recorded are h"),
        ("/v1/sessions/h/reward", {"reward": "much"}, 400, "reward: 'much' given; it must be a number"),
        ("/v1/sessions/h/reward", [1], 400, "reward: None given"),
    ):
        answer = tiny.send(path, content)
        assert answer.status_code == status and words in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["plain", "step 1/é?"])
def test_a_base_url_names_a_session(service, name):
    tiny = service("one")
    url = tiny.endpoint.session_url(name)
    assert url.startswith(tiny.endpoint.base_url.removesuffix("v1")) and url.endswith("/v1")
    path = url.removeprefix(tiny.endpoint.base_url.removesuffix("/v1"))
    answer = tiny.send(f"{path}/chat/completions", {"messages": USER})
    assert answer.status_code == 200
    assert tiny.endpoint.rollouts(name).finish_reason == ["stop"]


def test_several_sessions_and_their_end(service):
    tiny = service("one", "other", limits=hybrid.ServerLimits(max_sessions=2))
    for name in ("a", "b"):
        tiny.chat(session=name)
    batch = tiny.endpoint.rollouts(["b", "a"])
    assert batch.row_index.tolist() == [0, 1]
    assert [row[1] for row in rows_of(batch)] == [tiny.turns[1], tiny.turns[0]]
    answer = tiny.send("/v1/chat/completions", {"messages": USER, "session": "c"})
    assert answer.status_code == 429 and "ServerLimits.max_sessions" in answer.json()["error"]["message"]
    tiny.endpoint.drop(["a", "b"])
    with pytest.raises(ValueError, match="session: 'a' given; recorded are none"):
        tiny.endpoint.rollouts("a")
    with pytest.raises(ValueError, match="session: 'c' given"):
        tiny.endpoint.reward("c", 1.0)
    tiny.chat(session="c")
