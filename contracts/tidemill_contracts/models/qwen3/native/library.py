"""Builds C++ libraries once per machine, and loads the one that a model's steps run on.

They lie in a cache folder, each under a hash of everything that shaped it: the sources, the
compiler, its options and the machine's instruction set.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tidemill_contracts.models.errors import ModelError
from tidemill_contracts.models.qwen3.int8 import MATRICES, scale_of

SOURCES = ("qwen3.cpp", "operands.h", "team.h", "tiles.h", "vectors.h")
OPTIONS = (
    "-std=c++20", "-O3", "-mprefer-vector-width=512", "-shared", "-fPIC", "-pthread", "-Wno-psabi",
)  # fmt: skip
MATRIX_UNIT = ("amx_tile", "amx_bf16", "amx_int8")
"""Names of /proc/cpuinfo; every CPU with the second has had the third."""
BUILD_SECONDS = 300


class NoLibrary(ModelError):
    """The library cannot be built or loaded here; the message says why."""


TENSORS = (
    "embed", "input_norm", "q_norm", "k_norm", "post_norm", "final_norm", "rope_cos", "rope_sin",
    "k_cache", "v_cache", *MATRICES,
)  # fmt: skip
"""What a model keeps from step to step, by the names of the stages' arguments."""
SCALES = tuple(map(scale_of, MATRICES))
"""What one in int8 keeps besides."""


class ModelArgs(ctypes.Structure):
    """`Model` in qwen3.cpp."""

    _fields_ = (
        *(
            (name, ctypes.c_int32)
            for name in (
                "layers", "hidden", "q_heads", "kv_heads", "head_dim", "inner", "vocabulary",
                "page_size", "pages", "places",
            )
        ),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in (*TENSORS, *SCALES)),
    )  # fmt: skip


class BatchArgs(ctypes.Structure):
    """`Batch` in qwen3.cpp."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("tokens", "rows", "table_width", "outputs")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "ids", "slots", "seq_lens", "lens", "offsets", "table", "output_tokens", "logits",
            )
        ),
    )  # fmt: skip


class Library:
    """The functions of a loaded library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._open = library.tidemill_open
        self._open.argtypes, self._open.restype = [ctypes.c_int], pointer
        self._step = library.tidemill_step
        self._step.argtypes, self._step.restype = [pointer, pointer, pointer], ctypes.c_int
        self._pack = library.tidemill_pack
        self._pack.argtypes, self._pack.restype = [pointer, pointer, *[number] * 4], None
        self._quantize = library.tidemill_quantize
        self._quantize.argtypes, self._quantize.restype = [*[pointer] * 3, *[number] * 4], None
        self._engines: dict[int, int] = {}

    def engine(self, threads: int) -> int:
        """Threads and scratch memory; one set for each number of threads, kept while the process
        lives. Raises `NoLibrary` where the system does not let the process use the matrix unit."""
        if threads not in self._engines:
            engine = self._open(threads)
            if not engine:
                raise NoLibrary("the system refuses this process the matrix unit")
            self._engines[threads] = engine
        return self._engines[threads]

    def step(self, engine: int, model: ModelArgs, batch: BatchArgs) -> bool:
        """False where the batch points outside the model or the cache; then nothing was run."""
        return not self._step(engine, ctypes.byref(model), ctypes.byref(batch))

    def pack(
        self, source: int, target: int, columns: int, depth: int, group: int, stride: int
    ) -> None:
        self._pack(source, target, columns, depth, group, stride)

    def quantize(
        self,
        source: int,
        target: int,
        scales: int,
        columns: int,
        depth: int,
        group: int,
        stride: int,
    ) -> None:
        self._quantize(source, target, scales, columns, depth, group, stride)


@cache
def library(architecture: str = "native") -> Library:
    """Built where it is not there yet. Raises `NoLibrary`.

    `architecture` is the compiler's ``-march``: without a matrix unit in it, products run in
    plain loops that only serve tests.
    """
    if architecture == "native":
        _require_matrix_unit()
    return Library(load(SOURCES, architecture))


def load(sources: Sequence[str], architecture: str) -> ctypes.CDLL:
    """The library of these sources, the first of which includes the others, built where it is
    not there yet. Raises `NoLibrary`."""
    _require_linux()
    compiler = _require_compiler()
    options = (*OPTIONS, f"-march={architecture}")
    source = Path(__file__).parent / sources[0]
    target = _cache_folder() / f"{source.stem}-{_key(compiler, options, sources)}.so"
    if not target.exists():
        _build(compiler, options, source, target)
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise NoLibrary(f"{target} cannot be loaded: {error}") from error


def find_compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def lacking() -> str | None:
    """What the machine lacks for the library, told without building it; ``None`` for nothing."""
    try:
        _require_matrix_unit()
        _require_compiler()
    except NoLibrary as error:
        return str(error)
    return None


def _require_compiler() -> str:
    compiler = find_compiler()
    if compiler is None:
        raise NoLibrary("no C++ compiler is installed (g++, clang++, or what CXX names)")
    return compiler


def _require_linux() -> None:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise NoLibrary("it needs Linux on x86-64")


def _require_matrix_unit() -> None:
    _require_linux()
    missing = [name for name in MATRIX_UNIT if name not in _cpu_flags()]
    if missing:
        raise NoLibrary(f"the CPU has no {' and no '.join(missing)}")


@cache
def _cpu_flags() -> frozenset[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "tidemill"


def _key(compiler: str, options: tuple[str, ...], sources: Sequence[str]) -> str:
    digest = hashlib.sha256()
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoLibrary(f"the compiler {compiler} does not run: {error}") from error
    digest.update(version + "\0".join((*options, *sorted(_cpu_flags()))).encode())
    for name in sources:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:16]


def _build(compiler: str, options: tuple[str, ...], source: Path, target: Path) -> None:
    """Through a file of its own, so that workers that start together do not meet."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            built = Path(folder) / target.name
            done = subprocess.run(
                [compiler, *options, str(source), "-o", str(built)],
                capture_output=True,
                text=True,
                timeout=BUILD_SECONDS,
            )
            if done.returncode:
                lines = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
                said = next((line for line in lines if "error" in line), lines[-1])
                raise NoLibrary(f"{compiler} cannot build it: {said}")
            built.replace(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoLibrary(f"it cannot be built into {target.parent}: {error}") from error
