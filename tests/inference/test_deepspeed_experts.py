"""DeepSpeed's own MoE layers: experts over two ranks, from the model's weights and from a training checkpoint."""

import contextlib
import zlib

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn

import hybrid
from hybrid.inference.checkpoints import EXPERTS
from tests.marks import slow_but
from tests.tiny_models import prompts, tiny_model

SIZE, VOCABULARY, COUNT = 16, 97, 4


class Mixture(nn.Module):
    """Logits of tokens through one MoE layer, which drops no token and samples nothing."""

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


def replicated_model(use_residual: bool = False) -> Mixture:
    """A model with all experts on every rank, with distinct weights."""
    torch.manual_seed(0)
    model = Mixture(1, use_residual)
    for param in model.parameters():
        nn.init.normal_(param, std=0.3)
    return model.eval()


def sharded_model(reference: Mixture, use_residual: bool = False) -> Mixture:
    """A model with this rank's half of the experts, and all other weights."""
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


def require_same_outputs(engine: hybrid.InferenceEngine, reference: Mixture) -> None:
    ids, _ = prompts(3, 5, padded=False, seed=dist.get_rank())
    with torch.no_grad():
        torch.testing.assert_close(engine(ids), reference(ids), atol=1e-5, rtol=1e-5)


def check_experts(folder: str, stage: int) -> None:
    for residual, kind in ((False, "standard"), (True, "residual")):
        reference = replicated_model(residual)
        moe = {"ep_size": 2, "moe_experts": [COUNT], "type": kind}
        require_same_outputs(
            hybrid.init_inference(sharded_model(reference, residual), dtype=torch.float32, moe=moe), reference
        )
    reference = replicated_model()
    model = sharded_model(reference)
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
    for ep_size in (1, 2):  # with weights other than the saved ones
        fresh = Mixture(ep_size)
        engine = hybrid.init_inference(fresh, dtype=torch.float32, moe={"ep_size": ep_size}, checkpoint=folder)
        require_same_outputs(engine, reference)


@pytest.mark.parametrize("stage", [0, 1])
def test_experts_over_two_ranks_match_all_experts(ranks, tmp_path, stage):
    ranks.run(check_experts, str(tmp_path), stage)


class MixtureMLP(nn.Module):
    """An MoE layer in place of a decoder layer's MLP."""

    def __init__(self, ep_size: int, k: int, drop_tokens: bool):
        super().__init__()
        expert = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32))
        more = {"use_rts": False, "top2_2nd_expert_sampling": False, "drop_tokens": drop_tokens, "min_capacity": 0}
        self.moe = MoE(32, expert, COUNT, ep_size, k=k, eval_capacity_factor=COUNT, **more)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.moe(hidden)[0]


def with_mixtures(ep_size: int, k: int, drop_tokens: bool, rank: int = 0) -> nn.Module:
    """A Llama with two MoE layers and this rank's experts; equal weights for every ep_size."""
    model = tiny_model("llama").eval()
    for index in (0, 2):
        model.model.layers[index].mlp = MixtureMLP(ep_size, k, drop_tokens)
    own = COUNT // ep_size
    for name, param in model.named_parameters():
        if "mlp.moe" in name:
            before, is_expert, after = name.partition(f"{EXPERTS}.")
            if is_expert:
                number, _, after = after.partition(".")
                after = f"{int(number) + rank * own}.{after}"
            generator = torch.Generator().manual_seed(zlib.crc32((before + after).encode()))
            nn.init.normal_(param, std=0.3, generator=generator)
    return model.eval()


def check_generate(k: int, drop_tokens: bool) -> None:
    """Tokens equal those of the model with all experts, for ranks with different lengths, prompt shapes and
    forwards."""
    rank = dist.get_rank()
    reference = with_mixtures(1, k, drop_tokens)
    model = with_mixtures(2, k, drop_tokens, rank)
    engine = hybrid.init_inference(model, dtype=torch.float32, moe={"ep_size": 2}, kernel_inject=True)
    assert all("native" in row["container"] for row in engine.coverage())
    for rows, length, more in ((6, 7, 3 + 5 * rank), (6, 7, 8 - 5 * rank)):
        ids, mask = prompts(rows, length, padded=True, seed=rank)
        request = {"attention_mask": mask, "max_new_tokens": more, "do_sample": False}
        assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))
    ids, mask = prompts(2 + 3 * rank, 7 - rank, padded=True, seed=rank)
    request = {"attention_mask": mask, "max_new_tokens": 3 + 2 * rank, "do_sample": False}
    assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))
    with torch.no_grad():
        actual, expected = (module(ids, attention_mask=mask).logits[mask.bool()] for module in (engine, reference))
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="empty prompts") if rank else contextlib.nullcontext():
        engine.generate(ids, attention_mask=mask * (1 - rank), max_new_tokens=5)
    engine.destroy()
    # the layers keep their expert groups
    second_engine = hybrid.init_inference(model, dtype=torch.float32, moe={"ep_size": 2})
    ids, mask = prompts(3, 5, padded=True, seed=rank)
    request = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(second_engine.generate(ids, **request), reference.generate(ids, **request))


@pytest.mark.parametrize(("k", "drop_tokens"), slow_but([(2, False)], [(2, True), (2, False), (1, True)]))
def test_generate_with_experts_over_two_ranks(ranks, k, drop_tokens):
    ranks.run(check_generate, k, drop_tokens)


def check_settings_that_raise() -> None:
    for moe, message in (
        ({"ep_size": 1}, "moe.ep_size: 1 given; mixture was built with ep_size=2"),
        ({"ep_size": 2, "moe_experts": [8]}, r"moe.moe_experts: \[8\] given; mixture has 4 experts"),
        ({"ep_size": 2, "type": "residual"}, "moe.type: 'residual' given; mixture is standard"),
    ):
        with pytest.raises(ValueError, match=message):
            hybrid.init_inference(Mixture(2), dtype=torch.float32, moe=moe)


def test_moe_settings_that_contradict_the_layers_raise(ranks):
    ranks.run(check_settings_that_raise)
