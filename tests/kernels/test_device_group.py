"""Sums through symmetric memory, with a substitute that checks what torch's kernels require and adds by gloo."""

from unittest.mock import Mock, create_autospec

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory

from hybrid.kernels import device_group
from hybrid.kernels.device_group import DeviceGroup, maps_symmetric_memory, on_devices
from hybrid.runtime.parallel import InferenceGroup

CPU = torch.device("cpu")


class Substitute:
    """Symmetric memory of a machine that has it.  mapped: the buffers.  sums: how many, and whether by multicast."""

    def __init__(self, patch: pytest.MonkeyPatch, here: bool = True, multicast: bool = False):
        self.mapped: list[torch.Tensor] = []
        self.sums: list[bool] = []
        self.multicast = multicast
        patch.setattr(device_group, "maps_symmetric_memory", lambda: here)
        patch.setattr(device_group, "mapped_buffer", self.map)
        patch.setattr(device_group, "sum_in_place", self.add)

    def map(self, nbytes, dtype, device, group):
        dist.barrier(group)
        self.mapped.append(torch.full((nbytes // dtype.itemsize,), torch.nan, dtype=dtype, device=device))
        return self.mapped[-1], self.multicast

    def add(self, part, group_name, multicast):
        (buffer,) = self.mapped
        assert part.data_ptr() == buffer.data_ptr() and part.is_contiguous(), "not the mapped memory"
        assert part.nbytes % (16 * dist.get_world_size()) == 0 and part.dtype in device_group.SUMMED
        assert group_name == dist.group.WORLD.group_name or isinstance(group_name, str)
        dist.all_reduce(part)
        self.sums.append(multicast)


def check_sums() -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    for dtype, multicast in ((torch.float32, False), (torch.bfloat16, True)):
        with pytest.MonkeyPatch.context() as patch:
            substitute = Substitute(patch, multicast=multicast)
            group = DeviceGroup(InferenceGroup(2), dtype, CPU)
            group.begin_call([0, 0])
            group.begin_call([0, 0])
            assert len(substitute.mapped) == 1
            # Rows of a decode step; too large; of another dtype; of a size that does not divide; not contiguous.
            cases = [((64, 896), dtype, True), ((1, 16), dtype, True), ((3000, 1024), torch.float32, False)]
            cases += [((4, 8), torch.float64, False), ((3, 5), dtype, False)]
            for shape, kind, is_symmetric in cases:
                own = torch.randn(shape, generator=generator).to(kind)
                expected = own.clone()
                dist.all_reduce(expected)
                before = len(substitute.sums)
                assert group.sum(own) is own and torch.equal(own, expected)
                assert len(substitute.sums) - before == is_symmetric, shape
            transposed = torch.ones(8, 16, dtype=dtype).T
            before = len(substitute.sums)
            assert torch.equal(group.sum(transposed), torch.full((16, 8), 2, dtype=dtype))
            assert len(substitute.sums) == before and {*substitute.sums} == {multicast}


def test_sums_through_symmetric_memory_equal_all_reduces(ranks):
    ranks.run(check_sums)


def test_torch_has_the_symmetric_memory_that_sums_call():
    """Calls that only CUDA builds can run: their names and arguments, which the installed torch has."""
    for name in ("multimem_all_reduce_", "two_shot_all_reduce_"):
        arguments = getattr(torch.ops.symm_mem, name).default._schema.arguments
        assert [(each.name, str(each.type)) for each in arguments] == [
            ("input", "Tensor"),
            ("reduce_op", "str"),
            ("group_name", "str"),
        ]
        assert arguments[0].alias_info.is_write, "it does not add in place"
    assert hasattr(torch._C._distributed_c10d._SymmetricMemory, "multicast_ptr")


@pytest.mark.parametrize("multicast_ptr", [0, 4096])
def test_buffers_are_mapped_on_the_groups_device(multicast_ptr, monkeypatch):
    """Two fake devices; the calls have the arguments of torch's own functions."""
    mapped = []
    empty = create_autospec(symmetric_memory.empty, side_effect=lambda *size, dtype, device: (*size, dtype, device))
    rendezvous = create_autospec(
        symmetric_memory.rendezvous,
        side_effect=lambda buffer, group: mapped.append((buffer, group)) or Mock(multicast_ptr=multicast_ptr),
    )
    monkeypatch.setattr(symmetric_memory, "empty", empty)
    monkeypatch.setattr(symmetric_memory, "rendezvous", rendezvous)
    for index in range(2):
        device = torch.device("cuda", index)
        buffer, has_multicast = device_group.mapped_buffer(64, torch.bfloat16, device, "group")
        assert buffer == (32, torch.bfloat16, device) and has_multicast == (multicast_ptr != 0)
    assert [group for _, group in mapped] == ["group"] * 2


def check_fallback() -> None:
    """If one rank cannot map, no rank waits for it: all add by torch.distributed."""
    with pytest.MonkeyPatch.context() as patch:
        substitute = Substitute(patch, here=dist.get_rank() == 0)
        group = DeviceGroup(InferenceGroup(2), torch.float32, CPU)
        group.begin_call([0, 0])
        assert group.sum(torch.ones(64)).tolist() == [2.0] * 64
        assert not substitute.mapped and not substitute.sums


def test_ranks_agree_to_do_without_symmetric_memory(ranks):
    ranks.run(check_fallback)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_groups_on_cpus_stay_as_they_are():
    group = InferenceGroup(1)
    assert on_devices(group, torch.float32, CPU) is group
    assert not maps_symmetric_memory()
