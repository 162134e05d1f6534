"""The command `hybrid`: `hybrid doctor`, `plan`, `serve`, `report` and `replay`. Also `python -m hybrid`.

hybrid doctor
hybrid doctor Qwen/Qwen3-8B --zero 3 --tp 2
hybrid plan Qwen/Qwen3-8B --ranks 8 --lora 16 --device-memory 80GiB
hybrid serve Qwen/Qwen3-8B --port 8000
hybrid report runs/demo
hybrid replay runs/demo/sums --step 3 --row 5 --sample 0
"""

import importlib.util
import logging
import runpy
import sys
from enum import Enum
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Tools around hybrid-engine.")


class Dtype(str, Enum):
    """Of the weights."""

    bfloat16 = "bfloat16"
    float32 = "float32"


class Device(str, Enum):
    """Of the ranks."""

    cuda = "cuda"
    cpu = "cpu"


Model = Annotated[str, typer.Argument(help="A model's directory, its config.json, or its name on the hub.")]
TRAINING, ROLLOUT = "Training", "Rollout"
KEY_HELP = "That clients must give; needed for another host than loopback."
LENGTH_HELP = "Tokens of prompt and completion. Default: the model's context, at most 4096."
NAME_HELP = "The `model` of requests. Default: MODEL."
ADAPTER_HELP = "NAME=PATH of an adapter of PEFT, whose NAME is the `model` of its requests. Repeat it for more."
RANKS_HELP = "Default: the GPUs here, or --tp if more."
LORA_HELP = "Rank of a LoRA on all linear layers; 0: all weights train."
BITS_HELP = "The LoRA's base is quantized by bitsandbytes."
MEMORY_HELP = "Of one rank's device, such as 80GiB."
ZERO_HELP = "ZeRO's stage. Default: --config's, else 3."
TP_HELP = "inference_tp_size: ranks that share a copy of the weights. Default: --config's, else 1."
Zero = Annotated[
    int | None, typer.Option("--zero", min=0, max=3, help=ZERO_HELP, show_default=False, rich_help_panel=TRAINING)
]
TpSize = Annotated[int | None, typer.Option("--tp", min=1, help=TP_HELP, show_default=False, rich_help_panel=ROLLOUT)]
Lora = Annotated[int, typer.Option("--lora", min=0, help=LORA_HELP, rich_help_panel=TRAINING)]
Ranks = Annotated[
    int, typer.Option("--ranks", min=1, help="Ranks of the run, of all machines.", rich_help_panel=TRAINING)
]
Rows = Annotated[
    int, typer.Option("--batch-size", min=1, help="Sequences of a rank's rollout.", rich_help_panel=ROLLOUT)
]
Prompt = Annotated[int, typer.Option("--prompt-length", min=1, help="Tokens.", rich_help_panel=ROLLOUT)]
NewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Tokens.", rich_help_panel=ROLLOUT)]
WeightDtype = Annotated[Dtype, typer.Option(help="Of the weights.", rich_help_panel=TRAINING)]
Config = Annotated[str, typer.Option("--config", help="DeepSpeed's JSON file: its ZeRO stage and our blocks.")]


@app.command()
def doctor(
    model: Annotated[str, typer.Argument(help="Also: does this model run fused here, and does it fit?")] = "",
    zero: Zero = None,
    tp: TpSize = None,
    lora: Lora = 0,
    ranks: Annotated[int, typer.Option("--ranks", min=0, help=RANKS_HELP, rich_help_panel=TRAINING)] = 0,
    dtype: WeightDtype = Dtype.bfloat16,
    batch_size: Rows = 64,
    prompt_length: Prompt = 512,
    max_new_tokens: NewTokens = 512,
    config: Config = "",
    strict: Annotated[bool, typer.Option("--strict", help="Warnings count as problems.")] = False,
    json_file: Annotated[str, typer.Option("--json", metavar="FILE", help="Also write all that to a JSON file.")] = "",
) -> None:
    """Check this machine, and with MODEL whether it runs fused and fits. Exits with 1 if there is a problem."""
    run("doctor", **locals())


@app.command()
def plan(
    model: Model,
    ranks: Ranks = 1,
    zero: Zero = None,
    tp: TpSize = None,
    lora: Lora = 0,
    load_in_4bit: Annotated[bool, typer.Option("--load-in-4bit", help=BITS_HELP, rich_help_panel=TRAINING)] = False,
    load_in_8bit: Annotated[bool, typer.Option("--load-in-8bit", help=BITS_HELP, rich_help_panel=TRAINING)] = False,
    dtype: WeightDtype = Dtype.bfloat16,
    device: Annotated[Device, typer.Option(rich_help_panel=TRAINING)] = Device.cuda,
    device_memory: Annotated[str, typer.Option(help=MEMORY_HELP, rich_help_panel=TRAINING)] = "",
    batch_size: Rows = 64,
    prompt_length: Prompt = 512,
    max_new_tokens: NewTokens = 512,
    config: Config = "",
) -> None:
    """Print the memory of each way to hold weights, for ranks and devices that need not be here, from the
    configuration alone.

    Exits with 1 if nothing fits into --device-memory.
    """
    run("plan", **locals())


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="A model's directory, or its name on the hub.")],
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key: Annotated[str, typer.Option(envvar="HYBRID_API_KEY", help=KEY_HELP, show_default=False)] = "",
    model_name: Annotated[str, typer.Option("--name", help=NAME_HELP, show_default=False)] = "",
    dtype: Annotated[Dtype, typer.Option(help="Of the weights.")] = Dtype.bfloat16,
    max_model_len: Annotated[int | None, typer.Option(min=2, help=LENGTH_HELP, show_default=False)] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences that are decoded at once.")] = 64,
    lora_modules: Annotated[list[str] | None, typer.Option(help=ADAPTER_HELP, show_default=False)] = None,
) -> None:
    """Serve a model to OpenAI's clients, for evaluation and chat, until it is interrupted."""
    run("serve", **locals())


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def report(context: typer.Context) -> None:
    """Write a run's report.html: `hybrid report RUN`. Takes what `python -m rlhf_examples.report` takes."""
    run_example("report", context.args, needs="matplotlib")


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def replay(context: typer.Context) -> None:
    """Make a run's completions again, to the bit on CPUs: `hybrid replay RUN --step S`. Takes what `python -m
    rlhf_examples.replay` takes."""
    run_example("replay", context.args, needs="datasets")


def run_example(name: str, arguments: list[str], needs: str) -> None:
    """Run a module of `rlhf_examples` as the command of its name.  needs: a package of the extra `examples`."""
    if importlib.util.find_spec("rlhf_examples") is None or importlib.util.find_spec(needs) is None:
        typer.echo(
            f"error: the {name} needs the examples' packages: pip install '.[examples]' in the checkout", err=True
        )
        raise typer.Exit(2)
    sys.argv = [f"hybrid {name}", *arguments]
    runpy.run_module(f"rlhf_examples.{name}", run_name="__main__", alter_sys=False)


def run(command: str, **arguments: Any) -> None:
    """Run a function of `hybrid.cli.commands`, imported after the flags have been read: its imports take seconds."""
    # PEFT imports bitsandbytes where it is installed, which warns of a kernel from the hub that no command needs.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    getattr(importlib.import_module("hybrid.cli.commands"), command)(**arguments)


if __name__ == "__main__":
    app()
