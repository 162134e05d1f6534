"""Checkpoints of a run, written atomically: a kill at any moment leaves a loadable one."""

import json
import random
import shutil
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import hybrid
from rlhf_examples.common.files import write_atomically
from rlhf_examples.common.reshard import Piece, pieces_of, reshard

LATEST, PREFIX = "latest", "iteration-"


class Stateful(Protocol):
    """State that is saved in addition to engines, on each rank: controllers, averages, the position in the data.

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
        """
        name = f"{PREFIX}{iteration:06d}"
        unfinished = self.directory / f"{name}.unfinished"
        if dist.get_rank() == 0:
            for leftover in self.directory.glob("*.unfinished"):
                shutil.rmtree(leftover)
            unfinished.mkdir(parents=True)
        dist.barrier()
        for engine_name, engine in self.engines.items():
            engine.save_checkpoint(str(unfinished), tag=engine_name, save_latest=False, exclude_frozen_parameters=True)
        rank_state = {
            "random": random_states(),
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
            "pieces": {name: pieces_of(engine) for name, engine in self.engines.items()},
        }
        torch.save(rank_state, unfinished / f"rank{dist.get_rank()}.pt")
        dist.barrier()
        if dist.get_rank() == 0:
            run_info = {"iteration": iteration, "world_size": dist.get_world_size(), "zero_stages": self._zero_stages()}
            (unfinished / "run.json").write_text(json.dumps(run_info))
            shutil.rmtree(self.directory / name, ignore_errors=True)
            unfinished.rename(self.directory / name)
            write_atomically(self.directory / LATEST, name)
            self._prune(iteration, best)
        dist.barrier()

    def _prune(self, iteration: int, best: int) -> None:
        """Delete all but the latest `keep_last` checkpoints up to `iteration`, and that of `best`.

        Later ones stay: they belong to a run from which this one resumed at an earlier iteration.
        """
        checkpoints = {int(path.name.removeprefix(PREFIX)): path for path in self.directory.glob(f"{PREFIX}*[0-9]")}
        for number in sorted(number for number in checkpoints if number <= iteration)[: -self.keep_last]:
            if number != best:
                shutil.rmtree(checkpoints[number])

    def load_latest(self) -> int:
        """Restore the latest checkpoint on every rank; returns its iteration, or 0 without a checkpoint.

        Another number of ranks may have saved it. Raises ValueError if it was saved with other parts or ZeRO stages.
        """
        if not (self.directory / LATEST).is_file():
            return 0
        return self._load((self.directory / LATEST).read_text())

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
        run_info = json.loads((directory / "run.json").read_text())
        rank, saved_world_size = dist.get_rank(), run_info["world_size"]
        same_world_size = saved_world_size == dist.get_world_size()
        ranks = [rank] if same_world_size else range(saved_world_size)
        saved = [torch.load(directory / f"rank{saved_rank}.pt", mmap=True, weights_only=False) for saved_rank in ranks]
        rank_state = saved[0] if same_world_size else saved[rank % saved_world_size]
        if missing := sorted(self.parts.keys() - rank_state["parts"].keys()):
            raise ValueError(
                f"resume: {directory} has no state of {', '.join(missing)}; give the settings that the run began with, "
                "or start a new run"
            )
        if run_info["zero_stages"] != self._zero_stages():
            raise ValueError(
                f"resume: {directory} was saved under ZeRO {run_info['zero_stages']}, and this run has "
                f"{self._zero_stages()}; give the stages that the run began with"
            )
        for name, engine in self.engines.items():
            if same_world_size or not engine.zero_optimization():  # without ZeRO every rank holds everything
                engine.load_checkpoint(str(directory), tag=name, custom_load_fn=load_trained)
            else:
                self._load_resharded(engine, directory / name, [state["pieces"][name] for state in saved])
        for name, part in self.parts.items():
            if same_world_size or not hasattr(part, "load_state_dicts"):
                part.load_state_dict(rank_state["parts"][name])
            else:
                part.load_state_dicts([state["parts"][name] for state in saved])
        restore(rank_state["random"])
        return run_info["iteration"]

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
        engine.load_checkpoint(str(target), tag=tag.name, custom_load_fn=load_trained)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(target)


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
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": get_accelerator().get_rng_state(),
    }


def restore(states: dict[str, Any]) -> None:
    """Set the generators to `random_states`."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    get_accelerator().set_rng_state(states["device"])
