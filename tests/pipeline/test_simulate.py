import json
import subprocess
import sys
from pathlib import Path

import pytest

from core.pipeline.draw.torch_csv import read_csv
from core.pipeline.schedule.actions import Schedule
from core.pipeline.schedule.player import Costs
from core.pipeline.schedule.schedules import NAMED, make
from core.pipeline.simulate import main, parse_costs, simulate, table

ROOT = Path(__file__).parents[2]


def test_prints_drawing_step_bubble_and_memory(capsys):
    assert main(["zb-v", "--stages", "4", "--microbatches", "8"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("zb-v, 4 ranks, 8 microbatches\n\nrank 0 | F0 F1 F2 F3 F4 F5 F6 f0 i0 w0")
    assert "step 25.5, 1.062 of the ideal 24 (the busiest rank)" in out
    assert "bubble 5.9 % of all ranks' time" in out
    assert "peak memory 4 4 4 4 (rank 0, 1 ...," in out


def test_runs_without_torch():
    code = "import sys, runpy; sys.modules['torch'] = None; sys.argv[1:] = ['--list', '--microbatches', '4'];"
    code += "runpy.run_module('core.pipeline.simulate', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[2:]] == list(NAMED)


def test_the_list_is_a_table_of_all_named(capsys):
    assert main(["--list", "--memory-limit", "4", "--fused-backward"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["4 ranks, 8 microbatches", "schedule           step/ideal   bubble  peak memory"]
    assert "1f1b                    1.375   27.3 %         4.00" in lines
    assert "zb-h2                   1.125   11.1 %         7.00   over the limit" in lines
    assert len(lines) == 2 + len(NAMED)


def test_costs_and_recompute(capsys):
    costs = ["--recompute", "--costs", "F=1,I=1.15,W=.85,R=1,saved=.1,comm=.05"]
    assert main(["interleaved-1f1b", "--chunks", "3", "--microbatches", "12", *costs, "--width", "60"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("interleaved-1f1b, 4 ranks, 12 microbatches, recompute\n")
    assert "R recompute" in out
    assert all(len(line) <= 60 for line in out.splitlines() if line.startswith("rank"))
    by_hand = simulate(make("interleaved-1f1b", 4, 12, 3), parse_costs(costs[2]), recompute=True)
    assert by_hand.schedule.recomputed
    assert f"step {by_hand.played.makespan:.4g}, {by_hand.over_ideal:.3f} of the ideal 48" in out


def test_fused_backward(capsys):
    main(["1f1b"])
    main(["1f1b", "--fused-backward"])
    out = capsys.readouterr().out
    assert "step 30, 1.250 of" in out
    assert "step 33, 1.375 of" in out


def test_writes_picture_trace_and_csv(tmp_path, capsys):
    files = {name: str(tmp_path / "a/new/folder" / f"out.{name}") for name in ("svg", "trace", "csv")}
    assert main(["zb-v", "--recompute", *(word for name, path in files.items() for word in (f"--{name}", path))]) == 0
    assert capsys.readouterr().out.endswith(
        "".join(f"wrote {path}\n" for path in files.values())[:-1] + " without its R, which torch does not have\n"
    )
    assert "zb-v, 4 ranks, 8 microbatches, recompute" in Path(files["svg"]).read_text()
    assert json.loads(Path(files["trace"]).read_text())["traceEvents"]
    assert read_csv(Path(files["csv"]).read_text(), name="zb-v") == make("zb-v", 4, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["1f1b", "--memory-limit", "3.5"],
            "1f1b needs 4 microbatch activations on rank 0, the memory limit is 3.5; within it, the fastest first: "
            "v-half, v-min; the least is 2, of v-min\n",
        ),
        (
            ["zb-v", "--memory-limit", "1.5"],
            "zb-v needs 4 microbatch activations on rank 0, the memory limit is 1.5; no named schedule is within it; "
            "the least is 2, of v-min\n",
        ),
        (["zbv"], "there is no schedule 'zbv': did you mean 'zb-v'?"),
        (["1f1b", "--chunks", "2"], "1f1b has 1 chunk per rank, got chunks 2"),
        (["--stages", "0"], "a schedule needs at least 1 rank, got 0"),
        (["--microbatches", "0"], "a schedule needs at least 1 microbatch, got 0"),
        (
            ["--costs", "F=1,X=2"],
            "cost 'X=2': write name=number, 0 or more, names: F, I, W, R, comm, saved, graph, wait",
        ),
        (["--costs", "F=-1"], "cost 'F=-1': write name=number, 0 or more"),
        (["--costs", "F=nan"], "cost 'F=nan': write name=number, 0 or more"),
        (["--costs", "F"], "cost 'F': write name=number, 0 or more"),
        (["--svg", f"{__file__}/out.svg"], f"File exists: {__file__!r}"),
    ],
)
def test_what_cannot_be_ends_with_1_and_says_why(arguments, message, capsys):
    assert main(arguments) == 1
    assert message in capsys.readouterr().err


def test_a_memory_limit_that_is_met(capsys):
    assert main(["v-min", "--memory-limit", "2", "--stages", "1", "--microbatches", "1"]) == 0
    assert capsys.readouterr().out.startswith("v-min, 1 rank, 1 microbatch\n")
    assert main(["v-min", "--memory-limit", "2"]) == 0


def test_mistyped_arguments_end_with_1_and_help_explains_stages(capsys):
    for arguments, code in ((["--stages", "four"], 1), (["--nothing"], 1), (["--help"], 0)):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == code
    said = " ".join(capsys.readouterr().out.split())
    assert "pipeline ranks, Megatron's pipeline_model_parallel_size; each rank holds one stage per chunk" in said


def test_costs_that_are_not_named_stay():
    assert parse_costs("") == Costs()
    assert parse_costs("comm=.05, saved=.1,") == Costs(comm=0.05, saved=0.1)


def test_the_ideal_is_the_work_of_the_busiest_rank():
    uneven = Schedule.parse("two and one: 0 0 1\n0F0 1F0 1B0 0B0\n2F0 2B0\n")
    outcome = simulate(uneven)
    assert (outcome.ideal, outcome.played.makespan) == (6, 8)
    assert table([outcome]).splitlines()[1].split() == ["two", "and", "one", "1.333", "43.8", "%", "2.00"]
