"""A user's mistake ends a script with one line, said once, whichever rank makes it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from core.training.log.console import Console, errors_as_one_line
from tests.marks import thinned

ROOT = Path(__file__).parents[2]


def ended(error, monkeypatch, rank=None):
    """Status of a script that raises this."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    if rank is None:
        monkeypatch.delenv("RANK", raising=False)
    else:
        monkeypatch.setenv("RANK", str(rank))
    with pytest.raises(SystemExit) as stopped, errors_as_one_line():
        raise error
    return stopped.value.code


@pytest.mark.parametrize("error", [ValueError("2 is not 3"), OSError("no disk"), ImportError("needs an extra")])
def test_mistakes(error, monkeypatch, capsys):
    assert ended(error, monkeypatch) == 1
    assert capsys.readouterr().err == f"error: {error}\n"
    assert ended(error, monkeypatch, rank=3) == 1
    assert capsys.readouterr().err == f"error: rank 3: {error}\n"


def test_an_interrupt_is_no_traceback(monkeypatch, capsys):
    assert ended(KeyboardInterrupt(), monkeypatch) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_our_own_mistakes_keep_their_traceback(monkeypatch):
    for error in (RuntimeError("Connection closed"), TypeError("x")):
        monkeypatch.delenv("RANK", raising=False)
        with pytest.raises(type(error)), errors_as_one_line():
            raise error
    assert ended(RuntimeError("Connection closed by peer"), monkeypatch, rank=1) == 1


def test_ranks_other_than_0_say_nothing(capsys):
    Console(1, 10).say("twice")
    Console(0, 10).say("once")
    assert capsys.readouterr().out == "once\n"


SCRIPT = """
import sys
from core import parallel_state
from core.parallel_state.collectives import barrier
from core.training.log.console import errors_as_one_line
with errors_as_one_line(), parallel_state.launch("cpu"), errors_as_one_line():
    ps = parallel_state.ParallelState.build(device="cpu")
    if sys.argv[1] in ("both", str(ps.rank)):
        raise ValueError("the cause")
    barrier(ps.world)
"""


@pytest.mark.full
@pytest.mark.parametrize("who", thinned(["1", "0", "both"], 2))
def test_the_cause_is_said_once_under_torchrun(who, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(tmp_path / "script.py"), who], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 1
    assert done.stderr.count("the cause") == 1, done.stderr
    *_, last, box = done.stderr.splitlines()
    assert last == f"  error: {'rank 1: ' if who == '1' else ''}the cause" and set(box) == {"="}, (
        "last on the terminal"
    )


def test_a_lost_connection_is_never_the_root_cause_under_torchrun(monkeypatch, tmp_path):
    """torchrun takes the first failure by whole seconds, and the first rank where two are equal."""
    failed_at = {}
    for rank, error in ((0, RuntimeError("Connection closed by peer")), (1, ValueError("the cause"))):
        file = tmp_path / f"{rank}.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        with pytest.raises((RuntimeError, SystemExit)), errors_as_one_line():
            raise error
        failed_at[rank] = int(json.loads(file.read_text())["message"]["extraInfo"]["timestamp"])
    assert failed_at[1] < failed_at[0]


def test_a_crash_is_last_under_torchrun_by_its_last_calls(monkeypatch, tmp_path):
    def deep(calls):
        return {}["x"] if calls == 0 else deep(calls - 1)

    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with pytest.raises(KeyError), errors_as_one_line():
        deep(9)
    shown = json.loads(file.read_text())["message"]["extraInfo"]["py_callstack"].splitlines()
    assert shown[-1] == "KeyError: 'x'"
    assert sum(line.startswith("  File ") for line in shown) == 3
    file.unlink()
    with pytest.raises(RuntimeError), errors_as_one_line():
        raise RuntimeError("shapes do not fit")
    assert "shapes do not fit" in file.read_text()
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    with pytest.raises(KeyError), errors_as_one_line():
        deep(9)
