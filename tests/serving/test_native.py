"""Servers of models that run in their own layers. The oracle is `engine.rollout` with the same keys.

In such a forward the last bits of a row depend on the batch: tokens are equal, logprobs equal within rounding.
"""

import asyncio
import random

import pytest
import torch
import torch.distributed as dist

import hybrid
from tests.engines import engine_of, settings
from tests.generation.test_native_scheduler import model_of
from tests.marks import slow_but
from tests.serving.requests import mixed_calls, served
from tests.serving.test_ranks import rolled_out
from tests.serving.test_server import LONG, PROMPT, SHORT, built, slowly  # noqa: F401  a fixture
from tests.tiny_models import tiny_model

NAMES = ["xglm", "recurrent_gemma", "openai-gpt", "bart"]  # rows join; run in waves of one or of several; of one length
TOLERANCE = 1e-4  # of logprobs: float32 sums in another order


def require_close(actual: list, expected: list, what: object) -> None:
    """Equal tokens, reasons and keys, and logprobs within rounding."""
    for one, other in zip(actual, expected, strict=True):
        assert (one[0], *one[4:]) == (other[0], *other[4:]), what
        for logps, others in zip(one[1:4], other[1:4], strict=True):
            assert logps == pytest.approx(others, abs=TOLERANCE), what


def check_native(name: str) -> None:
    """Ranks serve different requests, while others arrive and end."""
    rank = dist.get_rank()
    engine = engine_of(model_of(name), settings(3))
    calls = mixed_calls(10, seed=rank)
    actual = served(engine, calls, max_num_seqs=4 + rank, gap_s=0.001)
    assert {part["container"] for part in engine.coverage()} == {"native"}
    shuffled = served(engine, random.Random(rank).sample(calls, len(calls)), max_num_seqs=7)
    for index, (prompt, params, more) in enumerate(calls):
        require_close(shuffled[more["request_id"]], actual[more["request_id"]], more)
        if index not in (7, 8):  # without a row id, or with what rollouts do not have
            require_close(actual[more["request_id"]], rolled_out(engine, prompt, params, more), (more, params))


@pytest.mark.parametrize("name", slow_but(NAMES[:2], NAMES))
def test_requests_get_what_rollouts_of_their_keys_give(ranks, name):
    ranks.run(check_native, name)


@pytest.mark.parametrize("name", ["llama", "recurrent_gemma"])
def test_scores_and_aborts_beside_rows_that_run(name, slowly):  # noqa: F811
    """Where the running rows' state is the model's, scores wait for them."""
    engine = built(kernel_inject=False) if name == "llama" else hybrid.init_inference(model_of(name), dtype="fp32")

    async def main() -> tuple[list[hybrid.TokenScores], hybrid.Completion, list[hybrid.Completion]]:
        async with engine.serve(max_num_seqs=3) as server:
            running = asyncio.ensure_future(server.generate(PROMPT, LONG))
            await asyncio.sleep(0.1)
            aborted = asyncio.ensure_future(server.generate(PROMPT, LONG, request_id="a"))
            scores = [asyncio.ensure_future(server.score([5, 6, 7, 8][:length], 2)) for length in (4, 2)]
            await asyncio.sleep(0.1)
            await server.abort("a")
            return await asyncio.gather(*scores), (await running)[0], await aborted

    scores, completion, (aborted,) = asyncio.run(main())
    assert aborted.finish_reason == "abort" and len(aborted.token_ids) < 150
    settings_of_long = {"max_new_tokens": 150, "min_new_tokens": 150, "do_sample": True, "top_k": 0}
    expected = engine.generate(torch.tensor([PROMPT]), seed=3, **settings_of_long)
    assert completion.token_ids == expected[0, 3:].tolist()
    for length, actual in zip((4, 2), scores, strict=True):
        ids = torch.tensor([[5, 6, 7, 8][:length]])
        of_engine = engine.score(ids, torch.ones_like(ids), top_logprobs=2)
        assert actual.logps == pytest.approx(of_engine.per_token_logps[0].tolist(), abs=TOLERANCE)
        assert actual.top_token_ids == of_engine.top_ids[0].tolist()


def check_refused(blocks: dict) -> None:
    """Ranks that run the model's own layers together refuse, on each of them, and go on."""
    engine = engine_of(tiny_model("llama"), settings(3, **blocks))
    server = engine.serve()
    with pytest.raises(NotImplementedError, match="the model's own layers serve no requests where ranks compute"):
        server.__enter__()
    ids = torch.tensor([PROMPT])
    assert engine.rollout(ids, torch.ones_like(ids), SHORT).completion_ids.shape[0] == 1


def test_ranks_that_run_its_layers_together_are_refused(ranks):
    block = {"enabled": True, "inference_tp_size": 2}
    ranks.run(check_refused, {"hybrid_engine": block, "rollout": {"containers": "native"}})
