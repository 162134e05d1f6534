"""Every recipe in configs/ and every generating script runs fused with its own flags: adapters, checkpointing, dtype,
the way weights are held. Models are tiny, of the recipe's architecture, and partitioned."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch.distributed as dist

import hybrid
from rlhf_examples import chat, distill, evaluate, pairs, throughput
from rlhf_examples.common.actor import Actor
from rlhf_examples.common.arguments import (
    ChatArguments,
    DistillArguments,
    EvaluateArguments,
    PairsArguments,
    PPOArguments,
    RolloutArguments,
    ThroughputArguments,
)
from rlhf_examples.common.engines import load_rollout_engine
from rlhf_examples.common.models import load_exported
from rlhf_examples.common.parsing import arguments_of, read_yaml
from rlhf_examples.common.rollouts import sampling
from rlhf_examples.common.steps import arguments_of_step, parse
from tests.engines import engine_of, train_step
from tests.marks import slow_but
from tests.rlhf_examples.scripts import ROLLOUTS, make_small_models, run_in_this_rank
from tests.rlhf_examples.test_recipes import CONFIGS, RECIPES
from tests.tiny_models import prompts, tiny_model, with_peft

GENERATING = ("ppo", "grpo", "agent", "distill", "pairs", "throughput", "evaluate")


@dataclass(frozen=True)
class Coverage:
    """Containers that an engine's policy ran in, and the reason of its latest native request."""

    engine: str
    containers: set[str]
    fallback_reason: str


FUSED = ({"fused"}, "")


def coverage(engine: hybrid.HybridEngine | hybrid.InferenceEngine) -> Coverage:
    containers = {row["container"] for row in engine.coverage()}
    reason = engine.stats()["fallback_reason"] if hasattr(engine, "stats") else engine._fused.reasons.last
    return Coverage(type(engine).__name__, containers, reason)


def require_fused(engine: hybrid.HybridEngine | hybrid.InferenceEngine) -> None:
    actual = coverage(engine)
    assert (actual.containers, actual.fallback_reason) == FUSED, actual


# The recipes


def steps_of(name: str) -> dict[str, object]:
    """The arguments of a recipe's generating steps."""
    settings = read_yaml(CONFIGS / f"{name}.yaml")
    if "steps" not in settings:
        return {"ppo": arguments_of(PPOArguments, settings)}
    parsed = parse(settings, [])
    scripts = {step: own.get("script", step) for step, own in parsed.steps.items()}
    return {step: arguments_of_step(step, parsed) for step, script in scripts.items() if script in GENERATING}


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
    """A rollout and its scores, as in an iteration of the scripts."""
    ids, mask = prompts(2, 9, padded=True, seed=dist.get_rank())
    engine.eval()
    with engine.inference():
        batch = engine.rollout(ids, mask, params, num_generations=2)
        for score in scorings:
            assert score(batch).isfinite().all()
    return batch


@pytest.mark.parametrize(
    "name", slow_but(["16gpu_70b_lora", "gsm8k", "stories_lora"], sorted(path.stem for path in CONFIGS.glob("*.yaml")))
)
def test_every_recipe_runs_fused(ranks, tmp_path, name):
    assert steps_of(name), "the recipe has no generating step"
    ranks.run(check_recipe, name, str(tmp_path))


def check_the_readmes_configuration() -> None:
    """README.md's configuration with persistence threshold 0; its own would leave a tiny model unpartitioned."""
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
def recorded_coverage() -> Iterator[list[Coverage]]:
    """Records the final coverage of every engine built in the block over a model that can generate."""
    coverages: list[Coverage] = []
    engines: list = []
    originals = {name: getattr(hybrid, name) for name in ("initialize", "init_inference")}

    def watch(engine):
        if not hasattr(engine.module, "generate"):  # a critic, a reward model
            return
        destroy = engine.destroy

        def recording_destroy() -> None:
            coverages.append(coverage(engine))
            engines.remove(engine)
            destroy()

        engine.destroy = recording_destroy
        engines.append(engine)

    def initialize(*args, **kwargs):
        built = originals["initialize"](*args, **kwargs)
        watch(built[0])
        return built

    def init_inference(*args, **kwargs):
        engine = originals["init_inference"](*args, **kwargs)
        watch(engine)
        return engine

    hybrid.initialize, hybrid.init_inference = initialize, init_inference
    try:
        yield coverages
        coverages += [coverage(engine) for engine in engines]
    finally:
        hybrid.initialize, hybrid.init_inference = originals["initialize"], originals["init_inference"]


def run_script(script: str, folder: str) -> None:
    """A script's `run` with every option on that could disable the fused decoder."""
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
        run_in_this_rank("ppo", {**actor, **critic})
    elif script == "grpo":
        run_in_this_rank("grpo", {**actor, "beta": 0.1})
    elif script == "agent":
        run_in_this_rank("agent", {**actor, "actor_model_name_or_path": f"{folder}/agent_model", "beta": 0.1})
    elif script == "distill":
        distill.run(arguments_of(DistillArguments, {**ROLLOUTS, **actor, "teacher_model_name_or_path": [model]}))
    elif script in ("sft", "dpo"):
        run_in_this_rank(script, {**training, "model_name_or_path": model})
    elif script == "pairs":
        pairs.run(PairsArguments(model_name_or_path=model, output_dir=output, rounds=1, zero_stage=3, **generating))
    elif script == "evaluate":
        evaluate.run(EvaluateArguments(model_name_or_path=[model], eval_rows=4, zero_stage=3, **generating))
    elif script == "throughput":
        throughput.run(ThroughputArguments(model_name_or_path=model, rounds=1, **generating))
    else:
        args, lines = ChatArguments(path=model, max_new_tokens=6), iter(["Once upon a time"])
        chat.Chat([chat.load(model, args)], args).talk(lambda: next(lines, "/quit"))


def check_script(script: str, folder: str) -> None:
    with recorded_coverage() as coverages:
        run_script(script, folder)
    assert coverages
    for coverage in coverages:
        assert (coverage.containers, coverage.fallback_reason) == FUSED, coverage


SLOW = [
    pytest.param(script, marks=pytest.mark.slow)
    for script in ("grpo", "agent", "distill", "sft", "dpo", "pairs", "evaluate", "chat")
]


@pytest.mark.parametrize("script", ["ppo", "throughput", *SLOW])
def test_every_script_runs_fused(ranks, tmp_path, script):
    ranks.run(check_script, script, str(make_small_models(Path(tmp_path))))
