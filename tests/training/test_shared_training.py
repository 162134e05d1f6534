"""Model-parallel training, and DeepSpeed's own groups of sequence parallel ranks, raise before anything is built."""

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import groups

import hybrid
from hybrid.training.engine import group_of_mpu
from tests.engines import engine_of, settings
from tests.tiny_models import prompts, tiny_model, twin


class Mpu:
    """An mpu, as Megatron and Ulysses pass it to DeepSpeed."""

    def __init__(self, **sizes: int):
        for name, size in sizes.items():
            setattr(self, f"get_{name}_world_size", lambda size=size: size)


INVALID = {
    "AutoTP": ({"tensor_parallel": {"autotp_size": 2}}, {}, r"tensor_parallel.autotp_size: 2 given"),
    "a mesh": ({}, {"mesh_param": (1, 2)}, r"mesh_param\[1\]: 2 given; .* key sequence_parallel_size; give it there"),
    "Megatron": ({}, {"mpu": Mpu(data_parallel=1, model_parallel=2)}, r"mpu.get_model_parallel_world_size\(\): 2"),
    "Ulysses' mpu": ({}, {"mpu": Mpu(sequence_parallel=2)}, r"sequence_parallel_world_size\(\): 2 given; .* key"),
}


def check_raises(name: str) -> None:
    keys, arguments, message = INVALID[name]
    model = tiny_model("llama")
    with pytest.raises(NotImplementedError, match=message):
        hybrid.initialize(model=model, config=settings(3, **keys), **arguments)
    assert not any(hasattr(parameter, "ds_id") for parameter in model.parameters()), (
        "the model was partitioned before the error"
    )
    engine_of(model, settings(3, tensor_parallel={"autotp_size": 1}, sequence_parallel_size=1))


class OwnGroup(Mpu):
    """No model parallelism in training; the mpu's existing group shares inference."""

    def __init__(self, group: dist.ProcessGroup):
        super().__init__(model_parallel=1, data_parallel=2)
        self.group = group

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.group

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return dist.group.WORLD


def check_own_group() -> None:
    mpu, block = OwnGroup(dist.new_group([0, 1])), {"enabled": True, "inference_tp_size": 2}
    model, before = tiny_model("llama"), groups.mpu
    reference = twin(model)
    try:
        engine = hybrid.initialize(model=model, config=settings(3, hybrid_engine=block), mpu=mpu)[0]
        ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
        request = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
        assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))
        assert engine._group.group is mpu.group
    finally:
        groups.mpu = before  # DeepSpeed keeps it for the process (0.19.8)
    with pytest.raises(ValueError, match="3 given; the model parallel group of mpu has 2 ranks"):
        group_of_mpu(mpu, 3)


def test_an_mpus_model_parallel_group_shares_inference(ranks):
    ranks.run(check_own_group)


@pytest.mark.parametrize("name", INVALID)
def test_training_with_others_groups_raises(ranks, name):
    ranks.run(check_raises, name)
