"""The CPU kernels: C++ compiled for this machine on first use, and called through ctypes.

The sources are in `cpu/`. The library is cached in the user's cache directory under a hash of sources, compiler, flags,
processor and torch version. It is not linked against an OpenMP runtime: its symbols resolve in the runtime that torch
has loaded, so both share one thread pool.
"""

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hybrid.kernels import require_contiguous

HOST = torch.device("cpu")
SOURCES = Path(__file__).parent / "cpu"
# A multiply-add is rounded once (fused) or twice. GCC 12 decides that loop by loop when it tunes for Zen or vectorizes
# straight-line code; a row's result would then depend on the number of rows in its batch.
FUSED_ALIKE = ("-fno-tree-slp-vectorize", *(["--param=avoid-fma-max-bits=0"] if platform.machine() == "x86_64" else []))
FLAGS = ("-std=c++20", "-O3", "-march=native", "-fopenmp", "-fPIC", *FUSED_ALIKE)
COMPILERS = ("g++", "c++")

_pointer, _int, _double = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


def read_records(header: str) -> dict[str, type[ctypes.Structure]]:
    """Return the structs of a C++ header as ctypes types, by name, in order. Raises KeyError for a field of unknown
    type."""
    types: dict[str, Any] = {"int64_t": _int, "double": _double}
    records: dict[str, type[ctypes.Structure]] = {}
    for struct, body in re.findall(r"^struct (\w+) \{(.*?)^\};", re.sub("//.*", "", header), re.DOTALL | re.MULTILINE):
        fields = []
        for declaration in body.split(";")[:-1]:
            kind, declarators = re.fullmatch(r"\s*(?:const )?(\w+)(.*)", declaration, re.DOTALL).groups()
            for declarator in declarators.split(","):
                pointer, name, length = re.fullmatch(r"\s*(\*?)\s*(\w+)(?:\[(\d+)\])?", declarator).groups()
                field = _pointer if pointer else types[kind]
                fields.append((name, field * int(length) if length else field))
        types[struct] = records[struct] = type(struct, (ctypes.Structure,), {"_fields_": fields})
    return records


RECORDS = read_records((SOURCES / "records.h").read_text())
LoraDelta, Linear, Norm, Layer, Decoder, Batch, Samples = (
    RECORDS[name] for name in ("LoraDelta", "Linear", "Norm", "Layer", "Decoder", "Batch", "Samples")
)
Drafting, Router = RECORDS["Drafting"], RECORDS["Router"]

SIGNATURES = {
    "lanes": ([], _int),
    "multiplies_in_tiles": ([], _int),
    "product_share": ([*[_int] * 5, _pointer], None),
    "work_floats": ([_pointer, _int, _int], _int),
    "forward": ([_pointer, _pointer, _int, _int, _pointer, _pointer, _int], _int),
    "write_kv": ([_pointer, _pointer, _int, *[_pointer] * 3], None),
    "logits": ([_pointer, _pointer, _int, _pointer, _pointer, _int], None),
    "sample": ([_pointer, _int, _pointer, _int], None),
    "score": ([_pointer, _int, _int, _pointer, _pointer, _double, _pointer, _pointer, _int], None),
    "barrier": ([_pointer], None),
    "gather": ([_pointer, _pointer, _int, _pointer], None),
    "sum": ([_pointer, _pointer, _int], None),
    "sample_sharded": ([_pointer, _pointer, *[_int] * 4, _pointer, _int], None),
    "decode_steps": ([*[_pointer] * 2, _int, *[_pointer] * 2, _int, _int, *[_pointer] * 3, _int], _int),
    "draft_tokens": ([_pointer, _int, _pointer, _pointer], None),
    "score_sharded": ([_pointer, _pointer, *[_int] * 4, _pointer, _double, _pointer, _pointer, _int], None),
}


@functools.cache
def cpu_library() -> ctypes.CDLL | None:
    """Return the library, compiled on first use; None, with a warning that has the reason, if building or loading
    fails."""
    try:
        return opened(built(FLAGS))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        warnings.warn(f"the CPU kernels could not be built, torch's are used: {detail.strip()[-500:]}", stacklevel=2)
        return None


def opened(path: Path) -> ctypes.CDLL:
    """Return the library at `path`, with the C types of its functions set. Raises OSError if it cannot be loaded."""
    library = ctypes.CDLL(str(path))
    for name, (arguments, result) in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    sizes = (_int * len(RECORDS)).in_dll(library, "record_sizes")
    assert [*sizes] == [ctypes.sizeof(record) for record in RECORDS.values()], "records.h is read wrongly"
    return library


def built(flags: Sequence[str]) -> Path:
    """Return path of the library for `flags`, compiled on first use; other processes wait for the one that compiles it.

    Raises OSError without a compiler or a writable directory, CalledProcessError if compiling fails.
    """
    compiler = compiler_command()
    sources = sorted(SOURCES.glob("*"))
    content = b"\0".join(path.read_bytes() for path in sources)
    key = hashlib.sha256(content + " ".join([*compiler, *flags, processor(), torch.__version__]).encode())
    folder = cache_folder()
    path = folder / f"kernels-{key.hexdigest()[:16]}.so"
    if path.exists():  # complete: it is moved here after linking
        return path
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            say(f"compiling the CPU kernels, once for this machine, which takes a minute; they are kept in {folder}")
            start = time.monotonic()
            compile_into(path, compiler, flags)
            say(f"compiled the CPU kernels in {time.monotonic() - start:.0f} s")
    return path


def say(text: str) -> None:
    """Print a line about a build that the user waits for."""
    print(f"hybrid: {text}", file=sys.stderr, flush=True)


def compiler_command() -> list[str]:
    """Return the C++ compiler: `$CXX`, which may have arguments, else the first of COMPILERS that is there. Raises
    OSError if there is none."""
    if chosen := shlex.split(os.environ.get("CXX", "")):
        if (path := shutil.which(chosen[0])) is None:
            raise OSError(f"no C++ compiler: CXX={os.environ['CXX']!r} is not there")
        return [path, *chosen[1:]]
    path = next(filter(None, map(shutil.which, COMPILERS)), None)
    if path is None:
        raise OSError(f"no C++ compiler: none of {', '.join(COMPILERS)} is there")
    return [path]


def compile_into(path: Path, compiler: Sequence[str], flags: Sequence[str]) -> None:
    """Compile cpu/decoder.cpp to the shared library `path`, atomically. Raises CalledProcessError if that fails."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects, library = Path(folder, "kernels.o"), Path(folder, "kernels.so")
        steps = (
            [*compiler, *flags, "-c", str(SOURCES / "decoder.cpp"), "-o", str(objects)],
            # Without -fopenmp: torch's runtime is used. The libraries are named because `gcc` links none of C++.
            [*compiler, "-shared", str(objects), "-o", str(library), "-lstdc++", "-lm"],
        )
        for step in steps:
            subprocess.run(step, check=True, capture_output=True, text=True)
        library.replace(path)


def cache_folder() -> Path:
    """Return the directory of compiled libraries: `$XDG_CACHE_HOME/hybrid-engine`, or one in the system's temporary
    directory if that is not writable. Raises OSError if other users own or can write the latter."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hybrid-engine"
    try:
        root.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=root).close()
    except OSError:
        root = Path(tempfile.gettempdir()) / f"hybrid-engine-{os.getuid()}"
        root.mkdir(mode=0o700, exist_ok=True)
        status = root.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise OSError(f"{root} belongs to others, or others can write what would be loaded from it") from None
    return root


def processor() -> str:
    """Return what determines `-march=native`, as text: architecture, processor name, instruction set flags."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    lines = sorted({line for line in lines if line.split("\t")[0].strip() in ("model name", "flags", "Features")})
    return platform.machine() + "".join(lines)


def address(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """Return the address of a tensor's data; asserts that it is of `dtype`, contiguous and in host memory."""
    require_contiguous(HOST, dtype, tensor)
    return tensor.data_ptr()
