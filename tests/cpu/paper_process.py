"""A process with a GPU on paper (``paper_cuda.py``), which runs functions of the tests.

Its own process, because the device must be there before torch is imported.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import os
import pickle
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class PaperProcess:
    """Runs module-level functions; arguments and results are pickled."""

    def __init__(self, calls: int, answers: int) -> None:
        self._calls, self._answers = os.fdopen(calls, "wb"), os.fdopen(answers, "rb")

    def begin(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Begin a call; :meth:`result` waits for it."""
        pickle.dump((function.__module__, function.__name__, arguments), self._calls)
        self._calls.flush()

    def result(self) -> Any:
        """Return the result of the call that has begun."""
        failure, result = pickle.load(self._answers)
        assert not failure, failure
        return result

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function there."""
        self.begin(function, *arguments)
        return self.result()

    def close(self) -> None:
        """Let the process end."""
        self._calls.close()
        self._answers.close()


@contextmanager
def paper_processes(number: int) -> Iterator[list[PaperProcess]]:
    """Start so many, of which the first has imported everything before it forks the others."""
    pipes = [(*os.pipe(), *os.pipe()) for _ in range(number)]
    theirs = [descriptor for calls, _, _, answers in pipes for descriptor in (calls, answers)]
    command = [real_python(), str(HERE / "paper_process.py"), build_device(), *map(str, theirs)]
    paths = os.pathsep.join([str(HERE), str(HERE.parent.parent)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    started = subprocess.Popen(command, pass_fds=theirs, env=environment)
    for descriptor in theirs:
        os.close(descriptor)
    processes = [PaperProcess(calls, answers) for _, calls, answers, _ in pipes]
    try:
        yield processes
    finally:
        for process in processes:
            process.close()
        started.wait()


def load_device(library: str) -> None:
    """Load the device of ``paper_device.cpp``. Once it is imported, torch has settled that there is none."""
    assert "torch" not in sys.modules
    torch_libraries = Path(sysconfig.get_paths()["purelib"]) / "torch" / "lib"
    for path in (torch_libraries / "libc10.so", torch_libraries / "libtorch_cpu.so", Path(library)):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def obstacle() -> str | None:
    """Return why there can be no GPU on paper here, or None."""
    import torch

    if torch.version.cuda is not None:
        return "CUDA on paper needs a CPU build of torch"
    return None if shutil.which("g++") else "CUDA on paper needs a C++ compiler (g++)"


@functools.cache
def build_device() -> str:
    """Compile ``paper_device.cpp``, which takes 20 s the first time on a machine; returns the path of the library."""
    import torch
    from torch.utils.cpp_extension import include_paths

    source = HERE / "paper_device.cpp"
    digest = hashlib.sha256(source.read_bytes() + f"{torch.__version__} {torch.__file__}".encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"skyrl-paper-device-{os.getuid()}-{digest}.so"
    if not library.exists():
        includes = [f"-I{path}" for path in (*include_paths(), sysconfig.get_paths()["include"])]
        abi, folder = int(torch._C._GLIBCXX_USE_CXX11_ABI), Path(torch.__file__).parent / "lib"
        unfinished = library.with_suffix(f".{os.getpid()}")
        command = [
            "g++",
            "-std=c++20",
            "-O0",
            "-fPIC",
            "-shared",
            str(source),
            *includes,
            f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        ]
        subprocess.run([*command, f"-L{folder}", "-lc10", "-ltorch_cpu", "-o", str(unfinished)], check=True)
        unfinished.rename(library)
    return str(library)


def real_python() -> str:
    """Return the interpreter of this environment: that of a test process may ask for a fork of another process instead."""
    return str(Path(sys.prefix) / "bin" / "python")


def serve(library: str, descriptors: Sequence[int]) -> None:
    """Answer calls in one process for each pair of descriptors, until the other ends close."""
    load_device(library)
    import torch

    # Wrapped tensors cannot be made in inference mode. Before the package is imported, which decorates functions with it.
    torch.inference_mode = lambda *_: torch.no_grad()  # type: ignore[assignment, misc]
    importlib.import_module("paper_worlds")
    own, *others = zip(descriptors[::2], descriptors[1::2], strict=True)
    children = []
    for number, pair in enumerate(others):
        if (child := os.fork()) == 0:
            for other in (own, *others[number + 1 :]):
                [*map(os.close, other)]
            answer(*pair)
            os._exit(0)
        children.append(child)
        [*map(os.close, pair)]
    answer(*own)
    for child in children:
        os.waitpid(child, 0)


def answer(calls_from: int, answers_to: int) -> None:
    calls, answers = os.fdopen(calls_from, "rb"), os.fdopen(answers_to, "wb")
    while True:
        try:
            module, name, arguments = pickle.load(calls)
        except EOFError:
            return
        try:
            result = "", getattr(importlib.import_module(module), name)(*arguments)
        except BaseException:  # told to the test
            result = traceback.format_exc(), None
        pickle.dump(result, answers)
        answers.flush()


if __name__ == "__main__":
    serve(sys.argv[1], [int(word) for word in sys.argv[2:]])
