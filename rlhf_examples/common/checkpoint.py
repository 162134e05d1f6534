"""Checkpoints of a run, written atomically: a kill at any moment leaves a loadable one."""

import json
import random
import shutil
from collections.abc import Callable, Iterable
from dataclasses import astuple
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import hybrid
from rlhf_examples.common.checkpoint_files import RUN, damage, deepspeed_files, describe, load_tensors, save_tensors
from rlhf_examples.common.files import write_atomically, write_errors_named
from rlhf_examples.common.ranks import gather_objects
from rlhf_examples.common.reshard import Piece, pieces_of, reshard

LATEST, PREFIX = "latest", "iteration-"


class Stateful(Protocol):
    """State that is saved in addition to engines, on each rank: controllers, averages, the position in the data.

    It consists of tensors and plain values (numbers, texts, None, lists, dicts): files are loaded without running code.

    State that differs between ranks also needs `load_state_dicts`, which restores it from the states of another number
    of ranks.
    """

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


class Checkpoints:
    """The checkpoints of a run in `directory`: engines and other parts by name, and every rank's random states.

    The position in the data and the sampling keys are functions of seed and iteration.
    """

    def __init__(
        self,
        directory: Path,
        engines: dict[str, hybrid.HybridEngine],
        parts: dict[str, Stateful | None],
        keep_last: int,
    ):
        self.directory, self.engines, self.keep_last = Path(directory), engines, keep_last
        self.parts = {name: part for name, part in parts.items() if part is not None}

    def save(self, iteration: int, best: int = 0) -> None:
        """Save everything after `iteration`. Every rank takes part.  best: the iteration whose checkpoint is never
        deleted.

        The checkpoint is written under a temporary name; `latest` names it only once it is complete. Frozen weights,
        such as those under a LoRA, are not saved: a resumed run reads them from the original model.
        Raises OSError on every rank if a rank cannot write, with the file and the newest checkpoint that is whole.
        """
        name = f"{PREFIX}{iteration:06d}"
        unfinished = self.directory / f"{name}.unfinished"
        self._on_first_rank(lambda: self._begin(unfinished))
        for engine_name, engine in self.engines.items():
            with deepspeed_files(engine) as errors:
                engine.save_checkpoint(
                    str(unfinished), tag=engine_name, save_latest=False, exclude_frozen_parameters=True
                )
            self._require_written(errors)
        rank_state = {
            "random": random_states(),
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
            "pieces": {name: [astuple(piece) for piece in pieces_of(engine)] for name, engine in self.engines.items()},
        }
        self._require_written(errors_of(lambda: save_tensors(rank_state, unfinished / f"rank{dist.get_rank()}.pt")))
        self._on_first_rank(lambda: self._finish(unfinished, name, iteration, best))

    def _begin(self, unfinished: Path) -> None:
        """Make the directory of a new checkpoint; what earlier saves have left unfinished is deleted."""
        with write_errors_named(unfinished):
            for leftover in self.directory.glob("*.unfinished"):
                shutil.rmtree(leftover)
            for directory in [unfinished, *(unfinished / name for name in self.engines)]:
                directory.mkdir(parents=True)

    def _finish(self, unfinished: Path, name: str, iteration: int, best: int) -> None:
        """Give a complete checkpoint its name, and delete old ones."""
        run_info = {"iteration": iteration, "world_size": dist.get_world_size(), "zero_stages": self._zero_stages()}
        describe(unfinished, run_info)
        shutil.rmtree(self.directory / name, ignore_errors=True)
        with write_errors_named(self.directory / name):
            unfinished.rename(self.directory / name)
        write_atomically(self.directory / LATEST, name)
        self._prune(iteration, best)

    def _on_first_rank(self, write: Callable[[], None]) -> None:
        """Call `write` on rank 0 while the others wait. Raises as `save` does."""
        self._require_written(errors_of(write) if dist.get_rank() == 0 else [])

    def _require_written(self, errors: list[OSError]) -> None:
        """Raise OSError on every rank if a rank has an error; the unfinished checkpoint, which fills the disk, goes.
        Every rank takes part.
        """
        of_ranks = [str(error) for of_rank in gather_objects(errors) for error in of_rank]
        if not of_ranks:
            return
        whole = gather_objects(newest(self._whole()))[0]
        if dist.get_rank() == 0:
            for unfinished in self.directory.glob("*.unfinished"):
                shutil.rmtree(unfinished, ignore_errors=True)
        rest = f"the newest whole checkpoint is {whole}; make room, and go on from it with --resume true"
        raise OSError(f"checkpoint: {of_ranks[0]}; {rest if whole else 'there is no whole checkpoint yet'}")

    def _whole(self) -> Iterable[tuple[int, Path]]:
        """The checkpoints that can be loaded, by iteration."""
        return ((number, path) for number, path in self._checkpoints().items() if not damage(path))

    def _checkpoints(self) -> dict[int, Path]:
        """All checkpoints by iteration."""
        return {int(path.name.removeprefix(PREFIX)): path for path in self.directory.glob(f"{PREFIX}*[0-9]")}

    def _prune(self, iteration: int, best: int) -> None:
        """Delete all but the latest `keep_last` checkpoints up to `iteration`, and that of `best`.

        Later ones stay: they belong to a run from which this one resumed at an earlier iteration.
        """
        checkpoints = self._checkpoints()
        for number in sorted(number for number in checkpoints if number <= iteration)[: -self.keep_last]:
            if number != best:
                shutil.rmtree(checkpoints[number])

    def load_latest(self) -> int:
        """Restore the latest checkpoint on every rank; returns its iteration, or 0 without a checkpoint.

        Another number of ranks may have saved it. Raises ValueError if it was saved with other parts or ZeRO stages, or
        is damaged.
        """
        if not (self.directory / LATEST).is_file():
            return 0
        return self._load((self.directory / LATEST).read_text().strip())

    def whole_iterations(self) -> list[int]:
        """The iterations whose checkpoints can be loaded, in order."""
        return sorted(number for number, _ in self._whole())

    def load(self, iteration: int) -> None:
        """Restore the checkpoint of an iteration on every rank. Raises ValueError if it does not exist."""
        name = f"{PREFIX}{iteration:06d}"
        if not (self.directory / name).is_dir():
            raise ValueError(
                f"checkpoint: {self.directory / name}, which was kept, does not exist any more; was it deleted?"
            )
        self._load(name)

    def _load(self, name: str) -> int:
        directory = self.directory / name
        self._require_whole(directory)
        run_info = json.loads((directory / RUN).read_text())
        rank, saved_world_size = dist.get_rank(), run_info["world_size"]
        same_world_size = saved_world_size == dist.get_world_size()
        ranks = [rank] if same_world_size else range(saved_world_size)
        saved = [load_tensors(directory / f"rank{saved_rank}.pt") for saved_rank in ranks]
        rank_state = saved[0] if same_world_size else saved[rank % saved_world_size]
        if missing := sorted(self.parts.keys() - rank_state["parts"].keys()):
            raise ValueError(
                f"resume: {directory} has no state of {', '.join(missing)}; give the settings that the run began with, "
                "or start a new run"
            )
        saved_stages = {name: run_info["zero_stages"].get(name) for name in self.engines}
        if saved_stages != self._zero_stages():
            raise ValueError(
                f"resume: {directory} was saved under ZeRO {run_info['zero_stages']}, and this run has "
                f"{self._zero_stages()}; give the stages that the run began with"
            )
        for name, engine in self.engines.items():
            if same_world_size or not engine.zero_optimization():  # without ZeRO every rank holds everything
                load_engine(engine, directory, name)
            else:
                pieces = [[Piece(*fields) for fields in state["pieces"][name]] for state in saved]
                self._load_resharded(engine, directory / name, pieces)
        for name, part in self.parts.items():
            if same_world_size or not hasattr(part, "load_state_dicts"):
                part.load_state_dict(rank_state["parts"][name])
            else:
                part.load_state_dicts([state["parts"][name] for state in saved])
        restore(rank_state["random"])
        return run_info["iteration"]

    def _require_whole(self, directory: Path) -> None:
        """Raise ValueError on every rank if a checkpoint is damaged, with the file and the newest one that is whole."""
        problem = damage(directory) if dist.get_rank() == 0 else ""
        if problem:
            advice = "no other checkpoint is whole: begin again with --overwrite true"
            if whole := newest(self._whole()):
                go_on = f"echo {whole.name} > {self.directory / LATEST}"
                advice = f"the newest whole checkpoint is {whole}; to go on from it: {go_on}"
            problem = f"resume: {problem}; {advice}"
        if problem := gather_objects(problem)[0]:
            raise ValueError(problem)

    def _zero_stages(self) -> dict[str, int]:
        return {name: int(engine.zero_optimization_stage()) for name, engine in self.engines.items()}

    def _load_resharded(self, engine: hybrid.HybridEngine, tag: Path, pieces: list[list[Piece]]) -> None:
        """Restore an engine that another number of ranks has saved, with their `pieces`."""
        target = self.directory / "resharded.unfinished"
        if dist.get_rank() == 0:
            shutil.rmtree(target, ignore_errors=True)
        dist.barrier()
        reshard(engine, tag, pieces, target)
        dist.barrier()
        load_engine(engine, target, tag.name)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(target)


def newest(checkpoints: Iterable[tuple[int, Path]]) -> Path | None:
    """The last checkpoint by iteration, if there is any."""
    return max(checkpoints, default=(0, None))[1]


def errors_of(write: Callable[[], None]) -> list[OSError]:
    """The error of a call that cannot write."""
    try:
        write()
    except OSError as error:
        return [error]
    return []


def load_engine(engine: hybrid.HybridEngine, directory: Path, tag: str) -> None:
    """Restore an engine from the checkpoint `tag` in `directory`, without running code from its files."""
    with deepspeed_files(engine):
        engine.load_checkpoint(str(directory), tag=tag, custom_load_fn=load_trained)


def load_trained(src: dict[str, torch.Tensor], dst: torch.nn.Module) -> None:
    """Load a checkpoint's tensors into a module; frozen weights may be missing.

    Raises ValueError if the checkpoint lacks a trained weight, or has one that the module lacks.
    """
    missing, unexpected = dst.load_state_dict(src, strict=False)
    trained = {name for name, parameter in dst.named_parameters() if parameter.requires_grad}
    if mismatched := sorted(trained.intersection(missing)) + unexpected:
        raise ValueError(
            f"resume: the checkpoint is of another model: only one of them has {', '.join(mismatched[:4])}; give the "
            "settings that the run began with"
        )


def random_states() -> dict[str, Any]:
    """The states of Python's, numpy's, torch's and the device's random generators."""
    return {
        "python": random.getstate(),
        "numpy": [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
        "torch": torch.get_rng_state(),
        "device": get_accelerator().get_rng_state(),
    }


def restore(states: dict[str, Any]) -> None:
    """Set the generators to `random_states`."""
    random.setstate(states["python"])
    np.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(states["torch"])
    get_accelerator().set_rng_state(states["device"])
