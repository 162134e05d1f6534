"""Turn boundaries: a prompt, sampled turns and observations are together the tokens of the whole conversation."""

import json
from types import SimpleNamespace

import pytest
from trl import GRPOTrainer

import hybrid
from hybrid.environments.chat_template import ChatTemplate, encode_text
from hybrid.environments.tool_calls import MalformedCall, TurnParser, tool_schemas
from tests.rlhf_examples.chat_models import FAMILIES, TEMPLATES, WITH_OWN_TOOLS, tokenizer_of
from tests.scripted_rollouts import roll_out

CHATS = ("qwen2_5", "qwen3", "llama3", "llama3_1", "gemma", "gemma3", "phi3", "chatml", "cohere")
WITH_TOOLS = ("qwen2_5", "qwen3", "llama3_1")
# What merges are learned on: line ends, brackets and the words of the templates.
MERGED_TEXT = "".join((TEMPLATES / f"{family}.jinja").read_text() for family in WITH_TOOLS) * 2
SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = ["Well\n\nhello there", "Is it {this}?", "2 + 2 = 4"]
ASKED = ["Hi\nthere ", "No.\n", "It is not"]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def is_raining(city: str) -> bool:
    """Whether it rains.

    Args:
        city: The city.
    """
    return city != "Rome"


def called(name: str, **arguments) -> dict:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


class Talk:
    """A Gymnasium environment that says fixed sentences."""

    def reset(self):
        self.left = ASKED[1:]
        return "", {}

    def step(self, action):
        said = self.left.pop(0) if self.left else ""
        return said, 1.0, not said, False, {}


def until_end(tokenizer, text: str) -> list[int]:
    """A conversation's tokens up to the last end token of a turn."""
    ids, end = encode_text(tokenizer, text), hybrid.turn_end_token(tokenizer)
    return ids[: len(ids) - ids[::-1].index(end)]


@pytest.mark.parametrize("system", [[], [SYSTEM]], ids=["no system", "system"])
@pytest.mark.parametrize("family", CHATS)
def test_a_conversation_has_the_tokens_of_its_template(family, system):
    """The oracle is `apply_chat_template` of the whole conversation; the sampled text is what it renders."""
    tokenizer = tokenizer_of(family, MERGED_TEXT)
    conversation = [*system]
    for asked, turn in zip(ASKED, TURNS, strict=True):
        conversation += [{"role": "user", "content": asked}, {"role": "assistant", "content": turn}]
    if family in ("cohere", "gemma"):
        conversation = conversation[len(system) :]
    whole = tokenizer.apply_chat_template(conversation, tokenize=False)
    before_last = tokenizer.apply_chat_template(conversation[:-1], tokenize=False, add_generation_prompt=True)
    end = FAMILIES[family][1]
    texts = [*TURNS[:-1], until_text(whole[len(before_last) :], end)]  # Qwen 3 writes empty thoughts in the last turn
    prompt = conversation[: -2 * len(TURNS) + 1]
    environment = hybrid.MessageEnvironment(tokenizer, environment_factory=lambda: hybrid.StepEnvironment(Talk()))
    episodes = environment.episodes([{"prompt": prompt}])
    (row,) = roll_out(episodes, [[0]], lambda _, turn: encode_text(tokenizer, texts[turn] + end))
    assert row.finish_reason == "done" and len(row.training) == 1, row
    assert row.training[0].ids == until_end(tokenizer, whole)
    assert row.training[0].prompt_ids == episodes.prompts()[0][0].tolist()
    sampled = [token for token, mask in zip(row.training[0].completion_ids, row.training[0].mask, strict=True) if mask]
    assert sampled == [token for text in texts for token in encode_text(tokenizer, text + end)]
    assert row.rewards == [1.0] * 3 and episodes.rewards() == [3.0]


def until_text(text: str, end: str) -> str:
    return text[: text.index(end)]


CALLS = [
    {"role": "user", "content": "What is 12 + 30 + 4? Does it rain in Rome?"},
    called("add", a=12, b=30),
    {"role": "tool", "name": "add", "content": "42"},
    called("add", a=42, b=4),
    {"role": "tool", "name": "add", "content": "46"},
    called("is_raining", city="Rome"),
    {"role": "tool", "name": "is_raining", "content": "False"},
    {"role": "assistant", "content": "46, and it does not."},
]


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_tool_calls_have_the_tokens_of_the_template(family):
    tokenizer = tokenizer_of(family, MERGED_TEXT)
    template = ChatTemplate(tokenizer, tool_schemas([add, is_raining]))
    whole, texts = template.render(CALLS), []
    for index in range(1, len(CALLS), 2):
        before = template.render(CALLS[:index], add_generation_prompt=True)
        assert whole.startswith(before)
        texts.append(until_text(whole[len(before) :], FAMILIES[family][1]) + FAMILIES[family][1])
    environment = hybrid.MessageEnvironment(tokenizer, [add, is_raining])
    episodes = environment.episodes([{"prompt": CALLS[:1]}])
    (row,) = roll_out(episodes, [[0]], lambda _, turn: encode_text(tokenizer, texts[turn]))
    assert row.training[0].ids == until_end(tokenizer, whole)
    assert [message["content"] for message in episodes.completions[0]][1::2] == ["42", "46", "False"]
    assert episodes.metrics() == {"tools/call_frequency": 3.0, "tools/failure_frequency": 0.0, "environments/forks": 0}


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_observations_are_those_of_trl(family):
    """TRL needs the tokenizer's end token to be the turn's, and a template that rewrites nothing."""
    tokenizer = tokenizer_of(family, MERGED_TEXT)
    tokenizer.eos_token = FAMILIES[family][1]
    if family == "qwen3":
        tokenizer.chat_template = (TEMPLATES / "qwen3_training.jinja").read_text()
    trainer = SimpleNamespace(
        processing_class=tokenizer, _tokenizer=tokenizer, _is_vlm=False, chat_template=None, chat_template_kwargs={}
    )
    for content in ("42", "", "a\n\nb ", "x" * 300):
        replies = [{"role": "tool", "name": "add", "content": content}]
        following = ChatTemplate(tokenizer).following_ids(CALLS[:1], CALLS[1], replies, tokenizer.eos_token_id)
        assert following == GRPOTrainer._get_tool_suffix_ids(trainer, replies)


OTHER_ENDS = {"gemma3": "<eos>", "phi3": "<|endoftext|>", "qwen2_5": "<|endoftext|>", "llama3_1": "<|eom_id|>"}


@pytest.mark.parametrize(
    ("family", "other_end"), [*((family, False) for family in CHATS), *((family, True) for family in OTHER_ENDS)]
)
def test_a_turn_without_the_templates_end_token_is_ended(family, other_end):
    """Cut off at a limit, or ended by another token: the template's end token is the first one that is not sampled.

    The oracle is the template over the conversation whose turn is all that was sampled.
    """
    tokenizer, end = tokenizer_of(family, MERGED_TEXT), FAMILIES[family][1]
    sampled = "Well hel" + (OTHER_ENDS[family] if other_end else "")
    conversation = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": sampled}]
    conversation.append({"role": "user", "content": ASKED[1]})
    whole = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    environment = hybrid.MessageEnvironment(tokenizer, environment_factory=lambda: hybrid.StepEnvironment(Talk()))
    episodes = environment.episodes([{"prompt": conversation[:1]}])
    (row,) = roll_out(episodes, [[0]], lambda *_: encode_text(tokenizer, sampled), max_turns=1)
    assert row.training[0].ids == encode_text(tokenizer, whole)
    first_given = row.training[0].completion_ids[row.training[0].mask.index(0)]
    assert tokenizer.decode([first_given]) == end
    assert episodes.completions[0][0]["content"] == "Well hel"


@pytest.mark.filterwarnings("ignore:the chat template rewrites")  # Qwen 3 drops empty thoughts, too
@pytest.mark.parametrize("family", WITH_TOOLS)
def test_a_call_that_is_cut_off_after_its_last_character_runs(family):
    tokenizer, end = tokenizer_of(family), FAMILIES[family][1]
    template = ChatTemplate(tokenizer, tool_schemas([add]))
    call = template.render(CALLS[:2]).removeprefix(template.render(CALLS[:1], add_generation_prompt=True))
    sampled = until_text(call, end)
    episodes = hybrid.MessageEnvironment(tokenizer, [add]).episodes([{"prompt": CALLS[:1]}])
    (row,) = roll_out(episodes, [[0]], lambda *_: encode_text(tokenizer, sampled), max_turns=1)
    assert episodes.completions[0][1] == {"role": "tool", "name": "add", "content": "42"}
    text = tokenizer.decode(row.training[0].ids)
    assert text.startswith(template.render(CALLS[:1], add_generation_prompt=True) + sampled + end)
    assert text.count(end) == template.render(CALLS[:3], add_generation_prompt=True).count(end)


def test_a_template_without_end_tokens_is_followed_as_it_is_written():
    """Alpaca's format: the tokenizer's end token is sampled, the template writes none."""
    tokenizer = tokenizer_of("llama3")
    tokenizer.chat_template = "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}### assistant:\n{% endif %}"
    template, turn = ChatTemplate(tokenizer), {"role": "assistant", "content": "x"}
    replies = [{"role": "user", "content": "y"}]
    expected = "\n### user:\ny\n### assistant:\n"
    ids = template.following_ids(CALLS[:1], turn, replies, tokenizer.eos_token_id)
    assert tokenizer.decode(ids) == expected
    ids = template.following_ids(CALLS[:1], turn, replies, encode_text(tokenizer, "x")[0])
    assert tokenizer.decode(ids) == tokenizer.eos_token + expected


def test_an_end_token_that_starts_the_next_turn_is_not_doubled():
    """GLM 4.5 stops at "<|observation|>", which its template writes before a tool's result."""
    tokenizer = tokenizer_of("chatml")
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"]}
    )
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.chat_template = (TEMPLATES / "glm4moe.jinja").read_text()
    template, observation = ChatTemplate(tokenizer), tokenizer.convert_tokens_to_ids("<|observation|>")
    ids = template.following_ids(CALLS[:1], CALLS[1], CALLS[2:3], observation)
    assert tokenizer.decode(ids) == "\n<tool_response>\n42\n</tool_response><|assistant|>"
    ids = template.following_ids(CALLS[:1], CALLS[1], CALLS[2:3], encode_text(tokenizer, ">")[0])
    assert tokenizer.decode(ids).startswith("<|endoftext|><|observation|>\n<tool_response>\n42")


def test_a_turn_that_ends_differently_once_messages_follow():
    """gpt-oss ends the last turn with "<|return|>", and earlier ones with "<|end|>"."""
    tokenizer = tokenizer_of("chatml")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|return|>", "<|end|>", "<|start|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
        "{{ '<|return|>' if m.role == 'assistant' and loop.last else '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    template, turn = ChatTemplate(tokenizer), {"role": "assistant", "content": "x"}
    ids = template.following_ids(CALLS[:1], turn, [{"role": "user", "content": "y"}], template.turn_end)
    assert tokenizer.decode(ids) == "<|start|>user\ny<|end|><|start|>assistant\n"


TEXTS = [
    "Hello",
    "",
    'x\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    '<think>\nWell\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "is_raining", "arguments": {"city": "Rome"}}\n</tool_call>',
    '{"name": "add", "parameters": {"a": 1, "b": 2}}',
    '<tool_call>\n{"name": "now"}\n</tool_call>',
]


@pytest.mark.parametrize("family", WITH_TOOLS)
@pytest.mark.parametrize("text", TEXTS)
def test_turns_are_parsed_as_by_trl(family, text):
    from trl.chat_template_utils import add_response_schema, parse_response

    tokenizer = tokenizer_of(family)
    tokenizer.eos_token = FAMILIES[family][1]
    template = ChatTemplate(tokenizer, tool_schemas([add, is_raining]))
    prompt = template.render(CALLS[:1], add_generation_prompt=True)
    ids = encode_text(tokenizer, text)
    ours = TurnParser(template, has_tools=True).parse(ids, prompt)
    tools = [add, is_raining]
    theirs = parse_response(
        add_response_schema(tokenizer), [*ids, template.turn_end], encode_text(tokenizer, prompt), tools
    )
    assert ours == theirs
    assert TurnParser(template, has_tools=True).parse(ids, prompt) == theirs  # by the response template that TRL set


def sampled_turns(family: str, template: ChatTemplate) -> list[list[int]]:
    """The tokens of the assistant's turns of CALLS as the template renders them, each with the token that ends it."""
    turns = []
    for index in range(1, len(CALLS), 2):
        prompt = template.render(CALLS[:index], add_generation_prompt=True)
        text = template.render(CALLS[: index + 1])
        assert text.startswith(prompt), "the template continues its generation prompt"
        ids = encode_text(template.tokenizer, text.removeprefix(prompt).rstrip())
        end = template.tokenizer.convert_tokens_to_ids(WITH_OWN_TOOLS[family][1])
        turns.append(ids if template.is_special(ids[-1]) else [*ids, end])  # GLM's template ends no turn
    return turns


@pytest.mark.parametrize("family", WITH_OWN_TOOLS)
def test_calls_in_a_familys_own_format_have_the_tokens_of_its_template(family):
    """Prompt, turns and observations are together the whole conversation, whose rendering is the oracle."""
    merged = "".join((TEMPLATES / f"{name}.jinja").read_text() for name in ("qwen3_6", "glm4moe", "gptoss", "gemma4"))
    tokenizer = tokenizer_of(family, merged)
    template = ChatTemplate(tokenizer, tool_schemas([add, is_raining]))
    assert template.supports_tools()
    turns = sampled_turns(family, template)
    ids = template.encode(template.render(CALLS[:1], add_generation_prompt=True))
    for number, turn in enumerate(turns):
        index, ids = 2 * number + 1, [*ids, *turn]
        if number < len(turns) - 1:
            replies = CALLS[index + 1 : index + 2]
            ids += template.following_ids(CALLS[:index], CALLS[index], replies, turn[-1])
    whole = template.encode(template.render(CALLS).rstrip())
    assert ids[: len(whole)] == whole and len(ids) - len(whole) <= (family == "glm4moe")


@pytest.mark.parametrize("family", WITH_OWN_TOOLS)
def test_calls_in_a_familys_own_format_are_parsed_as_by_trl(family):
    """And as the messages that the template rendered."""
    from trl.chat_template_utils import add_response_schema, parse_response

    tokenizer, tools = tokenizer_of(family), [add, is_raining]
    template = ChatTemplate(tokenizer, tool_schemas(tools))
    parser, of_trl = TurnParser(template, has_tools=True), add_response_schema(tokenizer_of(family))
    for number, turn in enumerate(sampled_turns(family, template)):
        index = 2 * number + 1
        prompt = template.render(CALLS[:index], add_generation_prompt=True)
        ours = parser.parse(template.without_end(turn), prompt)
        assert ours == CALLS[index]
        ended = turn[:-1] if family == "glm4moe" else turn
        assert ours == {"content": "", **parse_response(of_trl, ended, encode_text(of_trl, prompt), tools)}
    assert hybrid.MessageEnvironment(tokenizer, tools).episodes([{"prompt": CALLS[:1]}])


ADDS = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]
THOUGHTS = {
    "qwen3_6": (
        "Well\n</think>\n\nSo:\n\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n"
        "</parameter>\n</function>\n</tool_call>",
        {"reasoning_content": "Well", "content": "So:", "tool_calls": ADDS},
    ),
    "glm4moe": (  # GLM-4.7 and 5 write no line ends
        "<think>Well</think><tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key>"
        "<arg_value>2</arg_value></tool_call>",
        {"reasoning_content": "Well", "content": "", "tool_calls": ADDS},
    ),
    "gptoss": (  # the recipient behind the channel, as in OpenAI's description of the format
        "<|channel|>analysis<|message|>Well<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        '<|constrain|>json<|message|>{"a": 1, "b": 2}',
        {"thinking": "Well", "content": "", "tool_calls": ADDS},
    ),
    "gemma4": (
        "<|channel>thought\nWell<channel|><|tool_call>call:add{a:1,b:2}<tool_call|>",
        {"reasoning_content": "Well", "content": "", "tool_calls": ADDS},
    ),
}


@pytest.mark.parametrize("family", THOUGHTS)
def test_thoughts_before_a_call_are_not_its_text(family):
    text, message = THOUGHTS[family]
    tokenizer = tokenizer_of(family)
    template = ChatTemplate(tokenizer, tool_schemas([add]))
    prompt = template.render(CALLS[:1], add_generation_prompt=True)
    parser = TurnParser(template, has_tools=True)
    assert parser.parse(encode_text(tokenizer, text), prompt) == {"role": "assistant", **message}


MALFORMED = [
    '<tool_call>\n{"name": "add", "arguments": {"a": 1,\n</tool_call>',
    '<tool_call>\n{"name": "add", "arguments": [1, 2]}\n</tool_call>',
    '<tool_call>\n{"arguments": {}}\n</tool_call>',
    "<tool_call>\n[1]\n</tool_call>",
    '<tool_call>\n{"name": "add", "argum',
    "<tool_call>" + "[" * 20000,
    '<tool_call>{"name": "add", "arguments": {"a": ' + "9" * 6000 + "}}</tool_call>",
]


@pytest.mark.parametrize("text", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_call_is_an_error(text):
    tokenizer = tokenizer_of("qwen2_5")
    template = ChatTemplate(tokenizer, tool_schemas([add]))
    with pytest.raises(MalformedCall, match="Error: "):
        TurnParser(template, has_tools=True).parse(encode_text(tokenizer, text), "")


def test_templates_that_cannot_be_used_are_refused():
    tokenizer = tokenizer_of("gemma3")
    with pytest.raises(ValueError, match=r"tools: \['add'\] given, and the chat template does not render tool calls"):
        hybrid.MessageEnvironment(tokenizer, [add])
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"chat_template: none given; .* set tokenizer.chat_template"):
        hybrid.MessageEnvironment(tokenizer)
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(ValueError, match="one that rejects a question with an answer given"):
        hybrid.MessageEnvironment(tokenizer)
    tokenizer = tokenizer_of("qwen2_5")
    tokenizer.chat_template = tokenizer.chat_template.replace("<tool_call>", "[call]")
    with pytest.raises(ValueError, match="tokenizer.response_template: None given, and the chat template writes"):
        hybrid.MessageEnvironment(tokenizer, [add])


def test_arguments_are_typed_by_the_schema_of_a_response_template():
    """A compact format for tiny models: the response template says how it is written, the schema what it means."""
    tokenizer = tokenizer_of("chatml")
    call = {"open": "call ", "close": ";", "content": "xml-inline", "repeats": True}
    call["content_args"] = {"tag_pattern": r"(?P<key>\w)=(?P<value>\w+)"}
    call["transform"] = {"type": "function", "function": {"name": "add", "arguments": "{content}"}}
    content = {"close_pattern": r"<\|im_end\|>\s*", "content": "text"}
    tokenizer.response_template = {"start_anchor": "assistant\n", "fields": {"tool_calls": call, "content": content}}
    template = ChatTemplate(tokenizer, tool_schemas([add]))
    turn = TurnParser(template, has_tools=True).parse(encode_text(tokenizer, "call a=12 b=x;"), "")
    assert json.loads(json.dumps(turn["tool_calls"][0]["function"]["arguments"])) == {"a": 12, "b": "x"}
