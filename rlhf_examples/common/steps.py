"""The steps of a pipeline and the arguments of each."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from rlhf_examples.common.arguments import (
    AgentArguments,
    DistillArguments,
    DPOArguments,
    EvaluateArguments,
    GRPOArguments,
    PairsArguments,
    PipelineArguments,
    PPOArguments,
    RewardModelArguments,
    RewardServerArguments,
    SFTArguments,
    ThroughputArguments,
)
from rlhf_examples.common.files import AVERAGE, CHECKPOINTS, COMPLETIONS, DONE, MODEL, PAIRS, SAMPLES
from rlhf_examples.common.parsing import ScriptArguments, arguments_of, require_key, split_command_line
from rlhf_examples.rewards import SERVER

SCRIPTS: dict[str, type[ScriptArguments]] = {
    "sft": SFTArguments,
    "reward_model": RewardModelArguments,
    "dpo": DPOArguments,
    "ppo": PPOArguments,
    "grpo": GRPOArguments,
    "agent": AgentArguments,
    "distill": DistillArguments,
    "pairs": PairsArguments,
    "evaluate": EvaluateArguments,
    "throughput": ThroughputArguments,
}
STEP = "step:"  # prefix of a path in another step's directory
OUTPUTS = (MODEL, AVERAGE, PAIRS, COMPLETIONS, SAMPLES, CHECKPOINTS)  # in a step's directory


def read_pipeline(kind: type[PipelineArguments]) -> PipelineArguments:
    """The pipeline's arguments from the command line. Every step's inputs are checked, as far as they are not written
    by an earlier step. Raises ValueError, with the step's name, for one that does not exist.
    """
    args = parse(*split_command_line())
    for name in args.servers:
        with errors_of(f"servers.{name}"):
            arguments_of_server(name, args).require_inputs()
    for name in steps_to_run(args):
        with errors_of(f"steps.{name}"):
            arguments_of_step(name, args).require_inputs(args.output_dir)
    return args


def steps_to_run(args: PipelineArguments) -> list[str]:
    """The steps that a resumed pipeline has not finished."""
    return [name for name in args.steps if args.overwrite or not Path(args.output_dir, name, DONE).is_file()]


@contextmanager
def errors_of(setting: str) -> Iterator[None]:
    """Inside the block a ValueError's message gets the setting's name in front, unless it has it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(str(error) if str(error).startswith(setting) else f"{setting}: {error}") from error


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
    with errors_of(f"steps.{name}"):
        require_key(script, list(SCRIPTS))
        kind = SCRIPTS[script]
        names = {field.name for field in fields(kind)}
        common = {**args.common, "seed": args.seed}
        settings = {key: value for key, value in common.items() if key in names} | step_settings
        run_settings = {"output_dir": f"{args.output_dir}/{name}", "resume": args.resume}
        settings |= {key: value for key, value in run_settings.items() if key in names}
        return arguments_of(kind, {key: resolve_paths(value, name, args) for key, value in settings.items()})


def arguments_of_server(name: str, args: PipelineArguments) -> RewardServerArguments:
    """The settings of a reward server; its port is a free one unless given.

    Raises ValueError, with the server's name, if a setting does not fit.
    """
    with errors_of(f"servers.{name}"):
        return arguments_of(RewardServerArguments, {"port": 0, **args.servers[name]})


def resolve_paths(value: Any, step: str, args: PipelineArguments) -> Any:
    """A setting of `step` with `step:NAME/PATH` replaced by the path in that step's directory.

    Raises ValueError if it names an unknown step or server, a step that does not run before, or nothing that a step
    writes.
    """
    if isinstance(value, list):
        return [resolve_paths(item, step, args) for item in value]
    if isinstance(value, str) and value.startswith(SERVER):
        require_server(value, args)
    if not (isinstance(value, str) and value.startswith(STEP)):
        return value
    steps, (writer, _, path) = list(args.steps), value[len(STEP) :].partition("/")
    require_key(writer, steps)
    if steps.index(writer) >= steps.index(step):
        raise ValueError(f"{value!r} given; a step has the files of the steps before it, and {writer!r} runs later")
    require_key(path.partition("/")[0], list(OUTPUTS), value)
    return f"{args.output_dir}/{writer}/{path}"


def require_server(reward: str, args: PipelineArguments) -> None:
    """Raises ValueError if `server:NAME` names an unknown server."""
    if not args.servers:
        raise ValueError(
            f"{reward!r} given, and the file defines no servers; define it under `servers`, with its reward"
        )
    require_key(reward[len(SERVER) :], list(args.servers))
