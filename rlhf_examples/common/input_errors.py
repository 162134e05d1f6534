"""Invalid input of a script: until its first engine is built, an error is one line and exit status 2."""

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

USAGE_ERROR = 2  # exit status, as argparse's
WAIT_S = 30.0  # time for rank 0 to report the error too, after which the launcher ends the other ranks


@dataclass
class StartupPhase:
    """Reading arguments, tokenizers and records.  is_over: whether an engine has been built since."""

    is_over: bool = False


_phases: list[StartupPhase] = []


@contextmanager
def startup_phase() -> Iterator[StartupPhase]:
    """Inside the block, until `end_startup` is called, errors count as invalid input."""
    phase = StartupPhase()
    _phases.append(phase)
    try:
        yield phase
    except Exception:
        for around in _phases:  # the pipeline's too: its earlier steps have ended their own phases
            around.is_over = phase.is_over
        raise
    finally:
        _phases.pop()


def end_startup() -> None:
    """Call this before an engine is built: from here on an error is not invalid input."""
    for phase in _phases:
        phase.is_over = True


@contextmanager
def input_errors_reported() -> Iterator[None]:
    """Inside the block, until the first engine is built, a ValueError or OSError ends the process with status 2 and one
    line from rank 0 instead of a traceback. If the logging level of `rlhf_examples` is DEBUG, the traceback is
    printed too.

    If only another rank fails, so that no launcher ends it because of rank 0, that rank prints the line itself.
    """
    with startup_phase() as phase:
        try:
            yield
        except (ValueError, OSError) as error:
            if phase.is_over:
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
