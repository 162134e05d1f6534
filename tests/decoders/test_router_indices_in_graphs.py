"""The decoder on Triton kernels records the experts of tokens, in prefill and in graphs of decode steps, also after its
KV blocks have moved."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it comes with torch's CUDA builds")

from hybrid.decoders.cuda_decoder import CudaDecoder, ShardedCudaDecoder
from hybrid.generation.request import Request
from hybrid.kernels.host_group import on_host
from hybrid.kernels.triton_experts import record_experts
from hybrid.models.reader import read_decoder
from hybrid.runtime.parallel import InferenceGroup
from hybrid.weights.slices import Shard
from tests.decoders.test_cuda_decoder import DEVICE, eager_capture, small
from tests.decoders.test_router_indices import FAMILIES, completions_of, request, require_hugging_faces
from tests.decoders.test_sharded_decoder import Slices
from tests.decoders.test_torch_decoder import own_weights
from tests.device_ops import RecordedCapture
from tests.marks import slow_but

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="the reference runs on the host")


def short_request() -> Request:
    """Three rows of 3, 4 and 5 new tokens; the second one's decode steps cross the end of its block."""
    return replace(request((3, 31), rows=3, new=5), stop_token_ids=torch.tensor([-1]))


def two_layers(family: str) -> torch.nn.Module:
    """Of Qwen3-MoE's the second one has experts. With all of its drawn correction, dots.1 never chooses one of them."""
    model = small(family, **({"mlp_only_layers": [0]} if family == "qwen3_moe" else {}))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.mul_(0.5)
    return model


@pytest.mark.parametrize("family", slow_but(["qwen3_moe"], FAMILIES))
def test_recorded_experts_in_graphs_are_those_of_hugging_faces_routers(family, monkeypatch):
    """Nothing but the captured operations runs in a replay. The cache grows when the last row is admitted: a graph that
    kept its address would write elsewhere."""
    model, capture, made = two_layers(family), RecordedCapture(monkeypatch), short_request()
    decoder = CudaDecoder(read_decoder(model), own_weights, model.dtype, 4, capture)
    decoder.records_experts = True
    decoder.bind()
    require_hugging_faces(model, made, completions_of(decoder, made, max_num_seqs=2, steps=2))
    assert capture.replays > 2 * capture.captured


def check_slices(family: str) -> None:
    model, made = two_layers(family), short_request()
    layout, group = read_decoder(model), on_host(InferenceGroup(2), torch.device("cpu"))
    weights = Slices(layout, Shard(2, group.index))
    decoder = ShardedCudaDecoder(layout, weights, group, max_capture_size=4, capture=eager_capture)
    decoder.records_experts = True
    decoder.bind()
    require_hugging_faces(model, made, completions_of(decoder, made, steps=4))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_both_ranks_of_two_record_all_experts(ranks, family):
    ranks.run(check_slices, family)


@pytest.mark.parametrize("tokens", [1, 3, 300])
def test_experts_are_written_to_the_slots_of_their_layer(tokens):
    """More items than one program has; 9 experts per token."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(300, (tokens, 9), generator=generator)
    slots = torch.randperm(400, generator=generator)[:tokens].contiguous()
    written = torch.full((400, 3, 9), -1, dtype=torch.int16)
    expected = written.clone()
    expected[slots, 1] = chosen.to(torch.int16)
    record_experts(chosen, slots, torch.tensor([written.data_ptr()]), layer=1, layers=3)
    assert torch.equal(written, expected)
