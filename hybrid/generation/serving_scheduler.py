"""The scheduler of `engine.serve()`: rows arrive and leave at any time, and each has settings of its own.

A rollout's rows are known when it begins. Here a row of the request is a slot, which a row that arrives takes, and
which is free again once that row has ended. A row's tokens depend on its prompt, its settings and its sampling key
alone: a row whose scores are processed is sampled by itself, so that it changes neither the others nor their kernels.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.utils.rnn import pad_sequence

from hybrid.decoders.batch import NO_ADAPTER
from hybrid.decoders.streamed_decoder import StreamedDecoder
from hybrid.generation.block_pool import blocks_for
from hybrid.generation.completions import InvalidLogitsError, penalized
from hybrid.generation.model_runner import reserve_memory
from hybrid.generation.native_scheduler import NativeScheduler
from hybrid.generation.request import Processors
from hybrid.generation.scheduler import STEPS_IN_KERNEL, STEPS_ON_DEVICES, STRIDE_S, Scheduler
from hybrid.generation.scoring import Scores, score_natively, scores_beside_rows
from hybrid.generation.sequence import Sequence
from hybrid.runtime.interrupts import INTERRUPTS
from hybrid.runtime.parallel import all_gather_objects, raise_together
from hybrid.runtime.waiting import waiting_to
from hybrid.sampling.params import RowParams, SamplingParams
from hybrid.sampling.sampler import SamplerOutput, in_fields

POLL_S = 0.02  # between two exchanges of ranks that have no rows
INTERRUPT_S = 0.1  # between two looks whether the server is to stop
NO_TOKEN = -1


@dataclass(frozen=True)
class IncomingRow:
    """A sample of a request to the server, as ranks that decode one batch exchange it.

    number: of the row, among those of its rank.
    prompt_ids: int64 [n] on the host.
    prefix_ids: tokens that the completion begins with; positions count from the first of them.
    params: max_new_tokens and min_new_tokens count these too; seed and stop_token_ids are not read.
    stop_token_ids: the model's end tokens, and the request's own.
    logit_bias: (token, number added to its logit) each.
    priority: rows with a lower one are admitted first.
    client: of rows with equal priority, those of different clients are admitted in turn.
    streams: whether the source gets the tokens as they are drawn, and not at the end alone.
    top_logprobs: the prompt is scored, with so many most probable tokens at each place, and nothing is sampled; None:
        the row is sampled.
    adapter: as Sequence's.
    """

    number: int
    prompt_ids: torch.Tensor
    prefix_ids: tuple[int, ...]
    params: SamplingParams
    stop_token_ids: tuple[int, ...]
    sampling_key: int
    logit_bias: tuple[tuple[int, float], ...] = ()
    priority: int = 0
    client: str = ""
    streams: bool = False
    top_logprobs: int | None = None
    adapter: int = NO_ADAPTER


class Arrivals(NamedTuple):
    """New rows and aborts of a rank's source.  aborted: numbers of rows.  is_open: whether more rows may arrive."""

    rows: Sequences[IncomingRow] = ()
    aborted: Sequences[int] = ()
    is_open: bool = False


class Piece(NamedTuple):
    """New tokens of a row, with their three logprobs, as SamplerOutput has them.

    reason: why the row has ended: "stop", "length", "abort", or "error"; None: it has not.  error: of the row.
    scores: of a scored prompt, of one row.
    """

    tokens: list[int]
    logps: list[list[float]]
    reason: str | None = None
    error: InvalidLogitsError | None = None
    scores: Scores | None = None


class RowSource(Protocol):
    """Where a rank's rows come from, and where their tokens go. The scheduler's thread calls it."""

    def take(self, wait_s: float) -> Arrivals:
        """Return what has come; wait up to `wait_s` seconds if nothing has."""

    def admit(self, number: int) -> None:
        """Note that a row does not wait any more."""

    def give(self, number: int, piece: Piece) -> None:
        """Take new tokens of a row."""

    def put_back(self, rows: Sequences[IncomingRow]) -> None:
        """Take back rows that have no slot yet, in their order: the source has closed for this scheduler."""


class ClosedSource:
    """The source of a rank whose server has closed, or was never opened, while other ranks serve."""

    def take(self, wait_s: float) -> Arrivals:
        """Return that nothing will come."""
        return Arrivals()

    def admit(self, number: int) -> None:
        """Do nothing."""

    def give(self, number: int, piece: Piece) -> None:
        """Do nothing."""

    def put_back(self, rows: Sequences[IncomingRow]) -> None:
        """Do nothing."""


RowKey = tuple[int, int]  # index of the rank in its group, number of the row on that rank


class AdmissionQueue:
    """Rows that wait for a slot: by priority, then each client in turn, then in the order of arrival."""

    def __init__(self) -> None:
        self.clients: dict[int, OrderedDict[str, deque[tuple[RowKey, IncomingRow]]]] = {}

    def __bool__(self) -> bool:
        return bool(self.clients)

    def add(self, key: RowKey, row: IncomingRow) -> None:
        """Add a row that has arrived."""
        self.clients.setdefault(row.priority, OrderedDict()).setdefault(row.client, deque()).append((key, row))

    def pop(self) -> tuple[RowKey, IncomingRow]:
        """Remove and return the next row."""
        priority = min(self.clients)
        client, rows = next(iter(self.clients[priority].items()))
        taken = rows.popleft()
        self.clients[priority].move_to_end(client)
        self._drop_empty(priority, client)
        return taken

    def remove(self, key: RowKey) -> bool:
        """Remove a row; return whether it waited."""
        for priority, clients in self.clients.items():
            for client, rows in clients.items():
                for item in rows:
                    if item[0] == key:
                        rows.remove(item)
                        self._drop_empty(priority, client)
                        return True
        return False

    def _drop_empty(self, priority: int, client: str) -> None:
        if not self.clients[priority][client]:
            del self.clients[priority][client]
        if not self.clients[priority]:
            del self.clients[priority]


@dataclass
class Slot:
    """A row in a slot.  sent: position in its completion up to which the source has the tokens."""

    key: RowKey
    row: IncomingRow
    processors: Processors | None
    sent: int


class ServingScheduler(Scheduler):
    """Decodes rows as they arrive, until every rank's source is closed and all rows have ended. Its request has an
    empty row for each slot.

    source: of this rank's rows.  A group's ranks exchange rows between steps, and schedule all of them alike.
    """

    def __init__(self, *args: Any, source: RowSource | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.source: RowSource = ClosedSource() if source is None else source
        self.group = self.decoder.group
        self.rank = 0 if self.group is None else self.group.index
        self.queue, self.slots, self.is_open = AdmissionQueue(), dict[int, Slot](), True
        self.free_slots = list(reversed(range(self.max_num_seqs)))
        self.has_processors = self.has_changed = False
        self.num_rows = self.num_tokens = 0  # of this rank: that have ended, and that were drawn
        self.stops = torch.full((len(self.request), 1), NO_TOKEN, device=self.decoder.device)

    def serve(self) -> tuple[int, int]:
        """Serve until the sources are closed, and no row is left; return the rows and the tokens of this rank."""
        self.reserve()
        while self.is_open or self.queue or self.slots:
            INTERRUPTS.raise_pending()
            self.receive_rows()
            if self.free_slots and self.queue:
                self.fill_slots()
            if self.has_changed and self.slots:
                self.update_sampling()
            with self.phase("decode"):
                self.step()
        INTERRUPTS.raise_pending()  # a source that has closed since the last look, by a signal
        return self.num_rows, self.num_tokens

    def reserve(self) -> None:
        """Reserve the memory of all slots."""
        num_seqs, longest = self.max_num_seqs, self.request.longest
        num_blocks, verifies = num_seqs * blocks_for(longest), self.speculation is not None
        reserve_memory(self.decoder, self.block_pool, num_seqs, num_blocks, longest, verifies=verifies)
        self.decoder.reserve(longest)

    # -------------------------------------------------------------- arrivals

    def receive_rows(self) -> None:
        """Queue new rows and end aborted ones; wait for a row if none is queued or running."""
        aborted, of_ranks = set[RowKey](), self.arrivals(is_idle=not self.queue and not self.slots)
        self.is_open = any(arrivals.is_open for arrivals in of_ranks)
        for rank, arrivals in enumerate(of_ranks):
            for row in arrivals.rows:
                self.queue.add((rank, row.number), row)
            aborted |= {(rank, number) for number in arrivals.aborted}
        if aborted:
            self.end_aborted(aborted)
        waiting = []
        while self.queue and not self.is_open:  # another adapter's turn: a server that ends has aborted its rows
            waiting.append(self.queue.pop()[1])
        if waiting:
            self.source.put_back(waiting)

    def end_aborted(self, aborted: set[RowKey]) -> None:
        """End rows with the tokens that they have."""
        for key in aborted:
            if self.queue.remove(key) and key[0] == self.rank:
                self.source.give(key[1], Piece([], [[], [], []], "abort"))
        stopped = {number for number, slot in self.slots.items() if slot.key in aborted}
        if stopped:
            self.stop(stopped)
        for number in sorted(stopped):
            self.release(self.sequences[number], "abort")

    @waiting_to("exchange requests")
    def arrivals(self, is_idle: bool) -> list[Arrivals]:
        """Return what has come to each rank of the group. A collective of a group; with streamed weights, of all ranks,
        if this one is idle."""
        if isinstance(decoder := self.decoder, StreamedDecoder):
            waits = is_idle and not decoder.join()
            return [self.source.take(POLL_S if waits else 0.0)]
        if self.group is None:
            return [self.source.take(INTERRUPT_S if is_idle else 0.0)]
        local, error = self.source.take(POLL_S if is_idle else 0.0), INTERRUPTS.taken()
        flags = [bool(local.rows or local.aborted), local.is_open, error is not None, self.step_s]
        of_ranks = self.group.gather(torch.tensor(flags, dtype=torch.float64, device=self.decoder.device)).tolist()
        has_rows, is_open, stops, seconds = zip(*of_ranks, strict=True)
        self.step_s = max(seconds)  # so that all decode as many steps
        if any(stops):
            raise_together(error, self.group.group)
        if any(has_rows):
            return all_gather_objects(local, self.group.group)
        return [Arrivals(is_open=bool(of_rank)) for of_rank in is_open]

    def fill_slots(self) -> None:
        """Give free slots to queued rows, and score those whose prompts are to be scored, until a forward is full."""
        taken: list[Sequence] = []
        scored: list[tuple[RowKey, IncomingRow]] = []
        tokens = 0
        while len(self.free_slots) > len(scored) and self.queue and tokens < self.decoder.prefill_tokens:
            key, row = self.queue.pop()
            if key[0] == self.rank:
                self.source.admit(key[1])
            if row.top_logprobs is None:
                taken.append(self.occupy(self.free_slots.pop(), key, row))
            else:
                scored.append((key, row))
                tokens += len(row.prompt_ids)
        if scored:
            self.score(scored)
        if taken:
            self.waiting = self.waiting + self.grouped(taken)
            self.has_changed = True

    def score(self, rows: list[tuple[RowKey, IncomingRow]]) -> None:
        """Give the sources the scores of their rows' prompts. The blocks are those of as many free slots."""
        top_k = max(row.top_logprobs or 0 for _, row in rows)
        with self.phase("prefill"):
            scores = self.scores_of([row for _, row in rows], top_k)
        for index, ((rank, number), row) in enumerate(rows):
            if rank == self.rank:
                self.source.give(number, scored_piece(scores.map(partial(of_scored, index, len(row.prompt_ids)))))

    def scores_of(self, rows: list[IncomingRow], top_k: int) -> Scores:
        """Return the scores of rows' prompts, padded on the right."""
        adapters = [row.adapter for row in rows] if self.decoder.mixed_adapters else None
        return scores_beside_rows(self.decoder, self.block_pool, [row.prompt_ids for row in rows], top_k, adapters)

    def occupy(self, number: int, key: RowKey, row: IncomingRow) -> Sequence:
        """Write a row into a slot, and return its sequence."""
        prompt_ids, begin, buffers = row.prompt_ids.tolist(), len(row.prefix_ids), self.buffers
        limit = row.params.max_new_tokens
        if len(prompt_ids) > buffers.prompt_len:
            buffers.reserve_prompt(min(max(len(prompt_ids), 2 * buffers.prompt_len), self.request.longest))
        buffers.restart(number, prompt_ids)
        buffers.extend(number, 0, list(row.prefix_ids))
        buffers.limits[number], buffers.sampling_keys[number] = limit, row.sampling_key
        if self.speculation is not None:
            self.speculation.occupy(number, row.prompt_ids, limit)
        self.slots[number] = Slot(key, row, self.processors_of(row), begin)
        self.sequences[number] = Sequence(row=number, limit=limit, length=begin, adapter=row.adapter)
        return self.sequences[number]

    def release(self, sequence: Sequence, reason: str, error: InvalidLogitsError | None = None) -> None:
        """Free the slot of a sequence that has left."""
        self.give(sequence, reason, error)
        if self.speculation is not None:
            self.speculation.end(sequence.row, sequence.length)
            completion = self.buffers.tokens_of(sequence.row, 0, sequence.length)
            self.speculation.remember_row(sequence.row, completion)
        del self.slots[sequence.row]
        self.free_slots.append(sequence.row)
        self.has_changed = True

    def give(self, sequence: Sequence, reason: str | None = None, error: InvalidLogitsError | None = None) -> None:
        """Give the source a sequence's tokens that it does not have yet."""
        slot = self.slots[sequence.row]
        begin, slot.sent = slot.sent, sequence.length
        if slot.key[0] == self.rank:
            self.num_rows, self.num_tokens = self.num_rows + (reason is not None), self.num_tokens + slot.sent - begin
            tokens = self.buffers.tokens_of(sequence.row, begin, sequence.length).tolist()
            logps = self.buffers.logps[:3, sequence.row, begin : sequence.length].tolist()
            self.source.give(slot.key[1], Piece(tokens, logps, reason, error))

    # -------------------------------------------------------------- decoding

    def stride(self) -> int:
        """Return the most steps until the next look at what has arrived."""
        if self.samples_in_kernel and not self.continues_past_ends:
            return min(max(int(STRIDE_S / self.step_s), 1), STEPS_IN_KERNEL)
        return self.num_scheduler_steps

    def may_verify(self) -> bool:
        """Whether steps may verify drafts: scores that are processed depend on the tokens before them."""
        return not self.has_processors

    def processors_of(self, row: IncomingRow) -> Processors | None:
        """Return what changes a row's scores before sampling; None: nothing."""
        params, stop_token_ids = RowParams.of(row.params), torch.tensor(row.stop_token_ids, device=self.decoder.device)
        has_penalties = params.has_penalties(can_stop=bool(row.stop_token_ids))
        penalties = partial(penalized, params, stop_token_ids, self.buffers) if has_penalties else None
        if not row.logit_bias:
            return penalties
        tokens, biases = zip(*row.logit_bias, strict=True)
        index = torch.tensor(tokens, device=self.decoder.device)

        def processed(ids: torch.Tensor, scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            scores = scores.index_add(1, index, scores.new_tensor(biases).expand(len(scores), -1))
            return scores if penalties is None else penalties(ids, scores, rows)

        return processed

    def update_sampling(self) -> None:
        """Collect the settings of the rows in slots after these have changed."""
        device, any_slot = self.decoder.device, next(iter(self.slots.values()))
        by_slot = [self.slots.get(number, any_slot).row for number in range(len(self.request))]
        self.params = RowParams.of([row.params for row in by_slot], device).without_penalties()
        distinct = {slot.row.stop_token_ids for slot in self.slots.values()}
        self.stop_token_ids = torch.tensor(sorted(set().union(*distinct)), dtype=torch.int64, device=device)
        width = max(1, *map(len, distinct))
        table = [[*row.stop_token_ids, *[NO_TOKEN] * (width - len(row.stop_token_ids))] for row in by_slot]
        self.stops = torch.tensor(table, device=device)
        self.has_processors = any(slot.processors is not None for slot in self.slots.values())
        vocabulary, decoder = self.decoder.vocabulary, self.decoder
        can_mix = vocabulary is None or vocabulary.group.shares_memory or self.params.is_uniform
        # A device's kernels go on after a stop token, with padding: that of another row must not end this one.
        ends_alike = len(distinct) == 1 or not (decoder.samples_in_kernel and decoder.continues_past_ends)
        self.samples_in_kernel = decoder.samples_in_kernel and can_mix and ends_alike and not self.has_processors
        self.continues_past_ends = self.samples_in_kernel and decoder.continues_past_ends
        on_cpu = STEPS_IN_KERNEL if self.samples_in_kernel else 1
        self.num_scheduler_steps = on_cpu if device.type == "cpu" else STEPS_ON_DEVICES
        self.has_changed = False

    def sampled(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> SamplerOutput:
        """Sample rows whose scores are processed one by one, and the others together."""
        by_index = dict(enumerate(rows.tolist() if self.has_processors else ()))
        alone = {index: of_row for index, row in by_index.items() if (of_row := self.slots[row].processors) is not None}
        if not alone:
            return super().sampled(logits, rows, positions)
        plain = [index for index in by_index if index not in alone]
        parts = [super().sampled(logits[plain], rows[plain], positions[plain])] if plain else []
        for index, processors in alone.items():
            parts.append(self.sample_processed(processors, logits[[index]], rows[[index]], positions[[index]]))
        order = torch.tensor([*plain, *alone], device=logits.device).argsort()
        return SamplerOutput(*(torch.cat(values)[order] for values in zip(*map(in_fields, parts), strict=True)))

    def is_stop(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return which tokens of the running sequences, int64 [sequences, n], are stop tokens of their rows."""
        return (tokens[:, :, None] == self.stops[self.runner.rows][:, None]).any(dim=-1)

    # ---------------------------------------------------------------- ends

    def end_turn(self, sequence: Sequence) -> None:
        """Free the slot of a sequence that has ended."""
        if sequence.is_invalid:
            self.release(sequence, "error", InvalidLogitsError({0: sequence.length}))
        else:
            self.release(sequence, "stop" if sequence.has_stopped else "length")

    def report(self) -> None:
        """Give the new tokens of rows that stream."""
        for sequence in self.runner.sequences:
            slot = self.slots[sequence.row]
            if slot.row.streams and sequence.length > slot.sent:
                self.give(sequence)


class NativeServingScheduler(ServingScheduler, NativeScheduler):
    """Decodes rows as they arrive, by the model's own forward. If its cache cannot add rows to a running batch, new
    rows wait until the batch has ended.

    check: called with prompts, int64 [n] on the host, before they run.
    """

    reserve = NativeScheduler.reserve

    def __init__(self, *args: Any, check: Callable[[torch.Tensor], None], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.check_prompt = check

    def fill_slots(self) -> None:
        """Fill slots as `ServingScheduler` does, unless another forward would change the running rows' cache."""
        if not len(self.runner) or self.decoder.selects(self.runner.batches[-1].rows):
            super().fill_slots()

    def occupy(self, number: int, key: RowKey, row: IncomingRow) -> Sequence:
        """Write a row into a slot, and return its sequence."""
        self.check_prompt(row.prompt_ids)
        return super().occupy(number, key, row)

    def scores_of(self, rows: list[IncomingRow], top_k: int) -> Scores:
        """Return the scores of rows' prompts, padded on the right."""
        sequences = [row.prompt_ids for row in rows]
        masks = [torch.ones_like(ids) for ids in sequences]
        ids, mask = (pad_sequence(each, batch_first=True).to(self.decoder.device) for each in (sequences, masks))
        return score_natively(self.decoder.model, ids, mask, 1.0, len(ids), top_k=top_k)


def of_scored(index: int, length: int, scores: torch.Tensor) -> torch.Tensor:
    """Return the scores of a row of `length` tokens, on the host.  scores: [rows, tokens - 1, ...]"""
    return scores[index, : length - 1].cpu()


def scored_piece(scores: Scores) -> Piece:
    """Return the piece of a scored prompt, or of its error where logits had no softmax."""
    invalid = scores.per_token_logps.isnan().nonzero()
    if len(invalid):
        return Piece([], [[], [], []], "error", InvalidLogitsError({0: int(invalid[0])}))
    return Piece([], [[], [], []], "stop", scores=scores)
