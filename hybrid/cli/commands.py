"""The commands of `hybrid/__main__.py`, which explains their flags."""

import json
import re
import signal
import threading
import warnings
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import psutil
import torch
import transformers
import typer
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from peft import PeftModel
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel

from hybrid.cli.doctor import OK, PROBLEM, WARNING, Finding, findings, size_text
from hybrid.config import HybridEngineConfig, RolloutConfig, load_config, read_blocks
from hybrid.inference.engine import init_inference
from hybrid.runtime.redaction import redacted
from hybrid.serving.openai_server import check_address, openai_server
from hybrid.training.offline_plan import OfflinePlan, Training, offline_plan

DEFAULT_MODEL_LEN = 4096
BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
COLOURS = {OK: "green", WARNING: "yellow", PROBLEM: "red"}
UNITS = {"": 1, "B": 1, **{f"{prefix}B": 1000**n for n, prefix in enumerate("KMGT", 1)}}
UNITS |= {f"{prefix}IB": 1024**n for n, prefix in enumerate("KMGT", 1)}


def doctor(
    model: str,
    zero: int | None,
    tp: int | None,
    lora: int,
    ranks: int,
    dtype: str,
    batch_size: int,
    prompt_length: int,
    max_new_tokens: int,
    config: str,
    strict: bool,
    json_file: str,
) -> None:
    """Check this machine, and with a model whether it runs fused and fits. Exits with 1 if there is a problem."""
    settings = valid_settings(config, zero, tp, prompt_length + max_new_tokens)
    if json_file:
        require_writable(json_file)
    results, offline = list(findings()), None
    if model:
        try:
            device = get_accelerator().device_name()
            if not ranks:
                ranks, too_many = ranks_here(settings)
                results += too_many
            memory = device_memory_here(device, ranks)
            training = Training(ranks, settings.zero_stage, lora, getattr(torch, dtype), device)
            offline = plan_of_model(model, settings, training, batch_size, prompt_length + max_new_tokens, memory)
            results += about_model(model, offline, memory)
        except ValueError as error:
            results.append(Finding(model, PROBLEM, str(error)))
    failed = any(finding.status == PROBLEM or (strict and finding.status == WARNING) for finding in results)
    results = [Finding(**redacted(asdict(finding))) for finding in results]
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


def plan(
    model: str,
    ranks: int,
    zero: int | None,
    tp: int | None,
    lora: int,
    load_in_4bit: bool,
    load_in_8bit: bool,
    dtype: str,
    device: str,
    device_memory: str,
    batch_size: int,
    prompt_length: int,
    max_new_tokens: int,
    config: str,
) -> None:
    """Print the memory of each way to hold weights. Exits with 1 if nothing fits into `device_memory`."""
    memory = bytes_of(device_memory) if device_memory else None
    tokens = prompt_length + max_new_tokens
    settings = valid_settings(config, zero, tp, tokens)
    try:
        bits = 4 if load_in_4bit else 8 * load_in_8bit
        training = Training(ranks, settings.zero_stage, lora, getattr(torch, dtype), device, bits)
        offline = plan_of_model(model, settings, training, batch_size, tokens, memory)
    except ValueError as error:
        fail(str(error))
    print_plan(offline)
    raise typer.Exit(int(memory is not None and offline.chosen is None))


def serve(
    model: str,
    host: str,
    port: int,
    api_key: str,
    model_name: str,
    dtype: str,
    max_model_len: int | None,
    max_num_seqs: int,
    lora_modules: list[str] | None,
) -> None:
    """Serve a model to OpenAI's clients until it is interrupted."""
    try:
        check_address(host, api_key or None)
        adapters = adapter_paths(lora_modules or [])
        config = configuration(model)
        context = getattr(config, "max_position_embeddings", None) or DEFAULT_MODEL_LEN
        length = max_model_len or min(context, DEFAULT_MODEL_LEN)
        tokenizer = AutoTokenizer.from_pretrained(model)
        weights = getattr(torch, dtype)
        module = with_adapters(AutoModelForCausalLM.from_pretrained(model, dtype=weights), adapters)
        engine = init_inference(module, dtype=weights, kernel_inject=True, max_out_tokens=length)
        name = model_name or model
        with (
            engine.serve(max_num_seqs) as server,
            openai_server(server, tokenizer, host, port, api_key or None, model_name=name) as endpoint,
        ):
            stopped = threading.Event()
            for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background jobs ignore SIGINT by default
                signal.signal(number, lambda *_: stopped.set())
            typer.echo(f"{name} at {endpoint.base_url}; Ctrl-C ends it")
            stopped.wait()
    except (OSError, ValueError, NotImplementedError, ImportError) as error:
        fail(str(error))


def adapter_paths(lora_modules: list[str]) -> dict[str, str]:
    """Return the paths of adapters by name, given as NAME=PATH each. Raises ValueError for another text."""
    paths = {}
    for given in lora_modules:
        name, _, path = given.partition("=")
        if not name or not path:
            raise ValueError(f"--lora-modules: {given!r} given; it must be NAME=PATH of an adapter")
        paths[name] = path
    return paths


def with_adapters(model: PreTrainedModel, paths: dict[str, str]) -> torch.nn.Module:
    """Return the model with adapters, by name, none of them active."""
    adapted: PeftModel | None = None
    for name, path in paths.items():
        if adapted is None:
            adapted = PeftModel.from_pretrained(model, path, adapter_name=name)
        else:
            adapted.load_adapter(path, name)
    if adapted is None:
        return model
    adapted.base_model.disable_adapter_layers()
    return adapted


class Settings(NamedTuple):
    """Of an engine that is planned."""

    hybrid_engine: HybridEngineConfig
    rollout: RolloutConfig
    zero_stage: int


def read_settings(config: str, zero: int | None, tp: int | None, tokens: int) -> Settings:
    """Return the settings of a file; flags that are given override it.  tokens: of the longest sequence.

    Raises ValueError if the file is not there or is wrong.
    """
    content = load_config(config) if config else {}
    given, _ = read_blocks(content)
    blocks = {**content.get("hybrid_engine", {}), "enabled": True}
    blocks["max_out_tokens"] = max(given.max_out_tokens if "max_out_tokens" in blocks else 0, tokens)
    if tp is not None:
        blocks["inference_tp_size"] = tp
    hybrid_engine, rollout = read_blocks({**content, "hybrid_engine": blocks})
    for key in BATCH_SIZES:
        size = content.get(key, "auto")
        if size != "auto" and not (type(size) is int and size > 0):
            raise ValueError(f'{key}: {size!r} given; it must be a whole number above 0, or "auto"')
    stage = zero_stage(content.get("zero_optimization", {}))
    return Settings(hybrid_engine, rollout, stage if zero is None else zero)


def zero_stage(block: Any) -> int:
    """Return the stage in DeepSpeed's block `zero_optimization`; 3 if it has none.

    Raises ValueError for a value that DeepSpeed refuses.
    """
    if not isinstance(block, dict):
        raise ValueError(f"zero_optimization: {block!r} given; it must be a dictionary of settings")
    try:
        return int(DeepSpeedZeroConfig(**{"stage": 3, **block}).stage)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, ("zero_optimization", *first["loc"])))
        raise ValueError(f"{key}: {first['input']!r} given; {first['msg']}") from error


def valid_settings(config: str, zero: int | None, tp: int | None, tokens: int) -> Settings:
    """Return the settings of `read_settings`; ends the command if they are wrong."""
    try:
        return read_settings(config, zero, tp, tokens)
    except ValueError as error:
        fail(str(error))


def require_writable(path: str) -> None:
    """End the command if a file cannot be written."""
    try:
        with open(path, "a"):
            pass
    except OSError as error:
        fail(f"--json {path!r}: {error.strerror}; give the path of a file in a directory that exists")


def ranks_here(settings: Settings) -> tuple[int, list[Finding]]:
    """Return the default of --ranks: one for each GPU, at least `inference_tp_size`; a warning if it is more than
    GPUs."""
    gpus, tp = torch.cuda.device_count(), settings.hybrid_engine.inference_tp_size
    ranks = max(gpus, 1 if tp == "auto" else tp)
    if not 0 < gpus < ranks:
        return ranks, []
    detail = f"{gpus} GPUs are here, and inference_tp_size={tp} needs {ranks} ranks: the plan is for {ranks}"
    return ranks, [Finding("ranks", WARNING, detail, "run on several machines (docs/launchers.md), or a smaller --tp")]


def plan_of_model(
    model: str, settings: Settings, training: Training, rows: int, tokens: int, device_memory: int | None
) -> OfflinePlan:
    """Return the plan of an engine.  rows, tokens: as for `offline_plan`.  Raises ValueError for what the flags have
    wrong."""
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
    """Return the configuration of a model. Raises ValueError if there is none, or none that transformers knows."""
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
    except Exception as error:  # transformers reads the file without checking types
        raise ValueError(f"{model}: its config.json is wrong ({type(error).__name__}: {error})") from error


def bytes_of(text: str) -> int:
    """Return the number of bytes that text such as 80GiB, 24GB or 1000000 stands for."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", text, re.ASCII)
    if match is None or match[2].upper() not in UNITS:
        fail(f"--device-memory {text!r} is no size; give a number with a unit, such as 80GiB or 24GB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def device_memory_here(device: str, ranks: int) -> int:
    """Free bytes that a rank has on this machine: of the fullest GPU, or its share of the host's memory."""
    if device == "cpu":
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
    """Return what "auto" settings select, as the rest of a sentence."""
    counts = f"{offline.num_seqs} of rollout.max_num_seqs={offline.max_num_seqs}"
    return f"takes: {offline.chosen}, which decodes {counts} sequences of max_out_tokens at once"


def as_dict(offline: OfflinePlan) -> dict[str, Any]:
    """Return a plan for JSON, in bytes."""
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
    """Return text that rich prints as it is."""
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
    typer.echo(f"error: {redacted(' '.join(message.split()))}", err=True)
    raise typer.Exit(2)
