"""Stands in for the package `flashinfer` (flashinfer-python 0.7.2.post1): checks what it is given.

It computes attention by a formula in float64 from the paged cache, for the lengths of the last plan.
"""

import importlib.machinery
import math
import sys
import types
from dataclasses import dataclass, field

import pytest
import torch

HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass
class Calls:
    """planned, ran: the kind of each plan and run, "prefill" or "decode".  wrappers: all that were made."""

    planned: list[str] = field(default_factory=list)
    ran: list[str] = field(default_factory=list)
    wrappers: list["Wrapper"] = field(default_factory=list)


def require_table(tensor: torch.Tensor, length: int, device: torch.device) -> None:
    assert tensor.dtype == torch.int32, f"FlashInfer reads int32, not {tensor.dtype}"
    assert tensor.shape == (length,) and tensor.is_contiguous() and tensor.device == device


class Wrapper:
    """What both wrappers share. Without buffers for a graph, a wrapper keeps the caller's tensors."""

    kind = ""
    calls: Calls

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str):
        assert float_workspace_buffer.dtype == torch.uint8 and float_workspace_buffer.dim() == 1
        assert float_workspace_buffer.is_contiguous() and not float_workspace_buffer.any(), "zeros on first use"
        assert kv_layout == "NHD"
        self.device, self.kept = float_workspace_buffer.device, None
        self.calls.wrappers.append(self)

    def _plan(self, qo_indptr, indptr, indices, last_page_len, heads, kv_heads, head_dim, page_size, options) -> None:
        count = len(last_page_len)
        require_table(qo_indptr, count + 1, self.device)
        require_table(indptr, count + 1, self.device)
        require_table(last_page_len, count, self.device)
        require_table(indices, int(indptr[-1]), self.device)
        assert indptr[0] == qo_indptr[0] == 0 and (indptr.diff() >= 1).all() and (qo_indptr.diff() >= 0).all()
        assert ((last_page_len >= 1) & (last_page_len <= page_size)).all(), "1 <= last_page_len <= page_size"
        assert heads % kv_heads == 0
        self.kept = qo_indptr, indptr, indices, last_page_len
        self.planned = [tensor.clone() for tensor in self.kept]
        self.sizes, self.options = (heads, kv_heads, head_dim, page_size), options
        self.calls.planned.append(self.kind)

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        assert self.kept is not None, "run before plan"
        for kept, planned in zip(self.kept, self.planned, strict=True):
            assert torch.equal(kept, planned), "the tables of the plan have changed"
        qo_indptr, indptr, indices, last_page_len = self.planned
        heads, kv_heads, head_dim, page_size = self.sizes
        keys, values = paged_kv_cache
        assert q.shape == (int(qo_indptr[-1]), heads, head_dim) and q.is_contiguous()
        assert q.dtype == self.options["q_data_type"] and q.device == self.device
        for cache in (keys, values):
            assert cache.shape[1:] == (page_size, kv_heads, head_dim) and cache.is_contiguous()
            assert cache.dtype == self.options["kv_data_type"] and cache.device == self.device
        self.calls.ran.append(self.kind)
        out = torch.empty(q.shape, dtype=torch.float64)
        for row, (first, last) in enumerate(zip(qo_indptr[:-1].tolist(), qo_indptr[1:].tolist(), strict=True)):
            pages = indices[int(indptr[row]) : int(indptr[row + 1])].long()
            length = (len(pages) - 1) * page_size + int(last_page_len[row])
            k, v = (cache[pages].flatten(0, 1)[:length].double() for cache in (keys, values))
            k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
            out[first:last] = self._attend(q[first:last].double(), k, v)
        return out.to(q.dtype)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [queries, heads, dims], the last of the sequence; k, v [tokens, heads, dims]."""
        options = self.options
        scale = 1 / math.sqrt(q.shape[-1]) if options["sm_scale"] is None else options["sm_scale"]
        scores = torch.einsum("qhd,thd->hqt", q, k) * scale
        if cap := options["logits_soft_cap"]:
            scores = cap * torch.tanh(scores / cap)
        positions = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        visible = positions >= 0 if options["causal"] else torch.ones_like(positions, dtype=torch.bool)
        if options["window_left"] >= 0:
            visible &= positions <= options["window_left"]
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        return torch.einsum("hqt,thd->qhd", weights, v)


def install(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Make this the package `flashinfer`. Gives what will be called."""
    made = Calls()

    class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
        kind, calls = "decode", made

        def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False):
            assert not use_cuda_graph
            super().__init__(float_workspace_buffer, kv_layout)
            self.use_tensor_cores = use_tensor_cores

        def plan(
            self,
            indptr,
            indices,
            last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            *,
            window_left=-1,
            logits_soft_cap=None,
            q_data_type="float16",
            kv_data_type=None,
            sm_scale=None,
        ):
            assert self.use_tensor_cores or num_qo_heads // num_kv_heads in (1, 2, 3, 4, 6, 8, 16)
            options = {
                "window_left": window_left,
                "logits_soft_cap": logits_soft_cap,
                "q_data_type": HALVES.get(q_data_type, q_data_type),
                "kv_data_type": kv_data_type or q_data_type,
                "sm_scale": sm_scale,
                "causal": True,  # the only query is the last token
            }
            rows = torch.arange(len(last_page_len) + 1, dtype=torch.int32, device=self.device)
            sizes = num_qo_heads, num_kv_heads, head_dim, page_size
            self._plan(rows, indptr, indices, last_page_len, *sizes, options)

    class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
        kind, calls = "prefill", made

        def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False):
            assert not use_cuda_graph
            super().__init__(float_workspace_buffer, kv_layout)

        def plan(
            self,
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            page_size,
            head_dim_vo=None,
            custom_mask=None,
            packed_custom_mask=None,
            causal=False,
            pos_encoding_mode="NONE",
            use_fp16_qk_reduction=False,
            sm_scale=None,
            window_left=-1,
            logits_soft_cap=None,
            rope_scale=None,
            rope_theta=None,
            q_data_type="float16",
            kv_data_type=None,
        ):
            assert head_dim_vo is custom_mask is packed_custom_mask is rope_scale is rope_theta is None
            assert pos_encoding_mode == "NONE" and not use_fp16_qk_reduction
            options = {
                "window_left": window_left,
                "logits_soft_cap": logits_soft_cap,
                "q_data_type": HALVES.get(q_data_type, q_data_type),
                "kv_data_type": kv_data_type or q_data_type,
                "sm_scale": sm_scale,
                "causal": causal,
            }
            tables = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
            self._plan(*tables, num_qo_heads, num_kv_heads, head_dim_qk, page_size, options)

    module = types.ModuleType("flashinfer")
    module.__spec__ = importlib.machinery.ModuleSpec("flashinfer", None)
    module.BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper
    module.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return made
