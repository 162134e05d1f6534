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
from typing import Annotated, NoReturn

import psutil
import torch
import transformers
import typer
from deepspeed.accelerator import get_accelerator
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, PretrainedConfig

from hybrid.config import load_config, read_blocks
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
Zero = Annotated[int, typer.Option("--zero", min=0, max=3, help="ZeRO's stage.")]
TpSize = Annotated[int, typer.Option("--tp", min=1, help="inference_tp_size: ranks that share a copy of the weights.")]
Lora = Annotated[int, typer.Option("--lora", min=0, help="Rank of a LoRA on all linear layers; 0: all weights train.")]
Ranks = Annotated[int, typer.Option("--ranks", min=1, help="Ranks of the run, of all machines.")]
Rows = Annotated[int, typer.Option("--batch-size", min=1, help="Sequences of a rank's rollout.")]
Prompt = Annotated[int, typer.Option("--prompt-length", min=1, help="Tokens.")]
NewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Tokens.")]
Config = Annotated[str, typer.Option("--config", help="DeepSpeed's JSON file; its stage and blocks are used.")]


@app.command()
def doctor(
    model: Annotated[str, typer.Argument(help="Also: does this model run fused here, and does it fit?")] = "",
    zero: Zero = 3,
    tp: TpSize = 1,
    lora: Lora = 0,
    ranks: Annotated[int, typer.Option("--ranks", min=0, help="Default: the GPUs here, or --tp if more.")] = 0,
    dtype: Dtype = Dtype.bfloat16,
    batch_size: Rows = 64,
    prompt_length: Prompt = 512,
    max_new_tokens: NewTokens = 512,
    config: Config = "",
    strict: Annotated[bool, typer.Option("--strict", help="Warnings count as problems.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine, and with MODEL whether it runs fused and fits. Exits with 1 if there is a problem."""
    results, plan = list(findings()), None
    if model:
        device = Device(get_accelerator().device_name())
        ranks = ranks or max(torch.cuda.device_count(), tp)
        memory = device_memory_here(device, ranks)
        training = Training(ranks, zero, lora, getattr(torch, dtype.value), device.value)
        plan = plan_or_exit(model, config, training, tp, batch_size, prompt_length, max_new_tokens, memory)
        results += about_model(model, plan, memory)
    failed = any(finding.status == PROBLEM or (strict and finding.status == WARNING) for finding in results)
    if as_json:
        print(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in results]}, indent=1))
    else:
        print_findings(results)
        if plan is not None:
            print_plan(plan)
    raise typer.Exit(int(failed))


@app.command()
def plan(
    model: Model,
    ranks: Ranks = 1,
    zero: Zero = 3,
    tp: TpSize = 1,
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
    training = Training(ranks, zero, lora, getattr(torch, dtype.value), device.value)
    made = plan_or_exit(model, config, training, tp, batch_size, prompt_length, max_new_tokens, memory)
    print_plan(made)
    raise typer.Exit(int(memory is not None and made.chosen is None))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def report(context: typer.Context) -> None:
    """Write a run's report.html: `hybrid report RUN`. Takes what `python -m rlhf_examples.report` takes."""
    if importlib.util.find_spec("rlhf_examples") is None or importlib.util.find_spec("matplotlib") is None:
        fail("the report needs the examples' packages: pip install 'hybrid-engine[examples]'")
    sys.argv = ["hybrid report", *context.args]
    runpy.run_module("rlhf_examples.report", run_name="__main__", alter_sys=False)


def plan_or_exit(
    model: str,
    config: str,
    training: Training,
    tp: int,
    rows: int,
    prompt_length: int,
    new_tokens: int,
    device_memory: int | None,
) -> OfflinePlan:
    """The plan of the flags; what they have wrong is printed, and the process exits with 2."""
    try:
        settings = load_config(config) if config else {}
        blocks = settings.get("hybrid_engine", {})
        blocks = {"inference_tp_size": tp, **blocks, "enabled": True}
        blocks["max_out_tokens"] = max(blocks.get("max_out_tokens", 0), prompt_length + new_tokens)
        hybrid_engine, rollout = read_blocks({**settings, "hybrid_engine": blocks})
        stage = settings.get("zero_optimization", {}).get("stage", training.zero_stage)
        if hybrid_engine.inference_tp_size != "auto" and training.ranks % hybrid_engine.inference_tp_size:
            raise ValueError(f"--tp {hybrid_engine.inference_tp_size} does not divide --ranks {training.ranks}")
        training = Training(training.ranks, stage, training.lora_rank, training.dtype, training.device)
        if "auto" in (hybrid_engine.inference_tp_size, hybrid_engine.pin_parameters) and device_memory is None:
            raise ValueError('settings are "auto": give --device-memory, such as 80GiB')
        warnings.filterwarnings("ignore", category=FutureWarning)  # transformers' and PEFT's, of each other
        return offline_plan(
            configuration(model), training, hybrid_engine, rollout, rows, prompt_length + new_tokens, device_memory
        )
    except ValueError as error:
        fail(str(error))


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
    """Bytes that a rank has on this machine: of the smallest GPU, or its share of the host's free memory."""
    if device is Device.cpu:
        return psutil.virtual_memory().available // ranks
    return min(torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count()))


def about_model(model: str, made: OfflinePlan, memory: int) -> Iterable[Finding]:
    """Whether a model runs fused, and whether it fits."""
    if made.fallback_reason:
        remedy = "docs/settings.md lists the families that run fused"
        yield Finding(model, WARNING, f"rollouts run in the model's own layers: {made.fallback_reason}", remedy)
    else:
        yield Finding(model, OK, "rollouts run fused")
    have = f"a rank has {size_text(memory)}, training takes {size_text(made.training_bytes)} without activations"
    if made.chosen is None:
        yield Finding("memory", PROBLEM, f"nothing fits: {have}", "more ranks, --lora, or a smaller model")
    else:
        yield Finding("memory", OK, f"fits {made.chosen}: {have}")


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


def print_plan(made: OfflinePlan) -> None:
    """Print a plan's table, and what "auto" would take."""
    print(
        f"\nTraining holds {size_text(made.training_bytes)} on a rank: weights, gradients, AdamW; without activations."
    )
    runs = f"in the model's own layers: {made.fallback_reason}" if made.fallback_reason else "fused"
    print(f"Rollouts run {runs}.\n\n{made.plan}")
    if made.chosen is not None:
        counts = f"{made.num_seqs} of rollout.max_num_seqs={made.max_num_seqs}"
        print(f'\n"auto" takes: {made.chosen}, which decodes {counts} sequences of max_out_tokens at once.')
    elif made.plan.limit is not None:
        print('\n"auto" takes nothing: not one sequence fits.')


def fail(message: str) -> NoReturn:
    """Print an error and exit with 2."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    app()
