"""Runs RLHF steps one after the other in one group of ranks: SFT, reward model, PPO, or any others that a file lists.

The demo, on CPUs; DeepSpeed-Chat's three steps for a model of 7B on 8 GPUs:
torchrun --nproc_per_node=2 -m rlhf_examples.pipeline configs/demo.yaml
torchrun --nproc_per_node=8 -m rlhf_examples.pipeline configs/8gpu_7b_lora.yaml --resume true
"""

from rlhf_examples.common.arguments import PipelineArguments
from rlhf_examples.common.command_line import command
from rlhf_examples.common.parsing import DATA, ENVIRONMENT, MODEL, REWARD, ScriptArguments, require_key
from rlhf_examples.common.steps import arguments_of_server, arguments_of_step, errors_of, read_pipeline, steps_to_run

main = command("rlhf_examples.pipeline", PipelineArguments, read_pipeline)
if __name__ == "__main__":
    raise SystemExit(main())  # before the imports below, which take seconds: help and errors come first

import gc
import importlib
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator

import hybrid
from rlhf_examples.common.files import DONE, METRICS, SETTINGS, write_atomically
from rlhf_examples.common.input_errors import startup_phase
from rlhf_examples.common.models import require_model
from rlhf_examples.common.ranks import barrier, is_main_process
from rlhf_examples.common.run_directory import begin_run, require_same_settings
from rlhf_examples.common.scorers import Scorer
from rlhf_examples.common.served_rewards import served_rewards
from rlhf_examples.data.records import load_records
from rlhf_examples.environments import load_environment
from rlhf_examples.report.write import write_report
from rlhf_examples.rewards import SERVER

PIPELINE, SUMMARY = "pipeline.json", "summary.json"


def run(args: PipelineArguments) -> dict[str, float]:
    """Start the reward servers and run every step that is not finished; returns the summary.

    Raises ValueError if an input of any step does not exist, or a finished step ran with other settings.
    """
    require_inputs(args)
    begin_run(args, args.steps)
    directories = {name: Path(args.output_dir) / name for name in args.steps}
    finished = [name for name, directory in directories.items() if (directory / DONE).is_file()]
    require_same_settings({str(directories[name]): arguments_of_step(name, args) for name in finished})
    with served_rewards({name: arguments_of_server(name, args) for name in args.servers}):
        return run_steps(args)


def require_inputs(args: PipelineArguments) -> None:
    """Raises ValueError, with the step's name, for a model, reward, environment or synthetic set that does not exist.

    What an earlier step writes, and a server that is started later, is checked by its step.
    """
    for name in steps_to_run(args):
        step_args: Any = arguments_of_step(name, args)
        with errors_of(f"steps.{name}"):
            for setting, kind, value in step_args.named_inputs():
                if value.startswith((f"{args.output_dir}/", SERVER)):
                    continue
                if kind == MODEL:
                    require_model(setting, value, step_args.attn_implementation)
                elif kind == REWARD:
                    Scorer.check(value)
                elif kind == ENVIRONMENT:
                    load_environment(value)
                elif value.startswith("synthetic:") and kind == DATA:
                    load_records(value)


def run_steps(args: PipelineArguments) -> dict[str, float]:
    """`run`, with the reward servers running."""
    directory, metrics_by_step = Path(args.output_dir), {}
    if is_main_process():
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / PIPELINE, json.dumps(hybrid.redacted(asdict(args)), indent=1))
    barrier()
    for number, name in enumerate(args.steps, start=1):
        done = directory / name / DONE
        if not done.is_file():
            start = time.perf_counter()
            if is_main_process():
                print(f"step {number} of {len(args.steps)}: {name}", flush=True)
            step_args = arguments_of_step(name, args)
            with startup_phase():
                metrics = run_script(args.steps[name].get("script", name), step_args)
            gc.collect()  # a destroyed engine is in reference cycles
            get_accelerator().empty_cache()
            if is_main_process():
                seconds = time.perf_counter() - start
                done.parent.mkdir(exist_ok=True)
                if not (settings_file := done.with_name(SETTINGS)).is_file():  # scripts without a log do not write it
                    write_atomically(settings_file, json.dumps(hybrid.redacted(asdict(step_args)), indent=1))
                numbers = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
                write_atomically(done, json.dumps({"seconds": seconds, **numbers}, indent=1))
                print(f"step {number} of {len(args.steps)}: {name} took {seconds:.0f} s", flush=True)
            barrier()
        metrics_by_step[name] = json.loads(done.read_text())
    summary = {key: summary_value(metrics_by_step, path) for key, path in args.summary.items()}
    if is_main_process():
        write_atomically(directory / SUMMARY, json.dumps(summary, indent=1))
    return summary


def run_script(script: str, args: ScriptArguments) -> dict[str, Any]:
    """Run a step's script; returns its metrics."""
    module = importlib.import_module(f"rlhf_examples.{script}")
    return getattr(module, "run_step", module.run)(args)


def report(args: PipelineArguments, summary: dict[str, float]) -> None:
    """Print the summary, and write the report if a step has logged metrics."""
    print(json.dumps(summary, indent=1))
    if any(Path(args.output_dir).glob(f"*/{METRICS}")):
        print(f"report: {write_report(Path(args.output_dir))}")


def summary_value(metrics_by_step: dict[str, dict[str, float]], path: str) -> float:
    """The value at STEP/METRIC. Raises ValueError, with the nearest name, if the step has no such metric."""
    step, _, metric = path.partition("/")
    require_key(metric, list(metrics_by_step[step]), f"summary: {step}")
    return metrics_by_step[step][metric]
