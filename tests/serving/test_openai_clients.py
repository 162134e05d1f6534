"""Real clients over a real socket and a real engine. The oracle: tokens of `server.generate` and `engine.rollout`."""

import asyncio
import contextlib
import importlib
import json
import time
from pathlib import Path

import httpx2 as httpx
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hybrid
from hybrid.generation.serving_scheduler import ServingScheduler
from tests.engines import engine_of, settings
from tests.rlhf_examples.chat_models import tokenizer_of
from tests.serving.test_sessions import rows_of

openai = pytest.importorskip("openai", reason="the extra `test` has it")

ABSENT = "{} is not installed: its dependencies are many, and are none of this project's (CONTRIBUTING.md)"
USER = [{"role": "user", "content": "1 + 2?"}]


def chat_llama(tokenizer) -> LlamaForCausalLM:
    """A tiny random Llama with a tokenizer's vocabulary."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = LlamaConfig(**sizes, **special, vocab_size=len(tokenizer), initializer_range=0.2)
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of("qwen2_5")


@pytest.fixture(scope="module")
def server(tokenizer):
    """A server of a frozen model, for all tests."""
    engine = hybrid.init_inference(chat_llama(tokenizer), dtype="fp32", kernel_inject=True, max_out_tokens=1024)
    with engine.serve(max_num_seqs=32) as server:
        yield server


@pytest.fixture
def endpoint(server, tokenizer):
    with hybrid.openai_server(server, tokenizer, api_key="key", model_name="tiny") as endpoint:
        yield endpoint


def tokens_of(server, prompt_ids, tokenizer, n=1, **fields) -> list[list[int]]:
    """The tokens of `server.generate` for the settings of a chat."""
    sampling = hybrid.SamplingParams(stop_token_ids=(hybrid.turn_end_token(tokenizer),), **fields)
    return [completion.token_ids for completion in server.generate_sync(prompt_ids, sampling, n=n)]


def prompt_of(tokenizer, messages=USER) -> list[int]:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize("stream", [False, True])
def test_the_openai_package(server, endpoint, tokenizer, stream):
    expected = tokens_of(server, prompt_of(tokenizer), tokenizer, n=3, max_new_tokens=12, seed=7, temperature=0.8)
    client = openai.OpenAI(base_url=endpoint.base_url, api_key="key")
    assert [model.id for model in client.models.list()] == ["tiny"]
    answer = client.chat.completions.create(
        model="tiny", messages=USER, n=3, seed=7, temperature=0.8, max_tokens=12, logprobs=True, stream=stream,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    ids, texts = [[], [], []], ["", "", ""]
    for part in answer if stream else [answer]:
        for choice in part.choices:
            ids[choice.index] += getattr(choice, "token_ids", [])
            texts[choice.index] += (choice.delta if stream else choice.message).content
    assert ids == expected
    assert texts == [tokenizer.decode(each, skip_special_tokens=True) for each in expected]
    completion = client.completions.create(
        model="tiny", prompt=prompt_of(tokenizer), seed=7, temperature=0.8, max_tokens=12, logprobs=0,
        extra_body={"return_token_ids": True, "stop_token_ids": [hybrid.turn_end_token(tokenizer)]},
    )  # fmt: skip
    assert completion.choices[0].token_ids == expected[0], "ids in and out"
    assert len(completion.choices[0].logprobs.token_logprobs) == len(expected[0])


def test_an_evaluation_harness_reads_the_prompts_logprobs(server, endpoint, tokenizer):
    """The request of lm-eval's `local-completions`: sums of logprobs, and whether each token is the most probable."""
    client = openai.OpenAI(base_url=endpoint.base_url, api_key="key")
    ids = prompt_of(tokenizer)
    (choice,) = client.completions.create(
        model="tiny", prompt=[ids], echo=True, max_tokens=1, logprobs=1, temperature=0, seed=1
    ).choices
    expected = asyncio.run(server.score(ids, 1))
    assert choice.logprobs.token_logprobs[1:-1] == expected.logps
    assert choice.logprobs.tokens[:-1] == [tokenizer.decode([token]) for token in ids]
    for place in range(1, len(ids)):
        top = choice.logprobs.top_logprobs[place]
        is_greedy = ids[place] == expected.top_token_ids[place - 1][0]
        assert (choice.logprobs.token_logprobs[place] == max(top.values())) == is_greedy


def test_the_openai_package_reads_errors(endpoint):
    client = openai.OpenAI(base_url=endpoint.base_url, api_key="key", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="temperature: -1.0 given; it must be 0") as raised:
        client.chat.completions.create(model="tiny", messages=USER, temperature=-1)
    assert raised.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match="model: 'other' given"):
        client.chat.completions.create(model="other", messages=USER)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=endpoint.base_url, api_key="wrong", max_retries=0).models.list()


def test_32_clients_at_once_get_the_tokens_of_each_alone(server, endpoint, tokenizer):
    async def run() -> list[list[int]]:
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key="key") as client:

            async def send(number: int) -> list[int]:
                messages = [{"role": "user", "content": "x" * (number % 5 + 1)}]
                answer = await client.chat.completions.create(
                    model="tiny", messages=messages, seed=number, max_tokens=10 + number % 3,
                    extra_body={"return_token_ids": True},
                )  # fmt: skip
                return answer.choices[0].token_ids

            return await asyncio.gather(*map(send, range(32)))

    ids = asyncio.run(run())
    for number, tokens in enumerate(ids):
        prompt = prompt_of(tokenizer, [{"role": "user", "content": "x" * (number % 5 + 1)}])
        assert [tokens] == tokens_of(server, prompt, tokenizer, max_new_tokens=10 + number % 3, seed=number)


def test_a_program_that_runs_again_samples_the_same_tokens(server, tokenizer):
    """Requests without a seed: their keys come from the session, the prompt and how often that was sent."""
    batches = []
    for _ in range(2):
        with hybrid.openai_server(server, tokenizer, model_name="tiny") as endpoint:
            client = openai.OpenAI(base_url=endpoint.base_url, api_key="none")
            for name in ("a", "a", "b"):
                client.chat.completions.create(model="tiny", messages=USER, max_tokens=9, extra_body={"session": name})
            batches.append(rows_of(endpoint.rollouts(["a", "b"])))
    assert batches[0] == batches[1]
    assert len({tuple(completion) for _, completion, _ in batches[0]}) == 3


def test_a_client_that_leaves_a_stream_ends_its_request(server, endpoint, monkeypatch):
    """Each step takes a while, so that a busy machine's client does not come to an end that is there already."""
    step = ServingScheduler.step

    def slow_step(self) -> None:
        time.sleep(0.3)
        step(self)

    monkeypatch.setattr(ServingScheduler, "step", slow_step)
    body = {"messages": USER, "stream": True, "max_tokens": 900, "logit_bias": {"257": -100, "0": 5}}
    headers = {"Authorization": "Bearer key"}
    with httpx.stream("POST", f"{endpoint.base_url}/chat/completions", json=body, headers=headers) as response:
        next(response.iter_lines())
        deadline = time.monotonic() + 10
        while not server.stats().running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.stats().running == 1
    deadline = time.monotonic() + 10
    while server.stats().running and time.monotonic() < deadline:
        time.sleep(0.01)
    stats = server.stats()
    assert stats.running == stats.waiting == 0


def test_a_stop_string_ends_the_engines_row(server, endpoint, tokenizer):
    """The text of a request is cut where it writes what the same seed has written."""
    client = openai.OpenAI(base_url=endpoint.base_url, api_key="key")
    whole = client.completions.create(model="tiny", prompt="a", seed=3, max_tokens=40).choices[0].text
    stop = next(char for char in whole[10:] if char != "\ufffd")
    answer = client.completions.create(
        model="tiny", prompt="a", seed=3, max_tokens=40, stop=stop, extra_body={"return_token_ids": True}
    ).choices[0]
    assert answer.text == whole.partition(stop)[0] and answer.finish_reason == "stop"
    (expected,) = [
        c.token_ids for c in server.generate_sync([tokenizer("a")["input_ids"][0]], hybrid.SamplingParams(40, seed=3))
    ]
    assert answer.token_ids == expected[: len(answer.token_ids)] and len(answer.token_ids) < len(expected)


def test_litellm(server, endpoint, tokenizer, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm", reason=ABSENT.format("litellm"))
    arguments = {"model": "openai/tiny", "api_base": endpoint.base_url, "api_key": "key", "messages": USER}
    arguments |= {"seed": 5, "max_tokens": 9, "temperature": 0.9}
    (expected,) = tokens_of(server, prompt_of(tokenizer), tokenizer, max_new_tokens=9, seed=5, temperature=0.9)
    answer = litellm.completion(**arguments, extra_body={"return_token_ids": True})
    assert answer.choices[0].message.content == tokenizer.decode(expected, skip_special_tokens=True)
    assert answer.usage.completion_tokens == len(expected)
    streamed = litellm.completion(**arguments, stream=True)
    text = "".join(part.choices[0].delta.content or "" for part in streamed)
    assert text == answer.choices[0].message.content


def test_verifiers(server, tokenizer, monkeypatch):
    """A task, a harness and a reward of verifiers: its trace's id is the session, which makes a row."""
    vf = pytest.importorskip("verifiers.v1", reason=ABSENT.format("verifiers"))
    monkeypatch.setenv("HYBRID_TEST_KEY", "key")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    program = importlib.import_module("verifiers_program")
    with hybrid.openai_server(server, tokenizer, api_key="key", model_name="tiny") as endpoint:
        agent_config = vf.AgentConfig(
            harness={"id": "verifiers_program"},
            runtime=vf.SubprocessConfig(),
            model="tiny",
            client=vf.EvalClientConfig(base_url=endpoint.base_url, api_key_var="HYBRID_TEST_KEY"),
            sampling={"max_tokens": 9, "seed": 3},
        )

        async def run() -> list:
            async with vf.Agent(agent_config) as agent:
                tasks = [program.LengthTask(vf.TaskData(prompt="x" * number, idx=number)) for number in (1, 2, 3)]
                return await asyncio.gather(*map(agent.run, tasks))

        traces = asyncio.run(run())
        assert all(trace.ok for trace in traces)
        for trace in traces:
            endpoint.reward(trace.id, trace.rewards["length"].score)
        batch = endpoint.rollouts([trace.id for trace in traces])
    assert batch.row_index.tolist() == [0, 1, 2] and batch.turn_rewards == [
        [None, trace.rewards["length"].score] for trace in traces
    ]
    for row, (prompt, completion, mask) in enumerate(rows_of(batch)):
        for turn in (0, 1):
            begin = int((batch.turn_ids[row] < turn).sum() - (batch.turn_ids[row] < 0).sum())
            ids = prompt + completion[:begin]
            (expected,) = tokens_of(server, ids, tokenizer, max_new_tokens=9, seed=3)
            assert completion[begin : begin + len(expected)] == expected
            assert mask[begin : begin + len(expected)] == [1] * len(expected)


def check_sessions_and_rollouts() -> None:
    """Rows of sessions are those of `engine.rollout`, to the bit: tokens, masks and three logprobs."""
    tokenizer = tokenizer_of("gemma")
    blocks = {"hybrid_engine": {"enabled": True, "max_out_tokens": 1024}}
    engine = engine_of(chat_llama(tokenizer), settings(stage=2, **blocks))
    end = hybrid.turn_end_token(tokenizer)
    engine.eval()
    ids = torch.tensor([prompt_of(tokenizer)])
    sampling = hybrid.SamplingParams(12, temperature=0.7, top_p=0.9, seed=7, stop_token_ids=(end,))
    sampled = engine.rollout(ids, torch.ones_like(ids), sampling, num_generations=3, row_ids=torch.tensor([0]))
    greedy = hybrid.SamplingParams(200, temperature=0.0, stop_token_ids=(end,))
    environment = hybrid.MessageEnvironment(tokenizer, environment_factory=lambda: hybrid.StepEnvironment(Nagging()))
    episodes = environment.episodes([{"prompt": USER}])
    limits = hybrid.EnvironmentLimits(max_turns=3, max_turn_tokens=8)
    turns = engine.rollout(*episodes.prompts(), greedy, environment=episodes, environment_limits=limits)
    with engine.serve() as server, hybrid.openai_server(server, tokenizer, model_name="tiny") as endpoint:
        client = openai.OpenAI(base_url=endpoint.base_url, api_key="none")
        client.chat.completions.create(
            model="tiny", messages=USER, n=3, seed=7, temperature=0.7, top_p=0.9, max_tokens=12,
            extra_body={"session": "samples"},
        )  # fmt: skip
        messages = list(USER)
        for turn in range(3):
            answer = client.chat.completions.create(
                model="tiny", messages=messages, temperature=0, max_tokens=8, extra_headers={"X-Session-Id": "turns"}
            )
            messages += [
                answer.choices[0].message.model_dump(exclude_none=True),
                {"role": "user", "content": f"{turn}!"},
            ]
        endpoint.reward("turns", 0.5)
        recorded = {"samples": endpoint.rollouts("samples"), "turns": endpoint.rollouts("turns")}
    for name, expected in (("samples", sampled), ("turns", turns)):
        batch = recorded[name]
        assert rows_of(batch) == rows_of(expected), (name, rows_of(batch), rows_of(expected))
        width = min(batch.completion_ids.shape[1], expected.completion_ids.shape[1])
        for field in ("sampling_per_token_logps", "old_per_token_logps", "raw_per_token_logps", "weight_versions"):
            assert torch.equal(getattr(batch, field)[:, :width], getattr(expected, field)[:, :width]), (name, field)
        assert batch.finish_reason == (expected.finish_reason if name == "samples" else ["length"])
    with engine.inference():
        scores = engine.score(recorded["turns"].sequences, recorded["turns"].attention_mask)
    assert torch.isfinite(scores.per_token_logps).all()


class Nagging:
    """Answers each turn with its number."""

    def reset(self):
        self.turns = 0
        return "", {}

    def step(self, action):
        self.turns += 1
        return f"{self.turns - 1}!", 0.0, False, False, {}


def test_rows_of_sessions_are_those_of_rollouts(ranks):
    ranks.run(check_sessions_and_rollouts)


def test_a_langchain_style_tool_loop(tokenizer):
    """Messages of classes of its own, tools by name, until a turn calls none: with a scripted model."""
    from tests.serving.test_openai_endpoint import CALL, TOOL, Service

    tiny = Service(CALL, CALL.replace("2", "5"), "It is 6.")
    tools, seen = {"add": lambda a, b: a + b}, []
    with contextlib.closing(tiny.endpoint):
        client = openai.OpenAI(base_url=tiny.endpoint.base_url, api_key="none")
        model = client.with_options(default_headers={"X-Session-Id": "loop"})
        messages = [{"role": "system", "content": "Use tools."}, *USER]
        while True:
            message = model.chat.completions.create(model="tiny", messages=messages, tools=[TOOL]).choices[0].message
            messages.append(message.model_dump(exclude_unset=True))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = tools[call.function.name](**json.loads(call.function.arguments))
                seen.append(result)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
        assert seen == [3, 6] and message.content == "It is 6."
        ((prompt, completion, mask),) = rows_of(tiny.endpoint.rollouts("loop"))
    sampled = [token for token, is_sampled in zip(completion, mask, strict=True) if is_sampled]
    assert sampled == [token for turn in tiny.turns for token in turn]
    assert tokenizer.decode(prompt + completion).count("<tool_response>") == 2
