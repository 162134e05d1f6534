"""The chat in a terminal: through a pseudo-terminal as a user sees it, and its conversation as the models read it."""

import codecs
import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_examples import chat
from rlhf_examples.common.arguments import ChatArguments
from tests.rlhf_examples.chat_models import tokenizer_of

STORIES = Path(__file__).resolve().parents[3] / "shared" / "models" / "stories260K"
PROMPT = "\n> "
WAIT_S = 240


WORDS = " one two three four five six seven eight nine ten"


def talkative_model(directory: Path, seed: int = 0, layers: int = 2) -> str:
    """A model with a chat template that answers with words and never ends by itself: the head has rows in pairs of
    opposite sign for tokens of WORDS, so that one of them is always above the others' 0."""
    torch.manual_seed(seed)
    tokenizer = tokenizer_of("qwen2_5", merged_text=WORDS * 50)
    words = [token for name, token in tokenizer.get_vocab().items() if name.startswith("Ġ") and len(name) > 2]
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": layers, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=len(tokenizer), max_position_embeddings=4096))
    half = len(words) // 2
    with torch.no_grad():
        rows = torch.randn(half, 64)
        model.lm_head.weight.zero_()
        model.lm_head.weight[words[: 2 * half]] = torch.cat([rows, -rows])
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("chat")
    return talkative_model(root / "one"), talkative_model(root / "two", seed=1)


def take_terminal() -> None:
    """In the new process, as a shell does: Ctrl-C is a signal, and it is not ignored, as it is in jobs in the
    background and so in tests that run there."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class PseudoTerminal:
    """`chat.py` in a pseudo-terminal."""

    def __init__(self, *flags: str, columns: int = 120):
        self.near, far = pty.openpty()
        environment = {**os.environ, "COLUMNS": str(columns), "LINES": "40", "TERM": "xterm", "DS_ACCELERATOR": "cpu"}
        environment["PYTHONFAULTHANDLER"] = "1"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rlhf_examples.chat", *flags],
            stdin=far,
            stdout=far,
            stderr=far,
            env=environment,
            start_new_session=True,
            preexec_fn=take_terminal,
        )
        os.close(far)
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end within a character
        self.seen = ""

    def until(self, text: str) -> str:
        """What is printed up to `text`, and after the last call."""
        deadline = time.monotonic() + WAIT_S
        while text not in self.seen:
            ready, _, _ = select.select([self.near], [], [], 1)
            assert time.monotonic() < deadline, f"{text!r} did not come: {self.seen[-3000:]}\n{self.stacks()}"
            if ready:
                try:
                    self.seen += self.decoder.decode(os.read(self.near, 4096)).replace("\r", "")
                except OSError:  # the other side is closed
                    raise AssertionError(f"the chat ended before {text!r}: {self.seen[-3000:]}") from None
        before, self.seen = self.seen.split(text, 1)
        return before

    def stacks(self) -> str:
        """Where the chat is, which this ends."""
        os.kill(self.process.pid, signal.SIGABRT)
        written = b""
        with contextlib.suppress(OSError):
            while part := os.read(self.near, 4096):
                written += part
        return written.decode(errors="replace")

    def say(self, text: str) -> str:
        """Send a line; returns what is printed until the next prompt."""
        os.write(self.near, text.encode() + b"\n")
        self.until(f"{text[-20:]}\n")
        return self.until(PROMPT)

    def close(self) -> None:
        """End the chat by Ctrl-D."""
        os.write(self.near, b"\x04")
        with contextlib.suppress(OSError):
            while os.read(self.near, 4096):
                pass
        assert self.process.wait(WAIT_S) == 0


@pytest.fixture(scope="module")
def terminal():
    """Opens a chat, or returns the open one with the same flags: a start takes seconds."""
    opened: dict[tuple, PseudoTerminal] = {}

    def open_terminal(*flags: str, **settings: int) -> PseudoTerminal:
        if flags not in opened or opened[flags].process.poll() is not None:
            opened[flags] = PseudoTerminal(*flags, **settings)
            opened[flags].until(PROMPT)
        return opened[flags]

    yield open_terminal
    for each in opened.values():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(each.process.pid, signal.SIGKILL)
        each.process.wait()
        os.close(each.near)


@pytest.fixture
def two(terminal, models) -> PseudoTerminal:
    """A chat with both models."""
    return terminal("--path", models[0], "--compare", models[1], "--max_new_tokens", "16", "--temperature", "0")


def test_a_conversation_in_a_terminal(two, tmp_path):
    user = two
    assert "no command /nothing" in user.say("/nothing")
    user.say("/system be brief")
    first = user.say("hello")
    assert re.search(r"16 tokens, \d+ tokens/s, first after \d+\.\d\d s", first), first
    user.say("und wie geht's dir, ömer 🙂?")
    user.say("")
    assert "5 messages" in user.say(f"/save {tmp_path}/saved.json")
    saved = json.loads((tmp_path / "saved.json").read_text())
    assert [message["role"] for message in saved] == ["system", "user", "assistant", "user", "assistant"]
    assert saved[0]["content"] == "be brief" and saved[3]["content"] == "und wie geht's dir, ömer 🙂?"
    assert len(saved[2]["content"]) > 5 and saved[2]["content"].split()[0][:3] in first
    user.say("/undo")
    assert "3 messages" in user.say(f"/save {tmp_path}/saved.json")
    user.say("/new")
    assert "1 messages" in user.say(f"/save {tmp_path}/saved.json")
    assert "no such" in user.say("/save /no such/place").lower()


def test_two_models_side_by_side(two, models, tmp_path):
    user = two
    user.say("/system")
    shown = user.say("hello")
    header = next(line for line in shown.splitlines() if "[1]" in line and "[2]" in line)
    assert header.index("[1]") < header.index("[2]"), "two columns"
    assert shown.count("16 tokens,") == 2
    user.say("/pick 2")
    user.say(f"/save {tmp_path}/saved.json")
    picked = json.loads((tmp_path / "saved.json").read_text())[-1]["content"]
    assert "there are answers 1 to 2" in user.say("/pick 3")
    assert "/compare: " in user.say("/compare /no/such/model")
    assert user.say("hello again").count("16 tokens,") == 2, "the second model stayed"
    alone = user.say("/compare")
    assert f"answers: {models[0]}" in alone and " and " not in alone
    user.say("/new")
    user.say("hello")
    user.say(f"/save {tmp_path}/saved.json")
    assert json.loads((tmp_path / "saved.json").read_text())[-1]["content"] != picked, "the first model's own answer"


def test_bytes_that_are_no_text(two):
    """They leave the terminal's line editing confused, so this chat ends here."""
    os.write(two.near, b"\xff\xfe\xe2\x28 abc \xf0\x9f\n")
    two.until(PROMPT)
    assert "16 tokens" in two.say("hello")
    two.close()


def test_answers_are_streamed_and_ctrl_c_stops_one(terminal, tmp_path):
    model = talkative_model(tmp_path / "deep", layers=24)
    user = terminal("--path", model, "--max_new_tokens", "3000", "--temperature", "0")
    os.write(user.near, b"hello\n")
    user.until("hello\n")
    user.until(" ")  # the first words, long before the end
    assert "tokens/s" not in user.seen
    os.write(user.near, b"\x03")
    stopped = user.until(PROMPT)
    tokens = int(re.search(r"(\d+) tokens, .*stopped", stopped)[1])
    assert 0 < tokens < 3000
    time.sleep(1)  # Python's `input` loses a signal that comes while it shows the prompt
    os.write(user.near, b"\x03")  # the conversation goes on
    assert "Ctrl-D or /quit exits" in user.until(PROMPT)
    assert "/help" in user.say("/help"), "the chat goes on"
    user.close()


def error_of(*flags: str) -> str:
    """What a chat prints that cannot begin."""
    done = subprocess.run(
        [sys.executable, "-m", "rlhf_examples.chat", *flags],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )
    assert done.returncode != 0 and "Traceback" not in done.stderr, done.stderr
    return done.stderr


def test_a_model_that_is_not_there():
    assert "/no/such/model" in error_of("--path", "/no/such/model")


@pytest.mark.skipif(not STORIES.is_dir(), reason="the pretrained model of stories is not on this machine")
def test_a_pretrained_model_without_a_template(terminal):
    user = terminal("--path", str(STORIES), "--max_new_tokens", "30", "--temperature", "0", columns=60)
    answer = user.say("Once upon a time")
    assert "there was a little girl named" in " ".join(answer.split())
    user.close()


# What the models read


class Letters:
    """An engine whose answers are the letters of `text`."""

    def __init__(self, tokenizer, text: str = "good"):
        self.ids = tokenizer(text, add_special_tokens=False)["input_ids"]

    def generate(self, ids, *, streamer, **settings) -> torch.Tensor:
        streamer.put(ids)
        for token in self.ids:
            streamer.put(torch.tensor([token]))
        streamer.end()
        return torch.cat([ids, torch.tensor([self.ids])], dim=1)


def chat_with(**settings) -> tuple[chat.Chat, io.StringIO]:
    """A chat with a model of 4096 tokens, whose notes and answers go into a string."""
    output, tokenizer = io.StringIO(), tokenizer_of("qwen2_5")
    args = ChatArguments(path="model", **{"max_new_tokens": 6, **settings})
    speaker = chat.Speaker("model", Letters(tokenizer), tokenizer, 4096)
    return chat.Chat([speaker], args, Console(file=output, width=200)), output


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature: -1.0 given; it must be at least 0"),
        ({"top_p": 2.0}, "top_p: 2.0 given; it must be at most 1"),
        ({"max_new_tokens": 0}, "max_new_tokens: 0 given; it must be at least 1"),
        ({"path": "", "compare": "other"}, "compare: 'other' given without path"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        ChatArguments(**settings)


def test_answers_longer_than_the_model(alone, models):
    with pytest.raises(ValueError, match="max_new_tokens: 5000 given; .* takes 4096 with the conversation"):
        chat.load(models[0], ChatArguments(path=models[0], max_new_tokens=5000))


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_a_command_that_fails_ends_nothing(monkeypatch, error):
    def load(path, args):
        raise error

    talking, output = chat_with()
    monkeypatch.setattr(chat, "load", load)
    monkeypatch.setattr(chat, "require_model", lambda *_: None)
    lines = iter(["hello", "/compare other"])
    messages = talking.talk(lambda: next(lines, None) or quit_now())
    assert len(messages) == 2 and len(talking.speakers) == 1
    assert re.search("/compare: (out of memory|stopped)", output.getvalue())


def quit_now():
    raise EOFError


def test_a_terminal_obeys_no_answer():
    talking, output = chat_with()
    talking.speakers[0] = replace(talking.speakers[0], engine=Letters(talking.speakers[0].tokenizer, "a\x1b[2Jb"))
    talking.send("hello")
    assert "\x1b" not in output.getvalue() and "a\ufffd[2Jb" in output.getvalue()
    assert talking.messages[-1]["content"] == "a\x1b[2Jb", "the conversation has what was sampled"


def test_the_history_is_in_the_next_prompt():
    talking, _ = chat_with(system="be brief")
    talking.send("first question")
    talking.send("second question")
    seen = talking.speakers[0].tokenizer.decode(talking.prompt(talking.speakers[0])[0])
    for message in talking.messages:
        assert message["content"] in seen
    assert seen.index("be brief") < seen.index("first question") < seen.index("second question")


def test_the_oldest_messages_are_forgotten_when_the_context_is_full():
    talking, output = chat_with(system="be brief", max_new_tokens=3900)
    talking.messages += [
        {"role": role, "content": f"{role} {turn} " + "word " * 5}
        for turn in range(4)
        for role in ("user", "assistant")
    ]
    talking.messages.append({"role": "user", "content": "and now?"})
    seen = talking.speakers[0].tokenizer.decode(talking.prompt(talking.speakers[0])[0])
    assert "be brief" in seen and "and now?" in seen and "user 0" not in seen
    assert "no longer sees the oldest" in output.getvalue()
    assert "user 0" in talking.messages[1]["content"], "the conversation itself is whole"


def test_a_message_that_does_not_fit_is_not_sent():
    talking, output = chat_with()
    talking.send("word " * 5000)
    assert talking.messages == []
    assert re.search(r"the message has \d+ tokens; 4090 fit into .*; nothing was sent", output.getvalue())
    talking.send("hello")
    assert [message["role"] for message in talking.messages] == ["user", "assistant"]


def test_a_template_that_refuses_a_system_message():
    talking, output = chat_with(system="be brief")
    talking.speakers[0].tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    talking.send("hello")
    assert "System role not supported; nothing was sent" in output.getvalue()
    assert [message["role"] for message in talking.messages] == ["system"]
