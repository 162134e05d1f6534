"""Expert parallelism, alone and combined with tensor parallelism, gives one rank's tokens."""

import pytest
import torch
import torch.distributed as dist

import hybrid
from tests.inference.test_tensor_parallel import check_equal
from tests.marks import slow_but
from tests.rank_pool import RankPool
from tests.tiny_models import tiny_model, tiny_non_decoder, twin

MIXTURES = ["mixtral", "qwen3_moe"]  # the second has a layer without experts


def ep_engine(model, ep_size: int, tp_size: int = 1, **settings) -> hybrid.InferenceEngine:
    more = {"moe": {"ep_size": ep_size}, "tp": {"tp_size": tp_size}, **settings}
    return hybrid.init_inference(model, dtype=torch.float32, **more)


def check_experts(family: str, ep_size: int, tp_size: int, folder: str) -> None:
    reference = tiny_model(family).eval()
    experts = sum(
        param.nbytes for name, param in reference.named_parameters() if "experts." in name and param.dim() == 3
    )
    for checkpoint in (None, folder):
        model = twin(reference)
        if checkpoint:
            with torch.device("meta"):
                model = type(reference)(reference.config)
        engine = ep_engine(model, ep_size, tp_size, checkpoint=checkpoint)
        for same in (True, False):
            check_equal(engine, reference, same)
        slices_held = [part for parts in engine._snapshot.parts.values() for part in parts.values() if part is not None]
        assert sum(part.nbytes for part in slices_held if part.dim() == 3) * ep_size * tp_size == experts
        engine.destroy()
    dist.barrier()


@pytest.mark.parametrize("family", slow_but(["mixtral"], (*MIXTURES, "qwen3_next", "nemotron_h")))
def test_two_ranks_hold_half_of_the_experts_each(ranks, tmp_path, family):
    tiny_model(family).save_pretrained(tmp_path)
    ranks.run(check_experts, family, 2, 1, str(tmp_path))


def check_grids(folder: str) -> None:
    for family in MIXTURES:
        for ep_size, tp_size in ((2, 2), (4, 1), (2, 1)):
            check_experts(family, ep_size, tp_size, f"{folder}/{family}")


@pytest.mark.slow
def test_expert_and_tensor_parallel_grids_of_four_ranks(tmp_path):
    for family in MIXTURES:
        tiny_model(family).save_pretrained(tmp_path / family)
    pool = RankPool(4)
    try:
        pool.run(check_grids, str(tmp_path))
    finally:
        pool.close()


def check_old_names_and_groups() -> None:
    reference = tiny_model("mixtral").eval()
    with pytest.warns(FutureWarning, match="ep_size is an old name"):
        check_equal(hybrid.init_inference(twin(reference), dtype="float32", ep_size=2), reference, same_prompts=False)
    group = dist.new_group([0, 1])
    check_equal(ep_engine(twin(reference), 2, moe={"ep_size": 2, "ep_group": group}), reference, same_prompts=False)


def test_old_setting_names_and_given_groups(ranks):
    ranks.run(check_old_names_and_groups)


@pytest.mark.parametrize(
    ("family", "config", "error", "message"),
    [
        ("mixtral", {"moe": {"ep_size": 3}}, ValueError, "ep_size: 3 given; it must divide the 4 experts"),
        (
            "mixtral",
            {"moe": {"ep_size": 2}},
            ValueError,
            "2 given; tp_size=1 times ep_size must divide the world size, 1",
        ),
        ("mixtral", {"moe": {"moe_experts": [8]}}, ValueError, r"\[8\] given; MixtralForCausalLM has 4 experts"),
        ("mixtral", {"moe": {"type": "residual"}}, NotImplementedError, "'residual' given; it must be 'standard'"),
        ("mixtral", {"moe": {"ep_mp_group": 1}}, NotImplementedError, "moe.ep_mp_group: given"),
        ("llama", {"moe": {"ep_size": 2}}, NotImplementedError, "LlamaForCausalLM has no experts that are known"),
        ("bert", {"moe": {"ep_size": 2}}, NotImplementedError, "BertForMaskedLM has no experts that are known"),
    ],
)
def test_invalid_moe_settings_raise(family, config, error, message):
    model = tiny_non_decoder(family) if family == "bert" else tiny_model(family)
    with pytest.raises(error, match=message):
        hybrid.init_inference(model, dtype="float32", **config)


def test_moe_settings_that_match_the_model_are_accepted():
    for moe in (True, False, {"num_experts": [4]}, {"enabled": False, "ep_size": 2}):
        assert hybrid.init_inference(tiny_model("mixtral"), dtype="float32", moe=moe)._group.size == 1
