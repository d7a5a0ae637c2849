"""Runs that share an output directory: each keeps its own records, and one that goes on has those of its steps."""

import json
import re

import pytest

from core.pretrain import main
from core.training.log.earlier import METRICS, RunName, make_room
from core.training.log.metrics import MetricsLog
from tests.training.test_metrics import record
from tests.training.tiny import S, prepared


def steps(folder):
    """[(step, run)] of a folder's records."""
    lines = (folder / METRICS).read_text().splitlines()
    return [(row["step"], row.get("run")) for row in map(json.loads, lines)]


def logged(output, run, start, last):
    """What a run says as it begins; it makes the steps to `last`."""
    said = []
    make_room(output, run, start, said.append)
    with MetricsLog(output, start, run=run.name) as log:
        for step in range(start + 1, last + 1):
            log.add(record(step))
    return said


def test_a_run_from_step_0_moves_the_records_of_another(tmp_path):
    (tmp_path / "run.toml").write_text("of a")
    assert logged(tmp_path, RunName("a"), 0, 3) == []
    (told,) = logged(tmp_path, RunName("b"), 0, 2)
    assert told.startswith(f"note: {tmp_path} has the records of another run, of 3 steps: they are in")
    assert "earlier-1 now; training.output=DIR keeps runs apart" in told
    assert steps(tmp_path) == [(1, "b"), (2, "b")]
    assert steps(tmp_path / "earlier-1") == [(1, "a"), (2, "a"), (3, "a")]
    assert (tmp_path / "earlier-1" / "run.toml").read_text() == "of a"
    logged(tmp_path, RunName("c"), 0, 1)
    assert steps(tmp_path / "earlier-2") == [(1, "b"), (2, "b")]


def test_a_run_that_goes_on_has_its_own_records(tmp_path):
    logged(tmp_path, RunName("a"), 0, 3)
    assert logged(tmp_path, RunName("a", before="a"), 2, 4) == [], "step 3 is made again"
    assert steps(tmp_path) == [(1, "a"), (2, "a"), (3, "a"), (4, "a")]
    logged(tmp_path, RunName("b"), 0, 5)
    assert len(logged(tmp_path, RunName("a", before="a"), 4, 5)) == 1
    assert steps(tmp_path) == [(step, "a") for step in range(1, 6)], "those from before are in earlier-1"
    assert steps(tmp_path / "earlier-2") == [(step, "b") for step in range(1, 6)]


def test_a_branch_begins_with_the_steps_before_it_and_leaves_the_others(tmp_path):
    logged(tmp_path, RunName("a"), 0, 4)
    assert len(logged(tmp_path, RunName("b", before="a", branches=True), 2, 3)) == 1
    assert steps(tmp_path) == [(1, "b"), (2, "b"), (3, "b")]
    assert steps(tmp_path / "earlier-1") == [(step, "a") for step in range(1, 5)]
    assert logged(tmp_path / "new", RunName("c", before="a", branches=True), 2, 3) == []


def test_records_from_before_runs_had_names_are_gone_on_with(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.add(record(1))
    assert logged(tmp_path, RunName("a"), 1, 2) == []
    assert steps(tmp_path) == [(1, "a"), (2, "a")]


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    made = prepared(tmp_path_factory.mktemp("corpus"))
    return [
        "--model.num-layers=1", "--model.hidden-size=16", "--model.num-attention-heads=2", "--device=cpu",
        f"--data.train={made.train}", f"--data.tokenizer={made.tokenizer}", f"--data.sequence-length={S}",
        "--training.global-batch-size=2", "--training.micro-batch-size=2", "--training.log-interval=1",
        "--training.no-compare-first-step", "--checkpoint.no-asynchronous",
    ]  # fmt: skip


def test_two_runs_without_an_output_and_the_first_goes_on(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["pretrain"])
    output = tmp_path / "runs" / "pretrain"

    def run(directory, last):
        main([*flags, f"--checkpoint.directory={directory}", f"--training.train-steps={last}"])
        return re.findall(r"has the records of another run, of (\d) steps", capsys.readouterr().out)

    assert run("a", 2) == []
    assert run("b", 3) == ["2"]
    assert run("a", 4) == ["3"]
    found = steps(output)
    assert {step for step, _ in found} == {1, 2, 3, 4} and len({name for _, name in found}) == 1
    assert {name for _, name in steps(output / "earlier-1")} == {found[0][1]}
    assert 'checkpoint.directory = "b"' in "\n".join(
        f"checkpoint.{line}" for line in (output / "earlier-2" / "run.toml").read_text().splitlines()
    )
    assert run("a", 5) == [], "its own"
    # a run that is refused moves nothing
    with pytest.raises(SystemExit):
        run("a", 6) or main([*flags, "--checkpoint.directory=a", "--data.seed=7", "--training.train-steps=9"])
    assert len(list(output.glob("earlier-*"))) == 2 and max(steps(output))[0] == 6
