"""Dataclasses of settings, read from a YAML file and from flags that override it; their help and their errors.

A field's annotation says what it allows: `Annotated[int, Within(1)]`, `Literal["a", "b"]`,
`Annotated[str, Names("model")]`.
"""

import argparse
import difflib
import importlib.util
import json
import os
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import yaml

from rlhf_examples.common.choices import named_reward, require_choice

Arguments = TypeVar("Arguments", bound="ScriptArguments")
# What a setting may name.
MODEL, TOKENIZER, DATA, FILE, REWARD, ENVIRONMENT = "model", "tokenizer", "data", "file", "reward", "environment"
OUTPUT_FILE = "output file"
SERVER = "server:"  # prefix of the name of a reward that a pipeline serves
DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".txt", ".parquet")
BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True)
class Within:
    """The limits of a number."""

    minimum: float
    maximum: float | None = None

    def check(self, name: str, value: float) -> None:
        """Raises ValueError for a number outside of them."""
        if value < self.minimum:
            raise ValueError(f"{name}: {value!r} given; it must be at least {self.minimum}")
        if self.maximum is not None and value > self.maximum:
            raise ValueError(f"{name}: {value!r} given; it must be at most {self.maximum}")


@dataclass(frozen=True)
class Names:
    """The kind of thing that a setting's text names, which `require_inputs` checks.  kind: MODEL, DATA, …"""

    kind: str


def arg(default: Any, text: str, subject: str = "", required: bool = False) -> Any:
    """A field with its help text; each instance gets its own copy of a list.

    subject: of this field and the next ones in `--help`; empty: as the last field's.  required: whether it must be
        given.
    """
    metadata = {"help": text, "subject": subject, "required": required}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class ScriptArguments:
    """Arguments of a script."""

    def __post_init__(self) -> None:
        for name, hint in annotations_of(type(self)).items():
            if get_origin(hint) is Literal:
                require_choice(name, getattr(self, name), get_args(hint))
            for limits in getattr(hint, "__metadata__", ()):
                if isinstance(limits, Within):
                    limits.check(name, getattr(self, name))
        for is_wrong, message in self.refusals():
            if is_wrong:
                raise ValueError(message)

    def refusals(self) -> Iterator[tuple[Any, str]]:
        """Settings that contradict each other: whether they do, and the error. A subclass yields its base's first."""
        yield from ()

    def output_directories(self) -> list[str]:
        """The directories that the run writes."""
        return [self.output_dir] if hasattr(self, "output_dir") else []

    def named_inputs(self) -> Iterator[tuple[str, str, str]]:
        """The settings that name models, data sets and the like: setting, kind, and each name that is not empty."""
        for setting, hint in annotations_of(type(self)).items():
            value = getattr(self, setting)
            (inner,) = get_args(hint) if get_origin(hint) is list else (hint,)
            for kind in (each.kind for each in getattr(inner, "__metadata__", ()) if isinstance(each, Names)):
                yield from ((setting, kind, name) for name in (value if isinstance(value, list) else [value]) if name)

    def require_inputs(self, written_later: str = "") -> None:
        """Raises ValueError for an input that is missing, or that can only be a file, directory or module and is not
        there. It imports nothing heavy, and does not ask the hub.

        written_later: a directory whose files need not be there yet.
        """
        for item in fields(self):
            if item.metadata.get("required") and not getattr(self, item.name):
                raise ValueError(f"{item.name}: none given; give the directory or hub name of a model")
        for setting, kind, name in self.named_inputs():
            if not (written_later and name.startswith(f"{written_later}/")):
                require_input(setting, kind, name)


def annotations_of(kind: type) -> dict[str, Any]:
    """The annotations of a class's fields, by name."""
    return get_type_hints(kind, include_extras=True)


def require_input(setting: str, kind: str, name: str) -> None:
    """Raises ValueError if what a setting names can only be a file, directory or module, and is not there."""
    module, colon, _ = name.partition(":")
    path, problem = Path(name if kind != DATA or Path(name).exists() else name.partition("@")[0]), ""
    # A name on the hub has one slash at most.
    is_local = name.startswith((".", "/", "~")) or module.count("/") > 1 or kind == FILE
    if kind == REWARD and named_reward(name):
        file = name.partition(":")[2]
        problem = f"there is no file {file!r}" if file and not Path(file).is_file() else ""
    elif kind in (REWARD, ENVIRONMENT) and colon:
        if not name.startswith(("http://", "https://", SERVER)) and not module_exists(module):
            problem = f"it must be module:function, and there is no module {module!r}"
    elif kind == OUTPUT_FILE:
        problem = "" if path.parent.is_dir() else f"there is no directory {str(path.parent)!r}"
    elif (is_local or (kind == DATA and path.suffix in DATA_SUFFIXES)) and not path.exists():
        problem = "there is no such file or directory"
    if problem:
        raise ValueError(f"{setting}: {name!r} given; {problem}")


def module_exists(name: str) -> bool:
    """Whether Python finds a module of this name; packages around it are imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def parse_arguments(kind: type[Arguments], argv: list[str] | None = None) -> Arguments:
    """Arguments of a kind from the command line `[file.yaml] [--flag value ...]`.

    Raises ValueError for an unknown key of the file or an unknown flag, with the nearest known name.
    """
    return arguments_of(kind, *split_command_line(argv))


def split_command_line(argv: list[str] | None = None) -> tuple[dict[str, Any], list[str]]:
    """The settings of the YAML file that a command line may begin with, and the flags."""
    argv = list(sys.argv[1:] if argv is None else argv)
    # The `deepspeed` launcher passes the local rank as a flag; LOCAL_RANK in the environment has it too.
    argv = [text for text in argv if not text.startswith("--local_rank=")]
    settings = read_yaml(Path(argv.pop(0))) if argv and argv[0].endswith((".yaml", ".yml")) else {}
    return settings, argv


def arguments_of(kind: type[Arguments], settings: dict[str, Any], flags: list[str] | None = None) -> Arguments:
    """Arguments of a kind from settings by name, overridden by flags.

    Raises ValueError for an unknown name, with the nearest known one, and for a value of the wrong type.
    """
    dataclass_type: Any = kind
    names, hints = [item.name for item in fields(dataclass_type)], get_type_hints(kind)
    for key in settings:
        require_key(key, names)
    parser = parser_of(kind, {key: of_type(key, value, hints[key]) for key, value in settings.items()})
    known = [option[2:] for action in parser._actions for option in action.option_strings if option.startswith("--")]
    return dataclass_type(**vars(parser.parse_args([normalized(flag, known) for flag in flags or []])))


def of_type(name: str, value: Any, hint: Any) -> Any:
    """A setting as its field's type: a text becomes a list of texts, and a table JSON, as a flag would give it.

    Raises ValueError for a value of another type. Numbers and bools may be text.
    """
    several, expected = get_origin(hint) is list, inner_type(hint)
    if hint is str and isinstance(value, dict):
        return json.dumps(value)
    if hint == list[str] and value and isinstance(value, str):
        return [value]
    allowed = {float: (float, int, str), int: (int, str), bool: (bool, str)}.get(expected, (expected,))
    values = value if several and isinstance(value, list) else [value]
    if isinstance(value, list) != several or not all(isinstance(item, allowed) for item in values):
        raise ValueError(f"{name}: {value!r} given; it must be {'a list of ' * several}{expected.__name__}")
    return value


def normalized(flag: str, known: list[str]) -> str:
    """A flag with underscores in its name; other texts stay as they are.

    known: names of the parser's flags. Raises ValueError for an unknown flag, with the nearest known one.
    """
    if not flag.startswith("--"):
        return flag
    name, *value = flag[2:].split("=", 1)
    name = name.replace("-", "_")
    require_key(name, known)
    return "=".join([f"--{name}", *value])


class Parser(argparse.ArgumentParser):
    """Raises ValueError where argparse would print all flags and exit on every rank; only rank 0 prints the help."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)

    def print_help(self, file: Any = None) -> None:
        if os.environ.get("RANK", "0") == "0":
            super().print_help(file)


def parser_of(kind: type, settings: dict[str, Any]) -> Parser:
    """The parser of a kind's flags, grouped by subject.  settings: they replace the fields' defaults."""
    script = sys.modules["__main__"]
    name = script.__spec__.name if script.__spec__ else "SCRIPT"
    parser = Parser(
        usage=f"python -m {name.removesuffix('.__main__')} [FILE.yaml] [--flag value ...]",
        description=script.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    hints = get_type_hints(kind)
    for subject, subject_fields in by_subject(kind).items():
        title, _, description = subject.partition(". ")
        group = parser.add_argument_group(title, textwrap.fill(description, 100))
        for item in subject_fields:
            add_flag(group, item, hints[item.name], settings)
    return parser


def by_subject(kind: Any) -> dict[str, list[Field]]:
    """The fields by subject: first those of the class itself, then those of its bases. A class whose fields name no
    subject is one, by its docstring. A field that a class defines again stays with its base's subject.
    """
    subject_of: dict[str, tuple[Any, str]] = {}  # field → class and subject
    classes = [base for base in kind.__mro__ if is_dataclass(base)]
    for base in reversed(classes):
        subject = " ".join(str(base.__doc__).split()).removesuffix(".")
        for name in base.__annotations__:
            subject = base.__dataclass_fields__[name].metadata.get("subject") or subject
            subject_of.setdefault(name, (base, subject))
    groups: dict[str, list[Field]] = {}
    for base in classes:
        for name, (owner, subject) in subject_of.items():
            if owner is base and (item := kind.__dataclass_fields__[name]).init:
                groups.setdefault(subject, []).append(item)
    return groups


def add_flag(group: Any, item: Field, hint: Any, settings: dict[str, Any]) -> None:
    """Add a field's flag. A bool's flag needs no value; one that is true by default can be given as `--no_name`."""
    default = item.default if item.default_factory is MISSING else item.default_factory()
    value, several, inner = settings.get(item.name, default), get_origin(hint) is list, inner_type(hint)
    shown = " ".join(map(str, value)) if several else str(value).lower() if isinstance(value, bool) else str(value)
    options: dict[str, Any] = {"nargs": "?", "const": True} if inner is bool else {"nargs": "+"} if several else {}
    group.add_argument(
        f"--{item.name}",
        default=value,
        type=to_bool if inner is bool else inner,
        metavar={str: "TEXT", int: "INT", float: "FLOAT", bool: "BOOL"}[inner],
        help=f"{item.metadata['help']} (default: {shown or 'empty'})".replace("%", "%%"),
        **options,
    )
    if value is True:
        group.add_argument(f"--no_{item.name}", dest=item.name, action="store_false", help=argparse.SUPPRESS)


def to_bool(text: str) -> bool:
    """The bool that a text names. Raises an error of the parser for any other."""
    if text.lower() not in BOOLS:
        raise argparse.ArgumentTypeError(f"{text!r} given; it must be true or false")
    return BOOLS[text.lower()]


def inner_type(hint: Any) -> type:
    """The type of a field's values: of a list's items, of Literal's, or of what is not None."""
    part = next(part for part in get_args(hint) or (hint,) if part is not NoneType)
    return type(part) if get_origin(hint) is Literal else part


def require_key(key: str, allowed: list[str], where: str = "") -> None:
    """Raises ValueError for an unknown name, with the nearest known one.  where: prefix of the error message."""
    if key not in allowed:
        nearest = difflib.get_close_matches(key, allowed, n=1, cutoff=0)[0]
        raise ValueError(f"{where}{': ' * bool(where)}unknown key {key!r}; the nearest known key is {nearest!r}")


def read_yaml(path: Path) -> dict[str, Any]:
    """The settings in a file. Raises ValueError if the file does not exist, is not YAML or holds no mapping."""
    if not path.is_file():
        raise ValueError(f"no file at {str(path)!r}")
    try:
        settings = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: it contains a {type(settings).__name__}; it must be a mapping of settings")
    return settings
