"""Two groups of two ranks: sampling seeds, saved slices, and requests of one group only."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hybrid
from hybrid.inference import build
from tests.execution.test_native_tensor_parallel import FAMILIES
from tests.inference.test_deepspeed_experts import with_mixtures
from tests.inference.test_tensor_parallel import check_equal, tp_engine
from tests.rank_pool import pool_of
from tests.tiny_models import prompts, tiny_model, twin

pytestmark = pytest.mark.slow  # starts four processes


four_ranks = pool_of(4)


def all_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all ranks."""
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return gathered


def crossed_group() -> dist.ProcessGroup:
    """Ranks 0 and 2, or 1 and 3."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return groups[dist.get_rank() % 2]


def check_seeds() -> None:
    """With one torch seed on all ranks, groups sample different tokens; with a seed per rank, ranks of a group still
    sample the same."""
    neighbours, crossed = [(0, 1), (2, 3)], [(0, 2), (1, 3)]
    group = crossed_group()
    ids, mask = prompts(3, 7, padded=True)
    request = {"attention_mask": mask, "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": True, "top_k": 0}
    with_plan = tiny_model("cohere", sizes=FAMILIES["cohere"]).eval()
    for model in (tiny_model("llama").eval(), with_plan):
        for tp, groups in (({"tp_size": 2}, neighbours), ({"tp_group": group}, crossed)):
            engine = tp_engine(twin(model), tp=tp, replace_with_kernel_inject=model is not with_plan)
            for seeds in ([0] * 4, range(4)):
                torch.manual_seed(seeds[dist.get_rank()])
                engine._share_seed()  # as for an engine built after seeding
                drawn = all_of(engine.generate(ids, **request))
                for first, second in groups:
                    assert torch.equal(drawn[first], drawn[second])
                assert not torch.equal(drawn[groups[0][0]], drawn[groups[1][0]])
            greedy = {**request, "do_sample": False, "top_k": None}
            assert torch.equal(engine.generate(ids, **greedy), model.generate(ids, **greedy))


def test_ranks_of_a_group_sample_the_same_tokens_and_groups_different_ones(four_ranks):
    four_ranks.run(check_seeds)


def check_written_once(folder: str) -> None:
    """One group saves, for any kind of group, also if it is the only one; the files load at a larger tp_size."""
    reference = tiny_model("llama").eval()
    rank, group = dist.get_rank(), crossed_group()
    second_pair = dist.new_group([2, 3])
    for name, tp, members in (
        ("ours", {"tp_size": 2}, range(4)),
        ("crossed", {"tp_group": group}, range(4)),
        ("crossed", {"tp_group": group}, range(4)),  # the same path again, by later engines
        ("alone", {"tp_group": second_pair}, (2, 3)),
    ):
        with mock.patch.object(build, "save_mp_checkpoint", wraps=build.save_mp_checkpoint) as save:
            if rank in members:
                tp_engine(twin(reference), tp=tp, save_mp_checkpoint_path=f"{folder}/{name}")
        written = all_of(torch.tensor(save.call_count))
        assert sum(written) == 2, (name, written)
    for name in ("ours", "crossed", "alone"):
        with torch.device("meta"):
            model = type(reference)(reference.config)
        engine = tp_engine(model, 4, checkpoint=f"{folder}/{name}")
        check_equal(engine, reference, same_prompts=False)


def test_slices_are_saved_once_and_load_at_a_larger_tp_size(four_ranks, tmp_path):
    four_ranks.run(check_written_once, str(tmp_path))


def check_experts_of_one_group() -> None:
    """Two ranks generate with experts over them; the other two, with their own experts, take no part."""
    rank = dist.get_rank()
    engine = hybrid.init_inference(with_mixtures(2, 2, True, rank % 2), dtype=torch.float32, moe={"ep_size": 2})
    if rank < 2:
        ids, mask = prompts(3, 7, padded=True, seed=rank)
        request = {"attention_mask": mask, "max_new_tokens": 3 + 4 * rank, "do_sample": False}
        reference = with_mixtures(1, 2, True)
        assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))
    dist.barrier()


def test_experts_communicate_only_in_their_own_group(four_ranks):
    four_ranks.run(check_experts_of_one_group, timeout_s=100)
