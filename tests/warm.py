"""`warm.python()`: what to write for `sys.executable` where a child's own import of torch is not what is tested.

A child that imports torch anew costs three to six seconds of a core before its first line. Here one server per test
process imports torch, and each child is a fork of it: its words, environment, folder, files, signals and exit code
are those of a process of its own, and it imports `core` itself. Ranks that torchrun starts are warm if torchrun is.

Not for a test of imports, of flags of Python, of how a process ends, or of one that is killed by SIGKILL.
"""

import atexit
import contextlib
import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent


@cache
def python() -> str:
    """The path of a command that is used as `python`; the first call starts the server."""
    if sys.platform != "linux":
        return sys.executable
    from tests.warm_python import fixed_at_start

    folder = tempfile.TemporaryDirectory(prefix="warm")
    address, command = f"{folder.name}/server", Path(folder.name) / "python"
    start = f"main({sys.executable!r}, {address!r}, {fixed_at_start(os.environ)!r})"
    command.write_text(f"#!{sys.executable} -SEs\n{(HERE / 'warm_python.py').read_text()}\n\n{start}\n")
    command.chmod(0o700)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    line = [sys.executable, __file__, address, str(command)]
    # it ends when nobody holds the other end of its standard input
    server = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=HERE.parent)
    if server.stdout.readline() != b"ready\n":
        raise RuntimeError("the server of warm children did not start")

    def close():
        server.stdin.close()
        server.stdout.close()
        server.wait()
        folder.cleanup()

    atexit.register(close)
    return str(command)


def serve(address):
    """Fork a keeper per client until standard input ends; in a child: the job, its files."""
    import torch._dynamo
    import torch.distributed.run  # noqa: F401

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    keepers = set()
    gc.freeze()  # a child does not copy what it never changes
    os.write(1, b"ready\n")
    while True:
        ready, _, _ = select.select([0, listener], [], [])
        if 0 in ready:
            os._exit(0)
        client, _ = listener.accept()
        if (keeper := os.fork()) == 0:
            listener.close()
            return keep(client)
        client.close()
        keepers.add(keeper)
        keepers = {one for one in keepers if os.waitpid(one, os.WNOHANG) == (0, 0)}


def keep(client):
    """Fork the child, tell the client its number and how it ended; a client that is gone takes it along."""
    head, files, _, _ = socket.recv_fds(client, 4, 3)
    (size,) = struct.unpack("!i", head)
    text = b""
    while len(text) < size:
        text += client.recv(size - len(text))
    child = os.fork()
    if child == 0:
        client.close()
        return json.loads(text), files
    for file in (0, 1, 2, *files):  # a reader of the child's output sees its end
        os.close(file)
    client.sendall(struct.pack("!i", child))
    end = os.pidfd_open(child)
    ready, _, _ = select.select([end, client], [], [])
    if end not in ready:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        client.sendall(struct.pack("!i", code))
    os._exit(0)


def become(job, files, command):
    """Make this process what `python *words` would be before its first line."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: its keeper may be killed
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    try:
        os.setpgid(0, job["group"])
    except OSError:  # the client has a session of its own
        os.setsid()
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"], PYTHON_EXEC=command)  # PYTHON_EXEC: what torchrun starts its ranks with
    streams = [open(number, mode, buffering=1, closefd=False) for number, mode in enumerate("rww")]  # noqa: SIM115
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__ = streams
    for stream in streams[1:]:
        stream.reconfigure(write_through=True)


def run(words):
    """`python *words`: a script, -m a module or -c code."""
    what, *rest = words
    more = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if what in ("-c", "-m"):
        first, (name, *rest) = os.getcwd(), rest
    else:
        first, name = os.path.dirname(os.path.realpath(what)), what
    sys.path[:1] = [first, *more]  # in the place of this file's folder
    sys.argv[:] = [what if what == "-c" else name, *rest]
    if what == "-m":
        sys.modules.pop(name, None)  # the server may have imported it
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif what == "-c":
        exec(compile(name, "<string>", "exec"), sys.modules["__main__"].__dict__)
    else:
        runpy.run_path(name, run_name="__main__")


def leave(function, *args):
    """Call it and end as Python ends, but for taking apart what the server imported: a second of a core."""
    code = 0
    try:
        function(*args)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    job, files = serve(sys.argv[1])
    become(job, files, sys.argv[2])
    leave(run, job["words"])
