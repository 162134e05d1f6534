"""Sleep on CUDA devices: the allocator's bytes leave and come back, with every result.

None of this has run on a device yet. A slow test runs it on CPU ranks, without the allocator's figures.
"""

import pytest
import torch

import hybrid
from tests.engines import storage_digest
from tests.execution.test_sleep import CASES, loss_of, nap, rollout
from tests.execution.test_sleep import engine as engine_with
from tests.gpu.test_rollouts import device
from tests.tiny_models import prompts, tiny_model

SMALL = 2**16  # bytes of libraries' workspaces
ON_DEVICE = ("ZeRO 0, bfloat16", "ZeRO 1, bfloat16", "ZeRO 3, bfloat16")


def allocated() -> int:
    """Bytes of the device's tensors; 0 on a CPU."""
    return torch.cuda.memory_allocated() if device().type == "cuda" else 0


def check_training_engine(name: str) -> None:
    """At level 2 nothing of the engine is on the device."""
    stage, dtype, lora, blocks = CASES[name]
    empty = allocated()
    slept, never = (engine_with(stage, dtype, lora, **blocks) for _ in range(2))
    for part in range(3):
        assert all(map(torch.equal, rollout(slept), rollout(never)))
        slept.sleep()
        never.sleep()
        used = allocated() - empty
        slept.sleep(2)
        assert allocated() - empty < 0.6 * used + SMALL  # the other engine's half
        assert all(param.device.type == "cpu" for param in slept.module.parameters() if param.numel())
        for each in (slept, never):
            each.wake()
        assert abs(allocated() - empty - used) < SMALL
        assert all(param.device == device() for param in slept.module.parameters())
        for each in (slept, never):
            each.train()
            each.backward(loss_of(each, part))
        nap(slept, 2)
        for each in (slept, never):
            each.step()
        assert storage_digest(slept) == storage_digest(never)
    assert all(map(torch.equal, rollout(slept), rollout(never)))


def check_frozen_engine() -> None:
    """Graphs, KV cache and weights leave, and results are the same."""
    ids, mask = (tensor.to(device()) for tensor in prompts(3, 7, padded=True))
    empty = allocated()
    built = {"dtype": torch.bfloat16, "replace_with_kernel_inject": True}
    engine = hybrid.init_inference(tiny_model("llama"), **built)
    request = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": True, "seed": 5}
    expected = engine.generate(ids, **request)
    for level in (1, 2):
        used = allocated() - empty
        engine.sleep(level)
        assert allocated() - empty < used or device().type == "cpu"
        engine.wake()
        assert torch.equal(engine.generate(ids, **request), expected)
    engine.destroy()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_DEVICE)
def test_training_engines_sleep_on_devices(device_ranks, name):
    device_ranks(min(torch.cuda.device_count(), 2)).run(check_training_engine, name)


@pytest.mark.gpu
def test_frozen_engines_sleep_on_devices(device_ranks):
    device_ranks(1).run(check_frozen_engine)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_DEVICE)
def test_the_checks_hold_on_cpus(ranks, name):
    ranks.run(check_training_engine, name)
    if name == ON_DEVICE[0]:
        ranks.run(check_frozen_engine)
