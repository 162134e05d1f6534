"""Decode steps that the kernels sample in one call give what step after step gives."""

import contextlib
from dataclasses import fields

import pytest
import torch

from hybrid.decoders.cpu_decoder import CpuDecoder
from hybrid.generation.block_pool import BlockPool
from hybrid.generation.completions import Completions
from hybrid.generation.request import Request
from hybrid.generation.scheduler import STEPS_IN_KERNEL, Scheduler
from hybrid.kernels.cpu_library import cpu_library
from hybrid.models.reader import read_decoder
from hybrid.sampling.sampler import stream_keys
from tests.decoders.test_sharded_decoder import cpu_decoder
from tests.generation.test_scheduler import request_of
from tests.host_groups import host_groups, on_every_rank
from tests.marks import slow_but
from tests.sampling_params import params_of
from tests.tiny_models import VOCABULARY, tiny_model

pytestmark = pytest.mark.skipif(cpu_library() is None, reason="no C++ compiler here")
SETTINGS = {
    "greedy": params_of(0),
    "plain": params_of(0.8),
    "truncated": params_of(1.3, top_k=12, top_p=0.9, min_p=0.01),
}
ROWS, NEW = 12, 50


class Calls:
    """Records the steps of each call of the kernels' loop."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.steps: list[int] = []
        own = CpuDecoder.decode_steps

        def decode_steps(decoder, *args):
            tokens, logps = own(decoder, *args)
            self.steps.append(len(tokens))
            return tokens, logps

        patch.setattr(CpuDecoder, "decode_steps", decode_steps)


def request(sampling: str) -> Request:
    """Rows, some with prompts longer than a block, with so many stop tokens that rows end at different
    steps."""
    generator = torch.Generator().manual_seed(1)
    lengths = [(7, 45, 60)[row % 3] for row in range(ROWS)]
    whole = torch.randint(1, VOCABULARY, (64,), generator=generator)
    prompts = [whole.roll(row // 2)[:length] for row, length in enumerate(lengths)]
    keys = stream_keys(0, torch.arange(ROWS), torch.zeros(ROWS, dtype=torch.long))
    settings = {"max_new_tokens": NEW, "sampling_params": SETTINGS[sampling], "sampling_keys": keys}
    return request_of(prompts, stop_token_ids=torch.arange(0, VOCABULARY, 8), **settings)


@torch.no_grad()
def completions_of(request: Request, decoder: CpuDecoder, max_num_seqs: int) -> Completions:
    pool = BlockPool(32)
    pool.begin_call(decoder.kv)
    phase = lambda name: contextlib.nullcontext()  # noqa: E731
    return Scheduler(request, decoder, pool, max_num_seqs, phase).run()


def require_equal_bits(actual: Completions, expected: Completions) -> None:
    for field in fields(expected):
        own, other = getattr(actual, field.name), getattr(expected, field.name)
        assert torch.equal(own, other) if isinstance(own, torch.Tensor) else own == other, field.name


@pytest.mark.parametrize("dtype", slow_but([torch.float32], [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("max_num_seqs", [3, 64])  # 3: rows wait for others to end
@pytest.mark.parametrize("sampling", SETTINGS)
def test_completions_equal_those_of_single_steps(sampling, max_num_seqs, dtype, monkeypatch):
    decoder = cpu_decoder(read_decoder(tiny_model("llama").to(dtype)))
    calls = Calls(monkeypatch)
    actual = completions_of(request(sampling), decoder, max_num_seqs)
    in_loop = list(calls.steps)
    monkeypatch.setattr(CpuDecoder, "samples_in_kernel", False)
    expected = completions_of(request(sampling), decoder, max_num_seqs)
    assert calls.steps == in_loop, "single steps ran in the kernels' loop"
    assert max(in_loop) <= STEPS_IN_KERNEL and len(in_loop) < sum(in_loop)
    lengths = expected.lengths.tolist()
    assert len(set(lengths)) > 2 and min(lengths) < NEW, lengths
    require_equal_bits(actual, expected)


@pytest.mark.parametrize("sampling", SETTINGS)
def test_ranks_with_slices_draw_the_same_tokens_in_the_loop(sampling, monkeypatch):
    layout = read_decoder(tiny_model("llama"))
    groups = host_groups(2)
    calls = Calls(monkeypatch)
    decoders = {group: cpu_decoder(layout, group) for group in groups}
    actual = on_every_rank(groups, lambda group: completions_of(request(sampling), decoders[group], 5))
    assert len(calls.steps) < sum(calls.steps)
    monkeypatch.setattr(CpuDecoder, "samples_in_kernel", False)
    for completions in on_every_rank(groups, lambda group: completions_of(request(sampling), decoders[group], 5)):
        require_equal_bits(actual[0], completions)
    require_equal_bits(*actual)
    whole = completions_of(request(sampling), cpu_decoder(layout), 5)
    assert torch.equal(actual[0].tokens, whole.tokens)
    torch.testing.assert_close(actual[0].old_logps, whole.old_logps, rtol=0, atol=1e-5)
