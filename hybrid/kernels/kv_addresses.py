"""KV blocks and recurrent states as Triton kernels read them: by addresses from a table on the device.

A CUDA graph that reads the table stays valid when they are allocated again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hybrid.kernels import require_contiguous

ALIGNMENT = 16  # bytes; kernels load and store as many at a time


@dataclass(frozen=True)
class LayerKV:
    """The keys and values of a layer, each [blocks, block_size, kv_heads, head_dim], contiguous.

    addresses: int64 [2], on the device: of the keys and of the values, as `kv_addresses` returns them.
    """

    addresses: torch.Tensor
    dtype: torch.dtype
    block_size: int
    kv_heads: int
    head_dim: int


def kv_addresses(keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the addresses of each layer's keys and values, int64 [layers, 2], on the host.

    keys, values [blocks, block_size, kv_heads, head_dim] of each layer: contiguous, of one dtype, on one device. The
    caller keeps them alive for as long as kernels read the addresses.
    """
    tensors = [tensor for pair in zip(keys, values, strict=True) for tensor in pair]
    require_contiguous(tensors[0].device, tensors[0].dtype, *tensors)
    addresses = [tensor.data_ptr() for tensor in tensors]
    assert all(address % ALIGNMENT == 0 for address in addresses), f"blocks must be aligned to {ALIGNMENT} bytes"
    return torch.tensor(addresses, dtype=torch.int64).view(-1, 2)


def state_addresses(states: Mapping[int, Sequence[torch.Tensor]], layers: int) -> torch.Tensor:
    """Return the addresses of each layer's recurrent states, int64 [layers, 2], on the host: of its heads' matrices,
    and of its convolution's latest inputs; 0 where there are none.

    states: as `PagedKV.states`, contiguous. The caller keeps them alive for as long as kernels read the addresses.
    """
    addresses = torch.zeros(layers, 2, dtype=torch.int64)
    for layer, tensors in states.items():
        require_contiguous(tensors[0].device, torch.float32, *tensors)
        found = [tensor.data_ptr() for tensor in tensors]
        assert all(address % ALIGNMENT == 0 for address in found), f"states must be aligned to {ALIGNMENT} bytes"
        addresses[layer, 2 - len(found) :] = torch.tensor(found)
    return addresses
