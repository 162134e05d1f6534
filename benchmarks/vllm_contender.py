"""vLLM as a contender: a process in its own environment, which waits on a pipe while other contenders run."""

import json
import math
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.cases import Request

WORKER = Path(__file__).with_name("vllm_worker.py")
LAST_LINES = 15  # of the log, shown if the worker has died
GIB = 2**30
# From the package intel-openmp. vLLM wants it in LD_PRELOAD on x86: 8 times faster than libgomp on a busy machine.
OPENMP = "lib/libiomp5.so"


@dataclass(frozen=True)
class VLLMSettings:
    """python: vLLM's interpreter.  directory: for its log and compiled code.  threads: of the CPU."""

    python: Path
    directory: Path
    threads: int


class VLLM:
    """A vLLM process that serves requests.  about: its version and the library of kernels that it loaded.

    options: further arguments of vLLM's `LLM`. With `load_format` "dummy" vLLM makes random weights, and none are
        written.
    Raises FileNotFoundError without vLLM's environment, RuntimeError with the end of the log if the process has died.
    """

    def __init__(
        self, settings: VLLMSettings, model: nn.Module, max_rows: int, max_tokens: int, eager: bool, **options: Any
    ):
        if not settings.python.is_file():
            raise FileNotFoundError(f"vLLM's environment: no interpreter at {settings.python}; run `make bench-vllm`")
        settings.directory.mkdir(parents=True, exist_ok=True)
        self.weights = tempfile.TemporaryDirectory(prefix="vllm-weights-")
        if options.get("load_format") == "dummy":
            model.config.architectures = [type(model).__name__]  # as `save_pretrained` of the model writes it
            model.config.save_pretrained(self.weights.name)
        else:
            model.save_pretrained(self.weights.name)
        self.log = settings.directory / f"vllm{'-eager' * eager}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [str(settings.python), "-P", str(WORKER)],
                env=environment(settings, kv_bytes(model, max_rows * max_tokens)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.about = self._ask(
            {
                "model": self.weights.name,
                "dtype": str(model.dtype).removeprefix("torch."),
                "max_model_len": max_tokens,
                "max_num_seqs": max_rows,
                "enforce_eager": eager,
                **options,
            }
        )

    def run(self, request: Request) -> list[int]:
        """Run a request; returns the tokens of each completion."""
        return self._ask(
            {
                "prompts": request.prompt_ids.tolist(),
                "lengths": list(request.lengths),
                "group": request.group,
            }
        )

    def close(self) -> None:
        """End the process and remove the weights."""
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.weights.cleanup()

    def _ask(self, message: dict[str, Any]) -> Any:
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            code = self.process.wait()
            end = "\n".join(self.log.read_text().splitlines()[-LAST_LINES:])
            raise RuntimeError(f"vLLM's process ended with code {code}; {self.log} ends with:\n{end}")
        return json.loads(answer)


def environment(settings: VLLMSettings, cache_bytes: int) -> dict[str, str]:
    """The environment variables for vLLM on a CPU: as many threads as the other contenders, on the cores that it
    inherits, bound to no single one."""
    openmp = settings.python.parents[1] / OPENMP
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(settings.threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(cache_bytes / GIB)),
        "VLLM_CACHE_ROOT": str(settings.directory / "vllm-cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "LD_PRELOAD": str(openmp) if openmp.is_file() else "",
        "KMP_BLOCKTIME": "1",  # milliseconds that an idle thread spins, instead of 200: other contenders run then
        "HF_HUB_OFFLINE": "1",
    }


def kv_bytes(model: nn.Module, tokens: int) -> int:
    """Bytes of twice the KV cache of `tokens` tokens: room for partly filled blocks and cached prefixes."""
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * tokens * 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * model.dtype.itemsize
