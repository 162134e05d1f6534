"""Chat with a model in a terminal, or with two side by side; answers are streamed token by token.

The model that `make demo` trains, on a CPU; a model of 7B, or its adapter's directory, on a GPU; two of them:
python -m rlhf_examples.chat --path runs/demo/ppo/model
python -m rlhf_examples.chat --path my-model --dtype bfloat16 --max_new_tokens 512
python -m rlhf_examples.chat --path runs/demo/sft/model --compare runs/demo/ppo/model
"""

from rlhf_examples.common.arguments import ChatArguments
from rlhf_examples.common.command_line import command

main = command("rlhf_examples.chat", ChatArguments)
if __name__ == "__main__":
    raise SystemExit(main())  # before the imports below, which take seconds: help and errors come first

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase, TextStreamer

import hybrid
from rlhf_examples.common.engines import deepspeed_config
from rlhf_examples.common.files import printable
from rlhf_examples.common.input_errors import end_startup
from rlhf_examples.common.models import load_exported, load_tokenizer, merged, require_model
from rlhf_examples.common.ranks import device, seed_everything
from rlhf_examples.data.conversations import encode_plain_text, encode_text

SIDE_BY_SIDE_COLUMNS = 80  # of the terminal; in a narrower one answers are below each other
MAX_TOKENS = 4096  # of a conversation, if the model allows as many
HELP = """\
Enter sends a message; Ctrl-C stops an answer or a command; Ctrl-D or /quit exits.
/new               a new conversation             /undo   take the last message and its answer back
/system TEXT       a new one, with this system message; without TEXT: with none
/compare PATH      a second model beside the first; without PATH: the first alone
/pick 2            go on with the second model's last answer
/save FILE         write the conversation as JSON         /help   this text"""


def run(args: ChatArguments) -> None:
    """Load the models and chat until the input ends."""
    paths = [path for path in (args.path, args.compare) if path]
    for name, path in zip(("path", "compare"), paths or [""], strict=False):
        require_model(name, path, args.attn_implementation)
    seed_everything(args.seed)
    with suppress(ImportError):  # line editing and earlier lines, where Python has them
        import readline  # noqa: F401
    chat = Chat([load(path, args) for path in paths], args)
    end_startup()
    chat.note(f"{' and '.join(paths)}\n{HELP}")
    for speaker in chat.speakers:
        if speaker.tokenizer.chat_template is None:
            chat.note(f"{speaker.name} has no chat template: it continues each message as plain text")
    chat.talk(lambda: input("\n> "))


@dataclass(frozen=True)
class Speaker:
    """A model that answers.  max_tokens: of a conversation, its answer included."""

    name: str
    engine: hybrid.InferenceEngine
    tokenizer: PreTrainedTokenizerBase
    max_tokens: int


def load(path: str, args: ChatArguments) -> Speaker:
    """The model at `path`, ready to answer. Raises ValueError or OSError if there is none, or if an answer takes all of
    its context."""
    tokenizer = load_tokenizer(path)
    dtype = "float32" if args.dtype == "int8" else args.dtype
    model = merged(load_exported(path, deepspeed_config(dtype, zero_stage=0), args.attn_implementation))
    max_tokens = min(getattr(model.config, "max_position_embeddings", 0) or MAX_TOKENS, MAX_TOKENS)
    if args.max_new_tokens >= max_tokens:
        raise ValueError(
            f"max_new_tokens: {args.max_new_tokens} given; {path} takes {max_tokens} with the conversation"
        )
    engine = hybrid.init_inference(model, dtype=args.dtype, replace_with_kernel_inject=True, max_out_tokens=max_tokens)
    return Speaker(path, engine, tokenizer, max_tokens)


@dataclass
class Chat:
    """A conversation with one model or two; both answer the same messages. A method `do_NAME` is a command of HELP.

    messages: the system message if there is one, then user's and assistant's in turns.
    answers: the latest of each model.
    """

    speakers: list[Speaker]
    args: ChatArguments
    console: Console = field(default_factory=lambda: Console(highlight=False, soft_wrap=True))
    messages: list[dict[str, str]] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.do_system(self.args.system)

    def note(self, text: str) -> None:
        """Print a line about the chat itself, dimmed."""
        self.console.print(Text(text, style="dim"))

    def talk(self, ask: Callable[[], str]) -> list[dict[str, str]]:
        """Answer messages and run commands until the input ends; returns the conversation.

        ask: returns the next line; raises EOFError at the end.
        """
        line = ""
        while line != "/quit":
            try:
                line = ask().encode("utf-8", "replace").decode().strip()  # a terminal may send half characters
            except UnicodeDecodeError:
                self.note("that was no text; nothing was sent")
            except KeyboardInterrupt:  # one that came too late for an answer
                self.note("Ctrl-D or /quit exits")
            except EOFError:
                break
            else:
                self.take(line)
        return self.messages

    def take(self, line: str) -> None:
        """Send a message, or run a command; an error of that is printed."""
        name, _, argument = line[1:].partition(" ")
        commands = {method.removeprefix("do_"): method for method in vars(Chat) if method.startswith("do_")}
        if not line.startswith("/"):
            if line:
                self.send(line)
        elif name in commands or not name:
            try:
                getattr(self, commands.get(name, "do_help"))(argument.strip())
            except (ValueError, OSError, RuntimeError) as error:  # also of memory
                self.note(f"/{name}: {error}")
            except KeyboardInterrupt:
                self.note(f"/{name}: stopped")
        elif name != "quit":
            self.note(f"no command /{name}; there are {', '.join(f'/{each}' for each in commands)}, /quit")

    @property
    def system(self) -> str:
        """The system message; "" if there is none."""
        return next((message["content"] for message in self.messages[:1] if message["role"] == "system"), "")

    def do_new(self, _: str) -> None:
        self.do_system(self.system)

    def do_system(self, text: str) -> None:
        self.messages, self.answers = [{"role": "system", "content": text}] if text else [], []

    def do_undo(self, _: str) -> None:
        if len(self.messages) > bool(self.system):
            del self.messages[-2:]
        self.answers = []

    def do_compare(self, path: str) -> None:
        if path:
            require_model("path", path, self.args.attn_implementation)
        self.speakers[1:] = [load(path, self.args)] if path else []
        self.note(f"answers: {' and '.join(speaker.name for speaker in self.speakers)}")

    def do_pick(self, number: str) -> None:
        if not number.isdigit() or not 1 <= int(number) <= len(self.answers):
            raise ValueError(f"{number!r} given; there are answers 1 to {len(self.answers)}")
        self.messages[-1]["content"] = self.answers[int(number) - 1]
        self.note(f"the conversation continues with answer {number}")

    def do_save(self, path: str) -> None:
        if not path:
            raise ValueError("no file given")
        Path(path).expanduser().write_text(json.dumps(self.messages, ensure_ascii=False, indent=1))
        self.note(f"{len(self.messages)} messages are in {path}")

    def do_help(self, _: str) -> None:
        self.note(HELP)

    def send(self, text: str) -> None:
        """Send a message and print the answers; the conversation continues with the first. A message that cannot be
        answered is taken back, and the reason printed."""
        self.messages.append({"role": "user", "content": text})
        try:
            prompts = [self.prompt(speaker) for speaker in self.speakers]
        except (ValueError, jinja2.TemplateError) as error:
            del self.messages[-1]
            self.note(f"{error}; nothing was sent")
            return
        with Answers(self.console, [speaker.name for speaker in self.speakers]) as shown:
            pairs = enumerate(zip(self.speakers, prompts, strict=True))
            speeds = [answer(speaker, ids, partial(shown.add, i), self.args) for i, (speaker, ids) in pairs]
        self.answers = shown.texts
        self.note("; ".join(speeds))
        self.messages.append({"role": "assistant", "content": self.answers[0]})

    def prompt(self, speaker: Speaker) -> torch.Tensor:
        """The conversation as a model reads it, int64 [1, tokens], without the oldest messages that do not fit.

        Raises ValueError if the last message alone does not fit, and jinja2.TemplateError if the template refuses.
        """
        settings = json.loads(self.args.chat_template_kwargs or "{}")
        room, system = speaker.max_tokens - self.args.max_new_tokens, bool(self.system)
        for first in range(system, len(self.messages), 2):
            ids = encode_prompt(speaker.tokenizer, self.messages[:system] + self.messages[first:], settings)
            if ids.shape[1] <= room:
                if first > system:
                    self.note(f"{speaker.name} no longer sees the oldest {first - system} messages: {room} tokens fit")
                return ids
        raise ValueError(
            f"the message has {ids.shape[1]} tokens; {room} fit into {speaker.name}, besides max_new_tokens="
            f"{self.args.max_new_tokens} for the answer"
        )


def answer(speaker: Speaker, ids: torch.Tensor, write: Callable[[str], None], args: ChatArguments) -> str:
    """Generate a model's answer to a prompt, int64 [1, tokens], and `write` it as it comes; Ctrl-C ends it early.

    Returns its tokens, tokens a second after the first one, and seconds to the first one, as text.
    """
    tokenizer = speaker.tokenizer
    ends = dict.fromkeys([*args.stop_token_ids, tokenizer.eos_token_id, hybrid.turn_end_token(tokenizer)])
    sampling: dict[str, Any] = {"temperature": args.temperature, "top_p": args.top_p} if args.temperature else {}
    stream, stopped = AnswerStreamer(tokenizer, write), ""
    try:
        speaker.engine.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=args.max_new_tokens,
            eos_token_id=[token for token in ends if token is not None] or None,
            pad_token_id=tokenizer.pad_token_id,
            streamer=stream,
            do_sample=bool(sampling),
            **sampling,
        )
    except KeyboardInterrupt:
        stream.end()
        stopped = ", stopped"
    start, *times = stream.times
    first, last = (times[0], times[-1]) if times else (start, start)
    rate = f", {(len(times) - 1) / (last - first):.0f} tokens/s" if last > first else ""
    return f"{len(times)} tokens{rate}, first after {first - start:.2f} s{stopped}"


class AnswerStreamer(TextStreamer):
    """Writes an answer's text as it is generated.  times: of the start, and of each token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], None]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write, self.times = write, [time.perf_counter()]

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt first, then each token."""
        if not self.next_tokens_are_prompt:
            self.times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Takes text whose characters are complete."""
        self.write(text)


class Answers:
    """Prints answers as they are generated: side by side, redrawn while they grow and printed whole at the end; in a
    narrow terminal or a pipe below each other, each under its model's name if there is more than one.
    """

    def __init__(self, console: Console, names: list[str]):
        self.console, self.names, self.texts, self.last = console, names, [""] * len(names), -1
        beside = len(names) > 1 and console.is_terminal and console.width >= SIDE_BY_SIDE_COLUMNS
        live = Live(console=console, transient=True, refresh_per_second=12, vertical_overflow="crop")
        self.live = live if beside else None

    def __enter__(self) -> "Answers":
        if self.live:
            self.live.start()
        return self

    def add(self, number: int, text: str) -> None:
        """Show more text of an answer.  number: of its model."""
        self.texts[number] += text
        if self.live:
            self.live.update(self.table())
            return
        if number != self.last and len(self.names) > 1:
            self.console.print(Text("\n" * (self.last >= 0) + f"[{number + 1}] {self.names[number]}"))
        self.last = number
        self.console.file.write(printable(text))
        self.console.file.flush()

    def table(self) -> Table:
        """The answers so far."""
        table = Table(expand=True)
        for number, name in enumerate(self.names):
            table.add_column(Text(f"[{number + 1}] {name}"), ratio=1, overflow="fold")
        table.add_row(*(Text(printable(text)) for text in self.texts))
        return table

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()
        self.console.print(self.table() if self.live else "")


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], settings: dict | None = None
) -> torch.Tensor:
    """The conversation as token ids, int64 [1, tokens]; without a chat template the last message alone.

    settings: keyword arguments of the chat template.
    """
    if tokenizer.chat_template is not None:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **(settings or {}))
        ids = encode_text(text, tokenizer)
    else:
        ids = encode_plain_text(messages[-1]["content"], tokenizer)
    return torch.tensor([ids], device=device())
