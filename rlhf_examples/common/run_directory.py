"""The files that a run writes in its directory, and the check that no other run's results are there."""

import json
import shutil
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hybrid
from rlhf_examples.common.arguments import PipelineArguments, RunArguments
from rlhf_examples.common.files import (
    AVERAGE,
    BEFORE,
    CHECKPOINTS,
    COMPLETIONS,
    DONE,
    ENGINE_LOG,
    METRICS,
    MODEL,
    PAIRS,
    ROLLOUTS,
    SAMPLES,
    SETTINGS,
)
from rlhf_examples.common.ranks import barrier, gather_objects, is_main_process

WRITTEN: tuple[str, ...] = (CHECKPOINTS, MODEL, AVERAGE, BEFORE, METRICS, SAMPLES, COMPLETIONS, SETTINGS, DONE, PAIRS)
WRITTEN += (ENGINE_LOG, ROLLOUTS, "tensorboard", "report.html")
# Settings of output, checkpoints and timeouts, which do not change a run's results.
WITHOUT_EFFECT = {"output_dir", "resume", "overwrite", "print_every", "report_to", "save_every", "keep_last"}
WITHOUT_EFFECT |= {"num_samples", "peak_tflops", "reward_timeout_s", "reward_retries", "data_output_path"}
WITHOUT_EFFECT |= {"log_rollouts"}
RESULTS = (MODEL, AVERAGE, METRICS, DONE, PAIRS)  # results that a new run would delete, in addition to checkpoints


def begin_run(args: RunArguments | PipelineArguments, steps: Iterable[str] = ("",)) -> None:
    """Make sure that `output_dir` holds no other run's results. Every rank takes part.

    steps: the subdirectories to check.  args.resume: the results there belong to this run.
    args.overwrite: delete the files that another run has written, and no others.
    Raises ValueError on every rank if there are other results and neither is given.
    """
    if args.resume:
        return
    directories = [Path(args.output_dir) / step for step in steps]
    # Only the first rank looks: the others could see files that it has already written.
    results = [str(path) for directory in directories for path in results_in(directory)] if is_main_process() else []
    results = gather_objects(results)[0]
    if results and not args.overwrite:
        raise ValueError(
            f"output_dir: {args.output_dir!r} contains another run ({', '.join(results[:4])}); give another directory, "
            "--resume true to continue that run, or --overwrite true to delete it"
        )
    if is_main_process():
        for directory in directories:
            delete_run_files(directory)
    barrier()


def require_same_settings(finished: dict[str, Any]) -> None:
    """Check that finished steps ran with the settings of this run. Every rank takes part.

    finished: arguments by the step's directory. Raises ValueError on every rank for a step with other settings, naming
        each; a setting that did not exist yet when the step ran is ignored.
    """
    errors = [settings_difference(directory, args) for directory, args in finished.items()] if is_main_process() else []
    for error in gather_objects(errors)[0]:
        if error:
            raise ValueError(error)


def settings_difference(directory: str, args: Any) -> str:
    """The error message for a finished step that ran with other settings than `args`; empty if they are the same."""
    path = Path(directory) / SETTINGS
    old = json.loads(path.read_text()) if path.is_file() else {}
    new = json.loads(json.dumps(hybrid.redacted(asdict(args))))
    names = [name for name in new if name in old and name not in WITHOUT_EFFECT and old[name] != new[name]]
    changed = "; ".join(f"{name} was {old[name]!r} and is {new[name]!r}" for name in names)
    return changed and (
        f"resume: the finished step in {directory!r} ran with other settings: {changed}; restore them, delete that "
        "directory to run the step again, give another output_dir, or --overwrite true to run every step again"
    )


def results_in(directory: Path) -> list[Path]:
    """Results in `directory` that a new run would delete or mix with its own."""
    checkpoints = sorted((directory / CHECKPOINTS).glob("iteration-*"))[:1]
    results = [directory / name for name in RESULTS]
    return checkpoints + [path for path in results if path.is_dir() or (path.is_file() and path.stat().st_size)]


def delete_run_files(directory: Path) -> None:
    """Delete the files that a run writes."""
    for name in WRITTEN:
        path = directory / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
