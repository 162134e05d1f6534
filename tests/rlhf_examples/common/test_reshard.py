"""A run resumed on another number of ranks equals the uninterrupted run, under every ZeRO stage."""

import json
import math
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from rlhf_examples.common.arguments import SFTArguments
from rlhf_examples.common.checkpoint import Checkpoints
from rlhf_examples.common.ema import MovingAverage
from rlhf_examples.common.engines import Training, make_engine
from rlhf_examples.common.models import LoRA
from rlhf_examples.common.reshard import Partition, Piece, repartition
from tests.engines import train_step
from tests.marks import slow_but
from tests.rank_pool import RankPool, pool_of
from tests.rlhf_examples.scripts import TINY, logged, models_of, run_in_this_rank
from tests.rlhf_examples.test_same_curves import ALL_OF_A_RANK, ROUNDING, TOLERANCE
from tests.tiny_models import tiny_model

STATES = ("exp_avg", "exp_avg_sq")


one_rank, four_ranks = pool_of(1), pool_of(4)


def checkpoints_of(folder: Path, stage: int, dtype: str, lora_rank: int):
    """An engine, its weights' moving average, and their checkpoints."""
    args = SFTArguments(dtype=dtype)
    settings = Training(stage, 2, 1e-2, 0.0, "constant", 0, 10, False, LoRA(lora_rank, 16, "all-linear"))
    torch.manual_seed(dist.get_world_size())  # weights that the checkpoint must replace
    model = tiny_model("llama").to(torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    model = settings.lora.apply(model, "CAUSAL_LM")
    engine = make_engine(model, args, settings)
    average = MovingAverage(engine, 0.5)
    return engine, average, Checkpoints(folder, {"model": engine}, {"average": average}, 1)


def gathered_state(engine, average) -> dict[str, torch.Tensor]:
    """Every trained parameter, its optimizer states and moving average, gathered, by name; and logits of a forward."""
    tensors = {}
    # ZeRO-1 and 2 otherwise create the states at the first step
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            tensors[f"{name} average"] = average.full_tensor(parameter).float().cpu().clone()
            tensors[name] = safe_get_full_fp32_param(parameter).cpu().clone()
            tensors |= {f"{name} {key}": safe_get_full_optimizer_state(parameter, key).cpu().clone() for key in STATES}
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        tensors["logits"] = engine(ids, attention_mask=torch.ones_like(ids)).logits.float().cpu()
    return tensors


def save(folder: Path, stage: int, dtype: str, lora_rank: int) -> dict[str, torch.Tensor]:
    engine, average, checkpoints = checkpoints_of(folder, stage, dtype, lora_rank)
    for step in range(3):
        train_step(engine, step)
        average.update()
    checkpoints.save(3)
    return gathered_state(engine, average)


def restored(folder: Path, stage: int, dtype: str, lora_rank: int) -> tuple[dict[str, torch.Tensor], float, int]:
    engine, average, checkpoints = checkpoints_of(folder, stage, dtype, lora_rank)
    assert checkpoints.load_latest() == 3
    tensors = gathered_state(engine, average)
    assert not list(folder.glob("*.unfinished"))
    states = engine.optimizer.optimizer.state.values()
    train_step(engine, 3)
    return tensors, float(next(iter(states))["step"]), engine.global_steps


@pytest.mark.parametrize(
    ("stage", "dtype", "lora_rank"),
    slow_but(
        [(3, "bfloat16", 4)],
        [(1, "float32", 0), (2, "bfloat16", 0), (3, "float32", 0), (3, "bfloat16", 4)],
    ),
)
def test_resharding_keeps_weights_optimizer_states_and_averages(one_rank, ranks, tmp_path, stage, dtype, lora_rank):
    for before, after in ((ranks, one_rank), (one_rank, ranks)):
        folder = tmp_path / str(before.world_size)
        expected, *_ = before.run(save, folder, stage, dtype, lora_rank)
        for actual, step, global_steps in after.run(restored, folder, stage, dtype, lora_rank):
            assert actual.keys() == expected.keys() and len(actual) > 20
            for name, tensor in expected.items():
                tolerance = {"atol": 1e-5, "rtol": 1e-5} if name == "logits" else {"atol": 0, "rtol": 0}
                torch.testing.assert_close(actual[name], tensor, **tolerance)
            assert (step, global_steps) == (4, 4)


@pytest.mark.slow
def test_resharding_from_two_to_four_ranks(ranks, four_ranks, tmp_path):
    for stage in (1, 3):
        expected, *_ = ranks.run(save, tmp_path / str(stage), stage, "float32", 0)
        for actual, *_ in four_ranks.run(restored, tmp_path / str(stage), stage, "float32", 0):
            for name, tensor in expected.items():
                torch.testing.assert_close(actual[name], tensor, atol=1e-5, rtol=1e-5)


def load_with_another_stage(folder: Path) -> str:
    _, _, checkpoints = checkpoints_of(folder, 2, "float32", 0)
    with pytest.raises(ValueError, match="resume") as raised:
        checkpoints.load_latest()
    return str(raised.value)


def test_resuming_under_another_zero_stage_raises(one_rank, ranks, tmp_path):
    ranks.run(save, tmp_path, 3, "float32", 0)
    for pool in (one_rank, ranks):
        for message in pool.run(load_with_another_stage, tmp_path):
            assert "was saved under ZeRO {'model': 3}, and this run has {'model': 2}; give the stages that" in message


def test_repartition_between_random_layouts():
    """Parameters of random sizes in partitions of random lengths with gaps, between random numbers of ranks."""
    draw = random.Random(0)
    for _ in range(30):
        sizes = {f"p{number}": draw.randint(1, 40) for number in range(4)}
        wholes_of = {name: torch.randn(size) for name, size in sizes.items()}

        def layout(ranks: int, sizes=sizes) -> list[list[Piece]]:
            actual = [[] for _ in range(ranks)]
            for name, size in sizes.items():
                ends = sorted(draw.randint(0, size) for _ in range(ranks - 1))
                for rank, (first, last) in enumerate(zip([0, *ends], [*ends, size], strict=True)):
                    offset = max((piece.offset + piece.numel for piece in actual[rank]), default=0) + draw.randint(0, 3)
                    actual[rank].append(Piece(name, 0, offset, first, last - first))
            return actual

        def flat(pieces: list[Piece], wholes_of=wholes_of) -> torch.Tensor:
            values = torch.zeros(200)
            for piece in pieces:
                part = wholes_of[piece.name][piece.start : piece.start + piece.numel]
                values[piece.offset : piece.offset + piece.numel] = part
            return values

        old, new = layout(draw.randint(1, 4)), layout(draw.randint(1, 4))
        partitions = [Partition({"fp32": {0: flat(pieces)}}, pieces) for pieces in old]
        for pieces in new:
            (layout_of_ranks,) = repartition(partitions, "fp32", pieces, [200])
            assert torch.equal(layout_of_ranks, flat(pieces))


def run(pool: RankPool, script: str, stage: int, small, directory: Path, **changes) -> None:
    """Run a script with the same records in each iteration for any number of ranks."""
    each = {name: TINY[script][name] * 2 // pool.world_size for name in ALL_OF_A_RANK if name in TINY[script]}
    roles = {"ppo": ("actor_", "critic_"), "grpo": ("actor_",)}.get(script, ("",))
    stages = [f"{role}zero_stage" for role in roles]
    models = {} if script == "sft" else models_of(script, small)
    settings = {**models, **dict.fromkeys(stages, stage), **each, "lr_scheduler_type": "constant", "save_every": 2}
    pool.run(run_in_this_rank, script, {**settings, **changes, "output_dir": str(directory)})


def require_the_same(script: str, stage: int, pools: tuple[RankPool, RankPool], small, tmp_path, **changes) -> None:
    """Two iterations on one pool and two on the other equal four on the first."""
    first, second = pools
    steps = "num_iterations" if script in ("ppo", "grpo") else "max_steps"
    run(first, script, stage, small, tmp_path / "whole", **changes)
    run(first, script, stage, small, tmp_path / "parted", **{**changes, steps: 2})
    run(second, script, stage, small, tmp_path / "parted", **changes, resume=True)
    undisturbed, resumed = logged(tmp_path / "whole"), logged(tmp_path / "parted")
    assert [row["iteration"] for row in undisturbed] == [row["iteration"] for row in resumed] == [1, 2, 3, 4]
    about = json.loads((tmp_path / "parted" / "checkpoints" / "iteration-000004" / "run.json").read_text())
    assert about["world_size"] == second.world_size
    for row, expected in zip(resumed, undisturbed, strict=True):
        for name, value in expected.items():
            ignored = script != "sft" and name.startswith("eval_")  # the first part's last iteration evaluates
            if isinstance(value, float | int) and name in row and not name.startswith(ROUNDING) and not ignored:
                assert math.isclose(row[name], value, rel_tol=TOLERANCE, abs_tol=TOLERANCE), (name, row[name], value)


PPO = {"adap_kl_ctrl": True, "kl_target": 0.01, "kl_horizon": 20, "enable_ema": True}


@pytest.mark.slow
def test_sft_of_two_ranks_resumes_on_one(one_rank, ranks, small, tmp_path):
    require_the_same("sft", 3, (ranks, one_rank), small, tmp_path, enable_ema=True)


def test_ppo_of_one_rank_resumes_on_two(one_rank, ranks, small, tmp_path):
    require_the_same("ppo", 2, (one_rank, ranks), small, tmp_path, **PPO)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("script", ["sft", "ppo", "grpo"])
def test_scripts_resume_on_another_world_size(script, stage, one_rank, ranks, small, tmp_path):
    changes = PPO if script == "ppo" else {"actor_lora_dim": 4} if script == "grpo" and stage == 3 else {}
    for number, pools in enumerate(((ranks, one_rank), (one_rank, ranks))):
        require_the_same(script, stage, pools, small, tmp_path / str(number), **changes)


def test_rows_are_counted_exactly_when_the_global_batch_changes(one_rank, ranks, small, tmp_path):
    """The batch per rank is the same, so that a step of one rank takes half the rows of a step of two."""
    settings = {"per_device_train_batch_size": 4, "eval_fraction": 0.0}
    run(ranks, "sft", 3, small, tmp_path, **settings, max_steps=2)
    run(one_rank, "sft", 3, small, tmp_path, **settings, max_steps=4, resume=True)
    states = torch.load(tmp_path / "checkpoints" / "iteration-000004" / "rank0.pt", weights_only=True)
    assert states["parts"]["rows"] == {"taken": 2 * 8 + 2 * 4}
