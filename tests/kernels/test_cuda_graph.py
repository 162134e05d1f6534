"""A graphed step equals the step for any number of sequences; tested here with a capture that only stores the function.

Like a CUDA graph's, its replay reads only the tensors of the captured run. tests/gpu tests the real capture.
"""

import pytest
import torch

from hybrid.kernels.cuda_graph import Captured, GraphedStep, capture_sizes

MAX_NUM_SEQS = 20


class Recorder:
    """A capture that records its pools."""

    def __init__(self):
        self.pools = []

    def __call__(self, run, pool) -> Captured:
        self.pools.append(pool)
        run()
        return Captured(run, pool or object())


class Adder:
    """A step that reads `weight`, and records its inputs."""

    def __init__(self):
        self.weight = torch.tensor(10.0)
        self.inputs = []

    def __call__(self, inputs):
        self.inputs.append({name: tensor.clone() for name, tensor in inputs.items()})
        return inputs["lengths"] + self.weight, inputs["block_tables"].sum(1)


@pytest.fixture
def graphed() -> GraphedStep:
    blank = {
        "lengths": torch.ones(MAX_NUM_SEQS, dtype=torch.int32),
        "block_tables": torch.zeros(MAX_NUM_SEQS, 6, dtype=torch.int32),
    }
    return GraphedStep(Adder(), blank, capture=Recorder())


def inputs_of(count: int, width: int = 6) -> dict[str, torch.Tensor]:
    """Inputs of so many sequences, none of them blank."""
    return {
        "lengths": torch.arange(2, 2 + count, dtype=torch.int32),
        "block_tables": torch.arange(1, 1 + count * width, dtype=torch.int32).view(count, width),
    }


def test_capture_sizes_end_at_max_num_seqs():
    assert capture_sizes(1) == [1]
    assert capture_sizes(3) == [1, 2, 3]
    assert capture_sizes(8) == [1, 2, 4, 8]
    assert capture_sizes(36) == [1, 2, 4, 8, 16, 24, 32, 36]


@pytest.mark.parametrize("count", range(1, MAX_NUM_SEQS + 1))
def test_a_replay_equals_the_step(graphed, count):
    """For every captured size, full and not, after a batch with more sequences."""
    graphed.replay(inputs_of(MAX_NUM_SEQS))
    for actual, expected in zip(graphed.replay(inputs_of(count)), Adder()(inputs_of(count)), strict=True):
        assert torch.equal(actual, expected)


def test_block_tables_may_be_narrower_than_captured(graphed):
    graphed.replay(inputs_of(5, width=3))
    inputs = graphed.step.inputs[-1]["block_tables"]
    assert inputs.shape == (8, 6)
    assert torch.equal(inputs[:5, :3], inputs_of(5, width=3)["block_tables"])


def test_padding_sequences_are_blank_after_larger_batches(graphed):
    graphed.replay(inputs_of(16))
    graphed.replay(inputs_of(9))
    inputs = graphed.step.inputs[-1]
    assert len(inputs["lengths"]) == 16
    assert (inputs["lengths"][9:] == 1).all() and (inputs["block_tables"][9:] == 0).all()
    assert torch.equal(inputs["block_tables"][:9], inputs_of(9)["block_tables"])


def test_only_padding_sequences_are_captured(graphed):
    """Warm-up runs must not touch the blocks of real sequences."""
    graphed.replay(inputs_of(16))
    before = len(graphed.step.inputs)
    graphed.replay(inputs_of(7))
    captured, replayed = graphed.step.inputs[before:]
    assert (captured["lengths"] == 1).all() and (captured["block_tables"] == 0).all()
    assert torch.equal(replayed["lengths"][:7], inputs_of(7)["lengths"])


def test_each_size_is_captured_once_and_graphs_share_a_pool(graphed):
    for count in (3, 4, 3, 11, 16, 2):
        graphed.replay(inputs_of(count))
    assert list(graphed.graphs) == [4, 16, 2]
    first, *other_pools = graphed.capture.pools
    assert first is None and len(other_pools) == 2
    assert {id(pool) for pool in other_pools} == {id(graph.pool) for graph in graphed.graphs.values()}


def test_a_reset_captures_again(graphed):
    graphed.replay(inputs_of(4))
    graphed.step.weight = torch.tensor(20.0)
    graphed.reset()
    assert not graphed.graphs
    assert torch.equal(graphed.replay(inputs_of(4))[0], inputs_of(4)["lengths"] + 20.0)
    assert graphed.capture.pools == [None, None]


def test_graphs_are_bounded():
    graphed = GraphedStep(Adder(), {"lengths": torch.ones(64), "block_tables": torch.zeros(64, 1)}, 3, Recorder())
    for count in (1, 2, 4, 1, 8, 64):
        graphed.replay({"lengths": torch.full((count,), 5.0), "block_tables": torch.ones(count, 1)})
    assert list(graphed.graphs) == [1, 8, 64]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"lengths": torch.ones(2, dtype=torch.int32)}, "takes \\['block_tables', 'lengths'\\]"),
        (
            inputs_of(MAX_NUM_SEQS + 1),
            r"lengths is torch.int32 \(21,\), and the graphs hold at most torch.int32 \(20,\)",
        ),
        (inputs_of(2, width=7), r"tables is torch.int32 \(2, 7\)"),
        ({**inputs_of(2), "lengths": torch.ones(2)}, "lengths is torch.float32"),
        ({**inputs_of(2), "lengths": torch.ones(1, dtype=torch.int32)}, r"\[1, 2\] sequences"),
        (inputs_of(0), r"\[0\] sequences"),
    ],
)
def test_inputs_that_do_not_fit_raise_value_error(graphed, inputs, message):
    with pytest.raises(ValueError, match=message):
        graphed.replay(inputs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_capture_without_a_cuda_device_raises_not_implemented(graphed):
    with pytest.raises(NotImplementedError, match="CUDA graphs need a CUDA device"):
        GraphedStep(Adder(), graphed.blank).replay(inputs_of(2))
