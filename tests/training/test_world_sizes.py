"""World sizes of one, and of three, which divides no dimension evenly."""

import pytest
import torch
import torch.distributed as dist

import hybrid
from tests.engines import engine_of, settings, train_step
from tests.rank_pool import RankPool
from tests.tiny_models import prompts, tiny_model, twin
from tests.training.test_generate import check_family
from tests.training.test_laws import check_collectives, check_exception


def check_rollout_and_step() -> None:
    model = tiny_model("qwen3")
    reference = twin(model)
    engine = engine_of(model, settings(3))
    ids, mask = prompts(2, 5, padded=True, seed=dist.get_rank())
    request = {"attention_mask": mask, "max_new_tokens": 5}
    assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))
    for step in range(2):
        train_step(engine, step)
        batch = engine.rollout(ids, mask, hybrid.SamplingParams(max_new_tokens=6, seed=1), num_generations=2)
        logps = engine.score(batch.sequences, batch.attention_mask).per_token_logps[:, 4:] * batch.completion_mask
        torch.testing.assert_close(batch.sampling_per_token_logps, logps, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("world_size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_rollout_and_step_at_world_sizes_1_and_3(world_size):
    pool = RankPool(world_size)
    try:
        pool.run(check_rollout_and_step)
        pool.run(check_family, "llama", "peft", [(0, 0), (3, 0)])
        if world_size > 1:
            pool.run(check_exception, 3, "peft")
            pool.run(check_collectives, "none", 3)
    finally:
        pool.close()
