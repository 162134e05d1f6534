"""The KV cache: storage that outlives a call, grows in steps, and is written in place."""

import torch
from transformers.cache_utils import Cache, DynamicLayer


class KVCache:
    """The engine's storage for keys and values, one pair of buffers a layer, used again by the next call.

    step: tokens by which a layer's capacity grows.
    """

    def __init__(self, step: int):
        self.step = step
        self.storage: dict[tuple[int, str], torch.Tensor] = {}  # (layer, "keys" or "values"): flat buffer
        self.peak_bytes = 0

    def adopt(self, cache: Cache) -> None:
        """Give the growing layers of an empty Hugging Face cache our storage. Sliding windows, linear attention and
        whatever else a model brings keep their own."""
        if cache.layer_class_to_replicate is DynamicLayer:
            cache.layer_class_to_replicate = LayerFactory(self)
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
        """Bytes held."""
        return sum(flat.nbytes for flat in self.storage.values())

    def release(self) -> None:
        """Let go of the storage: freed, or left to whoever still holds a cache that uses it."""
        self.storage.clear()


class LayerFactory:
    """Makes the layers of a Hugging Face cache that creates them on first use, in order."""

    def __init__(self, owner: KVCache):
        self.owner = owner
        self.made = 0

    def __call__(self) -> "GrowingLayer":
        self.made += 1
        return GrowingLayer(self.owner, self.made - 1)


class GrowingLayer(DynamicLayer):
    """One layer's keys and values [rows, kv heads, tokens, head size], appended in place.

    `keys` and `values` are views of the filled part of larger buffers, so everything that Hugging Face does to a
    DynamicLayer works here; after a reordering or a crop, the next update moves them into buffers again.
    """

    def __init__(self, owner: KVCache, index: int):
        super().__init__()
        self.owner = owner
        self.index = index
        self.buffers: dict[str, torch.Tensor] = {}  # [rows, kv heads, capacity, head size]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
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
        """Rows of what there is, in this order, each as often as it is named: at once in a buffer with room to grow."""
        for name in ("keys", "values"):
            filled = getattr(self, name)
            if filled is not None and filled.numel():
                rows = filled[indices]
                setattr(self, name, self._new_buffer(name, rows.shape, rows)[:, :, : rows.shape[2]].copy_(rows))

    def _new_buffer(self, name: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """A buffer for [rows, heads, tokens, head size] with room to grow. Its content is undefined."""
        rows, heads, tokens, size = shape
        capacity = -(-tokens // self.owner.step) * self.owner.step
        self.buffers[name] = self.owner.buffer((self.index, name), (rows, heads, capacity, size), like)
        return self.buffers[name]
