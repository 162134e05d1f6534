"""Ranks of inference tensor parallelism decode one batch: requests are exchanged once, and all ranks run all rows."""

import logging

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import logger
from transformers import LogitsProcessor, LogitsProcessorList

import hybrid
from hybrid.decoders.cpu_decoder import CpuDecoder
from hybrid.generation.scheduler import CHECKED_STEPS, Scheduler
from hybrid.kernels.cpu_library import cpu_library
from tests.engines import CollectiveCount, Recorder, engine_of, settings
from tests.tiny_models import SIZES, prompts, tiny_model, twin
from tests.training.test_memory_modes import Lines

TP = {"inference_tp_size": 2, "max_out_tokens": 96}
pytestmark = pytest.mark.skipif(cpu_library() is None, reason="no C++ compiler here")


def engines(family: str = "llama", **sizes) -> tuple[torch.nn.Module, hybrid.HybridEngine]:
    """A model, and an engine of it whose ranks decode together."""
    model = tiny_model(family, **sizes)
    return twin(model), engine_of(model, settings(3, hybrid_engine=TP, rollout={"containers": "fused"}))


class Forwards:
    """Records the number of sequences of each forward of this rank."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.rows: list[int] = []
        own = CpuDecoder._run

        def run(decoder, hidden, batch, *more):
            self.rows.append(len(batch.lengths))
            return own(decoder, hidden, batch, *more)

        patch.setattr(CpuDecoder, "_run", run)


def check_exchanges() -> None:
    """A call's collectives do not depend on the number of tokens; each step is one forward over all ranks' rows."""
    reference, engine = engines()
    rank = dist.get_rank()
    ids, mask = prompts(2 + rank, 9 + rank, padded=True, seed=rank)  # ranks differ in rows and in length
    engine.generate(ids, attention_mask=mask, max_new_tokens=2)  # the self-check, and the snapshot
    counts = []
    for new in (5, 25, 50):
        with pytest.MonkeyPatch.context() as patch, CollectiveCount() as collectives:
            forwards = Forwards(patch)
            actual = engine.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new)
        assert forwards.rows == [5] * new, "a prefill and a step for each further token, over the rows of both ranks"
        assert torch.equal(actual, reference.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new))
        counts.append(collectives.count)
    assert counts[0] == counts[1] == counts[2], counts


def test_a_step_is_one_forward_without_a_collective_of_the_process_group(ranks):
    ranks.run(check_exchanges)


def check_equal_prompts() -> None:
    """Prompts that both ranks give with the same sampling keys are decoded once."""
    reference, engine = engines()
    ids, mask = prompts(3, 9, padded=True, seed=0)
    engine.generate(ids, attention_mask=mask, max_new_tokens=2)
    with pytest.MonkeyPatch.context() as patch:
        forwards = Forwards(patch)
        actual = engine.generate(ids, attention_mask=mask, max_new_tokens=5, min_new_tokens=5)
    assert forwards.rows == [3] * 5, forwards.rows
    assert torch.equal(actual, reference.generate(ids, attention_mask=mask, max_new_tokens=5, min_new_tokens=5))


def test_equal_requests_are_decoded_once(ranks):
    ranks.run(check_equal_prompts)


class Shifts(LogitsProcessor):
    """User code that depends on the rank: adds to one token's score."""

    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids, scores):
        scores[:, self.token] += 3.0
        return scores


def check_user_code() -> None:
    """A processor, and a streamer, that one rank has: only that rank runs them, tokens equal Hugging Face's, and a log
    line says once what it costs."""
    reference, engine = engines()
    rank = dist.get_rank()
    ids, mask = prompts(2, 9, padded=True, seed=rank)
    lines, level = Lines(), logger.level
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    streamers = [Recorder(), Recorder()]  # of the engine, and of Hugging Face
    try:
        for _ in range(2):
            for owner in range(2):
                own = {"logits_processor": LogitsProcessorList([Shifts(5 + rank)])} if rank == owner else {}
                actual = engine.generate(ids, attention_mask=mask, max_new_tokens=6, **own)
                expected = reference.generate(ids, attention_mask=mask, max_new_tokens=6, **own)
                assert torch.equal(actual, expected)
        for model, streamer in zip((engine, reference), streamers, strict=True):
            own = {"streamer": streamer} if rank == 0 else {}
            model.generate(ids[:1], attention_mask=mask[:1], max_new_tokens=5, **own)
    finally:
        logger.setLevel(level)
        logger.removeHandler(lines)
    assert streamers[0].pieces == streamers[1].pieces
    assert len([line for line in lines.lines if "a broadcast a step" in line]) == 1, lines.lines


def test_user_code_runs_on_the_rank_that_has_it(ranks):
    ranks.run(check_user_code)


def check_differing_settings() -> None:
    """Ranks that differ in every setting: their requests run one after the other, on both ranks."""
    model = tiny_model("llama")
    alone = engine_of(twin(model).train(), settings(3, rollout={"containers": "fused"}))
    together = engine_of(model, settings(3, hybrid_engine=TP, rollout={"containers": "fused"}))
    rank = dist.get_rank()
    ids, mask = prompts(3, 9, padded=True, seed=rank)
    params = (
        hybrid.SamplingParams(max_new_tokens=9, temperature=0.7, top_k=9, seed=3, repetition_penalty=1.2),
        hybrid.SamplingParams(max_new_tokens=14, top_p=0.8, min_p=0.01, seed=4, min_new_tokens=3),
    )[rank]
    expected, actual = (engine.rollout(ids, mask, params, num_generations=2) for engine in (alone, together))
    assert torch.equal(actual.completion_ids, expected.completion_ids)
    for name in ("sampling_per_token_logps", "old_per_token_logps", "raw_per_token_logps"):
        torch.testing.assert_close(getattr(actual, name), getattr(expected, name), atol=2e-5, rtol=1e-5)


def test_ranks_with_different_settings_match_an_engine_of_one_rank(ranks):
    ranks.run(check_differing_settings)


def check_different_tokens() -> None:
    """A rank whose tokens differ is an error on all ranks, with ranks and step, and the engine goes on."""
    reference, engine = engines(max_position_embeddings=128)
    ids, mask = prompts(2, 9, padded=True, seed=dist.get_rank())
    request = {"attention_mask": mask, "max_new_tokens": 40, "min_new_tokens": 40}
    own = Scheduler.record

    def record(self, tokens, logps):
        if dist.get_rank() == 1 and self.runner.positions[0] == 7:
            tokens[0] = (tokens[0] + 1) % 90
        own(self, tokens, logps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "record", record)
        with pytest.raises(RuntimeError, match=f"different tokens by step {CHECKED_STEPS}: ranks 1 of the group"):
            engine.generate(ids, **request)
    assert engine.module.training
    assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))


def test_ranks_that_draw_different_tokens_raise(ranks):
    ranks.run(check_different_tokens)


def check_errors() -> None:
    """An error of ours on one rank in the middle of a step: the other rank raises one that names it, at once."""
    reference, engine = engines()
    rank = dist.get_rank()
    ids, mask = prompts(2, 9, padded=True, seed=rank)
    request = {"attention_mask": mask, "max_new_tokens": 20, "min_new_tokens": 20}
    own, calls = CpuDecoder._run, []

    def run(decoder, *args):
        calls.append(1)
        if rank == 1 and len(calls) == 5:
            raise MemoryError("out of memory")
        return own(decoder, *args)

    engine.generate(ids, **request)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuDecoder, "_run", run)
        with pytest.raises(
            (MemoryError, RuntimeError), match="out of memory" if rank else "rank 1 of the group raised"
        ):
            engine.generate(ids, **request)
    assert engine.module.training
    assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))


def test_an_error_inside_a_step_of_one_rank_is_raised_on_all(ranks):
    ranks.run(check_errors)


def check_native() -> None:
    """Without a fused decoder: a model's own forward runs once a step, on slices, over the rows of both ranks."""
    model = tiny_model("starcoder2", sizes=SIZES)
    reference = twin(model)
    engine = engine_of(model, settings(3, hybrid_engine=TP, rollout={"containers": "native"}))
    rank = dist.get_rank()
    ids, mask = prompts(2 + rank, 9, padded=True, seed=rank)
    rows = []
    layer = next(module for name, module in engine.module.named_modules() if name.endswith("layers.0.input_layernorm"))
    own = layer.forward
    layer.forward = lambda x: (rows.append(len(x)), own(x))[1]
    counts = []
    for new in (4, 12):
        params = hybrid.SamplingParams(max_new_tokens=new, min_new_tokens=new, temperature=0)
        rows.clear()
        with CollectiveCount() as collectives:
            batch = engine.rollout(ids, mask, params)
        expected = reference.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new)
        assert torch.equal(batch.sequences, expected)
        assert rows == [5] * new
        counts.append(collectives.count)
    assert counts[1] <= counts[0], "collectives of the process group in every step"


def test_a_native_model_runs_one_forward_a_step_for_all_ranks(ranks):
    ranks.run(check_native)


def check_refresh_time() -> None:
    """Every rank reports the time of its group's refresh, that of the slowest rank: by kernels, and by own modules."""
    rank = dist.get_rank()
    ids, mask = prompts(2, 9, padded=True, seed=rank)
    for containers in ("fused", "native"):
        engine = engine_of(tiny_model("llama"), settings(3, hybrid_engine=TP, rollout={"containers": containers}))
        engine.eval()
        engine._profiler.now.seconds["gather"] += 100.0 * rank  # as if rank 1 were slow
        engine.generate(ids, attention_mask=mask, max_new_tokens=2)
        stats = engine.stats()
        assert (stats["gather_s"] >= 100) == (rank == 1)
        assert stats["refresh_s"] >= 100, containers
        seconds = [None, None]
        dist.all_gather_object(seconds, stats["refresh_s"])
        assert seconds[0] == seconds[1], seconds


def test_the_time_of_a_refresh_is_that_of_the_group(ranks):
    ranks.run(check_refresh_time)
