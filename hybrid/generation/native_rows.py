"""Rows that a model's own forward decodes together, over a Hugging Face cache that rows leave and join."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GenerationConfig

from hybrid.generation.generate import decoded_by
from hybrid.generation.hf_cache import KVCache, copied_rows, is_filled, is_recurrent, join_rows, select_rows
from hybrid.generation.lockstep import NativeForward
from hybrid.generation.request import ENCODED, GenerateInputs, padded_left
from hybrid.models.model_inputs import RowInputs, joined_inputs

ROW_INPUTS = "attention_mask", "position_ids"  # [rows, tokens], and [..., rows, tokens]; both may be None


class NativeRows:
    """Rows of one cache, each padded on the left to the longest one.

    forward: has the cache, and the mask and the positions of the rows.
    ids: int64 [rows, tokens], of the tokens in the cache.
    lengths: tokens of each row, without padding.
    experts: for each row, the experts of its tokens, int16 [tokens, layers, experts per token] each; None: they are not
        recorded.
    """

    def __init__(
        self,
        forward: NativeForward,
        ids: torch.Tensor,
        lengths: list[int],
        experts: list[list[torch.Tensor]] | None,
    ):
        self.forward, self.ids, self.lengths, self.experts = forward, ids, lengths, experts

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def prefill(
        cls,
        model: nn.Module,
        prompts: Sequence[torch.Tensor],
        config: GenerationConfig,
        device: torch.device,
        calls: list[list[torch.Tensor]] | None = None,
        model_inputs: Sequence[RowInputs] = (),
    ) -> "tuple[NativeRows, torch.Tensor]":
        """Run prompts, int64 [n] each on the host, through a model, whose `generate()` prepares the cache by `config`.

        calls: of `recorded_routing`; None: no experts are recorded.
        model_inputs: of each prompt, besides token ids; empty: they are text.
        Returns the rows, and the logits after each, [rows, vocab].
        """
        lengths = [len(prompt) for prompt in prompts]
        ids = torch.stack([padded_left(prompt, max(lengths)) for prompt in prompts])
        padding = max(lengths) - torch.tensor(lengths)
        ids, mask = ids.to(device), (torch.arange(max(lengths)) >= padding[:, None]).long().to(device)

        def prefill(model: nn.Module, inputs: GenerateInputs) -> tuple[NativeForward, torch.Tensor]:
            forward = NativeForward(model, inputs, None, expands=True, model_inputs={*more, ENCODED})
            return forward, forward.prefill_rows(inputs.input_ids).logits[:, -1]

        more = joined_inputs(model_inputs, mask)
        kwargs = {"attention_mask": mask, "generation_config": copy.deepcopy(config), "use_cache": True, **more}
        forward, logits = decoded_by(prefill, model, (ids,), kwargs)
        rows = cls(forward, ids, lengths, None if calls is None else [[] for _ in lengths])
        rows.record(calls, ids.shape[1])
        return rows, logits

    @property
    def selects(self) -> bool:
        """Whether rows can be selected: all that belongs to a row is in the cache, the mask and the positions."""
        return self.forward.expands and is_filled(self.forward.cache, self.ids.shape[1])

    @property
    def continues(self) -> bool:
        """Whether several tokens at once may follow."""
        return self.selects and not is_recurrent(self.forward.cache)

    def extend(self, tokens: torch.Tensor, calls: list[list[torch.Tensor]] | None = None) -> torch.Tensor:
        """Append tokens, int64 [rows, n], to the rows; returns the logits after them, [rows, vocab]."""
        count = tokens.shape[1]
        self.ids = torch.cat([self.ids, tokens], dim=1)
        self.lengths = [length + count for length in self.lengths]
        if count > 1:
            self._widen(count - 1)
        logits = self.forward.step(self.ids, count).logits[:, -1]
        self.record(calls, count)
        return logits

    def record(self, calls: list[list[torch.Tensor]] | None, count: int) -> None:
        """Take the experts of the last forward's `count` tokens of each row out of `calls`."""
        if calls is None or self.experts is None:
            return
        by_layer = [call.pop().view(len(self), count, -1) for call in calls]
        for row, (experts, length) in enumerate(zip(self.experts, self.lengths, strict=True)):
            experts.append(torch.stack([layer[row, -min(count, length) :] for layer in by_layer], dim=1).cpu())

    def select(self, rows: Sequence[int]) -> None:
        """Keep the rows with these indices, repeats allowed, in this order, without columns that are padding in all of
        them."""
        index, drop = torch.tensor(rows, device=self.ids.device), self._padding(rows)
        select_rows(self.forward.cache, index, drop)
        self._take(rows, index, drop)

    def copied(self, rows: Sequence[int]) -> "NativeRows":
        """Return the rows with these indices, without columns that are padding in all of them, in memory of their
        own."""
        index, drop = torch.tensor(rows, device=self.ids.device), self._padding(rows)
        copied = copy.copy(self)
        copied.forward = copy.copy(self.forward)
        copied.forward.cache = copied_rows(self.forward.cache, index, drop)
        copied._take(rows, index, drop)
        return copied

    def _padding(self, rows: Sequence[int]) -> int:
        return self.ids.shape[1] - max(self.lengths[row] for row in rows)

    def _take(self, rows: Sequence[int], index: torch.Tensor, drop: int) -> None:
        inputs = {name: value for name in ROW_INPUTS if (value := self.forward.kwargs.get(name)) is not None}
        by_row = {name: value for name, value in inputs.items() if value.shape[-2] == len(self)}
        selected = {name: value.index_select(-2, index) for name, value in by_row.items()}
        cut = {name: value[..., drop:] for name, value in (inputs | selected).items()}
        self.forward.kwargs = self.forward.kwargs | cut
        self.ids, self.lengths = self.ids[index][:, drop:], [self.lengths[row] for row in rows]
        if self.experts is not None:
            self.experts = [list(self.experts[row]) for row in rows]

    def join(self, others: "Sequence[NativeRows]") -> None:
        """Append the rows of others."""
        parts = [self, *others]
        tokens = max(part.ids.shape[1] for part in parts)
        inputs = {name: [part._input(name, tokens) for part in parts] for name in ROW_INPUTS}
        if all(mask.all() for mask in inputs["attention_mask"]):  # as in `generate()`
            del inputs["attention_mask"]
        joined = {name: torch.cat(values, dim=-2) for name, values in inputs.items() if values[0] is not None}
        self.forward.kwargs = {**self.forward.kwargs, "attention_mask": None, **joined}
        join_rows(self.forward.cache, [part.forward.cache for part in others], tokens)
        self.ids = torch.cat([padded_left(part.ids, tokens) for part in parts])
        self.lengths = [length for part in parts for length in part.lengths]
        if self.experts is not None:
            self.experts = [experts for part in parts for experts in part.experts or ()]

    def _input(self, name: str, tokens: int) -> Any:
        """Return the mask or the positions of the rows in a cache of `tokens` tokens, and of the next token."""
        value: Any = self.forward.kwargs.get(name)
        if name == "attention_mask" and value is None:
            value = self.ids.new_ones(len(self), self.ids.shape[1] + 1)
        if value is None:
            return None
        if value.shape[-2] != len(self):  # one row of positions for all
            value = value.expand(*value.shape[:-2], len(self), -1)
        return F.pad(value, (tokens - self.ids.shape[1], 0))

    def _widen(self, count: int) -> None:
        """Make the mask and the positions ready for `count` tokens more than the next one."""
        mask, positions = (self.forward.kwargs.get(name) for name in ROW_INPUTS)
        if mask is not None:
            self.forward.kwargs["attention_mask"] = F.pad(mask, (0, count), value=1)
        if positions is not None:
            more = positions[..., -1:] + torch.arange(1, count + 1, device=positions.device)
            self.forward.kwargs["position_ids"] = torch.cat([positions, more], dim=-1)

    def store(self, kv_cache: KVCache) -> None:
        """Move keys and values to a storage in which they grow in place."""
        if self.selects:
            kv_cache.take_over(self.forward.cache)
