"""Servers of a training engine, on two ranks with ZeRO-3. The oracle is `engine.rollout` with the same keys."""

import asyncio

import pytest
import torch
import torch.distributed as dist

import hybrid
from hybrid import SamplingParams
from tests.engines import engine_of, settings, storage_digest, train_step
from tests.marks import slow_but
from tests.serving.requests import mixed_calls, served
from tests.tiny_models import tiny_model, with_peft
from tests.training.test_speculation import forced

MODES = {
    "one rank": {},
    "tensor parallel": {"hybrid_engine": {"enabled": True, "inference_tp_size": 2}},
    "streamed": {"hybrid_engine": {"enabled": True, "pin_parameters": False}},
    "speculation": {"rollout": {"speculation": {"ngram": 2, "history": True}}},
    "int8": {"rollout": {"weight_dtype": "int8"}},
}


COUNTS = 20, 30  # requests of each rank


def rolled_out(
    engine: hybrid.HybridEngine, prompt: list[int], params: SamplingParams, more: dict, adapter: str | None = None
) -> list:
    """The values of the same keys' completions by `engine.rollout`."""
    ids, n = torch.tensor([prompt]), more.get("n", 1)
    row_ids = torch.tensor([more["row_id"]])
    batch = engine.rollout(ids, torch.ones_like(ids), params, num_generations=n, row_ids=row_ids, adapter=adapter)
    rows = []
    for row in range(n):
        length = int(batch.completion_mask[row].sum())
        names = ("completion_ids", "sampling_per_token_logps", "old_per_token_logps", "raw_per_token_logps")
        values = [getattr(batch, name)[row, :length].tolist() for name in names]
        rows.append((*values, batch.finish_reason[row], (params.seed, more["row_id"], row)))
    return rows


def check_server(blocks: dict, adapted: bool, family: str = "llama") -> None:
    """Ranks serve different requests, also none; what they answer is what their rollouts give."""
    rank = dist.get_rank()
    model = tiny_model(family)
    engine = engine_of(with_peft(model) if adapted else model, settings(3, **blocks))
    calls = mixed_calls(COUNTS[rank], seed=rank)
    for step in range(2):
        before = storage_digest(engine)
        with engine.inference():
            actual = served(engine, calls, max_num_seqs=4 + rank, gap_s=0.001)
            again = served(engine, calls[::-1], max_num_seqs=7)
            assert served(engine, calls[: 3 * rank], max_num_seqs=2).keys() == {f"call {i}" for i in range(3 * rank)}
            check_scores(engine, [prompt for prompt, *_ in calls[: 2 + 4 * rank]], is_int8=blocks == MODES["int8"])
        assert storage_digest(engine) == before
        assert actual == again
        for index in range(max(COUNTS)):
            prompt, params, more = calls[index % len(calls)]  # every rank makes the same number of calls
            if index % 10 not in (7, 8):  # without a row id, or with what rollouts do not have
                assert actual[more["request_id"]] == rolled_out(engine, prompt, params, more), (more, params)
        train_step(engine, step)


def check_scores(engine: hybrid.HybridEngine, prompts: list[list[int]], is_int8: bool) -> None:
    """Scores by a server, beside a row that is decoded, are those of `engine.score`; with int8 weights, which
    `engine.score` does not read, the sampler's."""

    async def scored() -> tuple[list[hybrid.TokenScores], hybrid.TokenScores, hybrid.Completion]:
        async with engine.serve(max_num_seqs=2) as server:
            running = server.submit(prompts[0], SamplingParams(12, seed=1, min_new_tokens=12))
            scores = await asyncio.gather(*(server.score(prompt, 2) for prompt in prompts))
            (completion,) = running.result()
            assert len(completion.token_ids) == 12
            return scores, await server.score(prompts[0] + completion.token_ids), completion

    scores, of_completion, completion = asyncio.run(scored())
    assert of_completion.logps[-12:] == pytest.approx(completion.raw_logps, abs=1e-5)
    if is_int8:
        return
    for index in range(6):  # every rank makes the same number of calls
        prompt, actual = prompts[index % len(prompts)], scores[index % len(prompts)]
        expected = engine.score(torch.tensor([prompt]), torch.ones(1, len(prompt)), top_logprobs=2)
        assert actual.logps == expected.per_token_logps[0].tolist()
        assert actual.top_token_ids == expected.top_ids[0].tolist()
        assert actual.top_logps == expected.top_logprobs[0].tolist()


@pytest.mark.parametrize(
    ("mode", "adapted"),
    slow_but(
        [("one rank", True), ("tensor parallel", False)], [(mode, lora) for mode in MODES for lora in (False, True)]
    ),
)
def test_requests_get_what_rollouts_of_their_keys_give(ranks, mode, adapted):
    ranks.run(check_server, MODES[mode], adapted)


def check_server_that_drafts(family: str) -> None:
    with forced():
        check_server(MODES["speculation"], False, family)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_requests_that_always_draft(ranks, family):
    ranks.run(check_server_that_drafts, family)
