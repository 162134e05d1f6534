"""Graphs by key: captured once, replayed, dropped; here with a capture that only stores the function.

tests/gpu tests the real capture, tests/decoders/test_decode_loop.py a decoder's graphs.
"""

import pytest
import torch

from hybrid.kernels.cuda_graph import Graphs, capture_sizes


class Capture:
    """Stores the function, after a run."""

    def __init__(self):
        self.runs = 0

    def __call__(self, run):
        self.runs += 1
        run()
        return run


def test_capture_sizes_end_at_max_num_seqs():
    assert capture_sizes(0) == []
    assert capture_sizes(1) == [1]
    assert capture_sizes(3) == [1, 2, 3]
    assert capture_sizes(8) == [1, 2, 4, 8]
    assert capture_sizes(36) == [1, 2, 4, 8, 16, 24, 32, 36]


def test_each_key_is_captured_once_and_replayed():
    graphs, numbers = Graphs(capture=Capture()), []
    for key in (3, "draw", 3, (3, "draw"), "draw"):
        if key not in graphs:
            graphs.add(key, lambda key=key: numbers.append(key))
        graphs.replay(key)
    assert graphs.capture.runs == len(graphs) == 3
    assert numbers == [3, 3, "draw", "draw", 3, (3, "draw"), (3, "draw"), "draw"]


def test_the_least_recently_used_graph_is_dropped():
    graphs = Graphs(max_graphs=3, capture=Capture())
    for key in (1, 2, 4, 1, 8, 64):
        if key not in graphs:
            graphs.add(key, lambda: None)
        graphs.replay(key)
    assert list(graphs.replays) == [1, 8, 64]
    graphs.reset()
    assert len(graphs) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_capture_without_a_cuda_device_raises_not_implemented():
    with pytest.raises(NotImplementedError, match="CUDA graphs need a CUDA device"):
        Graphs().add(1, lambda: None)
