"""Checkpoints of a run that a kill at any moment leaves loadable."""

import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from rlhf_examples.models import Models

LATEST = "latest"


def save(models: Models, directory: Path, iteration: int, keep_last: int) -> None:
    """Save both engines and this rank's random states as of the end of `iteration`. Every rank takes part.

    Written under a temporary name; `latest` names it only when it is whole.
    """
    name = f"iteration-{iteration:06d}"
    unfinished = directory / f"{name}.unfinished"
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier()
    models.policy.save_checkpoint(str(unfinished), tag="policy", save_latest=False)
    models.critic.save_checkpoint(str(unfinished), tag="critic", save_latest=False)
    torch.save(random_states(), unfinished / f"random-rank{dist.get_rank()}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        (unfinished / "run.json").write_text(json.dumps({"iteration": iteration, "world_size": dist.get_world_size()}))
        shutil.rmtree(directory / name, ignore_errors=True)
        unfinished.rename(directory / name)
        write_atomically(directory / LATEST, name)
        for old in sorted(directory.glob("iteration-??????"))[:-keep_last]:
            shutil.rmtree(old)
    dist.barrier()


def load_latest(models: Models, directory: Path) -> int:
    """Restore the newest checkpoint on every rank; gives the iteration after which it was saved, 0 where there is none.

    Raises ValueError where it was made by another number of ranks.
    """
    if not (directory / LATEST).is_file():
        return 0
    newest = directory / (directory / LATEST).read_text()
    run = json.loads((newest / "run.json").read_text())
    if run["world_size"] != dist.get_world_size():
        raise ValueError(
            f"resume: {newest} was made by {run['world_size']} ranks, and this run has {dist.get_world_size()}; "
            "start as many"
        )
    models.policy.load_checkpoint(str(newest), tag="policy")
    models.critic.load_checkpoint(str(newest), tag="critic")
    states = torch.load(newest / f"random-rank{dist.get_rank()}.pt", weights_only=False)
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    return run["iteration"]


def random_states() -> dict:
    """Python's, numpy's and torch's generators."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def write_atomically(path: Path, text: str) -> None:
    """Write a file that is either the old one or the new one, whatever happens."""
    temporary = path.with_name(f"{path.name}.unfinished")
    temporary.write_text(text)
    os.replace(temporary, path)
