"""Continuous batching: equal prompts are prefilled once, ended sequences leave at once, waiting ones take their
place.
"""

import math
from dataclasses import dataclass, field, replace

import torch

from hybrid.decoders.batch import BLOCK_SIZE
from hybrid.generation.block_pool import BlockPool, blocks_for
from hybrid.generation.model_runner import Decoder, ModelRunner, prefill
from hybrid.generation.request import Request
from hybrid.generation.sampling import Drawn, draw_tokens, selective_log_softmax
from hybrid.profiling import Phase


@dataclass(frozen=True)
class Completions:
    """The decoded rows.

    tokens: int64 [rows, max_new_tokens], padded after each row's length.
    lengths: int64 [rows], the end token included.
    sampling_logps: float32 [rows, max_new_tokens], 0 after the length: under the distribution drawn from, after
        processors and truncation.
    old_logps, raw_logps: the same under the model's own logits, at the request's temperature and at 1.
    The logprobs are None if they were not asked for.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    sampling_logps: torch.Tensor | None = None
    old_logps: torch.Tensor | None = None
    raw_logps: torch.Tensor | None = None

    def trimmed(self) -> "Completions":
        """The same, as wide as the longest row."""
        width = int(self.lengths.max())
        names = ("tokens", "sampling_logps", "old_logps", "raw_logps")
        return replace(self, **{name: getattr(self, name)[:, :width] for name in names})


@dataclass
class Group:
    """Rows with the same prompt: those that wait, and the prompt's blocks and logits once it is prefilled."""

    prompt: torch.Tensor
    waiting: list[int]
    blocks: list[int] = field(default_factory=list)
    logits: torch.Tensor | None = None  # after the prompt, float32 [vocab]


def equal_prompts(padded: torch.Tensor, lengths: list[int]) -> list[Group]:
    """Rows grouped by prompt, in the order of first appearance."""
    groups: dict[bytes, Group] = {}
    for row, (ids, length) in enumerate(zip(padded.cpu(), lengths, strict=True)):
        prompt = ids[len(ids) - length :]
        groups.setdefault(prompt.numpy().tobytes(), Group(prompt, [])).waiting.append(row)
    return list(groups.values())


class Scheduler:
    """The rows of one call: waiting, being decoded, finished."""

    def __init__(
        self,
        request: Request,
        decoder: Decoder,
        block_pool: BlockPool,
        max_num_seqs: int,
        num_scheduler_steps: int,
        phase: Phase,
    ):
        self.request, self.decoder, self.block_pool = request, decoder, block_pool
        self.max_num_seqs, self.num_scheduler_steps, self.phase = max_num_seqs, num_scheduler_steps, phase
        self.queue = equal_prompts(request.prompt_ids, request.prompt_lengths)
        self.runner = ModelRunner(decoder, block_pool, request.longest)
        count, self.prompt_len = request.prompt_ids.shape
        device, new = decoder.device, request.max_new_tokens
        # By row of the request: the padded prompt and its completion, as processors see them, and the logprobs.
        self.ids = torch.full((count, self.prompt_len + new), request.pad_token_id, dtype=torch.int64, device=device)
        self.ids[:, : self.prompt_len] = request.prompt_ids
        self.logps = torch.zeros(3, count, new, device=device)  # sampling, old, raw
        self.lengths = torch.zeros(count, dtype=torch.int64)
        # By sequence being decoded: its row of the request, its number of new tokens, and its latest token.
        self.row = torch.zeros(0, dtype=torch.int64, device=device)
        self.made = torch.zeros(0, dtype=torch.int64, device=device)
        self.last = torch.zeros(0, dtype=torch.int64, device=device)
        self.most_made = 0  # the largest of `made`, as of the last check
        self.most_blocks: list[int] = []  # by sequence being decoded: the most blocks that it may need

    def run(self) -> Completions:
        """Decode all rows."""
        self.block_pool.reserve_call(self.blocks_at_once())
        self.decoder.reserve(self.request.longest)
        with self.phase("decode"):
            while self.queue or len(self.runner):
                if self.queue:
                    with self.phase("prefill"):
                        self.admit()
                if len(self.runner):
                    self.advance()
        tokens = self.ids[:, self.prompt_len :]
        return Completions(tokens, self.lengths.to(tokens.device), *self.logps)

    def blocks_at_once(self) -> int:
        """The most blocks that are in use at once, in whatever order sequences end.

        Counted are each decoded sequence's own blocks, each decoded prompt's shared blocks, and, if rows wait, the
        blocks that their group keeps for them.
        """
        own = [
            self.blocks_of_row(group) - len(group.prompt) // BLOCK_SIZE for group in self.queue for _ in group.waiting
        ]
        shared = sorted((len(group.prompt) // BLOCK_SIZE for group in self.queue), reverse=True)
        waits = len(own) > self.max_num_seqs
        return sum(sorted(own, reverse=True)[: self.max_num_seqs]) + sum(shared[: self.max_num_seqs + waits]) + waits

    # ------------------------------------------------------------- admitting

    def admit(self) -> None:
        """Start waiting rows, as long as there are free places and the blocks that the rows may need."""
        chosen = self.fitting()
        if not chosen and len(self.runner):
            return
        if not chosen:
            chosen = [self.oversized_row()]
        self.prefill([group for group, _ in chosen if not group.blocks])
        for group, rows in chosen:
            self.allocate(group, rows)
        self.draw(torch.cat([group.logits.expand(len(rows), -1) for group, rows in chosen]), self.append_rows(chosen))
        self.queue = [group for group in self.queue if group.waiting]
        for group, _ in chosen:
            if not group.waiting:
                group.logits = None
        self.finish(1)

    def fitting(self) -> list[tuple[Group, list[int]]]:
        """Remove from the queue, in its order, the rows that fit now, and return them by group."""
        chosen: list[tuple[Group, list[int]]] = []
        free, room = self.max_num_seqs - len(self.runner), self.room()
        for group in self.queue:
            count = min(free, len(group.waiting))
            while count and self.blocks_needed(group, count) > room:
                count -= 1
            if not count:
                break
            free, room = free - count, room - self.blocks_needed(group, count)
            chosen.append((group, [group.waiting.pop(0) for _ in range(count)]))
            if group.waiting:
                break
        return chosen

    def oversized_row(self) -> tuple[Group, list[int]]:
        """Remove and return the first waiting row, which fits only without the blocks that its group would keep for its
        other rows. Their prompt is prefilled again.
        """
        first = self.queue[0]
        row = first.waiting.pop(0)
        lone = Group(first.prompt, [], first.blocks, first.logits)
        first.blocks, first.logits = [], None
        return lone, [row]

    def room(self) -> float:
        """Blocks that are neither in use nor promised to admitted rows; infinity without a limit."""
        if self.block_pool.limit is None:
            return math.inf
        to_come = sum(most - len(blocks) for most, blocks in zip(self.most_blocks, self.runner.blocks, strict=True))
        return self.block_pool.limit - self.block_pool.num_used - to_come

    def blocks_needed(self, group: Group, count: int) -> int:
        """Additional blocks that a group may need for `count` of its rows.

        Full blocks of the prompt are shared; while other rows of the group wait, the group keeps the last, partly
        filled block.
        """
        whole = len(group.prompt) // BLOCK_SIZE
        kept = blocks_for(len(group.prompt)) - whole if count < len(group.waiting) else 0
        return whole + count * (self.blocks_of_row(group) - whole) + kept - len(group.blocks)

    def blocks_of_row(self, group: Group) -> int:
        """The most blocks that a row of a group may need."""
        return blocks_for(len(group.prompt) + self.request.max_new_tokens)

    def prefill(self, groups: list[Group]) -> None:
        if not groups:
            return
        blocks, logits = prefill(self.decoder, self.block_pool, [group.prompt for group in groups])
        for group, own, after in zip(groups, blocks, logits, strict=True):
            group.blocks, group.logits = own, after

    def allocate(self, group: Group, rows: list[int]) -> None:
        """Give rows of a prefilled group their blocks: full blocks are shared, the last one, which decoding writes to,
        is copied.
        """
        length = len(group.prompt)
        whole, partial = group.blocks[: length // BLOCK_SIZE], group.blocks[length // BLOCK_SIZE :]
        own, copies = [], []
        for n in range(len(rows)):
            self.block_pool.ref(whole)
            last_of_group = not group.waiting and n == len(rows) - 1
            copies.append(partial if last_of_group else self.block_pool.allocate(len(partial)))
            own.append(whole + copies[-1])
        targets = [block for blocks in copies if blocks is not partial for block in blocks]
        self.block_pool.copy(partial * len(targets), targets)
        if not group.waiting:
            self.block_pool.free(whole)  # the group's own reference; its partial block went to its last row
            group.blocks = []
        self.runner.add(own, [length] * len(rows))
        self.most_blocks += [self.blocks_of_row(group)] * len(rows)

    def append_rows(self, chosen: list[tuple[Group, list[int]]]) -> int:
        """Add the admitted rows to the per-sequence tensors; returns their number."""
        rows = torch.tensor([row for _, rows in chosen for row in rows], device=self.row.device)
        zeros = torch.zeros_like(rows)
        self.row, self.made, self.last = (
            torch.cat(pair) for pair in ((self.row, rows), (self.made, zeros), (self.last, zeros))
        )
        return len(rows)

    # -------------------------------------------------------------- stepping

    def advance(self) -> None:
        """Decode up to `num_scheduler_steps` tokens for every sequence, then remove the ended ones."""
        steps = min(self.num_scheduler_steps, self.request.max_new_tokens - self.most_made)
        self.runner.make_room(steps)
        for _ in range(steps):
            self.draw(self.runner.step(self.last), len(self.runner))
        self.finish(steps)

    def draw(self, logits: torch.Tensor, count: int) -> None:
        """Draw a token for each of the last `count` sequences from their logits [count, vocab]."""
        request = self.request
        row, made = self.row[-count:], self.made[-count:]
        if request.processors is None:
            drawn = draw_tokens(logits, request.sampling_keys[row], made, request.draw)
            old, raw = drawn.old_logps, drawn.raw_logps
        else:
            drawn = self.draw_processed(logits, row, made)
            raw = selective_log_softmax(logits, drawn.tokens)
            old = selective_log_softmax(logits / request.logprob_temperature, drawn.tokens)
        self.ids[row, self.prompt_len + made] = drawn.tokens
        self.logps[:, row, made] = torch.stack([drawn.sampling_logps, old, raw])
        self.last[-count:] = drawn.tokens
        made += 1

    def draw_processed(self, logits: torch.Tensor, row: torch.Tensor, made: torch.Tensor) -> Drawn:
        """The draw after processors, which get rows of one length at a time, as in Hugging Face's batches."""
        scores = torch.empty_like(logits)
        for so_far in made.unique().tolist():
            here = (made == so_far).nonzero().flatten()
            ids = self.ids[row[here], : self.prompt_len + so_far]
            scores[here] = self.request.processors(ids, logits[here], row[here])
        return draw_tokens(scores, self.request.sampling_keys[row], made, self.request.draw)

    def finish(self, steps: int) -> None:
        """Check the last `steps` tokens of every sequence; record the lengths of ended sequences and remove them."""
        self.most_made = int(self.made.max())
        back = torch.arange(-steps, 0, device=self.made.device)
        at = (self.made[:, None] + back).clamp(min=0)  # [sequences, steps]
        recent = self.ids[self.row[:, None], self.prompt_len + at]
        is_end = torch.isin(recent, self.request.stop_token_ids)
        ended = is_end.any(dim=1)
        length = torch.where(ended, at.gather(1, is_end.int().argmax(dim=1, keepdim=True))[:, 0] + 1, self.made)
        done = ended | (self.made >= self.request.max_new_tokens)
        if not done.any():
            return
        row, length = self.row[done], length[done]
        self.lengths[row.cpu()] = length.cpu()
        if steps > 1:  # clear the tokens drawn after an end
            behind = torch.arange(self.request.max_new_tokens, device=row.device) >= length[:, None]
            self.ids[row, self.prompt_len :] = self.ids[row, self.prompt_len :].masked_fill(
                behind, self.request.pad_token_id
            )
            self.logps[:, row] = self.logps[:, row].masked_fill(behind, 0.0)
        stay = ~done
        self.runner.leave(stay)
        self.row, self.made, self.last = self.row[stay], self.made[stay], self.last[stay]
        self.most_blocks = [most for most, kept in zip(self.most_blocks, stay.tolist(), strict=True) if kept]
        self.most_made = int(self.made.max()) if len(self.made) else 0
