"""Plans memory: bytes on a rank of each way to hold weights for a rollout, and the choice where settings are "auto"."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from deepspeed.utils import log_dist
from torch import nn

from hybrid.config import RolloutConfig
from hybrid.decoders.fused_model import FusedModel
from hybrid.generation.block_pool import BlockPool, blocks_for
from hybrid.generation.model_runner import activation_bytes, logit_rows, state_slots
from hybrid.models.quantized import state_bytes
from hybrid.models.spec import DecoderSpec
from hybrid.runtime.memory import free_bytes
from hybrid.runtime.parallel import agreed
from hybrid.training.builder import Builder, Mode
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
    layer_inputs: bytes that `logps(forward="exact")` keeps from its forward to its backward, in train mode, for as many
        rows and tokens that share no prefix; None: no decoder.
    """

    needs: dict[Mode, Need]
    in_use: Mode
    limit: int | None = None
    layer_inputs: int | None = None

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
        text = [f"MiB on a rank{limit}", *(line.rstrip() for line in cells)]
        if self.layer_inputs is not None:
            text.append(f'logps(forward="exact") of these rows keeps {in_mib(self.layer_inputs)} of layer inputs')
        return "\n".join(text)

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
        elif not pinned:
            self.in_use = Mode(streaming=True)
        else:
            self.in_use = Mode(tp_size=int(size)) if size != 1 else self._pinned()

    def plan(self, rows: int, tokens: int) -> MemoryPlan:
        """Return the plan for `rows` sequences of `tokens` tokens each, all decoded at once."""
        modes = dict.fromkeys((*self.builder.modes(), self.in_use))  # adapters may be gone since it was chosen
        needs = {mode: self._need(mode)(rows, tokens) for mode in modes}
        info = self.builder.info
        dtype = next(info.model.parameters()).dtype
        exact = None if info.layout is None else layer_input_bytes(info.layout.spec, dtype, rows * tokens)
        return MemoryPlan(needs, self.in_use, self.limit, exact)

    def fits(self, rows: int, tokens: int) -> bool:
        """Whether the mode in use can hold `rows` sequences of `tokens` tokens at once."""
        return self.limit is None or self._need(self.in_use)(rows, tokens).total <= self.limit

    def kv_limit(self) -> int | None:
        """Return the bytes that the memory limit leaves for the KV cache in the mode in use; None: there is no
        limit."""
        return None if self.limit is None else max(self.limit - self._need(self.in_use)(0, 0).total, 0)

    def require(self, rows: int, tokens: int) -> None:
        """Raise ValueError, with the memory plan, if `rows` sequences of `tokens` tokens exceed `memory_limit`."""
        if not self.fits(rows, tokens):
            raise ValueError(
                f"rollout.memory_limit={self.limit}: {rows} sequences of {tokens} tokens, new ones included, "
                f"need more; raise it, or ask for fewer rows or tokens\n{self.plan(rows, tokens)}"
            )

    def make_block_pool(self) -> BlockPool:
        """Return the KV cache's block pool, limited by `kv_cache_bytes` and by what `memory_limit` leaves."""
        rollout, left = self.rollout, self.kv_limit()
        caching: dict[str, Any] = {
            "caches_prefixes": rollout.enable_prefix_caching,
            "extra_bytes": rollout.prefix_cache_bytes,
        }
        if left is None or (rollout.kv_cache_bytes is not None and rollout.kv_cache_bytes <= left):
            return BlockPool(rollout.kv_step, rollout.kv_cache_bytes, free_bytes=free_bytes, **caching)
        name = f"rollout.memory_limit={self.limit}"
        plan = lambda: f"\n{self.plan(1, self.settings.max_out_tokens)}"  # noqa: E731
        return BlockPool(rollout.kv_step, left, name, plan, free_bytes, **caching)

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

    def _pinned(self) -> Mode:
        """Return the mode with whole weights on every rank that also keeps the base of merged adapters, if that may be
        chosen and costs no sequence; else the one that does not. A collective if it may be chosen."""
        both = Mode(keeps_base=True)
        if self.limit is None or not self.builder.may_keep_base or both not in self.builder.modes():
            return Mode()
        num_both, num_seqs = (self.num_seqs_that_fit(mode, self.limit) for mode in (both, Mode()))
        return both if num_both == num_seqs > 0 else Mode()

    def _chosen(self) -> Mode:
        """Return the fastest allowed mode in which `max_num_seqs` sequences of `max_out_tokens` tokens fit at once; if
        there is none, the mode in which the most fit."""
        size, pinned = self.settings.inference_tp_size, self.settings.pin_parameters
        allowed = [mode for mode in self.builder.modes() if mode.streaming is not pinned]
        allowed = [mode for mode in allowed if size == "auto" or mode.tp_size == size]
        allowed = [mode for mode in allowed if self.builder.may_keep_base or not mode.keeps_base]
        self.limit = self._agreed_limit()
        num_seqs = {mode: self.num_seqs_that_fit(mode, self.limit) for mode in allowed}
        self.in_use = chosen = max(allowed, key=num_seqs.__getitem__)
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
        """Return the bytes that inference may add: the setting's, else the ranks' minimum of free ones. Collective."""
        return agreed(free_bytes()) if self.limit is None else self.limit

    def num_seqs_that_fit(self, mode: Mode, limit: int) -> int:
        """Count the sequences of `max_out_tokens` tokens that fit at once on every rank, up to `max_num_seqs`.

        A collective.
        """
        need = self._need(mode)
        counts = range(self.rollout.max_num_seqs, 0, -1)
        return agreed(next((n for n in counts if need(n, self.settings.max_out_tokens).total <= limit), 0))


def need_of(
    mode: Mode,
    weight_bytes: tuple[int, int],
    fused: FusedModel,
    not_decoding: FusedModel | None,
    rollout: RolloutConfig,
) -> NeedOf:
    """Return a function of (rows, tokens): the need of a mode for `rows` sequences of `tokens` tokens at once.

    weight_bytes: of the snapshot, and the temporaries of gathering.  not_decoding: the decoder over weights in the
        model's dtype, if `fused` is over an int8 copy.
    """
    info, decoder = fused.info, fused.planned()
    snapshot_bytes, gather_bytes = weight_bytes
    copies = 0
    for each, planned in ((fused, decoder), (not_decoding, None if not_decoding is None else not_decoding.planned())):
        if each is None or planned is None:
            continue
        if each.stream is not None:  # one layer's copies at a time
            gather_bytes += planned.nbytes() // max(len(info.layers), 1)
        else:
            copies += planned.nbytes()
    at_rest = bytes_at_rest(info.model)
    vocabulary = info.size("vocab_size")

    def need(rows: int, tokens: int) -> Need:
        kv = kv_bytes(fused, rollout, rows, tokens) if rows else 0
        extra = rollout.prefix_cache_bytes if rows and decoder is not None else 0
        kv = min(kv + extra, rollout.kv_cache_bytes or kv + extra)
        ranks = 1 if decoder is None or decoder.group is None else mode.tp_size  # that decode one batch
        logits = logit_rows(decoder, ranks * max(rows, 1), tokens) * -(-vocabulary // ranks) * 4
        held = at_rest, gather_bytes, snapshot_bytes, copies, kv
        if decoder is None:
            # Of the model's own layers, approximately: four times the hidden size (the residual stream, its norm, the
            # attention output, a float32 copy) and three times the MLP's inner size. The head's logits are made after
            # these temporaries are freed.
            hidden = info.size("hidden_size")
            width = 4 * hidden + 3 * (info.size("intermediate_size") or 4 * hidden)
            activations = max(rows * tokens * width * next(info.model.parameters()).element_size() - logits, 0)
            return Need(*held, logits, activations)
        graphs = decoder.loop_bytes(ranks * rows, tokens) if rows and not mode.streaming else 0
        return Need(*held, logits, activation_bytes(decoder, ranks * rows, tokens), graphs)

    return need


def bytes_at_rest(model: nn.Module) -> int:
    """Return the bytes on this rank of a model's parameters while none is gathered."""
    return sum(
        (param.ds_tensor.nbytes if is_partitioned(param) and param.numel() == 0 else param.nbytes) + state_bytes(param)
        for param in model.parameters()
    )


def layer_input_bytes(spec: DecoderSpec, dtype: torch.dtype, tokens: int) -> int:
    """Return the bytes of `LayerInputScores` of so many packed tokens: the layers' inputs, and the experts in int16.

    dtype: the decoder's.
    """
    experts = len(spec.moe_layers) * spec.experts_per_token * torch.int16.itemsize
    return tokens * ((len(spec.layers) + 1) * spec.hidden_size * dtype.itemsize + experts)


def kv_bytes(fused: FusedModel, rollout: RolloutConfig, rows: int, tokens: int) -> int:
    """Return the bytes of the KV cache, fused (blocks and recurrent states) or native, for `rows` sequences of `tokens`
    tokens."""
    step = rollout.kv_step
    if not fused.fallback_reason:
        # Ranks of a group decode one batch: a rank has its heads of all ranks' rows.
        rows, steps = rows * (1 if fused.group is None else fused.group.size), blocks_for(step)
        blocks = -(-(1 + rows * blocks_for(tokens)) // steps) * steps
        block_bytes, slot_bytes = fused.bytes_in_cache()
        return blocks * block_bytes + state_slots(rows, rollout.speculation is not None) * slot_bytes
    info = fused.info
    heads = info.size("num_attention_heads")
    kv_heads = info.size("num_key_value_heads") or heads
    head_dim = info.size("head_dim") or info.size("hidden_size") // max(heads, 1)
    itemsize = next(info.model.parameters()).element_size()
    return 2 * info.size("num_hidden_layers") * kv_heads * head_dim * rows * (-(-tokens // step) * step) * itemsize


def in_mib(nbytes: int) -> str:
    """Return the bytes as text, in MiB with one decimal."""
    return f"{nbytes / 2**20:.1f}"
