"""Secrets in settings are hidden; what only sounds like one is kept."""

import pytest

from hybrid import redacted


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "wandb_api_key", "APIKEY", "client_secret", "PGPASSWORD", "passwd", "credentials", "Authorization"],
)
def test_values_with_a_secrets_name_are_hidden(name):
    assert redacted({"a": [{name: "abc"}]}) == {"a": [{name: "***"}]}
    assert redacted({name: {"user": "abc", "list": ["abc", None]}}) == {name: {"user": "***", "list": ["***", None]}}


def test_other_values_are_kept():
    settings = {
        "max_new_tokens": 8,
        "stop_token_ids": [1, 2],
        "add_eot_token": True,
        "tokenizer_name_or_path": "gpt2",
        "TOKENIZERS_PARALLELISM": "false",
        "author": "me",
        "token": "",
        "key": None,
        "reward": "http://127.0.0.1:80/x?a=b",
        "edges": (1.0, 2.0),
    }
    assert redacted(settings) == settings


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://user:pass@host:80/path", "http://***@host:80/path"),
        ("http://user:p@ss@host", "http://***@host"),
        ("https://hf_abc@host/a@b", "https://***@host/a@b"),
        ("https://host/a?n=1&api_key=abc&m=2", "https://host/a?n=1&api_key=***&m=2"),
        ("no proxy for a@b.c", "no proxy for a@b.c"),
    ],
)
def test_secrets_in_urls_are_hidden(url, shown):
    assert redacted(url) == shown
    assert redacted({"http_proxy": url}) == {"http_proxy": shown}
