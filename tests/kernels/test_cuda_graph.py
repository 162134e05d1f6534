"""Graphs by key: captured once, replayed, dropped; here with a capture that only stores the function.

tests/gpu tests the real capture, tests/decoders/test_decode_loop.py a decoder's graphs.
"""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it comes with torch's CUDA builds")

from hybrid.kernels.cuda_graph import CaptureError, Graphs, capture_sizes
from tests.device_ops import RecordedCapture


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
    assert capture_sizes(256)[11:] == [80, 96, 112, 128, 160, 192, 224, 256]


@pytest.mark.parametrize(("max_capture_size", "count"), [(256, 19), (1024, 27)])
def test_there_are_few_capture_sizes_and_little_padding(max_capture_size, count):
    sizes = capture_sizes(max_capture_size)
    assert len(sizes) == count
    for rows in range(65, max_capture_size + 1):
        padding = min(size for size in sizes if size >= rows) - rows
        assert padding <= rows / 4, f"{rows} rows"


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


def test_a_capture_after_all_graphs_are_gone_gets_a_new_pool(monkeypatch):
    """torch refuses a pool whose graphs are gone; while there is one, all share its pool."""
    recorded = RecordedCapture(monkeypatch)
    graphs = Graphs(max_graphs=2, capture=recorded)
    for key in (1, 2, 3):
        graphs.add(key, lambda: None)
    assert recorded.pools.graphs == {1: 2}
    graphs.reset()
    assert recorded.pools.graphs == {1: 0}
    with pytest.raises(RuntimeError, match="use_count > 0"):
        recorded.pools.add(1, Graphs())
    graphs.add(1, lambda: None)
    assert recorded.pools.graphs == {1: 0, 2: 1}


def test_warm_ups_allocate_from_the_graphs_pool(monkeypatch):
    """Else the allocator keeps what they freed for the capture's stream alone, which no plan counts."""
    recorded, pools = RecordedCapture(monkeypatch), []
    graphs = Graphs(capture=recorded)
    for key in ("first", "second"):
        graphs.add(key, lambda: pools.append(recorded.pools.in_use))
    assert pools == [1] * 4 and recorded.pools.in_use is None


def test_each_device_has_its_stream_and_pool(monkeypatch):
    """Two fake devices: a model that moves to another one is captured on that one, and earlier graphs stay."""
    recorded, x = RecordedCapture(monkeypatch), torch.zeros(2)
    graphs = Graphs(capture=recorded)
    for recorded.device in (0, 1, 1):
        graphs.add((recorded.device, len(graphs)), lambda: x.add_(1))
    assert recorded.capture.stream.device_index == 1 and recorded.pools.graphs == {1: 1, 2: 2}
    assert {pool: kept.device for pool, kept in recorded.pools.kept.items()} == {1: 0, 2: 1}


def test_a_failed_capture_leaves_its_pool_and_stream_for_good(monkeypatch):
    """torch believes that the pool is being captured into; graphs that it has can be replayed."""
    recorded, x = RecordedCapture(monkeypatch), torch.zeros(2)
    graphs = Graphs(capture=recorded)
    graphs.add("before", lambda: x.add_(1))
    stream = recorded.capture.stream
    with pytest.raises(CaptureError, match="not permitted when stream is capturing"):
        graphs.add("waits", x.nonzero)
    assert recorded.pools.failed == {1} and "waits" not in graphs
    graphs.add("after", lambda: x.add_(1))
    assert recorded.pools.handles == 2 and recorded.capture.stream is not stream
    ran = int(x[0])
    graphs.replay("before")
    graphs.replay("after")
    assert int(x[0]) == ran + 2


@pytest.mark.parametrize(
    ("message", "is_swallowed"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 MiB", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("Triton Error [CUDA]: operation not permitted when stream is capturing", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)", False),
    ],
)
def test_only_errors_of_captures_and_of_memory_are_capture_errors(message, is_swallowed):
    def capture(run):
        raise RuntimeError(message)

    with pytest.raises(RuntimeError, match=message.partition(" ")[0]) as caught:
        Graphs(capture=capture).add(1, lambda: None)
    assert isinstance(caught.value, CaptureError) == is_swallowed
