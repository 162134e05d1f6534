"""Continuous batching: equal prompts are prefilled once, ended sequences leave at once, waiting ones take their
place. Rows with an environment leave after each turn, and wait again once its observation is there.
"""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch

from hybrid.decoders.batch import BLOCK_SIZE
from hybrid.decoders.drafts import Drafting, VerifiedTokens
from hybrid.decoders.fused_model import AnyDecoder
from hybrid.generation.block_pool import BlockPool, blocks_for
from hybrid.generation.completions import CompletionBuffers, Completions, RowOutcome, Turn
from hybrid.generation.draws import TokenDraws
from hybrid.generation.environments import EnvironmentLoop, Stepped
from hybrid.generation.model_runner import ModelRunner, prefill
from hybrid.generation.request import Quota, Request
from hybrid.generation.routing import RoutedRows
from hybrid.generation.sampler import SamplerOutput, mixed, of_all_rows, sample_tokens, selective_log_softmax
from hybrid.generation.speculation import Speculation, Speculator
from hybrid.parallel import InferenceGroup
from hybrid.profiling import Phase

STEPS_ON_DEVICES = 8  # decode steps between two checks for ended sequences
STEPS_IN_KERNEL = 16  # the same where kernels sample; a keyboard interrupt waits for them
CHECKED_STEPS = 32  # ranks that decode one batch compare their tokens every so many steps


@dataclass
class SequenceGroup:
    """Rows with the same tokens: those that wait, and the tokens' blocks and logits once they are prefilled.

    token_ids: int64 [n] on the host: the prompt, and the `begun` tokens of the completion that the rows already have.
    blocks_per_row: the most blocks that a row may need.
    """

    token_ids: torch.Tensor
    begun: int
    waiting: list[int]
    blocks_per_row: int = 0
    blocks: list[int] = field(default_factory=list)
    logits: torch.Tensor | None = None  # after the tokens, float32 [vocab]

    @property
    def num_full_blocks(self) -> int:
        """Blocks that the tokens fill."""
        return len(self.token_ids) // BLOCK_SIZE


def group_by_prompt(
    contexts: list[torch.Tensor], begun: list[int], limits: list[int], rows: list[int]
) -> list[SequenceGroup]:
    """Rows grouped by equal tokens, in the order of first appearance.

    contexts, begun: as SequenceGroup's, of each row.  limits: the most tokens of each row's completion.
    """
    groups: dict[tuple[bytes, int], SequenceGroup] = {}
    for row, token_ids, length, limit in zip(rows, contexts, begun, limits, strict=True):
        key = token_ids.numpy().tobytes(), length
        group = groups.setdefault(key, SequenceGroup(token_ids, length, []))
        group.blocks_per_row = max(group.blocks_per_row, blocks_for(len(token_ids) - length + limit))
        group.waiting.append(row)
    return list(groups.values())


@dataclass
class OpenQuota:
    """A Quota that is not reached yet.

    group_of: for each row that has not ended, the rows of its group.  missing: how many rows of each group have not
    ended.  left: groups that must still end.  asks: as Quota's.  complete: groups of which it has not been asked yet.
    """

    group_of: dict[int, tuple[int, ...]]
    missing: dict[tuple[int, ...], int]
    left: int
    asks: bool
    complete: list[tuple[int, ...]] = field(default_factory=list)

    @classmethod
    def of(cls, quota: Quota) -> "OpenQuota":
        """A quota of which no row has ended."""
        group_of = {row: group for group in quota.groups for row in group}
        return cls(group_of, {group: len(group) for group in quota.groups}, quota.count, quota.asks)

    def end(self, row: int) -> None:
        """A row has ended."""
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

    def ask(self, counts: Callable[[list[int]], bool]) -> None:
        """Count the complete groups for which `counts` gives True."""
        complete, self.complete = self.complete, []
        for group in complete:
            self.left -= bool(counts(list(group)))


class Checked(NamedTuple):
    """A running sequence as `check` finds it.

    count: tokens of its row's completion so far.  length: the same, if the sequence is done, up to its end.
    left: tokens until its limit.  is_done: it has a stop token (has_stopped) or has reached its limit.
    """

    row: int
    count: int  # type: ignore[assignment]  # not tuple.count
    length: int
    left: int
    is_done: int
    has_stopped: int


class Scheduler:
    """Decodes a request: its rows wait, run, and leave once they have finished.

    max_num_seqs: sequences that run at once.
    num_scheduler_steps: the most decode steps between two checks for finished rows. By default 1 on CPUs, unless the
        kernels sample, which stop by themselves, and more on devices, which a check waits for.
    environment: of the rows, if the request has limits for one.
    on_end: called with rows that are done for good, and their results so far.
    counts: called with the rows of a complete group, and the results so far, where a quota asks.
    speculator: decides where steps verify drafts; None: nowhere.
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
        counts: Callable[[list[int], Completions], bool] | None = None,
        speculator: Speculator | None = None,
    ):
        if not decoder.samples_with_penalties:
            request = request.with_processors()
        self.request, self.decoder, self.block_pool = request, decoder, block_pool
        self.max_num_seqs, self.phase = max_num_seqs, phase
        self.samples_in_kernel = decoder.samples_in_kernel and request.processors is None
        self.continues_past_ends = self.samples_in_kernel and decoder.continues_past_ends
        on_cpu = STEPS_IN_KERNEL if self.samples_in_kernel else 1
        usual = on_cpu if decoder.device.type == "cpu" else STEPS_ON_DEVICES
        self.num_scheduler_steps = num_scheduler_steps or usual
        self.environment, self.on_end, self.counts = environment, on_end, counts
        self.outcomes = [RowOutcome() for _ in request.prompt_lengths]
        device = decoder.device
        self.runner = ModelRunner(decoder, block_pool, request.longest)
        self.buffers = CompletionBuffers(request, device, slack=self.num_scheduler_steps)
        self.running: list[tuple[int, int]] = []  # as of the last check: row and tokens of each running sequence
        self.speculation = None if speculator is None or request.runs_user_code else self.speculation_by(speculator)
        # By running sequence: its row of the request, the position of its next new token, and its latest token.
        self.rows, self.positions, self.latest_tokens = torch.zeros(3, 0, dtype=torch.int64, device=device)
        self.checksum = torch.zeros((), dtype=torch.int64, device=device)  # of all tokens, if ranks draw the same
        self.sampling_keys = request.sampling_keys
        # By row: the most tokens of its completion, and of its completion as of the end of its turn.
        self.row_limits, self.limits = request.limits_of_rows().tolist(), request.limits_of_rows().clone()
        # As of the last check: until a running sequence reaches its limit; where steps go on after ends, until all do.
        self.steps_left = request.max_new_tokens
        self.max_blocks: list[int] = []  # by running sequence: the most blocks that it may need
        self.routed = RoutedRows() if request.return_router_indices else None
        self.waiting: list[SequenceGroup] = []
        self.quotas = [OpenQuota.of(quota) for quota in request.quotas]
        self.ended: list[int] = []  # rows, since the last call of `on_end`
        for row, failure in request.failures.items():
            self.outcomes[row].error = failure.error
            self.end_row(row, failure.reason)

    def run(self) -> Completions:
        """Decode all rows."""
        rows = [row for row, outcome in enumerate(self.outcomes) if outcome.reason == "unfinished"]
        begun = self.request.begun_lengths()
        self.wait(rows, [begun[row] for row in rows])
        self.block_pool.reserve_call(self.max_blocks_in_use())
        self.decoder.reserve(self.request.longest)
        with self.phase("decode"):
            while self.waiting or len(self.runner) or self.num_away:
                if self.num_away:
                    self.receive()
                if self.waiting:
                    with self.phase("prefill"):
                        self.admit()
                if len(self.runner):
                    self.decode()
        if self.speculation is not None:
            self.speculation.remember(self.buffers.whole())
        return self.completions()

    def completions(self) -> Completions:
        """All rows, as far as they are."""
        router_indices = None if self.routed is None else self.routed.in_order(len(self.outcomes))
        return replace(self.buffers.completions(self.outcomes), router_indices=router_indices)

    @property
    def num_away(self) -> int:
        """Rows that wait for their environment."""
        return 0 if self.environment is None else len(self.environment.away)

    def wait(self, rows: list[int], begun: list[int]) -> None:
        """Let rows wait for admission, before those that do.  begun: the tokens that each row's completion has."""
        contexts, limits = self.buffers.contexts(rows, begun), [self.row_limits[row] for row in rows]
        self.waiting = group_by_prompt(contexts, begun, limits, rows) + self.waiting
        if self.environment is not None and (most := self.environment.limits.max_turn_tokens) is not None:
            of_turn = [min(limit, own + most) for limit, own in zip(limits, begun, strict=True)]
            self.limits[rows] = torch.tensor(of_turn, device=self.limits.device)

    def max_blocks_in_use(self) -> int:
        """The most blocks that are in use at once, in whatever order sequences end.

        Counted are each running sequence's own blocks, each running prompt's shared blocks, and, if rows wait, the
        blocks that their group keeps for them.
        """
        # Rows whose environment runs leave their blocks in the pool: room for as many as run.
        num_seqs = self.max_num_seqs * (1 if self.environment is None else 2)
        own = [group.blocks_per_row - group.num_full_blocks for group in self.waiting for _ in group.waiting]
        shared = sorted((group.num_full_blocks for group in self.waiting), reverse=True)
        waits = len(own) > num_seqs
        return sum(sorted(own, reverse=True)[:num_seqs]) + sum(shared[: num_seqs + waits]) + waits

    # ------------------------------------------------------------- admitting

    def admit(self) -> None:
        """Start waiting rows, as long as `max_num_seqs` and the blocks that the rows may need allow."""
        admitted = self.schedule()
        if not admitted and len(self.runner):
            return
        admitted = admitted or [self.oversized_row()]
        if new := [group for group, _ in admitted if not group.blocks]:
            blocks, logits = prefill(self.decoder, self.block_pool, [group.token_ids for group in new])
            for group, own, after in zip(new, blocks, logits, strict=True):
                group.blocks, group.logits = own, after
        for group, rows in admitted:
            self.allocate(group, rows)
        begun = [(row, group.begun, 0) for group, rows in admitted for row in rows]
        more = torch.tensor(begun, device=self.rows.device).unbind(1)
        running = self.rows, self.positions, self.latest_tokens
        self.rows, self.positions, self.latest_tokens = (torch.cat(pair) for pair in zip(running, more, strict=True))
        self.sample(torch.cat([group.logits.expand(len(rows), -1) for group, rows in admitted]), len(begun))
        self.waiting = [group for group in self.waiting if group.waiting]
        self.finish(self.check(1), 1)

    def schedule(self) -> list[tuple[SequenceGroup, list[int]]]:
        """Remove from the waiting rows, in their order, those that fit now, and return them by group."""
        admitted: list[tuple[SequenceGroup, list[int]]] = []
        num_seqs, free_blocks = self.max_num_seqs - len(self.runner), self.num_free_blocks()
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

    def oversized_row(self) -> tuple[SequenceGroup, list[int]]:
        """Remove and return the first waiting row, which fits only without the blocks that its group would keep for its
        other rows. Their prompt is prefilled again."""
        group = self.waiting[0]
        alone, row = replace(group, waiting=[]), group.waiting.pop(0)
        group.blocks, group.logits = [], None
        return alone, [row]

    def num_free_blocks(self) -> float:
        """Blocks that are neither in use nor promised to running sequences; infinity without a limit."""
        if self.block_pool.limit is None:
            return math.inf
        promised = sum(self.max_blocks) - sum(map(len, self.runner.blocks))
        return self.block_pool.limit - self.block_pool.num_used - promised

    def blocks_needed(self, group: SequenceGroup, count: int) -> int:
        """Additional blocks that a group may need for `count` of its rows.

        Full blocks of the prompt are shared; while other rows of the group wait, the group keeps the last, partly
        filled block.
        """
        full = group.num_full_blocks
        kept = blocks_for(len(group.token_ids)) - full if count < len(group.waiting) else 0
        return full + count * (group.blocks_per_row - full) + kept - len(group.blocks)

    def allocate(self, group: SequenceGroup, rows: list[int]) -> None:
        """Give rows of a prefilled group their blocks: full blocks are shared, the last one, which decoding writes to,
        is copied; the group's last row takes the group's own."""
        full, partial = group.blocks[: group.num_full_blocks], group.blocks[group.num_full_blocks :]
        is_last = not group.waiting
        copies = [self.block_pool.allocate(len(partial)) for _ in rows[is_last:]]
        self.block_pool.copy(partial * sum(map(len, copies)), [block for blocks in copies for block in blocks])
        for _ in rows[is_last:]:
            self.block_pool.ref(full)
        self.runner.add([full + blocks for blocks in copies + [partial] * is_last], [len(group.token_ids)] * len(rows))
        self.max_blocks += [group.blocks_per_row] * len(rows)
        if is_last:
            group.blocks = []

    # -------------------------------------------------------------- decoding

    def decode(self) -> None:
        """Decode by single steps or by steps that verify drafts, then remove the sequences that have ended."""
        start = time.perf_counter()
        drafting = None if self.speculation is None else self.plan_drafts()
        start = time.perf_counter() if drafting is None else start
        verified = None if drafting is None else self.verify(drafting)
        steps = self.single_steps() if verified is None else len(verified.step_tokens)
        if self.decoder.group is not None and self.runner.steps % CHECKED_STEPS < steps:
            self.require_same_tokens(self.decoder.group)
        unchecked = steps if verified is None else 1  # verification ends with the step that draws a stop token
        sequences = self.check(unchecked)
        if self.speculation is not None:
            self.speculation.observe([each.row for each in sequences], steps, verified, time.perf_counter() - start)
        self.finish(sequences, unchecked)

    def single_steps(self) -> int:
        """Decode up to `num_scheduler_steps` tokens for every sequence; gives how many."""
        steps = min(self.num_scheduler_steps, self.steps_left)
        self.runner.allocate_slots(steps, self.max_blocks)
        if self.samples_in_kernel:
            tokens, logps = self.runner.sampled_steps(self.latest_tokens, self.draws(len(self.runner)), steps)
            steps = len(tokens)
            self.record(tokens, logps)
        else:
            for _ in range(steps):
                self.sample(self.runner.step(self.latest_tokens), len(self.runner))
        return steps

    def draws(self, count: int) -> TokenDraws:
        """How the next tokens of the last `count` running sequences are sampled."""
        request, rows, positions = self.request, self.rows[-count:], self.positions[-count:]
        return TokenDraws(
            keys=self.sampling_keys[rows],
            positions=positions,
            limits=self.limits[rows],
            stop_token_ids=request.stop_token_ids,
            pad_token_id=request.pad_token_id,
            metadata=request.sampling_metadata,
            token_ids=None if not self.penalizes else self.buffers.token_ids(rows, positions),
            vocabulary=self.decoder.vocabulary,
            in_kernels=self.continues_past_ends,
            process=None if request.processors is None else self.sample_drafts,
        )

    @property
    def penalizes(self) -> bool:
        """Whether a draw depends on the tokens before it."""
        return self.request.sampling_metadata.repetition_penalty != 1.0

    def require_same_tokens(self, group: InferenceGroup) -> None:
        """Raise RuntimeError, on every rank of the group, unless the ranks have drawn the same tokens. A collective."""
        checksums = group.gather(self.checksum).tolist()
        if different := [rank for rank, checksum in enumerate(checksums) if checksum != checksums[0]]:
            raise RuntimeError(
                f"ranks that decode one batch have drawn different tokens by step {self.runner.steps}: ranks "
                f"{', '.join(map(str, different))} of the group differ from rank 0. Their weights, or the versions of "
                "torch or of the kernels that they run, are not equal"
            )

    def sample(self, logits: torch.Tensor, count: int) -> None:
        """Sample a token for each of the last `count` sequences from their logits [count, vocab]."""
        rows, positions = self.rows[-count:], self.positions[-count:]
        request = self.request
        if self.continues_past_ends:
            drawn = self.draws(count).drawn(logits)
        elif request.processors is None:
            settings = self.sampling_keys[rows], positions, request.sampling_metadata, self.decoder.vocabulary
            drawn = sample_tokens(logits, *settings)
        else:
            drawn = self.sample_processed(logits, rows, positions)
        self.record(drawn.tokens[None], drawn.logps()[:, None])

    def record(self, tokens: torch.Tensor, logps: torch.Tensor) -> None:
        """Add new tokens, int64 [steps, n], of the last n sequences, and their logprobs, float32 [3, steps, n]."""
        steps, count = tokens.shape
        rows, next_positions = self.rows[-count:], self.positions[-count:]
        positions = next_positions + torch.arange(steps, device=rows.device)[:, None]  # [steps, n]
        self.write(rows, positions, tokens, logps)
        self.latest_tokens[-count:] = tokens[-1]
        next_positions += steps

    def write(self, rows: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor, logps: torch.Tensor) -> None:
        """Write new tokens to the buffers, and count them in where ranks compare their tokens. As `record` there."""
        self.buffers.record(rows, positions, tokens, logps)
        if self.decoder.group is not None:
            self.checksum.mul_(31).add_(((rows + 1) * (positions + 1 + tokens)).sum())

    def sample_processed(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> SamplerOutput:
        """Tokens of `rows` int64 [n], drawn from their logits [n, vocab] after processors.

        Processors read logits of the whole vocabulary. Where ranks have slices of it, each rank draws for some rows.
        """
        request, vocabulary, count = self.request, self.decoder.vocabulary, len(rows)
        if vocabulary is not None:
            own_rows, logits = vocabulary.whole_of_own_rows(logits)
            rows, positions = rows[own_rows], positions[own_rows]
        scores = self.processed(logits, rows, positions)
        drawn = sample_tokens(scores, self.sampling_keys[rows], positions, request.sampling_metadata)
        drawn = replace(
            drawn,
            old_logps=selective_log_softmax(logits / request.logprob_temperature, drawn.tokens),
            raw_logps=selective_log_softmax(logits, drawn.tokens),
        )
        return drawn if vocabulary is None else of_all_rows(drawn, count, vocabulary)

    def processed(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Scores after processors, which get rows of one length at a time, as in Hugging Face's batches."""
        scores = torch.empty_like(logits)
        for position in positions.unique().tolist():
            here = (positions == position).nonzero().flatten()
            ids = self.buffers.ids[rows[here], : self.buffers.prompt_len + position]
            scores[here] = self.request.processors(ids, logits[here], rows[here])
        return scores

    def check(self, steps: int) -> list[Checked]:
        """Check the last `steps` tokens of every sequence. The one place where the host waits for the device, but for
        verification."""
        limits = self.limits[self.rows]
        remaining = limits - self.positions
        back = torch.arange(-steps, 0, device=self.positions.device)
        at = (self.positions[:, None] + back).clamp(min=0)  # [sequences, steps]
        tokens = self.buffers.ids[self.rows[:, None], self.buffers.prompt_len + at]
        # After its limit a row's tokens are padding, which may be a stop token.
        is_end = torch.isin(tokens, self.request.stop_token_ids) & (at < limits[:, None])
        first_end = at.gather(1, is_end.int().argmax(dim=1, keepdim=True))[:, 0]
        has_stopped = is_end.any(dim=1)
        lengths = torch.where(has_stopped, first_end + 1, self.positions + remaining.clamp(max=0))
        is_done = has_stopped | (remaining <= 0)
        numbers = self.rows, self.positions, lengths, remaining, is_done.long(), has_stopped.long()
        sequences = [Checked(*of_sequence) for of_sequence in torch.stack(numbers).T.tolist()]
        self.running = [(sequence.row, sequence.count) for sequence in sequences]
        return sequences

    def finish(self, sequences: list[Checked], steps: int) -> None:
        """Remove sequences that have ended.  sequences: as checked.  steps: since the check before."""
        stay = [index for index, sequence in enumerate(sequences) if not sequence.is_done]
        ended = [sequence for sequence in sequences if sequence.is_done]
        self.steps_left = (max if self.continues_past_ends else min)(
            (sequences[index].left for index in stay), default=0
        )
        if ended:
            self.remove(stay, [sequence.length for sequence in ended], steps)
        for sequence in ended:
            self.end_turn(sequence)
        self.ask_quotas()
        self.stop_unneeded()
        self.report()

    def remove(self, stay: list[int], lengths: list[int], steps: int) -> None:
        """Remove the sequences but those with the indices `stay`, ascending. Their blocks stay cached.

        lengths: of the removed rows' completions.  steps: since the last check.
        """
        leave = sorted(set(range(len(self.rows))) - set(stay))
        rows = self.rows[leave].tolist()
        self.buffers.end(rows, lengths, steps)
        # The latest token has not been run through the model.
        computed = self.buffers.contexts(rows, [length - 1 for length in lengths])
        blocks = [self.runner.blocks[index] for index in leave]
        for token_ids, own in zip(computed, blocks, strict=True):
            self.block_pool.insert(token_ids, own[: blocks_for(len(token_ids))])
        if self.routed is not None:
            self.routed.read(self.block_pool.kv, rows, blocks, [len(token_ids) + 1 for token_ids in computed])
        self.runner.keep(stay)
        staying = torch.tensor(stay, dtype=torch.int64, device=self.rows.device)
        self.rows, self.positions, self.latest_tokens = (
            by_sequence[staying] for by_sequence in (self.rows, self.positions, self.latest_tokens)
        )
        self.max_blocks = [self.max_blocks[index] for index in stay]
        self.running = [self.running[index] for index in stay]

    def ask_quotas(self) -> None:
        """Ask the caller which of the groups that are complete by now count."""
        for quota in self.quotas:
            if quota.complete:
                done = self.completions()
                quota.ask(partial(self._counts, done))

    def _counts(self, done: Completions, rows: list[int]) -> bool:
        return self.counts(rows, done)

    def stop_unneeded(self) -> None:
        """Stop the rows of quotas that are reached: they stay unfinished, with the tokens that they have."""
        stopped = {row for quota in self.quotas if quota.left <= 0 for row in quota.group_of}
        self.quotas = [quota for quota in self.quotas if quota.left > 0]
        if not stopped:
            return
        for group in self.waiting:
            waiting = [row for row in group.waiting if row not in stopped]
            self.buffers.lengths[[row for row in group.waiting if row in stopped]] = group.begun
            group.waiting = waiting
            if not waiting:
                self.block_pool.free(group.blocks)
        self.waiting = [group for group in self.waiting if group.waiting]
        stay = [index for index, row in enumerate(self.rows.tolist()) if row not in stopped]
        if len(stay) < len(self.rows):
            leave = sorted(set(range(len(self.rows))) - set(stay))
            self.remove(stay, self.positions[leave].tolist(), steps=1)

    # ----------------------------------------------------------- speculation

    def speculation_by(self, speculator: Speculator) -> Speculation:
        """The drafts of this request."""
        request, group = self.request, self.decoder.group
        prompts, vocabulary = request.prompt_ids.cpu(), self.decoder.vocabulary
        return Speculation(
            speculator,
            [ids[len(ids) - length :] for ids, length in zip(prompts, request.prompt_lengths, strict=True)],
            request.limits_of_rows().tolist(),
            request.stop_token_ids,
            self.decoder.spec.vocab_size if vocabulary is None else vocabulary.size,
            self.buffers.tokens_of,
            agree=None if group is None else partial(agreed_seconds, group, self.decoder.device),
        )

    def plan_drafts(self) -> Drafting | None:
        """The drafts of the next steps; None: single steps are faster, or other rows would end first of a quota's."""
        if self.quotas:
            return None
        rows, counts = zip(*self.running, strict=True)
        return self.speculation.plan(rows, counts)

    def verify(self, drafting: Drafting) -> VerifiedTokens:
        """Decode by steps that verify drafts. Draws that need the tokens before them know those of one step."""
        draws = self.draws(len(self.runner))
        steps = 1 if draws.needs_tokens else min(self.num_scheduler_steps, self.speculation.steps)
        verified = self.runner.verified_steps(self.latest_tokens, draws, drafting, steps, self.max_blocks)
        counts = torch.tensor(verified.counts.tokens, device=self.rows.device)
        each = torch.arange(len(verified.tokens), device=counts.device)[:, None]
        step, column = (each < counts).nonzero(as_tuple=True)
        positions, tokens = self.positions[column] + step, verified.tokens[step, column]
        self.write(self.rows[column], positions, tokens, verified.logps[:, step, column])
        self.latest_tokens = verified.tokens.gather(0, counts[None] - 1)[0]
        self.positions = self.positions + counts
        return verified

    def sample_drafts(
        self, logits: torch.Tensor, sequences: torch.Tensor, offsets: torch.Tensor, ids: torch.Tensor
    ) -> SamplerOutput:
        """`Draws.drawn_at` after processors, for which drafted tokens are in the buffers."""
        rows, positions = self.rows[sequences], self.positions[sequences] + offsets
        drafted = offsets > 0
        at = rows[drafted], self.buffers.prompt_len + positions[drafted] - 1
        self.buffers.ids[at] = ids[drafted]
        drawn = self.sample_processed(logits, rows, positions)
        self.buffers.ids[at] = self.request.pad_token_id
        return drawn

    # ----------------------------------------------------------------- turns

    def end_turn(self, sequence: Checked) -> None:
        """A row has a stop token or has reached its limit: it is done, or its environment makes a step."""
        row, length = sequence.row, sequence.length
        if self.environment is None or not (sequence.has_stopped or length < self.row_limits[row]):
            self.end_row(row, "stop" if sequence.has_stopped else "length")
            return
        self.environment.submit(row, self.buffers.tokens_of(row, self.turn_begin(row), length))

    def turn_begin(self, row: int) -> int:
        """Where a row's current turn begins in its completion."""
        turns = self.outcomes[row].turns
        return turns[-1].observed if turns else 0

    def end_row(self, row: int, reason: str) -> None:
        """A row is done."""
        self.outcomes[row].reason = reason
        if self.speculation is not None:
            self.speculation.end(row, int(self.buffers.lengths[row]))
        for quota in self.quotas:
            quota.end(row)
        self.ended.append(row)

    def report(self) -> None:
        """Call `on_end` with the rows that have ended since the last call."""
        ended, self.ended = self.ended, []
        if ended and self.on_end is not None:
            self.on_end(ended, self.completions())

    def receive(self) -> None:
        """Take the steps that environments have made; wait for one if no row can decode."""
        is_idle = not self.waiting and not len(self.runner)
        with self.phase("environment") if is_idle else nullcontext():
            steps = self.environment.collect(is_idle)
        for stepped in steps:
            self.take_step(stepped)
        self.report()

    def take_step(self, stepped: Stepped) -> None:
        """Go on with a row after its environment's step, or end it."""
        row, outcome, observation = stepped.row, self.outcomes[stepped.row], stepped.value
        begin, end = self.turn_begin(row), int(self.buffers.lengths[row])
        if stepped.error:
            outcome.turns.append(Turn(begin, end, end, None, stepped.seconds))
            outcome.error = stepped.error
            self.end_row(row, "environment_timeout" if stepped.timed_out else "environment_error")
            return
        goes_on = not observation.done and outcome.num_turns + 1 < self.environment.limits.max_turns
        appended = observation.ids if goes_on and observation.prompt_ids is None else []
        fits = end + len(appended) < self.row_limits[row]
        observed = end + len(appended) * fits
        outcome.turns.append(Turn(begin, end, observed, observation.reward, stepped.seconds))
        if not goes_on:
            self.end_row(row, "stop" if observation.done else "turns")
        elif observation.prompt_ids is not None:
            self.fork(row, end, observation.prompt_ids)
        elif fits:
            self.buffers.extend(row, end, appended)
            self.buffers.lengths[row] = observed
            self.wait([row], [observed])
        else:
            self.end_row(row, "length")

    def fork(self, row: int, length: int, prompt_ids: list[int]) -> None:
        """Keep what a row has as a training row of its own, and go on from another prompt, with other sampling keys."""
        outcome, request = self.outcomes[row], self.request
        if request.processors is not None:
            raise NotImplementedError(
                "an environment that rewrites the history (Observation.prompt_ids) with repetition_penalty or "
                "min_new_tokens is not available on this device; leave them out, or append to the history"
            )
        routed = None if self.routed is None else self.routed.rows[row]
        outcome.forks.append(replace(self.buffers.fork(row, length, outcome.turns), router_indices=routed))
        outcome.turns, outcome.prompt_ids = [], torch.tensor(prompt_ids, dtype=torch.int64)
        self.buffers.restart(row, prompt_ids)
        if self.speculation is not None:
            self.speculation.restart(row, outcome.prompt_ids)
        self.buffers.lengths[row] = 0
        limit = min(self.row_limits[row], request.longest - len(prompt_ids))
        if limit < 1:
            self.end_row(row, "length")
            return
        self.row_limits[row], self.limits[row] = limit, limit
        self.sampling_keys = self.sampling_keys.index_put((torch.tensor(row),), mixed(self.sampling_keys[row] + 1))
        self.wait([row], [0])


def agreed_seconds(group: InferenceGroup, device: torch.device, seconds: list[float]) -> list[float]:
    """The most of the seconds that each rank has measured. A collective of the group."""
    return group.gather(torch.tensor(seconds, dtype=torch.float64, device=device)).amax(dim=0).tolist()
