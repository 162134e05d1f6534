"""Optimizers by name: the default's bits, the others against torch's own or their formula, and what is refused."""

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import GatheredParameters
from torch import nn

import hybrid
from rlhf_examples.common.arguments import SFTArguments
from rlhf_examples.common.engines import Training, deepspeed_config, make_engine
from rlhf_examples.common.models import LoRA
from rlhf_examples.common.optimizers import require_device
from rlhf_examples.common.parsing import arguments_of
from tests.marks import slow_but
from tests.tiny_models import tiny_model

RATE, DECAY, STEPS = 1e-2, 0.1, 3
ADAM_RATE = 1e-3


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    ids = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(step * 1000 + rank))
    return model(input_ids=ids, labels=ids).loss


def trained_by_engine(engine: hybrid.HybridEngine) -> dict[str, torch.Tensor]:
    for step in range(STEPS):
        engine.backward(loss_of(engine, step, dist.get_rank()))
        engine.step()
    with GatheredParameters([*engine.module.parameters()]):
        weights = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    engine.destroy()
    return weights


def trained(name: str, stage: int, decay: str = "all", **settings) -> dict[str, torch.Tensor]:
    """The weights after a few steps by the optimizer of a name."""
    lora = LoRA(0, 16, "all-linear")
    training = Training(stage, 2, RATE, DECAY, "constant", 0, 10, False, lora, name, ADAM_RATE, decay)
    given = {"max_grad_norm": 0.0 if name == "muon" else 1.0, **settings}
    args = arguments_of(SFTArguments, {"optimizer": name, "zero_stage": stage, **given})
    with torch.compiler.set_stance("force_eager"):  # compiling Muon's iteration takes minutes on CPUs
        return trained_by_engine(make_engine(tiny_model("llama"), args, training))


def trained_by_torch(optimizers, max_grad_norm: float = 1.0) -> dict[str, torch.Tensor]:
    """The same by torch alone, on the mean gradient of two ranks.  optimizers: makes them for a model."""
    model = tiny_model("llama").train()
    made = optimizers(model)
    for step in range(STEPS):
        (sum(loss_of(model, step, rank) for rank in range(2)) / 2).backward()
        if max_grad_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def require_close(ours: dict, theirs: dict, **tolerance: float) -> None:
    """But for a few elements: where a first gradient is near Adam's epsilon (1e-8), its rounding changes the step."""
    far = {name: ~torch.isclose(weight, theirs[name], **tolerance) for name, weight in ours.items()}
    assert sum(int(weight.sum()) for weight in far.values()) <= 3, {name: int(far[name].sum()) for name in far}
    torch.testing.assert_close(ours, theirs, atol=RATE, rtol=0)
    start = dict(tiny_model("llama").named_parameters())
    assert all((ours[name] - start[name]).abs().max() > 1e-4 for name in ours), "training changed nothing"


def check_default_bits(stage: int) -> None:
    """The oracle is the configuration that the examples had before there were other optimizers."""
    config = {
        **deepspeed_config("float32", stage, micro_batch_size=2),
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": DECAY, "torch_adam": True}},
        "gradient_clipping": 1.0,
    }
    model = tiny_model("llama")
    engine = hybrid.initialize(model=model, model_parameters=[*model.parameters()], config=config)[0]
    before, now = trained_by_engine(engine), trained("adamw", stage)
    assert all(torch.equal(before[name], now[name]) for name in before)


@pytest.mark.parametrize("stage", [0, 3])
def test_the_default_keeps_its_bits(ranks, stage):
    ranks.run(check_default_bits, stage)


def grouped_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, lr=RATE)]


def check_decay(stage: int) -> None:
    ours = trained("adamw", stage, decay="matrices")
    require_close(ours, trained_by_torch(grouped_adamw), atol=2e-5, rtol=1e-4)
    assert any(not torch.allclose(value, ours[name], atol=1e-4) for name, value in trained("adamw", stage).items())


@pytest.mark.parametrize("stage", slow_but((3,), (0, 1, 2, 3)))
def test_vectors_do_not_decay(ranks, stage):
    ranks.run(check_decay, stage)


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)]


def check_fused(stage: int, offload: bool) -> None:
    require_close(trained("fused", stage, offload=offload), trained_by_torch(adamw), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("stage", "offload"), slow_but(((3, True),), ((0, False), (3, False), (2, True), (3, True))))
def test_fused_is_adamw(ranks, stage, offload):
    """Offloaded, it is DeepSpeed's CPU Adam."""
    ranks.run(check_fused, stage, offload)


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    named = [*model.named_parameters()]
    others = [value for name, value in named if value.dim() < 2 or "embed" in name or "lm_head" in name]
    matrices = [value for _, value in named if not any(value is other for other in others)]
    rates = {"lr": RATE, "weight_decay": DECAY}
    return [torch.optim.Muon(matrices, **rates), torch.optim.AdamW(others, **{**rates, "lr": ADAM_RATE})]


def check_muon(stage: int, offload: bool) -> None:
    ours, theirs = trained("muon", stage, offload=offload), trained_by_torch(muon_and_adamw, 0.0)
    start = dict(tiny_model("llama").named_parameters())
    for name, value in ours.items():
        change, expected = (value - start[name]).flatten(), (theirs[name] - start[name]).flatten()
        # DeepSpeed's iteration has other coefficients and dtypes than torch's: directions agree, not digits.
        assert torch.cosine_similarity(change, expected, dim=0) > 0.97, name
        assert 0.9 < change.norm() / expected.norm() < 1.1, name


@pytest.mark.parametrize(
    ("stage", "offload"),
    slow_but(((3, False),), [(stage, offload) for stage in range(4) for offload in (False, True)[: stage + 1]]),
)
def test_muon_is_torchs_at_every_stage(ranks, stage, offload):
    """ZeRO partitions matrices, which Muon needs whole."""
    ranks.run(check_muon, stage, offload)


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of Chen et al., arXiv:2302.06675, with DeepSpeed's sign: that of 0 is 1."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("m", torch.zeros_like(parameter))
                update = torch.ones_like(momentum).copysign(0.9 * momentum + 0.1 * parameter.grad)
                parameter.sub_(group["lr"] * (update + DECAY * parameter))
                momentum.mul_(0.99).add_(0.01 * parameter.grad)


def check_lion(stage: int) -> None:
    ours = trained("lion", stage, offload=True)
    theirs = trained_by_torch(lambda model: [Lion(model.parameters(), {"lr": RATE})])
    # The sign of a sum near 0 depends on the order in which ranks add.
    wrong = sum(int(((value - theirs[name]).abs() > 1e-4).sum()) for name, value in ours.items())
    assert wrong <= 0.002 * sum(value.numel() for value in ours.values())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_offloaded_lion_is_its_formula(ranks, stage):
    ranks.run(check_lion, stage)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "adam"}, "optimizer: 'adam' given; allowed: adamw, fused, lion, muon, adamw8bit"),
        ({"optimizer": "muon"}, "given with max_grad_norm: 1.0; DeepSpeed clips what muon has orthogonalized"),
        ({"optimizer": "muon", "max_grad_norm": 0.0, "zero_stage": 0, "dtype": "bfloat16"}, "zero_stage: 0 and dtype"),
        ({"muon_adam_learning_rate": 0.1}, "given with optimizer: 'adamw'; it is muon's"),
        ({"optimizer": "adamw8bit", "offload": True}, "its states are on the device: give fused"),
    ],
)
def test_what_does_not_work_together_is_refused(settings, message, monkeypatch):
    find = "rlhf_examples.common.refusals.importlib.util.find_spec"
    monkeypatch.setattr(find, lambda name: name)
    with pytest.raises(ValueError, match=message):
        arguments_of(SFTArguments, settings)
    monkeypatch.setattr(find, lambda name: None)
    with pytest.raises(ValueError, match="'adamw8bit' given, whose package is not installed; run: pip install bitsand"):
        arguments_of(SFTArguments, {"optimizer": "adamw8bit", "report_to": []})


def test_optimizers_without_a_kernel_for_cpus_are_refused():
    cpu = torch.device("cpu")
    for name in ("adamw", "fused", "muon"):
        require_device(name, False, cpu)
    require_device("lion", True, cpu)
    with pytest.raises(ValueError, match="'lion' given, which has no kernel for CPUs; with offload: true"):
        require_device("lion", False, cpu)
    with pytest.raises(ValueError, match="'adamw8bit' given, which has no kernel for CPUs; give adamw, fused or muon"):
        require_device("adamw8bit", False, cpu)
