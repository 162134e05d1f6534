"""The scheduler over a model's own forward: equal prompts run once, ended rows leave, waiting ones enter in waves, and
a row whose environment runs keeps its keys and values.

What a model allows depends on its cache: where the cache is not one of independent rows, or the model keeps its state
elsewhere, a wave runs with all its rows until its last one has ended, and the next one follows.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from hybrid.decoders.batch import PREFILL_TOKENS
from hybrid.generation.hf_cache import KVCache
from hybrid.generation.model_runner import RunningSequences
from hybrid.generation.native_rows import NativeRows
from hybrid.generation.scheduler import NO_LOGITS, Scheduler, SequenceGroup
from hybrid.generation.sequence import Sequence
from hybrid.models.model_inputs import RowInputs
from hybrid.runtime.interrupts import INTERRUPTS
from hybrid.runtime.parallel import InferenceGroup

ENDED_SHARE = 8  # rows that have ended leave once they are one in so many
FREE_SHARE = 4  # waiting rows enter once one in so many places is free

Admitted = list[tuple[SequenceGroup, list[Sequence]]]


@dataclass
class RowTraits:
    """Operations that a model's caches allow on their rows.

    selects: they may be selected, copied and joined, as far as is known.
    pads: rows of different lengths may run together, padded on the left.
    batches: rows of one length may run together.
    """

    selects: bool
    pads: bool
    batches: bool = True


class NativeModel:
    """A model's own forward, with what the scheduler reads of a decoder.

    config: by which `generate()` prepares the cache.
    kv_cache: the storage of the running rows.
    traits: of the model; updated by what its caches show.
    group: ranks that run the same rows together.
    calls: of `recorded_routing`; None: no experts are recorded.
    """

    samples_in_kernel = samples_with_penalties = continues_past_ends = False
    prefill_tokens = PREFILL_TOKENS
    vocabulary = None

    def __init__(
        self,
        model: nn.Module,
        config: GenerationConfig,
        kv_cache: KVCache,
        device: torch.device,
        traits: RowTraits,
        group: InferenceGroup | None = None,
        calls: list[list[torch.Tensor]] | None = None,
    ):
        self.model, self.config, self.kv_cache, self.device = model, config, kv_cache, device
        self.traits, self.group, self.calls = traits, group, calls

    def selects(self, rows: NativeRows) -> bool:
        """Whether rows can be selected, copied and joined."""
        return self.traits.selects and rows.selects

    def prefill(
        self, prompts: list[torch.Tensor], model_inputs: list[RowInputs] | tuple[()] = ()
    ) -> tuple[NativeRows, torch.Tensor]:
        """Run prompts, int64 [n] each on the host; returns their rows, and the logits after each, float32 [rows,
        vocab].  model_inputs: of each prompt, besides token ids; empty: they are text."""
        rows, logits = NativeRows.prefill(self.model, prompts, self.config, self.device, self.calls, model_inputs)
        return rows, logits.float()

    def extend(self, rows: NativeRows, tokens: torch.Tensor) -> torch.Tensor:
        """Append tokens, int64 [rows, n], to rows; returns the logits after them, float32 [rows, vocab]."""
        return rows.extend(tokens, self.calls).float()


class Batch:
    """Rows that run together, and which of them have a sequence.  live: the index of each sequence's row."""

    def __init__(self, rows: NativeRows):
        self.rows, self.live = rows, list(range(len(rows)))

    def compact(self) -> None:
        """Drop the rows without a sequence."""
        if len(self.live) < len(self.rows):
            self.rows.select(self.live)
            self.live = list(range(len(self.rows)))


class NativeRunner(RunningSequences):
    """Sequences over Hugging Face's caches: one batch where the model allows rows to join, else a batch a wave.

    batches: together they have the sequences, in their order.
    """

    def __init__(self, model: NativeModel):
        super().__init__(model.device)
        self.model = model
        self.batches: list[Batch] = []

    def add(self, sequences: list[Sequence], rows: NativeRows) -> None:
        """Append sequences, whose tokens are the rows of `rows`."""
        self.append_columns(sequences)
        last = self.batches[-1] if self.batches else None
        if last is not None and self.can_join(last.rows, rows):
            last.compact()
            count = len(last.rows)
            last.rows.join([rows])
            last.live += range(count, len(last.rows))
            return
        if last is None:
            rows.store(self.model.kv_cache)
        self.batches.append(Batch(rows))

    def can_join(self, rows: NativeRows, others: NativeRows) -> bool:
        """Whether others' rows can run in one batch with `rows`."""
        fits = self.model.traits.pads or rows.ids.shape[1] == others.ids.shape[1]
        return fits and self.model.selects(rows) and self.model.selects(others)

    def allocate_slots(self, tokens: int) -> None:
        """Do nothing: caches grow by themselves."""

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append a token, int64 [sequences], to each sequence; returns the logits after it, float32 [sequences,
        vocab]."""
        INTERRUPTS.raise_pending()
        logits = []
        for batch, of_batch in zip(self.batches, tokens.split([len(each.live) for each in self.batches]), strict=True):
            whole = len(batch.live) == len(batch.rows)
            if not whole:
                live = torch.tensor(batch.live, device=self.device)
                of_batch = of_batch.new_zeros(len(batch.rows)).index_put((live,), of_batch)
            after = self.model.extend(batch.rows, of_batch[:, None])
            logits.append(after if whole else after[live])
        self.steps += 1
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def places(self) -> list[tuple[NativeRows, int]]:
        """Return where each sequence is: its batch's rows, and its index in them."""
        return [(batch.rows, row) for batch in self.batches for row in batch.live]

    def remove_finished(self, keep: list[int]) -> None:
        """Remove all sequences but those with the indices `keep`, ascending."""
        staying, first = set(keep), 0
        for batch in self.batches:
            count = len(batch.live)
            batch.live = [row for index, row in enumerate(batch.live, first) if index in staying]
            first += count
            ended = len(batch.rows) - len(batch.live)
            if batch.live and ended * ENDED_SHARE >= len(batch.rows) and self.model.selects(batch.rows):
                batch.compact()
        self.batches = [batch for batch in self.batches if batch.live]
        self.keep_columns(keep, torch.tensor(keep, dtype=torch.int64, device=self.device))


class NativeScheduler(Scheduler):
    """Decodes a request by a model's own forward.

    parked: rows whose environment runs, one each, by row of the request.
    """

    decoder: Any  # a NativeModel
    runner: Any  # a NativeRunner

    def __init__(self, *args: Any, **kwargs: Any):
        self.parked: dict[int, NativeRows] = {}
        super().__init__(*args, **kwargs)

    def new_runner(self) -> NativeRunner:
        return NativeRunner(self.decoder)

    def reserve(self) -> None:
        """Reserve nothing: caches grow by themselves."""

    def free_blocks(self) -> float:
        return math.inf

    def schedule(self) -> Admitted:
        """As `Scheduler.schedule`, but in waves: each is a forward of its own."""
        free, traits = self.max_num_seqs - len(self.runner), self.decoder.traits
        if len(self.runner):
            waiting = sum(len(group.waiting) for group in self.waiting)
            if free < waiting and free * FREE_SHARE < self.max_num_seqs:
                return []
            if not self.decoder.selects(self.runner.batches[-1].rows):  # the model may keep the running rows' state
                return []
        admitted = super().schedule()
        if traits.pads or traits.selects:
            return admitted
        if not traits.batches:
            for group, sequences in reversed(admitted):
                group.waiting = sequences + group.waiting
            first = self.waiting[0]
            return [(first, [first.waiting.pop(0)])]
        length = len(admitted[0][0].token_ids)
        for group, sequences in admitted:
            if len(group.token_ids) != length:
                group.waiting = sequences + group.waiting
        return [(group, sequences) for group, sequences in admitted if len(group.token_ids) == length]

    def start(self, admitted: Admitted) -> torch.Tensor:
        logits = []
        for rows, after, groups in self.computed(admitted):
            index = [row for row, (_, sequences) in enumerate(groups) for _ in sequences]
            for row, (group, _) in enumerate(groups):
                kept = bool(group.waiting) and self.decoder.selects(rows)
                group.cached, group.logits = (rows.copied([row]), after[row]) if kept else (None, NO_LOGITS)
            if index != list(range(len(rows))):
                rows.select(index)
            self.runner.add([sequence for _, sequences in groups for sequence in sequences], rows)
            logits.append(after[index])
        return torch.cat(logits)

    def computed(self, admitted: Admitted) -> list[tuple[NativeRows, torch.Tensor, Admitted]]:
        """Return the groups' tokens in the cache, a row each, and the logits after them, with the groups, in as many
        parts as forwards run. Where rows cannot be selected, each sequence has a row and comes as a group."""
        parts: dict[tuple, Admitted] = {}
        for group, sequences in admitted:
            length = 0 if self.decoder.traits.pads else len(group.token_ids)
            key: tuple = (self.prefilled, length)
            if group.cached is not None:
                key = (self.rejoined, length)
            elif (held := self.parked.get(sequences[0].row)) is not None:
                key = (self.extended, length, len(group.token_ids) - held.lengths[0])
            parts.setdefault(key, []).append((group, sequences))
        computed = [compute(groups) for (compute, *_), groups in parts.items()]
        for _, sequences in admitted:
            for sequence in sequences:
                self.parked.pop(sequence.row, None)
        return computed

    def prefilled(self, groups: Admitted) -> tuple[NativeRows, torch.Tensor, Admitted]:
        """Run the tokens of groups that are in no cache, once each if the model allows it."""
        if self.decoder.traits.selects:
            rows, logits = self.decoder.prefill(*prompts_of(groups))
            self.decoder.traits.selects = rows.selects
            if rows.selects or all(len(sequences) == 1 for _, sequences in groups):
                return rows, logits, groups
        single = [(group, [sequence]) for group, sequences in groups for sequence in sequences]
        return *self.decoder.prefill(*prompts_of(single)), single

    def rejoined(self, groups: Admitted) -> tuple[NativeRows, torch.Tensor, Admitted]:
        """Return the rows that groups have kept for their waiting sequences."""
        rows = joined([group.cached for group, _ in groups])
        return rows, torch.stack([group.logits for group, _ in groups]), groups

    def extended(self, groups: Admitted) -> tuple[NativeRows, torch.Tensor, Admitted]:
        """Run the tokens that have come to parked rows, as many to each."""
        rows = joined([self.parked[sequences[0].row] for _, sequences in groups])
        new = [group.token_ids[length:] for (group, _), length in zip(groups, rows.lengths, strict=True)]
        return rows, self.decoder.extend(rows, torch.stack(new).to(self.decoder.device)), groups

    def keep_tokens(self, sequences: list[Sequence]) -> None:
        """Park the rows whose environment makes a step, and read the experts of all."""
        places = dict(zip((each.row for each in self.runner.sequences), self.runner.places(), strict=True))
        for sequence in sequences:
            rows, index = places[sequence.row]
            prompt = self.buffers.prompt_len - self.buffers.padding[sequence.row]
            computed = prompt + sequence.length - 1  # the latest token has not been run through the model
            if rows.experts is not None:
                sequence.router_indices = torch.cat(rows.experts[index])[:computed]
            waits = self.environment is not None and not sequence.is_invalid and self.ends_turn(sequence)
            if (
                waits
                and self.decoder.selects(rows)
                and rows.continues
                and rows.lengths[index] == computed
                and len(self.parked) < self.max_num_seqs
            ):
                self.parked[sequence.row] = rows.copied([index])

    def free(self, group: SequenceGroup) -> None:
        group.cached = None

    def end_row(self, sequence: Sequence, reason: str) -> None:
        self.parked.pop(sequence.row, None)
        super().end_row(sequence, reason)

    def fork(self, sequence: Sequence, prompt_ids: list[int]) -> None:
        self.parked.pop(sequence.row, None)
        super().fork(sequence, prompt_ids)


def prompts_of(groups: Admitted) -> tuple[list[torch.Tensor], list[RowInputs]]:
    """Return the groups' tokens, and their inputs besides them."""
    return [group.token_ids for group, _ in groups], [group.model_inputs for group, _ in groups]


def joined(parts: list[NativeRows]) -> NativeRows:
    """Return the rows of all parts, in memory of their own."""
    rows = parts[0].copied(range(len(parts[0])))
    if len(parts) > 1:
        rows.join(parts[1:])
    return rows
