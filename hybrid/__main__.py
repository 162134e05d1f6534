"""The command `hybrid`: `hybrid doctor`, `hybrid plan`, `hybrid report`. Also `python -m hybrid`.

hybrid doctor
hybrid doctor Qwen/Qwen3-8B --zero 3 --tp 2
hybrid plan Qwen/Qwen3-8B --ranks 8 --lora 16 --device-memory 80GiB
hybrid report runs/demo
"""

import importlib.util
import json
import re
import runpy
import sys
import warnings
from collections.abc import Iterable
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import psutil
import torch
import transformers
import typer
from deepspeed.accelerator import get_accelerator
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, PretrainedConfig

from hybrid.config import HybridEngineConfig, RolloutConfig, load_config, read_blocks
from hybrid.doctor import OK, PROBLEM, WARNING, Finding, findings, size_text
from hybrid.offline_plan import OfflinePlan, Training, offline_plan

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Tools around hybrid-engine.")
COLOURS = {OK: "green", WARNING: "yellow", PROBLEM: "red"}
UNITS = {"": 1, "B": 1, **{f"{prefix}B": 1000**n for n, prefix in enumerate("KMGT", 1)}}
UNITS |= {f"{prefix}IB": 1024**n for n, prefix in enumerate("KMGT", 1)}


class Dtype(str, Enum):
    """Of the weights."""

    bfloat16 = "bfloat16"
    float32 = "float32"


class Device(str, Enum):
    """Of the ranks."""

    cuda = "cuda"
    cpu = "cpu"


Model = Annotated[str, typer.Argument(help="A model's directory, its config.json, or its name on the hub.")]
ZERO_HELP = "ZeRO's stage. Default: --config's, else 3."
TP_HELP = "inference_tp_size: ranks that share a copy of the weights. Default: --config's, else 1."
Zero = Annotated[int | None, typer.Option("--zero", min=0, max=3, help=ZERO_HELP, show_default=False)]
TpSize = Annotated[int | None, typer.Option("--tp", min=1, help=TP_HELP, show_default=False)]
Lora = Annotated[int, typer.Option("--lora", min=0, help="Rank of a LoRA on all linear layers; 0: all weights train.")]
Ranks = Annotated[int, typer.Option("--ranks", min=1, help="Ranks of the run, of all machines.")]
Rows = Annotated[int, typer.Option("--batch-size", min=1, help="Sequences of a rank's rollout.")]
Prompt = Annotated[int, typer.Option("--prompt-length", min=1, help="Tokens.")]
NewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Tokens.")]
Config = Annotated[str, typer.Option("--config", help="DeepSpeed's JSON file: its ZeRO stage and our blocks.")]


@app.command()
def doctor(
    model: Annotated[str, typer.Argument(help="Also: does this model run fused here, and does it fit?")] = "",
    zero: Zero = None,
    tp: TpSize = None,
    lora: Lora = 0,
    ranks: Annotated[int, typer.Option("--ranks", min=0, help="Default: the GPUs here, or --tp if more.")] = 0,
    dtype: Dtype = Dtype.bfloat16,
    batch_size: Rows = 64,
    prompt_length: Prompt = 512,
    max_new_tokens: NewTokens = 512,
    config: Config = "",
    strict: Annotated[bool, typer.Option("--strict", help="Warnings count as problems.")] = False,
    json_file: Annotated[str, typer.Option("--json", metavar="FILE", help="Also write all that to a JSON file.")] = "",
) -> None:
    """Check this machine, and with MODEL whether it runs fused and fits. Exits with 1 if there is a problem."""
    results, offline = list(findings()), None
    if model:
        try:
            settings = read_settings(config, zero, tp, prompt_length + max_new_tokens)
            device = Device(get_accelerator().device_name())
            if not ranks:
                ranks, too_many = ranks_here(settings)
                results += too_many
            memory = device_memory_here(device, ranks)
            training = Training(ranks, settings.zero_stage, lora, getattr(torch, dtype.value), device.value)
            offline = plan_of_model(model, settings, training, batch_size, prompt_length + max_new_tokens, memory)
            results += about_model(model, offline, memory)
        except ValueError as error:
            results.append(Finding(model, PROBLEM, str(error)))
    failed = any(finding.status == PROBLEM or (strict and finding.status == WARNING) for finding in results)
    print_findings(results)
    if offline is not None:
        print_plan(offline)
    if json_file:
        content = {
            "ok": not failed,
            "findings": [asdict(finding) for finding in results],
            "plan": offline and as_dict(offline),
        }
        Path(json_file).write_text(json.dumps(content, indent=1))
    raise typer.Exit(int(failed))


@app.command()
def plan(
    model: Model,
    ranks: Ranks = 1,
    zero: Zero = None,
    tp: TpSize = None,
    lora: Lora = 0,
    dtype: Dtype = Dtype.bfloat16,
    device: Device = Device.cuda,
    device_memory: Annotated[str, typer.Option(help="Of one rank's device, such as 80GiB.")] = "",
    batch_size: Rows = 64,
    prompt_length: Prompt = 512,
    max_new_tokens: NewTokens = 512,
    config: Config = "",
) -> None:
    """Memory of each way to hold weights, for ranks and devices that need not be here, from the configuration alone.

    Exits with 1 if nothing fits into --device-memory.
    """
    memory = bytes_of(device_memory) if device_memory else None
    tokens = prompt_length + max_new_tokens
    try:
        settings = read_settings(config, zero, tp, tokens)
        training = Training(ranks, settings.zero_stage, lora, getattr(torch, dtype.value), device.value)
        offline = plan_of_model(model, settings, training, batch_size, tokens, memory)
    except ValueError as error:
        fail(str(error))
    print_plan(offline)
    raise typer.Exit(int(memory is not None and offline.chosen is None))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def report(context: typer.Context) -> None:
    """Write a run's report.html: `hybrid report RUN`. Takes what `python -m rlhf_examples.report` takes."""
    if importlib.util.find_spec("rlhf_examples") is None or importlib.util.find_spec("matplotlib") is None:
        fail("the report needs the examples' packages: pip install '.[examples]' in the checkout")
    sys.argv = ["hybrid report", *context.args]
    runpy.run_module("rlhf_examples.report", run_name="__main__", alter_sys=False)


class Settings(NamedTuple):
    """Of an engine that is planned."""

    hybrid_engine: HybridEngineConfig
    rollout: RolloutConfig
    zero_stage: int


def read_settings(config: str, zero: int | None, tp: int | None, tokens: int) -> Settings:
    """The settings of a file; flags that are given override it.  tokens: of the longest sequence.

    Raises ValueError if the file is not there or is wrong.
    """
    content = load_config(config) if config else {}
    blocks = {**content.get("hybrid_engine", {}), "enabled": True}
    blocks["max_out_tokens"] = max(blocks.get("max_out_tokens", 0), tokens)
    if tp is not None:
        blocks["inference_tp_size"] = tp
    hybrid_engine, rollout = read_blocks({**content, "hybrid_engine": blocks})
    stage = content.get("zero_optimization", {}).get("stage", 3)
    return Settings(hybrid_engine, rollout, stage if zero is None else zero)


def ranks_here(settings: Settings) -> tuple[int, list[Finding]]:
    """The default of --ranks: one for each GPU, at least `inference_tp_size`; a warning if it is more than GPUs."""
    gpus, tp = torch.cuda.device_count(), settings.hybrid_engine.inference_tp_size
    ranks = max(gpus, 1 if tp == "auto" else tp)
    if not 0 < gpus < ranks:
        return ranks, []
    detail = f"{gpus} GPUs are here, and inference_tp_size={tp} needs {ranks} ranks: the plan is for {ranks}"
    return ranks, [Finding("ranks", WARNING, detail, "run on several machines (docs/launchers.md), or a smaller --tp")]


def plan_of_model(
    model: str, settings: Settings, training: Training, rows: int, tokens: int, device_memory: int | None
) -> OfflinePlan:
    """The plan of an engine.  rows, tokens: as for `offline_plan`.  Raises ValueError for what the flags have wrong."""
    tp = settings.hybrid_engine.inference_tp_size
    if tp != "auto" and training.ranks % tp:
        raise ValueError(f"inference_tp_size={tp} does not divide {training.ranks} ranks; change --tp or --ranks")
    if "auto" in (tp, settings.hybrid_engine.pin_parameters) and device_memory is None:
        raise ValueError('settings are "auto": give --device-memory, such as 80GiB')
    warnings.filterwarnings("ignore", category=FutureWarning)  # transformers' and PEFT's, of each other
    return offline_plan(
        configuration(model), training, settings.hybrid_engine, settings.rollout, rows, tokens, device_memory
    )


def configuration(model: str) -> PretrainedConfig:
    """The configuration of a model. Raises ValueError if there is none, or none that transformers knows."""
    path = Path(model)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"{model}: the directory has no config.json; give the directory of a Hugging Face model")
    transformers.logging.set_verbosity_error()
    try:
        return AutoConfig.from_pretrained(path.parent if path.name == "config.json" else model)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{model}: no configuration of a model is there, and the hub gave none; give a directory, or a name that "
            f"the hub has ({str(error).strip().splitlines()[0]})"
        ) from None


def bytes_of(text: str) -> int:
    """The number of bytes that text such as 80GiB, 24GB or 1000000 stands for."""
    match = re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in UNITS or match[1].count(".") > 1:
        fail(f"--device-memory {text!r} is no size; give a number with a unit, such as 80GiB or 24GB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def device_memory_here(device: Device, ranks: int) -> int:
    """Free bytes that a rank has on this machine: of the fullest GPU, or its share of the host's memory."""
    if device is Device.cpu:
        return psutil.virtual_memory().available // ranks
    return min(torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count()))


def about_model(model: str, offline: OfflinePlan, memory: int) -> Iterable[Finding]:
    """Whether a model runs fused, and whether it fits as the settings hold it."""
    if offline.fallback_reason:
        remedy = "docs/settings.md lists the families that run fused"
        yield Finding(model, WARNING, f"rollouts run in the model's own layers: {offline.fallback_reason}", remedy)
    else:
        yield Finding(model, OK, "rollouts run fused")
    mode, fits = offline.plan.in_use, offline.plan.fits(offline.plan.in_use)
    training, rollout = size_text(offline.training_bytes), size_text(offline.plan.needs[mode].total)
    detail = (
        f"{mode} {'fits' if fits else 'does not fit'}: a rank has {size_text(memory)} free, training takes {training} "
        f"without activations, a rollout {rollout}"
    )
    if fits:
        yield Finding("memory", OK, detail)
    elif offline.chosen is None:
        yield Finding("memory", PROBLEM, f"{detail}; nor does any other way", "more ranks, --lora, or a smaller model")
    else:
        remedy = f'inference_tp_size and pin_parameters "auto", which {auto_text(offline)}; or a smaller --batch-size'
        yield Finding("memory", PROBLEM, detail, remedy)


def auto_text(offline: OfflinePlan) -> str:
    """What "auto" does, as the rest of a sentence."""
    counts = f"{offline.num_seqs} of rollout.max_num_seqs={offline.max_num_seqs}"
    return f"takes: {offline.chosen}, which decodes {counts} sequences of max_out_tokens at once"


def as_dict(offline: OfflinePlan) -> dict[str, Any]:
    """A plan for JSON, in bytes."""
    plan = offline.plan
    modes = {
        str(mode): {**asdict(need), "total": need.total, "fits": plan.fits(mode)} for mode, need in plan.needs.items()
    }
    return {
        "training_bytes": offline.training_bytes,
        "inference_limit_bytes": plan.limit,
        "modes": modes,
        "in_use": str(plan.in_use),
        "auto": None if offline.chosen is None else str(offline.chosen),
    }


def print_findings(results: list[Finding]) -> None:
    """Print a line for each finding, and under it its remedy."""
    table = Table(box=None, show_header=False, padding=(0, 1))
    for finding in results:
        colour = COLOURS[finding.status]
        remedy = f"\n[bold]do:[/bold] {escaped(finding.remedy)}" if finding.remedy else ""
        table.add_row(f"[{colour}]{finding.status}[/{colour}]", finding.subject, escaped(finding.detail) + remedy)
    Console(soft_wrap=False).print(table)


def escaped(text: str) -> str:
    """Text that rich prints as it is."""
    return text.replace("[", "\\[")


def print_plan(offline: OfflinePlan) -> None:
    """Print a plan's table, and what "auto" would take."""
    training = size_text(offline.training_bytes)
    print(f"\nTraining holds {training} on a rank: weights, gradients, AdamW; without activations.")
    runs = f"in the model's own layers: {offline.fallback_reason}" if offline.fallback_reason else "fused"
    print(f"Rollouts run {runs}.\n\n{offline.plan}")
    if offline.chosen is not None:
        print(f'\n"auto" {auto_text(offline)}.')
    elif offline.plan.limit is not None:
        print('\n"auto" takes nothing: not one sequence fits.')


def fail(message: str) -> NoReturn:
    """Print an error and exit with 2."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    app()
