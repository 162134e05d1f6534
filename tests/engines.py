"""Engines for tests, built inside a rank."""

import contextlib
import hashlib
import io
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hybrid
from tests.tiny_models import prompts

CONTAINERS = "HYBRID_TEST_CONTAINERS"  # passes the value of `pytest --containers` to the ranks
LARGE = 10**9  # a persistence threshold above every parameter's size: ZeRO-3 partitions nothing
TIE = 1e-6  # of the largest logit: two logits less apart may change places with the order of a float32 sum


def settings(stage: int = 3, threshold: int = 0, dtype: torch.dtype = torch.float32, **blocks: Any) -> dict[str, Any]:
    """A DeepSpeed configuration. The option `--containers` of the test run selects the engines' containers."""
    containers = os.environ.get(CONTAINERS, "fused")
    blocks["rollout"] = {"containers": containers, **blocks.get("rollout", {})}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": threshold},
        "bf16": {"enabled": dtype == torch.bfloat16},
        "hybrid_engine": {"enabled": True},
        **blocks,
    }


def engine_of(model: nn.Module, config: dict[str, Any]) -> hybrid.HybridEngine:
    """A HybridEngine over `model`; parameters without `requires_grad` stay frozen."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with contextlib.redirect_stdout(io.StringIO()):
        return hybrid.initialize(model=model, model_parameters=trained, config=config)[0]


def train_step(engine: hybrid.HybridEngine, seed: int = 0, rows: int = 2, length: int = 9) -> torch.Tensor:
    """One step on random tokens of this rank; returns the loss."""
    generator = torch.Generator().manual_seed(seed * 1000 + dist.get_rank())
    ids = torch.randint(3, 97, (rows, length), generator=generator)
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    return loss.detach()


def require_same_rollouts(
    baseline: hybrid.HybridEngine, candidate: hybrid.HybridEngine, length: int, adapted: bool, tolerance: float
) -> None:
    """Two engines over the same weights give the same tokens, and logprobs within `tolerance` (0: bit-identical),
    before and after a step. Rollouts and scores write no training storage, and both engines train alike. Ranks differ
    in rows, lengths (about `length`) and new tokens."""
    rank = dist.get_rank()
    ids, mask = prompts(2 + rank, length + rank, padded=True, seed=rank)
    sampling = hybrid.SamplingParams(max_new_tokens=5 + 6 * rank, temperature=0.7, top_k=20, seed=3)
    for step in range(2):
        outputs = []
        for engine in (baseline, candidate):
            before = storage_digest(engine)
            with engine.inference():
                batch = engine.rollout(ids, mask, sampling, num_generations=2)
                scores = engine.score(batch.sequences, batch.attention_mask, rows_per_forward=3 - rank)
                base = engine.score(batch.sequences, batch.attention_mask, adapters=False)
            # Before the step, which rewrites the partitions from the master weights and would hide what a rollout
            # wrote.
            assert storage_digest(engine) == before
            assert batch.weight_version == step
            scored_values = (
                values for scored in (scores, base) for values in (scored.per_token_logps, scored.entropies)
            )
            logps = (batch.sampling_per_token_logps, batch.old_per_token_logps)
            outputs.append((*logps, *scored_values, batch.completion_ids))
        *expected, expected_ids = outputs[0]
        *actual, actual_ids = outputs[1]
        assert torch.equal(actual_ids, expected_ids)
        for value, expected_value in zip(actual, expected, strict=True):
            torch.testing.assert_close(value, expected_value, atol=tolerance, rtol=tolerance)
        assert not adapted or (base.per_token_logps - scores.per_token_logps).abs().max() > 1e-2
        for engine in (baseline, candidate):
            engine.train()
            train_step(engine, step)
        assert storage_digest(baseline) == storage_digest(candidate), "the engines train differently"


def require_greedy_tokens(actual: torch.Tensor, expected: torch.Tensor, logits: torch.Tensor) -> None:
    """Each row of `actual` equals that of `expected`, up to a position at which the reference's logits of both tokens
    are a TIE.

    actual, expected: int64 [rows, tokens]; logits: of the reference for `expected`, float32 [rows, tokens, vocabulary].
    """
    tokens = min(actual.shape[1], expected.shape[1])
    differs = actual[:, :tokens] != expected[:, :tokens]
    for row in differs.any(1).nonzero().flatten().tolist():
        position = int(differs[row].nonzero()[0])
        of_both = logits[row, position - 1, [actual[row, position], expected[row, position]]]
        gap = (of_both[1] - of_both[0]) / logits[row, position - 1].abs().max()
        assert gap.abs() < TIE, f"row {row}, position {position}: {gap:.2g} of the largest logit below the greedy token"
    assert actual.shape == expected.shape or differs.any(), f"{tuple(actual.shape)} and {tuple(expected.shape)}"


def require_matches_hugging_face(engine: hybrid.HybridEngine, reference: nn.Module, tolerance: float) -> None:
    """Greedy tokens equal the reference's and logits are within `tolerance`; a training step follows. Ranks differ in
    rows, prompt length and number of new tokens."""
    rank = dist.get_rank()
    for padded in (False, True):
        ids, mask = prompts(rows=3 + rank, length=7 + rank, padded=padded, seed=rank)
        request = {"attention_mask": mask, "max_new_tokens": 6 + 4 * rank, "do_sample": False}
        expected = reference.generate(ids, **request)
        full_mask = torch.ones_like(expected)
        full_mask[:, : ids.shape[1]] = mask
        with torch.no_grad():
            logits = reference(expected, attention_mask=full_mask).logits
        require_greedy_tokens(engine.generate(ids, **request), expected, logits)
    engine.eval()
    actual = engine(expected, attention_mask=full_mask, use_cache=False).logits
    torch.testing.assert_close(actual[full_mask.bool()], logits[full_mask.bool()], atol=tolerance, rtol=1e-4)
    engine.train()
    train_step(engine)


def storage_digest(engine: hybrid.HybridEngine) -> str:
    """sha256 over this rank's training storage: its partitions, or unpartitioned parameters."""
    digest = hashlib.sha256()
    for name, parameter in sorted(engine.module.named_parameters()):
        storage = parameter.data
        if hasattr(parameter, "ds_tensor"):
            # The last rank's partition may end in padding, which DeepSpeed does not initialise.
            left = parameter.ds_numel - dist.get_rank() * parameter.ds_tensor.numel()
            storage = parameter.ds_tensor[: max(left, 0)]
        digest.update(name.encode())
        digest.update(storage.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# Methods of ProcessGroup that torch.distributed calls, for any backend (torch 2.13; names a version lacks are skipped).
COLLECTIVES = (
    "_allgather_base all_gather_single all_gather_single_coalesced all_to_all_single allgather "
    "allgather_coalesced allgather_into_tensor_coalesced allreduce allreduce_coalesced alltoall "
    "alltoall_base barrier broadcast gather monitored_barrier recv reduce _reduce_scatter_base "
    "reduce_scatter reduce_scatter_single reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced "
    "scatter send "
).split()


class CollectiveCount:
    """Counts the collectives that this rank starts inside the block."""

    def __enter__(self) -> "CollectiveCount":
        self.count = 0
        group = dist.ProcessGroup
        self.own = {name: vars(group)[name] for name in COLLECTIVES if name in vars(group)}
        for name in self.own:
            setattr(group, name, self._counted(getattr(group, name)))
        return self

    def _counted(self, method):
        def counting(*args, **kwargs):
            self.count += 1
            return method(*args, **kwargs)

        return counting

    def __exit__(self, *exc) -> None:
        for name, method in self.own.items():
            setattr(dist.ProcessGroup, name, method)


class Recorder:
    """A streamer that keeps what it gets."""

    def __init__(self):
        self.pieces, self.ended = [], False

    def put(self, value):
        self.pieces.append(value.flatten().tolist())

    def end(self):
        self.ended = True
