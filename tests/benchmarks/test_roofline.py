"""The model of rollouts on GPUs: sizes of published models, parts that follow from them, tables as documented."""

import pytest

from benchmarks.results import ROOT
from benchmarks.roofline import (
    ANCHORS,
    BANDWIDTH_SHARE,
    DEVICES,
    HOSTS,
    LINK_SHARE,
    Rollout,
    Sizes,
    anchor_table,
    decode_step,
    iteration_table,
    iterations,
    llama_8b,
    memory_left,
    step_table,
)

H100 = DEVICES[0]


@pytest.mark.parametrize(("name", "billions"), [("7B", 7.24), ("32B", 32.8), ("70B", 70.6)])
def test_parameters_are_those_of_the_published_models(name, billions):
    """As their model cards say: Mistral-7B, Qwen2.5-32B, Llama-3-70B."""
    assert Sizes.of(name).parameters / 1e9 == pytest.approx(billions, rel=0.005)


def test_one_sequence_is_limited_by_reading_the_weights():
    """Mistral-7B reads 14.2 GB a token: all but the embedding."""
    sizes = Sizes.of("7B")
    step = decode_step(sizes, H100, 1, Rollout(rows=1, context=0))
    assert step.linear == pytest.approx((7.2417e9 - 32000 * 4096) * 2 / (3.35e12 * BANDWIDTH_SHARE), rel=1e-3)
    assert step.attention == step.all_reduce == 0


def test_the_model_gives_what_vllm_published_for_one_h100():
    """Its own rates are not fitted to them: 0.8 of the bandwidth, where vLLM's attention reads at 0.9."""
    assert llama_8b().parameters / 1e9 == pytest.approx(8.03, rel=0.001)  # its model card
    for anchor in ANCHORS:
        step = decode_step(llama_8b(), H100, 1, Rollout(anchor.rows, anchor.context))
        assert step.total * 1e3 == pytest.approx(anchor.published_ms, rel=0.07)


def test_many_rows_are_limited_by_arithmetic_and_groups_divide_it():
    sizes, rollout = Sizes.of("7B"), Rollout(rows=4096, context=0)
    one, four = (decode_step(sizes, H100, tp_size, rollout) for tp_size in (1, 4))
    assert one.linear == four.linear  # four times the rows, a quarter of the columns
    assert four.all_reduce > 0


def test_gathering_takes_the_slowest_link():
    whole = 140e9
    one_host = H100.gather_s(whole, 1, 1)
    assert one_host == pytest.approx(whole / 450e9 / LINK_SHARE)
    assert H100.gather_s(whole, 8, 1) == pytest.approx(one_host / 8)
    # Four hosts, 8 network cards of 50 GB/s: three quarters of the weights come from other hosts.
    assert H100.gather_s(whole, 1, 4) == pytest.approx(one_host + whole * 0.75 / 400e9 / LINK_SHARE)


def test_a_way_without_memory_has_no_time():
    sizes, rollout = Sizes.of("70B"), Rollout()
    engine, _, gather_all = iterations(sizes, H100, 4, rollout)
    assert gather_all is None and engine.tp_size == 8
    assert memory_left(sizes, H100, 4, 1.0) < 0 < memory_left(sizes, H100, 4, 1 / 8)


def test_the_documentation_has_the_tables():
    """`python -m benchmarks.roofline` prints them."""
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    lines = [*step_table(Rollout(), fastest=True), *iteration_table(Rollout()), *anchor_table()]
    assert len(lines) > 3 * len(HOSTS) and all(line in text for line in lines)
