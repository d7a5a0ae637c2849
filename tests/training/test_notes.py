"""What the head of a run says of a model's folder and of its text."""

import shutil
from types import SimpleNamespace

import pytest
import transformers

from core.datasets import TokenFile
from core.training import RunConfig
from core.training.run.data import open_corpus
from core.training.run.summary import note_on_dtype, note_on_length, note_on_padding, note_on_validation
from tests.states import state
from tests.training.tiny import S, prepared, rewrite_file


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A corpus, a model's folder with its tokenizer, and the fields of a run that begins as that."""
    directory = tmp_path_factory.mktemp("made")
    corpus = prepared(directory)
    folder = directory / "qwen3"
    config = transformers.Qwen3Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        vocab_size=290,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=32,
    )
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    shutil.copy(corpus.tokenizer, folder / "tokenizer.json")
    fields = {
        "model.huggingface": str(folder),
        "data.train": str(corpus.train),
        "data.valid": str(corpus.valid),
        "data.sequence_length": S,
        "training.global_batch_size": 8,
        "device": "cpu",
    }
    return SimpleNamespace(corpus=corpus, folder=folder, fields=fields)


def test_a_padding_token_that_occurs_in_the_text_is_told(made, tmp_path):
    """transformers trains no such row by its inputs."""
    folder = tmp_path / "hf"
    shutil.copytree(made.folder, folder)
    told = []
    run = RunConfig.from_dict(made.fields)
    corpus = open_corpus(run.data, run.training, state())
    # what ends documents, a token of the text, one that never occurs, none
    for token in (0, int(TokenFile(made.corpus.train).tokens(0, 1)[0]), 285, None):
        rewrite_file(folder / "config.json", pad_token_id=token)
        told.append(note_on_padding(str(folder), corpus))
    assert [bool(note) for note in told] == [True, True, False, False]
    assert "pad_token_id=0, which ends documents here: transformers leaves the gradient of that row" in told[0]
    assert "which occurs in the text: " in told[1]
    rewrite_file(folder / "config.json", pad_token_id=0, model_type="gpt2")
    assert note_on_padding(str(folder), corpus) == ""


def test_sequences_longer_than_the_folder_s_model_are_told(made):
    fields = made.fields
    positions = RunConfig.from_dict(fields).model.folder_positions
    runs = [fields | {"data.sequence_length": positions + more} for more in (0, 1)]
    notes = [note_on_length(RunConfig.from_dict(run)) for run in runs]
    assert notes[0] == "" and f"sequence_length={positions + 1} is more than the {positions} positions" in notes[1]


def test_weights_of_16_bits_that_are_trained_in_32_are_told(made, tmp_path):
    folder = tmp_path / "hf"
    shutil.copytree(made.folder, folder)
    fields = made.fields | {"model.huggingface": str(folder)}
    found = {}
    for stored in ("float32", "bfloat16", "float16"):
        rewrite_file(folder / "config.json", dtype=stored)
        for bf16 in (False, True):
            found[stored, bf16] = note_on_dtype(RunConfig.from_dict(fields | {"model.bf16": bf16}))
    assert [key for key, note in found.items() if note] == [("bfloat16", False), ("float16", False)]
    assert "dtype=bfloat16: these weights are trained, saved and exported in float32" in found["bfloat16", False]


def test_validation_without_a_text_is_told(made):
    fields = made.fields | {"data.split": "1,0,0", "data.valid": ()}
    notes = []
    for interval in (0, 1):
        run = RunConfig.from_dict(fields | {"training.eval_interval": interval})
        notes.append(note_on_validation(run, open_corpus(run.data, run.training, state())))
    assert notes[0] == "" and "training.eval_interval=1 validates nothing: 0 tokens" in notes[1]
