"""Ways to hold weights: the memory plan equals what is held; "auto" takes the fastest mode that fits; others raise."""

import itertools
import logging
import time

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import logger
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import hybrid
from hybrid.kernels.cpu_library import FLAGS, built, cpu_library, opened
from tests.engines import CollectiveCount, engine_of, settings, storage_digest, train_step
from tests.marks import slow_but
from tests.tiny_models import ADAPTERS, prompts, tiny_model, twin

PORTABLE = tuple(flag for flag in FLAGS if not flag.startswith("-march"))  # runs on any machine
MODES = {
    "pinned": {},
    "tensor parallel 2": {"inference_tp_size": 2},
    "streaming": {"pin_parameters": False},
}
# Heads of 16 fill vectors of 8 lanes and of 16, so that the plan of the KV cache is the same on every machine.
SIZES = {
    "llama": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "num_hidden_layers": 8,
    },
    "gpt2": {"n_embd": 64, "n_layer": 6},
    "qwen3_5_text": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_hidden_layers": 8,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
    },
}
DEEP = 20  # layers: the modes' needs differ by more than what a forward needs


def engine_with(
    block: dict, family: str = "llama", adapter: str = "none", stage: int = 3, layers: int | None = None, **rollout
):
    """An engine of a tiny model with these blocks; `layers` replaces the number of SIZES."""
    rollout = {"containers": "fused", **rollout}
    model = ADAPTERS[adapter](tiny_model(family, **SIZES[family] | ({"num_hidden_layers": layers} if layers else {})))
    return engine_of(model, settings(stage, hybrid_engine={"tp_gather_partition_size": 1, **block}, rollout=rollout))


def check_plan(family: str, adapter: str, stage: int, lanes: int | None = None, **rollout) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if lanes is not None:
            library = opened(built((*PORTABLE, f"-DLANES={lanes}")))
            patch.setattr("hybrid.decoders.selection.cpu_library", lambda: library)
        require_plan(family, adapter, stage, rollout)


def require_plan(family: str, adapter: str, stage: int, rollout: dict) -> None:
    tables = []
    rows, length, new = 3, 40, 20
    ids, mask = prompts(rows, length, padded=False, seed=dist.get_rank())
    for name, block in MODES.items():
        if name == "streaming" and stage < 3:
            continue
        engine = engine_with(block, family, adapter, stage, **rollout)
        with CollectiveCount() as collectives:
            plan = engine.memory_plan(rows, length, new)
        assert collectives.count == 0
        assert str(plan.in_use) == name
        tables.append({str(mode): need for mode, need in plan.needs.items()})
        need = tables[-1][name]
        engine.eval()
        if "speculation" in rollout:  # not with `min_new_tokens` on CPUs
            engine.rollout(ids, mask, hybrid.SamplingParams(max_new_tokens=new, stop_token_ids=()))
        else:
            engine.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new)
        stats = engine.stats()
        assert stats["snapshot_bytes"] == need.snapshot if name != "streaming" else need.snapshot == 0
        assert stats["container_bytes"] == need.containers, (name, stats["container_bytes"], need.containers)
        assert stats["kv_bytes"] == need.kv, "the KV cache differs from the plan"
        assert stats["peak_bytes"] <= need.total
        assert 2 * stats["peak_bytes"] >= need.total - need.logits
        shards = sum((p.ds_tensor if stage == 3 else p).nbytes for p in engine.module.parameters())
        assert need.parameters == shards
        engine.destroy()
    assert all(table == tables[0] for table in tables), "the plan depends on the engine's current mode"
    if stage == 3:
        weights = {name: need.gather + need.snapshot + need.containers for name, need in tables[0].items()}
        assert weights["streaming"] < weights["tensor parallel 2"] < weights["pinned"]


@pytest.mark.parametrize(
    ("family", "adapter", "stage"),
    slow_but(
        [("llama", "peft", 3)],
        [
            ("llama", "none", 3),
            ("llama", "peft", 3),
            ("gpt2", "none", 3),
            ("llama", "peft", 2),
            ("qwen3_5_text", "peft", 3),
        ],
    ),
)
def test_memory_plan_equals_measured_memory(ranks, family, adapter, stage):
    ranks.run(check_plan, family, adapter, stage)


@pytest.mark.slow
def test_memory_plan_counts_copies_of_recurrent_states(ranks):
    ranks.run(check_plan, "qwen3_5_text", "none", 3, speculation={})


@pytest.mark.slow
@pytest.mark.skipif(cpu_library() is None, reason="no C++ compiler here")
@pytest.mark.parametrize("lanes", [8, 16])
def test_memory_plan_equals_measured_memory_at_other_vector_widths(ranks, lanes):
    """Blocks hold whole vectors: of 8 lanes with AVX2, of 16 with AVX-512 and AMX."""
    ranks.run(check_plan, "gpt2", "none", 3, lanes)


class Lines(logging.Handler):
    """Records the messages of DeepSpeed's logger."""

    def __init__(self):
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def check_auto() -> None:
    """With decreasing memory limits; tokens equal Hugging Face's in every mode."""
    auto = {"inference_tp_size": "auto", "pin_parameters": "auto", "max_out_tokens": 16}
    plan = engine_with({"max_out_tokens": 16}, layers=DEEP).memory_plan(8, 8, 8)
    needs = {str(mode): need.total for mode, need in plan.needs.items()}
    model = tiny_model("llama", **SIZES["llama"] | {"num_hidden_layers": DEEP})
    ids, mask = prompts(3, 9, padded=True, seed=dist.get_rank())
    expected = twin(model).generate(ids, attention_mask=mask, max_new_tokens=5)
    for name in MODES:
        limit = needs[name] + 3 * dist.get_rank()  # ranks agree on the minimum
        lines = Lines()
        logger.addHandler(lines)
        level = logger.level
        logger.setLevel(logging.INFO)
        try:
            engine = engine_with(auto, layers=DEEP, max_num_seqs=8, memory_limit=limit)
        finally:
            logger.removeHandler(lines)
            logger.setLevel(level)
        plan = engine.memory_plan(8, 8, 8)
        assert str(plan.in_use) == name
        assert all(fits == (needs[str(mode)] <= limit) for mode in plan.needs for fits in [plan.fits(mode)])
        chosen = [line for line in lines.lines if f"held {name}: 8 of max_num_seqs=8" in line]
        assert len(chosen) == (dist.get_rank() == 0), (name, lines.lines)
        assert torch.equal(engine.generate(ids, attention_mask=mask, max_new_tokens=5), expected)
        engine.train()
        engine.destroy()
    # Fewer sequences at once rather than an error; of modes that fit as many, the faster.
    limit_of_two = next(
        need.total for mode, need in engine_with({}, layers=DEEP).memory_plan(2, 8, 8).needs.items() if mode.streaming
    )
    small = engine_with(auto, layers=DEEP, max_num_seqs=8, memory_limit=limit_of_two)
    assert str(small.memory_plan(1, 1, 1).in_use) == "streaming"
    fixed = {**auto, "pin_parameters": True}
    assert str(
        engine_with(fixed, layers=DEEP, max_num_seqs=8, memory_limit=needs["tensor parallel 2"])
        .memory_plan(1, 1, 1)
        .in_use
    ) == ("tensor parallel 2")
    with pytest.raises(ValueError, match=r"(?s)max_out_tokens=16; allow more.*mode.*pinned .*too much.*streaming.*too"):
        engine_with(auto, layers=DEEP, max_num_seqs=8, memory_limit=1000)
    # by the free memory
    assert str(engine_with(auto, layers=DEEP, max_num_seqs=8).memory_plan(1, 1, 1).in_use) == "pinned"


@pytest.mark.slow
def test_auto_takes_the_fastest_mode_that_fits(ranks):
    ranks.run(check_auto)


def check_limits(containers: str) -> None:
    """A request that cannot fit raises with the plan before any weight moves; one that can waits for free blocks."""
    engine = engine_with({}, containers=containers)
    need, smallest = (engine.memory_plan(*of).needs[engine.memory_plan(*of).in_use] for of in ((2, 32, 96), (1, 32, 0)))
    limit = need.total
    if containers == "fused":  # the memory of such a request's largest forward would hold more blocks
        limit -= need.activations + need.logits - smallest.activations - smallest.logits
    engine = engine_with({}, containers=containers, memory_limit=limit)
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    before = storage_digest(engine)
    calls = (
        lambda: engine.generate(ids, attention_mask=mask, max_new_tokens=400),
        lambda: engine.rollout(ids, mask, hybrid.SamplingParams(max_new_tokens=400)),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"(?s)memory_limit=.*MiB on a rank"):
            call()
        assert engine.stats()["gathered_bytes"] == 0  # ranks only agree on whether any needs the weights
    assert engine.module.training
    assert storage_digest(engine) == before
    many, mask = prompts(2 if containers == "native" else 9, 6, padded=True, seed=dist.get_rank())
    expected = twin(tiny_model("llama", **SIZES["llama"])).generate(many, attention_mask=mask, max_new_tokens=60)
    assert torch.equal(engine.generate(many, attention_mask=mask, max_new_tokens=60), expected)
    assert engine.stats()["peak_bytes"] <= limit


@pytest.mark.parametrize("containers", slow_but(["fused"], ["fused", "native"]))
def test_a_request_that_cannot_fit_raises_with_the_plan(ranks, containers):
    ranks.run(check_limits, containers)


class LiveBytes(TorchDispatchMode):
    """Live bytes of storages allocated inside the block, and their peak, counted at every operation."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        own = (tensor for param in model.parameters() for tensor in (param, param.ds_tensor))
        self.before = {StorageWeakRef(tensor.untyped_storage()) for tensor in own}
        self.made: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self.made[StorageWeakRef(storage)] = storage.nbytes()
        self.look()
        return out

    def look(self) -> int:
        """Live bytes now. A thread of gloo's keeps sent tensors a moment longer than the waiting rank."""
        now = self.alive()
        for _ in range(20):
            if now <= self.peak:
                break
            time.sleep(0.001)
            now = self.alive()
        self.peak = max(self.peak, now)
        return now

    def alive(self) -> int:
        """Bytes of storages that are still referenced."""
        self.made = {ref: nbytes for ref, nbytes in self.made.items() if not ref.expired()}
        return sum(nbytes for ref, nbytes in self.made.items() if ref not in self.before)


def check_peak(name: str, adapter: str) -> None:
    """Live while weights are gathered: the snapshot and one group; then the snapshot and the decoder's joined buffers;
    after the release nothing."""
    engine = engine_with(MODES[name], adapter=adapter, keep_snapshot=False)
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    engine.generate(ids, attention_mask=mask, max_new_tokens=2)  # the self-check is done
    layers = next(module for module in engine.module.modules() if isinstance(module, torch.nn.ModuleList))
    group = max(
        sum(p.ds_numel * 4 for p in part.parameters()) for part in (*layers, engine.module.get_input_embeddings())
    )
    with torch.no_grad(), LiveBytes(engine.module) as live:
        engine._runtime.window.refresh(True)
        gathering, held = live.peak, engine.stats()["snapshot_bytes"]
        assert held <= live.look() <= held + 1024
        with engine.inference():
            pass
        released = live.look()
    largest_weight = max(p.ds_numel * 4 for p in engine.module.parameters()) * (adapter != "none")  # while it is merged
    assert gathering <= held + group + largest_weight + 1024, (gathering, held, group)
    if name == "tensor parallel 2":
        assert gathering >= held + group / 2, "a gathered group was not counted"
    plan = engine.memory_plan(1, 1, 0)
    joined = plan.needs[plan.in_use].containers
    assert live.peak <= held + max(group + largest_weight, joined) + 1024, (live.peak, held, joined)
    assert released <= 1024, released


@pytest.mark.parametrize(
    ("name", "adapter"),
    slow_but(
        [("tensor parallel 2", "peft")],
        itertools.product(("pinned", "tensor parallel 2"), ("none", "peft")),
    ),
)
def test_peak_memory_of_a_refresh_is_the_snapshot_and_one_group(ranks, name, adapter):
    ranks.run(check_peak, name, adapter)


def check_streaming_peak() -> None:
    """Live while rows are scored: two layers, the embedding and head, and the buffers of the rows."""
    engine = engine_with(MODES["streaming"])
    ids, mask = prompts(1, 8, padded=False, seed=dist.get_rank())
    engine.score(ids, mask)  # the self-check is done
    engine.train()
    need = next(need for mode, need in engine.memory_plan(1, 8, 0).needs.items() if mode.streaming)
    rows = need.kv + need.logits * 8 * 4  # KV blocks; logits of eight tokens and their log-softmax
    with torch.no_grad(), LiveBytes(engine.module) as live, engine.inference():
        engine.score(ids, mask)
    assert need.gather / 2 <= live.peak <= need.gather + rows + 2**16, (live.peak, need)


@pytest.mark.slow
def test_peak_memory_of_streaming_is_two_layers(ranks):
    ranks.run(check_streaming_peak)


def check_plan_of_scores() -> None:
    """As in real models, logits are most of what inference takes: 16 MiB for LOGIT_ROWS tokens. Tied, checkpointed, and
    with other rows on each rank."""
    model = tiny_model("llama", vocab_size=16384, max_position_embeddings=512, tie_word_embeddings=True)
    model.gradient_checkpointing_enable()
    engine = engine_of(model, settings(3, hybrid_engine={"enabled": True, "max_out_tokens": 400}))
    rows = 3 + dist.get_rank()
    ids = torch.randint(3, 16384, (rows, 400))
    engine.score(ids[:, :40], torch.ones_like(ids[:, :40]))  # the self-check is done
    train_step(engine)
    engine.eval()
    plan = engine.memory_plan(rows, 400, 0)
    assert plan.needs[plan.in_use].logits > 0.5 * plan.needs[plan.in_use].total
    with torch.no_grad(), LiveBytes(engine.module) as live, engine.inference():
        engine.score(ids, torch.ones_like(ids))
    assert engine.stats()["fallback_reason"] == ""
    ratio = live.peak / plan.needs[plan.in_use].total
    assert 0.9 <= ratio <= 1.02, (ratio, plan.needs[plan.in_use])


def test_scores_over_a_large_vocabulary_take_what_the_plan_says(ranks):
    ranks.run(check_plan_of_scores)


class DataParallelUnit:
    """An `mpu` as Megatron passes it, whose model-parallel groups are single ranks."""

    def __init__(self):
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        self.alone = groups[dist.get_rank()]

    def get_model_parallel_group(self):
        return self.alone

    def get_model_parallel_rank(self):
        return 0

    def get_model_parallel_world_size(self):
        return 1

    def get_data_parallel_group(self):
        return dist.group.WORLD

    def get_data_parallel_rank(self):
        return dist.get_rank()

    def get_data_parallel_world_size(self):
        return dist.get_world_size()


def check_mpu() -> None:
    ids, mask = prompts(2 + dist.get_rank(), 9, padded=True, seed=dist.get_rank())
    for block in MODES.values():
        model = tiny_model("llama")
        expected = twin(model).generate(ids, attention_mask=mask, max_new_tokens=5)
        config = settings(3, hybrid_engine=block, rollout={"containers": "fused"})
        engine = hybrid.initialize(
            model=model, model_parameters=list(model.parameters()), config=config, mpu=DataParallelUnit()
        )[0]
        assert torch.equal(engine.generate(ids, attention_mask=mask, max_new_tokens=5), expected)
        train_step(engine)
        engine.destroy()


def test_every_mode_works_with_an_mpu(ranks):
    ranks.run(check_mpu)
