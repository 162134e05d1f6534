"""Chat with a model in a terminal, or with two side by side; answers are streamed token by token.

The model that `make demo` trains, on a CPU; a model of 7B, or its adapter's directory, on a GPU; two of them:
python -m rlhf_examples.chat --path runs/demo/ppo/model
python -m rlhf_examples.chat --path my-model --dtype bfloat16 --max_new_tokens 512
python -m rlhf_examples.chat --path runs/demo/sft/model --compare runs/demo/ppo/model
"""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import torch
from transformers import PreTrainedTokenizerBase, TextStreamer

import hybrid
from rlhf_examples.common.arguments import ChatArguments
from rlhf_examples.common.command_line import run_command
from rlhf_examples.common.engines import deepspeed_config
from rlhf_examples.common.models import load_exported, load_tokenizer, merged, require_model
from rlhf_examples.common.ranks import device, end_preparation, seed_everything
from rlhf_examples.common.terminal import Answers, Terminal

Messages = list[dict[str, str]]
MAX_TOKENS = 4096  # of a conversation, if the model allows as many
HELP = """\
Enter sends a message; Ctrl-C stops an answer or a command; Ctrl-D or /quit exits.
/new               a new conversation             /undo   take the last message and its answer back
/system TEXT       a new one, with this system message; without TEXT: with none
/compare PATH      a second model beside the first; without PATH: the first alone
/pick 2            go on with the second model's last answer
/save FILE         write the conversation as JSON         /help   this text"""


def main() -> None:
    """Chat with the settings of the command line."""
    run_command(ChatArguments, run)


def run(args: ChatArguments) -> None:
    """Load the models and chat until the input ends."""
    paths = [path for path in (args.path, args.compare) if path]
    for name, path in zip(("path", "compare"), paths or [""], strict=False):
        require_model(name, path, args.attn_implementation)
    seed_everything(args.seed)
    with suppress(ImportError):  # line editing and earlier lines, where Python has them
        import readline  # noqa: F401
    chat = Chat([load(path, args) for path in paths], args)
    end_preparation()
    chat.terminal.note(f"{' and '.join(paths)}\n{HELP}")
    for speaker in chat.speakers:
        if speaker.tokenizer.chat_template is None:
            chat.terminal.note(f"{speaker.name} has no chat template: it continues each message as plain text")
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


class TooLong(ValueError):
    """A message that does not fit into the model's context."""


@dataclass
class Chat:
    """A conversation with one model or two; both answer the same messages.

    messages: the system message if there is one, then user's and assistant's in turns.
    answers: the latest of each model.
    """

    speakers: list[Speaker]
    args: ChatArguments
    terminal: Terminal = field(default_factory=Terminal)
    messages: Messages = field(default_factory=list)
    answers: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begin(self.args.system)

    def begin(self, system: str) -> None:
        """Forget the conversation.  system: the new one's system message; "" for none."""
        self.messages, self.answers = [{"role": "system", "content": system}] if system else [], []

    def talk(self, ask: Callable[[], str]) -> Messages:
        """Answer and obey until the input ends; returns the conversation.  ask: the next line; EOFError at the end."""
        while True:
            try:
                line = readable(ask()).strip()
            except UnicodeDecodeError:
                self.terminal.note("that was no text; nothing was sent")
                continue
            except KeyboardInterrupt:  # one that came too late for an answer
                self.terminal.note("Ctrl-D or /quit exits")
                continue
            except EOFError:
                return self.messages
            if line == "/quit":
                return self.messages
            if line.startswith("/"):
                self.obey(*line[1:].split(maxsplit=1))
            elif line:
                self.send(line)

    def obey(self, command: str = "help", argument: str = "") -> None:
        """Run a command of HELP; what is wrong with it is printed."""
        methods = {
            "new": lambda: self.begin(self.system),
            "system": lambda: self.begin(argument),
            "undo": self.undo,
            "compare": lambda: self.compare(argument),
            "pick": lambda: self.pick(argument),
            "save": lambda: self.save(argument),
            "help": lambda: self.terminal.note(HELP),
        }
        if command not in methods:
            self.terminal.note(f"no command /{command}; there are {', '.join(f'/{name}' for name in methods)}, /quit")
            return
        try:
            methods[command]()
        except (ValueError, OSError, RuntimeError) as error:  # also of memory
            self.terminal.note(f"/{command}: {error}")
        except KeyboardInterrupt:
            self.terminal.note(f"/{command}: stopped")

    @property
    def system(self) -> str:
        """The system message; "" if there is none."""
        return next((message["content"] for message in self.messages[:1] if message["role"] == "system"), "")

    def undo(self) -> None:
        """Take the last message and its answer back."""
        if len(self.messages) > bool(self.system):
            del self.messages[-2:]
        self.answers = []

    def compare(self, path: str) -> None:
        """Let a second model answer too; with an empty path the first alone. A path that is wrong changes nothing."""
        second = []
        if path:
            require_model("path", path, self.args.attn_implementation)
            second = [load(path, self.args)]
        self.speakers[1:] = second
        self.terminal.note(f"answers: {' and '.join(speaker.name for speaker in self.speakers)}")

    def pick(self, number: str) -> None:
        """Let the conversation go on with the numbered model's last answer."""
        if not number.isdigit() or not 1 <= int(number) <= len(self.answers):
            raise ValueError(f"{number!r} given; there are answers 1 to {len(self.answers)}")
        self.messages[-1]["content"] = self.answers[int(number) - 1]
        self.terminal.note(f"the conversation goes on with answer {number}")

    def save(self, path: str) -> None:
        """Write the conversation to a JSON file."""
        if not path:
            raise ValueError("no file given")
        Path(path).expanduser().write_text(json.dumps(self.messages, ensure_ascii=False, indent=1))
        self.terminal.note(f"{len(self.messages)} messages are in {path}")

    def send(self, text: str) -> None:
        """Send a message and print the answers; the conversation goes on with the first. A message that cannot be
        answered is taken back, and the reason printed."""
        self.messages.append({"role": "user", "content": text})
        try:
            prompts = [self.prompt(speaker) for speaker in self.speakers]
        except (TooLong, jinja2.TemplateError) as error:
            del self.messages[-1]
            self.terminal.note(f"{error}; nothing was sent")
            return
        with self.terminal.answers([speaker.name for speaker in self.speakers]) as shown:
            answered = [
                self.answer(*each, number, shown)
                for number, each in enumerate(zip(self.speakers, prompts, strict=True))
            ]
        self.answers = [text for text, _ in answered]
        self.terminal.note("; ".join(speed for _, speed in answered))
        self.messages.append({"role": "assistant", "content": self.answers[0]})

    def prompt(self, speaker: Speaker) -> torch.Tensor:
        """The conversation as a model reads it, int64 [1, tokens]. The oldest messages that do not fit are forgotten.

        Raises TooLong if the last message alone does not fit, and jinja2.TemplateError if the template refuses.
        """
        settings = json.loads(self.args.chat_template_kwargs or "{}")
        room = speaker.max_tokens - self.args.max_new_tokens
        for messages in shortened(self.messages):
            ids = encode_prompt(speaker.tokenizer, messages, settings)
            if ids.shape[1] <= room:
                if forgotten := len(self.messages) - len(messages):
                    self.terminal.note(
                        f"{speaker.name} no longer sees the oldest {forgotten} messages: {room} tokens fit"
                    )
                return ids
        raise TooLong(
            f"the message has {ids.shape[1]} tokens; {room} fit into {speaker.name}, besides max_new_tokens="
            f"{self.args.max_new_tokens} for the answer"
        )

    def answer(self, speaker: Speaker, ids: torch.Tensor, number: int, shown: Answers) -> tuple[str, str]:
        """Generate and show a model's answer; returns it, and its tokens a second as text. Ctrl-C ends it early."""
        args, tokenizer = self.args, speaker.tokenizer
        ends = [*args.stop_token_ids, tokenizer.eos_token_id, hybrid.turn_end_token(tokenizer)]
        ends = [token for token in dict.fromkeys(ends) if token is not None]
        sampling: dict[str, Any] = {"do_sample": False}
        if args.temperature:
            sampling = {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p}
        stopped = ""
        with interrupts() as interrupted:
            streamer = AnswerStreamer(tokenizer, lambda text: shown.add(number, text), interrupted)
            try:
                speaker.engine.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=args.max_new_tokens,
                    eos_token_id=ends or None,
                    pad_token_id=tokenizer.pad_token_id,
                    streamer=streamer,
                    **sampling,
                )
            except Stopped:
                streamer.end()
                stopped = ", stopped"
        return streamer.text, streamer.speed() + stopped


class Stopped(Exception):
    """The user ended an answer."""


@contextmanager
def interrupts() -> Iterator[threading.Event]:
    """Inside the block Ctrl-C sets the event. A KeyboardInterrupt could come anywhere in the engine, or be lost where
    Python ignores exceptions."""
    interrupted = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


class AnswerStreamer(TextStreamer):
    """Hands an answer's text on as it is generated, and measures.  write: called with each piece of text.

    Raises Stopped at the next token once `interrupted` is set.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], None], interrupted: threading.Event):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write, self.interrupted, self.text, self.tokens = write, interrupted, "", 0
        self.start = self.first = self.latest = time.perf_counter()

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt first, then each token."""
        if self.interrupted.is_set():
            raise Stopped
        if not self.next_tokens_are_prompt:
            self.tokens += 1
            self.latest = time.perf_counter()
            self.first = self.first if self.tokens > 1 else self.latest
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Takes text whose characters are complete."""
        self.text += text
        self.write(text)

    def speed(self) -> str:
        """Tokens, tokens a second after the first one, and seconds to the first one, as text."""
        spent = self.latest - self.first
        rate = f", {(self.tokens - 1) / spent:.0f} tokens/s" if self.tokens > 1 and spent > 0 else ""
        return f"{self.tokens} tokens{rate}, first after {self.first - self.start:.2f} s"


def readable(line: str) -> str:
    """A line without the half characters that a terminal may send; tokenizers refuse them."""
    return line.encode("utf-8", "replace").decode()


def shortened(messages: Messages) -> Iterator[Messages]:
    """The conversation, then without its oldest message and answer, and so on. The system and last messages stay."""
    head = messages[: bool(messages and messages[0]["role"] == "system")]
    for start in range(len(head), len(messages), 2):
        yield head + messages[start:]


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, settings: dict[str, Any] | None = None
) -> torch.Tensor:
    """The conversation as token ids, int64 [1, tokens]; without a chat template the last message alone.

    settings: keyword arguments of the chat template.
    """
    if tokenizer.chat_template is not None:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **(settings or {}))
        start = []
    else:
        text = messages[-1]["content"]
        start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return torch.tensor([start + tokenizer(text, add_special_tokens=False)["input_ids"]], device=device())


if __name__ == "__main__":
    main()
