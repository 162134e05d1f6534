"""The teachers of distillation: other models, or the student itself; and completions with what teachers say of them.

A teacher reads a completion after its own prompt, which may say more than the student's. Of another model the loss gets
logprobs, top logprobs, or logits by chunks; a student that is its own teacher adds no weights.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, PreTrainedTokenizerBase

import hybrid
from rlhf_examples.common.actor import Evaluation
from rlhf_examples.common.arguments import DistillArguments
from rlhf_examples.common.distillation import (
    Divergence,
    divergence_from_top,
    divergence_of_logits,
    sampled_reverse_kl,
)
from rlhf_examples.common.engines import FrozenModel, load_frozen_model
from rlhf_examples.common.measures import data_source
from rlhf_examples.common.models import base_model_of, load_policy, load_tokenizer, require_model
from rlhf_examples.common.ranks import over_ranks
from rlhf_examples.common.rollouts import Experience, Row, forward_batch_size
from rlhf_examples.data.examples import pad, tokenize_texts
from rlhf_examples.data.texts import RecordFormat, texts_of_record


@dataclass(frozen=True)
class TaughtExperience(Experience):
    """Completions, and what their teachers say of them.  [rows, completion, ...] unless a field says more.

    teacher: [rows], the number of each row's teacher.
    teacher_logps: of the sampled tokens.  top_ids, top_logps: of the teacher's most probable ones, [..., k].
    teacher_prompt_ids, teacher_prompt_mask: [rows, teacher's prompt]; None: the student's prompts.
    """

    teacher: torch.Tensor | None = None
    teacher_logps: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_logps: torch.Tensor | None = None
    teacher_prompt_ids: torch.Tensor | None = field(default=None, metadata={"uncropped": True})
    teacher_prompt_mask: torch.Tensor | None = field(default=None, metadata={"uncropped": True})

    def as_the_teacher_reads(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The teacher's prompts with the completions, and their mask.  int64 [rows, tokens]"""
        if self.teacher_prompt_ids is None or self.teacher_prompt_mask is None:
            return self.sequences, self.attention_mask
        width = self.mask.shape[1]
        pairs = (self.teacher_prompt_ids, self.sequences), (self.teacher_prompt_mask, self.attention_mask)
        ids, mask = (torch.cat([prompt, whole[:, -width:]], dim=1) for prompt, whole in pairs)
        return ids, mask


@dataclass
class Teachers:
    """The teachers of a run.

    models: other models, one for all rows or one for each entry of `data_path`; empty: the policy is its own teacher.
    """

    policy: hybrid.HybridEngine
    tokenizer: PreTrainedTokenizerBase
    models: list[FrozenModel]
    args: DistillArguments

    @classmethod
    def load(
        cls, policy: hybrid.HybridEngine, tokenizer: PreTrainedTokenizerBase, args: DistillArguments
    ) -> "Teachers":
        """The teachers that the arguments name, asleep with `sleeping_teacher`."""
        load = partial(load_policy, attn_implementation=args.attn_implementation)
        names = args.teacher_model_name_or_path
        models = [load_frozen_model(load, name, args.dtype, args.offload_reference_model) for name in names]
        teachers = cls(policy, tokenizer, models, args)
        teachers.sleep()
        return teachers

    @staticmethod
    def check(tokenizer: PreTrainedTokenizerBase, args: DistillArguments) -> None:
        """Raises ValueError for a teacher that does not exist, that has another tokenizer than the student, or whose
        logits are of another number of tokens if the loss compares distributions.
        """
        for name in args.teacher_model_name_or_path:
            require_model("teacher_model_name_or_path", name, args.attn_implementation)
            problem = differing_token(tokenizer, load_tokenizer(name))
            if problem:
                raise ValueError(
                    f"teacher_model_name_or_path: {name!r} given, whose tokenizer is not the student's: {problem}; "
                    "distillation compares token by token: give a teacher with the student's tokenizer"
                )
            sizes = [vocabulary_size(model) for model in (name, args.actor_model_name_or_path)]
            if args.distillation_mode != "sampled_token" and sizes[0] != sizes[1]:
                raise ValueError(
                    f"teacher_model_name_or_path: {name!r} given, with logits of {sizes[0]} tokens, and the student's "
                    f"are of {sizes[1]}; give a teacher with as many, or distillation_mode: 'sampled_token'"
                )

    def sleep(self) -> None:
        """Let the teachers' weights leave the device, with `sleeping_teacher`."""
        if self.args.sleeping_teacher:
            for model in self.models:
                model.sleep(2)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Inside the block the teachers answer."""
        if self.args.sleeping_teacher:
            for model in self.models:
                model.wake()
        try:
            yield
        finally:
            self.sleep()

    def experience(self, batch: hybrid.RolloutBatch, prompts: list[Row]) -> TaughtExperience:
        """This rank's completions with what the loss needs of their teachers, in the rollout's window; equally wide on
        all ranks.  prompts: one for each completion.
        """
        fields: dict[str, torch.Tensor] = {"teacher": self.numbers(prompts)}
        if self.args.teacher_prompt_column:
            ids, mask = pad([self.prompt_of(row) for row in prompts], self.tokenizer.pad_token_id, left=True)
            width = int(over_ranks(torch.tensor(ids.shape[1], device=self.policy.device), dist.ReduceOp.MAX))
            more = width - ids.shape[1]
            padded = (torch.nn.functional.pad(tensor, (more, 0)) for tensor in (ids, mask))
            fields |= dict(zip(("teacher_prompt_ids", "teacher_prompt_mask"), padded, strict=True))
        rows = TaughtExperience(
            sequences=batch.sequences,
            attention_mask=batch.attention_mask,
            mask=batch.completion_mask,
            sampling_logps=batch.old_per_token_logps,
            old_logps=batch.old_per_token_logps,
            weights=torch.ones_like(batch.old_per_token_logps),
            advantages=torch.zeros(len(prompts), device=batch.sequences.device),
            **{name: tensor.to(batch.sequences.device) for name, tensor in fields.items()},
        )
        if self.args.compares_logits:
            return rows
        top_k = self.args.distillation_topk if self.args.distillation_mode == "topk_logits" else 0
        names = ("teacher_logps", "top_ids", "top_logps")
        tensors = zip(names, self.scores(rows, top_k), strict=False)
        return TaughtExperience(**{**vars(rows), **dict(tensors)})

    def scores(self, rows: TaughtExperience, top_k: int = 0) -> list[torch.Tensor]:
        """The teachers' logprobs of the completions, and with `top_k` the ids and logprobs of their most probable
        tokens.  [rows, completion] and [rows, completion, k] twice.
        """
        ids, mask = rows.as_the_teacher_reads()
        settings: dict[str, Any] = {"temperature": self.args.temperature, "top_logprobs": top_k}
        width = rows.mask.shape[1]
        if not self.models:
            adapters = False if self.args.self_teacher == "base" else None
            return columns_of(self.policy.score(ids, mask, adapters=adapters, **settings), width)
        settings["rows_per_forward"] = forward_batch_size(self.args, ids.shape[1])
        assert rows.teacher is not None, "`experience` sets it"
        whole: list[torch.Tensor] = []
        for number, model in enumerate(self.models):
            taught = rows.teacher == number
            parts = columns_of(model.score(ids[taught], mask[taught], **settings), width)
            whole = whole or [part.new_zeros(len(ids), *part.shape[1:]) for part in parts]
            for tensor, part in zip(whole, parts, strict=True):
                tensor[taught] = part
        return whole

    def token_losses(self, rows: TaughtExperience) -> tuple[torch.Tensor, torch.Tensor]:
        """The losses of the completions' tokens, and their logprobs, with gradients; in train mode.
        float32 [rows, completion], 0 where masked.
        """
        args, batch = self.args, (rows.sequences, rows.attention_mask, rows.mask)
        settings: dict[str, Any] = {"temperature": args.temperature, "forward": args.training_forward}
        if args.distillation_mode == "sampled_token":
            assert rows.teacher_logps is not None, "`experience` has scored them"
            logps = self.policy.logps(*batch, **settings).per_token_logps
            return sampled_reverse_kl(logps, rows.teacher_logps), logps
        return self.policy.token_losses(self.token_loss(rows), *batch, **settings)

    def token_loss(self, rows: TaughtExperience) -> Callable[[hybrid.TokenLogits], torch.Tensor]:
        """The divergence from the teacher, of tokens' logits.  In train mode."""
        args, top_k = self.args, 0
        if args.distillation_mode == "topk_logits":
            top_k = args.distillation_topk
        tail: Any = "bucket" if args.distillation_add_tail else "renormalize"
        divergence = Divergence(args.beta, top_k, args.distillation_topk_support, tail)
        if not args.compares_logits:
            assert rows.top_ids is not None and rows.top_logps is not None, "`experience` has scored them"
            top_ids, top_logps = rows.top_ids, rows.top_logps

            def from_top(tokens: hybrid.TokenLogits) -> torch.Tensor:
                at = tokens.rows, tokens.columns
                return divergence_from_top(tokens.logits, top_ids[at], top_logps[at], divergence)

            return from_top
        logits_of = self.logits_by_policy(rows) if not self.models else self.logits_by_models(rows)
        return lambda tokens: divergence_of_logits(tokens.logits, logits_of(tokens), divergence)

    def logits_by_policy(self, rows: TaughtExperience) -> Callable[[hybrid.TokenLogits], torch.Tensor]:
        """The policy's logits after the teacher's prompts, of some tokens."""
        hidden = self.policy.last_hidden_states(*rows.as_the_teacher_reads(), rows.mask)
        return lambda tokens: tokens.head(hidden[tokens.rows, tokens.columns])

    def logits_by_models(self, rows: TaughtExperience) -> Callable[[hybrid.TokenLogits], torch.Tensor]:
        """The models' logits, of some tokens."""
        (ids, mask), width, numbers = rows.as_the_teacher_reads(), rows.mask.shape[1], rows.teacher
        assert numbers is not None, "`experience` sets it"
        row_of = torch.zeros_like(numbers)
        distributions = []
        for number, model in enumerate(self.models):
            taught = numbers == number
            row_of[taught] = torch.arange(int(taught.sum()), device=row_of.device)
            size = forward_batch_size(self.args, ids.shape[1])
            given = ids[taught], mask[taught], self.args.temperature, size
            distributions.append(model.score_distribution(*given))

        def logits_of(tokens: hybrid.TokenLogits) -> torch.Tensor:
            logits = torch.zeros_like(tokens.logits, requires_grad=False)
            for number, distribution in enumerate(distributions):
                at = (numbers[tokens.rows] == number).nonzero()[:, 0]
                if len(at):
                    logits[at] = distribution.logits(row_of[tokens.rows[at]], tokens.columns[at] - width)
            return logits

        return logits_of

    def numbers(self, prompts: list[Row]) -> torch.Tensor:
        """The number of each row's teacher, int64 [rows]."""
        if len(self.models) < 2:
            return torch.zeros(len(prompts), dtype=torch.int64)
        paths = self.args.data_path
        return torch.tensor([paths.index(data_source(row["source"], paths)) for row in prompts])

    def prompt_of(self, row: Row) -> list[int]:
        """The tokens of the teacher's prompt, as those of the student's are made from `prompt_column`.

        Raises ValueError for a record without that column.
        """
        record, name = json.loads(row["columns"]), self.args.teacher_prompt_column
        if not record.get(name):
            raise ValueError(
                f"teacher_prompt_column: {name!r} given; a record of {row['source']} has none, but {sorted(record)}"
            )
        record_format = RecordFormat.from_args(self.args)
        column = record_format.column("prompt")
        return tokenize_texts(
            texts_of_record({column: record[name]}, "prompt", self.tokenizer, record_format), self.tokenizer
        )[0]

    def destroy(self) -> None:
        """Destroy the engines."""
        for model in self.models:
            model.destroy()


@dataclass
class TaughtEvaluation(Evaluation):
    """Evaluates a student on held-out prompts; also by `k1`, the mean log ratio of its tokens' probabilities to the
    teacher's, which estimates the reverse KL.
    """

    teachers: Teachers | None = None

    def scores(self, batch: hybrid.RolloutBatch, prompts: list[Row], completions: list[str]) -> dict[str, list[float]]:
        """See Evaluation."""
        teachers, mask = self.teachers, batch.completion_mask
        assert teachers is not None, "`load` sets it"
        with teachers.awake(), teachers.policy.inference():
            rows = teachers.experience(batch, prompts)
            logps = teachers.scores(rows)[0] if rows.teacher_logps is None else rows.teacher_logps
        ratios = ((batch.old_per_token_logps - logps) * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
        return {"k1": ratios.tolist(), **super().scores(batch, prompts, completions)}


def columns_of(scores: hybrid.Scores, width: int) -> list[torch.Tensor]:
    """The logprobs of the last `width` tokens, and their top ids and logprobs if there are any."""
    tensors = scores.per_token_logps, scores.top_ids, scores.top_logprobs
    return [tensor[:, -width:] for tensor in tensors if tensor is not None]


def vocabulary_size(name: str) -> int:
    """The number of tokens that a model has logits of."""
    return AutoConfig.from_pretrained(base_model_of(name)).get_text_config().vocab_size


def differing_token(tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> str:
    """The first token that two tokenizers number differently; "" if there is none."""
    first, second = ({index: token for token, index in each.get_vocab().items()} for each in (tokenizer, other))
    for index in sorted(first.keys() | second.keys()):
        if first.get(index) != second.get(index):
            return f"token {index} is {second.get(index)!r} in it, and {first.get(index)!r} in the student's"
    ends = tokenizer.eos_token_id, other.eos_token_id
    return "" if ends[0] == ends[1] else f"its end token is {ends[1]}, and {ends[0]} the student's"
