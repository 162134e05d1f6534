"""Decoders record the experts that tokens are routed to: those that Hugging Face's own routers choose.

Weights of two experts may be equal up to rounding in float32 only by chance, which these models do not have.
"""

import contextlib
from dataclasses import replace

import pytest
import torch

from hybrid.decoders.batch import BLOCK_SIZE, PagedKV
from hybrid.decoders.cpu_decoder import CpuDecoder
from hybrid.decoders.torch_decoder import TorchDecoder
from hybrid.generation.block_pool import BlockPool
from hybrid.generation.model_runner import prefill
from hybrid.generation.request import Request
from hybrid.generation.routing import recorded_routing, replay_routing
from hybrid.generation.scheduler import Completions, Scheduler
from hybrid.kernels.cpu_library import cpu_library
from hybrid.models.reader import read_decoder
from hybrid.sampling.sampler import stream_keys
from tests.decoders.test_sharded_decoder import batches, layout_of, torch_decoder
from tests.decoders.test_sharded_decoder import cpu_decoder as sharded_cpu_decoder
from tests.decoders.test_torch_decoder import own_weights
from tests.generation.test_scheduler import request_of
from tests.host_groups import host_groups, on_every_rank
from tests.sampling_params import params_of
from tests.tiny_models import VOCABULARY, tiny_model

FAMILIES = ["mixtral", "qwen3_moe", "gpt_oss", "dots1"]  # the second and the last have a layer without experts


def recording(decoder):
    decoder.records_experts = True
    decoder.bind()
    return decoder


def cpu(model: torch.nn.Module) -> CpuDecoder:
    return recording(CpuDecoder(read_decoder(model), own_weights, model.dtype, cpu_library()))


def in_torch(model: torch.nn.Module) -> TorchDecoder:
    return recording(TorchDecoder(read_decoder(model), own_weights, model.dtype))


def request(lengths: tuple[int, ...] = (7, 40, 31), rows: int = 5, new: int = 9) -> Request:
    """Rows of prompts of these lengths, of which some come twice; they end at stop tokens or limits of their own."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]
    keys = stream_keys(0, torch.arange(rows), torch.zeros(rows, dtype=torch.long))
    made = request_of(
        [prompts[row % len(prompts)] for row in range(rows)],
        stop_token_ids=torch.arange(0, VOCABULARY, 8),
        max_new_tokens=new,
        sampling_params=params_of(0.8),
        sampling_keys=keys,
    )
    return replace(made, limits=torch.arange(rows) % 3 + new - 2, pad_token_id=1, return_router_indices=True)


@torch.no_grad()
def completions_of(decoder, made: Request, max_num_seqs: int = 3, steps: int | None = None) -> Completions:
    """Decoded with rows that wait for others to end, and with a KV cache that grows."""
    pool = BlockPool(BLOCK_SIZE)
    pool.begin_call(decoder.kv)
    pool.reserve_call = lambda *_: None
    return Scheduler(made, decoder, pool, max_num_seqs, lambda name: contextlib.nullcontext(), steps).run()


@torch.no_grad()
def chosen_by_hugging_face(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The experts that the model's routers give for a sequence, int64 [tokens, layers, experts per token], in
    ascending order: some routers give them in no particular one."""
    seen, handles = [], []
    for module in model.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            handles.append(module.register_forward_hook(lambda module, args, output: seen.append(output[2])))
    model(ids[None])
    for handle in handles:
        handle.remove()
    return torch.stack(seen, dim=1).sort(dim=-1).values


def require_hugging_faces(model: torch.nn.Module, made: Request, done: Completions) -> None:
    for row, (own, length) in enumerate(zip(done.router_indices, done.lengths.tolist(), strict=True)):
        prompt = made.prompt_ids[row, made.prompt_ids.shape[1] - made.prompt_lengths[row] :]
        expected = chosen_by_hugging_face(model, torch.cat([prompt, done.tokens[row, : length - 1]]))
        assert own.dtype == torch.int16 and torch.equal(own.long().sort(dim=-1).values, expected), f"row {row}"
    experts = read_decoder(model).spec.num_experts
    assert len(torch.cat(done.router_indices).unique()) == experts, "not every expert is used: the test is vacuous"


@pytest.mark.parametrize("make", [cpu, in_torch])
@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_experts_are_those_of_hugging_faces_routers(family, make):
    """Of prompts, whose blocks rows share or copy, and of decode steps, up to 16 in one call."""
    model, made = tiny_model(family).eval(), request()
    done = completions_of(make(model), made)
    require_hugging_faces(model, made, done)
    assert (done.lengths < made.limits).any() and (done.lengths == made.limits).any(), done.lengths


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefill_records_what_decode_steps_record(family):
    model = tiny_model(family, dtype=torch.bfloat16).eval()
    decoder, made = cpu(model), request()
    done = completions_of(decoder, made)
    for row, length in enumerate(done.lengths.tolist()):
        prompt = made.prompt_ids[row, made.prompt_ids.shape[1] - made.prompt_lengths[row] :]
        pool = BlockPool(BLOCK_SIZE)
        pool.begin_call(decoder.kv)
        sequence = torch.cat([prompt, done.tokens[row, : length - 1]])
        with torch.no_grad():
            blocks, *_ = prefill(decoder, pool, [sequence])
        again = pool.kv.router_indices[blocks[0]].flatten(0, 1)[: len(sequence)]
        assert torch.equal(again, done.router_indices[row])


def test_nothing_is_recorded_unless_asked():
    decoder = CpuDecoder(read_decoder(tiny_model("mixtral")), own_weights, torch.float32, cpu_library())
    decoder.bind()
    kv = decoder.kv(2)
    assert kv.router_indices is None and len(kv.tensors) == 6
    decoder.records_experts = True
    recorded = decoder.kv(2)
    assert recorded.nbytes - kv.nbytes == 2 * BLOCK_SIZE * 3 * 2 * 2  # blocks, tokens, layers, experts, bytes
    assert recorded.kind != kv.kind, "a cache without the memory would be used for calls that record"


@torch.no_grad()
def recorded_in(decoder) -> PagedKV:
    """The cache after a prefill and some decode steps; positions that no token has are NOT_ROUTED."""
    decoder.records_experts = True
    decoder.reserve(64)
    kv = decoder.kv(7)
    kv.router_indices.fill_(-1)
    for batch in batches():
        decoder.forward(batch, kv)
    return kv


@pytest.mark.parametrize("make", [sharded_cpu_decoder, torch_decoder])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_rank_records_all_experts_in_tensor_parallel(family, make):
    layout = layout_of(family)
    expected = recorded_in(sharded_cpu_decoder(layout)).router_indices
    assert (expected >= 0).any() and len(expected.unique()) == 1 + layout.spec.num_experts
    of_ranks = on_every_rank(host_groups(2), lambda group: recorded_in(make(layout, group)).router_indices)
    assert all(torch.equal(of_rank, expected) for of_rank in of_ranks)


def test_every_rank_records_all_experts_in_expert_parallel():
    """Each rank has half of the experts, and whole weights outside of them."""
    layout = layout_of("mixtral")
    expected = recorded_in(sharded_cpu_decoder(layout)).router_indices

    def record(group) -> torch.Tensor:
        group.tensor = host_groups(1)[0]
        return recorded_in(sharded_cpu_decoder(layout, group)).router_indices

    assert all(torch.equal(of_rank, expected) for of_rank in on_every_rank(host_groups(2), record))


@pytest.mark.parametrize("family", FAMILIES)
def test_recording_the_models_own_forward_gives_its_routers_choices(family):
    model, ids = tiny_model(family).eval(), request().prompt_ids[1]
    with torch.no_grad(), recorded_routing(model) as calls:
        model(ids[None])
    assert all(len(layer) == 1 for layer in calls)
    recorded = torch.stack([layer[0] for layer in calls], dim=1)
    assert torch.equal(recorded.long().sort(dim=-1).values, chosen_by_hugging_face(model, ids))


WEIGHTS = {
    "gpt_oss": lambda logits, chosen: logits.gather(1, chosen).softmax(-1),
    "dots1": lambda logits, chosen: 1.7 * (scores := logits.sigmoid().gather(1, chosen)) / scores.sum(-1, keepdim=True),
}


@torch.no_grad()
@pytest.mark.parametrize("family", WEIGHTS)
def test_replayed_experts_are_weighed_by_the_current_router(family):
    model, ids = tiny_model(family).eval(), request().prompt_ids[1]
    others = (chosen_by_hugging_face(model, ids) + 1) % read_decoder(model).spec.num_experts
    outputs = []
    for module in model.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            module.register_forward_hook(lambda module, args, output: outputs.append(output))
    with replay_routing(model, others[None]):
        model(ids[None])
    assert len(outputs) == others.shape[1]
    for layer, (logits, weights, chosen) in enumerate(outputs):
        assert torch.equal(chosen, others[:, layer])
        torch.testing.assert_close(weights, WEIGHTS[family](logits, chosen))
