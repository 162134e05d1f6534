"""Invalid requests and settings raise with a clear message before any weight is gathered; the engine stays usable."""

import json
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn

import hybrid
from hybrid.environments.stepping import as_observation
from tests.engines import engine_of, settings, storage_digest, train_step
from tests.tiny_models import prompts, tiny_model, with_chat_lora, with_peft

IDS, MASK = prompts(2, 5, padded=True)
SAMPLING = hybrid.SamplingParams(max_new_tokens=3)

# Name → the call, its error, and the message.
INVALID = {
    "beams in a rollout": (
        lambda e: e.rollout(IDS, MASK, SAMPLING, num_beams=2),
        TypeError,
        "unexpected keyword argument 'num_beams'",
    ),
    "too many tokens in beams": (
        lambda e: e.generate(IDS, max_new_tokens=60, num_beams=2),
        ValueError,
        r"65 is over hybrid_engine.max_out_tokens=64; ask for at most 59",
    ),
    "too long, positional": (
        lambda e: e.generate(IDS, max_new_tokens=60),
        ValueError,
        r"5 tokens \+ 60 new tokens = 65 is over hybrid_engine.max_out_tokens=64; ask for at most 59",
    ),
    "too long, by keyword": (lambda e: e.generate(input_ids=IDS, max_length=65), ValueError, "max_out_tokens=64"),
    "too long, in a rollout": (
        lambda e: e.rollout(IDS, MASK, hybrid.SamplingParams(max_new_tokens=60)),
        ValueError,
        "max_out_tokens=64",
    ),
    "empty prompts": (lambda e: e.generate(IDS[:, :0], max_new_tokens=3), ValueError, "the prompts are empty"),
    "a masked row": (
        lambda e: e.generate(IDS, attention_mask=torch.zeros_like(IDS), max_new_tokens=3),
        ValueError,
        r"rows \[0, 1\] are empty prompts",
    ),
    "no rows": (lambda e: e.generate(IDS[:0], max_new_tokens=3), ValueError, "batch of size 0"),
    "floats": (lambda e: e.generate(IDS.float(), max_new_tokens=3), ValueError, "dtype torch.float32 given"),
    "a list": (lambda e: e.generate([[3, 4]], max_new_tokens=3), TypeError, "list given; it must be an integer tensor"),
    "one dimension": (lambda e: e.generate(IDS[0], max_new_tokens=3), ValueError, r"shape \(5,\) given"),
    "another mask": (
        lambda e: e.generate(IDS, attention_mask=MASK[:, 1:], max_new_tokens=3),
        ValueError,
        r"\(2, 4\) given; it must have the shape of input_ids, \(2, 5\)",
    ),
    "right padding": (lambda e: e.rollout(IDS, MASK.flip(1), SAMPLING), ValueError, r"rows \[1\] are not left padded"),
    "no generations": (lambda e: e.rollout(IDS, MASK, SAMPLING, num_generations=0), ValueError, "at least 1"),
    "limits out of range": (
        lambda e: e.rollout(IDS, MASK, SAMPLING, max_new_tokens=torch.tensor([0, SAMPLING.max_new_tokens])),
        ValueError,
        r"max_new_tokens: \[0\] given for prompts \[0\]; it must be between 1 and",
    ),
    "other limits": (
        lambda e: e.rollout(IDS, MASK, SAMPLING, max_new_tokens=torch.ones(3, dtype=torch.int64)),
        ValueError,
        r"max_new_tokens: shape \(3,\) given; it must be \[2\], an integer such as torch.int64 for each prompt",
    ),
    "limits in a list": (lambda e: e.rollout(IDS, MASK, SAMPLING, max_new_tokens=[4, 4]), TypeError, "list given"),
    "other row ids": (
        lambda e: e.rollout(IDS, MASK, SAMPLING, row_ids=torch.arange(3)),
        ValueError,
        r"row_ids: shape \(3,\) given",
    ),
    "stop strings": (
        lambda e: e.generate(IDS, max_new_tokens=3, stop_strings=["x"]),
        ValueError,
        "needs the model's tokenizer",
    ),
    "adapters by row": (
        lambda e: e.generate(IDS, max_new_tokens=3, adapter_names=["a", "b"]),
        NotImplementedError,
        "adapter_names is not available; give adapter=",
    ),
    "no mask": (lambda e: e.rollout(IDS, None, SAMPLING), ValueError, "prompt_mask: None given"),
    "no mask to score": (lambda e: e.score(IDS, None), ValueError, "attention_mask: None given"),
    "no sampling": (lambda e: e.rollout(IDS, MASK, None), TypeError, "sampling: NoneType given"),
    "a row id twice": (
        lambda e: e.rollout(IDS, MASK, SAMPLING, row_ids=torch.tensor([7, 7])),
        ValueError,
        r"row_ids: \[7\] given more than once",
    ),
    "half a generation": (
        lambda e: e.rollout(IDS, MASK, SAMPLING, num_generations=1.5),
        ValueError,
        "num_generations: 1.5 given; it must be at least 1",
    ),
    "no rows at once": (lambda e: e.score(IDS, MASK, rows_per_forward=0), ValueError, "rows_per_forward: 0 given"),
    "rows less than none": (
        lambda e: e.score(IDS, MASK, rows_per_forward=-2),
        ValueError,
        "rows_per_forward: -2 given",
    ),
    "a temperature of nan": (lambda e: e.score(IDS, MASK, temperature=NAN), ValueError, "temperature: nan given"),
    "a tiny temperature": (lambda e: e.score(IDS, MASK, temperature=1e-40), ValueError, "temperature: 1e-40 given"),
    "a tiny temperature, sampled": (
        lambda e: e.generate(IDS, max_new_tokens=3, do_sample=True, temperature=1e-40),
        ValueError,
        "temperature: 1e-40 given",
    ),
    "a seed of 1.5": (lambda e: e.generate(IDS, max_new_tokens=3, seed=1.5), ValueError, "seed: 1.5 given"),
    "a temperature of 0": (lambda e: e.score(IDS, MASK, temperature=0), ValueError, "temperature: 0 given"),
}


def check_invalid_requests() -> None:
    engine = engine_of(tiny_model("llama"), settings(3, hybrid_engine={"max_out_tokens": 64}))
    digest = storage_digest(engine)
    for name, (call, error, message) in INVALID.items():
        for mode in (engine.train, engine.eval):
            mode()
            with pytest.raises(error, match=message):
                call(engine)
            assert engine.module.training == (mode == engine.train), name
            assert engine.stats()["gathered_bytes"] == 0, f"{name}: weights were gathered before the error"
    assert storage_digest(engine) == digest
    engine.train()
    train_step(engine)
    assert engine.generate(IDS, max_new_tokens=59).shape[1] <= 64


def test_invalid_requests_raise_before_weights_are_gathered(ranks):
    ranks.run(check_invalid_requests)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: 0 given; it must be at least 1"),
        ({"temperature": -1}, "temperature: -1 given"),
        ({"top_p": 0.0}, r"top_p: 0.0 given; it must be in \(0, 1\]"),
        ({"top_k": -1}, "top_k: -1 given"),
        ({"min_p": 1.0}, "min_p: 1.0 given"),
        ({"min_new_tokens": 9}, "min_new_tokens: 9 given; it must be between 0 and max_new_tokens"),
        ({"repetition_penalty": 0}, "repetition_penalty: 0 given"),
    ],
)
def test_invalid_sampling_params_raise(changes, message):
    with pytest.raises(ValueError, match=message):
        hybrid.SamplingParams(**{"max_new_tokens": 4, **changes})


NAN, INF = float("nan"), float("inf")
NO_COUNT = (0, -1, 2.5, 2**63, NAN, "3", None, True, torch.tensor([3]))
NO_DIVISOR = (-1.0, 1e-40, NAN, INF, 1e39, 10**400, "1", None, True)
BAD_PARAMS = {
    "max_new_tokens": NO_COUNT,
    "temperature": NO_DIVISOR,
    "repetition_penalty": (0, *NO_DIVISOR),
    "top_p": (0.0, 1.5, NAN, None, "1", True),
    "min_p": (-0.1, 1.0, NAN, None),
    "top_k": (-1, 2.5, 2**63, None, True),
    "min_new_tokens": (-1, 2.5, 5, None),
    "seed": (1.5, NAN, "1", True),
    "stop_token_ids": (3, (2.5,), (-1,), "ab", None),
}
BAD_LIMITS = {"max_turns": NO_COUNT, "max_concurrent_steps": NO_COUNT, "step_timeout_s": (0, NAN, INF, "1", True)}


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        (lambda **given: hybrid.SamplingParams(**{"max_new_tokens": 4, **given}), BAD_PARAMS),
        (hybrid.EnvironmentLimits, BAD_LIMITS),
        (hybrid.StopAfter, {"rows": NO_COUNT[:-3], "groups": NO_COUNT[:3]}),
    ],
)
def test_a_value_of_another_type_or_out_of_range_raises_with_key_and_value(kind, bad):
    for name, values in bad.items():
        for value in values:
            with pytest.raises(ValueError, match="given; it must be") as raised:
                kind(**{name: value})
            assert name in str(raised.value) and (repr(value) in str(raised.value) or isinstance(value, tuple)), value


def test_numbers_of_numpy_and_scalar_tensors_are_numbers():
    params = hybrid.SamplingParams(np.int64(4), temperature=torch.tensor(0.5), top_k=torch.tensor(3), seed=np.int32(7))
    assert params == hybrid.SamplingParams(4, temperature=0.5, top_k=3, seed=7)
    assert [type(value) for value in (params.max_new_tokens, params.temperature, params.top_k)] == [int, float, int]


def test_ids_and_rewards_of_environments_are_checked():
    for observation, error in (
        (hybrid.Observation([2.5]), "float"),
        (hybrid.Observation(torch.tensor([2.0])), "float"),
        (hybrid.Observation([3], reward=NAN), "reward: nan given; it must be finite"),
        (hybrid.Observation([3], reward=-INF), "reward: -inf given"),
    ):
        with pytest.raises((TypeError, ValueError), match=error):
            as_observation(observation)
    assert as_observation(hybrid.Observation(torch.tensor([3], dtype=torch.int32), True)).ids == [3]


class Regressor(nn.Module):
    """A model that is no language model, of no supported family."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.randn(3))
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x):
        return self.body(x) * self.scale


def check_other_models() -> None:
    """A model without `generate`, of no supported family: eval, train and forward work."""
    model, reference = Regressor(), Regressor().eval()
    engine = engine_of(model, settings(3))
    with pytest.raises(ValueError, match=r"Regressor has no generate\(\).*language-modelling head"):
        engine.generate(IDS, max_new_tokens=2)
    with pytest.raises(ValueError, match="has no generate"):
        engine.rollout(IDS, MASK, SAMPLING)
    x = torch.randn(5, 4)
    engine.eval()
    torch.testing.assert_close(engine(x), reference(x), atol=0, rtol=0)
    assert {row["container"] for row in engine.coverage()} == {"native"}
    engine.train()
    engine.backward(engine(x).square().mean())
    engine.step()
    engine.eval()
    assert not torch.equal(engine(x), reference(x))


def test_a_model_without_generate_evaluates_and_trains(ranks):
    ranks.run(check_other_models)


def check_training_calls_in_a_window() -> None:
    engine = engine_of(tiny_model("llama"), settings(3))
    engine.eval()
    loss = engine(input_ids=IDS, attention_mask=MASK, labels=IDS).loss
    with pytest.raises(RuntimeError, match=r"backward\(\) in eval mode.*engine.train\(\) first"):
        engine.backward(loss)
    with engine.inference():
        for call, name in ((engine.train, "train"), (engine.step, "step")):
            with pytest.raises(RuntimeError, match=rf"{name}\(\) inside `with engine.inference\(\)`"):
                call()
        with pytest.raises(RuntimeError, match="load_checkpoint"):
            engine.load_checkpoint("nowhere")
        engine.generate(IDS, max_new_tokens=2)
    engine.train()
    train_step(engine)


def test_training_calls_inside_a_window_raise(ranks):
    ranks.run(check_training_calls_in_a_window)


def check_initialize(folder: str) -> None:
    model = tiny_model("llama")
    cases = [
        ({"config": settings(3, hybrid_engine={"max_out_tokenz": 3})}, ValueError, "'max_out_tokens'"),
        ({"config": settings(3, hybrid_engine={"inference_tp_size": 3})}, ValueError, "divide the world size, 2"),
        (
            {"config": settings(3, hybrid_engine={"inference_tp_size": 2, "pin_parameters": False})},
            ValueError,
            "pin_parameters=false",
        ),
        (
            {"config": settings(3, hybrid_engine={"enable_cuda_graph": True}, rollout={"containers": "native"})},
            ValueError,
            "enable_cuda_graph",
        ),
        ({}, ValueError, "no config given"),
        ({"config": "nowhere.json"}, ValueError, "no file at"),
    ]
    for arguments, error, message in cases:
        with pytest.raises(error, match=message):
            hybrid.initialize(model=model, **arguments)
    with pytest.raises(ValueError, match="no model given"):
        hybrid.initialize(config=settings(3))
    unmergeable = peft.get_peft_model(tiny_model("llama"), peft.LoHaConfig(target_modules=["q_proj"], r=2))
    with pytest.raises(ValueError, match=r"only fused decoders .*layers\.0\.self_attn\.q_proj.*cannot be merged"):
        hybrid.initialize(
            model=unmergeable, config=settings(3, rollout={"weight_dtype": "int8", "containers": "fused"})
        )
    for unchanged in (model, unmergeable):
        assert not any(hasattr(parameter, "ds_id") for parameter in unchanged.parameters()), (
            "the model was partitioned before the error"
        )

    # A path, a dict and args.deepspeed_config all work, and none is changed.
    config = settings(0)
    before = json.dumps(config)
    path = f"{folder}/config-{dist.get_rank()}.json"
    Path(path).write_text(before)
    arguments = type("Arguments", (), {"deepspeed_config": path, "local_rank": dist.get_rank()})()
    for keywords in ({"config": config}, {"config": path}, {"config_params": config}, {"args": arguments}):
        engine, optimizer, dataloader, scheduler = hybrid.initialize(model=tiny_model("llama"), **keywords)
        assert isinstance(engine, hybrid.HybridEngine)
        assert optimizer is engine.optimizer
        assert dataloader is None and scheduler is None
    assert json.dumps(config) == before == Path(path).read_text()

    from deepspeed.runtime.engine import DeepSpeedEngine

    disabled = hybrid.initialize(model=tiny_model("llama"), config=settings(0, hybrid_engine={"enabled": False}))[0]
    assert type(disabled) is DeepSpeedEngine


def test_initialize_checks_its_arguments_before_partitioning(ranks, tmp_path):
    ranks.run(check_initialize, str(tmp_path))


def check_adapters_off_in_streaming() -> None:
    """The model's own layers cannot run without DeepSpeed-Chat's LoRA; the fused decoder can, after its self-check."""
    base = tiny_model("llama").eval()
    request = {"attention_mask": MASK, "max_new_tokens": 6}
    for containers in ("native", "fused"):
        config = settings(3, hybrid_engine={"pin_parameters": False}, rollout={"containers": containers})
        chat = engine_of(with_chat_lora(tiny_model("llama")), config)
        if containers == "native":
            with pytest.raises(NotImplementedError, match="DeepSpeed-Chat's LoRA cannot be switched off"):
                chat.generate(IDS, max_new_tokens=2, adapters=False)
        else:
            chat.generate(IDS, **request)
            assert torch.equal(chat.generate(IDS, adapters=False, **request), base.generate(IDS, **request))
        engine = engine_of(with_peft(tiny_model("llama")), config)
        assert torch.equal(engine.generate(IDS, adapters=False, **request), base.generate(IDS, **request))


def test_adapters_off_in_streaming_needs_the_fused_decoder(ranks):
    ranks.run(check_adapters_off_in_streaming)
