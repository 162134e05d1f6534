"""A script's way from its command line to its end: one line and status 2 where what was given does not fit."""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rlhf_examples.common.arguments import Arguments, parse_arguments
from rlhf_examples.common.ranks import end_ranks, is_first, preparing, start_ranks

USAGE_ERROR = 2  # exit status, as argparse's
WAIT_S = 30.0  # in which rank 0 comes to its error too, and the launcher ends the others


def run_command(kind: type[Arguments], run: Callable[[Arguments], Any], show: Callable | None = None) -> None:
    """`run` with the command line's arguments, on the launcher's ranks.

    show: called on rank 0 with the arguments and what `run` gave.
    """
    with input_errors_reported():
        args = parse_arguments(kind)
        start_ranks()
        found = run(args)
    if show is not None and is_first():
        show(args, found)
    end_ranks()


@contextmanager
def input_errors_reported() -> Iterator[None]:
    """Inside the block, until the first engine is built, a ValueError or OSError ends the process with status 2 and
    without a traceback, after one line of rank 0's. With the logging level of `rlhf_examples` at DEBUG the traceback is
    printed too.

    A rank that is alone with its error, so that no launcher ends it because of rank 0, prints its line itself.
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
            # No cleaning up: other ranks may be waiting for this one.
            sys.stdout.flush()
            os._exit(USAGE_ERROR)


def one_line(error: Exception) -> str:
    """What an error says, without line ends."""
    return " ".join(str(error).split()) or type(error).__name__
