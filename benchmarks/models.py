"""Examines every causal type of the installed transformers, and every one that reads images or sound, at tiny size:
docs/models.md.

    make models                                            # all of them: benchmarks/models.json and docs/models.md
    python -m benchmarks.models --only llama gpt2          # these again; the others' rows stay
    python -m benchmarks.models --page                     # the page alone, from the JSON file

An answer is the engine's: what `coverage()` reports of a model with random weights, which settings `hybrid.initialize`
refuses and why, and that rollouts, scores and logprobs then run. A type has a process of its own, forked from one that
has imported the libraries; if it crashes, takes too much memory or too long, that is its row.
"""

import argparse
import copy
import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import transformers
from deepspeed.comm.torch import build_shm_op
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)
from transformers.models.mixtral import modeling_mixtral  # noqa: F401 - what most models import, once for all processes
from transformers.models.qwen2_vl import modeling_qwen2_vl  # noqa: F401 - likewise, of vision-language models

import hybrid
from benchmarks.models_page import FORWARDS_ONLY, FUSED, NATIVE, NOT_BUILT, PAGE, page
from benchmarks.overhead import engine_of
from benchmarks.ranks import quiet, single_rank_environment, start_ranks
from benchmarks.results import ROOT, begin, parser, write
from benchmarks.small_configs import FIRST_SPECIAL, small_config

ANSWERS = ROOT / "benchmarks" / "models.json"
ROWS, TOKENS = 3, 20  # of the texts that are compared; more tokens than a block and a small window
IDS = torch.randint(3, FIRST_SPECIAL, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
SAMPLING = hybrid.SamplingParams(max_new_tokens=6, seed=1)
WHOLE = {"zero_optimization": {"stage": 0}}
# Settings that are tried, by the name of the answer; "" is one that is not refused, else the reason.
SETTINGS: dict[str, dict[str, Any]] = {
    "int8": {"weight_dtype": "int8"},
    "speculation": {"speculation": {"max_draft": 2}},
    "router_replay": {"return_router_indices": True},
    "unmerged_lora": {"lora": "unmerged"},
}
LOGS = ROOT / "runs" / "models"
PROCESSES, PROCESSOR_S, LIMIT_S, MEMORY_BYTES = 2, 60, 240, 4 << 30  # each process's limits
GRACE_S = 10


@dataclass(frozen=True)
class Case:
    """A type of model and its class."""

    model_type: str
    class_name: str
    ranks: int = 1


def cases() -> list[Case]:
    """Return every type with each of its classes."""
    mappings = (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )
    return list(dict.fromkeys(Case(*pair) for mapping in mappings for pair in mapping.items()))


# A model's answers, in its process


def tiny_model(case: Case) -> PreTrainedModel:
    """Return a model with random weights, also of biases and norms, in eval mode."""
    torch.manual_seed(0)
    kind, config = getattr(transformers, case.class_name), small_config(case.model_type)
    if not isinstance(config, kind.config_class):  # the class of a part
        parts = (getattr(config, name) for name in config.sub_configs)
        config = next((part for part in parts if isinstance(part, kind.config_class)), config)
    model = kind._from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.isfinite().all() or parameter.abs().max() > 1e3:  # not initialized
                parameter.normal_(std=0.02)
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(3.0)  # of the usual 0.02, with which all logits are nearly equal
    return model.eval()


def examined(case: Case) -> dict[str, Any]:
    """Return a model's answers by their names. Errors that no setting explains are in "faults"."""
    faults: list[str] = []
    try:
        model = tiny_model(case)
        expected = own_logits(model, IDS)
    except Exception as error:
        return {"runs": NOT_BUILT, "reason": one_line(error)}
    start_ranks()

    def attempt(name: str, step: Callable[[], Any]) -> Any:
        """Return what a step returns; a text with its error, which is a fault unless the engine refuses the step."""
        try:
            return step()
        except NotImplementedError as refused:
            return one_line(refused)
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            ours = next((frame for frame in reversed(frames) if "/hybrid/" in frame.filename), frames[-1])
            faults.append(f"{name}: {one_line(error)} ({Path(ours.filename).name}:{ours.lineno})")
            return faults[-1]

    engine = attempt("initialize", lambda: engine_of(copy.deepcopy(model), {}, WHOLE))
    if isinstance(engine, str):
        return {"runs": NOT_BUILT, "reason": engine, "faults": faults}
    batch = attempt("rollout", lambda: engine.rollout(IDS, torch.ones_like(IDS), SAMPLING))
    attempt("generate", lambda: engine.generate(IDS, max_new_tokens=4, do_sample=False))
    engine.eval()
    logits = attempt("forward", lambda: own_logits(engine, IDS))
    answers = {"runs": engine.coverage()[0]["container"], "reason": engine.coverage()[0]["why"]}
    answers |= {} if isinstance(logits, str) else {"difference": relative(logits, expected)}
    if isinstance(batch, str):
        return {**answers, "runs": FORWARDS_ONLY, "reason": batch, "faults": faults}
    nats = attempt("score", lambda: distances(engine, model, batch))
    answers |= nats if isinstance(nats, dict) else {}
    engine.train()
    answers["logps"] = attempt("logps", lambda: training_forwards(engine, batch))
    engine.destroy()
    answers |= {name: attempt(name, lambda name=name: tried(model, name)) for name in SETTINGS}
    return {**answers, "faults": faults}


@torch.no_grad()
def own_logits(model: Callable[..., Any], ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return the logits of texts, [rows, tokens, vocabulary].  mask: None if they are not padded."""
    return model(input_ids=ids, attention_mask=torch.ones_like(ids) if mask is None else mask, use_cache=False).logits


def distances(engine: hybrid.HybridEngine, model: nn.Module, batch: hybrid.RolloutBatch) -> dict[str, float]:
    """Return by how many nats at most logprobs of a rollout, and scores of it, differ from the model's own forward."""
    scores = engine.score(batch.sequences, batch.attention_mask).per_token_logps
    logits = own_logits(model, batch.sequences, batch.attention_mask)[:, -batch.sequences.shape[1] :]
    own = hybrid.selective_log_softmax(logits[:, :-1], batch.sequences[:, 1:])
    width = batch.completion_ids.shape[1]
    named = {"rollout_nats": batch.old_per_token_logps, "score_nats": scores[:, -width:]}
    return {
        name: float(f"{((logps - own[:, -width:]) * batch.completion_mask).abs().max().item():.1g}")
        for name, logps in named.items()
    }


def tried(model: nn.Module, name: str) -> str:
    """Return why the engine refuses one of SETTINGS for a model; "" if it takes it, and a rollout runs."""
    try:
        engine = engine_of(copy.deepcopy(model), SETTINGS[name], WHOLE, lora=name == "unmerged_lora")
    except ValueError as refused:
        return one_line(refused)
    batch, reason = engine.rollout(IDS, torch.ones_like(IDS), SAMPLING), ""
    if name == "router_replay":
        engine.train()
        engine.logps(batch, forward="model")
    if name == "unmerged_lora":
        why = engine.coverage()[0]["why"]
        counts = re.search(r"adapters unmerged in (\d+) of (\d+) modules", why)
        assert counts or "cannot be merged" in why, why  # "all-linear" takes GLM-4.5V's Conv3d too (PEFT 0.21.2)
        reason = why if counts is None else "" if counts[1] == counts[2] else counts[0]
    engine.destroy()
    return reason


def training_forwards(engine: hybrid.HybridEngine, batch: hybrid.RolloutBatch) -> dict[str, str]:
    """Return by the forwards of `logps` why they are not available; "" if they are."""
    engine.logps(batch, forward="model")
    engine.logps(batch, forward="packed")
    reasons = [row["reason"] for row in engine.coverage() if row["kind"] == "training forward"]
    try:
        exact, refused = engine.logps(batch, forward="exact").per_token_logps, ""
        assert exact.equal(batch.old_per_token_logps), "exact logprobs differ from the rollout's"
    except NotImplementedError as error:
        refused = one_line(error)
    return {"model": "", "packed": "".join(reasons), "exact": refused}


def shared(case: Case) -> dict[str, Any]:
    """Return how two ranks share a model with `inference_tp_size`: "fused", "modules", or why they do not."""
    start_ranks()
    model = tiny_model(case)
    expected = own_logits(model, IDS)
    try:
        engine = engine_of(model, {}, {**WHOLE, "hybrid_engine": {"enabled": True, "inference_tp_size": 2}})
    except ValueError as refused:
        return {"tensor_parallel": one_line(refused)}
    engine.eval()
    logits = own_logits(engine, IDS)
    why = engine.coverage()[0]["why"]
    way = "fused" if "sharded over 2 ranks" in why else "modules" if "sharded over ranks" in why else why
    return {"tensor_parallel": way, "tensor_parallel_difference": relative(logits, expected)}


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference of logits over the largest logit."""
    return float(f"{((actual - expected).abs().max() / expected.abs().max()).item():.1g}")


def one_line(error: BaseException) -> str:
    """Return an error as a line, without the setting that it begins with."""
    text = (" ".join(str(error).split()) or type(error).__name__)[:300]
    text = re.sub(r"\{([^{}:]*)\}", lambda found: f"{{{', '.join(sorted(found[1].split(', ')))}}}", text)  # sets
    return text if isinstance(error, ValueError | NotImplementedError) else f"{type(error).__name__}: {text}"


# Processes


class Job:
    """The processes that examine a case: one, or one a rank.

    connection: receives the first one's answers.
    """

    def __init__(self, case: Case):
        single_rank_environment()
        fork = multiprocessing.get_context("fork")
        self.case, self.started = case, time.monotonic()
        self.connection, sender = fork.Pipe(duplex=False)
        self.processes = [fork.Process(target=run, args=(case, rank, sender)) for rank in range(case.ranks)]
        for process in self.processes:
            process.start()
        sender.close()

    def answers(self) -> dict[str, Any] | None:
        """Return the answers; None while they are computed."""
        if self.connection.poll():
            with suppress(EOFError):
                return self.connection.recv()
            self.processes[0].join()
            code = self.processes[0].exitcode
            limit = f" (it took more than {PROCESSOR_S} s of processor time)" * (code == -signal.SIGXCPU)
            return {"reason": f"its process ended with code {code}{limit}"}
        if time.monotonic() > self.started + LIMIT_S:
            return {"reason": f"it took more than {LIMIT_S} s"}
        return None

    def end(self) -> None:
        """End its processes."""
        for process in self.processes:
            process.join(GRACE_S)  # one that is killed while it loads an extension leaves a lock
            process.kill()
            process.join()


def run(case: Case, rank: int, sender: Connection) -> None:
    """Send a case's answers, in its process, and end it."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(case.ranks), LOCAL_WORLD_SIZE=str(case.ranks)
    )
    if rank:
        sender.close()
    LOGS.mkdir(parents=True, exist_ok=True)
    with (LOGS / f"{case.class_name}-{case.ranks}-{rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_S, PROCESSOR_S + 5))
    quiet()
    try:
        answers = examined(case) if case.ranks == 1 else shared(case)
    except Exception as error:
        traceback.print_exc()
        answers = {"tensor_parallel" if case.ranks > 1 else "reason": one_line(error)}
    if rank == 0:
        sender.send(answers)
    sys.stdout.flush()
    os._exit(0)  # without what the libraries do at exit


def in_processes(waiting: list[Case]) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Yield cases with their answers, as they come; two processes run at a time."""
    running: list[Job] = []
    try:
        while waiting or running:
            while waiting and sum(job.case.ranks for job in running) + waiting[0].ranks <= PROCESSES:
                running.append(Job(waiting.pop(0)))
            wait([job.connection for job in running], timeout=1)
            for job in list(running):
                if (answers := job.answers()) is not None:
                    running.remove(job)
                    job.end()
                    yield job.case, answers
    finally:
        for job in running:
            job.end()


def main() -> None:
    """Examine the types that the command line asks for, and write the page."""
    args = parse()
    before = json.loads(args.answers.read_text()) if args.answers.is_file() else {"models": []}
    for result in () if args.page else answered(begin("models", args), before["models"], args.only):
        write(args.answers, result)
    args.to.write_text(page(json.loads(args.answers.read_text())))


def answered(
    result: dict[str, Any], before: list[dict[str, Any]], only: list[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield a result with the rows of all models, those of the types `only` anew, after each answer."""
    build_shm_op()  # loaded here, so that processes do not wait for each other's lock
    wanted = {(case.model_type, case.class_name): case for case in cases()}
    asked = [case for case in wanted.values() if not only or case.model_type in only]
    rows = {(row["type"], row["class"]): row for row in before}

    def row_of(case: Case) -> dict[str, Any]:
        return rows[case.model_type, case.class_name]

    for case, answers in in_processes(list(asked)):
        row = {"type": case.model_type, "class": case.class_name, "runs": NOT_BUILT, **answers}
        rows[case.model_type, case.class_name] = row
        print(f"{case.class_name}: {row['runs']} {' '.join(row.get('faults', ()))}", flush=True)
        yield {**result, "classes": list(wanted), "models": [rows[key] for key in wanted if key in rows]}
    shared_cases = [replace(case, ranks=2) for case in asked if row_of(case)["runs"] in (FUSED, NATIVE)]
    for case, answers in in_processes(shared_cases):
        row_of(case).update(answers if "tensor_parallel" in answers else {"tensor_parallel": answers["reason"]})
        yield {**result, "classes": list(wanted), "models": [rows[key] for key in wanted if key in rows]}


def parse() -> argparse.Namespace:
    """The flags."""
    flags = parser(__doc__, output=False)
    flags.add_argument("--only", nargs="+", metavar="TYPE", help="examine these types again")
    flags.add_argument("--page", action="store_true", help="examine nothing")
    flags.add_argument("--answers", type=Path, default=ANSWERS, help="JSON file of all answers")
    flags.add_argument("--to", type=Path, default=PAGE, help="the page")
    args = flags.parse_args()
    if unknown := sorted({*(args.only or ())} - {case.model_type for case in cases()}):
        flags.error(f"--only: {', '.join(unknown)} given; types are transformers' model_type, as in docs/models.md")
    if missing := [str(path) for path in (args.answers, args.to) if not path.parent.is_dir()]:
        flags.error(f"{', '.join(missing)}: there is no such directory")
    return args


if __name__ == "__main__":
    main()
