"""Weights spread over ranks: what one rank alone makes, from a model and from a checkpoint, and less memory on each."""

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import hybrid
from tests.engines import CollectiveCount
from tests.rank_pool import run_script
from tests.tiny_models import ALL_FAMILIES, prompts, tiny_model, tiny_other, twin, with_peft


def spread(model, size: int = 2, **settings) -> hybrid.InferenceEngine:
    given = {"dtype": torch.float32, "replace_with_kernel_inject": True, "tp": {"tp_size": size}, **settings}
    return hybrid.init_inference(model, **given)


def check_equal(engine: hybrid.InferenceEngine, reference: torch.nn.Module, same: bool) -> None:
    """Logits and tokens, for ranks that bring the same prompts or each its own."""
    rank = 0 if same else dist.get_rank()
    ids, mask = prompts(3 + rank, 7 + rank, padded=True, seed=rank)
    request = {"attention_mask": mask, "max_new_tokens": 6 + 2 * rank, "do_sample": False}
    assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))
    if reference.config.model_type == "bloom":  # takes no position_ids, by which a row padded on the left is known
        ids, mask = ids.flip(1), mask.flip(1)
    with torch.no_grad():
        expected = hybrid.padded_forward(reference)(ids, mask).logits
    found = hybrid.padded_forward(engine.module, engine)(ids, mask).logits
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=1e-3, rtol=1e-4)


def check_family(family: str, folder: str) -> None:
    """From the model's own weights, and from a file into a model that has none."""
    reference = tiny_model(family).eval()
    for checkpoint in (None, folder):
        model = twin(reference)
        if checkpoint:
            with torch.device("meta"):
                model = type(reference)(reference.config)
        engine = spread(model, checkpoint=checkpoint)
        assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        assert sum(param.numel() for param in model.parameters()) == 0
        assert all("spread over 2 ranks" in row["why"] for row in engine.coverage())
        for same in (True, False):
            check_equal(engine, reference, same)
        engine.destroy()
    dist.barrier()


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_two_ranks_make_what_one_makes(ranks, tmp_path, family):
    tiny_model(family).save_pretrained(tmp_path)
    ranks.run(check_family, family, str(tmp_path))


def check_memory(folder: str) -> None:
    reference = tiny_model("llama")
    whole = sum(param.nbytes for param in reference.parameters())
    largest = max(param.nbytes for param in reference.parameters())
    with torch.device("meta"):
        model = type(reference)(reference.config)
    slices = spread(model, checkpoint=folder)._snapshot
    assert 0.5 < slices.nbytes() / whole < 0.53  # norms are whole, and the vocabulary of 97 is rounded up
    assert slices.peak_bytes <= slices.nbytes() + largest, "more than a tensor was whole at once"


def test_a_rank_keeps_its_part_alone(ranks, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    ranks.run(check_memory, str(tmp_path))


def check_written(folder: str, family: str) -> None:
    """Written at two ranks and at one, read at one and at two."""
    reference = tiny_model(family).eval()
    spread(twin(reference), save_mp_checkpoint_path=f"{folder}/two")
    if dist.get_rank() == 0:
        spread(twin(reference), size=1, save_mp_checkpoint_path=f"{folder}/one")
    dist.barrier()
    for path in ("one", "two"):
        for size in (1, 2):
            with torch.device("meta"):
                model = type(reference)(reference.config)
            engine = spread(model, size, checkpoint=f"{folder}/{path}")
            check_equal(engine, reference, same=False)
            if size == 1:
                expected = reference.state_dict()
                assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
            engine.destroy()
    dist.barrier()


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_parts_are_read_at_another_size(ranks, tmp_path, family):
    ranks.run(check_written, str(tmp_path), family)


class ModelParallelUnit:
    """As Megatron's."""

    def __init__(self, group):
        self.group = group

    def get_model_parallel_group(self):
        return self.group


def check_groups() -> None:
    """A group of the caller's, and a model parallel unit; several engines of different sizes at once."""
    group = dist.new_group([0, 1])
    reference, small = tiny_model("llama").eval(), tiny_model("gpt2").eval()
    engines = [
        (spread(twin(reference), tp={"tp_group": group}), reference),
        (spread(twin(small), tp={"mpu": ModelParallelUnit(group)}), small),
        (spread(twin(reference), 1), reference),
        (spread(twin(small), tp={"enabled": False, "tp_size": 2}), small),
    ]
    for _ in range(2):
        for engine, model in engines:
            check_equal(engine, model, same=False)
    assert ["spread" in engine.coverage()[0]["why"] for engine, _ in engines] == [True, True, False, False]
    with pytest.raises(ValueError, match="4 given; the group that is given too has 2 ranks"):
        spread(twin(reference), tp={"tp_group": group, "tp_size": 4})


def test_groups_and_several_engines(ranks):
    ranks.run(check_groups)


def check_more_than_logits(family: str, settings: dict) -> None:
    """What a fused decoder does not give: padding on the left without positions, a loss, hidden states, caches, scores.
    The model's own layers run, put together from the ranks' slices; ranks ask for other rows, and for other things."""
    reference, rank = tiny_model(family).eval(), dist.get_rank()
    engine = hybrid.init_inference(twin(reference), dtype=torch.float32, kernel_inject=True, **settings)
    assert engine.coverage()[0]["container"] == "fused"
    ids, mask = prompts(2 + rank, 6 + rank, padded=True, seed=rank)
    real, labels = mask.bool(), ids.masked_fill(mask == 0, -100)
    both = {"labels": labels, "output_hidden_states": True, "use_cache": True}
    asked = [{}, {"labels": labels}, {"output_hidden_states": True}, both]
    for more in asked if rank == 0 else reversed(asked):
        with torch.no_grad():
            expected = reference(ids, attention_mask=mask, **more)
        found = engine(ids, attention_mask=mask, **more)
        torch.testing.assert_close(found.logits[real], expected.logits[real], atol=1e-4, rtol=1e-4)
        if "labels" in more:
            torch.testing.assert_close(found.loss, expected.loss, atol=1e-4, rtol=1e-4)
        for ours, theirs in zip(found.hidden_states or (), expected.hidden_states or (), strict=True):
            torch.testing.assert_close(ours[real], theirs[real], atol=1e-4, rtol=1e-4)
    # One step on from the caches of the last forward, of rank 1 a new one.
    cache, theirs = (found.past_key_values, expected.past_key_values) if rank == 0 else (None, None)
    step = {"attention_mask": torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)} if rank == 0 else {}
    with torch.no_grad():
        expected = reference(ids[:, -1:], past_key_values=theirs, use_cache=True, **step).logits
    found = engine(ids[:, -1:], past_key_values=cache, use_cache=True, **step).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    request = {"attention_mask": mask, "max_new_tokens": 4 + rank, "do_sample": False}
    record = {"return_dict_in_generate": True, "output_scores": True} if rank == 0 else {}
    expected, found = reference.generate(ids, **request, **record), engine.generate(ids, **request, **record)
    if record:
        assert torch.equal(found.sequences, expected.sequences)
        torch.testing.assert_close(torch.stack(found.scores), torch.stack(expected.scores), atol=1e-4, rtol=1e-4)
    else:
        assert torch.equal(found, expected)
    assert "put together from 2 ranks' slices at every forward" in engine.coverage()[0]["why"]
    held = sum(param.numel() for param in engine.module.parameters())
    assert held < 0.05 * sum(param.numel() for param in reference.parameters()), "whole weights stay"
    assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))  # fused again


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"tp": {"tp_size": 2}}),
        ("gpt2", {"tp": {"tp_size": 2}}),
        ("bloom", {"tp": {"tp_size": 2}}),
        ("mixtral", {"moe": {"ep_size": 2}}),
        ("mixtral", {"tp": {"tp_size": 2}}),
    ],
)
def test_forwards_that_ask_for_more_than_logits(ranks, family, settings):
    ranks.run(check_more_than_logits, family, settings)


def check_samples() -> None:
    """Ranks of a group draw the same tokens, though their generators differed; ranks by themselves do not."""
    torch.manual_seed(dist.get_rank())
    alone = hybrid.init_inference(tiny_model("llama"), dtype="float32")
    ids, mask = prompts(4, 7, padded=True)
    request = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": True, "top_k": 0}
    state = torch.get_rng_state()
    own = alone.generate(ids, **request)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(100 + dist.get_rank())
    together = spread(tiny_model("llama"))
    drawn = together.generate(ids, **request)
    draws = [torch.zeros(8) for _ in range(2)]
    dist.all_gather(draws, torch.rand(8))
    assert torch.equal(*draws), "what callers draw by themselves of equal logits is not equal"
    for tokens, same in ((own, False), (drawn, True)):
        other = [torch.zeros(4, 40, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(other, torch.nn.functional.pad(tokens, (0, 40 - tokens.shape[1])))
        assert torch.equal(*other) == same


def test_seeds_are_shared_within_a_group_only(ranks):
    ranks.run(check_samples)


def check_refusals() -> None:
    with pytest.raises(ValueError, match="tp_size: 4 given; it must divide the world size, 2"):
        spread(tiny_model("llama"), 4)
    odd = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3}
    with pytest.raises(ValueError, match="tensor_parallel.tp_size: 2 given; the model's 3 attention heads"):
        spread(tiny_model("llama", **odd))
    with pytest.warns(UserWarning, match="BertForMaskedLM has no attention and no MLP that is known to be cut"):
        spread(tiny_other("bert"))
    with pytest.raises(NotImplementedError, match="a model with adapters; merge them first"):
        spread(with_peft(tiny_model("llama")))
    with CollectiveCount() as count, pytest.raises(ValueError):
        spread(tiny_model("llama"), 4)
    assert count.count == 0
    engine = spread(tiny_model("llama"))
    ids, mask = prompts(2, 7, padded=True)
    with pytest.raises(NotImplementedError, match="num_beams=2"):
        engine.generate(ids, attention_mask=mask, num_beams=2, max_new_tokens=3)
    request = {"attention_mask": mask, "max_new_tokens": 5}
    assert torch.equal(engine.generate(ids, **request), tiny_model("llama").eval().generate(ids, **request))
    engine.profile_model_time()
    engine.generate(ids, min_new_tokens=5, **request)
    times = engine.model_times()
    assert len(times) == 5
    assert np.all(times)


def test_what_ranks_cannot_do_is_refused_and_nobody_hangs(ranks):
    ranks.run(check_refusals)


def check_no_graphs() -> None:
    """Words of a machine with a device; nothing has run on it when they are said."""
    with mock.patch("torch.cuda.is_available", lambda: True):
        for kernels in (True, False):
            with pytest.raises(
                NotImplementedError, match="enable_cuda_graph: true given for 2 ranks that share weights"
            ):
                spread(tiny_model("llama"), enable_cuda_graph=True, replace_with_kernel_inject=kernels)


def test_ranks_that_wait_for_each_other_have_no_graphs(ranks):
    ranks.run(check_no_graphs)


LAUNCHED = """
import torch
from tests.tiny_models import prompts, tiny_model

import hybrid

assert not torch.distributed.is_initialized()
ids, mask = prompts(3, 7, padded=True)
request = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
expected = tiny_model("llama").eval().generate(ids, **request)
alone = hybrid.init_inference(tiny_model("llama"), dtype="float32", kernel_inject=True)
assert not torch.distributed.is_initialized(), "one rank needs no others"
engine = hybrid.init_inference(tiny_model("llama"), dtype="float32", kernel_inject=True, tp={"tp_size": 2})
assert torch.distributed.get_world_size() == 2
assert all("spread over 2 ranks" in row["why"] for row in engine.coverage())
for one in (alone, engine):
    assert torch.equal(one.generate(ids, **request), expected)
print("equal on rank", torch.distributed.get_rank(), flush=True)
torch.distributed.barrier()
"""


@pytest.mark.slow
def test_ranks_that_a_launcher_has_started_find_each_other(tmp_path):
    """torchrun alone, and nobody has called `init_process_group`."""
    script = tmp_path / "launched.py"
    script.write_text(LAUNCHED)
    paths = {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    process = run_script([str(script)], 2, timeout_s=200, env=paths)
    assert process.returncode == 0, process.stdout
    assert {f"equal on rank {rank}" in process.stdout for rank in range(2)} == {True}
