"""Parts of error messages and log lines."""

from collections.abc import Iterable


def shortened(names: Iterable[object], most: int = 20) -> str:
    """The first `most` names as text, with the number of further ones."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more
