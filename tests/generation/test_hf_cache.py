"""The KV cache of native containers equals Hugging Face's through growth, reordering and cropping, in reused
storage."""

import torch
from transformers.cache_utils import DynamicCache

from hybrid.generation.hf_cache import GrowingLayer, KVCache


def pair(step: int = 4) -> tuple[KVCache, DynamicCache, DynamicCache]:
    owner, cache = KVCache(step), DynamicCache()
    owner.adopt(cache)
    return owner, cache, DynamicCache()


def feed(caches, layers: int, tokens: int, rows: int = 3) -> None:
    for layer in range(layers):
        keys, values = torch.randn(2, rows, 2, tokens, 5).unbind(0)
        updated = [cache.update(keys, values, layer) for cache in caches]
        for actual, expected in zip(*updated, strict=True):
            assert torch.equal(actual, expected)


def test_updates_match_hugging_faces_cache():
    torch.manual_seed(0)
    owner, actual, expected = pair()
    for tokens in (3, 1, 1, 1, 6, 1):
        feed((actual, expected), 2, tokens)
    assert actual.get_seq_length() == expected.get_seq_length() == 13
    assert all(type(layer) is GrowingLayer for layer in actual.layers)
    assert owner.nbytes() >= sum(layer.keys.nbytes + layer.values.nbytes for layer in expected.layers)


def test_reordering_cropping_and_selecting_match_hugging_faces_cache():
    torch.manual_seed(0)
    _, actual, expected = pair()
    feed((actual, expected), 2, 6)
    for change in (
        lambda cache: cache.reorder_cache(torch.tensor([2, 0, 1])),
        lambda cache: cache.crop(-2),
        lambda cache: cache.batch_select_indices(torch.tensor([1, 2])),
        lambda cache: cache.batch_repeat_interleave(2),
    ):
        for cache in (actual, expected):
            change(cache)
        feed((actual, expected), 2, 2, rows=expected.layers[0].keys.shape[0])


def test_storage_is_reused_and_released():
    owner, actual, expected = pair(step=8)
    feed((actual, expected), 1, 5)
    address, reserved_bytes = owner.storage[0, "keys"].data_ptr(), owner.nbytes()
    next_cache = DynamicCache()
    owner.adopt(next_cache)
    feed((next_cache, DynamicCache()), 1, 7)
    assert owner.storage[0, "keys"].data_ptr() == address
    assert owner.nbytes() == reserved_bytes == owner.peak_bytes
    owner.release()
    assert owner.nbytes() == 0
