"""Answers of one model, or of two side by side, in a terminal or a pipe, as they are generated."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rlhf_examples.common.files import printable

SIDE_BY_SIDE_COLUMNS = 80  # of the terminal; in a narrower one answers are below each other


class Terminal:
    """Prints notes and streamed answers.  console: rich's, of standard output by default."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(highlight=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Print a line about the chat itself, dimmed."""
        self.console.print(Text(text, style="dim"))

    @contextmanager
    def answers(self, names: Sequence[str]) -> Iterator["Answers"]:
        """Inside the block the answers of models `names` are printed as their texts are added."""
        beside = len(names) > 1 and self.console.is_terminal and self.console.width >= SIDE_BY_SIDE_COLUMNS
        answers = Columns(self.console, names) if beside else Lines(self.console, names)
        try:
            yield answers
        finally:
            answers.end()


class Answers:
    """Answers that are being generated, by the number of their model."""

    def __init__(self, console: Console, names: Sequence[str]):
        self.console, self.names = console, names

    def add(self, number: int, text: str) -> None:
        """Show more text of an answer."""
        raise NotImplementedError

    def end(self) -> None:
        """Nothing is added any more."""
        raise NotImplementedError


class Lines(Answers):
    """Answers below each other, each under its model's name if there is more than one."""

    last = -1

    def add(self, number: int, text: str) -> None:
        if number != self.last and len(self.names) > 1:
            self.console.print(
                Text(f"\n[{number + 1}] {self.names[number]}" if self.last >= 0 else f"[1] {self.names[0]}")
            )
        self.last = number
        self.console.file.write(printable(text))
        self.console.file.flush()

    def end(self) -> None:
        self.console.file.write("\n")
        self.console.file.flush()


class Columns(Answers):
    """Answers side by side, redrawn while they grow; what is longer than the terminal is printed whole at the end."""

    def __init__(self, console: Console, names: Sequence[str]):
        super().__init__(console, names)
        self.texts = [""] * len(names)
        self.live = Live(self.table(), console=console, transient=True, refresh_per_second=12, vertical_overflow="crop")
        self.live.start()

    def table(self) -> Table:
        """The answers so far."""
        table = Table(expand=True)
        for number, name in enumerate(self.names):
            table.add_column(Text(f"[{number + 1}] {name}"), ratio=1, overflow="fold")
        table.add_row(*map(Text, self.texts))
        return table

    def add(self, number: int, text: str) -> None:
        self.texts[number] += printable(text)
        self.live.update(self.table())

    def end(self) -> None:
        self.live.stop()
        self.console.print(self.table())
