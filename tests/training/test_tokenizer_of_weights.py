"""The tokens of a text that a run with `checkpoint.weights` reads: those of the run that trained the weights."""

import json
import shutil

import pytest

from core.datasets import train_tokenizer
from core.datasets.prepare import main as prepare
from core.models.huggingface.__main__ import main as export
from core.pretrain import main as pretrain
from core.training import initialize
from core.training.config.sources import merge
from core.training.evaluate import main as evaluate
from core.training.generate import main as generate
from tests.training.tiny import S, prepared

TINY = ["--model.num-layers=1", "--model.hidden-size=32", "--model.num-attention-heads=4", "--device=cpu"]
RUN = ["--training.train-steps=1", "--training.global-batch-size=4", f"--data.sequence-length={S}"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def weights(made, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    flags = [f"--data.train={made.train}", f"--data.tokenizer={made.tokenizer}", f"--training.output={out / 'run'}"]
    pretrain([*TINY, *RUN, *flags, f"--checkpoint.directory={out / 'steps'}"])
    return str(out / "steps" / "step-00000001")


def merged(weights, train, *more):
    found = merge([f"--checkpoint.weights={weights}", f"--data.train={train}", *more])
    return found.draft.run().data.tokenizer, found.origin["data.tokenizer"]


def test_text_that_says_no_tokenizer_has_that_of_the_weights(made, weights, tmp_path):
    """A file of Megatron's has no card; text is not prepared yet. Both were bytes, or learned tokens of their own."""
    for suffix in (".bin", ".idx"):
        shutil.copyfile(f"{made.train}{suffix}", tmp_path / f"theirs{suffix}")
    (tmp_path / "text.txt").write_text("some words\n\n" * 50)
    for train in (tmp_path / "theirs", tmp_path / "text.txt"):
        assert merged(weights, train) == (str(made.tokenizer), "checkpoint.weights")
    # what says its own is left alone, as is what the user says
    assert merged(weights, made.train) == (None, "default")
    assert merged(weights, tmp_path / "theirs", "--data.tokenizer=mine.json") == ("mine.json", "--data.tokenizer")
    out = ["--training.output", str(tmp_path / "out"), f"--data.directory={tmp_path}"]
    pretrain([f"--checkpoint.weights={weights}", "--device=cpu", *RUN, f"--data.train={tmp_path / 'theirs'}", *out])


def test_other_tokens_of_the_same_number_are_told(made, weights, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("".join(f"{i} other words, {i * i} of them\n\n" for i in range(200)))
    train_tokenizer([(tmp_path / "text.txt").read_text()], vocab_size=280).save(tmp_path / "vocabulary.json")
    words = ["--input", str(tmp_path / "text.txt"), "--documents", "paragraph", "--output", str(tmp_path / "other")]
    assert prepare([*words, "--tokenizer", str(tmp_path / "vocabulary.json")]) == 0
    flags = [f"--checkpoint.weights={weights}", "--device=cpu", *RUN, f"--training.output={tmp_path / 'out'}"]
    capsys.readouterr()
    pretrain([*flags, f"--data.train={tmp_path / 'other'}"])
    assert f"note: checkpoint.weights={weights} knows the tokens of {made.tokenizer}" in capsys.readouterr().out
    pretrain([*flags, f"--data.train={made.train}"])
    assert "knows the tokens" not in capsys.readouterr().out


@pytest.mark.parametrize("with_bytes", [False, True])
def test_a_text_prepared_in_the_place_of_anothers_leaves_the_runs_tokenizer(tmp_path, capsys, with_bytes):
    """The README's command twice, with one output."""
    texts = []
    for name, words in (("a", "some words of a text"), ("b", "others, of another text")):
        texts.append(tmp_path / f"{name}.txt")
        texts[-1].write_text("".join(f"{words} {i * i}\n\n" for i in range(200)))
    to = ["--documents", "paragraph", "--output", str(tmp_path / "d")]
    learned = ["--train-tokenizer", "300"]
    assert prepare(["--input", str(texts[0]), *to, *learned]) == 0
    flags = [f"--data.train={tmp_path / 'd'}", f"--training.output={tmp_path / 'run'}"]
    pretrain([*TINY, *RUN, *flags, f"--checkpoint.directory={tmp_path / 'steps'}"])
    step = tmp_path / "steps" / "step-00000001"
    before = (tmp_path / "d.tokenizer.json").read_bytes()
    # the same text again: nothing is kept, nothing is said
    assert prepare(["--input", str(texts[0]), *to, *learned]) == 0
    assert [p.name for p in tmp_path.glob("d.tokenizer*")] == ["d.tokenizer.json"]

    with pytest.warns(UserWarning, match=r"was a text of another tokenizer, .* kept as .*d\.tokenizer\.[0-9a-f]{12}"):
        assert prepare(["--input", str(texts[1]), *to, *([] if with_bytes else learned)]) == 0
    (kept,) = tmp_path.glob("d.tokenizer.*.json")
    assert kept.read_bytes() == before and (tmp_path / "d.tokenizer.json").exists() != with_bytes
    assert generate([str(step), "--prompt", "some words", "--new-tokens", "2"]) == 0
    assert export(["export", str(step), str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == before
    assert evaluate([str(step), "--data", str(texts[0]), "--max-tokens", "100"]) == 0


@pytest.mark.parametrize("form", ["nested", "flat", "toml"])
def test_initialize_takes_the_model_of_the_weights(weights, made, tmp_path, form):
    """As the command does; what the program says itself stays."""
    flat = {
        "device": "cpu",
        "checkpoint.weights": weights,
        "data.train": [str(made.train)],
        "data.sequence_length": S,
        "model.hidden_dropout": 0.25,
        "training.train_steps": 1,
        "training.global_batch_size": 4,
    }
    config = flat
    if form == "nested":
        config = {}
        for name, value in flat.items():
            section, _, key = name.rpartition(".")
            (config.setdefault(section, {}) if section else config)[key] = value
    elif form == "toml":
        config = tmp_path / "run.toml"
        config.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in flat.items()))
    model, *_ = initialize(config=config)
    facts = model.module.config
    assert (facts.num_layers, facts.hidden_size, facts.hidden_dropout) == (1, 32, 0.25)
