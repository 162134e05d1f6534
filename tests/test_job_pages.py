"""The pages in docs/jobs/: their code runs, on tiny models, and gives what the pages say."""

import contextlib
import functools
import io
import json
import os
import re
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
import torch.distributed as dist
import torch.distributed.run
from accelerate.utils.launch import prepare_deepspeed_cmd_env
from deepspeed.runtime.engine import DeepSpeedEngine
from transformers import AutoModelForCausalLM
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import hybrid
from hybrid.config import BLOCKS, HybridEngineConfig, RolloutConfig
from hybrid.runtime.profiling import PHASES
from hybrid.training.builder import Builder
from hybrid.training.memory_plan import MemoryPlan, MemoryPlanner
from rlhf_examples.common.arguments import (
    AgentArguments,
    PipelineArguments,
    PPOArguments,
    ThroughputArguments,
    VisionGRPOArguments,
)
from rlhf_examples.ray_grpo import RayGRPOArguments
from tests.compat.test_install import fresh_accelerate_state, quietly
from tests.engines import engine_of, settings
from tests.rlhf_examples.chat_models import tokenizer_of
from tests.rlhf_examples.scripts import make_small_models
from tests.rlhf_examples.test_recipes import LLAMA, QWEN, fake_process_group, partitioned_model
from tests.tiny_models import prompts, tiny_model, with_peft

ROOT = Path(__file__).resolve().parents[1]
__all__ = ["fake_process_group"]  # a fixture
JOBS, CONFIGS = ROOT / "docs" / "jobs", ROOT / "configs"


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page in a language."""
    return re.findall(rf"```{language}\n(.*?)```", (JOBS / f"{page}.md").read_text(), re.S)


def patched(code: str, diff: str) -> str:
    """`code` with the change of a diff, whose context must be in it exactly once."""
    lines = diff.splitlines()
    assert all(line[:1] in "+- " for line in lines)
    old = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "+")
    new = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "-")
    assert code.count(old) == 1, old
    return code.replace(old, new)


@contextlib.contextmanager
def command_line(*arguments: str):
    """Inside the block a script's arguments are these."""
    before, sys.argv = sys.argv, ["script.py", *arguments]
    try:
        yield
    finally:
        sys.argv = before
        hybrid.uninstall()


def run_script(code: str, *arguments: str) -> tuple[dict, str]:
    """The names that a script defines, and what it prints."""
    names, output = {"__name__": "__main__"}, io.StringIO()
    with command_line(*arguments), contextlib.redirect_stdout(output):
        exec(compile(code, "script", "exec"), names)
    return names, output.getvalue()


# DeepSpeed-Chat


def check_deepspeed_chat(model: str) -> None:
    (script,) = blocks("deepspeed_chat", "python")
    assert 55 < len(script.splitlines()) < 70
    *two_lines, second = blocks("deepspeed_chat", "diff")
    # Without DeepSpeed's own hybrid engine, which needs a GPU, and greedy, so that the runs can be compared.
    disabled = script.replace('"enabled": True', '"enabled": False')
    scripts = {"before": disabled, "installed": functools.reduce(patched, two_lines, script)}
    scripts["rollout"] = patched(scripts["installed"], second)
    losses = {}
    for name, code in scripts.items():
        greedy = code.replace("do_sample=True", "do_sample=False").replace("temperature=1.0", "temperature=0.0")
        assert greedy != code
        names, output = run_script(greedy, model)
        assert type(names["actor"]) is (DeepSpeedEngine if name == "before" else hybrid.HybridEngine)
        assert type(names["reference"]) is DeepSpeedEngine
        losses[name] = [float(loss) for loss in re.findall(r"loss (\S+)", output)]
        if name != "before":
            assert {row["container"] for row in names["actor"].coverage()} == {"fused"}
            assert names["actor"].stats()["tokens"] > 0 and names["actor"].stats()["fallback_reason"] == ""
            assert names["actor"].weight_version == 3
    assert len(losses["before"]) == 3 and len(set(losses["before"])) == 3
    for name in ("installed", "rollout"):
        assert losses[name] == pytest.approx(losses["before"], abs=2e-5), losses  # float32, other order of sums


def test_the_deepspeed_chat_script_trains_alike_before_and_after(ranks, tmp_path):
    ranks.run(check_deepspeed_chat, str(make_small_models(tmp_path) / "model"))


# TRL


def accelerate_environment(command: str) -> dict[str, str]:
    """What a command `accelerate launch ...` puts into its ranks' environment, in the directory of its files."""
    from accelerate.commands import launch

    program, name, *arguments = shlex.split(command)
    assert (program, name) == ("accelerate", "launch")
    launched = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "deepspeed_launcher", launched.append)
        launch.launch_command(launch.launch_command_parser().parse_args(arguments))
    (args,) = launched
    assert args.num_processes == 8 and args.training_script == "train.py"
    _, environment = prepare_deepspeed_cmd_env(args)
    return {name: value for name, value in environment.items() if name.startswith("ACCELERATE_")}


def check_trl(folder: str) -> None:
    os.chdir(folder)
    with fresh_accelerate_state(), pytest.MonkeyPatch.context() as patch:
        for name, value in accelerate_environment(blocks("trl_grpo_lora", "bash")[0]).items():
            patch.setenv(name, value)
        (script,) = blocks("trl_grpo_lora", "python")
        for old, new in {
            '"Qwen/Qwen2.5-7B-Instruct"': '"model"',
            "per_device_train_batch_size=8": "per_device_train_batch_size=4, use_cpu=True, report_to=[]",
            "gradient_accumulation_steps=4": "gradient_accumulation_steps=2",
            "num_generations=8": "num_generations=4",
            "max_completion_length=512": "max_completion_length=8",
            "learning_rate=1e-5": "learning_rate=1e-2",
            "max_steps=500": "max_steps=4",
            "r=16": "r=2",
            # A tiny model is never right: its completions' lengths differ.
            "float(text.strip().endswith(expected))": "float(text.strip().endswith(expected)) + len(text) % 3",
        }.items():
            assert script.count(old) == 1, old
            script = script.replace(old, new)
        names, _ = run_script(script)
        engine = names["engine"]
        assert type(engine) is hybrid.HybridEngine
        assert engine.weight_version == 4
        stats = engine.stats()
        assert stats["fallback_reason"] == "" and stats["tokens"] > 0
        sizes = {name: 2 * parameter.ds_numel for name, parameter in engine.module.named_parameters()}
        adapters = sum(size for name, size in sizes.items() if "lora_" in name)
        assert stats["gathered_bytes"] == sum(sizes.values()) + 3 * adapters
        logged = [line for line in names["trainer"].state.log_history if "loss" in line]
        assert any(line["grad_norm"] > 0 for line in logged)


def test_the_trl_script_trains_and_writes_an_adapter(ranks, tmp_path):
    make_small_models(tmp_path)
    (ds_json,) = blocks("trl_grpo_lora", "json")
    assert ds_json.count('threshold": 100000') == 1  # more than the tiny model's parameters have
    (tmp_path / "ds.json").write_text(ds_json.replace('threshold": 100000', 'threshold": 0'))
    (tmp_path / "accelerate.yaml").write_text(blocks("trl_grpo_lora", "yaml")[0])
    problems = [{"prompt": f"{number} + 1 =", "answer": "2"} for number in range(16)]
    (tmp_path / "problems.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in problems))
    ranks.run(check_trl, str(tmp_path))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "runs" / "grpo" / "adapter")
    learned = [parameter.abs().max() for name, parameter in adapted.named_parameters() if "lora_B" in name]
    assert learned and max(learned) > 0


def test_memory_figures_of_the_pages_are_those_of_the_recipes():
    """`test_recipes.py` compares these with `memory_plan`."""
    for page, recipe in (("trl_grpo_lora", "8gpu_7b_lora"), ("tensor_parallel_70b", "16gpu_70b_lora")):
        lines = [line.strip() for block in blocks(page, "text") for line in block.splitlines() if "  " in line.strip()]
        text = re.sub(" +", " ", (CONFIGS / f"{recipe}.yaml").read_text())
        assert len(lines) > 3
        assert [line for line in lines if re.sub(" +", " ", line) not in text] == []


# One GPU


def run_blocks(code: list[str], names: dict, model: torch.nn.Module) -> dict:
    """Run a page's blocks one after the other, over `model` and this rank's prompts; `names` gets what they define."""
    prompt_ids, prompt_mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    names.update(hybrid=hybrid, torch=torch, model=model, prompt_ids=prompt_ids, prompt_mask=prompt_mask)
    for block in code:
        quietly(exec, block, names)
    return names


def check_one_gpu() -> None:
    devices = []

    def score_with_another_model(sequences, mask):
        devices.append(names["engine"].asleep)
        return mask.sum(1).float()

    def policy_loss(logits, batch, rewards):
        logps = hybrid.selective_log_softmax(logits[:, :-1], batch.sequences[:, 1:])
        return -(logps.sum(1) * (rewards - rewards.mean())).mean()

    names = {"score_with_another_model": score_with_another_model, "policy_loss": policy_loss}
    code = [block.replace('"max_out_tokens": 1024', '"max_out_tokens": 64') for block in blocks("one_gpu", "python")]
    assert len(code) == 2
    code[0] = code[0].replace("=512", "=16")
    model = with_peft(tiny_model("llama", dtype=torch.bfloat16)).to(torch.bfloat16)
    engine = run_blocks(code, names, model)["engine"]
    assert devices == [2] and engine.asleep == 0 and engine.weight_version == 1
    need = names["plan"].needs[names["plan"].in_use]
    assert need.snapshot == 0 < need.containers
    assert engine.stats()["fallback_reason"] == ""


def test_the_code_for_one_gpu_runs(ranks):
    ranks.run(check_one_gpu)


LLAMA_8B = ("llama", (4096, 14336, 32, 32), LLAMA)
QWEN_1B = ("qwen2", (1536, 8960, 28, 12), {**QWEN, "num_key_value_heads": 2})


def planned(of_model: tuple, stage: int, lora_dim: int, streaming: bool = False, **rollout) -> MemoryPlan:
    """The plan for 32 sequences of 1024 tokens on a single GPU."""
    model = partitioned_model(SimpleNamespace(actor_lora_dim=lora_dim), 1, *of_model)
    if stage < 3:
        for parameter in model.parameters():
            parameter.data = torch.empty(parameter.ds_shape, dtype=parameter.dtype, device="meta")
            for name in [name for name in vars(parameter) if name.startswith("ds_")]:
                delattr(parameter, name)
    settings = HybridEngineConfig(pin_parameters=not streaming)
    builder = Builder(model, settings, RolloutConfig(**rollout), stage, None, lambda nbytes: None, list)
    return MemoryPlanner(builder).plan(32, 1024)


@pytest.mark.parametrize(
    ("row", "stage", "rollout"),
    [
        ("| ZeRO 2, `lora: merged` (default) |", 2, {}),
        ("| ZeRO 2, `lora: unmerged` |", 2, {"lora": "unmerged"}),
        ("| ZeRO 2, `weight_dtype: int8` |", 2, {"weight_dtype": "int8"}),
        ("| ZeRO 3, `weight_dtype: int8` |", 3, {"weight_dtype": "int8"}),
        ("| ZeRO 3, `pin_parameters: false` (streaming) |", 3, {"lora": "unmerged", "streaming": True}),
    ],
)
def test_figures_for_one_gpu_match_the_plan(fake_process_group, row, stage, rollout):
    fake_process_group(1)
    plan = planned(LLAMA_8B, stage, 16, **rollout)
    need = plan.needs[plan.in_use]
    figures = (need.parameters, need.snapshot, need.containers, need.kv, need.total)
    (line,) = [line for line in (JOBS / "one_gpu.md").read_text().splitlines() if line.startswith(row)]
    assert line == f"{row} {' | '.join(f'{nbytes / 2**20:.1f}' for nbytes in figures)} |"


def test_the_figure_for_a_small_model_on_one_gpu_matches_the_plan(fake_process_group):
    fake_process_group(1)
    (need,) = planned(QWEN_1B, 2, 0).needs.values()
    assert f"a rollout adds {need.total / 2**20:.1f} MiB" in (JOBS / "one_gpu.md").read_text()


# Tensor parallelism


def check_tensor_parallel(model: str) -> None:
    (code,) = blocks("tensor_parallel_70b", "python")
    for old, new in {
        '"inference_tp_size": 8': '"inference_tp_size": 2',
        "meta-llama/Llama-3.1-70B": model,
        "=512": "=16",
        'threshold": 100000': 'threshold": 0',
        "r=16, lora_alpha=32": "r=2, lora_alpha=2, init_lora_weights=False",
    }.items():
        assert old in code, old
        code = code.replace(old, new)
    names: dict = {}
    try:
        engine = run_blocks([code], names, None)["engine"]
    finally:
        unset_hf_deepspeed_config()
    assert engine.in_step and {row["container"] for row in engine.coverage()} == {"fused"}
    assert engine.stats()["snapshot_bytes"] < 0.6 * sum(2 * p.ds_numel for p in engine.module.parameters())
    batch, reference = names["batch"], names["reference"]
    assert len(batch.completion_ids) == 4
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        logits = hybrid.padded_forward(base)(batch.sequences, batch.attention_mask).logits[:, :-1]
    expected = hybrid.selective_log_softmax(logits, batch.sequences[:, 1:])
    kept, start = batch.completion_mask.bool(), batch.prompt_ids.shape[1]
    actual, expected = (logps[:, start - 1 :][kept] for logps in (reference.per_token_logps, expected))
    torch.testing.assert_close(actual, expected, atol=0.05, rtol=0.05)  # bfloat16
    assert (actual - batch.raw_per_token_logps[kept]).abs().max() > 0.5, "the adapters change nothing"


def test_the_code_for_tensor_parallelism_runs(ranks, tmp_path):
    tiny_model("llama", dtype=torch.bfloat16).save_pretrained(tmp_path)
    ranks.run(check_tensor_parallel, str(tmp_path))


# Tools and environments


def check_tools() -> None:
    tokenizer = tokenizer_of("qwen2_5")
    engine = engine_of(tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=1024), LONG)
    names = {"tokenizer": tokenizer, "engine": engine}
    run_blocks(blocks("tools_and_environments", "python"), names, engine.module)
    batch, episodes = names["batch"], names["episodes"]
    assert engine.weight_version == 2 and batch.weight_version == 1
    assert batch.errors == [""] * 8 and batch.observation_mask.sum() > 0 and batch.turn_ids.max() == 3
    # A random model writes no numbers: it reads errors, and no turn is answered by the game.
    texts = [
        message["content"] for messages in episodes.completions for message in messages if message["role"] == "user"
    ]
    assert texts and all("invalid literal for int()" in text for text in texts)
    # Guesses 3 or 8, by the length of what it writes: some of them are right.
    names = {"tokenizer": tokenizer, "engine": engine, "int": lambda text: 3 + 5 * (len(text) % 2)}
    run_blocks(blocks("tools_and_environments", "python"), names, engine.module)
    assert names["rewards"].sum() > 0 and names["advantages"].abs().sum() > 0 and names["loss"].abs() > 0


def test_the_loop_with_an_environment_trains(ranks):
    ranks.run(check_tools)


# Why is it slow?

LONG = settings(3, hybrid_engine={"enabled": True, "max_out_tokens": 1024})


def check_slow() -> None:
    engine = engine_of(tiny_model("llama"), settings(3))
    names = {"engine": engine, "sampling": hybrid.SamplingParams(max_new_tokens=8, seed=0)}
    first, second = blocks("why_is_it_slow", "python")
    prompt_ids, prompt_mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    engine.rollout(prompt_ids, prompt_mask, names["sampling"])
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(first, names)
    text = output.getvalue()
    assert "every request ran fused" in text and "'decode': " in text and "tensor parallel 2" in text
    run_blocks([second], names, engine.module)
    assert names["launched"] == dict.fromkeys(names["launched"], 0) and names["steps"] > 1  # on CPUs
    assert any(event.count for event in names["profiled"].key_averages())


def test_the_questions_to_a_slow_engine_are_answered(ranks):
    ranks.run(check_slow)


def test_the_page_names_every_phase():
    first, _ = blocks("why_is_it_slow", "python")
    (named,) = re.findall(r'^phases = "(.*)"$', first, re.M)
    assert named.split() == [*PHASES, "elapsed"]


# Is my rollout on-policy?


def check_on_policy(weight_dtype: str) -> dict:
    engine = engine_of(tiny_model("llama"), settings(3, rollout={"weight_dtype": weight_dtype}))
    experts = engine_of(tiny_model("mixtral"), settings(3, rollout={"return_router_indices": True}))
    prompt_ids, prompt_mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    sampled = experts.rollout(prompt_ids, prompt_mask, hybrid.SamplingParams(max_new_tokens=8, seed=0))
    names = {"engine": engine, "moe_engine": experts, "moe_batch": sampled}
    run_blocks(blocks("is_my_rollout_on_policy", "python"), names, engine.module)
    assert names["moe_logits"].shape[:2] == sampled.sequences.shape
    torch.testing.assert_close(names["moe_logps"], sampled.raw_per_token_logps, atol=1e-5, rtol=0)
    assert 0 < names["stale"].sum() < names["rest"].completion_mask.sum()
    kept = names["batch"].completion_mask.bool()
    return {"metrics": names["metrics"], "int8": (names["weights"][kept] - 1).abs().max().item()}


@pytest.mark.parametrize("weight_dtype", ["model", "int8"])
def test_the_code_that_compares_sampler_and_trainer_runs(ranks, weight_dtype):
    for rank in ranks.run(check_on_policy, weight_dtype):
        of_forward = rank["metrics"]
        assert [*of_forward] == ["model", "packed", "exact"]
        for forward, metrics in of_forward.items():
            difference = metrics["sampling/sampling_logp_difference/mean"]
            if weight_dtype == "int8":
                assert difference > 1e-3
            elif forward == "exact":  # to the last bit
                assert difference == metrics["sampling/gen_kl_error"] == metrics["sampling/ratio_outside"] == 0.0
            else:  # "a mean difference below 1e-5"
                assert difference < 1e-5
        assert rank["int8"] < 1e-4 if weight_dtype == "model" else rank["int8"] > 1e-3


# Ray actors


class RayOfRanks:
    """Ray's calls where each rank of the pool is an actor: calls of other ranks' actors are theirs to make."""

    def __init__(self):
        self.cluster_resources, self.wait, self.get = dict, lambda refs: (refs, []), self.results

    def init(self) -> None:
        self.is_running = True

    def shutdown(self) -> None:
        self.is_running = False

    def remote(self, **resources):
        assert resources == {"num_cpus": 1, "num_gpus": 0}
        return lambda kind: SimpleNamespace(remote=lambda rank, *args: RayActor(kind(rank, *args), rank))

    def results(self, refs):
        """The results of calls, in all ranks' actors."""
        if not isinstance(refs, list):
            return refs[1]
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, dict(refs))
        return [everyone[rank][rank] for rank, _ in refs]


class RayActor:
    def __init__(self, actor, rank: int):
        self._actor, self._rank = actor, rank

    def __getattr__(self, name: str):
        def call(*args):
            here = name == "address" or self._rank == dist.get_rank()
            return self._rank, getattr(self._actor, name)(*args) if here else None

        return SimpleNamespace(remote=call)


def check_ray() -> list:
    actor, driver = blocks("ray_actors", "python")
    ray = RayOfRanks()
    names = {
        "load_model": lambda: tiny_model("llama"),
        "config": settings(3),
        "next_prompts": lambda rank: prompts(2, 6, padded=True, seed=0),  # row_ids alone tell ranks apart
        "reward_of": lambda ids, mask: (ids * mask).sum(1).float(),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "ray", ray)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR"):
            patch.setenv(name, os.environ.get(name, ""))  # restored afterwards
        run_blocks([actor, driver], names, None)
    assert names["versions"] == [2, 2] and not ray.is_running
    own = names["ranks"][dist.get_rank()]._actor
    assert own.engine.asleep == 2
    assert len(own.batch.completion_ids) == 8 and own.batch.weight_version == 1
    return [completion.tolist() for completion, _ in names["completions"]]


def test_the_driver_and_its_actors_train(ranks):
    first, second = ranks.run(check_ray)
    assert first == second and first[0] != first[1]


# Commands

ARGUMENTS = {
    "agent": AgentArguments,
    "throughput": ThroughputArguments,
    "pipeline": PipelineArguments,
    "ray_grpo": RayGRPOArguments,
    "vision_grpo": VisionGRPOArguments,
    "ppo": PPOArguments,
}


def test_flags_of_examples_exist():
    text = "\n".join(page.read_text() for page in sorted(JOBS.glob("*.md")))
    commands = re.findall(r"-m rlhf_examples\.([\w.]+)([^`]*)`", text)
    assert {name for name, _ in commands} == {*ARGUMENTS, "report"}
    flags = [(name, flag) for name, arguments in commands for flag in re.findall(r"--(\w+)", arguments)]
    assert len(flags) > 5
    for name, flag in flags:
        assert flag in {field.name for field in fields(ARGUMENTS[name])}, (name, flag)


def test_torchruns_flags_exist():
    (command,) = blocks("tensor_parallel_70b", "bash")
    program, *arguments = shlex.split(command)
    args = torch.distributed.run.get_args_parser().parse_args(arguments)
    assert (program, args.nnodes, args.training_script) == ("torchrun", "2", "train.py")


def test_settings_named_on_the_pages_exist():
    text = "\n".join(page.read_text() for page in sorted(JOBS.glob("*.md")))
    named = set(re.findall(r"`(hybrid_engine|rollout)\.(\w+)[`:]", text))
    assert len(named) > 10
    assert {key for block, key in named if key not in BLOCKS[block].model_fields} == set()


# Agent loops


def check_agent_loop() -> None:
    tokenizer = tokenizer_of("qwen2_5")
    model = tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=1024)
    model.generation_config.eos_token_id = tokenizer.eos_token_id  # as models of chats have it
    engine = engine_of(model, LONG)
    names = {"tokenizer": tokenizer, "engine": engine}
    run_blocks(blocks("agent_loop", "python"), names, engine.module)
    batch = names["batch"]
    assert engine.weight_version == 2 and batch.weight_version == 1
    assert batch.row_index.tolist() == list(range(8)) and batch.turn_ids.max() == 2
    assert batch.observation_mask.sum() > 0 and not (batch.observation_mask & batch.completion_mask).any()


def test_the_code_of_agent_loops_runs(ranks):
    pytest.importorskip("openai", reason="the extra `test` has it")
    ranks.run(check_agent_loop)


def check_verifiers() -> None:
    import verifiers.v1 as vf

    sys.path.insert(0, str(ROOT / "tests" / "serving"))
    import verifiers_program

    tokenizer = tokenizer_of("qwen2_5")
    model = tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=1024)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    engine = engine_of(model, LONG)
    tasks = [verifiers_program.LengthTask(vf.TaskData(prompt="x" * number, idx=number)) for number in (1, 2, 3)]
    names = {"tokenizer": tokenizer, "engine": engine, "tasks": tasks, "harness": "verifiers_program"}
    run_blocks(blocks("verifiers", "python"), names, engine.module)
    assert engine.weight_version == 1 and names["batch"].row_index.tolist() == [0, 1, 2]
    assert len(set(names["rewards"].tolist())) > 1


def test_the_code_for_verifiers_runs(ranks):
    pytest.importorskip("verifiers.v1", reason="verifiers is not installed")
    ranks.run(check_verifiers)
