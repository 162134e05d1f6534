"""The KV cache of the native path: storage that outlives a call, grows in steps, and is written in place; and rows of
Hugging Face's caches selected, copied and joined."""

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F
from transformers import DynamicCache
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

CACHES = "past_key_values", "cache_params"  # keyword arguments with a Hugging Face cache (transformers 5.23)


class KVCache:
    """The engine's storage for a Hugging Face cache: one pair of buffers per layer, used again by the next call.

    step: growth increment of a layer's capacity, in tokens.
    """

    def __init__(self, step: int):
        self.step = step
        self.storage: dict[tuple[int, str], torch.Tensor] = {}  # (layer, "keys" or "values"): flat buffer
        self.peak_bytes = 0

    def adopt(self, cache: Cache) -> None:
        """Make the growing layers of an empty Hugging Face cache use this storage. Other layers, such as sliding
        windows and linear attention, keep theirs."""
        if cache.layer_class_to_replicate is DynamicLayer:  # the cache makes its layers in order, on first use
            indices = itertools.count()
            make_layer: Any = lambda: GrowingLayer(self, next(indices))  # noqa: E731
            cache.layer_class_to_replicate = make_layer
        for index, layer in enumerate(cache.layers):
            if type(layer) is DynamicLayer and not layer.is_initialized:
                cache.layers[index] = GrowingLayer(self, index)

    def take_over(self, cache: Cache) -> None:
        """Copy the growing layers of a filled Hugging Face cache into this storage, which no other cache may use."""
        for index, layer in enumerate(cache.layers):
            if type(layer) is DynamicLayer and layer.is_initialized:
                growing: Any = GrowingLayer(self, index)
                growing.fill(layer.keys, layer.values)
                cache.layers[index] = growing

    def buffer(self, key: tuple[int, str], shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Return a buffer of `shape` with the dtype and device of `like`. Its content is undefined."""
        numel = torch.Size(shape).numel()
        flat = self.storage.get(key)
        if flat is None or flat.numel() < numel or flat.dtype != like.dtype or flat.device != like.device:
            flat = like.new_empty(numel)
            self.storage[key] = flat
            self.peak_bytes = max(self.peak_bytes, self.nbytes())
        return flat[:numel].view(shape)

    def nbytes(self) -> int:
        """Return the bytes of the storage."""
        return sum(flat.nbytes for flat in self.storage.values())

    def release(self) -> None:
        """Drop the storage. A cache that still uses it keeps it alive."""
        self.storage.clear()


class GrowingLayer(DynamicLayer):
    """One layer's keys and values [rows, kv_heads, tokens, head_dim], appended in place.

    `keys` and `values` are views of the filled part of larger buffers, so every operation of Hugging Face's
    DynamicLayer works. After a reordering or a crop, the next update copies them into buffers again.
    """

    def __init__(self, owner: KVCache, index: int):
        super().__init__()
        self.owner = owner
        self.index = index
        self.buffers: dict[str, torch.Tensor] = {}  # [rows, kv_heads, capacity, head_dim]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._append("keys", key_states)
        self.values = self._append("values", value_states)
        return self.keys, self.values

    def _append(self, name: str, new: torch.Tensor) -> torch.Tensor:
        rows, heads, added, size = new.shape
        filled: Any = getattr(self, name)
        length = filled.shape[-2] if filled.numel() else 0
        end = length + added
        buffer: Any = self.buffers.get(name)
        in_place = (
            buffer is not None
            and buffer.shape[0] == rows
            and buffer.shape[2] >= end
            and (length == 0 or filled.data_ptr() == buffer.data_ptr())
        )
        if not in_place:
            old = filled.clone() if length else None  # the buffer may be the one that `filled` is a view of
            buffer = self._new_buffer(name, (rows, heads, end, size), new)
            if old is not None:
                buffer[:, :, :length] = old
        buffer[:, :, length:end] = new
        return buffer[:, :, :end]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Select rows `indices`, int64 [n], repeats allowed, into a buffer with room to grow."""
        select_in_layer(self, indices, drop=0)

    def fill(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Replace the content, by keys and values [rows, kv_heads, tokens, head_dim] that are not in the storage."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        for name, new in (("keys", keys), ("values", values)):
            setattr(self, name, self._new_buffer(name, tuple(new.shape), new)[:, :, : new.shape[2]].copy_(new))

    def _new_buffer(self, name: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Return a buffer for [rows, heads, tokens, head_dim] with room to grow. Its content is undefined."""
        rows, heads, tokens, size = shape
        capacity = -(-tokens // self.owner.step) * self.owner.step
        self.buffers[name] = self.owner.buffer((self.index, name), (rows, heads, capacity, size), like)
        return self.buffers[name]


# Rows of filled caches. Rows of a cache are padded on the left, and masked there, to the longest one.

ATTENTION_LAYERS: tuple[type, ...] = (DynamicLayer, GrowingLayer, DynamicSlidingWindowLayer)
RECURRENT_LAYERS: tuple[type, ...] = (
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
STATES = "conv_states", "recurrent_states"  # of a recurrent layer: dictionaries of tensors [rows, ...]


def layers_of(cache: Cache) -> list[Any]:
    """Return a cache's layers, of whatever kind."""
    return cache.layers


def has_rows(cache: Any) -> bool:
    """Whether a cache consists of layers whose rows are independent: attention of any window, convolution and recurrent
    states (transformers 5.23)."""
    kinds = (*ATTENTION_LAYERS, *RECURRENT_LAYERS, DummyLayer)
    return type(cache) is DynamicCache and all(type(layer) in kinds for layer in cache.layers)


def is_empty(cache: Cache) -> bool:
    """Whether a cache with `has_rows` has no tokens yet."""
    states = (any(layer.has_previous_state.values()) for layer in layers_of(cache) if type(layer) in RECURRENT_LAYERS)
    return not any(states) and not any(map(has_keys, layers_of(cache)))


def is_filled(cache: Cache, tokens: int) -> bool:
    """Whether a cache with `has_rows` holds so many tokens. Models that keep their state elsewhere leave it empty; a
    layer that reads another layer's keys leaves its own empty."""
    filled = []
    for layer in layers_of(cache):
        if type(layer) in RECURRENT_LAYERS:
            filled.append(any(layer.has_previous_state.values()))
        if has_keys(layer):
            filled.append(layer.get_seq_length() == tokens)
    return bool(filled) and all(filled)


def is_recurrent(cache: Cache) -> bool:
    """Whether a cache has convolution or recurrent states, which several tokens at once may not continue."""
    return any(type(layer) in RECURRENT_LAYERS for layer in layers_of(cache))


def select_rows(cache: Cache, rows: torch.Tensor, drop: int = 0) -> None:
    """Replace a cache's rows by those with the indices `rows`, int64 [n], repeats allowed.

    drop: tokens that are left out at the beginning of every row, where they are padding.
    """
    for layer in layers_of(cache):
        select_in_layer(layer, rows, drop)


def copied_rows(cache: Cache, rows: torch.Tensor, drop: int = 0) -> Cache:
    """Return a cache of the rows `rows`, int64 [n], in memory of its own.  drop: as in `select_rows`."""
    copied = copy.copy(cache)
    copied.layers = [copied_layer(layer) for layer in layers_of(cache)]
    select_rows(copied, rows, drop)
    return copied


def copied_layer(layer: Any) -> Any:
    """Return a layer with the same tensors, which does not change with the other one."""
    copied: Any = copy.copy(layer)
    if type(layer) is GrowingLayer:
        copied = DynamicLayer()
        if layer.is_initialized:
            copied.lazy_initialization(layer.keys, layer.values)
            copied.keys, copied.values = layer.keys, layer.values
    for name in STATES if type(layer) in RECURRENT_LAYERS else ():
        setattr(copied, name, dict(getattr(layer, name)))
    return copied


def select_in_layer(layer: Any, rows: torch.Tensor, drop: int) -> None:
    """Select rows of a layer, int64 [n], into new tensors, without the first `drop` tokens."""
    if has_keys(layer):
        before: Any = (layer.keys, layer.values)
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length -= drop
            drop = max(before[0].shape[2] - layer.cumulative_length, 0)
        replace_keys(layer, *(tensor[:, :, drop:].index_select(0, rows) for tensor in before))
    for name in STATES if type(layer) in RECURRENT_LAYERS else ():
        states = getattr(layer, name)
        states.update({key: state.index_select(0, rows) for key, state in states.items() if state is not None})


def replace_keys(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Replace the keys and values of a layer, by tensors that are not in its storage."""
    if type(layer) is GrowingLayer:
        layer.fill(keys, values)
    else:
        layer.keys, layer.values = keys, values


def has_keys(layer: Any) -> bool:
    """Whether a layer has keys and values."""
    keys = getattr(layer, "keys", None)
    return keys is not None and keys.numel() > 0


def join_rows(cache: Cache, others: Sequence[Cache], tokens: int) -> None:
    """Append the rows of other caches of the same model to a cache.  tokens: of the longest one."""
    for index, layer in enumerate(layers_of(cache)):
        layers = [layer, *(layers_of(other)[index] for other in others)]
        if has_keys(layer):
            width = tokens
            if isinstance(layer, DynamicSlidingWindowLayer):
                width = min(tokens, layer.sliding_window - 1)
                layer.cumulative_length = tokens
            keys, values = (
                torch.cat([padded_tokens(getattr(each, name), width) for each in layers]) for name in ("keys", "values")
            )
            replace_keys(layer, keys, values)
        for name in STATES if type(layer) in RECURRENT_LAYERS else ():
            states = getattr(layer, name)
            for key, state in states.items():
                if state is not None:
                    states[key] = torch.cat([getattr(each, name)[key] for each in layers])


def padded_tokens(filled: torch.Tensor, width: int) -> torch.Tensor:
    """Return keys or values [rows, kv_heads, tokens, head_dim] with zeros before them, `width` tokens."""
    return F.pad(filled, (0, 0, width - filled.shape[2], 0))
