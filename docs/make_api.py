"""Writes docs/api.md from the docstrings of what `hybrid` exports:  python docs/make_api.py"""

import inspect
import json
import re
from pathlib import Path

import hybrid
from hybrid.compat.trl import rollout_func
from hybrid.config import BLOCKS, FORWARDED, Block, InferenceConfig
from hybrid.deepspeed_api import DeepSpeedMethods

PAGE, INFERENCE_PAGE = (Path(__file__).parent / name for name in ("api.md", "inference.md"))
TABLE_BEGINS, TABLE_ENDS = "<!-- written by docs/make_api.py -->\n", "<!-- to here -->\n"
HEAD = """# API

Written by `python docs/make_api.py` from the docstrings; a test holds that it is up to date. Shapes are
`[rows, tokens]` and the like.
"""


def main() -> None:
    """Write the page, and the table of another."""
    PAGE.write_text(page())
    before, _, rest = INFERENCE_PAGE.read_text().partition(TABLE_BEGINS)
    _, _, after = rest.partition(TABLE_ENDS)
    INFERENCE_PAGE.write_text(f"{before}{TABLE_BEGINS}{inference_table()}{TABLE_ENDS}{after}")


def page() -> str:
    """The whole page."""
    functions = [name for name in hybrid.__all__ if inspect.isfunction(getattr(hybrid, name))]
    classes = [name for name in hybrid.__all__ if inspect.isclass(getattr(hybrid, name))]
    parts = [HEAD, "## Functions\n", *(entry(f"hybrid.{name}", getattr(hybrid, name)) for name in functions)]
    parts += [entry("hybrid.compat.trl.rollout_func", rollout_func)]
    for name in classes:
        kind = getattr(hybrid, name)
        # A dataclass's and an engine's constructor are told of in the docstring.
        parts += [
            f"## `hybrid.{name}`\n",
            text_of(kind),
            *(entry(f"{name}.{member}", value) for member, value in members(kind)),
        ]
    parts.append("## Settings\n")
    for name, block in BLOCKS.items():
        parts += [f"### `{name}`\n", text_of(block)]
    return "\n".join(parts)


def inference_table() -> str:
    """Every key of `init_inference` with its default, its meaning and what differs from DeepSpeed, from the models."""
    rows = ["| key | default | meaning | other than in DeepSpeed |", "|---|---|---|---|", *rows_of(InferenceConfig)]
    old = "; ".join(f"`{name}` is `{block}.{key}`" for name, (block, key) in FORWARDED.items())
    return "\n".join([*rows, "", f"Old names, taken with a warning: {old}.", ""])


def rows_of(block: type[Block], path: str = "") -> list[str]:
    """A table's row for each key of a block, and of the blocks in it."""
    texts, rows = key_texts(block), []
    for name, field in block.model_fields.items():
        inner = field.annotation
        is_block = isinstance(inner, type) and issubclass(inner, Block)
        default = "" if is_block else f"`{json.dumps(field.default)}`"
        also = f", `{path}{field.alias}`" if field.alias else ""
        meaning, _, differs = texts[name].partition(" Here: ")
        rows.append(f"| `{path}{name}`{also} | {default} | {meaning.rstrip('.')} | {differs.rstrip('.')} |")
        rows += rows_of(inner, f"{path}{name}.") if is_block else []
    return rows


def key_texts(block: type[Block]) -> dict[str, str]:
    """What a block's docstring says of each key, on one line."""
    texts: dict[str, str] = {}
    for names, text in re.findall(r"^(\w+(?:, \w+)*): (.*(?:\n    .*)*)", inspect.cleandoc(block.__doc__), re.M):
        texts |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return texts


def members(kind: type) -> list[tuple[str, object]]:
    """What a class of ours brings, in its order: methods and properties that have a docstring of ours."""
    return [
        (name, member.fget if isinstance(member, property) else inspect.unwrap(getattr(member, "__func__", member)))
        for source in (kind, *({DeepSpeedMethods} & set(kind.__bases__)))
        for name, member in vars(source).items()
        if not name.startswith("_") and (callable(member) or isinstance(member, property | classmethod | staticmethod))
        if getattr(member, "__doc__", None)
    ]


def entry(name: str, member: object) -> str:
    """A heading with the signature, and the docstring."""
    signature = re.sub(r"^\((self|cls)(, )?", "(", str(inspect.signature(member)))
    return f"### `{name}`\n\n```text\n{name.rpartition('.')[2]}{plain(signature)}\n```\n\n{text_of(member)}"


def plain(signature: str) -> str:
    """A signature without the modules that its types come from."""
    signature = re.sub(r"<class '([\w.]+)'>", r"\1", signature)
    signature = re.sub(r"<function .*? at 0x\w+>", "...", signature)
    return re.sub(r"\b(?:[A-Za-z_]\w*\.)+(\w+)", r"\1", signature)


def text_of(documented: object) -> str:
    """A docstring as Markdown: what is indented, a setting or an argument, is a list."""
    lines: list[str] = []
    for line in inspect.cleandoc(documented.__doc__).splitlines():
        argument = re.match(r"^(\w+(?:, \w+)*): (.*)$", line)
        ends = line and not argument and not line.startswith(" ")
        in_list = bool(lines) and lines[-1].startswith(("- ", " "))
        if (ends and in_list) or (argument and lines and lines[-1] and not in_list):
            lines.append("")  # Markdown needs an empty line before a list, and after it
        lines.append(f"- `{argument[1]}`: {argument[2]}" if argument else line)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
