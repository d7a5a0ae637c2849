"""examples/pretrain_gpt.py as a user runs it: alone, under torchrun, and with mistakes."""

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from core.training import RunConfig
from tests import warm
from tests.marks import thinned
from tests.training.tiny import S, prepared

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "examples" / "pretrain_gpt.py")
STEPS = 5
TINY = (
    "--model.num-layers 2 --model.hidden-size 32 --model.num-attention-heads 4 --model.ffn-hidden-size 48 "
    f"--data.sequence-length {S} --training.train-steps {STEPS} --training.global-batch-size 8 "
    "--training.micro-batch-size 2 --training.log-interval 2 --training.eval-interval 3 --device cpu"
).split()


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """Flags for a small corpus of the user's own."""
    made = prepared(tmp_path_factory.mktemp("corpus"))
    return [f"--data.train={made.train}", f"--data.valid={made.valid}", f"--data.tokenizer={made.tokenizer}"]


def once(flags):
    """Each flag with its values once, the later one in the place of the earlier one: a run refuses both."""
    groups = {}
    for word in flags:
        head = word.partition("=")[0]
        if word.startswith("--"):
            groups[head], last = [word], head
        else:
            groups[last].append(word)
    return [word for words in groups.values() for word in words]


def run(launcher, flags, directory):
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [warm.python() if launcher else sys.executable, *launcher, SCRIPT, *once(flags)]
    return subprocess.run(command, env=env, cwd=directory, capture_output=True, text=True, timeout=600)


def check_output(text, directory, *, ranks, head):
    """Everything that the issue promises to a reader, in its order."""
    processes = "1 process" if ranks == 1 else f"{ranks} processes"
    told, _, rest = text.partition(f"\n{processes} on ")
    assert re.match(
        r"\d+ settings differ from their defaults \(all are in .*out/run\.toml\):\n  \w+\.\w+ = ",
        told,
    )
    assert f"  training.train_steps = {STEPS}  (--training.train-steps)" in told.splitlines()
    is_kept = any("checkpoint.directory = " in line for line in told.splitlines())
    assert text.count("note: the weights of this run are not kept; --checkpoint.directory DIR") == 2 * (not is_kept)
    lines = f"{processes} on {rest}".splitlines()
    assert lines[0] == head
    assert re.fullmatch(r"parameters: [\d,]+ in all, [\d,]+ on rank 0 \(with padding\)", lines[1])
    assert re.fullmatch(r"text: [\d,]+ tokens to train on, [\d,]+ to validate", lines[2])
    steps = [line for line in lines if re.match(rf"step +\d+/{STEPS} \| loss \d+\.\d+ \| grad norm \d", line)]
    assert [int(line.split("/")[0].split()[1]) for line in steps] == [1, 2, 4, 5]
    told = [
        re.fullmatch(rf"step +(\d)/{STEPS} \| validation (\d\.\d+) bits per byte \| perplexity .*", line)
        for line in lines
    ]
    validated = {int(found[1]): float(found[2]) for found in told if found}
    assert validated.keys() == {3, 5}, "at its interval, and at the end"
    _, begins, rest = text.partition("--- a sample: the text begins ---\n")
    prompt, goes_on, _ = rest.partition("\n--- and the model goes on ---\n")
    assert begins and goes_on and prompt.startswith("def f"), "as the validation text begins"
    bits = re.search(r"^bits per byte: unigram (\d\.\d+), gzip -9 (\d\.\d+), validation (\d\.\d+)$", text, re.M)
    assert bits and float(bits[1]) > 3
    last = re.fullmatch(r"first step here and in one process: .*, max \|difference\| (\d\.\de[-+]\d+)", lines[-1])
    assert last and float(last[1]) < 1e-5
    rows = [json.loads(line) for line in (directory / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 5, 5] and all(r["time"] > 1.7e9 for r in rows)
    assert all(r["tokens_seen"] == 8 * S * r["step"] for r in rows)
    records = [r for r in rows if "validation" not in r]
    assert {r["step"]: round(r["validation_bits_per_byte"], 4) for r in rows if "validation" in r} == validated
    assert f"loss {records[-1]['loss']:.4f}" in steps[-1]
    assert RunConfig.from_toml(directory / "out" / "run.toml").training.train_steps == STEPS
    assert "training.train_steps" in (directory / "out" / "report.html").read_text()
    assert (directory / "out" / "report.png").read_bytes()[:4] == b"\x89PNG"
    return [r["loss"] for r in records], float(bits[3])


ONE = "1 process on CPU"
TENSOR = "2-way tensor parallel (the sequence too)"


@pytest.fixture(scope="module")
def alone(own, tmp_path_factory):
    """What one process says and writes; this one, which spares it the imports."""
    directory, said = tmp_path_factory.mktemp("alone"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(sys, "argv", [SCRIPT, *TINY, *own, f"--training.output={directory / 'out'}"])
        runpy.run_path(SCRIPT, run_name="__main__")
    return check_output(said.getvalue(), directory, ranks=1, head=ONE)


def test_one_process_without_torchrun(alone):
    losses, _ = alone
    assert losses[-1] < losses[0] and not torch.distributed.is_initialized()


@pytest.mark.full
def test_a_process_of_its_own_says_nothing_else(own, alone, tmp_path):
    done = run([], [*TINY, *own, "--training.output=out"], tmp_path)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert check_output(done.stdout, tmp_path, ranks=1, head=ONE) == alone


def torchrun(ranks):
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


@pytest.mark.full
def test_two_tensor_ranks_under_torchrun(own, alone, tmp_path):
    layout = ["--parallel.tensor=2", "--parallel.sequence-parallel"]
    done = run(torchrun(2), [*TINY, *own, *layout, "--training.output=out"], tmp_path)
    assert done.returncode == 0, done.stderr
    losses, bits = check_output(done.stdout, tmp_path, ranks=2, head=f"2 processes on CPU: {TENSOR}")
    assert losses == pytest.approx(alone[0], rel=1e-4) and bits == pytest.approx(alone[1], abs=2e-3)


@pytest.mark.full
def test_four_ranks_under_torchrun(own, alone, tmp_path):
    layout = ["--parallel.tensor=2", "--parallel.sequence-parallel", "--training.micro-batch-size=4"]
    done = run(torchrun(4), [*TINY, *own, *layout, "--training.output=out"], tmp_path)
    assert done.returncode == 0, done.stderr
    head = f"4 processes on CPU: {TENSOR}, 2 replicas (ZeRO stage 1)"
    losses, _ = check_output(done.stdout, tmp_path, ranks=4, head=head)
    assert losses == pytest.approx(alone[0], rel=1e-4)


@pytest.mark.full
@pytest.mark.parametrize(
    "flags", thinned([["--pipeline.schedule=zb-v", "--model.num-layers=4"], ["--training.recompute=stage"]], 2)
)
def test_pipeline_and_tensor_ranks_under_torchrun(own, tmp_path, flags):
    """The first step against one process is in its last line, which `check_output` reads."""
    layout = ["--parallel.tensor=2", "--parallel.pipeline=2", "--parallel.sequence-parallel", *flags]
    done = run(torchrun(4), [*TINY, *own, *layout, "--training.output=out"], tmp_path)
    assert done.returncode == 0, done.stderr
    for title in ("predicted for these times", "last step, measured"):
        # an action of less than two columns is drawn without its number; F1 comes next
        first = rf"^{title}: \d+ ms, bubble \d+%\nrank 0 \|[. ]*F(0|[. ]*F)"
        assert re.search(first, done.stdout, re.M), done.stdout
    schedule = "zb-v" if "zb-v" in flags[0] else "1f1b"
    head = f"4 processes on CPU: {TENSOR}, 2-stage pipeline ({schedule})"
    losses, _ = check_output(done.stdout, tmp_path, ranks=4, head=head)
    assert losses[-1] < losses[0]


WRONG = {
    "tensor": (["--parallel.tensor=3"], "world size 1 is not a multiple of parallel.tensor(3)"),
    "heads": (
        ["--model.num-attention-heads=5"],
        "model.hidden_size=32 does not divide by model.num_attention_heads=5; use 30 or 35",
    ),
    "batch": (
        ["--training.micro-batch-size=3"],
        "training.global_batch_size=8 is not a multiple of training.micro_batch_size=3",
    ),
    "file": (["--data.train=nowhere"], "nowhere.bin does not exist"),
    "sequence": (["--data.sequence-length=99999"], "sequence_length=99999 needs 100000 tokens"),
    "device": (["--device=warp"], "device 'warp' asked for, but this machine's accelerator is"),
    "two at once": (["--parallel.tensor=3", "--model.hidden-size=33"], "hidden_size=33 does not divide"),
}


def mistaken(flags, monkeypatch):
    """The script in this process, which saves its start; any process group would be an error."""
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *a, **k: pytest.fail("a process group"))
    monkeypatch.setattr(sys, "argv", [SCRIPT, *once(flags)])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(SCRIPT, run_name="__main__")
    return stopped.value.code


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_told_in_one_line(own, case, monkeypatch, tmp_path, capsys):
    flags, message = WRONG[case]
    monkeypatch.chdir(tmp_path)
    assert mistaken([*TINY, *own, *flags], monkeypatch) in (1, 2)
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and message in said.err
    assert said.err.count("\n") == {"tensor": 4, "two at once": 3}.get(case, 1)
    assert said.out == "" and list(tmp_path.iterdir()) == [], "nothing has begun"


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--training.train-steps=0", "--training.log-interval=0"], "train_steps=0 must be at least 1"),
        (["--optimizer.adam-beta1=1"], "adam_beta1=1.0"),
        (["--data.sequence-length=x"], "sequence-length"),
        (["--model.style=bert"], "llama"),
        (["--parallel.pipeline=0"], "pipeline=0 must be at least 1"),
        (["--pipeline.schedule=zbv"], "there is no schedule 'zbv'"),
        (["--no-such-flag"], "unknown no_such_flag"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_value_that_no_run_could_have_is_told_by_the_command_line(flags, message, monkeypatch, capsys):
    assert mistaken([*TINY, *flags], monkeypatch) == 2
    said = capsys.readouterr()
    assert message in said.err + said.out and "Traceback" not in said.err + said.out


@pytest.mark.full
def test_a_mistake_ends_the_process_without_a_traceback(own, tmp_path):
    done = run([], [*TINY, *own, "--parallel.tensor=3", "--model.hidden-size=33"], tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    first, second, third = done.stderr.splitlines()
    assert first == "error: this run has 2 mistakes:"
    assert second.startswith("  world size 1 is not a multiple of parallel.tensor(3) x parallel.pipeline(1) x ")
    assert third.startswith("  model.hidden_size=33 does not divide by model.num_attention_heads=4; use ")


@pytest.mark.full
def test_a_mistake_under_torchrun_ends_every_rank(own, tmp_path):
    done = run(
        torchrun(2),
        [*TINY, *own, "--parallel.tensor=2", "--model.num-query-groups=1", "--training.micro-batch-size=3"],
        tmp_path,
    )
    assert done.returncode != 0 and "step" not in done.stdout
    *_, head, first, second, box = done.stderr.splitlines()
    assert head == "  error: this run has 2 mistakes:" and set(box) == {"="}, "last on the terminal"
    assert first == "    model.num_query_groups=1 does not divide over parallel.tensor=2; valid: 1"
    assert second.startswith("    training.global_batch_size=8 is not a multiple of training.micro_batch_size=3 x ")
    assert done.stderr.count("does not divide") == 1, "once per job"


def test_the_example_is_short():
    assert len(Path(SCRIPT).read_text().splitlines()) <= 15
