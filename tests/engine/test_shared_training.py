"""Training in which ranks share a model or a sequence is refused before anything is built."""

import pytest

import hybrid
from tests.engines import engine_of, settings
from tests.models import tiny_model


class Mpu:
    """What Megatron and Ulysses give to DeepSpeed."""

    def __init__(self, **sizes: int):
        for name, size in sizes.items():
            setattr(self, f"get_{name}_world_size", lambda size=size: size)


REFUSED = {
    "AutoTP": ({"tensor_parallel": {"autotp_size": 2}}, {}, r"tensor_parallel.autotp_size: 2 given"),
    "Ulysses": ({"sequence_parallel_size": 2}, {}, "sequence_parallel_size: 2 given"),
    "a mesh": ({}, {"mesh_param": (1, 2)}, r"mesh_param\[1\].*: 2 given"),
    "Megatron": ({}, {"mpu": Mpu(data_parallel=1, model_parallel=2)}, r"mpu.get_model_parallel_world_size\(\): 2"),
    "Ulysses' mpu": ({}, {"mpu": Mpu(sequence_parallel=2)}, r"mpu.get_sequence_parallel_world_size\(\): 2 given"),
}


def check_refused(name: str) -> None:
    keys, arguments, words = REFUSED[name]
    model = tiny_model("llama")
    with pytest.raises(NotImplementedError, match=words):
        hybrid.initialize(model=model, config=settings(3, **keys), **arguments)
    assert not any(hasattr(parameter, "ds_id") for parameter in model.parameters()), "it was partitioned"
    engine_of(model, settings(3, tensor_parallel={"autotp_size": 1}, sequence_parallel_size=1))


@pytest.mark.parametrize("name", REFUSED)
def test_ranks_that_share_a_model_or_a_sequence_are_refused(ranks, name):
    ranks.run(check_refused, name)
