"""The command that `tests.warm.python()` names: `python ...` by a fork of a process that has imported torch already.

Here is the client: it hands its words, environment, folder and open files to the server, passes signals on, and ends
as the child ends. A child that must not be warm (other flags of Python, other threads of torch) is a plain `python`.
"""

import contextlib
import json
import os
import signal
import socket
import struct
import sys

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
FIXED_AT_START = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "LD_PRELOAD", "LD_LIBRARY_PATH", "TORCH_LOGS")


def fixed_at_start(environment):
    """The variables that a process reads once, when it starts or imports torch."""
    python = [name for name in environment if name.startswith("PYTHON") and name not in ("PYTHONPATH", "PYTHON_EXEC")]
    return {name: environment.get(name) for name in (*FIXED_AT_START, *python)}


def main(python, address, fixed):
    words = sys.argv[1:]
    if words[:1] == ["-u"]:  # torchrun says it; a warm child's output is unbuffered anyway
        words = words[1:]
    plain = not words or (words[0].startswith("-") and words[0] not in ("-c", "-m"))
    if plain or fixed_at_start(os.environ) != fixed:
        os.execv(python, [python, *sys.argv[1:]])
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        job = {"words": words, "environment": dict(os.environ), "folder": os.getcwd(), "group": os.getpgrp()}
        text = json.dumps(job).encode()
        socket.send_fds(server, [struct.pack("!i", len(text))], [0, 1, 2])
        server.sendall(text)
        (child,) = struct.unpack("!i", server.recv(4))
        for number in PASSED_ON:
            signal.signal(number, lambda number, frame: pass_on(child, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        answer = server.recv(4)
    (code,) = struct.unpack("!i", answer) if answer else (1,)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def pass_on(child, number):
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, number)
