"""The command that explains a run, and the file to start from."""

import os
import re
import sys
import tomllib

import pytest

from core.training import RunConfig
from core.training.config.__main__ import main
from core.training.config.explain import template
from core.training.config.run import known_fields


@pytest.fixture
def file(tmp_path):
    (tmp_path / "run.toml").write_text("[optimizer]\nlr = 3e-4\nlr_schedule = 'cosine'\n[parallel]\ntensor = 2\n")
    return str(tmp_path / "run.toml")


def told(capsys, *arguments):
    """(exit status, stdout) of the command."""
    status = main([str(word) for word in arguments])
    said = capsys.readouterr()
    assert not said.err
    return status, said.out


def test_every_field_with_value_origin_and_meaning(file, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    status, text = told(
        capsys,
        "--explain",
        file,
        "--world-size",
        "16",
        "--training.global-batch-size=256",
        "--training.micro-batch-size",
        4,
    )
    assert status == 0
    words = " ".join(text.split())
    for field in known_fields().values():
        assert re.search(rf"^  {field.key} +\S", text, re.M), field.name
        assert field.help.split(" ", 3)[0] in words
    assert re.search(rf"^  lr +0\.0003 +{re.escape(file)}:2 +Largest learning rate\.$", text, re.M)
    assert re.search(r"^  lr_decay_steps +200 +training\.train_steps +Update at", text, re.M)
    assert re.search(r"^  micro_batch_size +4 +--training\.micro-batch-size +Rows", text, re.M)
    assert re.search(r"^  min_lr +0\.0 +default +Learning", text, re.M)
    assert text.endswith("\n16 ranks: global_batch_size 256 = micro_batch_size 4 x accumulation 8 x data 8\n")
    assert [line for line in text.splitlines() if line.startswith("[")] == [
        f"[{part}]" for part in RunConfig().to_dict() if part != "device"
    ]


def test_what_was_changed_comes_first_and_memory_last(file, capsys):
    flags = ["--parallel.pipeline", "2", "--pipeline.schedule", "zb-v", "--checkpoint.keep-last", "4"]
    status, text = told(capsys, "--explain", file, "--world-size", 4, *flags)
    first, _, table = text.partition("\n\n")
    assert status == 0 and first.splitlines() == [
        "7 settings are not from their defaults:",
        f"  parallel.tensor = 2  ({file}:5)",
        "  parallel.pipeline = 2  (--parallel.pipeline)",
        '  pipeline.schedule = "zb-v"  (--pipeline.schedule)',
        f"  optimizer.lr = 0.0003  ({file}:2)",
        f'  optimizer.lr_schedule = "cosine"  ({file}:3)',
        "  optimizer.lr_decay_steps = 200  (training.train_steps)",
        "  checkpoint.keep_last = 4  (--checkpoint.keep-last)",
        "note: checkpoint.keep_last=4 has no effect: without checkpoint.directory nothing is saved",
    ]
    # what a run of this layout measured: weights 3.2, gradients 3.2, states 6.4 MiB on the rank with the table
    memory = "weights 3.2 + gradients 3.2 + optimizer 6.4 = 12.8 MiB on the fullest one, before activations"
    assert f"\nmemory per rank: {memory}\n" in table


def test_memory_is_what_the_ranks_hold(capsys):
    """llama-1b: 1,235,814,400 parameters with its own vocabulary, in bf16, over 4 data ranks at stage 3."""
    flags = ["--model.preset", "llama-1b", "--model.vocab-size", "128256", "--model.bf16"]
    _, text = told(capsys, "--explain", "--world-size", 4, *flags, "--data-parallel.zero-stage", "3")
    (line,) = (line for line in text.splitlines() if line.startswith("memory per rank: "))
    weights, gradients, optimizer = (
        float(number.replace(",", "")) for number in re.findall(r" ([\d,]+\.\d) ", line)[:3]
    )
    share = 1_235_814_400 / 4 / 2**20
    assert (weights, gradients, optimizer) == pytest.approx((2 * share, 4 * share, 12 * share), rel=1e-3)
    _, text = told(capsys, "--explain", "--world-size", 1, "--data.train", "gone")
    assert "memory per rank" not in text, "first the mistakes"


def test_a_batch_that_does_not_fit_and_everything_else_that_is_wrong(file, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "6")
    status, text = told(capsys, "--explain", file, "--optimizer.lrr", "3", "--data.vocab-size", "1")
    misfit = "global_batch_size=16 is not a multiple of micro_batch_size=2 x data(3) = 6; use 12 or 18"
    assert status == 1 and f"\n6 ranks: {misfit}\n" in text
    wrong = text.partition("\n3 mistakes:\n")[2].splitlines()
    assert [line.partition(";")[0].strip() for line in wrong] == [
        "unknown optimizer.lrr",
        "data: vocab_size=1 cannot hold every byte",
        misfit.partition(";")[0],
    ]
    assert re.search(r"^  vocab_size +1 +--data\.vocab-size", text, re.M), "as it was given"


@pytest.mark.parametrize(
    "flags, said",
    [
        (
            ["--parallel.pipeline", "3"],
            "4 ranks: the batch cannot be solved, the layout does not fit this many ranks",
        ),
        (["--parallel.tensor", "0"], "4 ranks: the batch cannot be solved before parallel is right"),
        (["--training.train-steps", "x"], "4 ranks: the batch cannot be solved before training is right"),
    ],
)
def test_a_batch_that_cannot_be_solved(flags, said, capsys):
    status, text = told(capsys, "--explain", "--world-size", 4, *flags)
    assert status == 1 and said in text and text.count("1 mistake:") == 1


def test_a_narrow_terminal_still_tells_everything(file, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    status, text = told(capsys, "--explain", file, "--world-size", "4")
    words = " ".join(text.split())
    assert status == 0 and all(field.help in words for field in known_fields().values())


def test_the_template_is_a_run_of_defaults_in_which_every_field_is_explained(file, tmp_path, capsys):
    text = template()
    assert RunConfig.from_dict(tomllib.loads(text)) == RunConfig()
    assert set(tomllib.loads(text)) == set(RunConfig().to_dict()) - {"device"}
    words = " ".join(line.removeprefix("# ") for line in text.splitlines())
    for field in known_fields().values():
        line = f'# {field.key} = "None"' if field.default is None else f"# {field.key} = "
        assert any(found.startswith(line) for found in text.splitlines()), field.name
        assert field.help in words and f"{field.type}; default: " in words
    uncommented = re.sub(r"^# (\w+ = )", r"\1", text, flags=re.M)
    assert RunConfig.from_dict(tomllib.loads(uncommented)) == RunConfig(), "a commented line may be used as it stands"
    status, said = told(capsys, "--template")
    assert status == 0 and said == text
    status, said = told(capsys, "--template", tmp_path / "new.toml")
    assert status == 0 and (tmp_path / "new.toml").read_text() == text and f"--explain {tmp_path}/new.toml" in said
    assert told(capsys, "--explain", tmp_path / "new.toml", "--world-size", "1")[0] == 0
    before = (tmp_path / "run.toml").read_text()
    assert main(["--template", file]) == 2 and (tmp_path / "run.toml").read_text() == before
    assert capsys.readouterr().err == f"error: {file} is there already; give another name, or remove it\n"


@pytest.mark.parametrize(
    "arguments, status, said",
    [
        (["--help"], 0, "--template [FILE.toml]            prints, or writes, a file with every field"),
        ([], 2, "one of the arguments --explain --template is required"),
        (["--explain", "--world-size", "0"], 2, "--world-size 0 must be at least 1"),
        (["--explain", "--world-size", "x"], 2, "argument --world-size: invalid int value: 'x'"),
        (["--template", "--optimizer.lr", "3"], 2, "--template takes no flags: --optimizer.lr"),
        (["--template", "no/such/directory/run.toml"], 2, "error: [Errno 2] No such file or directory"),
    ],
)
def test_the_commands_own_mistakes(arguments, status, said, capsys):
    try:
        ended = main(arguments)
    except SystemExit as end:
        ended = end.code
    assert ended == status
    assert said in "".join(capsys.readouterr())


def test_an_explained_file_that_is_not_there(capsys):
    status, text = told(capsys, "--explain", "none.toml", "--world-size", 1)
    assert status == 1 and "1 mistake:\n  none.toml does not exist" in text


def test_every_file_that_is_named_is_read_and_the_last_one_wins(file, tmp_path, capsys):
    (tmp_path / "more.toml").write_text("optimizer.lr = 0.5\n")
    files = ["--explain", file, "--optimizer.min-lr", "0.25", "--explain", tmp_path / "more.toml"]
    status, text = told(capsys, *files, "--world-size", 2)
    assert status == 0 and re.search(r"^  lr_schedule +.cosine. .*run\.toml:3\b", text, re.M)
    assert re.search(r"^  lr +0\.5 .*more\.toml:1\b", text, re.M)
    assert re.search(r"^  min_lr +0\.25 +--opt", text, re.M)


def test_a_world_size_of_nothing_is_one_rank_and_a_word_is_a_mistake(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "")
    status, text = told(capsys, "--explain")
    assert status == 0 and "\n1 rank: global_batch_size" in text
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(SystemExit, match="2"):
        main(["--explain"])
    assert (
        "error: WORLD_SIZE='many' is no number of ranks; unset it, or give --world-size N" in capsys.readouterr().err
    )
    assert told(capsys, "--explain", "--world-size", 1)[0] == 0


def test_a_number_that_nobody_can_read_is_shown_by_its_size(capsys):
    status, text = told(capsys, "--explain", "--world-size", 1, "--optimizer.lr", "9" * 400)
    assert status == 1 and "optimizer.lr=10**400 is not finite, a number is needed (--optimizer.lr)" in text
    assert re.search(r"^  lr +10\*\*400 ", text, re.M)


@pytest.mark.parametrize("command", [["--template"], ["--explain", "--world-size", "1"]])
def test_a_reader_that_leaves_early_is_no_mistake(command, monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main(command) == 0
        out.write("what is flushed at exit")
    assert not capsys.readouterr().err
