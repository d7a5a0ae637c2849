"""`paracore evaluate`: what a run recorded is what its checkpoints give, in every layout."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from core.datasets.prepare import main as prepare
from core.pretrain import main as pretrain
from core.training.evaluate import main as evaluate
from core.training.log.validation import best_of, read_validations
from tests import warm
from tests.examples.test_pretrain import TINY
from tests.training.tiny import prepared

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 5 steps that validates on two texts and keeps checkpoints beside its output; the directory of all."""
    where = tmp_path_factory.mktemp("run")
    made = prepared(where)
    (where / "other.txt").write_text("another text, of words\n\n" * 300)
    words = ["--input", str(where / "other.txt"), "--documents", "paragraph"]
    assert prepare([*words, "--output", str(where / "other"), "--tokenizer", str(made.tokenizer)]) == 0
    flags = [f"--data.train={made.train}", f"--data.valid={made.valid}"]
    flags += ["--data.valid-sets", "other", str(where / "other"), f"--training.output={where / 'out'}"]
    pretrain([*TINY, *flags, f"--checkpoint.directory={where / 'out' / 'checkpoints'}", "--checkpoint.every=3"])
    return where


def said(capsys, *words):
    assert evaluate([*map(str, words), "--json", "--device", "cpu"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_run_costs_what_it_recorded(run, capsys):
    records = read_validations(run / "out" / "metrics.jsonl")
    assert [(r.step, r.name) for r in records] == [(s, n) for s in (3, 5) for n in ("validation", "other")]
    assert best_of(records, records[-2]).step == 5 and "other" in (run / "out" / "report.html").read_text()
    told = said(capsys, run / "out")
    assert told["model"].endswith("step-00000005") and told["texts"].keys() == {"validation", "other"}
    for record in records[-2:]:
        found = told["texts"][record.name]
        assert found["loss"] == pytest.approx(record.loss, rel=1e-6)
        assert found["perplexity"] == pytest.approx(record.perplexity, rel=1e-5)
        assert found["bits_per_byte"] == pytest.approx(record.bits_per_byte, rel=1e-6)
        assert found["tokens"] == record.tokens


def test_a_checkpoint_tells_its_model_by_itself(run, tmp_path, capsys):
    """Moved away from its run: the settings stand in its manifest."""
    step = run / "out" / "checkpoints" / "step-00000003"
    moved = tmp_path / "moved"
    moved.symlink_to(step)
    told = said(capsys, moved, "--data", run / "other", run / "valid")
    first = {r.name: r for r in read_validations(run / "out" / "metrics.jsonl") if r.step == 3}
    assert told["texts"][str(run / "other")]["loss"] == pytest.approx(first["other"].loss, rel=1e-6)
    assert told["texts"][str(run / "valid")]["loss"] == pytest.approx(first["validation"].loss, rel=1e-6)
    assert evaluate([str(moved), "--data", str(run / "other"), "--device", "cpu", "--max-batches", "1"]) == 0
    *_, line = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{run / 'other'}: loss ") and " bits per byte (" in line


def test_a_hugging_face_folder_costs_what_transformers_says(run, tmp_path, capsys):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=280, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, initializer_range=0.5,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    told = said(capsys, tmp_path, "--data", run / "valid", "--max-batches", "1")
    tokens = torch.from_numpy(np.fromfile(run / "valid.bin", "<u2").astype("int64"))
    rows = [tokens[i * 16 : i * 16 + 17] for i in range(2)]  # a microbatch
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(model(row[None, :-1]).logits[0], row[1:], reduction="sum")
            for row in rows
        ]
    assert told["texts"][str(run / "valid")]["loss"] == pytest.approx(float(sum(losses)) / 32, rel=1e-5)
    # a text that is not prepared is, with the folder's own tokenizer
    text = run / "other.txt"
    with pytest.raises(ValueError, match=r"has no tokenizer.json; prepare the text with it"):
        evaluate([str(tmp_path), "--data", str(text), "--device", "cpu"])
    shutil.copyfile(run / "other.tokenizer.json", tmp_path / "tokenizer.json")
    assert said(capsys, tmp_path, "--data", text)["texts"][str(text)]["tokens"] > 100


WRONG = {
    "nothing there": (["nowhere"], "nowhere is no run (it has no run.toml), no checkpoint (no manifest.json)"),
    "another tokenizer": (["{run}/out", "--data", "{bytes}"], "prepare the text with the tokenizer of the run"),
    "no text": (["{run}/out", "--data", "{run}/gone"], "gone.bin does not exist"),
    "batches": (["{run}/out", "--max-batches", "-1"], "--max-batches -1 must be at least 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_told(run, tmp_path, case, capsys):
    words, message = WRONG[case]
    if case == "another tokenizer":
        (tmp_path / "text.txt").write_text("some text " * 50)
        assert prepare(["--input", str(tmp_path / "text.txt"), "--output", str(tmp_path / "bytes")]) == 0
    words = [word.format(run=run, bytes=tmp_path / "bytes") for word in words]
    with pytest.raises((ValueError, SystemExit)) as told:
        evaluate([*words, "--device", "cpu"])
    assert message in str(told.value) + capsys.readouterr().err


@pytest.mark.full
def test_every_layout_costs_the_same(run, capsys):
    want = said(capsys, run / "out")["texts"]
    for layout in (["--parallel.tensor", "2", "--parallel.pipeline", "2"], ["--parallel.tensor", "2"]):
        command = [warm.python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
        command += ["-m", "core.training.evaluate", str(run / "out"), "--json", "--device", "cpu", *layout]
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=env, cwd=run, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])["texts"]
        for name, values in want.items():
            assert found[name] == pytest.approx(values, rel=1e-5)


@pytest.mark.full
def test_the_first_documents_of_each_text_are_of_one_length_whatever_the_batch(run, capsys):
    whole = said(capsys, run / "out")["texts"]
    short = said(capsys, run / "out", "--max-tokens", 300)["texts"]
    assert 200 < short["other"]["tokens"] <= 300 and short["other"]["tokens"] < whole["other"]["tokens"]
    again = said(capsys, run / "out", "--max-tokens", 300, "--training.global-batch-size", 8)["texts"]
    for name, text in short.items():
        assert again[name]["tokens"] == text["tokens"] and again[name]["bytes"] == text["bytes"]
        assert again[name]["loss"] == pytest.approx(text["loss"], rel=1e-6)
    with pytest.raises(ValueError, match="--max-tokens 5 beside --max-batches 2: give one of them"):
        evaluate([str(run / "out"), "--max-tokens", "5", "--max-batches", "2"])
    assert evaluate([str(run / "out"), "--max-batches", "2", "--device", "cpu"]) == 0
    assert "note: texts of different length" not in capsys.readouterr().out, "two batches of each are as long"
    assert evaluate([str(run / "out"), "--max-batches", "50", "--device", "cpu"]) == 0
    assert "note: texts of different length, a batch is of one layout" in capsys.readouterr().out


def test_a_long_validation_tells_how_far_it_is(capsys):
    from core.training.run.evaluate import _with_progress

    assert list(_with_progress(range(4), "books", 4, seconds=0.0)) == [0, 1, 2, 3]
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in lines] == [f"books: batch {n} of 4" for n in range(4)]
    assert list(_with_progress(range(4), "books", 0, seconds=0.0)) == [0, 1, 2, 3] and not capsys.readouterr().err
