"""DeepSpeed's own MoE layers: experts over two ranks, from the model's weights and from what training saved."""

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn

import hybrid
from hybrid.weights.deepspeed_experts import EXPERTS
from tests.models import prompts

SIZE, VOCABULARY, COUNT = 16, 97, 4


class Mixture(nn.Module):
    """Logits of tokens through one mixture. No token is dropped, and nothing is drawn."""

    def __init__(self, ep_size: int, use_residual: bool = False):
        super().__init__()
        expert = nn.Sequential(nn.Linear(SIZE, 2 * SIZE), nn.ReLU(), nn.Linear(2 * SIZE, SIZE))
        self.embedding = nn.Embedding(VOCABULARY, SIZE)
        more = {"eval_capacity_factor": COUNT, "use_rts": False, "top2_2nd_expert_sampling": False}
        self.mixture = MoE(SIZE, expert, COUNT, ep_size, k=2, use_residual=use_residual, **more)
        self.head = nn.Linear(SIZE, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        return self.head(hidden + self.mixture(hidden)[0])


def whole(use_residual: bool = False) -> Mixture:
    """All experts on every rank, each of its own."""
    torch.manual_seed(0)
    model = Mixture(1, use_residual)
    for param in model.parameters():
        nn.init.normal_(param, std=0.3)
    return model.eval()


def half(reference: Mixture, use_residual: bool = False) -> Mixture:
    """This rank's half of the experts, and everything else."""
    model, first = Mixture(2, use_residual).eval(), dist.get_rank() * COUNT // 2
    state = {}
    for name, tensor in reference.state_dict().items():
        prefix, _, rest = name.partition(f"{EXPERTS}.")
        if rest:
            number, _, leaf = rest.partition(".")
            if 0 <= int(number) - first < COUNT // 2:
                state[f"{prefix}{EXPERTS}.{int(number) - first}.{leaf}"] = tensor
        else:
            state[name] = tensor
    model.load_state_dict(state)
    return model


def check_same(engine: hybrid.InferenceEngine, reference: Mixture) -> None:
    ids, _ = prompts(3, 5, padded=False, seed=dist.get_rank())
    with torch.no_grad():
        torch.testing.assert_close(engine(ids), reference(ids), atol=1e-5, rtol=1e-5)


def check_experts(folder: str, stage: int) -> None:
    for residual, kind in ((False, "standard"), (True, "residual")):
        reference = whole(residual)
        moe = {"ep_size": 2, "moe_experts": [COUNT], "type": kind}
        check_same(hybrid.init_inference(half(reference, residual), dtype=torch.float32, moe=moe), reference)
    reference = whole()
    model = half(reference)
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "parameters"}
    )
    training = deepspeed.initialize(
        model=model,
        model_parameters=groups,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}},
            "zero_optimization": {"stage": stage},
        },
    )[0]
    training.save_checkpoint(folder, tag="saved")
    dist.barrier()
    for ep_size in (1, 2):  # other weights than those that were saved
        fresh = Mixture(ep_size)
        engine = hybrid.init_inference(fresh, dtype=torch.float32, moe={"ep_size": ep_size}, checkpoint=folder)
        check_same(engine, reference)


@pytest.mark.parametrize("stage", [0, 1])
def test_two_ranks_have_half_of_the_experts_each(ranks, tmp_path, stage):
    ranks.run(check_experts, str(tmp_path), stage)


def check_refusals() -> None:
    for moe, words in (
        ({"ep_size": 1}, "moe.ep_size: 1 given; mixture was built with ep_size=2"),
        ({"ep_size": 2, "moe_experts": [8]}, r"moe.moe_experts: \[8\] given; mixture has 4 experts"),
        ({"ep_size": 2, "type": "residual"}, "moe.type: 'residual' given; mixture is standard"),
    ):
        with pytest.raises(ValueError, match=words):
            hybrid.init_inference(Mixture(2), dtype=torch.float32, moe=moe)


def test_what_the_layers_are_not_is_refused(ranks):
    ranks.run(check_refusals)
