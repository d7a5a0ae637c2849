"""Conversations that are longer than a row, and sets of them that do not fill one."""

import json

import pytest

from core.datasets.prepare import main as prepare
from core.pretrain import main as pretrain
from core.training import RunConfig, initialize
from core.training.evaluate import main as evaluate
from tests.datasets.chats import lines

SIZES = ["--model.num-layers=1", "--model.hidden-size=32", "--model.num-attention-heads=4", "--device=cpu"]
RUN = [*SIZES, "--training.train-steps=2", "--training.global-batch-size=4", "--training.log-interval=1"]


def chats(path, name, lengths):
    """Token files of prompts of 4 bytes, each with a response of so many."""
    path.mkdir(exist_ok=True)
    rows = lines(path / f"{name}.jsonl", [{"prompt": "abc:", "response": "x" * length} for length in lengths])
    assert prepare(["--input", rows, "--output", str(path / name)]) == 0
    return str(path / name)


def run_over(path, train, *more):
    out = path / "out"
    pretrain([*RUN, "--data.train", train, "--training.output", str(out), "--checkpoint.directory", str(out), *more])
    return str(out)


def told(capsys, *words):
    assert evaluate([*words, "--device", "cpu", "--json"]) == 0
    out, err = capsys.readouterr()
    return json.loads(out.splitlines()[-1])["texts"], err


def test_answers_beyond_the_rows_are_told_with_the_rows_that_count_them(tmp_path, capsys):
    train, valid = chats(tmp_path, "train", [8] * 40), chats(tmp_path, "valid", [8, 40, 60, 27])
    out = run_over(tmp_path, train, "--data.sequence-length", "32", "--data.valid", valid)
    # 4 + 40 + its end are 45 tokens, of which 33 are inputs or labels
    note = "2 of 4 conversations are longer than a row of 32 tokens; 44 tokens of their answers are not counted: "
    assert f"note: validation: {note}--data.sequence-length 64 counts all of them" in capsys.readouterr().out
    found, err = told(capsys, out, "--data", valid)
    text = found[valid]
    assert f"note: {valid}: {note}--data.sequence-length 64" in err and text["tokens_beyond_rows"] == 44
    found, err = told(capsys, out, "--data", valid, "--data.sequence-length", "64")
    whole = found[valid]
    assert whole["tokens"] == text["tokens"] + 44 and "note" not in err and "tokens_beyond_rows" not in whole


def test_a_model_without_more_positions_is_not_sent_to_longer_rows(tmp_path, capsys):
    train, valid = chats(tmp_path, "train", [8] * 40), chats(tmp_path, "valid", [40, 8])
    out = run_over(tmp_path, train, "--data.sequence-length=32", "--model.style=gpt2")
    assert "note: validation" not in capsys.readouterr().out
    assert "the model has 32 positions, and reads no longer ones" in told(capsys, out, "--data", valid)[1]
    out = run_over(
        tmp_path / "more",
        train,
        "--data.sequence-length=32",
        "--model.style=gpt2",
        "--model.max-position-embeddings=36",
    )
    err = told(capsys, out, "--data", valid)[1]
    assert "--data.sequence-length 36 counts more of them, which is all that the model has positions for" in err
    assert told(capsys, out, "--data", valid, "--data.sequence-length", "36")[0]


@pytest.mark.parametrize("count", [1, 3])
def test_conversations_that_do_not_fill_a_row_are_padded_into_one(tmp_path, capsys, count):
    few = chats(tmp_path, "few", [8] * count)
    out = run_over(tmp_path, few, "--data.sequence-length=256", "--data.valid", few, "--training.eval-interval=1")
    assert f"conversations: {count} in 1 rows of 256 tokens" in capsys.readouterr().out
    assert told(capsys, out)[0]["validation"]["tokens"] == 9 * count
    short, _ = told(capsys, out, "--data", few, "--data.sequence-length", "16")
    long, _ = told(capsys, out, "--data", few)
    # padding says nothing: each costs what it costs alone
    assert short[few]["tokens"] == long[few]["tokens"] == 9 * count
    assert short[few]["loss"] == pytest.approx(long[few]["loss"], rel=1e-6)


def test_text_that_does_not_fill_a_row_stays_refused(tmp_path):
    (tmp_path / "a.txt").write_text("short")
    assert prepare(["--input", str(tmp_path / "a.txt"), "--output", str(tmp_path / "text")]) == 0
    run = RunConfig.from_dict({"data": {"train": str(tmp_path / "text"), "sequence_length": 32}, "device": "cpu"})
    with pytest.raises(ValueError, match=r"sequence_length=32 needs 33 tokens \(one more to predict\)"):
        initialize(config=run)
