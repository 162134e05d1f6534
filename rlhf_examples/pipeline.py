"""Runs RLHF steps one after the other in one group of ranks: SFT, reward model, PPO, or any others that a file lists.

The demo, on CPUs; DeepSpeed-Chat's three steps for a model of 7B on 8 GPUs:
torchrun --nproc_per_node=2 -m rlhf_examples.pipeline configs/demo.yaml
torchrun --nproc_per_node=8 -m rlhf_examples.pipeline configs/8gpu_7b_lora.yaml --resume true
"""

import gc
import json
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator

from rlhf_examples import agent, dpo, grpo, pairs, ppo, reward_model, sft, throughput
from rlhf_examples.common.arguments import (
    AgentArguments,
    DPOArguments,
    GRPOArguments,
    PairsArguments,
    PipelineArguments,
    PPOArguments,
    RewardModelArguments,
    RewardServerArguments,
    SFTArguments,
    ThroughputArguments,
    arguments_of,
    require_key,
    split_command_line,
)
from rlhf_examples.common.command_line import input_errors_reported
from rlhf_examples.common.files import DONE, SETTINGS, write_atomically
from rlhf_examples.common.ranks import barrier, end_ranks, is_main_process, preparing, start_ranks
from rlhf_examples.common.run_directory import begin_run, require_same_settings
from rlhf_examples.common.served_rewards import served_rewards
from rlhf_examples.report.write import write_report
from rlhf_examples.rewards import SERVER

SCRIPTS: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "sft": (SFTArguments, sft.run),
    "reward_model": (RewardModelArguments, reward_model.run),
    "dpo": (DPOArguments, dpo.run),
    "ppo": (PPOArguments, ppo.run),
    "grpo": (GRPOArguments, grpo.run),
    "agent": (AgentArguments, agent.run),
    "pairs": (PairsArguments, pairs.run),
    "throughput": (ThroughputArguments, throughput.run),
}
STEP = "step:"  # prefix of a path in another step's directory
PIPELINE, SUMMARY = "pipeline.json", "summary.json"


def main() -> None:
    """Run the steps, print the summary and write the report."""
    with input_errors_reported():
        args = parse(*split_command_line())
        start_ranks()
        summary = run(args)
    if is_main_process():
        print(json.dumps(summary, indent=1))
        print(f"report: {write_report(Path(args.output_dir))}")
    end_ranks()


def parse(settings: dict[str, Any], flags: list[str]) -> PipelineArguments:
    """The pipeline's arguments. Every step's arguments are checked here, before the first step starts.

    Raises ValueError for a setting that does not fit, with the name of its step, server or summary key.
    """
    tables = {name: settings.pop(name, {}) for name in ("common", "steps", "summary", "servers")}
    if "seed" in tables["common"]:  # a --seed flag overrides it
        settings = {"seed": tables["common"]["seed"], **settings}
    args = arguments_of(PipelineArguments, settings, flags)
    args.common, args.steps, args.summary, args.servers = tables.values()
    if not args.steps:
        raise ValueError("steps: none given; give at least one, with its script and settings")
    for name in args.servers:
        arguments_of_server(name, args)
    for name in args.steps:
        arguments_of_step(name, args)
    for key, path in args.summary.items():
        require_key(path.partition("/")[0], list(args.steps), f"summary.{key}")
    return args


def arguments_of_step(name: str, args: PipelineArguments) -> Any:
    """The arguments of a step's script: the `common` settings that the script has, overridden by the step's own.

    Raises ValueError, with the step's name, if a setting does not fit.
    """
    step_settings = dict(args.steps[name])
    script = step_settings.pop("script", name)
    try:
        require_key(script, list(SCRIPTS))
        kind, _ = SCRIPTS[script]
        names = {field.name for field in fields(kind)}
        common = {**args.common, "seed": args.seed}
        settings = {key: value for key, value in common.items() if key in names} | step_settings
        run_settings = {"output_dir": f"{args.output_dir}/{name}", "resume": args.resume}
        settings |= {key: value for key, value in run_settings.items() if key in names}
        return arguments_of(kind, {key: resolve_paths(value, args) for key, value in settings.items()})
    except ValueError as error:
        raise ValueError(f"steps.{name}: {error}") from error


def arguments_of_server(name: str, args: PipelineArguments) -> RewardServerArguments:
    """The settings of a reward server; its port is a free one unless given.

    Raises ValueError, with the server's name, if a setting does not fit.
    """
    try:
        return arguments_of(RewardServerArguments, {"port": 0, **args.servers[name]})
    except ValueError as error:
        raise ValueError(f"servers.{name}: {error}") from error


def resolve_paths(value: Any, args: PipelineArguments) -> Any:
    """A setting with `step:NAME/PATH` replaced by the path in that step's directory.

    Raises ValueError if `step:NAME` or `server:NAME` names an unknown step or server.
    """
    if isinstance(value, list):
        return [resolve_paths(item, args) for item in value]
    if isinstance(value, str) and value.startswith(SERVER):
        require_server(value, args)
    if not (isinstance(value, str) and value.startswith(STEP)):
        return value
    require_key(value[len(STEP) :].partition("/")[0], list(args.steps))
    return f"{args.output_dir}/{value[len(STEP) :]}"


def require_server(reward: str, args: PipelineArguments) -> None:
    """Raises ValueError if `server:NAME` names an unknown server."""
    if not args.servers:
        raise ValueError(
            f"{reward!r} given, and the file defines no servers; define it under `servers`, with its reward"
        )
    require_key(reward[len(SERVER) :], list(args.servers))


def run(args: PipelineArguments) -> dict[str, float]:
    """Start the reward servers and run every step that is not finished; returns the summary.

    Raises ValueError if a finished step ran with other settings.
    """
    begin_run(args, args.steps)
    directories = {name: Path(args.output_dir) / name for name in args.steps}
    finished = [name for name, directory in directories.items() if (directory / DONE).is_file()]
    require_same_settings({str(directories[name]): arguments_of_step(name, args) for name in finished})
    with served_rewards({name: arguments_of_server(name, args) for name in args.servers}):
        return run_steps(args)


def run_steps(args: PipelineArguments) -> dict[str, float]:
    """`run`, with the reward servers running."""
    directory, metrics_by_step = Path(args.output_dir), {}
    if is_main_process():
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / PIPELINE, json.dumps(asdict(args), indent=1))
    barrier()
    for number, name in enumerate(args.steps, start=1):
        done = directory / name / DONE
        if not done.is_file():
            start = time.perf_counter()
            if is_main_process():
                print(f"step {number} of {len(args.steps)}: {name}", flush=True)
            step_args = arguments_of_step(name, args)
            with preparing():
                metrics = SCRIPTS[args.steps[name].get("script", name)][1](step_args)
            gc.collect()  # a destroyed engine is in reference cycles
            get_accelerator().empty_cache()
            if is_main_process():
                seconds = time.perf_counter() - start
                done.parent.mkdir(exist_ok=True)
                if not (settings_file := done.with_name(SETTINGS)).is_file():  # scripts without a log do not write it
                    write_atomically(settings_file, json.dumps(asdict(step_args), indent=1))
                numbers = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
                write_atomically(done, json.dumps({"seconds": seconds, **numbers}, indent=1))
                print(f"step {number} of {len(args.steps)}: {name} took {seconds:.0f} s", flush=True)
            barrier()
        metrics_by_step[name] = json.loads(done.read_text())
    summary = {key: summary_value(metrics_by_step, path) for key, path in args.summary.items()}
    if is_main_process():
        write_atomically(directory / SUMMARY, json.dumps(summary, indent=1))
    return summary


def summary_value(metrics_by_step: dict[str, dict[str, float]], path: str) -> float:
    """The value at STEP/METRIC. Raises ValueError, with the nearest name, if the step has no such metric."""
    step, _, metric = path.partition("/")
    require_key(metric, list(metrics_by_step[step]), f"summary: {step}")
    return metrics_by_step[step][metric]


if __name__ == "__main__":
    main()
