"""Runs a script from its command line to its end."""

import importlib
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from rlhf_examples.common.input_errors import input_errors_reported
from rlhf_examples.common.parsing import Arguments, parse_arguments
from rlhf_examples.common.run_lock import lock_directory


def command(
    script: str, kind: type[Arguments], parse: Callable[[type[Arguments]], Arguments] = parse_arguments
) -> Callable[[], None]:
    """A script's `main()`: `run_command` with these arguments."""
    return partial(run_command, script, kind, parse)


def run_command(
    script: str, kind: type[Arguments], parse: Callable[[type[Arguments]], Arguments] = parse_arguments
) -> None:
    """Read the command line, import the script, and run it on the launcher's ranks. Invalid input ends the process with
    a one-line error and status 2.

    script: the module that has `run(args)`; if it has `report(args, result)`, rank 0 calls that at the end. It is
        imported after the command line has been read, because torch, transformers and DeepSpeed take seconds.
    """
    with input_errors_reported():
        args = checked_arguments(kind, parse)
        # PEFT imports bitsandbytes where it is installed, which warns of a kernel from the hub for CPUs.
        logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
        module = importlib.import_module(script)
        ranks: Any = importlib.import_module("rlhf_examples.common.ranks")
        ranks.start_ranks()
        result = module.run(args)
    if hasattr(module, "report") and ranks.is_main_process():
        module.report(args, result)
    ranks.end_ranks()


def checked_arguments(
    kind: type[Arguments], parse: Callable[[type[Arguments]], Arguments] = parse_arguments
) -> Arguments:
    """The arguments of the command line, with inputs that are there and output directories that are this run's alone.

    Raises ValueError if that is not so. It imports nothing heavy.
    """
    args = parse(kind)
    args.require_inputs()
    if os.environ.get("RANK", "0") == "0":
        for directory in args.output_directories():
            lock_directory(directory)
    return args
