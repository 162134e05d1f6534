"""`sleep` and `wake`: what an engine holds leaves the device; afterwards it trains and generates as one that never
slept."""

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch.multiprocessing.reductions import StorageWeakRef

import hybrid
from hybrid import HybridEngine, SamplingParams
from hybrid.weights import host_tensors
from tests.engines import LARGE, engine_of, settings, storage_digest
from tests.marks import slow_but
from tests.tiny_models import prompts, tiny_model, with_peft
from tests.training.test_offload_states import torch_adamw_as_fused_adam

SAMPLING = SamplingParams(max_new_tokens=4, temperature=0.9, seed=3)
ASLEEP = r"while the engine sleeps at level {}.*call engine\.wake\(\) first"


def config(stage: int, dtype: torch.dtype = torch.float32, threshold: int = 0, **blocks) -> dict:
    """Settings of an engine that accumulates gradients over two micro batches, with small buckets: a test's process
    would have to allocate the default ones."""
    made = settings(stage, threshold, dtype, gradient_accumulation_steps=2, **blocks)
    made["zero_optimization"] |= {"reduce_bucket_size": 10**5, "stage3_prefetch_bucket_size": 10**5}
    return made


def engine(stage: int, dtype: torch.dtype = torch.float32, lora: bool = False, **blocks) -> HybridEngine:
    model = with_peft(tiny_model("llama")) if lora else tiny_model("llama")
    return engine_of(model, config(stage, dtype, **blocks))


def rollout(of: HybridEngine) -> list[torch.Tensor]:
    """Tokens, logprobs and scores of this rank's prompts; ranks differ."""
    ids, mask = prompts(2 + dist.get_rank(), 5, padded=True, seed=dist.get_rank())
    with of.inference():
        batch = of.rollout(ids, mask, SAMPLING, num_generations=2)
        scores = of.score(batch.sequences, batch.attention_mask)
    return [batch.completion_ids, batch.sampling_per_token_logps, scores.per_token_logps]


def loss_of(of: HybridEngine, seed: int) -> torch.Tensor:
    ids = prompts(2, 9, padded=False, seed=seed * 10 + dist.get_rank())[0].to(of.device)
    return of(input_ids=ids, labels=ids).loss


def optimizer_state(of: HybridEngine) -> list[torch.Tensor]:
    """Unpartitioned master weights and Adam states of every trained parameter; () without ZeRO."""
    if of.zero_optimization_stage() == 0:
        return []
    trained = [param for param in of.module.parameters() if param.requires_grad]
    states = [safe_get_full_optimizer_state(param, key) for param in trained for key in ("exp_avg", "exp_avg_sq")]
    return [*map(safe_get_full_fp32_param, trained), *states]


@contextlib.contextmanager
def asleep(of: HybridEngine, *levels: int) -> Iterator[None]:
    for level in levels:
        of.sleep(level)
        assert of.asleep == of.stats()["asleep"] == max(levels[: levels.index(level) + 1])
    yield
    of.wake()
    assert of.asleep == of.stats()["asleep"] == of.stats()["host_bytes"] == 0


def nap(of: HybridEngine, *levels: int) -> None:
    """Sleep and wake, with the same training storage and torch random state."""
    before, random = storage_digest(of), torch.get_rng_state()
    with asleep(of, *levels):
        pass
    assert storage_digest(of) == before and torch.equal(torch.get_rng_state(), random)


def check_training(stage: int, dtype: torch.dtype, lora: bool, blocks: dict) -> None:
    """Sleep before the first step, before and between forward, backward and step, and between rollouts."""
    with torch_adamw_as_fused_adam():
        slept, never = (engine(stage, dtype, lora, **blocks) for _ in range(2))
        nap(slept, 2)
        for step in range(2):
            assert all(map(torch.equal, rollout(slept), rollout(never)))
            nap(slept, 1, 2)
            assert all(map(torch.equal, rollout(slept), rollout(never)))
            for part in range(2):
                losses = [loss_of(each, 2 * step + part) for each in (slept, never)]
                assert torch.equal(*losses)
                nap(slept, 2)
                for each, loss in zip((slept, never), losses, strict=True):
                    each.backward(loss)
                del losses, loss
                nap(slept, 2, 1)
                for each in (slept, never):
                    each.step()
            with_1, without = optimizer_state(slept), optimizer_state(never)
            assert len(with_1) == len(without) and all(map(torch.equal, with_1, without))
            assert storage_digest(slept) == storage_digest(never)
            assert slept.weight_version == never.weight_version == step + 1
        assert all(map(torch.equal, rollout(slept), rollout(never)))
        slept.destroy()
        never.destroy()


OFFLOADING = {"rollout": {"containers": "fused", "offload_states": True}}
INT8 = {"rollout": {"containers": "fused", "weight_dtype": "int8"}}
TENSOR_PARALLEL = {"hybrid_engine": {"enabled": True, "inference_tp_size": 2}}
STREAMING = {"hybrid_engine": {"enabled": True, "pin_parameters": False}}
CASES = {
    "ZeRO 0, float32": (0, torch.float32, False, {}),
    "ZeRO 0, bfloat16": (0, torch.bfloat16, True, {}),
    "ZeRO 1, float32": (1, torch.float32, True, {}),
    "ZeRO 1, bfloat16": (1, torch.bfloat16, False, {}),
    "ZeRO 2, float32": (2, torch.float32, False, {}),
    "ZeRO 2, bfloat16": (2, torch.bfloat16, True, {}),
    "ZeRO 3, float32": (3, torch.float32, True, {}),
    "ZeRO 3, bfloat16": (3, torch.bfloat16, False, {}),
    "small parameters whole": (3, torch.bfloat16, False, {"threshold": 200}),
    "all parameters whole": (3, torch.float32, False, {"threshold": LARGE}),
    "offload_states, ZeRO 2": (2, torch.bfloat16, False, OFFLOADING),
    "offload_states, ZeRO 3": (3, torch.bfloat16, True, OFFLOADING),
    "int8": (3, torch.float32, False, INT8),
    "tensor parallel": (3, torch.float32, True, TENSOR_PARALLEL),
    "tensor parallel, ZeRO 1": (1, torch.float32, False, TENSOR_PARALLEL),
    "streaming": (3, torch.float32, False, STREAMING),
}
QUICK = ("ZeRO 0, float32", "ZeRO 2, bfloat16", "ZeRO 3, bfloat16", "offload_states, ZeRO 3", "tensor parallel")


@pytest.mark.parametrize("name", slow_but(QUICK, CASES))
def test_training_and_rollouts_are_bit_identical(ranks, name):
    ranks.run(check_training, *CASES[name])


def states_of(of: HybridEngine) -> list[torch.Tensor]:
    """Weights, gradients and optimizer states, as torch and DeepSpeed name them: what level 2 must move."""
    params = list(of.module.parameters())
    held = [getattr(param, "ds_tensor", param) for param in params] + [param.grad for param in params]
    own = getattr(of.optimizer, "optimizer", of.optimizer)
    held += [value for state in own.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "bit16_groups_flat"):
        held += getattr(of.optimizer, name, [])
    held += [getattr(of.optimizer, "grad_partitions_flat_buffer", None)]
    held += [tensor for group in getattr(of.optimizer, "averaged_gradients", {}).values() for tensor in group or ()]
    return [tensor for tensor in held if tensor is not None and tensor.untyped_storage().nbytes() > 0]


def storages_of(tensors: list[torch.Tensor]) -> dict[int, StorageWeakRef]:
    """Weak references to the tensors' storages, by address: they expire when the memory is freed."""
    return {tensor.data_ptr(): StorageWeakRef(tensor.untyped_storage()) for tensor in tensors}


def check_memory(stage: int, dtype: torch.dtype, blocks: dict) -> None:
    """Every storage of the inference copies, then of the training states, is freed: the tensors have others. Between
    backward and step, when all kinds of states are there."""
    sleeper = engine(stage, dtype, lora=True, **blocks)
    for part in range(4):
        sleeper.backward(loss_of(sleeper, part))
        if part < 3:
            sleeper.step()
    sleeper.eval()
    rollout(sleeper)
    copies = [part for parts in sleeper._runtime.snapshot.parts.values() for part in parts.values() if part is not None]
    copies += [] if sleeper._runtime.int8 is None else list(sleeper._runtime.int8.snapshot.holders.parameters())
    inference = storages_of(copies)
    assert len(inference) > 3 and sleeper.stats()["kv_bytes"] > 0
    del copies
    training = storages_of(states_of(sleeper))
    sleeper.sleep()
    stats = sleeper.stats()
    assert stats["snapshot_bytes"] == stats["container_bytes"] == stats["kv_bytes"] == stats["host_bytes"] == 0
    assert all(ref.expired() for ref in inference.values())
    assert not any(ref.expired() for ref in training.values())
    sleeper.sleep(2)
    assert all(ref.expired() for ref in training.values())
    on_host = storages_of(states_of(sleeper))
    assert sleeper.stats()["host_bytes"] >= sum(tensor.nbytes for tensor in states_of(sleeper)[: len(training)]) / 2
    sleeper.wake()
    assert all(ref.expired() for ref in on_host.values())
    sleeper.train()
    sleeper.step()
    sleeper.destroy()


@pytest.mark.parametrize(
    ("stage", "dtype", "blocks"),
    slow_but(
        [(3, torch.bfloat16, {}), (1, torch.float32, {})],
        [
            (3, torch.bfloat16, {}),
            (3, torch.float32, TENSOR_PARALLEL),
            (3, torch.float32, INT8),
            (2, torch.bfloat16, INT8),
            (1, torch.float32, {}),
            (0, torch.float32, {}),
            (0, torch.bfloat16, {}),
        ],
    ),
)
def test_memory_leaves_the_device(ranks, stage, dtype, blocks):
    ranks.run(check_memory, stage, dtype, blocks)


def check_shared_memory() -> None:
    """Weights of which somebody keeps a view stay, and a warning says how much."""
    sleeper = engine(1)
    view = next(sleeper.module.parameters()).detach()[1:]
    expected = view.clone()
    with patch("hybrid.execution.sleep.logger.warning") as warning:
        sleeper.sleep(2)
    (text,) = warning.call_args.args
    left = sum(param.nbytes for param in sleeper.module.parameters())  # ZeRO-1 has them in one piece
    assert f"sleep(2) leaves {left} bytes on the device, since tensors outside of the engine share them" in text
    assert torch.equal(view, expected)
    sleeper.wake()
    for part in range(2):
        sleeper.backward(loss_of(sleeper, part))
        sleeper.step()
    assert not torch.equal(view, expected) and torch.equal(view, next(sleeper.module.parameters())[1:])
    del view
    with patch("hybrid.execution.sleep.logger.warning") as warning:
        nap(sleeper, 2)
    assert not warning.called


def test_memory_that_others_share_stays(ranks):
    ranks.run(check_shared_memory)


# What raises asleep: the level from which on, and the call.
CALLS = {
    "eval": (1, lambda of, folder: of.eval()),
    "train(False)": (1, lambda of, folder: of.train(False)),
    "inference": (1, lambda of, folder: of.inference().__enter__()),
    "generate": (1, lambda of, folder: of.generate(*prompts(1, 4, padded=False)[:1], max_new_tokens=2)),
    "the model's generate": (1, lambda of, folder: of.module.generate(prompts(1, 4, padded=False)[0])),
    "rollout": (1, lambda of, folder: of.rollout(*prompts(1, 4, padded=False), SAMPLING)),
    "rollout_iter": (1, lambda of, folder: list(of.rollout_iter(*prompts(1, 4, padded=False), SAMPLING))),
    "score": (1, lambda of, folder: of.score(*prompts(1, 4, padded=False))),
    "fuse_lora_weight": (1, lambda of, folder: of.fuse_lora_weight()),
    "HybridRollout": (1, lambda of, folder: hybrid.HybridRollout(of).engine.inference().__enter__()),
    "forward": (2, lambda of, folder: loss_of(of, 0)),
    "backward": (2, lambda of, folder: of.backward(torch.zeros((), requires_grad=True))),
    "step": (2, lambda of, folder: of.step()),
    "save_checkpoint": (2, lambda of, folder: of.save_checkpoint(folder)),
    "save_16bit_model": (2, lambda of, folder: of.save_16bit_model(folder)),
    "save_pretrained": (2, lambda of, folder: of.save_pretrained(folder)),
    "module_state_dict": (2, lambda of, folder: of.module_state_dict()),
    "the consolidated state_dict": (2, lambda of, folder: of._zero3_consolidated_16bit_state_dict()),
    "load_checkpoint": (2, lambda of, folder: of.load_checkpoint(folder)),
    "load_module_state_dict": (2, lambda of, folder: of.load_module_state_dict({})),
    "memory_plan": (2, lambda of, folder: of.memory_plan(1, 2, 3)),
    "coverage": (2, lambda of, folder: of.coverage()),
}


def check_calls(stage: int, folder: str) -> None:
    """What needs memory that is away raises, and nothing is written; all else works; no version changes."""
    sleeper, never = engine(stage, lora=True), engine(stage, lora=True)
    for level in (1, 2):
        version, digest = sleeper.weight_version, storage_digest(sleeper)
        dist.barrier()
        written = sorted(Path(folder).rglob("*"))
        with asleep(sleeper, level):
            for name, (first, call) in CALLS.items():
                if first <= level:
                    with pytest.raises(RuntimeError, match=ASLEEP.format(level)):
                        call(sleeper, folder)
                        raise AssertionError(name)
            assert sorted(Path(folder).rglob("*")) == written
            sleeper.sleep(1)  # a lower level does nothing
            assert sleeper.asleep == level and sleeper.weight_version == version
            sleeper.train()
            sleeper.unfuse_lora_weight()
            sleeper.release_inference_cache()
            assert storage_digest(sleeper) == digest
            if level == 1:
                for each in (sleeper, never):
                    for part in range(2):
                        each.backward(loss_of(each, part))
                        each.step()
                sleeper.save_checkpoint(folder, tag="asleep")
                sleeper.load_checkpoint(folder, tag="asleep")
        assert storage_digest(sleeper) == storage_digest(never)
        assert all(map(torch.equal, rollout(sleeper), rollout(never)))
        # In eval mode the model's own forward raises too.
        sleeper.eval()
        ids, mask = prompts(1, 4, padded=False)
        sleeper.sleep(level)
        for forward in (sleeper, sleeper.module):
            with pytest.raises(RuntimeError, match=ASLEEP.format(level)):
                forward(input_ids=ids, attention_mask=mask, use_cache=False)
        sleeper.wake()
        logits = sleeper(input_ids=ids, attention_mask=mask, use_cache=False).logits
        never.eval()
        assert torch.equal(logits, never(input_ids=ids, attention_mask=mask, use_cache=False).logits)
        for each in (sleeper, never):
            each.train()
    assert any(path.name == "asleep" for path in written)


@pytest.mark.parametrize("stage", slow_but([3], [1, 3]))
def test_calls_of_a_sleeping_engine(ranks, tmp_path, stage):
    ranks.run(check_calls, stage, str(tmp_path))


def check_stream() -> None:
    """Sleep waits for a rollout whose rows are still coming; all of them come."""
    sleeper, never = engine(1), engine(1)
    ids, mask = prompts(3, 5, padded=True, seed=dist.get_rank())
    stream = sleeper.rollout_iter(ids, mask, SAMPLING)
    sleeper.sleep(2)
    assert len(list(stream)) == 3
    assert torch.equal(stream.output().completion_ids, never.rollout(ids, mask, SAMPLING).completion_ids)
    with pytest.raises(RuntimeError, match=ASLEEP.format(2)):
        list(sleeper.rollout_iter(ids, mask, SAMPLING))
    sleeper.wake()


def test_sleep_waits_for_a_running_stream(ranks):
    ranks.run(check_stream)


def check_invalid() -> None:
    """Wrong levels, a window, and ranks whose calls differ: an error on every rank, and nothing has changed."""
    sleeper, rank = engine(3), dist.get_rank()
    digest = storage_digest(sleeper)
    for level in (0, 3, "2", None, True):
        with pytest.raises(ValueError, match=rf"level={level!r} given; it must be 1 or 2, wake\(\) ends sleep"):
            sleeper.sleep(level)
    for call in (sleeper.sleep, sleeper.wake):
        with sleeper.inference(), pytest.raises(RuntimeError, match="inside `with engine.inference"):
            call()
    with pytest.raises(ValueError if rank else RuntimeError, match="level=7 given"):
        sleeper.sleep(7 if rank else 2)
    with pytest.raises(RuntimeError, match=r"rank 0 calls sleep\(1\); rank 1 calls sleep\(2\).*on every rank"):
        sleeper.sleep(1 + rank)
    with pytest.raises(RuntimeError, match=r"rank 0 calls sleep\(2\); rank 1 calls wake\(\)"):
        if rank:
            sleeper.wake()
        else:
            sleeper.sleep(2)
    assert sleeper.asleep == 0
    sleeper.wake()  # awake: does nothing
    assert storage_digest(sleeper) == digest
    rollout(sleeper)


def test_invalid_calls_raise_on_every_rank(ranks):
    ranks.run(check_invalid)


class Full(MemoryError):
    """Stands for a host or a device without free memory."""


def check_failures(stage: int) -> None:
    """One rank's memory is full: all ranks raise; a failed sleep is undone, a failed wake can be repeated."""
    sleeper, never = engine(stage), engine(stage)
    own, calls, rank = host_tensors.moved_storage, [], dist.get_rank()

    def fails_later(*args) -> torch.UntypedStorage:
        calls.append(args)
        if rank and len(calls) == 3:
            raise Full("no memory")
        return own(*args)

    expected = pytest.raises(Full if rank else RuntimeError, match="no memory")
    digest = storage_digest(sleeper)
    with patch.object(host_tensors, "moved_storage", fails_later), expected:
        sleeper.sleep(2)
    assert sleeper.asleep == sleeper.stats()["host_bytes"] == 0 and storage_digest(sleeper) == digest
    sleeper.sleep(1)
    calls.clear()
    with patch.object(host_tensors, "moved_storage", fails_later), expected:
        sleeper.sleep(2)
    assert sleeper.asleep == 1 and sleeper.stats()["host_bytes"] == 0
    sleeper.sleep(2)
    calls.clear()
    with patch.object(host_tensors, "moved_storage", fails_later), expected:
        sleeper.wake()
    assert sleeper.asleep == 2
    with pytest.raises(RuntimeError, match=ASLEEP.format(2)):
        sleeper.step()
    sleeper.wake()
    for each in (sleeper, never):
        for part in range(2):
            each.backward(loss_of(each, part))
            each.step()
    assert storage_digest(sleeper) == storage_digest(never)
    assert all(map(torch.equal, rollout(sleeper), rollout(never)))


@pytest.mark.parametrize("stage", slow_but([3], [0, 2, 3]))
def test_a_full_memory_on_one_rank(ranks, stage):
    ranks.run(check_failures, stage)


def check_writes() -> None:
    """Weights that are written while they are in host memory keep the new values, which the next rollout sees."""
    sleeper, written = engine(1), engine(1)
    before = rollout(sleeper)
    sleeper.sleep(2)
    for of in (sleeper, written):
        with torch.no_grad():
            next(of.module.parameters()).mul_(1.5)
    version = sleeper.weight_version
    sleeper.wake()
    assert sleeper.weight_version == version + 1
    after = rollout(sleeper)
    assert all(map(torch.equal, after, rollout(written)))
    assert not torch.equal(after[2][:, :3], before[2][:, :3])


def test_writes_to_weights_in_host_memory_are_kept(ranks):
    ranks.run(check_writes)


def check_destroyed() -> None:
    """A sleeping engine can be destroyed; the model's weights are then in host memory, unchanged."""
    sleeper = engine(1)
    model, expected = sleeper.module, [param.clone() for param in sleeper.module.parameters()]
    sleeper.sleep(2)
    sleeper.destroy()
    assert all(map(torch.equal, model.parameters(), expected))
    assert all(param.device.type == "cpu" for param in model.parameters())
    freed = engine(3)
    storages = storages_of(states_of(freed))
    freed.sleep(2)
    del storages
    on_host = storages_of(states_of(freed))
    freed.destroy()
    del freed
    gc.unfreeze()
    gc.collect()
    assert sum(ref.expired() for ref in on_host.values()) > 0


def test_destroying_a_sleeping_engine(ranks):
    ranks.run(check_destroyed)
