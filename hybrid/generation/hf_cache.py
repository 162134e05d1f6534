"""The KV cache of the native path: storage that outlives a call, grows in steps, and is written in place."""

import itertools
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer


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

    def buffer(self, key: tuple[int, str], shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """A buffer of `shape` with the dtype and device of `like`. Its content is undefined."""
        numel = torch.Size(shape).numel()
        flat = self.storage.get(key)
        if flat is None or flat.numel() < numel or flat.dtype != like.dtype or flat.device != like.device:
            flat = like.new_empty(numel)
            self.storage[key] = flat
            self.peak_bytes = max(self.peak_bytes, self.nbytes())
        return flat[:numel].view(shape)

    def nbytes(self) -> int:
        """Bytes of the storage."""
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
        self.keys = self._append("keys", self.keys, key_states)
        self.values = self._append("values", self.values, value_states)
        return self.keys, self.values

    def _append(self, name: str, filled: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        rows, heads, added, size = new.shape
        length = filled.shape[-2] if filled.numel() else 0
        end = length + added
        buffer = self.buffers.get(name)
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
        for name in ("keys", "values"):
            filled = getattr(self, name)
            if filled is not None and filled.numel():
                rows = filled[indices]
                setattr(self, name, self._new_buffer(name, rows.shape, rows)[:, :, : rows.shape[2]].copy_(rows))

    def _new_buffer(self, name: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """A buffer for [rows, heads, tokens, head_dim] with room to grow. Its content is undefined."""
        rows, heads, tokens, size = shape
        capacity = -(-tokens // self.owner.step) * self.owner.step
        self.buffers[name] = self.owner.buffer((self.index, name), (rows, heads, capacity, size), like)
        return self.buffers[name]
