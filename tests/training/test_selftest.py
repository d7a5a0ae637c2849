"""The self-test of the report: it finds a wrong sum and a dead peer, and it ends."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from core.parallel_state.collectives.groups import world_group
from core.training.doctor import selftest
from core.training.doctor.selftest import COLLECTIVES, SelftestOutcome, as_checks, exercise

ROOT = Path(__file__).parents[2]
NAMES = list(COLLECTIVES)
CPU = torch.device("cpu")


def exercised(broken=None):
    """The outcomes of this rank; `broken` maps a collective to what replaces it on rank 1."""
    group = world_group(5.0)
    replaced = dict(broken or {}) if group.rank == 1 else {}
    with patch.dict(COLLECTIVES, replaced):
        return list(exercise(group, CPU, 1 << 14))


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full), 4])
def test_every_collective_is_right_and_has_a_rate(ranks, world):
    for row in ranks(exercised, world=world):
        assert [outcome.name for outcome in row] == NAMES
        assert all(not outcome.error and outcome.gb_per_s > 0 for outcome in row)


def one_number_wrong(x, group):
    got, want = selftest._all_gather(x, group)
    got[len(got) // 2] += 1
    return got, want


def other_shape(x, group):
    got, want = selftest._reduce_scatter(x, group)
    return got[:-1], want


def raises(x, group):
    raise RuntimeError("no route\nto host")


@pytest.mark.parametrize(
    "name, wrong, error",
    [
        ("all_gather", one_number_wrong, "1 of 128 numbers are wrong"),
        ("reduce_scatter", other_shape, "shape [63] instead of [64]"),
    ],
)
def test_a_wrong_result_is_found_where_it_is(name, wrong, error, ranks):
    first, second = ranks(exercised, {name: wrong})
    told = {outcome.name: outcome.error for outcome in second}
    assert told[name] == error and [n for n in told if told[n]] == [name], "the others are well"
    assert not any(outcome.error for outcome in first)
    check = {c.name: c for c in as_checks([first, second], "here")}[f"self-test {name}"]
    assert check.required and check.status == "missing" and check.value.startswith("rank 1: ")


def test_a_rank_that_fails_stops_and_says_why():
    from types import SimpleNamespace

    with patch.dict(COLLECTIVES, {NAMES[0]: raises}):
        (told,) = exercise(SimpleNamespace(size=2, rank=0), CPU, 1 << 10)
    assert told == SelftestOutcome(name=NAMES[0], error="no route to host")


def rows(*errors, count=6):
    """Outcomes of a rank, 2 GB/s each, the last `errors` instead."""
    good = [SelftestOutcome(name=name, gb_per_s=2.0) for name in NAMES[:count]]
    return [*good, *(SelftestOutcome(name=NAMES[count + i], error=error) for i, error in enumerate(errors))]


def test_a_check_per_collective_with_the_slowest_ranks_rate():
    slow = [SelftestOutcome(name=name, gb_per_s=1.25) for name in NAMES]
    checks = as_checks([rows(), slow], "gloo between 2 processes")
    assert [c.name for c in checks] == [f"self-test {name}" for name in NAMES]
    assert all((c.status, c.value) == ("ok", "1.25 GB/s, gloo between 2 processes") for c in checks)


def test_what_comes_after_a_failure_is_not_called_well():
    checks = as_checks([rows("Connection closed", count=2), rows("the process ended with signal 9", count=2)], "")
    assert [c.status for c in checks] == ["ok", "ok"] + ["missing"] * 4 and all(c.required for c in checks[2:])
    assert checks[2].value == "rank 1: the process ended with signal 9; rank 0: Connection closed"
    assert "GLOO_SOCKET_IFNAME" in checks[2].remedy
    assert all(c.value.startswith("not reached") and c.remedy is None for c in checks[3:])
    assert {c.status for c in as_checks([[], []], "")} == {"missing"}, "nobody answered"


def test_no_more_processes_are_told(monkeypatch):
    def refuse():
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    (check,) = selftest.local_checks()
    assert check.status == "off" and "Resource temporarily unavailable" in check.value and check.remedy


# forks: in a process without threads. Rank 1 dies in one collective, is stopped in another
SCRIPT = """
import json, os, signal, sys, time
from core.training.doctor import selftest
from core.training.doctor.selftest import COLLECTIVES, LocalWorld, as_checks

def on_rank_1(name, act):
    original = COLLECTIVES[name]
    def call(x, group):
        got, want = original(x, group)
        return (act(got) if group.rank == 1 else got), want
    return {**COLLECTIVES, name: call}

def told(name, act, deadline_s):
    kept = dict(COLLECTIVES)
    COLLECTIVES.update(on_rank_1(name, act))
    world = LocalWorld.start(deadline_s=deadline_s)
    COLLECTIVES.update(kept)
    checks = as_checks(world.outcomes(), "here")
    try:
        os.waitpid(-1, os.WNOHANG)
        left = "a process is left"
    except ChildProcessError:
        left = "" if not os.path.exists(world.directory) else "a file is left"
    return [left, *(f"{c.status} {c.value}" for c in checks)]

def briefly(*arguments):
    selftest.WAIT_S = 1.5
    return told(*arguments)

print(json.dumps({
    "dead": told("all_gather", lambda got: os.kill(os.getpid(), signal.SIGKILL), 30),
    "stopped": briefly("broadcast", lambda got: os.kill(os.getpid(), signal.SIGSTOP), 6),
}))
"""


def test_a_dead_and_a_stopped_peer_are_found_within_the_bound():
    begun = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert begun.returncode == 0, begun.stderr
    told = json.loads(begun.stdout)
    assert [rows[0] for rows in told.values()] == [""] * 2, "nothing is left behind"
    dead, stopped = told["dead"], told["stopped"]
    assert dead[1].startswith("ok ") and "rank 1: the process ended with signal 9" in dead[2]
    assert all(row.startswith("ok ") for row in stopped[1:4])
    # on a busy machine rank 0 may not have answered either
    assert stopped[4].startswith("missing") and "rank 1: the process did not answer in time" in stopped[4]
