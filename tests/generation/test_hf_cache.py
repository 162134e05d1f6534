"""The KV cache holds what Hugging Face's does, through growth, reordering and cropping, in storage that is kept."""

import torch
from transformers.cache_utils import DynamicCache

from hybrid.generation.hf_cache import GrowingLayer, KVCache


def pair(step: int = 4) -> tuple[KVCache, DynamicCache, DynamicCache]:
    owner, ours = KVCache(step), DynamicCache()
    owner.adopt(ours)
    return owner, ours, DynamicCache()


def feed(caches, layers: int, tokens: int, rows: int = 3) -> None:
    for layer in range(layers):
        keys, values = torch.randn(2, rows, 2, tokens, 5).unbind(0)
        seen = [cache.update(keys, values, layer) for cache in caches]
        for ours, theirs in zip(*seen, strict=True):
            assert torch.equal(ours, theirs)


def test_appending_equals_hugging_face():
    torch.manual_seed(0)
    owner, ours, theirs = pair()
    for tokens in (3, 1, 1, 1, 6, 1):
        feed((ours, theirs), 2, tokens)
    assert ours.get_seq_length() == theirs.get_seq_length() == 13
    assert all(type(layer) is GrowingLayer for layer in ours.layers)
    assert owner.nbytes() >= sum(layer.keys.nbytes + layer.values.nbytes for layer in theirs.layers)


def test_what_hugging_face_does_to_a_cache_works():
    torch.manual_seed(0)
    _, ours, theirs = pair()
    feed((ours, theirs), 2, 6)
    for change in (
        lambda cache: cache.reorder_cache(torch.tensor([2, 0, 1])),
        lambda cache: cache.crop(-2),
        lambda cache: cache.batch_select_indices(torch.tensor([1, 2])),
        lambda cache: cache.batch_repeat_interleave(2),
    ):
        for cache in (ours, theirs):
            change(cache)
        feed((ours, theirs), 2, 2, rows=theirs.layers[0].keys.shape[0])


def test_storage_is_used_again_and_released():
    owner, ours, theirs = pair(step=8)
    feed((ours, theirs), 1, 5)
    address, held = owner.storage[0, "keys"].data_ptr(), owner.nbytes()
    again = DynamicCache()
    owner.adopt(again)
    feed((again, DynamicCache()), 1, 7)
    assert owner.storage[0, "keys"].data_ptr() == address
    assert owner.nbytes() == held == owner.peak_bytes
    owner.release()
    assert owner.nbytes() == 0
