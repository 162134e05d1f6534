"""`hybrid.compat.openrlhf`: OpenRLHF 0.11 trains on the engine's own rollouts, where it and Ray are installed."""

import ast
import asyncio
import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import hybrid
from hybrid.compat import openrlhf
from tests.engines import engine_of, settings
from tests.rank_pool import pool_of

ROOT = Path(__file__).parents[2]
PACKAGE = importlib.util.find_spec("openrlhf")
MISSING = [name for name in ("ray", "openrlhf") if importlib.util.find_spec(name) is None]

# OpenRLHF's calls of CUDA, as a CPU has them; and its patch of transformers 5.15, which later versions do not need.
ON_CPU = {
    r"^                _patch_zero3_weight_mapping\(\)$": "",
    r'torch\.device\(f"cuda:\{torch\.cuda\.current_device\(\)\}"\)': 'torch.device("cpu")',
    r"torch\.cuda\.current_device\(\)": '"cpu"',
    r"torch\.cuda\.(set_device|synchronize|empty_cache)\([^()]*\)": "None",
    r'"cuda", \(dp_size': '"cpu", (dp_size',
}
REWARD = """
import tokenizers
import torch

def reward_func(queries, prompts, labels):
    # The share of completion words that are the label's.
    rows = zip(queries, prompts, labels)
    rewards = [float(query[len(prompt):].split().count(label)) for query, prompt, label in rows]
    return {"rewards": torch.tensor(rewards), "scores": torch.tensor(rewards), "extra_logs": {}}
"""
FLASH_ATTN = {
    "__init__.py": "",
    "bert_padding.py": "from einops import rearrange\nindex_first_axis = pad_input = unpad_input = None\n",
    "utils/__init__.py": "",
    "utils/distributed.py": "all_gather = None\n",
}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"max_position_embeddings": 64}
WORDS = "red blue cat dog sun tree run sleep good bad one two three four".split()


def openrlhf_for_cpus(path: Path) -> None:
    """Write the installed package, changed to run without CUDA, and the parts of flash-attn that it imports."""
    shutil.copytree(Path(PACKAGE.origin).parent, path / "openrlhf")
    for file in (path / "openrlhf").rglob("*.py"):
        text = file.read_text()
        for pattern, replacement in ON_CPU.items():
            text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
        file.write_text(text)
    for name, text in FLASH_ATTN.items():
        (path / "flash_attn" / name).parent.mkdir(parents=True, exist_ok=True)
        (path / "flash_attn" / name).write_text(text)


def word_tokenizer():
    ids = {word: index for index, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def save_policy(path: Path) -> None:
    torch.manual_seed(0)
    tokenizer = word_tokenizer()
    config = LlamaConfig(vocab_size=len(tokenizer), eos_token_id=2, bos_token_id=1, pad_token_id=0, **SIZES)
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)


def run(path: Path, **flags: Any) -> list[dict[str, float]]:
    """Train by OpenRLHF's command line with two policy ranks; returns the metrics of its steps."""
    openrlhf_for_cpus(path)
    save_policy(path / "policy")
    (path / "reward.py").write_text(REWARD)
    records = [{"input": f"{WORDS[i % 14]} {WORDS[(3 * i + 1) % 14]}", "label": "dog"} for i in range(32)]
    (path / "prompts.jsonl").write_text("\n".join(map(json.dumps, records)))
    arguments = {
        "actor.model_name_or_path": path / "policy",
        "actor.num_gpus_per_node": 2,
        "reward.remote_url": path / "reward.py",
        "data.prompt_dataset": path / "prompts.jsonl",
        "data.label_key": "label",
        "data.max_len": 24,
        "rollout.max_new_tokens": 12,
        "rollout.batch_size": 16,
        "rollout.n_samples_per_prompt": 4,
        "train.batch_size": 64,
        "train.micro_batch_size": 16,
        "rollout.micro_batch_size": 16,
        "train.num_episodes": 4,
        "vllm.num_engines": 2,
        "ds.zero_stage": 3,
        "ds.attn_implementation": "eager",
        "actor.adam.lr": "1e-2",
        "ckpt.output_dir": path / "out",
        "algo.kl.init_coef": 0,
        "algo.advantage.is_correction_level": "token",
        **flags,
    }
    command = [sys.executable, "-m", "hybrid.compat.openrlhf"]
    command += [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
    environment = {
        "PYTHONPATH": os.pathsep.join([str(path), str(ROOT), *sys.path]),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "RAY_ADDRESS": "local",
        "RAY_AUTH_MODE": "disabled",
        "RAY_OVERRIDE_RESOURCES": '{"GPU": 4, "CPU": 8}',
        "NO_PROXY": "*",
        "no_proxy": "*",
    }
    with (path / "log").open("w") as log:
        done = subprocess.run(command, env={**os.environ, **environment}, stdout=log, stderr=log, timeout=540)
    text = (path / "log").read_text()
    assert done.returncode == 0, text[-8000:]
    return [ast.literal_eval(found) for found in re.findall(r"Global step \d+: (\{.*?\})", text)]


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
@pytest.mark.parametrize("estimator", ["reinforce", "gae"])
def test_openrlhf_learns_from_the_engines_rollouts(tmp_path, estimator):
    """REINFORCE++ and PPO with a critic: the reward rises, the sampler's logprobs are the trainer's within bfloat16's
    rounding, and no weights are sent."""
    flags = {"algo.advantage.estimator": estimator}
    if estimator == "gae":
        flags |= {"critic.num_gpus_per_node": 2, "critic.adam.lr": "1e-2"}
    steps = run(tmp_path, **flags)
    rewards = [step["rollout/reward_mean"] for step in steps]
    assert len(steps) == 8
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 1.5
    assert max(step["vllm_kl"] for step in steps) < 0.02
    assert max(step["timing/broadcast"] for step in steps) < 1e-3


# Without OpenRLHF


class Executor:
    """An agent of two turns, in the shape of OpenRLHF's MultiTurnAgentExecutor."""

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        ids = hf_tokenizer(text=prompt, add_special_tokens=False)["input_ids"]
        first = (await llm_engine.generate(ids, sampling_params)).outputs[0]
        ids = [*ids, *first.token_ids, 5]
        second = (await llm_engine.generate(ids, sampling_params)).outputs[0]
        return {"label": label, "ids": ids, "turns": [first, second]}


@contextlib.contextmanager
def serving_policy():
    """A policy that serves, and its tokenizer."""
    tokenizer = word_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), eos_token_id=2, **SIZES)
    served = openrlhf.PolicyServer(engine_of(LlamaForCausalLM(config), settings(3)), Executor())
    served.begin()
    yield served, tokenizer
    served.end()


one_rank = pool_of(1)
REQUESTED = openrlhf.RequestedSampling(max_tokens=6, logprobs=1, skip_special_tokens=False)


def check_agents() -> None:
    """Eight samples at once; logprobs are those of the distribution that each token was drawn from."""
    with serving_policy() as (served, tokenizer):
        require_agents(served, tokenizer)


def require_agents(served: openrlhf.PolicyServer, tokenizer) -> None:
    arguments = {"prompt": "red dog", "label": "dog", "sampling_params": REQUESTED, "max_length": 24, "images": None}
    answers = served.responses(tokenizer, 8, **arguments)
    assert [answer["label"] for answer in answers] == ["dog"] * 8
    assert len({tuple(answer["ids"]) for answer in answers}) > 1
    assert served.num_unfinished() == 0
    served.end()
    for answer in answers:
        ids, last = answer["ids"], answer["turns"][1]
        sequence = torch.tensor([[*ids, *last.token_ids]])
        scores = served.engine.score(sequence, torch.ones_like(sequence)).per_token_logps[0, len(ids) - 1 :]
        logps = [entry[token].logprob for token, entry in zip(last.token_ids, last.logprobs, strict=True)]
        torch.testing.assert_close(torch.tensor(logps), scores, atol=2e-5, rtol=0)
        assert last.text == tokenizer.decode(last.token_ids, skip_special_tokens=False)
        assert last.finish_reason == ("stop" if last.token_ids[-1] == 2 else "length")
    assert served.engine.training
    with pytest.raises(RuntimeError, match="no rollout has begun"):
        served.responses(tokenizer, 1, **arguments)


def test_a_policy_serves_agents(one_rank):
    one_rank.run(check_agents)


def test_settings_of_requests():
    requested = openrlhf.RequestedSampling(0.7, 0.9, -1, max_tokens=8, min_tokens=9, seed=3, stop_token_ids=[4])
    expected = hybrid.SamplingParams(8, 0.7, 0.9, 0, min_new_tokens=8, seed=3, stop_token_ids=(4, 2))
    assert openrlhf.engine_params(requested, 2) == expected
    for field, value, message in (
        ("stop", ["."], r"SamplingParams.stop: \['.'\] given, which is not supported"),
        ("max_tokens", None, "SamplingParams.max_tokens: None given"),
    ):
        with pytest.raises((NotImplementedError, ValueError), match=message):
            openrlhf.engine_params(dataclasses.replace(requested, **{field: value}), 2)


def test_images_are_refused():
    llm = openrlhf.ServedLLM(None, word_tokenizer())
    with pytest.raises(NotImplementedError, match="multi_modal_data: images are not served"):
        asyncio.run(llm.generate([4], REQUESTED, {"image": [0]}))


def test_asynchronous_training_is_refused(capsys):
    with pytest.raises(SystemExit):
        openrlhf.main(["--train.async_enable"])
    assert "--train.async_enable: rollouts read the weights that are trained" in capsys.readouterr().err


@pytest.mark.skipif(not MISSING, reason="OpenRLHF and Ray are installed")
def test_a_missing_package_is_one_line(capsys):
    with pytest.raises(SystemExit):
        openrlhf.main([])
    assert "not installed: this is OpenRLHF 0.11's trainer" in capsys.readouterr().err
