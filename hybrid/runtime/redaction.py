"""Hides secrets in settings and environment variables before they are printed or written."""

import re
from typing import Any

HIDDEN = "***"
SECRET_NAME = re.compile(r"token(?!iz)|key(?!word)|secret|passw|passphrase|credential|auth(?!or(?!i))", re.IGNORECASE)
TOKEN = re.compile(r"token", re.IGNORECASE)
USER_INFO = re.compile(r"(?<=://)[^/\s]*@")  # user:password@ in a URL
QUERY_ARGUMENT = re.compile(r"([?&]([^=&\s]+)=)([^&#\s]+)")


def redacted(value: Any, name: str = "") -> Any:
    """Return `value` with "***" in the place of secrets.

    A secret is a value whose name, or that of a dict or list around it, contains token, key, secret, password, passwd,
    credential or auth; and the user and password of a URL. Numbers of tokens, token ids and booleans are kept.

    Args:
        value: settings or environment variables, dicts and lists in dicts and lists included. It is not changed.
        name: of the value.

    Returns:
        A copy of `value`; a text if `value` is one.
    """
    if isinstance(value, dict):
        return {key: redacted(inner, f"{name}.{key}") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(redacted(inner, name) for inner in value)
    if value is None or isinstance(value, bool) or value == "":
        return value
    if SECRET_NAME.search(name) and not (isinstance(value, int | float) and TOKEN.search(name)):
        return HIDDEN
    if not isinstance(value, str):
        return value
    return QUERY_ARGUMENT.sub(hidden_if_secret, USER_INFO.sub(f"{HIDDEN}@", value))


def hidden_if_secret(argument: re.Match) -> str:
    """Return a URL's query argument, its value hidden if its name is that of a secret."""
    return f"{argument[1]}{redacted(argument[3], argument[2])}"
