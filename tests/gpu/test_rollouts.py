"""Engines of `hybrid.initialize` and `hybrid.init_inference` on CUDA devices, against Hugging Face's generate.

Each check runs on one rank, and on two where there are two devices, under ZeRO-3 with everything partitioned. Tokens
are compared in float32, where only the order of sums differs from Hugging Face's. A slow test runs the checks on the
ranks of CPUs too, without graphs.
"""

import copy

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

import hybrid
from tests.decoders.test_torch_decoder import average
from tests.engines import engine_of, require_greedy_tokens, settings
from tests.marks import skip_with_old_transformers
from tests.tiny_models import prompts, tiny_model

NEW_TOKENS = 12
FAMILIES = ("llama", "qwen3", "gemma2", "mixtral")


def name_of(check: tuple) -> str:
    """The name of a check and its family, if it has one."""
    return " ".join([check[0].__name__.removeprefix("check_"), *check[1:]])


def graph_settings() -> tuple[bool, ...]:
    """Values of `enable_cuda_graph` that this device allows."""
    return (False, True) if get_accelerator().device_name() == "cuda" else (False,)


def device() -> torch.device:
    """This rank's device."""
    return torch.device(get_accelerator().current_device_name())


def own_prompts(rows: int, length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Left padded prompts and their mask on this rank's device; ranks differ."""
    rank = dist.get_rank()
    return tuple(tensor.to(device()) for tensor in prompts(rows + rank, length + rank, True, seed=10 * seed + rank))


def zero3_engine(model: nn.Module, graphs: bool, block: dict | None = None, **rollout) -> hybrid.HybridEngine:
    """An engine over a copy of `model`.  block: more of the `hybrid_engine` block."""
    block = {"enable_cuda_graph": graphs, **(block or {})}
    return engine_of(copy.deepcopy(model), settings(3, hybrid_engine=block, rollout=rollout))


def require_fused(engine: hybrid.HybridEngine | hybrid.InferenceEngine) -> None:
    """The decoder ran, not the model's own layers."""
    rows = engine.coverage()
    assert {row["container"] for row in rows} == {"fused"}, rows[0]


def require_greedy(engine: hybrid.HybridEngine | hybrid.InferenceEngine, reference: nn.Module, rows: int = 5) -> None:
    """Greedy tokens of `engine.generate` equal those of the reference, which is on this rank's device."""
    ids, mask = own_prompts(rows, 9)
    request = {"attention_mask": mask, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    expected = reference.generate(ids, **request)
    whole = torch.cat([mask, torch.ones_like(expected[:, ids.shape[1] :])], dim=1)
    with torch.no_grad():
        logits = reference(expected, attention_mask=whole).logits
    require_greedy_tokens(engine.generate(ids, **request), expected, logits)


def greedy(engine: hybrid.HybridEngine, rows: int = 5, limits: torch.Tensor | None = None) -> list[list[int]]:
    """Each row's greedy completion by `rollout`, without padding.  limits: new tokens of each row."""
    sampling = hybrid.SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0)
    return completions(engine.rollout(*own_prompts(rows, 9), sampling, max_new_tokens=limits))


def completions(batch: hybrid.RolloutBatch) -> list[list[int]]:
    """Each row's completion, without padding."""
    return [ids[mask.bool()].tolist() for ids, mask in zip(batch.completion_ids, batch.completion_mask, strict=True)]


def check_greedy_tokens(family: str) -> None:
    model = tiny_model(family)
    reference = copy.deepcopy(model).to(device()).eval()
    tokens = []
    for graphs in graph_settings():
        engine = zero3_engine(model, graphs)
        with engine.inference():
            require_greedy(engine, reference)
            tokens.append(greedy(engine))
        require_fused(engine)
        engine.destroy()
    assert tokens[0] == tokens[-1], f"{family}: graphs change greedy tokens"


def check_rows_that_join_and_leave() -> None:
    """Eleven rows or more of different lengths, three at a time, equal all at once."""
    model = tiny_model("llama", eos_token_id=None)
    limits = (torch.arange(11 + dist.get_rank()) * 5) % NEW_TOKENS + 1
    whole = zero3_engine(model, False)
    expected = greedy(whole, 11, limits)
    assert [len(tokens) for tokens in expected] == limits.tolist()
    whole.destroy()
    for graphs in graph_settings():
        engine = zero3_engine(model, graphs, max_num_seqs=3)
        assert greedy(engine, 11, limits) == expected
        require_fused(engine)
        engine.destroy()


def check_rollouts_around_a_step() -> None:
    """The second rollout reads the new weights, also in the graphs of the first one, which are kept."""
    for graphs in graph_settings():
        engine = zero3_engine(tiny_model("llama"), graphs)
        with engine.inference():
            before = greedy(engine)
        kept = dict(captured_graphs(engine))
        assert bool(kept) == graphs
        ids = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(dist.get_rank())).to(device())
        engine.train()
        for _ in range(3):  # of a learning rate of 0.01: the tokens change
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
        reference = tiny_model("llama").to(device()).eval()
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            for own, trained in zip(reference.parameters(), engine.module.parameters(), strict=True):
                own.data.copy_(trained.data)
        with engine.inference():
            require_greedy(engine, reference)
            assert greedy(engine) != before
        assert all(captured_graphs(engine)[key] is graph for key, graph in kept.items())
        require_fused(engine)
        engine.destroy()


def captured_graphs(engine: hybrid.HybridEngine) -> dict[tuple, object]:
    """The decoder's graphs by key."""
    (bound,) = engine._runtime.fused.bound.values()
    graphs = getattr(bound.decoder, "graphs", None)
    return {} if graphs is None else graphs.replays


def check_seeds() -> None:
    """A seed gives the same tokens again, with and without graphs and with other rows around; another seed gives
    others."""
    model, drawn = tiny_model("llama"), []
    ids, mask = own_prompts(6, 9)
    row_ids = torch.arange(len(ids)) + 100 * dist.get_rank()
    for graphs in graph_settings():
        engine = zero3_engine(model, graphs)
        for seed, rows in ((3, len(ids)), (3, len(ids)), (3, 4), (4, len(ids))):
            sampling = hybrid.SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.9, top_p=0.95, seed=seed)
            batch = engine.rollout(ids[:rows], mask[:rows], sampling, 2, row_ids=row_ids[:rows])
            drawn.append(completions(batch))
        require_fused(engine)
        engine.destroy()
    first = drawn[0]
    for same, again, fewer, other in zip(*[iter(drawn)] * 4, strict=True):
        assert same == again == first and fewer == first[:8] and other != first


def check_inference_engine(family: str) -> None:
    """In float32 greedy tokens are Hugging Face's; in bfloat16 logits are rounded like its own: independent roundings
    would be √2 times as far apart."""
    model = tiny_model(family)
    reference = copy.deepcopy(model).to(device()).eval()
    ids = prompts(3, 20, padded=False)[0].to(device())
    with torch.no_grad():
        exact = reference(ids).logits
        rounded = copy.deepcopy(reference).bfloat16()(ids).logits.float()
    for graphs in graph_settings():
        built = {"replace_with_kernel_inject": True, "enable_cuda_graph": graphs}
        engine = hybrid.init_inference(copy.deepcopy(model), dtype=torch.float32, **built)
        require_greedy(engine, reference)
        require_fused(engine)
        engine.destroy()
        engine = hybrid.init_inference(copy.deepcopy(model), dtype=torch.bfloat16, **built)
        logits = engine(ids).logits.float()
        require_fused(engine)
        assert average([logits], [rounded]) < 1.2 * average([rounded], [exact]), family
        engine.destroy()


def check_tensor_parallel(family: str) -> None:
    """Two ranks decode one batch together."""
    model = tiny_model(family)
    reference = copy.deepcopy(model).to(device()).eval()
    engine = zero3_engine(model, False, {"inference_tp_size": 2})
    with engine.inference():
        require_greedy(engine, reference)
    require_fused(engine)
    engine.destroy()


CHECKS = (
    (check_rows_that_join_and_leave,),
    (check_rollouts_around_a_step,),
    (check_seeds,),
    *((check, family) for check in (check_greedy_tokens, check_inference_engine) for family in FAMILIES),
)


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_on_devices(device_ranks, check, world_size):
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"{world_size} ranks need as many devices; there is {torch.cuda.device_count()}")
    skip_with_old_transformers(*check[1:])
    device_ranks(world_size).run(*check)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two ranks need two devices")
@pytest.mark.parametrize("family", FAMILIES)
def test_tensor_parallel_on_two_devices(device_ranks, family):
    skip_with_old_transformers(family)
    device_ranks(2).run(check_tensor_parallel, family)


@pytest.mark.slow
@pytest.mark.parametrize("check", [*CHECKS, *((check_tensor_parallel, family) for family in FAMILIES)], ids=name_of)
def test_the_checks_hold_on_cpus(ranks, check):
    skip_with_old_transformers(*check[1:])
    ranks.run(*check)
