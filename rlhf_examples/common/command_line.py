"""Runs a script from its command line to its end; invalid input ends it with a one-line error and status 2."""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rlhf_examples.common.arguments import Arguments, parse_arguments
from rlhf_examples.common.ranks import end_ranks, is_main_process, preparing, start_ranks

USAGE_ERROR = 2  # exit status, as argparse's
WAIT_S = 30.0  # time for rank 0 to report the error too, after which the launcher ends the other ranks


def run_command(kind: type[Arguments], run: Callable[[Arguments], Any], show: Callable | None = None) -> None:
    """Call `run` with the arguments of the command line, on the launcher's ranks.

    show: called on rank 0 with the arguments and the result of `run`.
    """
    with input_errors_reported():
        args = parse_arguments(kind)
        start_ranks()
        result = run(args)
    if show is not None and is_main_process():
        show(args, result)
    end_ranks()


@contextmanager
def input_errors_reported() -> Iterator[None]:
    """Inside the block, until the first engine is built, a ValueError or OSError ends the process with status 2 and one
    line from rank 0 instead of a traceback. If the logging level of `rlhf_examples` is DEBUG, the traceback is
    printed too.

    If only another rank fails, so that no launcher ends it because of rank 0, that rank prints the line itself.
    """
    with preparing() as preparation:
        try:
            yield
        except (ValueError, OSError) as error:
            if preparation.is_over:
                raise
            logging.getLogger("rlhf_examples").debug("the error", exc_info=True)
            rank = int(os.environ.get("RANK", "0"))
            if rank:
                time.sleep(WAIT_S)
            print(f"error{f' on rank {rank}' * bool(rank)}: {one_line(error)}", file=sys.stderr, flush=True)
            # No clean-up: it could block on other ranks that wait for this one.
            sys.stdout.flush()
            os._exit(USAGE_ERROR)


def one_line(error: Exception) -> str:
    """An error's message without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__
