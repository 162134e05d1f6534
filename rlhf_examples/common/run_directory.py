"""A run's directory: what a run writes there, and that no other run's is in it."""

import json
import shutil
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf_examples.common.arguments import PipelineArguments, RunArguments
from rlhf_examples.common.files import (
    AVERAGE,
    BEFORE,
    CHECKPOINTS,
    COMPLETIONS,
    DONE,
    METRICS,
    MODEL,
    PAIRS,
    SAMPLES,
    SETTINGS,
)
from rlhf_examples.common.ranks import from_all_ranks, is_first, rendezvous

WRITTEN = (CHECKPOINTS, MODEL, AVERAGE, BEFORE, METRICS, SAMPLES, COMPLETIONS, SETTINGS, DONE, PAIRS)
WRITTEN += ("tensorboard", "report.html")
# What a run shows, keeps and waits for, but not what it finds.
WITHOUT_EFFECT = {"output_dir", "resume", "overwrite", "print_every", "report_to", "save_every", "keep_last"}
WITHOUT_EFFECT |= {"num_samples", "peak_tflops", "reward_timeout_s", "reward_retries", "data_output_path"}
RESULTS = (MODEL, AVERAGE, METRICS, DONE, PAIRS)  # what a run is kept for, beside its checkpoints


def begin_run(args: RunArguments | PipelineArguments, steps: Iterable[str] = ("",)) -> None:
    """Make sure that a run begins in an `output_dir` that holds no other run's results. Every rank takes part.

    steps: the directories in it that are looked at.  args.resume: what is there is the run that goes on.
    args.overwrite: what another run has written is deleted, and nothing else that lies beside it.
    Raises ValueError on every rank where there is another run and neither is given.
    """
    if args.resume:
        return
    directories = [Path(args.output_dir) / step for step in steps]
    # The first rank alone looks: others would find what it has already written.
    found = [str(path) for directory in directories for path in results_in(directory)] if is_first() else []
    found = from_all_ranks(found)[0]
    if found and not args.overwrite:
        raise ValueError(
            f"output_dir: {args.output_dir!r} holds another run ({', '.join(found[:4])}); give another directory, "
            "--resume true to go on with that run, or --overwrite true to delete it"
        )
    if is_first():
        for directory in directories:
            clear(directory)
    rendezvous()


def require_same_settings(finished: dict[str, Any]) -> None:
    """Make sure that what is kept of finished steps is what their settings would give. Every rank takes part.

    finished: arguments by the step's directory. Raises ValueError on every rank for a step that ran with others, naming
    each; a setting that it did not have yet is none of them.
    """
    words = [different(directory, args) for directory, args in finished.items()] if is_first() else []
    for changed in from_all_ranks(words)[0]:
        if changed:
            raise ValueError(changed)


def different(directory: str, args: Any) -> str:
    """What of a finished step's settings is other than it ran with, as an error says it; empty where nothing is."""
    path = Path(directory) / SETTINGS
    then = json.loads(path.read_text()) if path.is_file() else {}
    now = json.loads(json.dumps(asdict(args)))
    names = [name for name in now if name in then and name not in WITHOUT_EFFECT and then[name] != now[name]]
    changed = "; ".join(f"{name} was {then[name]!r} and is {now[name]!r}" for name in names)
    return changed and (
        f"resume: the step in {directory!r} is finished, and it ran with other settings: {changed}; give it those, "
        "delete that directory to run the step again, give another output_dir, or --overwrite true to run all again"
    )


def results_in(directory: Path) -> list[Path]:
    """What a run has left in `directory` that the next one would delete or mix with its own."""
    checkpoints = sorted((directory / CHECKPOINTS).glob("iteration-*"))[:1]
    results = [directory / name for name in RESULTS]
    return checkpoints + [path for path in results if path.is_dir() or (path.is_file() and path.stat().st_size)]


def clear(directory: Path) -> None:
    """Delete what a run writes."""
    for name in WRITTEN:
        path = directory / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
