"""A warm child is what a plain one is: words, environment, folder, files, signals, exit code."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests import warm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere every child is a plain one")
TELL = "import os, sys; print(sys.argv, os.getcwd(), os.environ['ONE'], sys.stdin.read(), __name__); sys.exit(3)"


@pytest.fixture(params=["-c", "-m", "script"])
def words(request, tmp_path):
    (tmp_path / "told.py").write_text(TELL)
    first = {"-c": ["-c", TELL], "-m": ["-m", "told"], "script": [str(tmp_path / "told.py")]}
    return [*first[request.param], "a", "b c"]


def told(python, words, folder):
    env = {**os.environ, "ONE": "1"}
    done = subprocess.run([python, *words], cwd=folder, env=env, input="in", capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_it_tells_what_a_plain_child_tells(words, tmp_path):
    plain = told(sys.executable, words, tmp_path)
    assert plain[0] == 3
    assert told(warm.python(), words, tmp_path) == plain


def test_torch_is_there_and_the_project_is_not():
    code = "import sys; print('torch' in sys.modules, any(name.split('.')[0] == 'core' for name in sys.modules))"
    assert subprocess.check_output([warm.python(), "-c", code], text=True) == "True False\n"


def test_a_rank_of_torchrun_is_warm(tmp_path):
    (tmp_path / "rank.py").write_text("import os, sys; print(os.environ['RANK'], 'torch' in sys.modules)")
    command = [warm.python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    said = subprocess.check_output([*command, str(tmp_path / "rank.py")], text=True)
    assert sorted(said.splitlines()) == ["0 True", "1 True"]


def test_other_flags_or_threads_are_a_plain_child():
    code = "import sys; print('torch' in sys.modules, sys.flags.utf8_mode)"
    assert subprocess.check_output([warm.python(), "-X", "utf8", "-c", code], text=True) == "False 1\n"
    env = {**os.environ, "OMP_NUM_THREADS": "3"}
    assert subprocess.check_output([warm.python(), "-c", code], text=True, env=env).startswith("False")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_it_as_it_ends_a_plain_child(number):
    for python in sys.executable, warm.python():
        code = "import time; print('here', flush=True); time.sleep(60)"
        with subprocess.Popen([python, "-c", code], stdout=subprocess.PIPE) as child:
            assert child.stdout.readline() == b"here\n"
            child.send_signal(number)
            assert child.wait(20) == -number


def test_a_killed_client_takes_its_child_along():
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with subprocess.Popen([warm.python(), "-c", code], stdout=subprocess.PIPE) as client:
        child = int(client.stdout.readline())
        client.kill()
        deadline = time.monotonic() + 20
        while os.path.exists(f"/proc/{child}") and time.monotonic() < deadline:
            time.sleep(0.01)
    assert not os.path.exists(f"/proc/{child}")


def test_an_error_is_told_and_atexit_runs():
    code = "import atexit; atexit.register(print, 'over'); 1 / 0"
    done = subprocess.run([warm.python(), "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "over\n")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
