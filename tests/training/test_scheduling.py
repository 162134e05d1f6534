"""Scheduling in the engine: any max_num_seqs, KV cache size and batch gives bit-identical tokens and logprobs."""

import contextlib
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from transformers import LogitsProcessorList

import hybrid
from hybrid.decoders import fused_model as fused
from hybrid.decoders.cpu_decoder import CpuDecoder
from hybrid.generation import model_runner
from tests.engines import Recorder, engine_of, settings
from tests.tiny_models import prompts, tiny_model, twin

# Fused for any `--containers`, since only fused engines schedule. Heads of 16 need no padding in KV blocks.
HEADS = {"head_dim": 16}
ENDS = tuple(range(10, 22))  # so many that lengths differ
BLOCK_BYTES = 2 * 3 * 2 * 16 * 32 * 4  # keys and values, 3 layers, 2 heads of 16, 32 tokens, float32


def engine_with(model: torch.nn.Module, **rollout) -> hybrid.HybridEngine:
    """A fused ZeRO-3 engine with these settings of its `rollout` block."""
    return engine_of(model, settings(3, rollout={"containers": "fused", **rollout}))


@contextlib.contextmanager
def decoded_rows() -> Iterator[list[int]]:
    """Inside the block, records the rows of each decode step on the CPU kernels, except those of the self-check."""
    row_counts, own, own_steps, own_check = [], CpuDecoder.decode, CpuDecoder.decode_steps, fused.require_equal

    def recording(self, batch, kv):
        row_counts.append(len(batch.ids))
        return own(self, batch, kv)

    def recording_steps(self, batch, *args):
        tokens, logps = own_steps(self, batch, *args)
        row_counts.extend([len(batch.ids)] * len(tokens))
        return tokens, logps

    def without_recording(*args):
        before = len(row_counts)
        try:
            own_check(*args)
        finally:
            del row_counts[before:]

    CpuDecoder.decode, CpuDecoder.decode_steps = recording, recording_steps
    fused.require_equal = without_recording
    try:
        yield row_counts
    finally:
        CpuDecoder.decode, CpuDecoder.decode_steps, fused.require_equal = own, own_steps, own_check


def same_rollouts(batch: hybrid.RolloutBatch, other_batch: hybrid.RolloutBatch) -> bool:
    logps = ("sampling_per_token_logps", "old_per_token_logps", "raw_per_token_logps")
    names = ("completion_ids", "completion_mask", *logps)
    return all(torch.equal(getattr(batch, name), getattr(other_batch, name)) for name in names)


# A `rollout` block, and the largest batch that it allows.
LIMITS = {
    "no limit": ({}, 18),
    "three sequences": ({"max_num_seqs": 3}, 3),
    "one sequence": ({"max_num_seqs": 1}, 1),
    # Besides block 0, a row has two blocks here. Rows of one prompt share the first: three of them need four.
    "a cache for two prompts' rows": ({"kv_cache_bytes": (1 + 4) * BLOCK_BYTES}, 3),
    "a cache for one row": ({"kv_cache_bytes": (1 + 2) * BLOCK_BYTES}, 1),
}
DRAWS = (
    {"temperature": 1.2},
    {"temperature": 0.9, "top_p": 0.9, "min_new_tokens": 5, "repetition_penalty": 1.3},
)


def check_rollouts() -> None:
    rank = dist.get_rank()
    ids, mask = prompts(5 + rank, 40, padded=True, seed=rank)
    first: list[hybrid.RolloutBatch] = []
    for what, (limit, most) in LIMITS.items():
        engine = engine_with(tiny_model("llama", **HEADS), **limit)
        for index, draw in enumerate(DRAWS):
            sampling = hybrid.SamplingParams(20, seed=3, stop_token_ids=ENDS, **draw)
            with decoded_rows() as rows:
                batch = engine.rollout(ids, mask, sampling, num_generations=3)
            first += [batch] if index == len(first) else []
            assert same_rollouts(batch, first[index]), what
            lengths = batch.completion_mask.sum(1)
            assert len(set(lengths.tolist())) > 3, "all completions have the same length: the test is vacuous"
            assert sum(rows) == (lengths - 1).sum(), "finished rows are still decoded"
            assert max(rows) <= most, what
            assert engine.stats()["kv_bytes"] <= limit.get("kv_cache_bytes", 10**9), what
        engine.destroy()


def test_rollouts_are_bit_identical_for_any_max_num_seqs_and_kv_cache(ranks):
    ranks.run(check_rollouts)


def check_short_memory() -> None:
    """The second rank's forwards take more, so that its free memory holds fewer blocks."""
    rank = dist.get_rank()
    ids, mask = prompts(5 + rank, 40, padded=True, seed=rank)
    sampling, batches = hybrid.SamplingParams(20, seed=3, stop_token_ids=ENDS), []
    measured = model_runner.forward_bytes
    for is_short in (False, True):
        block = {"enabled": True, "inference_tp_size": 2}
        engine = engine_of(tiny_model("llama", **HEADS), settings(3, hybrid_engine=block))
        pool = engine._generator.block_pool
        if is_short:
            pool.step = 1
            pool.free_bytes = lambda: 12 * BLOCK_BYTES
            more = 5 * BLOCK_BYTES * rank
            model_runner.forward_bytes = lambda *_, more=more: more
        try:
            batches.append(engine.rollout(ids, mask, sampling, num_generations=3))
        finally:
            model_runner.forward_bytes = measured
        assert (pool.call_limit is not None) == is_short
        engine.destroy()
    assert same_rollouts(*batches)


def test_ranks_that_decode_one_batch_wait_for_the_same_blocks(ranks):
    ranks.run(check_short_memory)


def check_greedy() -> None:
    rank = dist.get_rank()
    for family in ("llama", "gemma3_text", "gpt2"):
        model = tiny_model(family)
        reference = twin(model)
        engine = engine_with(model, max_num_seqs=2)
        ids, mask = prompts(5 + rank, 8, padded=True, seed=rank)
        greedy = {"attention_mask": mask, "max_new_tokens": 14}
        plain = reference.generate(ids, **greedy, do_sample=False)
        ends = [2, *plain[:, 12].tolist()]  # tokens that are generated
        for more in (
            {},
            {"min_new_tokens": 9, "eos_token_id": ends},
            {"repetition_penalty": 1.8},
            {"no_repeat_ngram_size": 2},
            {"eos_token_id": ends},
            {"suppress_tokens": plain[:, 9].unique().tolist(), "begin_suppress_tokens": plain[:, 8].unique().tolist()},
            {"bad_words_ids": [[int(plain[0, 9])], plain[1, 9:11].tolist()], "forced_eos_token_id": 2},
            {"eos_token_id": ends, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 3},
            {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": ends},
            {"max_new_tokens": 1},
        ):
            request = {**greedy, "do_sample": False, **more}
            with decoded_rows() as rows:
                actual = engine.generate(ids, **request)
            assert torch.equal(actual, reference.generate(ids, **request)), (family, more)
            assert set(rows) <= {1, 2}, (family, more)
            assert rows or more, "the fused decoder has not run"
        # Sampling from the most likely token alone: three times the greedy row.
        several = {**greedy, "do_sample": True, "top_k": 1, "num_return_sequences": 3}
        assert torch.equal(engine.generate(ids, **several), plain.repeat_interleave(3, dim=0))
        engine.destroy()


def test_generate_arguments_match_hugging_face_in_the_scheduler(ranks):
    ranks.run(check_greedy)


class Favourite:
    """A custom processor: prefers a token that depends on the row's last two. Records how many rows it gets."""

    def __init__(self):
        self.rows: list[int] = []

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(ids))
        scores = scores.clone()
        scores[torch.arange(len(ids)), (ids[:, -1] * 3 + ids[:, -2]) % 97] += 3.0
        return scores


class RowwiseFavourite(Favourite):
    rowwise = True


def check_processors() -> None:
    model = tiny_model("qwen3")
    reference = twin(model)
    engine = engine_with(model, max_num_seqs=2)
    ids, mask = prompts(5, 8, padded=True, seed=dist.get_rank())
    for request in ({"do_sample": False}, {"do_sample": True, "top_k": 8, "temperature": 1.4}):
        request = {**request, "attention_mask": mask, "max_new_tokens": 12}
        outputs, seen = [], []
        for kind in (RowwiseFavourite, Favourite):
            processor = kind()
            with decoded_rows() as rows:
                outputs.append(
                    engine.generate(ids, seed=6, logits_processor=LogitsProcessorList([processor]), **request)
                )
            seen.append((max(rows), set(processor.rows)))
        assert torch.equal(*outputs)
        assert seen[0][0] == 2, "a rowwise processor is not scheduled"
        assert max(seen[0][1]) <= 2
        assert seen[1] == (5, {5}), "a processor that may need the whole batch does not get it"
        if not request["do_sample"]:
            expected = reference.generate(ids, logits_processor=LogitsProcessorList([Favourite()]), **request)
            assert torch.equal(outputs[0], expected)


def test_custom_logits_processors_rowwise_and_batchwise(ranks):
    ranks.run(check_processors)


def check_streamer() -> None:
    model = tiny_model("llama")
    reference = twin(model)
    engine = engine_with(model, max_num_seqs=1)
    ids, _ = prompts(1, 40, padded=False, seed=dist.get_rank())
    actual, expected = Recorder(), Recorder()
    with decoded_rows() as rows:
        engine.generate(ids, max_new_tokens=9, streamer=actual)
    reference.generate(ids, max_new_tokens=9, streamer=expected)
    assert actual.pieces == expected.pieces
    assert actual.ended
    assert rows, "the fused decoder has not run"


def test_a_streamer_gets_every_token(ranks):
    ranks.run(check_streamer)


def check_kv_cache_too_small() -> None:
    """A row that cannot fit raises with its name and size before anything is gathered."""
    ids, mask = prompts(3, 40, padded=False)
    engine = engine_with(tiny_model("llama", **HEADS), kv_cache_bytes=(1 + 2) * BLOCK_BYTES)
    refused = [
        lambda: engine.generate(ids, attention_mask=mask, max_new_tokens=25),
        lambda: engine.rollout(ids, mask, hybrid.SamplingParams(25)),
        lambda: engine.score(torch.cat([ids, ids[:, :25]], 1), torch.ones(3, 65, dtype=torch.long)),
    ]
    for call in refused:
        with pytest.raises(
            ValueError,
            match=rf"kv_cache_bytes leaves {3 * BLOCK_BYTES} bytes.*a row of 65 .*may need {4 * BLOCK_BYTES};",
        ):
            call()
    with pytest.raises(ValueError, match=r"3 rows that have to be in the cache together, the longest of 50 tokens"):
        engine.generate(ids, attention_mask=mask, max_new_tokens=10, logits_processor=[Favourite()])
    assert engine.stats()["gathered_bytes"] == 0  # ranks only ask each other if any of them needs the weights
    assert engine.module.training
    # Rows that just fit run one at a time; prompts count without padding.
    assert engine.generate(ids, attention_mask=mask, max_new_tokens=24, min_new_tokens=24).shape == (3, 64)
    wide, wide_mask = (torch.nn.functional.pad(tensor, (30, 0)) for tensor in (ids, mask))
    assert engine.generate(wide, attention_mask=wide_mask, max_new_tokens=24, min_new_tokens=24).shape == (3, 94)
    assert engine.score(ids, mask).per_token_logps.shape == (3, 39)
    assert engine.stats()["kv_bytes"] <= 3 * BLOCK_BYTES


def test_a_row_larger_than_the_kv_cache_raises_before_gathering(ranks):
    ranks.run(check_kv_cache_too_small)


def check_scores() -> None:
    """Scores are bit-identical in every batch, and equal the rollout's logprobs."""
    rank = dist.get_rank()
    engine = engine_with(tiny_model("llama", **HEADS))
    ids, mask = prompts(6 + rank, 40, padded=True, seed=rank)
    batch = engine.rollout(
        ids, mask, hybrid.SamplingParams(30, temperature=0.8, seed=1, stop_token_ids=ENDS), num_generations=2
    )
    width = batch.completion_ids.shape[1]
    assert len(set(batch.completion_mask.sum(1).tolist())) > 3
    with engine.inference():
        raw = engine.score(batch.sequences, batch.attention_mask)
        at_temperature = engine.score(batch.sequences, batch.attention_mask, temperature=0.8)
        completions = raw.per_token_logps[:, -width:] * batch.completion_mask
        assert torch.equal(completions, batch.raw_per_token_logps)
        completions = at_temperature.per_token_logps[:, -width:] * batch.completion_mask
        assert torch.equal(completions, batch.old_per_token_logps)
        for rows in (1, 2, 5):
            scores = engine.score(batch.sequences, batch.attention_mask, rows_per_forward=rows)
            assert torch.equal(scores.per_token_logps, raw.per_token_logps), rows
            assert torch.equal(scores.entropies, raw.entropies), rows
        backwards = engine.score(batch.sequences.flip(0), batch.attention_mask.flip(0))
        assert torch.equal(backwards.per_token_logps.flip(0), raw.per_token_logps)
        bools = engine.score(batch.sequences, batch.attention_mask.bool())
        assert torch.equal(bools.per_token_logps, raw.per_token_logps)
    # Also with a cache that does not hold all rows at once.
    small = engine_with(tiny_model("llama", **HEADS), kv_cache_bytes=(1 + 4) * BLOCK_BYTES)
    scores = small.score(batch.sequences, batch.attention_mask)
    assert torch.equal(scores.per_token_logps, raw.per_token_logps)
    assert small.stats()["kv_bytes"] <= (1 + 4) * BLOCK_BYTES


def test_scores_equal_the_rollouts_logprobs_bit_for_bit(ranks):
    ranks.run(check_scores)


def check_native() -> None:
    ids, mask = prompts(3, 8, padded=True, seed=dist.get_rank())
    request = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    outputs = []
    for containers in ("fused", "native"):
        engine = engine_with(
            tiny_model("llama"), containers=containers, kv_cache_bytes=1 if containers == "native" else None
        )
        with decoded_rows() as rows:
            outputs.append(engine.generate(ids, **request))
        assert bool(rows) == (containers == "fused")
        assert {part["container"] for part in engine.coverage()} == {containers}
        if containers == "native":
            assert all("rollout.containers=native" in part["why"] for part in engine.coverage())
            assert engine.stats()["container_bytes"] == 0
    assert torch.equal(*outputs)


def check_layer_unlike_its_family() -> None:
    """A layer that differs from its family's: the whole model runs natively, with a warning, and coverage() says so."""
    model, reference = tiny_model("llama"), tiny_model("llama").eval()
    for module in (model, reference):
        mlp = module.model.layers[1].mlp
        mlp.forward = lambda x, own=mlp.forward: own(x) * 1.01
    engine = engine_with(model, trust_forward=True)
    ids, mask = prompts(3, 8, padded=True, seed=dist.get_rank())
    request = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    assert {part["container"] for part in engine.coverage()} == {"fused"}
    with warnings.catch_warnings(record=True) as warnings_raised, decoded_rows() as rows:
        warnings.simplefilter("always")
        assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))
    warned = any("layer 1 of the fused container differs" in str(warning.message) for warning in warnings_raised)
    assert warned == (dist.get_rank() == 0)
    assert {part["container"] for part in engine.coverage()} == {"native"}
    assert all("layer 1 of the fused container differs" in part["why"] for part in engine.coverage())
    assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))
    assert not rows


def test_a_layer_unlike_its_family_falls_back_to_native_and_coverage_says_why(ranks):
    ranks.run(check_layer_unlike_its_family)


def test_native_containers_by_configuration(ranks):
    ranks.run(check_native)
