"""Pretraining texts that PPO also learns from: the ptx mixture (InstructGPT, arXiv:2203.02155)."""

from dataclasses import dataclass
from itertools import islice

import torch
from transformers import PreTrainedTokenizerBase

import hybrid
from rlhf_examples.common.arguments import PPOArguments
from rlhf_examples.common.losses import Loss, language_model_loss
from rlhf_examples.common.ranks import device
from rlhf_examples.common.rollouts import OptimizerStep
from rlhf_examples.data.examples import Examples, collate_supervised, tokenize_records
from rlhf_examples.data.records import load_records


@dataclass
class PtxBatch:
    """The ptx texts of a micro batch.  ids, mask, learned int64 [rows, tokens]; denominator: for
    `language_model_loss`.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    loss_mask: torch.Tensor
    denominator: float

    def loss(self, policy: hybrid.HybridEngine, args: PPOArguments) -> Loss:
        """The language model loss of every token but the first."""
        learned = self.loss_mask[:, 1:]
        logps = policy.logps(self.ids, self.mask, learned, forward=args.training_forward).per_token_logps
        return language_model_loss(logps, learned, self.denominator)


@dataclass
class PretrainingTexts:
    """The stream of ptx texts: equally many in an optimizer step as there are completions in it.

    taken: texts used so far by all ranks; saved in checkpoints.
    """

    examples: Examples
    pad_token_id: int
    seed: int
    taken: int = 0

    @classmethod
    def load(cls, tokenizer: PreTrainedTokenizerBase, args: PPOArguments) -> "PretrainingTexts | None":
        """From `unsupervised_data_path`; None if that is empty."""
        if not args.unsupervised_data_path:
            return None
        records = load_records(args.unsupervised_data_path, cache_dir=args.data_output_path or None)
        length = args.max_prompt_seq_len + args.max_answer_seq_len
        examples = tokenize_records(records, tokenizer, "supervised", length, args.data_output_path or None)
        return cls(examples, tokenizer.pad_token_id, args.seed)

    def next(self, step: OptimizerStep) -> list[PtxBatch]:
        """This rank's texts for each micro batch of a step."""
        rows = list(islice(self.examples.ordered(self.seed, self.taken), len(step.rows)))
        self.taken += len(rows)
        tokens = sum(len(row["prompt_ids"]) + len(row["completion_ids"]) - 1 for row in rows)
        batch = collate_supervised(rows, self.pad_token_id)
        ids, mask = batch["input_ids"].to(device()), batch["attention_mask"].to(device())
        denominator = step.denominator(tokens)
        return [
            # An empty micro batch gets one fully masked row, as for completions.
            PtxBatch(ids[indices or [0]], mask[indices or [0]], mask[indices or [0]] * bool(indices), denominator)
            for indices in step.micro_batch_rows
        ]

    def state_dict(self) -> dict[str, int]:
        """The state for a checkpoint."""
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the state from a checkpoint."""
        self.taken = state["taken"]
