"""Parts of error messages and log lines."""

from collections.abc import Iterable


def shortened(names: Iterable[object], max_names: int = 20) -> str:
    """Return the first `max_names` names as text, with the number of further ones."""
    names = list(names)
    more = f" and {len(names) - max_names} more" if len(names) > max_names else ""
    return ", ".join(map(str, names[:max_names])) + more
