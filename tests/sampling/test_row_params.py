"""Rows of different settings in one batch are each sampled as alone."""

import contextlib
from dataclasses import replace

import pytest
import torch

from hybrid.generation.block_pool import BlockPool
from hybrid.generation.scheduler import Scheduler
from hybrid.models.reader import read_decoder
from hybrid.sampling.params import RowParams
from hybrid.sampling.sampler import in_fields, sample_tokens, sample_tokens_in_torch, stream_keys
from tests.decoders.test_sharded_decoder import cpu_decoder
from tests.generation.test_scheduler import ENDS, prompts_of, request_of
from tests.sampling_params import params_of
from tests.tiny_models import tiny_model

PARAMS = [
    params_of(0.8),
    params_of(0),
    params_of(1.3, top_k=12),
    params_of(0.7, top_p=0.8),
    params_of(1.1, min_p=0.05),
    params_of(0.9, 20, 0.9, 0.01),
]
PENALTIES = [params_of(0.9, repetition_penalty=1.4), params_of(0, repetition_penalty=1.2), params_of(min_new_tokens=9)]


@pytest.mark.parametrize("sample", [sample_tokens, sample_tokens_in_torch])
def test_a_row_is_sampled_by_its_own_params(sample):
    """By the C++ kernels and by torch: bit for bit the row alone."""
    rows = 4 * len(PARAMS)
    logits = torch.randn(rows, 700, generator=torch.Generator().manual_seed(0)) * 3
    keys, positions = stream_keys(1, torch.arange(rows), torch.zeros(rows).long()), torch.arange(rows)
    params = PARAMS * 4
    together = sample(logits, keys, positions, RowParams.of(params))
    for row, own in enumerate(params):
        one = slice(row, row + 1)
        alone = sample(logits[one], keys[one], positions[one], own)
        for actual, expected in zip(in_fields(together), in_fields(alone), strict=True):
            assert torch.equal(actual[one], expected), own


def test_rows_select_their_params():
    params = RowParams.of(PARAMS * 2)
    assert not params.is_uniform and params.distinct == tuple(PARAMS)
    selected = params.select(torch.tensor([7, 2, 1]))
    assert selected.index.tolist() == [1, 2, 1]
    assert [(own, rows.tolist()) for own, rows in selected.groups()] == [(PARAMS[1], [0, 2]), (PARAMS[2], [1])]
    assert RowParams.of(PARAMS[:1] * 3).is_uniform


@torch.no_grad()
@pytest.mark.parametrize("in_kernel", [True, False])
@pytest.mark.parametrize("params", [PARAMS, PARAMS + PENALTIES])
def test_a_batch_of_requests_with_different_params_gives_what_each_gives_alone(params, in_kernel, monkeypatch):
    """Through the scheduler: by steps in the kernels' loop, by single steps, and after penalties as processors."""
    decoder = cpu_decoder(read_decoder(tiny_model("llama")))
    monkeypatch.setattr(type(decoder), "samples_in_kernel", in_kernel)

    def run(request):
        pool = BlockPool(32)
        pool.begin_call(decoder.kv)
        return Scheduler(request, decoder, pool, 4, lambda name: contextlib.nullcontext()).run()

    prompts = [ids % 90 for ids in prompts_of(*(5 + 9 * row for row in range(len(params))))]
    request = request_of(prompts, max_new_tokens=24, stop_token_ids=torch.tensor(ENDS), sampling_params=tuple(params))
    together = run(request)
    for row, own in enumerate(params):
        length = request.prompt_lengths[row]
        one = slice(row, row + 1)
        alone = replace(
            request,
            prompt_ids=request.prompt_ids[one, -length:],
            prompt_lengths=[length],
            sampling_keys=request.sampling_keys[one],
            groups=request.groups[one],
            limits=request.limits[one],
            sampling_params=own,
        )
        expected = run(alone)
        assert torch.equal(together.tokens[one], expected.tokens), own
        for name in ("sampling_logps", "old_logps", "raw_logps"):
            torch.testing.assert_close(getattr(together, name)[one], getattr(expected, name), atol=2e-6, rtol=0)
