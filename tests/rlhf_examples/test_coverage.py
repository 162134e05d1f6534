"""Every recipe in configs/ and every script that generates runs fused with its own flags: adapters, checkpointing,
dtype, the way weights are held. Models are tiny, of the recipe's architecture, and partitioned for real."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch.distributed as dist

import hybrid
from rlhf_examples import chat, evaluate, pairs, pipeline, throughput
from rlhf_examples.common.actor import Actor
from rlhf_examples.common.arguments import (
    ChatArguments,
    EvaluateArguments,
    PairsArguments,
    PPOArguments,
    RolloutArguments,
    ThroughputArguments,
    arguments_of,
    read_yaml,
)
from rlhf_examples.common.engines import deepspeed_config, load_rollout_engine
from rlhf_examples.common.models import load_exported
from rlhf_examples.common.rollouts import sampling
from tests.engines import engine_of, train_step
from tests.rlhf_examples.scripts import run_here, small_directory
from tests.rlhf_examples.test_recipes import CONFIGS, RECIPES
from tests.tiny_models import prompts, tiny_model, with_peft

GENERATING = ("ppo", "grpo", "pairs", "throughput", "evaluate")


@dataclass(frozen=True)
class Coverage:
    """What an engine's policy has run in, and why its latest native request was one."""

    engine: str
    containers: set[str]
    fallback_reason: str


FUSED = ({"fused"}, "")


def coverage(engine: hybrid.HybridEngine | hybrid.InferenceEngine) -> Coverage:
    containers = {row["container"] for row in engine.coverage()}
    reason = engine.stats()["fallback_reason"] if hasattr(engine, "stats") else engine._fused.reasons.last
    return Coverage(type(engine).__name__, containers, reason)


def require_fused(engine: hybrid.HybridEngine | hybrid.InferenceEngine) -> None:
    found = coverage(engine)
    assert (found.containers, found.fallback_reason) == FUSED, found


# The recipes


def steps_of(name: str) -> dict[str, object]:
    """The arguments of a recipe's steps that generate."""
    settings = read_yaml(CONFIGS / f"{name}.yaml")
    if "steps" not in settings:
        return {"ppo": arguments_of(PPOArguments, settings)}
    parsed = pipeline.parse(settings, [])
    scripts = {step: own.get("script", step) for step, own in parsed.steps.items()}
    return {step: pipeline.arguments_of_step(step, parsed) for step, script in scripts.items() if script in GENERATING}


def check_recipe(name: str, folder: str) -> None:
    family = RECIPES[name][3] if name in RECIPES else "llama"
    tied = {"tie_word_embeddings": True} if name in RECIPES and RECIPES[name][5].get("tie_word_embeddings") else {}
    if dist.get_rank() == 0:
        tiny_model(family, **tied).save_pretrained(folder)
    dist.barrier()
    for args in steps_of(name).values():
        if isinstance(args, RolloutArguments):
            check_actor(args, folder)
        else:
            engine = load_rollout_engine(load_exported, folder, args.dtype, zero_stage=3)
            roll_out_and_score(engine, sampling(replace(args, max_answer_seq_len=6), seed=0))
            require_fused(engine)
            engine.destroy()


def check_actor(args: RolloutArguments, folder: str) -> None:
    """Policy and reference as the script builds them, before and after an update."""
    changes = {"inference_tp_size": min(args.inference_tp_size, 2), "stage3_param_persistence_threshold": 0}
    own = {"actor_model_name_or_path": folder, "actor_zero_stage": 3, "max_answer_seq_len": 6}
    args = replace(args, **changes, **own)
    actor = Actor.load(args, total_steps=4, needs_reference=True)
    assert any(parameter.ds_tensor.numel() < parameter.ds_numel for parameter in actor.policy.module.parameters())
    for _ in range(2):
        batch = roll_out_and_score(actor.policy, sampling(args, seed=0), actor.reference_logps, actor.old_logps)
        for engine in (actor.policy, actor.reference):
            if engine is not None:
                require_fused(engine)
        assert batch.weight_version == actor.policy.weight_version
        actor.policy.train()
        train_step(actor.policy)
    actor.destroy()


def roll_out_and_score(engine: hybrid.HybridEngine, params: hybrid.SamplingParams, *scorings: Callable):
    """A rollout and the scores of it, as an iteration of the scripts makes them."""
    ids, mask = prompts(2, 9, padded=True, seed=dist.get_rank())
    engine.eval()
    with engine.inference():
        batch = engine.rollout(ids, mask, params, num_generations=2)
        for score in scorings:
            assert score(batch).isfinite().all()
    return batch


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_a_recipe_runs_fused(ranks, tmp_path, name):
    assert steps_of(name), "nothing generates in it"
    ranks.run(check_recipe, name, str(tmp_path))


def check_the_readmes_configuration() -> None:
    """As README.md passes it, but for the threshold, which would keep a tiny model whole."""
    config = json.loads((CONFIGS / "zero3_hybrid.json").read_text())
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    model = tiny_model("qwen2")
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    engine = engine_of(with_peft(model), config)
    roll_out_and_score(engine, hybrid.SamplingParams(max_new_tokens=4), lambda batch: batch.raw_per_token_logps)
    require_fused(engine)


def test_the_readmes_configuration_runs_fused(ranks):
    assert [path.name for path in CONFIGS.glob("*.json")] == ["zero3_hybrid.json"]
    ranks.run(check_the_readmes_configuration)


# The scripts


@contextmanager
def watched() -> Iterator[list[Coverage]]:
    """Gives the coverage, at its end, of every engine that is built in the block over a model that can generate."""
    found: list[Coverage] = []
    alive: list = []
    own = {name: getattr(hybrid, name) for name in ("initialize", "init_inference")}

    def watch(engine):
        if not hasattr(engine.module, "generate"):  # a critic, a reward model
            return
        destroy = engine.destroy

        def noted() -> None:
            found.append(coverage(engine))
            alive.remove(engine)
            destroy()

        engine.destroy = noted
        alive.append(engine)

    def initialize(*args, **kwargs):
        built = own["initialize"](*args, **kwargs)
        watch(built[0])
        return built

    def init_inference(*args, **kwargs):
        engine = own["init_inference"](*args, **kwargs)
        watch(engine)
        return engine

    hybrid.initialize, hybrid.init_inference = initialize, init_inference
    try:
        yield found
        found += [coverage(engine) for engine in alive]
    finally:
        hybrid.initialize, hybrid.init_inference = own["initialize"], own["init_inference"]


def run_script(script: str, folder: str) -> None:
    """A script's `run`, with everything on that could be in the decoder's way."""
    model, rewarding, output = f"{folder}/model", f"{folder}/reward_model", f"{folder}/{script}"
    training = {"gradient_checkpointing": True, "lora_dim": 2, "max_steps": 1, "zero_stage": 3, "output_dir": output}
    actor = {
        "actor_model_name_or_path": model,
        "actor_gradient_checkpointing": True,
        "actor_lora_dim": 2,
        "actor_zero_stage": 3,
        "num_iterations": 1,
        "output_dir": output,
    }
    generating = {"max_answer_seq_len": 6}
    if script == "ppo":
        critic = {"critic_model_name_or_path": rewarding, "critic_gradient_checkpointing": True, "critic_lora_dim": 2}
        run_here("ppo", {**actor, **critic})
    elif script == "grpo":
        run_here("grpo", {**actor, "beta": 0.1})
    elif script in ("sft", "dpo"):
        run_here(script, {**training, "model_name_or_path": model})
    elif script == "pairs":
        pairs.run(PairsArguments(model_name_or_path=model, output_dir=output, rounds=1, zero_stage=3, **generating))
    elif script == "evaluate":
        evaluate.run(EvaluateArguments(model_name_or_path=[model], eval_rows=4, zero_stage=3, **generating))
    elif script == "throughput":
        throughput.run(ThroughputArguments(model_name_or_path=model, rounds=1, **generating))
    else:
        tokenizer, args = chat.load_tokenizer(model), ChatArguments(path=model, max_new_tokens=6)
        policy = load_exported(model, deepspeed_config(args.dtype, zero_stage=0))
        engine = hybrid.init_inference(policy, dtype=args.dtype, replace_with_kernel_inject=True)
        lines = iter(["Once upon a time"])
        chat.talk(engine, tokenizer, lambda: next(lines, "/quit"), args)


def check_script(script: str, folder: str) -> None:
    with watched() as found:
        run_script(script, folder)
    assert found
    for one in found:
        assert (one.containers, one.fallback_reason) == FUSED, one


SLOW = [pytest.param(script, marks=pytest.mark.slow) for script in ("grpo", "sft", "dpo", "pairs", "evaluate", "chat")]


@pytest.mark.parametrize("script", ["ppo", "throughput", *SLOW])
def test_a_script_runs_fused(ranks, tmp_path, script):
    ranks.run(check_script, script, str(small_directory(Path(tmp_path))))
