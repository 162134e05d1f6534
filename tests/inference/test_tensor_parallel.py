"""Tensor parallelism gives one rank's results, from a model and from a checkpoint, with less memory per rank."""

from pathlib import Path
from unittest import mock

import numpy as np
import peft
import pytest
import torch
import torch.distributed as dist
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import hybrid
from tests.engines import CollectiveCount
from tests.marks import slow_but
from tests.rank_pool import run_script
from tests.tiny_models import ALL_FAMILIES, RECURRENT, prompts, tiny_model, tiny_non_decoder, twin, with_peft


def tp_engine(model, size: int = 2, **settings) -> hybrid.InferenceEngine:
    arguments = {"dtype": torch.float32, "replace_with_kernel_inject": True, "tp": {"tp_size": size}, **settings}
    return hybrid.init_inference(model, **arguments)


def check_equal(engine: hybrid.InferenceEngine, reference: torch.nn.Module, same_prompts: bool) -> None:
    """Logits and tokens, for ranks with the same prompts or with different ones."""
    rank = 0 if same_prompts else dist.get_rank()
    ids, mask = prompts(3 + rank, 7 + rank, padded=True, seed=rank)
    request = {"attention_mask": mask, "max_new_tokens": 6 + 2 * rank, "do_sample": False}
    assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))
    if reference.config.model_type == "bloom":  # takes no position_ids, which left padding needs
        ids, mask = ids.flip(1), mask.flip(1)
    with torch.no_grad():
        expected = hybrid.padded_forward(reference)(ids, mask).logits
    actual = hybrid.padded_forward(engine.module, engine)(ids, mask).logits
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], atol=1e-3, rtol=1e-4)


def check_family(family: str, folder: str) -> None:
    """From the model's own weights, and from a file into a model on the meta device."""
    reference = tiny_model(family).eval()
    for checkpoint in (None, folder):
        model = twin(reference)
        if checkpoint:
            with torch.device("meta"):
                model = type(reference)(reference.config)
        engine = tp_engine(model, checkpoint=checkpoint)
        assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        assert sum(param.numel() for param in model.parameters()) == 0
        assert all("sharded over 2 ranks" in row["why"] for row in engine.coverage())
        for same in (True, False):
            check_equal(engine, reference, same)
        engine.destroy()
    dist.barrier()


QUICK = ("gpt2", "falcon", "mixtral", "qwen3_next")


@pytest.mark.parametrize("family", slow_but(QUICK, (*ALL_FAMILIES, *RECURRENT)))
def test_two_ranks_match_hugging_face(ranks, tmp_path, family):
    tiny_model(family).save_pretrained(tmp_path)
    ranks.run(check_family, family, str(tmp_path))


def check_memory(folder: str) -> None:
    reference = tiny_model("llama")
    model_bytes = sum(param.nbytes for param in reference.parameters())
    largest = max(param.nbytes for param in reference.parameters())
    with torch.device("meta"):
        model = type(reference)(reference.config)
    slices = tp_engine(model, checkpoint=folder)._snapshot
    assert 0.5 < slices.nbytes() / model_bytes < 0.53  # norms are replicated, and the vocabulary of 97 is rounded up
    assert slices.peak_bytes <= slices.nbytes() + largest, "more than one full tensor was in memory"


def test_a_rank_holds_only_its_slice(ranks, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    ranks.run(check_memory, str(tmp_path))


def check_written(folder: str, family: str) -> None:
    """Saved at tp_size 2 and 1, loaded at 1 and 2."""
    reference = tiny_model(family).eval()
    tp_engine(twin(reference), save_mp_checkpoint_path=f"{folder}/two")
    # Every rank builds it, as engines' names are counted by rank; rank 0 alone saves.
    tp_engine(twin(reference), size=1, save_mp_checkpoint_path=f"{folder}/one" if dist.get_rank() == 0 else None)
    dist.barrier()
    for path in ("one", "two"):
        for size in (1, 2):
            with torch.device("meta"):
                model = type(reference)(reference.config)
            engine = tp_engine(model, size, checkpoint=f"{folder}/{path}")
            check_equal(engine, reference, same_prompts=False)
            if size == 1:
                expected = reference.state_dict()
                assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
            engine.destroy()
    dist.barrier()


SAVED = ["gpt2", "mixtral", "qwen3_next", "qwen3_5_text", "bamba", "kimi_linear", "lfm2"]


@pytest.mark.parametrize("family", slow_but(["mixtral", "qwen3_next"], SAVED))
def test_saved_slices_load_at_another_tp_size(ranks, tmp_path, family):
    ranks.run(check_written, str(tmp_path), family)


class ModelParallelUnit:
    """An mpu like Megatron's."""

    def __init__(self, group):
        self.group = group

    def get_model_parallel_group(self):
        return self.group


def check_groups() -> None:
    """A given tp_group, an mpu, and several engines of different sizes at once."""
    group = dist.new_group([0, 1])
    reference, small = tiny_model("llama").eval(), tiny_model("gpt2").eval()
    engines = [
        (tp_engine(twin(reference), tp={"tp_group": group}), reference),
        (tp_engine(twin(small), tp={"mpu": ModelParallelUnit(group)}), small),
        (tp_engine(twin(reference), 1), reference),
        (tp_engine(twin(small), tp={"enabled": False, "tp_size": 2}), small),
    ]
    for _ in range(2):
        for engine, model in engines:
            check_equal(engine, model, same_prompts=False)
    assert ["sharded" in engine.coverage()[0]["why"] for engine, _ in engines] == [True, True, False, False]
    with pytest.raises(ValueError, match="4 given; the group given too has 2 ranks"):
        tp_engine(twin(reference), tp={"tp_group": group, "tp_size": 4})


def test_given_groups_and_several_engines(ranks):
    ranks.run(check_groups)


def check_more_than_logits(family: str, settings: dict) -> None:
    """Outputs that the fused decoder does not support: left padding without positions, a loss, hidden states, caches,
    scores. The model's own layers run, gathered from the ranks' slices; ranks differ in rows and requests."""
    reference, rank = tiny_model(family).eval(), dist.get_rank()
    engine = hybrid.init_inference(twin(reference), dtype=torch.float32, kernel_inject=True, **settings)
    assert engine.coverage()[0]["container"] == "fused"
    ids, mask = prompts(2 + rank, 6 + rank, padded=True, seed=rank)
    real, labels = mask.bool(), ids.masked_fill(mask == 0, -100)
    everything = {"labels": labels, "output_hidden_states": True, "use_cache": True}
    requests = [{}, {"labels": labels}, {"output_hidden_states": True}, everything]
    for more in requests if rank == 0 else reversed(requests):
        with torch.no_grad():
            expected = reference(ids, attention_mask=mask, **more)
        actual = engine(ids, attention_mask=mask, **more)
        torch.testing.assert_close(actual.logits[real], expected.logits[real], atol=1e-4, rtol=1e-4)
        if "labels" in more:
            torch.testing.assert_close(actual.loss, expected.loss, atol=1e-4, rtol=1e-4)
        for hidden, expected_value in zip(actual.hidden_states or (), expected.hidden_states or (), strict=True):
            torch.testing.assert_close(hidden[real], expected_value[real], atol=1e-4, rtol=1e-4)
    # One step from the cache of the last forward; rank 1 starts a new one.
    cache, expected_value = (actual.past_key_values, expected.past_key_values) if rank == 0 else (None, None)
    step = {"attention_mask": torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)} if rank == 0 else {}
    with torch.no_grad():
        expected = reference(ids[:, -1:], past_key_values=expected_value, use_cache=True, **step).logits
    actual = engine(ids[:, -1:], past_key_values=cache, use_cache=True, **step).logits
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    request = {"attention_mask": mask, "max_new_tokens": 4 + rank, "do_sample": False}
    record = {"return_dict_in_generate": True, "output_scores": True} if rank == 0 else {}
    expected, actual = reference.generate(ids, **request, **record), engine.generate(ids, **request, **record)
    if record:
        assert torch.equal(actual.sequences, expected.sequences)
        torch.testing.assert_close(torch.stack(actual.scores), torch.stack(expected.scores), atol=1e-4, rtol=1e-4)
    else:
        assert torch.equal(actual, expected)
    assert "gathered from 2 ranks' slices at every forward" in engine.coverage()[0]["why"]
    local_params = sum(param.numel() for param in engine.module.parameters())
    assert local_params < 0.05 * sum(param.numel() for param in reference.parameters()), "full weights were kept"
    assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))  # fused again


@pytest.mark.parametrize(
    ("family", "settings"),
    slow_but(
        [("llama", {"tp": {"tp_size": 2}}), ("bloom", {"tp": {"tp_size": 2}}), ("mixtral", {"moe": {"ep_size": 2}})],
        [
            ("llama", {"tp": {"tp_size": 2}}),
            ("gpt2", {"tp": {"tp_size": 2}}),
            ("bloom", {"tp": {"tp_size": 2}}),
            ("mixtral", {"moe": {"ep_size": 2}}),
            ("mixtral", {"tp": {"tp_size": 2}}),
        ],
    ),
)
def test_forwards_with_losses_hidden_states_and_caches_match_hugging_face(ranks, family, settings):
    ranks.run(check_more_than_logits, family, settings)


def check_samples() -> None:
    """Ranks of a group sample the same tokens, though their generators differ; ranks with their own engines do not."""
    torch.manual_seed(dist.get_rank())
    alone = hybrid.init_inference(tiny_model("llama"), dtype="float32")
    ids, mask = prompts(4, 7, padded=True)
    request = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": True, "top_k": 0}
    state = torch.get_rng_state()
    own_tokens = alone.generate(ids, **request)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(100 + dist.get_rank())
    sharded = tp_engine(tiny_model("llama"))
    drawn = sharded.generate(ids, **request)
    draws = [torch.zeros(8) for _ in range(2)]
    dist.all_gather(draws, torch.rand(8))
    assert torch.equal(*draws), "torch's generators differ between ranks"
    for tokens, same in ((own_tokens, False), (drawn, True)):
        gathered = [torch.zeros(4, 40, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(gathered, torch.nn.functional.pad(tokens, (0, 40 - tokens.shape[1])))
        assert torch.equal(*gathered) == same


def test_ranks_of_a_group_sample_the_same_tokens(ranks):
    ranks.run(check_samples)


def check_requests_that_raise() -> None:
    with pytest.raises(ValueError, match="tp_size: 4 given; it must divide the world size, 2"):
        tp_engine(tiny_model("llama"), 4)
    odd = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3}
    with pytest.raises(ValueError, match="tensor_parallel.tp_size: 2 given; the model's 3 attention heads"):
        tp_engine(tiny_model("llama", **odd))
    with pytest.warns(UserWarning, match="BertForMaskedLM has no attention and no MLP that can be sliced"):
        tp_engine(tiny_non_decoder("bert"))
    ia3 = peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])
    for adapted in (with_peft(tiny_model("llama")), peft.get_peft_model(tiny_model("llama"), ia3)):
        with pytest.raises(NotImplementedError, match="tp_size: 2 given; .* a model with adapters; merge them first"):
            tp_engine(adapted)
    with CollectiveCount() as count, pytest.raises(ValueError):
        tp_engine(tiny_model("llama"), 4)
    assert count.count == 0
    engine = tp_engine(tiny_model("llama"))
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


def test_invalid_requests_raise_on_every_rank_without_hanging(ranks):
    ranks.run(check_requests_that_raise)


def check_no_graphs() -> None:
    """The error of a machine with a device, raised before anything runs on it."""
    policy = {LlamaDecoderLayer: ("self_attn.o_proj", "mlp.down_proj")}
    settings = {"enable_cuda_graph": True, "replace_with_kernel_inject": False, "injection_policy": policy}
    message = "enable_cuda_graph: true given; 2 ranks share the model's own modules .injection_policy is given."
    with mock.patch("torch.cuda.is_available", lambda: True), pytest.raises(NotImplementedError, match=message):
        tp_engine(tiny_model("llama"), **settings)


def test_cuda_graphs_of_sliced_modules_raise(ranks):
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
assert all("sharded over 2 ranks" in row["why"] for row in engine.coverage())
for one in (alone, engine):
    assert torch.equal(one.generate(ids, **request), expected)
print("equal on rank", torch.distributed.get_rank(), flush=True)
torch.distributed.barrier()
"""


@pytest.mark.slow
def test_init_inference_starts_torch_distributed_under_torchrun(tmp_path):
    """torchrun alone, without a call of `init_process_group`."""
    script = tmp_path / "launched.py"
    script.write_text(LAUNCHED)
    paths = {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    process = run_script([str(script)], 2, timeout_s=200, env=paths)
    assert process.returncode == 0, process.stdout
    assert {f"equal on rank {rank}" in process.stdout for rank in range(2)} == {True}
