"""Graphed forwards with a stand-in for CUDA's capture: inputs are copied in, when a graph is captured, and errors."""

import pytest
import torch

from hybrid.kernels.cuda_graph import GraphedForward
from tests.tiny_models import prompts, tiny_model, tiny_non_decoder


class Capture:
    """Runs once to capture and again to replay, writing into the tensors of the first run, as a graph does."""

    def __init__(self):
        self.captured = self.replays = 0

    def __call__(self, run):
        self.captured += 1
        run()

        def replay() -> None:
            self.replays += 1
            run()

        return replay


IDS, MASK = prompts(3, 7, padded=True)


def logits_of(model, *args, **kwargs) -> torch.Tensor:
    with torch.no_grad():
        return model(*args, **kwargs).logits


def test_replays_match_the_models_forward():
    model, capture = tiny_non_decoder("bert"), Capture()
    graphed = GraphedForward(model, capture=capture)
    other = prompts(3, 7, padded=False, seed=1)[0]
    first = logits_of(graphed, IDS, attention_mask=MASK)
    assert torch.equal(first, logits_of(model, IDS, attention_mask=MASK))
    assert torch.equal(logits_of(graphed, other, attention_mask=MASK), logits_of(model, other, attention_mask=MASK))
    assert (capture.captured, capture.replays) == (1, 2)


class OneOutput(torch.nn.Module):
    """Writes every output into the same tensor, as a graph does."""

    def __init__(self):
        super().__init__()
        self.made = torch.zeros(3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"made": self.made.copy_(2 * x)}


def test_outputs_are_copies():
    graphed = GraphedForward(OneOutput(), capture=Capture())
    first, second = (graphed(torch.full((3,), value))["made"] for value in (1.0, 5.0))
    assert first.tolist() == [2, 2, 2]
    assert second.tolist() == [10, 10, 10]


def test_one_graph_per_shape_and_arguments():
    model, capture = tiny_non_decoder("bert"), Capture()
    graphed = GraphedForward(model, max_graphs=2, capture=capture)
    calls = [(IDS, {}), (IDS[:, :5], {}), (IDS, {"output_hidden_states": True}), (IDS, {"attention_mask": MASK})]
    for n, (ids, more) in enumerate(calls, start=1):
        for _ in range(2):
            assert torch.equal(logits_of(graphed, ids, **more), logits_of(model, ids, **more))
        assert capture.captured == n
        assert len(graphed.graphs) == min(n, 2)
    logits_of(graphed, *calls[2][:1], **calls[2][1])
    assert capture.captured == len(calls), "the second most recently used graph was dropped"
    logits_of(graphed, IDS)
    assert capture.captured == len(calls) + 1


def test_a_forward_that_cannot_be_captured_raises_not_implemented():
    def capture(run):
        raise RuntimeError("operation not permitted when stream is capturing")

    graphed = GraphedForward(tiny_non_decoder("bert"), capture=capture)
    with pytest.raises(NotImplementedError, match="this forward of BertForMaskedLM cannot be captured: operation not"):
        graphed(IDS)
    assert not len(graphed.graphs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="messages of a machine without a device")
def test_graphs_without_a_cuda_device_raise_not_implemented():
    with pytest.raises(NotImplementedError, match="CUDA graphs need a CUDA device"):
        GraphedForward(tiny_non_decoder("bert"))(IDS)


def test_graphs_with_a_kv_cache_raise_not_implemented():
    """A graph would read the cache that it was captured with."""
    model, capture = tiny_model("llama").eval(), Capture()
    graphed = GraphedForward(model, capture=capture)
    with torch.no_grad():
        with pytest.raises(NotImplementedError, match="DynamicCache made by a forward.*use_cache=False"):
            graphed(IDS)
        cache = model(IDS).past_key_values
        with pytest.raises(NotImplementedError, match="DynamicCache given to a forward"):
            graphed(IDS[:, :1], past_key_values=cache)
    assert not capture.captured
    assert cache.get_seq_length() == IDS.shape[1]
    assert torch.equal(logits_of(graphed, IDS, use_cache=False), logits_of(model, IDS))
