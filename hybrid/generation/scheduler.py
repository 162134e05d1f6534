"""Continuous batching: equal prompts are prefilled once, ended sequences leave at once, waiting ones take their
place.
"""

import math
from dataclasses import dataclass, field, fields, replace

import torch

from hybrid.decoders.batch import BLOCK_SIZE
from hybrid.decoders.fused_model import AnyDecoder
from hybrid.generation.block_pool import BlockPool, blocks_for
from hybrid.generation.draws import TokenDraws
from hybrid.generation.model_runner import ModelRunner, prefill
from hybrid.generation.request import Request
from hybrid.generation.routing import RoutedRows
from hybrid.generation.sampler import SamplerOutput, of_all_rows, sample_tokens, selective_log_softmax
from hybrid.parallel import InferenceGroup
from hybrid.profiling import Phase

STEPS_ON_DEVICES = 8  # decode steps between two checks for ended sequences
STEPS_IN_KERNEL = 16  # the same where kernels sample; a keyboard interrupt waits for them
CHECKED_STEPS = 32  # ranks that decode one batch compare their tokens every so many steps


@dataclass(frozen=True)
class Completions:
    """The decoded rows.

    tokens: int64 [rows, max_new_tokens], padded after each row's length.
    lengths: int64 [rows], the end token included.
    sampling_logps: float32 [rows, max_new_tokens], 0 after the length: under the distribution drawn from, after
        processors and truncation.
    old_logps, raw_logps: the same under the model's own logits, at the request's temperature and at 1.
    The logprobs are None if they were not asked for.
    router_indices: by row, as RoutedRows gives them; None if they were not asked for.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    sampling_logps: torch.Tensor | None = None
    old_logps: torch.Tensor | None = None
    raw_logps: torch.Tensor | None = None
    router_indices: list[torch.Tensor] | None = None

    def rows(self, first: int, count: int) -> "Completions":
        """`count` rows from `first` on."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: t[first : first + count] for name, t in tensors.items() if t is not None})

    def cut(self, limits: torch.Tensor, pad_token_id: int) -> "Completions":
        """The same, each row no longer than its limit, int64 [rows]."""
        lengths = torch.minimum(self.lengths, limits)
        behind = torch.arange(self.tokens.shape[1], device=lengths.device) >= lengths[:, None]
        return replace(self, tokens=self.tokens.masked_fill(behind, pad_token_id), lengths=lengths)

    def trimmed(self) -> "Completions":
        """The same, as wide as the longest row."""
        width = int(self.lengths.max())
        by_position = {name: getattr(self, name) for name in ("tokens", "sampling_logps", "old_logps", "raw_logps")}
        return replace(self, **{name: t[:, :width] for name, t in by_position.items() if t is not None})


@dataclass
class SequenceGroup:
    """Rows with the same prompt: those that wait, and the prompt's blocks and logits once it is prefilled.

    num_full_blocks: of the prompt.  blocks_per_row: the most blocks that a row may need.
    """

    prompt: torch.Tensor
    waiting: list[int]
    num_full_blocks: int
    blocks_per_row: int
    blocks: list[int] = field(default_factory=list)
    logits: torch.Tensor | None = None  # after the prompt, float32 [vocab]


def group_by_prompt(request: Request) -> list[SequenceGroup]:
    """The request's rows grouped by prompt, in the order of first appearance."""
    groups: dict[bytes, SequenceGroup] = {}
    limits = request.limits_of_rows().tolist()
    for row, (ids, length) in enumerate(zip(request.prompt_ids.cpu(), request.prompt_lengths, strict=True)):
        prompt = ids[len(ids) - length :]
        group = groups.setdefault(prompt.numpy().tobytes(), SequenceGroup(prompt, [], length // BLOCK_SIZE, 0))
        group.blocks_per_row = max(group.blocks_per_row, blocks_for(length + limits[row]))
        group.waiting.append(row)
    return list(groups.values())


class Scheduler:
    """Decodes a request: its rows wait, run, and leave once they have finished.

    max_num_seqs: sequences that run at once.
    num_scheduler_steps: the most decode steps between two checks for finished rows. By default 1 on CPUs, unless the
        kernels sample, which stop by themselves, and more on devices, which a check waits for.
    """

    def __init__(
        self,
        request: Request,
        decoder: AnyDecoder,
        block_pool: BlockPool,
        max_num_seqs: int,
        phase: Phase,
        num_scheduler_steps: int | None = None,
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
        self.waiting = group_by_prompt(request)
        self.runner = ModelRunner(decoder, block_pool, request.longest)
        count, self.prompt_len = request.prompt_ids.shape
        device, new = decoder.device, request.max_new_tokens
        # By row of the request: the padded prompt and its completion, as processors see them, and the logprobs. Steps
        # after a row's limit write behind them.
        width = new + self.num_scheduler_steps
        self.ids = torch.full((count, self.prompt_len + width), request.pad_token_id, dtype=torch.int64, device=device)
        self.ids[:, : self.prompt_len] = request.prompt_ids
        self.padding = request.padding_lengths()
        self.logps = torch.zeros(3, count, width, device=device)  # sampling, old, raw
        self.lengths = torch.zeros(count, dtype=torch.int64)
        # By running sequence: its row of the request, the position of its next new token, and its latest token.
        self.rows, self.positions, self.latest_tokens = torch.zeros(3, 0, dtype=torch.int64, device=device)
        self.checksum = torch.zeros((), dtype=torch.int64, device=device)  # of all tokens, if ranks draw the same
        self.limits = request.limits_of_rows()  # by row of the request
        # As of the last check: until a running sequence reaches its limit; where steps go on after ends, until all do.
        self.steps_left = new
        self.max_blocks: list[int] = []  # by running sequence: the most blocks that it may need
        self.routed = RoutedRows() if request.return_router_indices else None

    def run(self) -> Completions:
        """Decode all rows."""
        self.block_pool.reserve_call(self.max_blocks_in_use())
        self.decoder.reserve(self.request.longest)
        with self.phase("decode"):
            while self.waiting or len(self.runner):
                if self.waiting:
                    with self.phase("prefill"):
                        self.admit()
                if len(self.runner):
                    self.decode()
        new = self.request.max_new_tokens
        tokens = self.ids[:, self.prompt_len : self.prompt_len + new]
        router_indices = None if self.routed is None else self.routed.in_order()
        return Completions(tokens, self.lengths.to(tokens.device), *self.logps[:, :, :new], router_indices)

    def max_blocks_in_use(self) -> int:
        """The most blocks that are in use at once, in whatever order sequences end.

        Counted are each running sequence's own blocks, each running prompt's shared blocks, and, if rows wait, the
        blocks that their group keeps for them.
        """
        own = [group.blocks_per_row - group.num_full_blocks for group in self.waiting for _ in group.waiting]
        shared = sorted((group.num_full_blocks for group in self.waiting), reverse=True)
        waits = len(own) > self.max_num_seqs
        return sum(sorted(own, reverse=True)[: self.max_num_seqs]) + sum(shared[: self.max_num_seqs + waits]) + waits

    # ------------------------------------------------------------- admitting

    def admit(self) -> None:
        """Start waiting rows, as long as `max_num_seqs` and the blocks that the rows may need allow."""
        admitted = self.schedule()
        if not admitted and len(self.runner):
            return
        admitted = admitted or [self.oversized_row()]
        if new := [group for group, _ in admitted if not group.blocks]:
            blocks, logits = prefill(self.decoder, self.block_pool, [group.prompt for group in new])
            for group, own, after in zip(new, blocks, logits, strict=True):
                group.blocks, group.logits = own, after
        for group, rows in admitted:
            self.allocate(group, rows)
        rows = torch.tensor([row for _, rows in admitted for row in rows], device=self.rows.device)
        zeros = torch.zeros_like(rows)
        self.rows = torch.cat([self.rows, rows])
        self.positions, self.latest_tokens = (torch.cat([old, zeros]) for old in (self.positions, self.latest_tokens))
        self.sample(torch.cat([group.logits.expand(len(rows), -1) for group, rows in admitted]), len(rows))
        self.waiting = [group for group in self.waiting if group.waiting]
        self.finish(1)

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
        kept = blocks_for(len(group.prompt)) - full if count < len(group.waiting) else 0
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
        self.runner.add([full + blocks for blocks in copies + [partial] * is_last], [len(group.prompt)] * len(rows))
        self.max_blocks += [group.blocks_per_row] * len(rows)
        if is_last:
            group.blocks = []

    # -------------------------------------------------------------- decoding

    def decode(self) -> None:
        """Decode up to `num_scheduler_steps` tokens for every sequence, then remove those that have ended."""
        steps = min(self.num_scheduler_steps, self.steps_left)
        self.runner.allocate_slots(steps, self.max_blocks)
        if self.samples_in_kernel:
            tokens, logps = self.runner.sampled_steps(self.latest_tokens, self.draws(len(self.runner)), steps)
            steps = len(tokens)
            self.record(tokens, logps)
        else:
            for _ in range(steps):
                self.sample(self.runner.step(self.latest_tokens), len(self.runner))
        if self.decoder.group is not None and self.runner.steps % CHECKED_STEPS < steps:
            self.require_same_tokens(self.decoder.group)
        self.finish(steps)

    def token_ids(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """The tokens that rows have so far, int64 [n, tokens], and -1 elsewhere; None without a repetition penalty."""
        if self.request.sampling_metadata.repetition_penalty == 1.0:
            return None
        columns, ends = torch.arange(self.ids.shape[1], device=rows.device), self.prompt_len + positions[:, None]
        is_token = (columns >= self.padding[rows, None]) & (columns < ends)
        return self.ids[rows].masked_fill(~is_token, -1)

    def draws(self, count: int) -> TokenDraws:
        """How the next tokens of the last `count` running sequences are sampled."""
        request, rows, positions = self.request, self.rows[-count:], self.positions[-count:]
        return TokenDraws(
            keys=request.sampling_keys[rows],
            positions=positions,
            limits=self.limits[rows],
            stop_token_ids=request.stop_token_ids,
            pad_token_id=request.pad_token_id,
            metadata=request.sampling_metadata,
            token_ids=self.token_ids(rows, positions),
            vocabulary=self.decoder.vocabulary,
        )

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
            settings = request.sampling_keys[rows], positions, request.sampling_metadata, self.decoder.vocabulary
            drawn = sample_tokens(logits, *settings)
        else:
            drawn = self.sample_processed(logits, rows, positions)
        self.record(drawn.tokens[None], drawn.logps()[:, None])

    def record(self, tokens: torch.Tensor, logps: torch.Tensor) -> None:
        """Add new tokens, int64 [steps, n], of the last n sequences, and their logprobs, float32 [3, steps, n]."""
        steps, count = tokens.shape
        rows, next_positions = self.rows[-count:], self.positions[-count:]
        positions = next_positions + torch.arange(steps, device=rows.device)[:, None]  # [steps, n]
        self.ids[rows, self.prompt_len + positions] = tokens
        self.logps[:, rows, positions] = logps
        self.latest_tokens[-count:] = tokens[-1]
        if self.decoder.group is not None:
            self.checksum.mul_(31).add_(((rows + 1) * (positions + 1 + tokens)).sum())
        next_positions += steps

    def sample_processed(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> SamplerOutput:
        """Tokens of `rows` int64 [n], drawn from their logits [n, vocab] after processors.

        Processors read logits of the whole vocabulary. Where ranks have slices of it, each rank draws for some rows.
        """
        request, vocabulary, count = self.request, self.decoder.vocabulary, len(rows)
        if vocabulary is not None:
            own_rows, logits = vocabulary.whole_of_own_rows(logits)
            rows, positions = rows[own_rows], positions[own_rows]
        scores = self.processed(logits, rows, positions)
        drawn = sample_tokens(scores, request.sampling_keys[rows], positions, request.sampling_metadata)
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
            ids = self.ids[rows[here], : self.prompt_len + position]
            scores[here] = self.request.processors(ids, logits[here], rows[here])
        return scores

    def finish(self, steps: int) -> None:
        """Check the last `steps` tokens of every sequence; record the lengths of ended sequences and remove them. The
        one place where the host waits for the device."""
        left = self.limits[self.rows] - self.positions
        back = torch.arange(-steps, 0, device=self.positions.device)
        at = (self.positions[:, None] + back).clamp(min=0)  # [sequences, steps]
        is_end = torch.isin(self.ids[self.rows[:, None], self.prompt_len + at], self.request.stop_token_ids)
        first_end = at.gather(1, is_end.int().argmax(dim=1, keepdim=True))[:, 0]
        has_ended = is_end.any(dim=1)
        lengths = torch.where(has_ended, first_end + 1, self.positions + left.clamp(max=0))
        is_done = has_ended | (left <= 0)
        rows, lengths, left, is_done = torch.stack([self.rows, lengths, left, is_done.long()]).tolist()
        stay = [index for index, ended in enumerate(is_done) if not ended]
        self.steps_left = (max if self.continues_past_ends else min)((left[index] for index in stay), default=0)
        if len(stay) == len(rows):
            return
        ended = [index for index, done in enumerate(is_done) if done]
        ended_rows, ended_lengths = ([of_all[index] for index in ended] for of_all in (rows, lengths))
        self.clear_after(ended_rows, ended_lengths, steps)
        if self.routed is not None:
            totals = [self.request.prompt_lengths[row] + n for row, n in zip(ended_rows, ended_lengths, strict=True)]
            self.routed.read(self.block_pool.kv, ended_rows, [self.runner.blocks[index] for index in ended], totals)
        self.runner.keep(stay)
        staying = torch.tensor(stay, dtype=torch.int64, device=self.rows.device)
        self.rows, self.positions, self.latest_tokens = (
            by_sequence[staying] for by_sequence in (self.rows, self.positions, self.latest_tokens)
        )
        self.max_blocks = [self.max_blocks[index] for index in stay]

    def clear_after(self, rows: list[int], lengths: list[int], steps: int) -> None:
        """Record the lengths of ended rows, and clear the tokens that the last `steps` steps drew after their ends."""
        self.lengths[rows] = torch.tensor(lengths)
        if steps == 1:
            return
        device = self.ids.device
        rows, lengths = torch.tensor([rows, lengths], device=device)
        behind = torch.arange(self.logps.shape[2], device=device) >= lengths[:, None]
        completions = self.ids[rows, self.prompt_len :]
        self.ids[rows, self.prompt_len :] = completions.masked_fill(behind, self.request.pad_token_id)
        self.logps[:, rows] = self.logps[:, rows].masked_fill(behind, 0.0)
