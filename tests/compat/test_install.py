"""`hybrid.install()`: `deepspeed.initialize` builds our engine if the config enables it; otherwise DeepSpeed's."""

import base64
import contextlib
import copy
import functools
import inspect
import io
import json
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import accelerate
import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, GradientState
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.hybrid_engine import DeepSpeedHybridEngine
from torch.utils.data import Dataset
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import hybrid
from hybrid.compat import install as drop_in
from tests.engines import settings, storage_digest
from tests.marks import slow_but
from tests.tiny_models import ADAPTERS, prompts, tiny_model, tiny_non_decoder, twin

ROOT = Path(__file__).resolve().parents[2]
DEEPSPEEDS = inspect.signature(deepspeed.initialize)
ENABLED = {"train_micro_batch_size_per_gpu": 2, "hybrid_engine": {"enabled": True}}


@pytest.fixture
def calls(monkeypatch):
    """Records (builder, args, kwargs) of each `deepspeed.initialize`; the builder is "deepspeed" or "hybrid"."""
    made = []

    def own(*args, **kwargs):
        made.append(("deepspeed", args, kwargs))

    monkeypatch.setattr(deepspeed, "initialize", own)
    monkeypatch.setattr(drop_in, "TRAINING", drop_in.Patch("initialize", drop_in.build_engine))
    monkeypatch.setattr(drop_in, "initialize", lambda **kwargs: made.append(("hybrid", (), kwargs)))
    return made


def take_builders(calls: list) -> list[str]:
    """The builders of the calls so far; clears the record."""
    names = [name for name, *_ in calls]
    calls.clear()
    return names


@pytest.mark.parametrize(
    ("arguments", "builder"),
    [
        ({"config": ENABLED}, "hybrid"),
        ({"config_params": ENABLED}, "hybrid"),
        ({"args": SimpleNamespace(deepspeed_config=ENABLED)}, "hybrid"),
        ({"config": {"hybrid_engine": {"enabled": "true"}}}, "hybrid"),
        ({"config": {"hybrid_engine": {"enabled": False}}}, "deepspeed"),
        ({"config": {"hybrid_engine": {"enabled": "false"}}}, "deepspeed"),
        ({"config": {"hybrid_engine": {}}}, "deepspeed"),
        ({"config": {"hybrid_engine": {"max_out_tokens": 64}}}, "deepspeed"),
        ({"config": {"rollout": {"max_num_seqs": 4}}}, "deepspeed"),
        ({"config": {}}, "deepspeed"),
        ({}, "deepspeed"),
        ({"args": SimpleNamespace(deepspeed_config=None), "config": ENABLED}, "hybrid"),
    ],
)
def test_the_configuration_decides_which_engine_is_built(calls, arguments, builder):
    model = torch.nn.Linear(1, 1)
    with hybrid.installed():
        deepspeed.initialize(**arguments, model=model)
    name, args, kwargs = calls[0]
    assert name == builder and args == () and kwargs == {**arguments, "model": model}


def test_config_files_positional_arguments_and_base64_are_read(calls, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(ENABLED))
    model = torch.nn.Linear(1, 1)
    with hybrid.installed():
        deepspeed.initialize(None, model, config=str(tmp_path / "config.json"))
        deepspeed.initialize(model=model, config=base64.urlsafe_b64encode(json.dumps(ENABLED).encode()).decode())
        deepspeed.initialize(None, model, None, None, None, None, 29500, None, None, None, ENABLED)
    assert take_builders(calls) == ["hybrid"] * 3
    assert inspect.signature(hybrid.initialize).parameters.keys() == DEEPSPEEDS.parameters.keys()


def test_invalid_configurations_raise(calls):
    with hybrid.installed(), pytest.raises(ValueError, match="unknown key 'max_out_token'; the nearest known key is"):
        deepspeed.initialize(
            model=torch.nn.Linear(1, 1), config={"hybrid_engine": {"enabled": True, "max_out_token": 3}}
        )


def built(calls: list) -> str:
    """The builder of an engine whose config enables ours."""
    deepspeed.initialize(model=torch.nn.Linear(1, 1), config=ENABLED)
    return take_builders(calls)[0]


def test_install_is_idempotent_and_reversible(calls):
    before = deepspeed.initialize
    hybrid.uninstall()  # without install()
    assert deepspeed.initialize is before
    for _ in range(3):
        hybrid.install()
        hybrid.install()
        assert built(calls) == "hybrid" and deepspeed.initialize is not before
        assert deepspeed.initialize.__wrapped__ is before
        hybrid.uninstall()
        assert deepspeed.initialize is before and built(calls) == "deepspeed"


def test_installed_blocks_nest_and_are_exception_safe(calls):
    before = deepspeed.initialize
    with pytest.raises(KeyError), hybrid.installed():
        with hybrid.installed():
            assert built(calls) == "hybrid"
        assert built(calls) == "hybrid", "the inner block undid the outer one"
        hybrid.uninstall()
        assert built(calls) == "hybrid", "uninstall() within a block undid the block"
        raise KeyError
    assert deepspeed.initialize is before
    hybrid.install()
    with hybrid.installed():
        pass
    assert built(calls) == "hybrid", "a block undid install()"
    hybrid.uninstall()
    assert deepspeed.initialize is before


def test_other_libraries_patches_stay(calls):
    """A patch below or above ours is still called, while ours is installed and removed."""
    patch_calls = []

    def patch_on(own):
        @functools.wraps(own)
        def other_patch(*args, **kwargs):
            patch_calls.append("theirs")
            return own(*args, **kwargs)

        return other_patch

    inner_patch = deepspeed.initialize = patch_on(deepspeed.initialize)
    hybrid.install()
    deepspeed.initialize(model=torch.nn.Linear(1, 1), config={})
    assert take_builders(calls) == ["deepspeed"] and patch_calls == ["theirs"]
    outer_patch = deepspeed.initialize = patch_on(deepspeed.initialize)
    hybrid.install()
    with hybrid.installed():
        assert built(calls) == "hybrid" and deepspeed.initialize is outer_patch
    assert len(patch_calls) == 2
    with pytest.warns(UserWarning, match="initialize is <function .*, which another library installed after"):
        hybrid.uninstall()
    assert deepspeed.initialize is outer_patch and built(calls) == "deepspeed"
    hybrid.install()
    assert deepspeed.initialize is outer_patch and built(calls) == "hybrid"
    deepspeed.initialize = outer_patch.__wrapped__  # the other library removes its patch
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hybrid.uninstall()
    assert deepspeed.initialize is inner_patch


def test_a_patch_that_restores_deepspeeds_own_function_is_replaced_again(calls):
    before = deepspeed.initialize
    hybrid.install()
    deepspeed.initialize = before
    assert built(calls) == "deepspeed"
    hybrid.install()
    assert built(calls) == "hybrid"
    hybrid.uninstall()
    assert deepspeed.initialize is before


def test_install_and_uninstall_in_threads(calls):
    before, wrong = deepspeed.initialize, []

    def come_and_go():
        for _ in range(200):
            with hybrid.installed():
                if deepspeed.initialize is before:
                    wrong.append("not installed inside a block")

    threads = [threading.Thread(target=come_and_go) for _ in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong and deepspeed.initialize is before


def test_init_inference_builds_our_engine_unless_inference_is_false(monkeypatch):
    def own(model, config=None, **kwargs):
        return "deepspeed", config, kwargs

    monkeypatch.setattr(deepspeed, "init_inference", own)
    patch = drop_in.Patch("init_inference", drop_in.build_inference_engine)
    monkeypatch.setattr(drop_in, "INFERENCE", patch)
    model = tiny_model("llama")
    reference = twin(model)
    ids, mask = prompts(2, 5, padded=True)
    with hybrid.installed(), pytest.warns(FutureWarning, match="mp_size is an old name"):
        engine = deepspeed.init_inference(model, mp_size=1, dtype=torch.float32, replace_with_kernel_inject=True)
    assert isinstance(engine, hybrid.InferenceEngine) and deepspeed.init_inference is own
    request = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))
    with hybrid.installed(inference=False):
        assert deepspeed.init_inference(model, {"a": 1}, b=2) == ("deepspeed", {"a": 1}, {"b": 2})
    hybrid.install()
    assert deepspeed.init_inference is not own
    hybrid.install(inference=False)
    assert deepspeed.init_inference is own and deepspeed.initialize.__wrapped__ is not None
    hybrid.uninstall()


def test_importing_hybrid_patches_nothing():
    code = (
        "import deepspeed; before = deepspeed.initialize; import hybrid, hybrid.compat.install; "
        "assert deepspeed.initialize is before and before.__module__ == 'deepspeed'"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------------------- engines


def quietly(function, *args, **kwargs):
    """The result of `function`, with its output suppressed."""
    with contextlib.redirect_stdout(io.StringIO()):
        return function(*args, **kwargs)


def without_rollout_block(config: dict) -> dict:
    """The configuration for DeepSpeed alone."""
    return {key: value for key, value in config.items() if key != "rollout"}


def check_deepspeed_initialize(adapter: str) -> None:
    model = ADAPTERS[adapter](tiny_model("llama"))
    reference = twin(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with hybrid.installed():
        engine, optimizer, _, _ = quietly(
            deepspeed.initialize, model=model, model_parameters=trained, config=settings(3)
        )
        disabled = quietly(deepspeed.initialize, model=tiny_model("llama"), config=settings(3, hybrid_engine={}))
        disabled = disabled[0]
    assert isinstance(engine, hybrid.HybridEngine) and optimizer is engine.optimizer
    assert type(disabled) is DeepSpeedEngine
    # A family without a DeepSpeed container, which would need CUDA.
    deepspeeds = quietly(deepspeed.initialize, model=tiny_model("qwen2"), config=without_rollout_block(settings(0)))[0]
    assert type(deepspeeds) is DeepSpeedHybridEngine, "our patch is still installed"
    require_generate_through(engine, engine.module, reference)


def require_generate_through(engine: hybrid.HybridEngine, module: torch.nn.Module, reference: torch.nn.Module) -> None:
    """`module.generate` is the engine's, and equals Hugging Face's tokens; ranks differ in rows and lengths."""
    rank = dist.get_rank()
    ids, mask = prompts(2 + rank, 6 + rank, padded=True, seed=rank)
    request = {"attention_mask": mask, "max_new_tokens": 5 + 4 * rank, "do_sample": False}
    tokens, training = engine.stats()["tokens"], module.training
    assert torch.equal(module.generate(ids, **request), reference.generate(ids, **request))
    assert engine.stats()["tokens"] - tokens > 0, "the engine did not generate"
    assert module.training == training
    assert torch.equal(module.generate(inputs=ids, **request), engine.generate(ids, **request))


@pytest.mark.parametrize("adapter", slow_but(["peft"], ADAPTERS))
def test_deepspeed_initialize_builds_a_hybrid_engine(ranks, adapter):
    ranks.run(check_deepspeed_initialize, adapter)


def check_modules_generate() -> None:
    """`module.generate`: its signature, on a copy, under another patch, and the module's own after destroy()."""
    model = tiny_model("llama")
    own = model.generate
    engine = quietly(hybrid.initialize, model=model, config=settings(0))[0]
    assert inspect.signature(model.generate) == inspect.signature(own)
    ids, mask = prompts(2, 5, padded=True)
    request = {"attention_mask": mask, "max_new_tokens": 5}
    expected = own(ids, **request)
    clone = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in clone.parameters():
            parameter.mul_(-1.0)
    before = engine.stats()["tokens"]
    assert not torch.equal(clone.generate(ids, **request), expected), "a copy generates with the original's weights"
    assert engine.stats()["tokens"] == before
    assert torch.equal(model.generate(ids, **request), expected)
    engine.destroy()
    assert "generate" not in model.__dict__
    model.generate = marked = lambda *args, **kwargs: own(*args, **kwargs)
    engine = quietly(hybrid.initialize, model=model, config=settings(0))[0]
    assert torch.equal(model.generate(ids, **request), expected)
    engine.destroy()
    assert model.generate is marked


def test_module_generate_is_the_engines_and_is_restored(ranks):
    ranks.run(check_modules_generate)


@contextlib.contextmanager
def fresh_accelerate_state():
    """Resets the process-wide state of accelerate and transformers before and after the block."""
    environment = dict(os.environ)

    def forget():
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        unset_hf_deepspeed_config()

    forget()
    try:
        yield
    finally:
        forget()
        os.environ.clear()
        os.environ.update(environment)


def accelerated_run(adapter: str, generates: bool) -> tuple:
    """Three steps as in a script for accelerate; a digest of the weights, and the losses."""
    config = settings(3)
    del config["optimizer"]  # accelerate allows it in one place only
    model = ADAPTERS[adapter](tiny_model("llama"))
    reference = twin(model)
    accelerator = accelerate.Accelerator(deepspeed_plugin=accelerate.DeepSpeedPlugin(hf_ds_config=config))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with hybrid.installed():
        engine, optimizer = quietly(accelerator.prepare, model, torch.optim.AdamW(trained, lr=1e-2))
    assert isinstance(engine, hybrid.HybridEngine)
    if generates:
        require_generate_through(engine, accelerator.unwrap_model(engine), reference)
    losses = []
    for step in range(3):
        ids = prompts(2, 9, padded=False, seed=10 * step + dist.get_rank())[0]
        if generates:
            request = {"max_new_tokens": 3 + dist.get_rank(), "do_sample": False}
            tokens = accelerator.unwrap_model(engine).generate(ids, **request)
            assert torch.equal(engine.generate(ids, **request), tokens)
        loss = engine(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert engine.weight_version == 3
    return storage_digest(engine), losses


def check_accelerate(adapter: str) -> None:
    runs = []
    for generates in (False, True):
        with fresh_accelerate_state():
            runs.append(accelerated_run(adapter, generates))
    assert runs[0] == runs[1], "generation changed the training"


@pytest.mark.parametrize("adapter", slow_but(["peft"], ["none", "peft"]))
def test_accelerate_builds_a_hybrid_engine(ranks, adapter):
    ranks.run(check_accelerate, adapter)


class Texts(Dataset):
    """Random token rows with labels."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict:
        ids = prompts(1, 9, padded=False, seed=index)[0][0]
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


class Generates(transformers.TrainerCallback):
    """Generates after every step."""

    def __init__(self):
        self.steps = 0

    def on_step_end(self, args, state, control, model=None, **kwargs):
        ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
        tokens = model.generate(ids, attention_mask=mask, max_new_tokens=4 + dist.get_rank(), do_sample=False)
        assert tokens.shape[0] == 2
        self.steps += 1


def trained_run(folder: str, generates: bool) -> str:
    """Three steps of the transformers Trainer; a digest of the weights."""
    model = tiny_model("llama")
    reference = twin(model)
    arguments = transformers.TrainingArguments(
        folder,
        deepspeed=settings(3, train_micro_batch_size_per_gpu="auto"),
        use_cpu=True,
        max_steps=3,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
    )
    callback = Generates()
    trainer = transformers.Trainer(model, arguments, train_dataset=Texts(), callbacks=[callback] * generates)
    with hybrid.installed():
        quietly(trainer.train)
    engine = trainer.model_wrapped
    assert isinstance(engine, hybrid.HybridEngine) and engine.weight_version == 3
    digest = storage_digest(engine)
    if generates:
        assert callback.steps == 3
        own = list(engine.module.parameters())
        with torch.no_grad(), deepspeed.zero.GatheredParameters(own):
            for copied, parameter in zip(reference.parameters(), own, strict=True):
                copied.copy_(parameter)
        require_generate_through(engine, trainer.model, reference)
    return digest


def check_trainer(folder: str) -> None:
    digests = []
    for generates in (False, True):
        with fresh_accelerate_state():
            digests.append(trained_run(folder, generates))
    assert digests[0] == digests[1], "generation changed the training"


def test_the_transformers_trainer_builds_a_hybrid_engine(ranks, tmp_path):
    ranks.run(check_trainer, str(tmp_path))


def check_seq2seq_trainer(folder: str) -> None:
    """`predict_with_generate` with beam search gives Hugging Face's tokens for the trained weights."""
    model = tiny_non_decoder("t5")
    reference = twin(model)
    arguments = transformers.Seq2SeqTrainingArguments(
        folder,
        deepspeed=settings(3, train_micro_batch_size_per_gpu="auto"),
        use_cpu=True,
        max_steps=1,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        learning_rate=1e-2,
        predict_with_generate=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = transformers.Seq2SeqTrainer(model, arguments, train_dataset=Texts())
    with hybrid.installed():
        quietly(trainer.train)
    assert isinstance(trainer.model_wrapped, hybrid.HybridEngine)
    parameters = list(trainer.model_wrapped.module.parameters())
    with torch.no_grad(), deepspeed.zero.GatheredParameters(parameters):
        for copied, parameter in zip(reference.parameters(), parameters, strict=True):
            copied.copy_(parameter)
    rows = [Texts()[i] for i in range(4)]
    beams = {"num_beams": 3, "max_new_tokens": 5, "do_sample": False}
    predictions = torch.as_tensor(trainer.predict(rows, **beams).predictions)
    ids, mask = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "attention_mask"))
    expected = reference.generate(ids, attention_mask=mask, **beams)
    assert len(expected.unique()) > 2, "all beams are one token: the test is vacuous"
    assert torch.equal(predictions[:, : expected.shape[1]], expected)
    assert not (predictions[:, expected.shape[1] :] > 0).any(), "tokens after the completion are not padding"


def check_seq2seq_alone(folder: str) -> None:
    with fresh_accelerate_state():
        check_seq2seq_trainer(folder)


def test_the_seq2seq_trainer_predicts_with_beam_search(ranks, tmp_path):
    ranks.run(check_seq2seq_alone, str(tmp_path))
