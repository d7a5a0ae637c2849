"""What a first program gives by mistake in the place of a tensor, a spec, a configuration or a checkpoint."""

import errno
import re

import numpy as np
import pytest
import transformers

from core.data_parallel import DataParallel
from core.datasets import train_tokenizer
from core.models.gpt import GPTModel, gpt2_config, gpt2_spec
from core.optimizer import ShardedAdamW
from core.training import initialize
from core.training.config import RunConfig
from core.training.config.sources import checked, load_run
from core.training.log.console import errors_as_one_line

SIZES = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}


def test_a_spec_that_is_not_called_numpy_tokens_and_options_in_a_dict(single):
    config = gpt2_config(**SIZES)
    with pytest.raises(ValueError, match=r"the layer spec is the function gpt2_spec; call it: gpt2_spec\(\)"):
        GPTModel(config, gpt2_spec, 50, 8, parallel=single)
    model = GPTModel(config, gpt2_spec(), 50, 8, parallel=single)
    with pytest.raises(ValueError, match=r"got a ndarray; give torch\.as_tensor\(tokens\)"):
        model(np.zeros((1, 8), dtype=np.int64))
    shard = DataParallel(model, single)
    with pytest.raises(ValueError, match=r"takes an OptimizerConfig, not a dict; write ShardedAdamW\(shard, Optim"):
        ShardedAdamW(shard, {"lr": 1e-3})


def test_weights_that_are_not_there_are_one_mistake(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["pretrain"])
    with pytest.raises((ValueError, SystemExit)) as told:
        checked(load_run(["--checkpoint.weights", str(tmp_path / "nosuch")]), 1)
    said = f"{told.value} {capsys.readouterr()}"
    assert len(re.findall("is no checkpoint", said)) == 1 and "there is no such folder" in said


def test_a_directory_of_steps_is_answered_with_its_newest(tmp_path):
    for step in (20, 40):
        (tmp_path / f"step-{step:08}").mkdir()
        (tmp_path / f"step-{step:08}" / "manifest.json").touch()
    with pytest.raises(ValueError, match=r"give a step's own directory, as its newest, .*step-00000040"):
        RunConfig.from_dict({"checkpoint.load": str(tmp_path)}).check(1)


@pytest.mark.parametrize("name", ["load", "weights"])
def test_a_runs_output_is_answered_with_its_newest(tmp_path, name):
    step = tmp_path / "steps" / "step-00000020"
    step.mkdir(parents=True)
    (step / "manifest.json").touch()
    (tmp_path / "run.toml").write_text(f'[checkpoint]\ndirectory = "{step.parent}"\n')
    with pytest.raises(ValueError, match=rf"give a step's own directory, as its newest, {step}$"):
        RunConfig.from_dict({f"checkpoint.{name}": str(tmp_path)}).check(1)


@pytest.mark.parametrize("name", ["load", "weights"])
def test_a_hugging_face_folder_is_no_checkpoint(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError) as told:
        RunConfig.from_dict({f"checkpoint.{name}": str(tmp_path)}).check(1)
    assert str(told.value).endswith(
        f"checkpoint.{name}={tmp_path} is a Hugging Face folder, not a checkpoint; give model.huggingface={tmp_path} "
        "in its place: the run begins with its weights"
    )


def test_a_limit_on_the_size_of_files_is_named(capsys):
    with pytest.raises(SystemExit), errors_as_one_line():
        raise OSError(errno.EFBIG, "File too large")
    assert "(ulimit -f) is below that of a file of this run: raise it" in "".join(capsys.readouterr())


def test_what_two_rules_find_is_said_once(tmp_path):
    """A text that is not there, beside a folder whose tokenizer reads it; a folder that is none."""
    folder, text = tmp_path / "hf", tmp_path / "nosuch.jsonl"
    config = transformers.LlamaConfig(vocab_size=300, hidden_size=32, num_attention_heads=4)
    config.save_pretrained(folder)
    train_tokenizer(["some text " * 50], vocab_size=280).save(folder / "tokenizer.json")
    for model, data, said in (
        (folder, {"train": [str(text)]}, f"{text} does not exist, and no prefix of prepared files"),
        (folder, {"train": [str(text)], "valid": [str(text)]}, f"{text} does not exist"),
        (tmp_path / "none", {}, "is no folder; give the one that save_pretrained or the Hub made"),
    ):
        with pytest.raises(ValueError) as told:
            initialize(config={"model": {"huggingface": str(model)}, "data": data})
        assert str(told.value).count(said) == 1, told.value
