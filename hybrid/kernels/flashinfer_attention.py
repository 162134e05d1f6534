"""FlashInfer's paged attention, after the API of flashinfer-python 0.7.2.

Decode steps in CUDA graphs do not use it. Its wrappers plan on the host, for the lengths of one step, and between two
looks of the host a graph runs several steps, in which lengths grow on the device. The API promises nothing for a plan
that does not match the lengths, and the decode kernel (`BatchDecodeWithPagedKVCacheDevice`) needs a match: each of its
programs has a chunk of the planned context, and for one that begins behind the sequence's end the unsigned
`chunk_end - chunk_start` wraps around. Nor can the host plan each step without waiting: `plan` fills one pinned buffer
and copies it asynchronously. The functions without a plan (`trtllm_batch_decode_with_kv_cache`, `xqa`) read lengths
and block tables on the device, but run on compute capability 9, 10 and 12 only, by other kernels on each, and without
soft caps.
"""

import importlib.util
from typing import Any

import torch
from torch.nn import functional as F

from hybrid.kernels.attention_backend import AttentionSettings, LayerBlocks, SequenceTables

WORKSPACE_BYTES = 128 * 2**20  # FlashInfer's recommended size; shared by wrappers that run one after the other
PLAN_BYTES = 8 * 2**20  # on the device, of each wrapper
DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
MIN_CAPABILITY = (8, 0)
TENSOR_CORE_GROUP = 4  # query heads of a KV head; FlashInfer's other decode kernel has not all larger groups


def flashinfer_reason(settings: AttentionSettings, device: torch.device) -> str:
    """Return why FlashInfer cannot compute this attention on this device; "" if it can."""
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed (pip install flashinfer-python)"
    if device.type != "cuda":
        return f"FlashInfer needs a CUDA device, and the model is on {device.type}"
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return "FlashInfer needs a device of compute capability 8.0 or higher"
    if settings.alibi:
        return "ALiBi's bias, rounded as in Hugging Face, is not in FlashInfer"
    if settings.latent_dim:
        return "latent attention is not in FlashInfer's wrappers for paged keys and values"
    if settings.sinks:
        return "attention sinks are not in FlashInfer's wrappers for paged caches"
    if min(settings.windows) < 0:
        return "chunks of attention are not in FlashInfer"
    if settings.rounded:
        return "scores are rounded as in Hugging Face's eager attention, and FlashInfer does not round them"
    if settings.dtype not in DTYPES:
        return f"FlashInfer has float16 and bfloat16, not {str(settings.dtype).removeprefix('torch.')}"
    if settings.head_dim not in HEAD_DIMS:
        return f"FlashInfer has heads of {', '.join(map(str, HEAD_DIMS))} elements, not {settings.head_dim}"
    return ""


class FlashInferAttention:
    """An AttentionBackend on FlashInfer's wrappers for paged KV caches. `plan` waits for the device.

    A row's bits depend on the batch: FlashInfer divides contexts by the lengths of all sequences.
    """

    def __init__(self, settings: AttentionSettings, device: torch.device):
        import flashinfer  # optional

        self.settings = settings
        # FlashInfer requires zeros on first use. The content is of one launch; all launches are on one stream.
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        tensor_cores = settings.num_heads // settings.num_kv_heads >= TENSOR_CORE_GROUP
        # A window is part of a plan: layers with different windows have wrappers of their own.
        self.prefills = {
            window: flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD") for window in settings.windows
        }
        self.decodes = {
            window: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
            for window in settings.windows
        }

    @staticmethod
    def workspace_bytes(settings: AttentionSettings) -> int:
        """Return the bytes on the device that the wrappers keep."""
        return WORKSPACE_BYTES + 2 * len(settings.windows) * PLAN_BYTES

    def plan(self, batch: SequenceTables, decoding: bool) -> None:
        """As AttentionBackend's.

        Tables are given on the device: `plan` then waits for it, so that the copy of the plan before, from the same
        pinned buffer, has ended.
        """
        size, lengths, tables = self.settings.block_size, batch.lengths, batch.block_tables
        pages = (lengths + (size - 1)) // size
        indptr = F.pad(pages.cumsum(0, dtype=torch.int32), (1, 0))
        last_page_len = (lengths - 1) % size + 1
        used = torch.arange(tables.shape[1], dtype=torch.int32, device=tables.device) < pages[:, None]
        pages_of_batch = indptr, tables[used], last_page_len
        for window in self.settings.windows:
            if decoding:
                self.decodes[window].plan(*pages_of_batch, *self._sizes, **self._options(window))
            else:
                options = {"causal": True, **self._options(window)}
                self.prefills[window].plan(batch.cu_seqlens, *pages_of_batch, *self._sizes, **options)

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        settings = self.settings
        return settings.num_heads, settings.num_kv_heads, settings.head_dim, settings.block_size

    def _options(self, window: int) -> dict[str, Any]:
        """Return the options of both kinds of plans. FlashInfer's `window_left` does not count the query itself."""
        settings = self.settings
        return {
            "window_left": window - 1 if window else -1,
            "logits_soft_cap": settings.softcap,
            "sm_scale": settings.scale,
            "q_data_type": settings.dtype,
            "kv_data_type": settings.dtype,
        }

    def attend(
        self,
        decoding: bool,
        q: torch.Tensor,
        kv: LayerBlocks,
        batch: SequenceTables,
        window: int,
        bias: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
        q_rope: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert bias is None and sinks is None and q_rope is None, "FlashInfer has no bias, sinks and latents"
        wrappers = self.decodes if decoding else self.prefills
        return wrappers[window].run(q.contiguous(), (kv.keys, kv.values))
