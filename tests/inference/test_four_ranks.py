"""Two groups of two ranks side by side: what they share, what they do not, and what only one of them does."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hybrid
from hybrid.inference import engine as inference_engine
from tests.engine.test_native_tensor_parallel import FAMILIES
from tests.inference.test_deepspeed_experts import with_mixtures
from tests.inference.test_tensor_parallel import check_equal, spread
from tests.rank_pool import RankPool
from tests.tiny_models import prompts, tiny_model, twin

pytestmark = pytest.mark.slow  # four processes begin


@pytest.fixture(scope="module")
def four_ranks():
    pool = RankPool(4)
    yield pool
    pool.close()


def all_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's tensor."""
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor)
    return found


def crossed_group() -> dist.ProcessGroup:
    """Ranks 0 and 2, or 1 and 3."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return groups[dist.get_rank() % 2]


def check_noise() -> None:
    """With one seed everywhere, groups draw differently; with a seed for each rank, a group still draws alike."""
    neighbours, crossed = [(0, 1), (2, 3)], [(0, 2), (1, 3)]
    group = crossed_group()
    ids, mask = prompts(3, 7, padded=True)
    request = {"attention_mask": mask, "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": True, "top_k": 0}
    planned = tiny_model("cohere", sizes=FAMILIES["cohere"]).eval()
    for model in (tiny_model("llama").eval(), planned):
        for tp, groups in (({"tp_size": 2}, neighbours), ({"tp_group": group}, crossed)):
            engine = spread(twin(model), tp=tp, kernel_inject=True)
            for seeds in ([0] * 4, range(4)):
                torch.manual_seed(seeds[dist.get_rank()])
                engine._share_seed()  # as an engine that was built after it
                drawn = all_of(engine.generate(ids, **request))
                for one, other in groups:
                    assert torch.equal(drawn[one], drawn[other])
                assert not torch.equal(drawn[groups[0][0]], drawn[groups[1][0]])
            greedy = {**request, "do_sample": False, "top_k": None}
            assert torch.equal(engine.generate(ids, **greedy), model.generate(ids, **greedy))


def test_groups_draw_their_own_noise_and_ranks_of_a_group_the_same(four_ranks):
    four_ranks.run(check_noise)


def check_written_once(folder: str) -> None:
    """One group writes, whoever has made the groups; and a group that is alone does too. Read at a larger size."""
    reference = tiny_model("llama").eval()
    rank, group = dist.get_rank(), crossed_group()
    alone = dist.new_group([2, 3])
    for name, tp, members in (
        ("ours", {"tp_size": 2}, range(4)),
        ("crossed", {"tp_group": group}, range(4)),
        ("crossed", {"tp_group": group}, range(4)),  # the same path again, by engines that come later
        ("alone", {"tp_group": alone}, (2, 3)),
    ):
        with mock.patch.object(
            inference_engine, "save_mp_checkpoint", wraps=inference_engine.save_mp_checkpoint
        ) as save:
            if rank in members:
                spread(twin(reference), tp=tp, save_mp_checkpoint_path=f"{folder}/{name}")
        written = all_of(torch.tensor(save.call_count))
        assert sum(written) == 2, (name, written)
    for name in ("ours", "crossed", "alone"):
        with torch.device("meta"):
            model = type(reference)(reference.config)
        engine = spread(model, 4, checkpoint=f"{folder}/{name}", kernel_inject=True)
        check_equal(engine, reference, same=False)


def test_parts_are_written_once_and_read_at_a_larger_size(four_ranks, tmp_path):
    four_ranks.run(check_written_once, str(tmp_path))


def check_experts_of_one_group() -> None:
    """Two ranks generate over their experts; the other two, who have experts of their own, know nothing of it."""
    rank = dist.get_rank()
    engine = hybrid.init_inference(with_mixtures(2, 2, True, rank % 2), dtype=torch.float32, moe={"ep_size": 2})
    if rank < 2:
        ids, mask = prompts(3, 7, padded=True, seed=rank)
        request = {"attention_mask": mask, "max_new_tokens": 3 + 4 * rank, "do_sample": False}
        reference = with_mixtures(1, 2, True)
        assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))
    dist.barrier()


def test_experts_ask_their_own_group_alone(four_ranks):
    four_ranks.run(check_experts_of_one_group, timeout_s=100)
