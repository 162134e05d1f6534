"""Continuous batching: equal prompts are prefilled once, ended sequences leave at once, waiting ones take their
place. Rows with an environment leave after each turn, and wait again once its observation is there.
"""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from hybrid.decoders.batch import BLOCK_SIZE, NO_ADAPTER
from hybrid.decoders.decode_state import MAX_STEPS
from hybrid.decoders.drafts import Drafting, VerifiedTokens
from hybrid.decoders.fused_model import AnyDecoder
from hybrid.environments.stepping import EnvironmentLoop, StepResult
from hybrid.generation.block_pool import NO_SLOT, BlockPool, blocks_for
from hybrid.generation.completions import (
    CompletionBuffers,
    Completions,
    InvalidLogitsError,
    penalized,
    without_tokens,
)
from hybrid.generation.model_runner import ModelRunner, prefill, reserve_memory
from hybrid.generation.request import Processors, Request, StopCondition
from hybrid.generation.routing import read_router_indices
from hybrid.generation.sequence import Sequence, Turn
from hybrid.generation.speculation import Speculation, Speculator
from hybrid.models.model_inputs import RowInputs
from hybrid.runtime.errors import UserCodeError
from hybrid.runtime.interrupts import INTERRUPTS
from hybrid.runtime.parallel import InferenceGroup, raise_together
from hybrid.runtime.profiling import Phase
from hybrid.sampling.params import RowParams
from hybrid.sampling.sampler import SamplerOutput, key_after_fork, of_all_rows, sample_tokens, selective_log_softmax
from hybrid.sampling.state import SamplingState

STEPS_ON_DEVICES = 8  # decode steps between two checks for ended sequences
STEPS_IN_KERNEL = 16  # the same where kernels sample; a keyboard interrupt waits for them
STRIDE_S = 0.05  # seconds of decode steps between two checks, where nothing else sets their number
NO_LOGITS = torch.empty(0)  # of a prompt that is not prefilled
CHECKED_STEPS = 32  # ranks that decode one batch compare their tokens every so many steps


@dataclass
class SequenceGroup:
    """Waiting sequences with the same tokens and images, and the tokens' blocks and logits once they are prefilled.

    token_ids: int64 [n] on the host: the prompt, and the tokens that each sequence's completion already has.
    blocks_per_row: the most blocks that a sequence may need.
    state_slot: of the recurrent states after the tokens, while `blocks` are there.
    """

    token_ids: torch.Tensor
    waiting: list[Sequence]
    blocks_per_row: int = 0
    blocks: list[int] = field(default_factory=list)
    state_slot: int = 0
    logits: torch.Tensor = NO_LOGITS  # after the tokens, float32 [vocab]
    model_inputs: RowInputs = field(default_factory=dict)  # besides token ids: the model's own forward prefills
    adapter: int = NO_ADAPTER  # as Sequence's
    cached: Any = None  # the tokens' NativeRows of one row, where the model's own forward runs and other rows wait


@dataclass
class StopTracker:
    """A StopCondition that is not reached yet.

    group_of: for each row that has not ended, the rows of its group.  missing: how many rows of each group have not
    ended.  left: groups that must still end.  asks: as StopCondition's.  complete: groups that the caller has neither
    accepted nor refused yet.
    """

    group_of: dict[int, tuple[int, ...]]
    missing: dict[tuple[int, ...], int]
    left: int
    asks: bool
    complete: list[tuple[int, ...]] = field(default_factory=list)

    @classmethod
    def of(cls, condition: StopCondition) -> "StopTracker":
        """Return the tracker of a condition before any row has ended."""
        group_of = {row: group for group in condition.groups for row in group}
        return cls(group_of, {group: len(group) for group in condition.groups}, condition.count, condition.asks)

    def end(self, row: int) -> None:
        """Count a row that has ended."""
        group = self.group_of.pop(row, None)
        if group is None:
            return
        self.missing[group] -= 1
        if self.missing[group]:
            return
        if self.asks:
            self.complete.append(group)
        else:
            self.left -= 1


class Scheduler:
    """Decodes a request: its sequences wait, run, and leave once they have finished.

    Its fields are many: the request and the parts that run it (decoder, block pool, runner, environment, speculation),
    the settings of a run, and the state: `sequences`, the waiting ones, the columns of all rows (`buffers`), the stop
    conditions, and the rows whose end has not been reported.

    max_num_seqs: sequences that run at once.
    num_scheduler_steps: decode steps between two checks for finished rows, unless `stride` has reason for more. By
        default 1 on CPUs, unless the kernels sample, which stop by themselves, and more on devices, which a check waits
        for.
    environment: of the rows, if the request has limits for one.
    on_end: called with rows that are done for good, and their results so far.
    accept_group: called with the rows of a complete group, and the results so far, where a stop condition asks.
    speculator: decides where steps verify drafts; None: nowhere.
    input_prefill: `InputPrefill.prefill`, for prompts with inputs besides token ids; None: there are none, or the
        model's own forward decodes too.
    """

    def __init__(
        self,
        request: Request,
        decoder: AnyDecoder,
        block_pool: BlockPool,
        max_num_seqs: int,
        phase: Phase,
        num_scheduler_steps: int | None = None,
        environment: EnvironmentLoop | None = None,
        on_end: Callable[[list[int], Completions], None] | None = None,
        accept_group: Callable[[list[int], Completions], bool] | None = None,
        speculator: Speculator | None = None,
        input_prefill: Callable[[torch.Tensor, RowInputs, int], tuple[list[int], torch.Tensor]] | None = None,
    ):
        self.input_prefill = input_prefill
        self.request, self.decoder, self.block_pool = request, decoder, block_pool
        verifies = speculator is not None
        self.max_num_seqs = block_pool.num_seqs_within_limit(request.longest, max_num_seqs, verifies)
        self.phase = phase
        self.environment, self.on_end, self.accept_group = environment, on_end, accept_group
        # A graph samples from slices of the vocabulary with one setting for all rows.
        can_mix = decoder.vocabulary is None or decoder.vocabulary.group.shares_memory
        params = RowParams.of(request.sampling_params, request.prompt_ids.device)
        suppressed = request.suppressed  # which samplers do not know
        in_sampler = decoder.samples_with_penalties and suppressed is None
        penalizes = not in_sampler and params.has_penalties(len(request.stop_token_ids) > 0)
        is_known = (
            request.processors is None and suppressed is None and not penalizes and (can_mix or params.is_uniform)
        )
        self.samples_in_kernel = decoder.samples_in_kernel and is_known
        self.continues_past_ends = self.samples_in_kernel and decoder.continues_past_ends
        on_cpu = STEPS_IN_KERNEL if self.samples_in_kernel else 1
        usual = on_cpu if decoder.device.type == "cpu" else STEPS_ON_DEVICES
        self.num_scheduler_steps = num_scheduler_steps or usual
        self.step_s = STRIDE_S  # seconds of a decode step, as of the last check
        limits = request.limits.tolist()
        of_rows = zip(limits, request.adapters or [NO_ADAPTER] * len(limits), strict=True)
        self.sequences = [Sequence(row=row, limit=limit, adapter=each) for row, (limit, each) in enumerate(of_rows)]
        device = decoder.device
        self.runner = self.new_runner()
        slack = max(self.num_scheduler_steps, MAX_STEPS if self.continues_past_ends else 0)
        self.buffers = CompletionBuffers(request, device, slack, decoder.group is not None)
        self.params = params if in_sampler else params.without_penalties()
        self.stop_token_ids = request.stop_token_ids
        assert request.processors is None or not penalizes, "processors of `generate()` come without penalties"
        self.processors = request.processors
        if penalizes:
            self.processors = partial(penalized, params, request.stop_token_ids, self.buffers)
        if suppressed is not None:
            self.processors = partial(without_tokens, suppressed, self.processors)
        self.pending_env = set() if environment is None else environment.pending  # rows
        self.steps_left = request.max_new_tokens  # until a running sequence ends, or, in kernels on devices, until all
        # Drafts are verified where a draw depends on its key, position and logits alone.
        drafts = self.processors is None and not self.params.penalizes
        self.speculation = self.speculation_by(speculator) if speculator is not None and drafts else None
        self.waiting: list[SequenceGroup] = []
        self.stop_trackers = [StopTracker.of(condition) for condition in request.stop_conditions]
        self.ended: list[int] = []  # rows since the last call of `on_end`
        self.report_error: BaseException | None = None  # of `on_end`, where other ranks decode the same batch
        for row, failure in request.failures.items():
            self.sequences[row].error = failure.error
            self.end_row(self.sequences[row], failure.reason)

    def new_runner(self) -> Any:
        """Return the runner of this request's sequences."""
        return ModelRunner(self.decoder, self.block_pool, self.request.longest)

    def run(self) -> Completions:
        """Decode all rows. Raises InvalidLogitsError at the end if a row had invalid logits."""
        waiting = [sequence for sequence in self.sequences if sequence.reason == "unfinished"]
        if self.request.partial is not None:
            for sequence in waiting:
                sequence.length = self.request.partial.lengths[sequence.row]
        self.add_waiting(waiting)
        self.reserve()
        with self.phase("decode"):
            while self.waiting or len(self.runner) or self.pending_env:
                INTERRUPTS.raise_pending()
                if self.environment is not None and self.pending_env:
                    self.receive(self.environment)
                self.step()
        if invalid_steps := {sequence.row: sequence.length for sequence in self.sequences if sequence.is_invalid}:
            raise InvalidLogitsError(invalid_steps)
        if self.speculation is not None:
            self.speculation.remember(self.buffers.whole(self.sequences))
        if self.report_error is not None:
            raise UserCodeError from self.report_error
        return self.buffers.completions(self.sequences)

    def step(self) -> None:
        """Admit waiting sequences, and decode the running ones until one of them may have ended."""
        if self.waiting:
            with self.phase("prefill"):
                self.admit()
        if len(self.runner):
            self.decode()

    def grouped(self, sequences: list[Sequence]) -> list[SequenceGroup]:
        """Group sequences by equal tokens so far, the same inputs besides them, and the same adapter, in the order of
        first appearance; those of one adapter side by side: kernels compute runs of them."""
        sequences = sorted(sequences, key=attrgetter("adapter"))
        contexts = self.buffers.contexts([each.row for each in sequences], [each.length for each in sequences])
        groups: dict[tuple[bytes, int, int, int], SequenceGroup] = {}
        for sequence, token_ids in zip(sequences, contexts, strict=True):
            model_inputs = self.request.inputs_of(sequence.row)
            key = token_ids.numpy().tobytes(), sequence.length, id(model_inputs), sequence.adapter
            group = SequenceGroup(token_ids, [], model_inputs=model_inputs, adapter=sequence.adapter)
            group = groups.setdefault(key, group)
            longest = len(token_ids) - sequence.length + sequence.limit
            group.blocks_per_row = max(group.blocks_per_row, blocks_for(longest))
            group.waiting.append(sequence)
        return list(groups.values())

    def add_waiting(self, sequences: list[Sequence]) -> None:
        """Put sequences at the front of the admission queue."""
        self.waiting = self.grouped(sequences) + self.waiting
        if self.environment is not None and (turn_limit := self.environment.limits.max_turn_tokens) is not None:
            rows = [each.row for each in sequences]
            of_turn = [min(each.limit, each.length + turn_limit) for each in sequences]
            self.buffers.limits[rows] = torch.tensor(of_turn, device=self.buffers.limits.device)

    def reserve(self) -> None:
        """Reserve the memory of the whole request, of the most blocks that are in use at once, in whatever order
        sequences end.

        Counted are each running sequence's own blocks, each running prompt's shared blocks, and, if rows wait, the
        blocks that their group keeps for them.
        """
        # Rows whose environment runs leave their blocks in the pool: room for another `max_num_seqs` of them.
        num_seqs = self.max_num_seqs * (1 if self.environment is None else 2)
        of_rows: list[int] = []  # a row's own blocks
        shared: list[int] = []  # a group's full blocks
        for group in self.waiting:
            shared.append(len(group.token_ids) // BLOCK_SIZE)
            of_rows += [group.blocks_per_row - shared[-1]] * len(group.waiting)
        waits = len(of_rows) > num_seqs
        num_blocks = sum(sorted(of_rows)[-num_seqs:]) + sum(sorted(shared)[-(num_seqs + waits) :]) + waits
        num_seqs, longest = min(self.max_num_seqs, len(of_rows)), self.request.longest
        verifies = self.speculation is not None
        reserve_memory(self.decoder, self.block_pool, num_seqs, num_blocks, longest, verifies=verifies)
        self.decoder.reserve(longest)

    # ------------------------------------------------------------- admitting

    def admit(self) -> None:
        """Start waiting rows, as long as `max_num_seqs` and the blocks that the rows may need allow."""
        admitted = self.schedule()
        if not admitted and len(self.runner):
            return
        logits = self.start(admitted or [self.oversized_row()])
        self.sample(logits, len(logits))
        self.waiting = [group for group in self.waiting if group.waiting]
        self.check(1, 1)
        self.finish(1)

    def start(self, admitted: list[tuple[SequenceGroup, list[Sequence]]]) -> torch.Tensor:
        """Prefill groups and append their sequences to the runner; returns the logits after the tokens of each
        sequence, [sequences, vocab]."""
        if new := [group for group, _ in admitted if not group.blocks]:
            self.prefill(new)
        for group, sequences in admitted:
            self.allocate(group, sequences)
        lengths = [len(group.token_ids) for group, sequences in admitted for _ in sequences]
        self.runner.add([sequence for _, sequences in admitted for sequence in sequences], lengths)
        return torch.cat([group.logits.expand(len(sequences), -1) for group, sequences in admitted])

    def prefill(self, groups: list[SequenceGroup]) -> None:
        """Compute the blocks, states and logits of groups."""
        texts = [group for group in groups if not group.model_inputs]
        if texts:
            adapters = [group.adapter for group in texts] if self.decoder.mixed_adapters else None
            of_texts = prefill(self.decoder, self.block_pool, [group.token_ids for group in texts], adapters)
            for group, blocks, slot, logits in zip(texts, *of_texts, strict=True):
                group.blocks, group.state_slot, group.logits = blocks, slot, logits
        for group in groups:
            if group.model_inputs:
                assert self.input_prefill is not None, "the decoder reads token ids"
                (group.state_slot,) = self.block_pool.allocate_states(1)
                INTERRUPTS.raise_pending()
                prompt = group.token_ids, group.model_inputs, group.state_slot
                group.blocks, group.logits = self.input_prefill(*prompt)

    def schedule(self) -> list[tuple[SequenceGroup, list[Sequence]]]:
        """Remove the waiting sequences that fit now, in their order, and return them by group. Blocks that running
        sequences may still need are not free."""
        admitted: list[tuple[SequenceGroup, list[Sequence]]] = []
        num_seqs, free_blocks = self.max_num_seqs - len(self.runner), self.free_blocks()
        for group in self.waiting:
            count = min(num_seqs, len(group.waiting))
            while count and self.blocks_needed(group, count) > free_blocks:
                count -= 1
            if not count:
                break
            num_seqs, free_blocks = num_seqs - count, free_blocks - self.blocks_needed(group, count)
            admitted.append((group, group.waiting[:count]))
            group.waiting = group.waiting[count:]
            if group.waiting:
                break
        return admitted

    def free_blocks(self) -> float:
        """Return the blocks that running sequences do not need."""
        if self.block_pool.limit is None:
            return math.inf
        promised = sum(each.max_blocks - len(each.blocks) for each in self.runner.sequences)
        return self.block_pool.limit - self.block_pool.num_used - promised

    def oversized_row(self) -> tuple[SequenceGroup, list[Sequence]]:
        """Remove and return the first waiting row, which fits only without the blocks that its group would keep for its
        other rows. Their prompt is prefilled again."""
        group = self.waiting[0]
        alone, sequence = replace(group, waiting=[]), group.waiting.pop(0)
        group.blocks, group.logits = [], NO_LOGITS
        return alone, [sequence]

    def blocks_needed(self, group: SequenceGroup, count: int) -> int:
        """Return additional blocks that a group may need for `count` of its rows.

        Full blocks of the prompt are shared; while other rows of the group wait, the group keeps the last, partly
        filled block.
        """
        full = len(group.token_ids) // BLOCK_SIZE
        kept = blocks_for(len(group.token_ids)) - full if count < len(group.waiting) else 0
        return full + count * (group.blocks_per_row - full) + kept - len(group.blocks)

    def allocate(self, group: SequenceGroup, sequences: list[Sequence]) -> None:
        """Give rows of a prefilled group their blocks: full blocks are shared, the last one, which decoding writes to,
        is copied, and so are recurrent states; the group's last row takes the group's own."""
        num_full = len(group.token_ids) // BLOCK_SIZE
        full, partial = group.blocks[:num_full], group.blocks[num_full:]
        is_last = not group.waiting
        copies = [self.block_pool.allocate(len(partial)) for _ in sequences[is_last:]]
        if copies and partial:
            self.block_pool.kv.copy(partial * len(copies), [block for blocks in copies for block in blocks])
        for _ in sequences[is_last:]:
            self.block_pool.ref(full)
        slots = [group.state_slot] * len(sequences)
        if not self.block_pool.shares_prefixes:
            slots[: len(copies)] = self.block_pool.allocate_states(len(copies))
            self.block_pool.copy_states(group.state_slot, slots[: len(copies)])
        for sequence, blocks, slot in zip(sequences, copies + [partial] * is_last, slots, strict=True):
            sequence.blocks, sequence.max_blocks, sequence.state_slot = full + blocks, group.blocks_per_row, slot
        if is_last:
            group.blocks = []

    # -------------------------------------------------------------- decoding

    def decode(self) -> None:
        """Decode by single steps or by steps that verify drafts, then remove the sequences that have ended."""
        start = time.perf_counter()
        verified = None
        if self.speculation is not None and self.may_verify() and self.runner.may_verify:
            running = ((sequence.row, sequence.length) for sequence in self.runner.sequences)
            drafting = self.speculation.plan(*zip(*running, strict=True))
            start = time.perf_counter() if drafting is None else start
            verified = None if drafting is None else self.verify(self.speculation, drafting)
        steps = self.single_steps() if verified is None else verified.steps
        if self.decoder.group is not None and self.runner.steps % CHECKED_STEPS < steps:
            self.agree(self.decoder.group)
        unchecked = steps if verified is None else 1  # verification ends with the step that draws a stop token
        self.check(unchecked, steps if verified is None else max(verified.counts))
        seconds = time.perf_counter() - start
        self.step_s = seconds / steps
        if self.speculation is not None:
            rows = [sequence.row for sequence in self.runner.sequences]
            self.speculation.observe(rows, steps, verified, seconds)
        self.finish(unchecked)

    def may_verify(self) -> bool:
        """Whether steps may verify drafts: not with stop conditions, as other rows could end first."""
        return not self.stop_trackers

    def single_steps(self) -> int:
        """Decode up to `stride()` tokens for every sequence; return how many."""
        steps = min(self.stride(), self.steps_left)
        self.runner.allocate_slots(steps)
        if self.samples_in_kernel:
            state = self.sampling_state(len(self.runner))
            tokens, logps = self.runner.sampled_steps(self.runner.latest_tokens, state, steps)
            steps = len(tokens)
            self.record(tokens, logps)
        else:
            for _ in range(steps):
                self.sample(self.runner.step(self.runner.latest_tokens), len(self.runner))
        return steps

    def stride(self) -> int:
        """Return the most steps until the next check.

        A check takes the same time however short the steps are, and a row that has ended is computed until the check.
        Kernels that continue past ends therefore run as many steps as take STRIDE_S. The usual number is kept where a
        row waits for another's end, with stop conditions and environments, and by ranks that share a batch: their
        clocks differ.
        """
        is_bound = self.waiting or self.stop_trackers or self.environment is not None or self.decoder.group is not None
        if is_bound or not self.continues_past_ends:
            return self.num_scheduler_steps
        return min(max(int(STRIDE_S / self.step_s), self.num_scheduler_steps), MAX_STEPS)

    def sampling_state(self, count: int) -> SamplingState:
        """Return the sampling of the next tokens of the last `count` running sequences."""
        request, rows, positions = self.request, self.runner.rows[-count:], self.runner.positions[-count:]
        return SamplingState(
            keys=self.buffers.sampling_keys[rows],
            positions=positions,
            limits=self.buffers.limits[rows],
            stop_token_ids=self.stop_token_ids,
            pad_token_id=request.pad_token_id,
            params=self.params.select(rows),
            token_ids=None if not self.params.penalizes else self.buffers.token_ids(rows, positions),
            vocabulary=self.decoder.vocabulary,
            in_kernels=self.continues_past_ends,
        )

    def agree(self, group: InferenceGroup) -> None:
        """Go on only if every rank of the group does. A collective.

        Raises, on every rank, the error that is to stop one of them, or RankFailedError; RuntimeError unless the ranks
        have drawn the same tokens.
        """
        error, checksum = self.report_error or INTERRUPTS.taken(), self.buffers.checksum
        local = torch.stack([checksum, torch.full_like(checksum, error is not None)])
        checksums, stops = zip(*group.gather(local).tolist(), strict=True)
        if any(stops):
            raise_together(error, group.group)
        if different := [rank for rank, checksum in enumerate(checksums) if checksum != checksums[0]]:
            raise RuntimeError(
                f"ranks that decode one batch have drawn different tokens by step {self.runner.steps}: ranks "
                f"{', '.join(map(str, different))} of the group differ from rank 0. Their weights, or the versions of "
                "torch or of the kernels that they run, are not equal"
            )

    def sample(self, logits: torch.Tensor, count: int) -> None:
        """Sample a token for each of the last `count` sequences from their logits [count, vocab]."""
        rows, positions = self.runner.rows[-count:], self.runner.positions[-count:]
        if self.continues_past_ends:
            sampled = self.sampling_state(count).sample(logits)
        else:
            sampled = self.sampled(logits, rows, positions)
        self.record(sampled.tokens[None], sampled.per_token()[:, None])

    def sampled(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> SamplerOutput:
        """Return the next tokens of `rows` int64 [n], at `positions` int64 [n], drawn from their logits [n, vocab]."""
        if self.processors is not None:
            return self.sample_processed(self.processors, logits, rows, positions)
        settings = self.buffers.sampling_keys[rows], positions, self.params.select(rows), self.decoder.vocabulary
        return sample_tokens(logits, *settings)

    def record(self, tokens: torch.Tensor, logps: torch.Tensor) -> None:
        """Add new tokens, int64 [steps, n], of the last n sequences, and their logprobs, float32 [4, steps, n]."""
        steps, count = tokens.shape
        rows, next_positions = self.runner.rows[-count:], self.runner.positions[-count:]
        positions = next_positions + torch.arange(steps, device=rows.device)[:, None]  # [steps, n]
        self.buffers.record(rows, positions, tokens, logps)
        self.runner.latest_tokens[-count:] = tokens[-1]
        next_positions += steps

    def sample_processed(
        self, processors: Processors, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> SamplerOutput:
        """Return the tokens of `rows` int64 [n], drawn from their logits [n, vocab] after processors.

        Processors get rows of one length at a time, as in Hugging Face's batches, with logits of the whole vocabulary.
        Where ranks have slices of it, each rank draws for some rows.
        """
        vocabulary, count = self.decoder.vocabulary, len(rows)
        if vocabulary is not None:
            local, logits = vocabulary.whole_of_own_rows(logits)
            rows, positions = rows[local], positions[local]
        scores, params = torch.empty_like(logits), self.params.select(rows)
        for position in positions.unique().tolist():
            here = (positions == position).nonzero().flatten()
            ids = self.buffers.ids[rows[here], : self.buffers.prompt_len + position]
            scores[here] = processors(ids, logits[here], rows[here]).to(scores.dtype)
        sampled = sample_tokens(scores, self.buffers.sampling_keys[rows], positions, params)
        sampled = replace(
            sampled,
            old_logps=selective_log_softmax(logits / params.temperatures(), sampled.tokens),
            raw_logps=selective_log_softmax(logits, sampled.tokens),
        )
        return sampled if vocabulary is None else of_all_rows(sampled, count, vocabulary)

    def check(self, steps: int, drawn: int) -> None:
        """Check the last `steps` tokens of every sequence, and the logprobs of its last `drawn` tokens. The one place
        where the host waits for the device, but for verification."""
        limits = self.buffers.limits[self.runner.rows]
        remaining = limits - self.runner.positions
        back = torch.arange(-drawn, 0, device=self.runner.positions.device)
        recent = (self.runner.positions[:, None] + back).clamp(min=0)  # [sequences, drawn]
        at = recent[:, -steps:]
        tokens = self.buffers.ids[self.runner.rows[:, None], self.buffers.prompt_len + at]
        # After its limit a row's tokens are padding, which may be a stop token.
        is_end = self.is_stop(tokens) & (at < limits[:, None])
        first_end = at.gather(1, is_end.int().argmax(dim=1, keepdim=True))[:, 0]
        has_stopped = is_end.any(dim=1)
        lengths = torch.where(has_stopped, first_end + 1, self.runner.positions + remaining.clamp(max=0))
        logps = self.buffers.logps[0][self.runner.rows[:, None], recent]
        is_invalid = (logps.isnan() & (recent < lengths[:, None])).any(dim=1)
        is_done = has_stopped | (remaining <= 0) | is_invalid
        numbers = torch.stack([lengths, remaining, is_done.long(), has_stopped.long(), is_invalid.long()]).T.tolist()
        for sequence, (length, left, done, stopped, invalid) in zip(self.runner.sequences, numbers, strict=True):
            sequence.length, sequence.left = length, left
            sequence.is_done, sequence.has_stopped, sequence.is_invalid = bool(done), bool(stopped), bool(invalid)

    def is_stop(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return which tokens of the running sequences, int64 [sequences, n], are stop tokens."""
        return torch.isin(tokens, self.stop_token_ids)

    def finish(self, steps: int) -> None:
        """Remove the sequences that have ended, as checked.  steps: since the check before."""
        running = self.runner.sequences
        stay = [index for index, sequence in enumerate(running) if not sequence.is_done]
        ended = [sequence for sequence in running if sequence.is_done]
        for sequence in ended:
            if sequence.is_invalid:  # its length is that before the invalid logits
                sequence.length = int(self.buffers.logps[0, sequence.row].isnan().nonzero()[0])
        self.steps_left = (max if self.continues_past_ends else min)((running[index].left for index in stay), default=0)
        if ended:
            self.remove(stay, steps)
        for sequence in ended:
            self.end_turn(sequence)
        if self.stop_trackers:
            self.stop_unneeded()
        self.report()

    def remove(self, stay: list[int], steps: int) -> None:
        """Remove the sequences but those with the indices `stay`, ascending. Their blocks stay cached.

        steps: since the last check.
        """
        staying = set(stay)
        leave = [sequence for index, sequence in enumerate(self.runner.sequences) if index not in staying]
        rows, lengths = [sequence.row for sequence in leave], [sequence.length for sequence in leave]
        if steps > 1:
            self.buffers.end(rows, lengths)
        self.keep_tokens(leave)
        self.runner.remove_finished(keep=stay)

    def keep_tokens(self, sequences: list[Sequence]) -> None:
        """Keep in the prefix cache what sequences that leave the runner have computed, and read their experts."""
        # The latest token has not been run through the model.
        computed = self.buffers.contexts([each.row for each in sequences], [each.length - 1 for each in sequences])
        in_cache = {} if self.block_pool.shares_prefixes else self.runner.tokens_in_cache()
        for token_ids, sequence in zip(computed, sequences, strict=True):
            if self.request.inputs_of(sequence.row):  # equal tokens may stand for other images
                continue
            held = token_ids, sequence.blocks[: blocks_for(len(token_ids))]
            if self.block_pool.shares_prefixes:
                self.block_pool.insert(*held, sequence.adapter)
            elif (
                # Unless the decode kernels stop a row's state at its end, steps after the end have changed it.
                (self.continues_past_ends or in_cache[sequence.row] == len(token_ids))
                and not sequence.is_invalid
                and self.block_pool.keep_state(*held, sequence.state_slot, sequence.adapter)
            ):
                sequence.state_slot = NO_SLOT
        if self.request.return_router_indices:
            read_router_indices(self.block_pool.kv, sequences, [len(token_ids) for token_ids in computed])

    def free(self, group: SequenceGroup) -> None:
        """Free what a group keeps for rows that will not run."""
        self.block_pool.free(group.blocks)
        self.block_pool.free_states([group.state_slot] * bool(group.blocks))

    def stop_unneeded(self) -> None:
        """Ask the caller which complete groups count, and stop the rows of stop conditions that are reached: they are
        unfinished, with the tokens that they have."""
        for tracker in self.stop_trackers:
            complete, tracker.complete = tracker.complete, []
            if complete and self.accept_group is not None:
                done = self.buffers.completions(self.sequences)
                tracker.left -= sum(bool(self.accept_group(list(group), done)) for group in complete)
        stopped = {row for tracker in self.stop_trackers if tracker.left <= 0 for row in tracker.group_of}
        self.stop_trackers = [tracker for tracker in self.stop_trackers if tracker.left > 0]
        if stopped:
            self.stop(stopped)

    def stop(self, rows: set[int]) -> None:
        """Remove waiting and running sequences, with the tokens that they have as of the last check."""
        for group in self.waiting:
            group.waiting = [sequence for sequence in group.waiting if sequence.row not in rows]
            if not group.waiting:
                self.free(group)
        self.waiting = [group for group in self.waiting if group.waiting]
        running = self.runner.sequences
        stay = [index for index, sequence in enumerate(running) if sequence.row not in rows]
        if len(stay) < len(running):
            self.remove(stay, steps=1)

    # ----------------------------------------------------------- speculation

    def speculation_by(self, speculator: Speculator) -> Speculation:
        """Return the drafts of this request."""
        group, limits = self.decoder.group, [sequence.limit for sequence in self.sequences]
        agree = None if group is None else partial(max_seconds, group, self.decoder.device)
        return Speculation(speculator, self.request.prompts(), limits, self.buffers.tokens_of, agree)

    def verify(self, speculation: Speculation, drafting: Drafting) -> VerifiedTokens:
        """Decode by steps that verify drafts."""
        state, runner = self.sampling_state(len(self.runner)), self.runner
        steps = speculation.max_steps(len(runner), min(self.stride(), self.num_scheduler_steps))
        verified = runner.verified_steps(runner.latest_tokens, state, drafting, steps)
        positions = runner.positions[verified.sequences] + verified.offsets
        self.buffers.record(runner.rows[verified.sequences], positions, verified.tokens, verified.logps)
        counts = torch.tensor(verified.counts, device=runner.device)
        is_latest = verified.offsets == counts[verified.sequences] - 1
        index = (verified.sequences[is_latest],)
        runner.latest_tokens = runner.latest_tokens.index_put(index, verified.tokens[is_latest])
        runner.positions = runner.positions + counts
        return verified

    # ----------------------------------------------------------------- turns

    def end_turn(self, sequence: Sequence) -> None:
        """End a sequence that has a stop token or has reached its limit, or let its environment make a step."""
        if sequence.is_invalid:
            return
        if self.environment is None or not self.ends_turn(sequence):
            self.end_row(sequence, "stop" if sequence.has_stopped else "length")
            return
        turn = self.buffers.tokens_of(sequence.row, sequence.turn_begin, sequence.length)
        self.environment.submit(sequence.row, turn)

    def ends_turn(self, sequence: Sequence) -> bool:
        """Whether an environment answers a sequence that leaves the runner."""
        return sequence.has_stopped or sequence.length < sequence.limit

    def end_row(self, sequence: Sequence, reason: str) -> None:
        """Record that a sequence is done."""
        sequence.reason = reason
        if self.speculation is not None:
            self.speculation.end(sequence.row, sequence.length)
        for tracker in self.stop_trackers:
            tracker.end(sequence.row)
        self.ended.append(sequence.row)

    def report(self) -> None:
        """Call `on_end` with the rows that have ended since the last call."""
        ended, self.ended = self.ended, []
        if not ended or self.on_end is None or self.report_error is not None:
            return
        try:
            self.on_end(ended, self.buffers.completions(self.sequences))
        except BaseException as error:
            if self.decoder.group is None:
                raise
            self.report_error = error  # raised where the ranks agree on it

    def receive(self, environment: EnvironmentLoop) -> None:
        """Take the steps that environments have made; wait for one if no row can decode."""
        is_idle = not self.waiting and not len(self.runner)
        with self.phase("environment") if is_idle else nullcontext():
            steps = environment.collect(is_idle)
        for stepped in steps:
            self.take_step(stepped, environment.limits.max_turns)
        self.report()

    def take_step(self, stepped: StepResult, max_turns: int) -> None:
        """Go on with a sequence after its environment's step, or end it."""
        sequence, observation = self.sequences[stepped.row], stepped.value
        begin, end = sequence.turn_begin, sequence.length
        if stepped.error:
            sequence.turns.append(Turn(begin, end, end, None, stepped.seconds))
            sequence.error = stepped.error
            self.end_row(sequence, stepped.reason)
            return
        goes_on = not observation.done and sequence.num_turns + 1 < max_turns
        appended = observation.ids if goes_on and observation.prompt_ids is None else []
        fits = end + len(appended) < sequence.limit
        observed = end + len(appended) * fits
        sequence.turns.append(Turn(begin, end, observed, observation.reward, stepped.seconds))
        if not goes_on:
            self.end_row(sequence, "stop" if observation.done else "turns")
        elif observation.prompt_ids is not None:
            self.fork(sequence, observation.prompt_ids)
        elif fits:
            self.buffers.extend(sequence.row, end, appended)
            sequence.length = observed
            self.add_waiting([sequence])
        else:
            self.end_row(sequence, "length")

    def fork(self, sequence: Sequence, prompt_ids: list[int]) -> None:
        """Keep a sequence's history as a training row of its own, and go on from another prompt, with another key."""
        row, keys = sequence.row, self.buffers.sampling_keys
        fork = self.buffers.fork(row, sequence.length, sequence.turns)
        sequence.forks.append(replace(fork, router_indices=sequence.router_indices))
        sequence.turns, sequence.prompt_ids = [], torch.tensor(prompt_ids, dtype=torch.int64)
        self.buffers.restart(row, prompt_ids)
        if self.speculation is not None:
            self.speculation.restart(row, sequence.prompt_ids)
        sequence.length = 0
        limit = min(sequence.limit, self.request.longest - len(prompt_ids))
        if limit < 1:
            self.end_row(sequence, "length")
            return
        sequence.limit = limit
        self.buffers.limits[row] = limit
        self.buffers.sampling_keys = keys.index_put((torch.tensor(row),), key_after_fork(keys[row]))
        self.add_waiting([sequence])


def max_seconds(group: InferenceGroup, device: torch.device, seconds: float) -> float:
    """Return the most of the seconds that each rank has measured. A collective of the group."""
    return float(group.gather(torch.tensor([seconds], dtype=torch.float64, device=device)).max())
