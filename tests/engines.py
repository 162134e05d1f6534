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

CONTAINERS = "HYBRID_TEST_CONTAINERS"  # what `pytest --containers` says to the ranks
LARGE = 10**9  # a persistence threshold that no parameter reaches: ZeRO-3 keeps everything whole


def settings(stage: int = 3, threshold: int = 0, dtype: torch.dtype = torch.float32, **blocks: Any) -> dict[str, Any]:
    """A DeepSpeed configuration. `--containers` of the test run says which containers engines use."""
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
    """A HybridEngine over `model`; what requires no gradient stays frozen."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with contextlib.redirect_stdout(io.StringIO()):
        return hybrid.initialize(model=model, model_parameters=trained, config=config)[0]


def train_step(engine: hybrid.HybridEngine, seed: int = 0, rows: int = 2, length: int = 9) -> torch.Tensor:
    """One step on random tokens of this rank; gives the loss."""
    generator = torch.Generator().manual_seed(seed * 1000 + dist.get_rank())
    ids = torch.randint(3, 97, (rows, length), generator=generator)
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    return loss.detach()


def require_same_rollouts(
    one: hybrid.HybridEngine, other: hybrid.HybridEngine, length: int, adapted: bool, tolerance: float
) -> None:
    """Two engines over the same weights make the same rollouts and scores, with logprobs within `tolerance` (0: to the
    bit), before and after a step; they write nothing, and train alike. Ranks differ in rows, lengths (about `length`)
    and new tokens."""
    rank = dist.get_rank()
    ids, mask = prompts(2 + rank, length + rank, padded=True, seed=rank)
    sampling = hybrid.SamplingParams(max_new_tokens=5 + 6 * rank, temperature=0.7, top_k=20, seed=3)
    for step in range(2):
        outputs = []
        for engine in (one, other):
            before = storage_digest(engine)
            with engine.inference():
                batch = engine.rollout(ids, mask, sampling, num_generations=2)
                scores = engine.score(batch.sequences, batch.attention_mask, rows_per_forward=3 - rank)
                base = engine.score(batch.sequences, batch.attention_mask, adapters=False)
            # Before the step: it would write the parts anew from the optimizer's, and hide what a rollout did to them.
            assert storage_digest(engine) == before
            assert batch.weight_version == step
            judged = (values for one_of in (scores, base) for values in (one_of.per_token_logps, one_of.entropies))
            logps = (batch.sampling_per_token_logps, batch.old_per_token_logps)
            outputs.append((*logps, *judged, batch.completion_ids))
        *expected, expected_ids = outputs[0]
        *found, found_ids = outputs[1]
        assert torch.equal(found_ids, expected_ids)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
        assert not adapted or (base.per_token_logps - scores.per_token_logps).abs().max() > 1e-2
        for engine in (one, other):
            engine.train()
            train_step(engine, step)
        assert storage_digest(one) == storage_digest(other), "training is not what it was"


def require_hugging_faces(engine: hybrid.HybridEngine, reference: nn.Module, tolerance: float) -> None:
    """Greedy tokens are the reference's, logits within `tolerance`; a step can follow. Ranks differ in rows, prompt
    length and number of new tokens."""
    rank = dist.get_rank()
    for padded in (False, True):
        ids, mask = prompts(rows=3 + rank, length=7 + rank, padded=padded, seed=rank)
        request = {"attention_mask": mask, "max_new_tokens": 6 + 4 * rank, "do_sample": False}
        expected = reference.generate(ids, **request)
        assert torch.equal(engine.generate(ids, **request), expected), f"padded {padded}, rank {rank}"
    whole = torch.ones_like(expected)
    whole[:, : ids.shape[1]] = mask
    with torch.no_grad():
        logits = reference(expected, attention_mask=whole).logits
    engine.eval()
    ours = engine(expected, attention_mask=whole, use_cache=False).logits
    torch.testing.assert_close(ours[whole.bool()], logits[whole.bool()], atol=tolerance, rtol=1e-4)
    engine.train()
    train_step(engine)


def storage_digest(engine: hybrid.HybridEngine) -> str:
    """sha256 over this rank's training storage: every partition, or every parameter that is whole."""
    digest = hashlib.sha256()
    for name, parameter in sorted(engine.module.named_parameters()):
        storage = parameter.data
        if hasattr(parameter, "ds_tensor"):
            # The last rank's partition may end in padding, which DeepSpeed never initialises.
            left = parameter.ds_numel - dist.get_rank() * parameter.ds_tensor.numel()
            storage = parameter.ds_tensor[: max(left, 0)]
        digest.update(name.encode())
        digest.update(storage.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# What torch.distributed's functions call, whatever the backend (torch 2.13; names that a torch lacks are skipped).
COLLECTIVES = (
    "_allgather_base all_gather_single all_gather_single_coalesced all_to_all_single allgather "
    "allgather_coalesced allgather_into_tensor_coalesced allreduce allreduce_coalesced alltoall "
    "alltoall_base barrier broadcast gather monitored_barrier recv reduce _reduce_scatter_base "
    "reduce_scatter reduce_scatter_single reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced "
    "scatter send "
).split()


class CollectiveCount:
    """Counts the collectives that this rank starts in a block."""

    def __enter__(self) -> "CollectiveCount":
        self.count = 0
        group = dist.ProcessGroup
        self.own = {name: vars(group)[name] for name in COLLECTIVES if name in vars(group)}
        for name in self.own:
            setattr(group, name, self._counted(getattr(group, name)))
        return self

    def _counted(self, method):
        def counted(*args, **kwargs):
            self.count += 1
            return method(*args, **kwargs)

        return counted

    def __exit__(self, *exc) -> None:
        for name, method in self.own.items():
            setattr(dist.ProcessGroup, name, method)
