"""Full disks and damaged checkpoints: every rank raises, with the file and the newest checkpoint that is whole; and no
file that a resumed run reads can run code."""

import errno
import json
import os
import pickle
import resource
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from rlhf_examples.common import checkpoint, checkpoint_files
from rlhf_examples.common.checkpoint import Checkpoints
from rlhf_examples.common.checkpoint_files import files_of, load_tensors
from rlhf_examples.common.files import append, write_atomically
from rlhf_examples.common.ranks import gather_objects
from tests.engines import storage_digest, train_step
from tests.marks import slow_but
from tests.rlhf_examples.common.test_reshard import checkpoints_of
from tests.rlhf_examples.common.test_run_directory import checkpoints_of as counters_of


def raised_on_every_rank(kind: type[Exception], call) -> str:
    """The message that `call` raises on all ranks."""
    message = ""
    try:
        call()
    except kind as error:
        message = str(error)
    messages = gather_objects(message)
    assert len(set(messages)) == 1 and message, messages
    return message


def check_damaged(folder: str) -> None:
    """Each file of the newest checkpoint in turn, cut off or missing, at two ranks under ZeRO-3."""
    directory, first = Path(folder), dist.get_rank() == 0
    engine, _, checkpoints = checkpoints_of(directory, 3, "float32", 0)
    checkpoints.keep_last = 2
    for iteration in (1, 2):
        train_step(engine, iteration)
        checkpoints.save(iteration)
    after_two, newest = storage_digest(engine), directory / "iteration-000002"
    files = gather_objects([path for path in files_of(newest) if path.suffix != ".py"])[0]
    names = sorted(path.name for path in files)
    assert {"run.json", "rank0.pt", "rank1.pt"} <= set(names) and len(files) == 7, names
    for path in files:
        for change in (lambda content: content[: len(content) // 2], None):
            content = path.read_bytes()
            dist.barrier()
            if first:
                path.unlink() if change is None else path.write_bytes(change(content))
            dist.barrier()
            message = raised_on_every_rank(ValueError, checkpoints.load_latest)
            assert message.startswith(f"resume: {path} "), message
            advice = (
                f"checkpoint is {directory}/iteration-000001; to go on from it: echo iteration-000001 > {directory}"
            )
            assert advice in message, message
            if first:
                path.write_bytes(content)
            dist.barrier()
    assert storage_digest(engine) == after_two, "a refused checkpoint changed the weights"
    train_step(engine, 3)
    assert checkpoints.load_latest() == 2 and storage_digest(engine) == after_two
    if first:
        (directory / "latest").write_text("iteration-000001\n")  # as the message says
    dist.barrier()
    assert checkpoints.load_latest() == 1


def test_a_damaged_checkpoint_is_named_with_the_newest_whole_one(ranks, tmp_path):
    ranks.run(check_damaged, str(tmp_path))


def full_disk(*args, **kwargs) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def check_full_disk(folder: str) -> None:
    """One of two ranks cannot write: DeepSpeed's file, ours, a script that DeepSpeed copies, or what ends a save."""
    directory, rank = Path(folder), dist.get_rank()
    engine, _, checkpoints = checkpoints_of(directory, 3, "float32", 0)
    script = patch("deepspeed.runtime.engine.copyfile", full_disk)
    faults = [
        (1, patch.object(engine.checkpoint_engine, "save", full_disk), "optim_states.pt|model_states.pt"),
        (0, patch.object(checkpoint_files.torch, "save", full_disk), "iteration-000002.unfinished/model/"),
        (0, script, "iteration-000002.unfinished"),
        (0, patch.object(Path, "mkdir", full_disk), "iteration-000002.unfinished"),
        (1, patch.object(checkpoint, "save_tensors", lambda _, path: append(Path("/dev/full"), "x")), "/dev/full"),
        (0, patch.object(checkpoint_files.json, "dumps", full_disk), "run.json"),
    ]
    whole = "there is no whole checkpoint yet"
    for at_rank, fault, file in faults:
        if rank == at_rank:
            fault.start()
        message = raised_on_every_rank(OSError, lambda: checkpoints.save(2))
        if rank == at_rank:
            fault.stop()
        assert any(name in message for name in file.split("|")), message
        assert "No space left on device" in message and whole in message, message
        assert not gather_objects(list(directory.glob("*.unfinished")))[0], "what fills the disk stayed"
        if "yet" in whole:
            checkpoints.save(1)
            whole = f"the newest whole checkpoint is {directory}/iteration-000001; make room"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:  # torch's own writer, at a real limit
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000 if rank else soft, hard))
        message = raised_on_every_rank(OSError, lambda: checkpoints.save(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "zero_pp_rank_1_mp_rank_00_" in message and "GB free; the newest whole" in message, message
    train_step(engine)
    saved = storage_digest(engine)
    checkpoints.save(2)
    train_step(engine)
    assert checkpoints.load_latest() == 2 and storage_digest(engine) == saved


def test_a_full_disk_is_an_error_on_every_rank_with_the_files_name(ranks, tmp_path):
    ranks.run(check_full_disk, str(tmp_path))


class Harmful:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def check_loading(folder: str, stage: int) -> None:
    """Every load of a resumed run is of data alone, DeepSpeed's files included."""
    directory = Path(folder)
    engine, _, checkpoints = checkpoints_of(directory, stage, "float32", 0)
    train_step(engine)
    checkpoints.save(1)
    loads, load = [], torch.load

    def recorded(path, **settings):
        loads.append((str(path), settings.get("weights_only")))
        return load(path, **settings)

    with patch.object(torch, "load", recorded):
        assert checkpoints.load_latest() == 1
    assert len(loads) >= 2 and all(weights_only for _, weights_only in loads), loads
    harmful = pickle.dumps(Harmful(directory / "harmed"))
    for path in sorted({path for of_rank in gather_objects(loads) for path, _ in of_rank}):
        if dist.get_rank() == 0:
            Path(path).write_bytes(harmful)
        dist.barrier()
        with pytest.raises(ValueError, match="cannot be read"):
            load_tensors(path)
        dist.barrier()
    assert not (directory / "harmed").exists()


@pytest.mark.parametrize("stage", slow_but([3], [0, 1, 2, 3]))
def test_a_resumed_run_loads_no_code(ranks, tmp_path, stage):
    ranks.run(check_loading, str(tmp_path), stage)


@pytest.mark.usefixtures("alone")
def test_checkpoints_of_other_formats_and_unknown_names_are_refused(tmp_path):
    checkpoints, _ = counters_of(tmp_path)
    for iteration in (1, 2, 3):
        checkpoints.save(iteration)
    for path in tmp_path.glob("iteration-*"):  # as version 0.2 wrote it
        run_info = json.loads((path / "run.json").read_text())
        assert run_info.pop("format") and run_info.pop("files")
        if path.name == "iteration-000003":
            (path / "run.json").write_text(json.dumps(run_info))
    with pytest.raises(ValueError, match=r"-000003 was written by another version .* whole checkpoint is .*-000002;"):
        checkpoints.load_latest()
    for content in ("", "iteration-000009", "\0"):
        (tmp_path / "latest").write_text(content)
        with pytest.raises(ValueError, match=r"run.json .* the newest whole checkpoint is .*iteration-000002"):
            checkpoints.load_latest()
    (tmp_path / "iteration-000002" / "run.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="no other checkpoint is whole: begin again with --overwrite true"):
        Checkpoints(tmp_path, {}, {}, 1).load(2)


def test_a_full_disk_is_named_for_every_file_of_a_log(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"metrics.jsonl cannot be written \(No space left on device\); its disk has"):
        append(tmp_path / "metrics.jsonl", "{}\n")
    (tmp_path / "done.json.unfinished").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"done.json cannot be written \(No space left on device\)"):
        write_atomically(tmp_path / "done.json", "{}")
