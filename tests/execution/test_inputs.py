"""Ids and masks of any dtype, in every public call, give the same results as int64."""

import pytest
import torch
import torch.distributed as dist

import hybrid
from hybrid.kernels.cpu_library import address
from hybrid.runtime.inputs import as_ids, as_mask, as_model_inputs
from tests.engines import engine_of, settings
from tests.marks import slow_but
from tests.tiny_models import prompts, tiny_model, with_peft

ID_DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32]
MASK_DTYPES = [torch.bool, torch.uint8, torch.int32, torch.float16, torch.float32, torch.float64]
PAIRS = [(ids, MASK_DTYPES[n % len(MASK_DTYPES)]) for n, ids in enumerate([*ID_DTYPES, torch.int32, torch.int64])]
BLOCKS = {
    "pinned": {},
    "tp 2": {"hybrid_engine": {"inference_tp_size": 2}},
    "streaming": {"hybrid_engine": {"pin_parameters": False}},
    "native": {"rollout": {"containers": "native"}},
}


def every_call(engine: hybrid.HybridEngine, ids, mask, row_ids) -> list[torch.Tensor]:
    """Outputs of the public calls for this rank's prompts."""
    sampling = hybrid.SamplingParams(max_new_tokens=6, temperature=0.8, top_k=20, seed=4)
    outputs = [engine.generate(ids, attention_mask=mask, max_new_tokens=5)]
    outputs.append(engine.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5, repetition_penalty=1.2))
    with engine.inference():
        batch = engine.rollout(ids, mask, sampling, num_generations=2, row_ids=row_ids)
        sequences, mask_out = batch.sequences.to(ids.dtype), batch.attention_mask.to(mask.dtype)
        scores = engine.score(sequences, mask_out)
        base = engine.score(sequences, mask_out, adapters=False)
    outputs += [value for value in vars(batch).values() if isinstance(value, torch.Tensor)]
    outputs += [scores.per_token_logps, scores.entropies, base.per_token_logps]
    engine.eval()
    positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0).to(torch.int32)
    for module in (engine, engine.module):
        outputs.append(module(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[mask.bool()])
    outputs.append(hybrid.padded_forward(engine.module)(ids, mask).logits[mask.bool()])
    logits = outputs[-1]
    outputs.append(hybrid.selective_log_softmax(logits, ids[mask.bool()]))
    engine.train()
    return outputs


def check_every_call(mode: str, family: str) -> None:
    model = tiny_model(family) if mode == "streaming" else with_peft(tiny_model(family))
    engine = engine_of(model, settings(3, **BLOCKS[mode]))
    rank = dist.get_rank()
    ids, mask = prompts(2 + rank, 9 + rank, padded=True, seed=rank)
    row_ids = torch.arange(len(ids)) + 10 * rank
    expected = every_call(engine, ids, mask, row_ids)
    # with tp 2 every call waits for the other rank
    for id_dtype, mask_dtype in PAIRS[-2:] if mode == "tp 2" else PAIRS:
        actual = every_call(engine, ids.to(id_dtype), mask.to(mask_dtype), row_ids.to(torch.int32))
        assert len(actual) == len(expected)
        for number, (value, expected_value) in enumerate(zip(actual, expected, strict=True)):
            assert value.dtype == expected_value.dtype, (number, id_dtype, mask_dtype)
            assert torch.equal(value, expected_value), (number, id_dtype, mask_dtype)


@pytest.mark.parametrize(
    ("mode", "family"),
    slow_but(
        [("tp 2", "llama"), ("native", "gpt2")],
        [("pinned", "llama"), ("pinned", "gpt2"), ("tp 2", "llama"), ("streaming", "llama"), ("native", "gpt2")],
    ),
)
def test_ids_and_masks_of_any_dtype_give_the_int64_results(ranks, mode, family):
    ranks.run(check_every_call, mode, family)


def check_rollout_engine() -> None:
    from deepspeed.runtime.rollout import RolloutRequest, SamplingConfig

    engine = engine_of(tiny_model("llama"), settings(3))
    rollout = hybrid.HybridRollout(engine)
    ids, mask = prompts(3, 8, padded=True, seed=dist.get_rank())
    config = SamplingConfig(max_new_tokens=5, temperature=0.0, n_samples_per_prompt=2)
    expected = rollout.generate(RolloutRequest(ids, mask), config)
    actual = rollout.generate(RolloutRequest(ids.int(), mask.bool()), config)
    for name in ("input_ids", "attention_mask", "response_start_idx"):
        assert getattr(actual, name).dtype == torch.int64
        assert torch.equal(getattr(actual, name), getattr(expected, name))


def test_hybrid_rollout_accepts_any_dtype(ranks):
    ranks.run(check_rollout_engine)


def inference_calls(engine: hybrid.InferenceEngine, ids, mask) -> list[torch.Tensor]:
    """Outputs of an InferenceEngine's public calls."""
    positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0).to(torch.int32)
    outputs = [engine.generate(ids, attention_mask=mask, max_new_tokens=5)]
    outputs.append(engine.generate(inputs=ids, attention_mask=mask, max_new_tokens=5))
    for module in (engine, engine.module):
        outputs.append(module(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[mask.bool()])
    return outputs


def check_inference_engine(tp_size: int, inject: bool) -> None:
    engine = hybrid.init_inference(
        tiny_model("llama"),
        dtype=torch.float32,
        replace_with_kernel_inject=inject,
        tensor_parallel={"tp_size": tp_size},
    )
    ids, mask = prompts(3, 9, padded=True)
    expected = inference_calls(engine, ids, mask)
    for id_dtype, mask_dtype in PAIRS:
        actual = inference_calls(engine, ids.to(id_dtype), mask.to(mask_dtype))
        assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True)), (id_dtype, mask_dtype)


@pytest.mark.parametrize(
    ("tp_size", "inject"), slow_but([(1, False), (2, True)], [(1, True), (1, False), (2, True), (2, False)])
)
def test_inference_engine_accepts_any_dtype(ranks, tp_size, inject):
    ranks.run(check_inference_engine, tp_size, inject)


def check_moved(monkeypatch) -> None:
    """With the model on another device every input is moved there before it is read."""
    from hybrid.execution import generator

    engine = engine_of(tiny_model("llama"), settings(0))  # no gathering, which would need the device
    ids, mask = prompts(2, 5, padded=True)
    seen = []

    class Seen(Exception):
        pass

    def record_inputs(model, args, kwargs):
        seen.extend([*args, *(value for value in kwargs.values() if isinstance(value, torch.Tensor))])
        raise Seen

    def record_ids(ids, device):
        seen.append(as_ids(ids, device))
        return seen[-1]

    def record_mask(mask, device):
        seen.append(as_mask(mask, device))
        raise Seen

    monkeypatch.setattr("hybrid.generation.generate.hugging_face_generate", record_inputs)
    monkeypatch.setattr(generator, "as_ids", record_ids)
    monkeypatch.setattr(generator, "as_mask", record_mask)
    monkeypatch.setattr(engine._generator, "device", torch.device("meta"))
    calls = [
        lambda: engine.generate(ids, attention_mask=mask),
        lambda: engine.generate(input_ids=ids, attention_mask=mask, position_ids=ids),
        lambda: engine.rollout(ids, mask, hybrid.SamplingParams(max_new_tokens=2)),
    ]
    for call in calls:
        with pytest.raises(Seen):
            call()
    assert len(seen) == 2 + 3 + 2
    assert {tensor.device.type for tensor in seen} == {"meta"}


def run_moved() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        check_moved(monkeypatch)


def test_inputs_are_moved_to_the_models_device(ranks):
    ranks.run(run_moved)


def test_forward_inputs_are_cast_and_moved_by_name():
    ids, mask = prompts(2, 5, padded=True)
    pixels, bias = torch.zeros(2, 3, dtype=torch.uint8), torch.zeros(2, 1, 5, 5)
    inputs = {"attention_mask": mask.bool(), "position_ids": ids.int(), "labels": ids.short()}
    inputs |= {"pixel_values": pixels, "use_cache": False, "past_key_values": None}
    args, kwargs = as_model_inputs((ids.int(), bias), inputs)
    assert torch.equal(args[0], ids)
    assert args[1] is bias
    assert [kwargs[name].dtype for name in ("attention_mask", "position_ids", "labels")] == [torch.int64] * 3
    assert kwargs["pixel_values"] is pixels
    assert as_model_inputs((), {"attention_mask": bias})[1]["attention_mask"] is bias  # an additive mask stays as it is
    args, kwargs = as_model_inputs((ids,), inputs, torch.device("meta"))
    moved = [*args, *(value for value in kwargs.values() if isinstance(value, torch.Tensor))]
    assert {tensor.device.type for tensor in moved} == {"meta"}
    assert torch.equal(as_mask(torch.tensor([[0.0, 0.5, 1.0]])), torch.tensor([[0, 1, 1]]))
    assert as_ids(ids) is ids


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(3, dtype=torch.int32), "reads torch.int64, not torch.int32"),
        (torch.zeros(3, dtype=torch.int64, device="meta"), "runs on cpu, and a tensor is on meta"),
        (torch.zeros(6, dtype=torch.int64)[::2], "contiguous"),
    ],
)
def test_address_asserts_dtype_device_and_contiguity(tensor, message):
    with pytest.raises(AssertionError, match=message):
        address(tensor, torch.int64)


@pytest.mark.parametrize(
    ("row_ids", "error", "message"),
    [
        ([1, 2], TypeError, "row_ids: list given"),
        (torch.arange(3), ValueError, r"row_ids: shape \(3,\) given; it must be \[2\]"),
        (torch.arange(2.0), ValueError, "row_ids: dtype torch.float32 given"),
    ],
)
def test_row_ids_of_wrong_type_or_shape_raise(row_ids, error, message):
    from hybrid.rollout import check_integers

    with pytest.raises(error, match=message):
        check_integers("row_ids", row_ids, 2)
