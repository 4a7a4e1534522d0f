"""Ray's workers, forked from a process that has imported torch and what actors of this package need. Ray starts Python anew for
each of them: 10 s of imports.

    raylet ──starts──> this file as a program: sends arguments, environment and output to the server, and ends
    RayForks: server ──fork──> Ray's own worker program, with those arguments

The raylet takes the program from the runtime environment (``py_executable``), and the worker's process id from its first
message.
"""

from __future__ import annotations

import json
import os
import socket
import sys

SIZE_BYTES = 8


def main(path: str, arguments: list[str]) -> None:
    """The program that a raylet starts. It imports little, for it is started often."""
    message = json.dumps({"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}).encode()  # noqa: PTH109
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        socket.send_fds(server, [len(message).to_bytes(SIZE_BYTES, "big")], [1, 2])
        server.sendall(message)
        server.recv(1)  # the worker has the output's descriptors


# The server -----------------------------------------------------------------------------------------------------------

# Not Ray: it reads variables of the environment as it is imported, and each worker has its own.
IMPORTED_FIRST = (
    "skyrl_train.training.distributed.worker",
    "skyrl_train.generators.gym",
    "skyrl_train.inference.engines.embedded.engine_loop",
    "transformers.models.qwen3.modeling_qwen3",
    # What Ray imports: half of the time that it takes.
    "google.protobuf.internal.builder",
    "jsonschema",
    "requests",
    "uvloop",
    "wcwidth",
)


def serve(path: str) -> None:
    import gc
    import importlib
    import multiprocessing
    import select
    import signal
    import threading

    fork = multiprocessing.get_context("fork")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        sys.stdout.write("listens\n")
        sys.stdout.flush()  # requests wait until everything is imported
        for module in IMPORTED_FIRST:
            importlib.import_module(module)
        assert "ray" not in sys.modules
        assert threading.active_count() == 1, (
            "a thread does not survive the fork, and the locks that it holds stay locked"
        )
        gc.collect()
        gc.freeze()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the workers
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:  # until whoever started it has ended
            connection, _ = listener.accept()
            with connection:
                size, output, _, _ = socket.recv_fds(connection, SIZE_BYTES, 2)
                with connection.makefile("rb") as stream:
                    request = json.loads(stream.read(int.from_bytes(size, "big")))
                fork.Process(target=work, args=(request, output, listener)).start()
            for descriptor in output:
                os.close(descriptor)


def work(request: dict[str, object], output: list[int], listener: socket.socket) -> None:
    """What ``python arguments`` does."""
    import runpy
    import signal

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    listener.close()
    for number, descriptor in enumerate(output, start=1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[call-overload]
    os.chdir(str(request["folder"]))
    sys.argv = [word for word in request["arguments"] if word != "-u"]  # type: ignore[attr-defined]
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [os.path.dirname(sys.argv[0]), *filter(None, folders), *sys.path[1:]]  # noqa: PTH120
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(sys.argv[2])
    else:
        main(sys.argv[1], sys.argv[2:])
