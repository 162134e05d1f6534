"""A run that is resumed on another number of ranks follows the one that was not disturbed, under every ZeRO stage."""

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
from tests.rank_pool import RankPool
from tests.rlhf_examples.scripts import TINY, logged, models_of, run_here, small_directory
from tests.rlhf_examples.test_same_curves import ALL_OF_A_RANK, ROUNDING, TOLERANCE
from tests.tiny_models import tiny_model

STATES = ("exp_avg", "exp_avg_sq")


def pool_of(world_size: int):
    @pytest.fixture(scope="module")
    def ranks_of():
        pool = RankPool(world_size)
        yield pool
        pool.close()

    return ranks_of


one, four = pool_of(1), pool_of(4)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_directory(tmp_path_factory.mktemp("small"))


def checkpoints_of(folder: Path, stage: int, dtype: str, lora_rank: int):
    """An engine, the average of its weights, and their checkpoints."""
    args = SFTArguments(dtype=dtype)
    settings = Training(stage, 2, 1e-2, 0.0, "constant", 0, 10, False, LoRA(lora_rank, 16, "all-linear"))
    torch.manual_seed(dist.get_world_size())  # a model that has to be restored
    model = tiny_model("llama").to(torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    model = settings.lora.on(model, "CAUSAL_LM")
    engine = make_engine(model, args, settings)
    average = MovingAverage(engine, 0.5)
    return engine, average, Checkpoints(folder, {"model": engine}, {"average": average}, 1)


def wholes(engine, average) -> dict[str, torch.Tensor]:
    """Every trained parameter, its states and its average, whole, by name; and what a forward gives."""
    found = {}
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):  # ZeRO-1 and 2: else with the first step
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            found[f"{name} average"] = average.whole(parameter).float().cpu().clone()
            found[name] = safe_get_full_fp32_param(parameter).cpu().clone()
            found |= {f"{name} {key}": safe_get_full_optimizer_state(parameter, key).cpu().clone() for key in STATES}
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        found["logits"] = engine(ids, attention_mask=torch.ones_like(ids)).logits.float().cpu()
    return found


def save(folder: Path, stage: int, dtype: str, lora_rank: int) -> dict[str, torch.Tensor]:
    engine, average, checkpoints = checkpoints_of(folder, stage, dtype, lora_rank)
    for step in range(3):
        train_step(engine, step)
        average.update()
    checkpoints.save(3)
    return wholes(engine, average)


def restored(folder: Path, stage: int, dtype: str, lora_rank: int) -> tuple[dict[str, torch.Tensor], float, int]:
    engine, average, checkpoints = checkpoints_of(folder, stage, dtype, lora_rank)
    assert checkpoints.load_latest() == 3
    found = wholes(engine, average)
    assert not list(folder.glob("*.unfinished"))
    states = engine.optimizer.optimizer.state.values()
    train_step(engine, 3)
    return found, float(next(iter(states))["step"]), engine.global_steps


@pytest.mark.parametrize(
    ("stage", "dtype", "lora_rank"),
    [(1, "float32", 0), (2, "bfloat16", 0), (3, "float32", 0), (3, "bfloat16", 4)],
)
def test_weights_states_and_averages_are_the_same_ones(one, ranks, tmp_path, stage, dtype, lora_rank):
    for before, after in ((ranks, one), (one, ranks)):
        folder = tmp_path / str(before.world_size)
        expected, *_ = before.run(save, folder, stage, dtype, lora_rank)
        for found, step, global_steps in after.run(restored, folder, stage, dtype, lora_rank):
            assert found.keys() == expected.keys() and len(found) > 20
            for name, tensor in expected.items():
                tolerance = {"atol": 1e-5, "rtol": 1e-5} if name == "logits" else {"atol": 0, "rtol": 0}
                torch.testing.assert_close(found[name], tensor, **tolerance)
            assert (step, global_steps) == (4, 4)


@pytest.mark.slow
def test_two_ranks_become_four(ranks, four, tmp_path):
    for stage in (1, 3):
        expected, *_ = ranks.run(save, tmp_path / str(stage), stage, "float32", 0)
        for found, *_ in four.run(restored, tmp_path / str(stage), stage, "float32", 0):
            for name, tensor in expected.items():
                torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-5)


def load_with_another_stage(folder: Path) -> str:
    _, _, checkpoints = checkpoints_of(folder, 2, "float32", 0)
    with pytest.raises(ValueError, match="resume") as raised:
        checkpoints.load_latest()
    return str(raised.value)


def test_another_stage_is_refused(one, ranks, tmp_path):
    ranks.run(save, tmp_path, 3, "float32", 0)
    for pool in (one, ranks):
        for words in pool.run(load_with_another_stage, tmp_path):
            assert "was saved under ZeRO {'model': 3}, and this run has {'model': 2}; give the stages that" in words


def test_pieces_are_cut_anew_whatever_the_two_layouts():
    """Parameters of random sizes, in partitions of random lengths with gaps, from so many ranks to as many others."""
    draw = random.Random(0)
    for _ in range(30):
        sizes = {f"p{number}": draw.randint(1, 40) for number in range(4)}
        wholes_of = {name: torch.randn(size) for name, size in sizes.items()}

        def layout(ranks: int, sizes=sizes) -> list[list[Piece]]:
            found = [[] for _ in range(ranks)]
            for name, size in sizes.items():
                ends = sorted(draw.randint(0, size) for _ in range(ranks - 1))
                for rank, (first, last) in enumerate(zip([0, *ends], [*ends, size], strict=True)):
                    offset = max((piece.offset + piece.numel for piece in found[rank]), default=0) + draw.randint(0, 3)
                    found[rank].append(Piece(name, 0, offset, first, last - first))
            return found

        def flat(pieces: list[Piece], wholes_of=wholes_of) -> torch.Tensor:
            values = torch.zeros(200)
            for piece in pieces:
                part = wholes_of[piece.name][piece.start : piece.start + piece.numel]
                values[piece.offset : piece.offset + piece.numel] = part
            return values

        old, new = layout(draw.randint(1, 4)), layout(draw.randint(1, 4))
        partitions = [Partition({"fp32": {0: flat(pieces)}}, pieces) for pieces in old]
        for pieces in new:
            (found,) = repartition(partitions, "fp32", pieces, [200])
            assert torch.equal(found, flat(pieces))


def run(pool: RankPool, script: str, stage: int, small, directory: Path, **changes) -> None:
    """With the same records in each iteration whatever the number of ranks."""
    each = {name: TINY[script][name] * 2 // pool.world_size for name in ALL_OF_A_RANK if name in TINY[script]}
    roles = {"ppo": ("actor_", "critic_"), "grpo": ("actor_",)}.get(script, ("",))
    stages = [f"{role}zero_stage" for role in roles]
    models = {} if script == "sft" else models_of(script, small)
    settings = {**models, **dict.fromkeys(stages, stage), **each, "lr_scheduler_type": "constant", "save_every": 2}
    pool.run(run_here, script, {**settings, **changes, "output_dir": str(directory)})


def require_the_same(script: str, stage: int, pools: tuple[RankPool, RankPool], small, tmp_path, **changes) -> None:
    """Two iterations on one number of ranks and two on the other, as all four on the first."""
    first, second = pools
    steps = "num_iterations" if script in ("ppo", "grpo") else "max_steps"
    run(first, script, stage, small, tmp_path / "whole", **changes)
    run(first, script, stage, small, tmp_path / "parted", **{**changes, steps: 2})
    run(second, script, stage, small, tmp_path / "parted", **changes, resume=True)
    whole, parted = logged(tmp_path / "whole"), logged(tmp_path / "parted")
    assert [row["iteration"] for row in whole] == [row["iteration"] for row in parted] == [1, 2, 3, 4]
    about = json.loads((tmp_path / "parted" / "checkpoints" / "iteration-000004" / "run.json").read_text())
    assert about["world_size"] == second.world_size
    for row, other in zip(parted, whole, strict=True):
        for name, value in other.items():
            ignored = script != "sft" and name.startswith("eval_")  # the second iteration of the first part is its last
            if isinstance(value, float | int) and name in row and not name.startswith(ROUNDING) and not ignored:
                assert math.isclose(row[name], value, rel_tol=TOLERANCE, abs_tol=TOLERANCE), (name, row[name], value)


PPO = {"adap_kl_ctrl": True, "kl_target": 0.01, "kl_horizon": 20, "enable_ema": True}


def test_sft_goes_on_with_one_rank_of_two(one, ranks, small, tmp_path):
    require_the_same("sft", 3, (ranks, one), small, tmp_path, enable_ema=True)


def test_ppo_goes_on_with_two_ranks_of_one(one, ranks, small, tmp_path):
    require_the_same("ppo", 2, (one, ranks), small, tmp_path, **PPO)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("script", ["sft", "ppo", "grpo"])
def test_scripts_go_on_with_other_ranks(script, stage, one, ranks, small, tmp_path):
    changes = PPO if script == "ppo" else {"actor_lora_dim": 4} if script == "grpo" and stage == 3 else {}
    for number, pools in enumerate(((ranks, one), (one, ranks))):
        require_the_same(script, stage, pools, small, tmp_path / str(number), **changes)


def test_rows_are_not_learned_from_twice_where_batches_are_others(one, ranks, small, tmp_path):
    """A rank's batch is the same, so that one rank takes half the rows in a step that two took."""
    settings = {"per_device_train_batch_size": 4, "eval_fraction": 0.0}
    run(ranks, "sft", 3, small, tmp_path, **settings, max_steps=2)
    run(one, "sft", 3, small, tmp_path, **settings, max_steps=4, resume=True)
    states = torch.load(tmp_path / "checkpoints" / "iteration-000004" / "rank0.pt", weights_only=False)
    assert states["parts"]["rows"] == {"taken": 2 * 8 + 2 * 4}
