"""Threads that share an engine, as in threaded Ray actors and asyncio servers: each gets the result of its own call."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import hybrid
from tests.engines import engine_of, settings, train_step
from tests.marks import slow_but
from tests.tiny_models import prompts, tiny_model, twin, with_peft

THREADS, ROUNDS = 3, 2
PROMPTS = [prompts(2 + index, 5 + 2 * index, padded=True, seed=index) for index in range(THREADS)]
GREEDY = {"max_new_tokens": 6, "do_sample": False}
SAMPLING = hybrid.SamplingParams(max_new_tokens=6, temperature=0.8, seed=7)


def in_threads(call) -> list:
    """Results of `call(index)` in each of THREADS threads, which start together and call ROUNDS times."""
    barrier = threading.Barrier(THREADS, timeout=30)

    def rounds(index: int) -> list:
        barrier.wait()
        return [call(index) for _ in range(ROUNDS)]

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(rounds, range(THREADS)))


def require_results_of_single_calls(call) -> None:
    """`call(index)` in concurrent threads gives the results of a single call."""
    alone = [call(index) for index in range(THREADS)]
    for index, answers in enumerate(in_threads(call)):
        for answer in answers:
            assert torch.equal(answer, alone[index]), f"thread {index}"


def generated(engine, index: int, **changes) -> torch.Tensor:
    ids, mask = PROMPTS[index]
    return engine.generate(ids, attention_mask=mask, **GREEDY, **changes)


@pytest.mark.parametrize("inject", [True, False], ids=["fused", "native"])
def test_threads_of_an_inference_engine_get_their_own_results(inject):
    model = tiny_model("llama")
    reference = twin(model)
    engine = hybrid.init_inference(model, dtype="fp32", kernel_inject=inject)
    assert torch.equal(generated(engine, 0), generated(reference, 0))
    require_results_of_single_calls(lambda index: generated(engine, index))
    require_results_of_single_calls(lambda index: engine(PROMPTS[index][0], attention_mask=PROMPTS[index][1]).logits)
    require_results_of_single_calls(
        lambda index: engine.module(PROMPTS[index][0], attention_mask=PROMPTS[index][1]).logits
    )


def test_an_asyncio_servers_requests_get_their_own_results():
    model = tiny_model("llama")
    reference = twin(model)
    engine = hybrid.init_inference(model, dtype="fp32", kernel_inject=True)

    async def serve() -> list[torch.Tensor]:
        return await asyncio.gather(*(asyncio.to_thread(generated, engine, index % THREADS) for index in range(6)))

    for index, answer in enumerate(asyncio.run(serve())):
        assert torch.equal(answer, generated(reference, index % THREADS))


def threads_of_a_hybrid_engine(stage: int, containers: str) -> None:
    # With room for both, the base is kept: threads on different ranks may call with and without adapters in any order.
    rollout = {"containers": containers, "memory_limit": 2**40}
    engine = engine_of(with_peft(tiny_model("llama")), settings(stage, rollout=rollout))
    generated(engine, 0), generated(engine, 0, adapters=False)  # gathers in the same order on every rank

    def different_calls(index: int) -> torch.Tensor:
        """A different call in each thread, one of them without adapters."""
        ids, mask = PROMPTS[index]
        if index == 0:
            return generated(engine, index)
        if index == 1:
            return engine.rollout(ids, mask, SAMPLING, num_generations=2).sampling_per_token_logps
        with engine.inference(adapters=False):
            sequences = generated(engine, index)
            return engine.score(sequences, torch.ones_like(sequences)).per_token_logps

    def switching(index: int) -> torch.Tensor:
        """One thread switches to eval mode and back while the others call in either mode."""
        if index > 0:
            return generated(engine, index)
        engine.eval()
        engine.train()
        return torch.zeros(0)

    require_results_of_single_calls(lambda index: generated(engine, index))
    require_results_of_single_calls(different_calls)
    require_results_of_single_calls(switching)
    engine.eval()
    require_results_of_single_calls(lambda index: engine(PROMPTS[index][0], attention_mask=PROMPTS[index][1]).logits)
    engine.train()
    train_step(engine)


@pytest.mark.parametrize(("stage", "containers"), slow_but([(3, "fused")], [(3, "fused"), (0, "native")]))
def test_threads_of_a_hybrid_engine_get_their_own_results(ranks, stage, containers):
    ranks.run(threads_of_a_hybrid_engine, stage, containers)
