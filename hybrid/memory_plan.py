"""Plans memory: bytes on a rank of each way to hold weights for a rollout, and the choice where settings are "auto"."""

import os
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import log_dist
from torch import nn

from hybrid.build import Builder, Mode
from hybrid.config import RolloutConfig
from hybrid.decoders.cpu_decoder import CpuDecoder
from hybrid.decoders.fused_model import FusedModel
from hybrid.decoders.self_check import checked_lengths
from hybrid.decoders.torch_decoder import WholeDecoder
from hybrid.generation.block_pool import blocks_for
from hybrid.generation.model_runner import PREFILL_TOKENS
from hybrid.generation.scoring import LOGIT_ROWS
from hybrid.parallel import min_over_ranks, world_size
from hybrid.weights.gather import is_partitioned


@dataclass(frozen=True)
class Need:
    """Peak memory of a rollout in one mode, by kind, in bytes on one rank.

    parameters: held by training in every mode.
    gather: temporaries of gathering and merging, in addition to the snapshot.
    snapshot: inference's copies of weights.
    containers: further copies that decoders make (transposed, joined, float32).
    kv: KV cache of all sequences that are decoded at once.
    logits: float32, of one decode step or of the tokens scored at once.
    activations: of the largest forward, without its logits.
    graphs: of the decode loop on a GPU: its tensors at fixed addresses, and the memory pool of the CUDA graphs.
    """

    parameters: int
    gather: int
    snapshot: int
    containers: int
    kv: int
    logits: int
    activations: int
    graphs: int = 0

    @property
    def total(self) -> int:
        """Peak bytes that inference adds to training's own memory."""
        return sum(getattr(self, field.name) for field in fields(self) if field.name != "parameters")


@dataclass(frozen=True)
class MemoryPlan:
    """Memory that each mode of this engine needs, the fastest mode first. `str()` gives a table in MiB.

    in_use: the mode that the engine runs in.  limit: bytes that inference may add; None: no limit.
    """

    needs: dict[Mode, Need]
    in_use: Mode
    limit: int | None = None

    def __str__(self) -> str:
        loops = any(need.graphs for need in self.needs.values())
        names = [field.name for field in fields(Need) if loops or field.name != "graphs"]
        lines = [["mode", *names, "inference", ""]]
        for mode, need in self.needs.items():
            marks = ["in use"] * (mode == self.in_use) + ["too much"] * (not self.fits(mode))
            lines.append([str(mode), *(in_mib(getattr(need, name)) for name in (*names, "total")), ", ".join(marks)])
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        cells = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        limit = "" if self.limit is None else f"; inference may add {in_mib(self.limit)}"
        return "\n".join([f"MiB on a rank{limit}", *(line.rstrip() for line in cells)])

    def fits(self, mode: Mode) -> bool:
        """Whether a mode's need is within the limit."""
        return self.limit is None or self.needs[mode].total <= self.limit


NeedOf = Callable[[int, int], Need]  # of the number of sequences decoded at once, and the tokens of each


class MemoryPlanner:
    """Plans the memory of each mode that a builder can build, and chooses the mode where settings are "auto".

    Attributes: `in_use` is the mode that the settings name or "auto" chose; `limit`, the bytes that inference may add,
        is None without a limit.
    Choosing is a collective. Raises ValueError, with the memory plan, if not one sequence fits in an allowed mode.
    """

    def __init__(self, builder: Builder):
        self.builder, self.settings, self.rollout = builder, builder.settings, builder.rollout
        self.limit = self.rollout.memory_limit
        size, pinned = self.settings.inference_tp_size, self.settings.pin_parameters
        if builder.int8:
            self.in_use = builder.int8_mode()
        elif "auto" in (size, pinned):
            self.in_use = self._chosen()
        else:
            self.in_use = Mode(tp_size=int(size)) if pinned else Mode(streaming=True)

    def plan(self, rows: int, tokens: int) -> MemoryPlan:
        """The plan for `rows` sequences of `tokens` tokens each, all decoded at once."""
        needs = {mode: self._need(mode)(rows, tokens) for mode in self.builder.modes()}
        return MemoryPlan(needs, self.in_use, self.limit)

    def fits(self, rows: int, tokens: int) -> bool:
        """Whether the mode in use can hold `rows` sequences of `tokens` tokens at once."""
        return self.limit is None or self._need(self.in_use)(rows, tokens).total <= self.limit

    def kv_limit(self) -> int | None:
        """Bytes that the memory limit leaves for the KV cache in the mode in use; None: there is no limit."""
        return None if self.limit is None else max(self.limit - self._need(self.in_use)(0, 0).total, 0)

    def use_whole_if_it_fits(self) -> bool:
        """For weights that cannot be sliced: make whole ones on every rank the mode in use, if as many sequences fit as
        with streamed ones. Gives whether they are. A collective."""
        if self.builder.stage == 3:  # else they are whole already
            limit = self._agreed_limit()
            whole, streamed = (self.num_seqs_that_fit(mode, limit) for mode in (Mode(), Mode(streaming=True)))
            if not whole == streamed > 0:
                return False
        self.in_use = Mode()
        return True

    def _need(self, mode: Mode) -> NeedOf:
        return need_of(mode, *self.builder.planned(mode), self.rollout)

    def _chosen(self) -> Mode:
        """The fastest allowed mode in which `max_num_seqs` sequences of `max_out_tokens` tokens fit at once; if there
        is none, the mode in which the most fit."""
        size, pinned = self.settings.inference_tp_size, self.settings.pin_parameters
        allowed = [mode for mode in self.builder.modes() if mode.streaming is not pinned]
        allowed = [mode for mode in allowed if size == "auto" or mode.tp_size == size]
        self.limit = self._agreed_limit()
        num_seqs = {mode: self.num_seqs_that_fit(mode, self.limit) for mode in allowed}
        self.in_use = chosen = max(allowed, key=num_seqs.get)
        tokens = self.settings.max_out_tokens
        if not num_seqs[chosen]:
            raise ValueError(
                f"hybrid_engine: nothing that inference_tp_size={size!r} and pin_parameters={pinned!r} allow fits for "
                f"a sequence of max_out_tokens={tokens}; allow more, or raise rollout.memory_limit\n"
                f"{self.plan(1, tokens)}"
            )
        log_dist(
            f"hybrid: weights are held {chosen}: {num_seqs[chosen]} of max_num_seqs={self.rollout.max_num_seqs} "
            f"sequences of max_out_tokens={tokens} fit at once in {in_mib(self.limit)} MiB",
            ranks=[0],
        )
        return chosen

    def _agreed_limit(self) -> int:
        """The bytes that inference may add: the setting's, else the least that is free on a rank. A collective."""
        return agreed(free_bytes()) if self.limit is None else self.limit

    def num_seqs_that_fit(self, mode: Mode, limit: int) -> int:
        """How many sequences of `max_out_tokens` tokens fit at once, up to `max_num_seqs`, on every rank. A
        collective."""
        need = self._need(mode)
        counts = range(self.rollout.max_num_seqs, 0, -1)
        return agreed(next((n for n in counts if need(n, self.settings.max_out_tokens).total <= limit), 0))


def agreed(number: int) -> int:
    """The minimum of all ranks' numbers. A collective."""
    return min_over_ranks(number, torch.device(get_accelerator().current_device_name()))


def need_of(
    mode: Mode,
    weight_bytes: tuple[int, int],
    fused: FusedModel,
    not_decoding: FusedModel | None,
    rollout: RolloutConfig,
) -> NeedOf:
    """A function of (rows, tokens): what a mode needs for `rows` sequences of `tokens` tokens at once.

    weight_bytes: of the snapshot, and the temporaries of gathering.  not_decoding: the decoder over weights in the
        model's dtype, if `fused` is over an int8 copy.
    """
    info, decoder = fused.info, fused.planned()
    snapshot_bytes, gather_bytes = weight_bytes
    copies = 0
    for each, planned in ((fused, decoder), (not_decoding, None if not_decoding is None else not_decoding.planned())):
        if planned is not None and each.stream is not None:  # one layer's copies at a time
            gather_bytes += planned.nbytes() // max(len(info.layers), 1)
        elif planned is not None:
            copies += planned.nbytes()
    at_rest = bytes_at_rest(info.model)
    vocabulary = info.size("vocab_size")

    def need(rows: int, tokens: int) -> Need:
        kv = kv_bytes(fused, rollout.kv_step, rows, tokens) if rows else 0
        extra = rollout.prefix_cache_bytes if rows and decoder is not None else 0
        kv = min(kv + extra, rollout.kv_cache_bytes or kv + extra)
        ranks = 1 if decoder is None or decoder.group is None else mode.tp_size  # that decode one batch
        logits = logit_rows(decoder, ranks * max(rows, 1), tokens) * -(-vocabulary // ranks) * 4
        if decoder is None:
            # Of the model's own layers, approximately: four times the hidden size (the residual stream, its norm, the
            # attention output, a float32 copy) and three times the MLP's inner size. The head's logits are made after
            # these temporaries are freed.
            hidden = info.size("hidden_size")
            width = 4 * hidden + 3 * (info.size("intermediate_size") or 4 * hidden)
            activations = max(rows * tokens * width * next(info.model.parameters()).element_size() - logits, 0)
        else:
            at_once = max(min(ranks * rows * tokens, PREFILL_TOKENS), sum(checked_lengths(decoder)))
            activations = decoder.activation_bytes(at_once)
        loops = decoder is not None and not mode.streaming
        graphs = decoder.loop_bytes(ranks * rows, tokens) if loops and rows else 0
        return Need(at_rest, gather_bytes, snapshot_bytes, copies, kv, logits, activations, graphs)

    return need


def bytes_at_rest(model: nn.Module) -> int:
    """Bytes on this rank of a model's parameters while none is gathered."""
    return sum(
        param.ds_tensor.nbytes if is_partitioned(param) and param.numel() == 0 else param.nbytes
        for param in model.parameters()
    )


def logit_rows(decoder: WholeDecoder | None, rows: int, tokens: int) -> int:
    """Rows of logits that exist at once, temporaries counted: in a decode step (`rows` sequences) or in scoring.

    Kernels sample without a copy, and the CPU's also score so; torch's operations make temporaries of the same size.
    """
    for_decoding = 3 if decoder is not None and decoder.samples_in_kernel else 5
    for_scoring = 1 if isinstance(decoder, CpuDecoder) else 5
    return max(for_decoding * rows, for_scoring * min(rows * tokens, LOGIT_ROWS))


def kv_bytes(fused: FusedModel, step: int, rows: int, tokens: int) -> int:
    """Bytes of the KV cache, fused (blocks) or native, for `rows` sequences of `tokens` tokens.

    step: tokens by which the cache grows.
    """
    if not fused.fallback_reason:
        # Ranks of a group decode one batch: a rank has its heads of all ranks' rows.
        rows, steps = rows * (1 if fused.group is None else fused.group.size), blocks_for(step)
        return -(-(1 + rows * blocks_for(tokens)) // steps) * steps * fused.block_bytes()
    info = fused.info
    heads = info.size("num_attention_heads")
    kv_heads = info.size("num_key_value_heads") or heads
    head_dim = info.size("head_dim") or info.size("hidden_size") // max(heads, 1)
    itemsize = next(info.model.parameters()).element_size()
    return 2 * info.size("num_hidden_layers") * kv_heads * head_dim * rows * (-(-tokens // step) * step) * itemsize


def free_bytes() -> int:
    """Free bytes of this rank's device. On CPU, the host's free memory divided by the ranks on the host.

    On a GPU, memory that torch's allocator has reserved but does not use counts as free.
    """
    accelerator = get_accelerator()
    free = accelerator.available_memory()
    if accelerator.device_name() == "cpu":
        return free // int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))
    return free + accelerator.memory_reserved() - accelerator.memory_allocated()


def in_mib(nbytes: int) -> str:
    """Bytes as text, in MiB with one decimal."""
    return f"{nbytes / 2**20:.1f}"
