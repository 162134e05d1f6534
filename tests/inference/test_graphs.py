"""Forwards as graphs, with a capture that is not CUDA's: what is copied in, when a new one is made, what is refused."""

import pytest
import torch

from hybrid.kernels.cuda_graph import Captured, GraphedForward
from tests.tiny_models import prompts, tiny_model, tiny_other


class Capture:
    """Runs once to capture, and again to replay; writes into the tensors of the first run, as a graph does."""

    def __init__(self):
        self.pools: list = []
        self.replays = 0

    def __call__(self, run, pool) -> Captured:
        self.pools.append(pool)
        run()

        def replay() -> None:
            self.replays += 1
            run()

        return Captured(replay, pool or object())


IDS, MASK = prompts(3, 7, padded=True)


def logits_of(model, *args, **kwargs) -> torch.Tensor:
    with torch.no_grad():
        return model(*args, **kwargs).logits


def test_replays_are_the_models_forwards():
    model, capture = tiny_other("bert"), Capture()
    graphed = GraphedForward(model, capture=capture)
    other = prompts(3, 7, padded=False, seed=1)[0]
    first = logits_of(graphed, IDS, attention_mask=MASK)
    assert torch.equal(first, logits_of(model, IDS, attention_mask=MASK))
    assert torch.equal(logits_of(graphed, other, attention_mask=MASK), logits_of(model, other, attention_mask=MASK))
    assert (len(capture.pools), capture.replays) == (1, 2)


class OneOutput(torch.nn.Module):
    """Writes where it has written before, as a graph does."""

    def __init__(self):
        super().__init__()
        self.made = torch.zeros(3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"made": self.made.copy_(2 * x)}


def test_outputs_are_the_callers_own():
    graphed = GraphedForward(OneOutput(), capture=Capture())
    first, second = (graphed(torch.full((3,), value))["made"] for value in (1.0, 5.0))
    assert first.tolist() == [2, 2, 2]
    assert second.tolist() == [10, 10, 10]


def test_a_graph_for_each_shape_and_argument_and_no_more_than_that():
    model, capture = tiny_other("bert"), Capture()
    graphed = GraphedForward(model, max_graphs=2, capture=capture)
    calls = [(IDS, {}), (IDS[:, :5], {}), (IDS, {"output_hidden_states": True}), (IDS, {"attention_mask": MASK})]
    for n, (ids, more) in enumerate(calls, start=1):
        for _ in range(2):
            assert torch.equal(logits_of(graphed, ids, **more), logits_of(model, ids, **more))
        assert len(capture.pools) == n
        assert len(graphed.graphs) == min(n, 2)
    logits_of(graphed, *calls[2][:1], **calls[2][1])
    assert len(capture.pools) == len(calls), "the one that was used last but one was thrown away"
    logits_of(graphed, IDS)
    assert len(capture.pools) == len(calls) + 1
    assert capture.pools[0] is None
    assert None not in capture.pools[1:], "graphs share memory"


def test_what_cannot_be_captured_is_refused_in_words():
    def capture(run, pool):
        raise RuntimeError("operation not permitted when stream is capturing")

    graphed = GraphedForward(tiny_other("bert"), capture=capture)
    with pytest.raises(NotImplementedError, match="this forward of BertForMaskedLM cannot be captured: operation not"):
        graphed(IDS)
    assert not graphed.graphs


@pytest.mark.skipif(torch.cuda.is_available(), reason="words of a machine without a device")
def test_without_a_device_there_are_no_graphs():
    with pytest.raises(NotImplementedError, match="CUDA graphs need a CUDA device"):
        GraphedForward(tiny_other("bert"))(IDS)


def test_caches_are_refused_in_words():
    """A graph would go on from the cache that it was captured with."""
    model, capture = tiny_model("llama").eval(), Capture()
    graphed = GraphedForward(model, capture=capture)
    with torch.no_grad():
        with pytest.raises(NotImplementedError, match="DynamicCache made by a forward.*use_cache=False"):
            graphed(IDS)
        cache = model(IDS).past_key_values
        with pytest.raises(NotImplementedError, match="DynamicCache given to a forward"):
            graphed(IDS[:, :1], past_key_values=cache)
    assert not capture.pools
    assert cache.get_seq_length() == IDS.shape[1]
    assert torch.equal(logits_of(graphed, IDS, use_cache=False), logits_of(model, IDS))
