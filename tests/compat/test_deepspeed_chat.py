"""`hybrid.compat.deepspeed_chat`: what DeepSpeed-Chat's scripts import and call works with the installed versions."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, LlamaTokenizer, PreTrainedTokenizerFast
from transformers.integrations.deepspeed import HfDeepSpeedConfig

import hybrid
from hybrid.compat import deepspeed_chat
from tests.marks import slow_but
from tests.rank_pool import free_port
from tests.test_launchers import run_together
from tests.tiny_models import FAMILIES, VOCABULARY

SHAPE = Path(__file__).parent / "deepspeed_chat_shape"
WORDS = "red blue cat dog sun tree run sleep good bad"

ZERO3 = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


class RewardModel(nn.Module):
    """A base model and a head that is made outside `zero.Init`."""

    def __init__(self, base: nn.Module):
        super().__init__()
        self.v_head, self.rwtransformer = nn.Linear(base.config.hidden_size, 1, bias=False), base

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.rwtransformer(ids, past_key_values=None, inputs_embeds=None, use_cache=False, head_mask=None)[0]
        return self.v_head(hidden).squeeze(-1)


def check_step_two() -> None:
    import deepspeed
    from deepspeed.ops.adam import FusedAdam

    before = deepspeed.initialize
    with deepspeed_chat.installed():
        from transformers.modeling_utils import no_init_weights

        keep = HfDeepSpeedConfig(ZERO3)
        with no_init_weights():
            base = transformers.AutoModel.from_config(
                LlamaConfig(vocab_size=VOCABULARY, dtype=torch.bfloat16, **FAMILIES["llama"])
            )
        assert isinstance(base, LlamaModel)
        del keep
        model = RewardModel(base)
        engine, *_ = deepspeed.initialize(model=model, optimizer=FusedAdam(model.parameters()), config=ZERO3)
        assert {param.dtype for param in engine.module.parameters()} == {torch.bfloat16}
        values = engine(torch.tensor([[1, 2, 3]]))
        engine.backward(values.float().square().mean())
        engine.step()
    assert deepspeed.initialize is before and not hasattr(transformers.modeling_utils, "no_init_weights")


@pytest.mark.slow
def test_a_reward_model_trains_under_zero3(ranks):
    ranks.run(check_step_two)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["{script}", "--a"], ["--a", "--local_rank=0"]),
        (["--local_rank=1", "{script}", "--a"], ["--a", "--local_rank=1"]),
        (["{script}", "--local_rank", "1"], ["--local_rank", "1"]),
    ],
)
def test_the_local_rank_comes_after_the_script(monkeypatch, tmp_path, given, expected):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    script = tmp_path / "main.py"
    script.touch()
    arguments = [argument.format(script=script) for argument in given]
    assert deepspeed_chat.script_arguments(arguments) == [str(script), *expected]


def test_an_absent_script_is_one_line():
    command = [sys.executable, "-m", "hybrid.compat.deepspeed_chat", "no.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode and "error: 'no.py' given; give DeepSpeed-Chat's main.py" in done.stderr


def llama_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer without a vocabulary file, with a padding token."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=["</s>", "<pad>"], initial_alphabet=alphabet)
    model.train_from_iterator([WORDS], trainer)
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>")
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", **special)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A directory with a tiny Llama and its tokenizer. DeepSpeed-Chat looks for the family in the path."""
    folder, tokenizer = tmp_path_factory.mktemp("chat") / "llama-tiny", llama_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0, pad_token_id=1, **FAMILIES["llama"])
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def saves_its_tokenizer(llama: Path, folder: Path) -> bool:
    """Whether a directory that `save_hf_format` wrote has the whole tokenizer."""
    tokenizer = LlamaTokenizer.from_pretrained(llama)
    folder.mkdir()
    tokenizer.save_vocabulary(str(folder))
    again = LlamaTokenizer.from_pretrained(folder)
    return again(WORDS).input_ids == tokenizer(WORDS).input_ids and again.pad_token == "<pad>"


USES = {
    "no_init_weights": lambda *_: bool(importlib.import_module("transformers.modeling_utils").no_init_weights),
    "whole_tokenizers": saves_its_tokenizer,
    "right_padding": lambda llama, _: LlamaTokenizer.from_pretrained(llama).padding_side == "right",
    # `docs/upstream.md` shows that ZeRO-3 fails without it.
    "one_dtype_under_zero3": lambda *_: DeepSpeedEngine._cast_module_mixed_precision.__module__.startswith("hybrid."),
}


@pytest.mark.parametrize("name", [shim.__name__ for shim in deepspeed_chat.SHIMS])
def test_each_shim_is_needed(monkeypatch, tmp_path, llama, name):
    with deepspeed_chat.installed():
        assert USES[name](llama, tmp_path / "with")
    monkeypatch.setattr(deepspeed_chat, "SHIMS", [shim for shim in deepspeed_chat.SHIMS if shim.__name__ != name])
    with deepspeed_chat.installed():
        try:
            works = USES[name](llama, tmp_path / "without")
        except AttributeError:
            works = False
    assert not works


def test_a_second_install_has_no_effect():
    with deepspeed_chat.installed():  # restores everything at its end
        deepspeed_chat.install()
        cast, initialize = DeepSpeedEngine._cast_module_mixed_precision, transformers.modeling_utils.no_init_weights
        deepspeed_chat.install()
        assert DeepSpeedEngine._cast_module_mixed_precision is cast
        assert transformers.modeling_utils.no_init_weights is initialize
        hybrid.uninstall()
    assert DeepSpeedEngine._cast_module_mixed_precision is deepspeed_chat.DEEPSPEEDS_CAST
    assert not hasattr(transformers.modeling_utils, "no_init_weights")


# Ranks, launches with their steps, and flags.
RUNS = {
    "zero3": (2, ["1 2 3"], "--zero_stage 3"),
    "a-launch-for-each-step": (2, ["1", "2", "3"], "--zero_stage 3 --lora_dim 4"),
    "offload": (1, ["1 2 3"], "--zero_stage 2 --offload"),
}


@pytest.mark.parametrize("name", slow_but(["zero3"], RUNS))
def test_steps_1_2_and_3_of_deepspeed_chats_shape(tmp_path, llama, name):
    ranks, launches, flags = RUNS[name]
    output = tmp_path / "llama"
    for steps in launches:
        command = f"torchrun --nproc_per_node={ranks} --master_port={free_port()} -m hybrid.compat.deepspeed_chat"
        arguments = f"main.py {steps} --model_name_or_path {llama} --output_dir {output} --enable_hybrid_engine {flags}"
        run_together([f"{command} {arguments}".split()], SHAPE)

    def weights(folder: str) -> dict[str, torch.Tensor]:
        return torch.load(output / folder / "pytorch_model.bin")

    def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(one[key], other[key]) for key in one)

    for saved, loaded in (("step1", "loaded_actor"), ("step2", "loaded_critic"), ("step2", "loaded_reward")):
        assert equal(weights(loaded), weights(saved)), loaded
    assert not equal(weights("actor"), weights("step1")) and not equal(weights("critic"), weights("step2"))
    before = LlamaForCausalLM.from_pretrained(llama, dtype=torch.bfloat16).state_dict()
    assert not torch.equal(weights("step1")["model.norm.weight"], before["model.norm.weight"])
    for rank in range(ranks):
        record = json.loads((output / f"rank{rank}.json").read_text())
        assert record["actor"] == "HybridEngine" and record["containers"] == ["fused"], record
    actor = LlamaForCausalLM.from_pretrained(output / "actor")  # as a user loads it
    assert equal(weights("actor"), actor.state_dict())
    assert LlamaTokenizer.from_pretrained(output / "actor")(WORDS) == LlamaTokenizer.from_pretrained(llama)(WORDS)
