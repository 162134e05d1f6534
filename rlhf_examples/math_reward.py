"""The reward `math_verify`: 1 for a completion whose answer equals the record's by math-verify, else 0.

`--reward math_verify` (`pip install ".[math]"`). The record's answer is the column `answer`: LaTeX or text, alone, in
`\\boxed{}`, or behind "####" (GSM8K).

SymPy may compute for ever on what a model writes (`9^{9^{9^9}}`), and math-verify's own timeouts work in main threads
only. So answers are compared in a process of its own with limits, which a timer ends and this module starts again.
"""

import importlib.util
import json
import logging
import re
import resource
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from functools import lru_cache
from typing import Any

from rlhf_examples.rewards import Reward, required

CPU_S = 5.0  # seconds of a CPU for a completion
MEMORY_BYTES = 4 << 30
MAX_CHARACTERS = 20_000  # of a completion's end: math-verify's patterns take long on long texts
BOXED = re.compile(r"\\f?boxed\s*\{")


def load(file: str = "") -> Reward:
    """The reward. Raises ValueError if math-verify is not installed, or for a file of settings: it has none."""
    if file:
        raise ValueError(f"reward: 'math_verify:{file}' given; math_verify has no settings")
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError("reward: 'math_verify' given, which is not installed; run: pip install math-verify")
    return MathReward()


class MathReward:
    """Compares answers in one process, which it starts when it is first called, and again after a timeout.

    cpu_s: seconds of a CPU for a completion.
    """

    def __init__(self, cpu_s: float = CPU_S):
        self.cpu_s = cpu_s
        self.lock = threading.Lock()
        self.worker: subprocess.Popen | None = None

    def __call__(
        self, prompts: list[str], completions: list[str], /, answer: list | None = None, **columns: list
    ) -> list[float | None]:
        """1 or 0 for each completion; None where the record's answer cannot be read, 0 after a timeout."""
        answers = required("answer", answer)
        with self.lock:
            return [self.score(completion, str(gold)) for completion, gold in zip(completions, answers, strict=True)]

    def score(self, completion: str, answer: str) -> float | None:
        """The score of one completion."""
        if self.worker is None:
            self.worker = subprocess.Popen(
                [sys.executable, "-m", "rlhf_examples.math_reward", str(self.cpu_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        worker = self.worker
        assert worker.stdin is not None and worker.stdout is not None, "both are pipes"
        try:
            worker.stdin.write(json.dumps([completion, answer]) + "\n")
            worker.stdin.flush()
            line = worker.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            return json.loads(line)
        self.worker = None
        with suppress(BrokenPipeError):
            worker.stdin.close()
        worker.stdout.close()
        if (status := worker.wait()) > 0:  # not by a signal: its imports have failed
            raise RuntimeError(f"reward: math_verify's process has exited with status {status}")
        return 0.0


def extracted(text: str) -> str:
    """The answer in a text: the last `\\boxed{...}`, else the line behind the last "####"; else the end of the text as
    it is, in which math-verify looks for an answer.
    """
    text = text[-MAX_CHARACTERS:]
    starts = [match.end() for match in BOXED.finditer(text)]
    for start in reversed(starts[-2:]):  # the last one may be cut off
        depth = 1
        for index in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[index], 0) * (text[index - 1] != "\\")
            if not depth:
                return f"\\boxed{{{text[start:index]}}}"
    if "####" in text:
        lines = text.rpartition("####")[2].strip().splitlines()
        return lines[0] if lines else ""
    return text


@lru_cache(maxsize=64)
def parsed_answer(answer: str) -> list[Any]:
    """A record's answer as math-verify's expressions: extracted, or LaTeX or text without any mark; empty if it is
    neither.
    """
    import math_verify

    text = extracted(answer)
    return math_verify.parse(f"${text}$", parsing_timeout=None) if text == answer else parsed(text)


def parsed(text: str) -> list[Any]:
    """A text's answer as math-verify's expressions; empty if there is none."""
    import math_verify

    boxed_first = math_verify.LatexExtractionConfig(boxed_match_priority=0)
    return math_verify.parse(text, [boxed_first, math_verify.ExprExtractionConfig()], parsing_timeout=None)


def is_equal(completion: str, answer: str) -> float | None:
    """1 if the completion's answer equals the record's, else 0; None if the record's answer cannot be read."""
    import math_verify

    gold = parsed_answer(answer) or parsed(answer)
    if not gold:
        return None
    return float(math_verify.verify(gold, parsed(extracted(completion)), timeout_seconds=None))


def serve(cpu_s: float) -> None:
    """Answer each line of standard input, [completion, answer], by a line with its score, until it ends.

    The timer's signal ends the process: SymPy's loops in C do not come back to Python.
    """
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    size = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # warns of every timeout that is off
    is_equal(r"\boxed{\frac{1}{2}x}", r"\boxed{\frac{x}{2}}")  # imports, and first calls, take seconds

    for line in sys.stdin:
        completion, answer = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            score = is_equal(completion, answer)
        except (MemoryError, RecursionError):
            score = 0.0
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(score), flush=True)


if __name__ == "__main__":
    serve(float(sys.argv[1]))
