"""Raw, old and sampling logprobs: of the raw model, at the temperature, and of the distribution sampled from."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import hybrid
from tests.engines import engine_of, settings
from tests.marks import slow_but
from tests.tiny_models import prompts, tiny_model, twin

DRAWS = {
    "temperature": {"temperature": 0.7},
    "everything": {
        "temperature": 1.3,
        "top_k": 30,
        "top_p": 0.8,
        "min_p": 0.02,
        "repetition_penalty": 1.3,
        "min_new_tokens": 4,
    },
    "top_p": {"top_p": 0.6},
    "top_k": {"temperature": 0.9, "top_k": 5},
    "min_p": {"temperature": 1.5, "min_p": 0.1},
    "greedy": {"temperature": 0.0, "repetition_penalty": 1.5, "min_new_tokens": 3},
}
ENDS = [2, 9, 14, 23, 37]


def hugging_face_logprobs(
    reference, ids, mask, completions, params: hybrid.SamplingParams, ends: list
) -> dict[str, torch.Tensor]:
    """Logprobs of `completions` by Hugging Face's own loop, forced to draw them.  float64 [rows, new]"""
    draw = {"do_sample": False}
    if params.temperature:
        draw = {"do_sample": True, "top_k": params.top_k, "top_p": params.top_p, "temperature": params.temperature}
        draw |= {"min_p": params.min_p} if params.min_p else {}
    columns = iter(completions.unbind(dim=1))
    with patch("torch.multinomial", lambda probs, num_samples: next(columns)[:, None]):
        output = reference.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=params.max_new_tokens,
            min_new_tokens=params.min_new_tokens or None,
            repetition_penalty=params.repetition_penalty,
            eos_token_id=ends,
            pad_token_id=0,
            output_scores=True,
            output_logits=True,
            return_dict_in_generate=True,
            **draw,
        )
    assert torch.equal(output.sequences[:, ids.shape[1] :], completions)
    scores, logits = (torch.stack(steps, dim=1).double() for steps in (output.scores, output.logits))
    distributions = {"sampling": scores, "old": logits / (params.temperature or 1.0), "raw": logits}
    return {
        name: distribution.log_softmax(-1).gather(2, completions[:, :, None])[:, :, 0]
        for name, distribution in distributions.items()
    }


def check_logprobs(blocks: dict) -> None:
    model = tiny_model("llama")
    reference = twin(model)
    engine = engine_of(model, settings(3, **blocks))
    rank = dist.get_rank()
    ids, mask = prompts(3 + rank, 6, padded=True, seed=rank)
    ids, mask = (tensor.repeat_interleave(2, dim=0) for tensor in (ids, mask))  # equal prompts
    gains = {}
    for name, draw in DRAWS.items():
        params = hybrid.SamplingParams(max_new_tokens=9, seed=7, stop_token_ids=tuple(ENDS), **draw)
        batch = engine.rollout(ids, mask, params)
        real = batch.completion_mask.bool()
        expected = hugging_face_logprobs(reference, ids, mask, batch.completion_ids, params, ENDS)
        for kind, logps in expected.items():
            actual = getattr(batch, f"{kind}_per_token_logps")
            assert actual.dtype == torch.float32
            assert (actual[~real] == 0).all()
            # float32, and attention over a cache sums in another order than Hugging Face's.
            label = f"{name}, {kind}: "
            torch.testing.assert_close(
                actual[real].double(), logps[real], atol=1e-5, rtol=1e-5, msg=lambda m, label=label: label + m
            )
        gains[name] = (batch.sampling_per_token_logps - batch.old_per_token_logps)[real].abs().max().item()
        scores = engine.score(batch.sequences, batch.attention_mask, temperature=params.temperature or 1.0)
        scored_logps = scores.per_token_logps[:, -real.shape[1] :]
        torch.testing.assert_close(batch.old_per_token_logps[real], scored_logps[real], atol=1e-5, rtol=1e-5)
    assert gains["temperature"] < 1e-5
    # tokens left out raise the probabilities of the rest
    assert sum(gain > 1e-3 for gain in gains.values()) >= 3, gains


@pytest.mark.parametrize(
    "blocks",
    slow_but(
        [{"rollout": {"containers": "native"}}, {"hybrid_engine": {"inference_tp_size": 2}}],
        [
            {},
            {"rollout": {"containers": "native"}},
            {"rollout": {"max_num_seqs": 2}},
            {"hybrid_engine": {"inference_tp_size": 2}},
            {"hybrid_engine": {"pin_parameters": False}},
        ],
    ),
    ids=["fused", "native", "two sequences", "tp 2", "streaming"],
)
def test_raw_old_and_sampling_logprobs_match_hugging_face(ranks, blocks):
    ranks.run(check_logprobs, blocks)


def check_in_torch() -> None:
    """The same in torch operations, without kernels."""
    with patch("hybrid.sampling.sampler.cpu_library", lambda: None):
        check_logprobs({})


def test_logprobs_match_hugging_face_without_compiled_kernels(ranks):
    ranks.run(check_in_torch)


def check_lockstep_in_the_fused_decoder() -> None:
    """A processor that needs the whole batch at every step: logprobs are of the processed scores."""
    from transformers import LogitsProcessorList

    from hybrid.generation.lockstep import in_lockstep

    model = tiny_model("llama")
    reference = twin(model)
    engine = engine_of(model, settings(3))
    ids, mask = prompts(3, 6, padded=True, seed=dist.get_rank())
    done = []

    def recorded(*args):
        done.append(in_lockstep(*args, logprob_temperature=0.8))
        return done[-1]

    request = {"do_sample": True, "temperature": 0.8, "top_k": 9, "min_new_tokens": 5, "max_new_tokens": 5}
    shapes = []
    processors = LogitsProcessorList([lambda ids, scores: shapes.append(ids.shape) or scores])  # not marked rowwise
    with patch("hybrid.execution.generator.in_lockstep", recorded):
        sequences = engine.generate(ids, attention_mask=mask, seed=3, logits_processor=processors, **request)
    assert shapes == [(3, 6 + step) for step in range(5)]
    params = hybrid.SamplingParams(5, temperature=0.8, top_k=9, min_new_tokens=5)
    expected = hugging_face_logprobs(reference, ids, mask, sequences[:, 6:], params, [2])
    for kind, logps in expected.items():
        torch.testing.assert_close(getattr(done[0], f"{kind}_logps").double(), logps, atol=1e-5, rtol=1e-5)


def test_logprobs_with_a_whole_batch_processor_match_hugging_face(ranks):
    ranks.run(check_lockstep_in_the_fused_decoder)
