"""A text beside a module of one's own, and arguments that `initialize` lacks."""

import importlib

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import core
from core.training import RunConfig, initialize
from tests.training.test_begin import SIZES
from tests.training.test_initialize import settings, squared_error
from tests.training.tiny import S, prepared


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("corpus"))


class OwnBatches:
    """Tokens of a text of one's own, which no file holds."""

    def batch(self, step, rank=0, size=1):
        tokens = torch.arange(2 * (S + 1)).view(2, S + 1)[rank::size] % 290
        return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def test_batches_of_ones_own_beside_a_folder_need_no_text(tmp_path):
    """Neither the default corpus nor a tokenizer; without batches the corpus is refused."""
    torch.manual_seed(2)
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES)).float()
    theirs.save_pretrained(tmp_path / "hf")
    config = {
        "model": {"huggingface": str(tmp_path / "hf")},
        "data": {"sequence_length": S},
        "training": {"global_batch_size": 2, "train_steps": 1},
        "device": "cpu",
    }
    model, _, _, loader = initialize(config=config, batches=OwnBatches())
    (batch,) = loader
    with torch.no_grad():
        logits = theirs(batch["tokens"]).logits
    want = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    assert float(model.train_step(batch).loss) == pytest.approx(float(want), abs=1e-5)
    model.close()
    with pytest.raises(ValueError, match="the default corpus another one; prepare your text"):
        initialize(config=config)


class TokenModel(nn.Module):
    """A table of next tokens; losses [b, s] where it is given labels."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(280, 280)

    def forward(self, tokens, labels):
        logits = self.table(tokens)
        return nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


class Logits(TokenModel):
    def forward(self, tokens):
        return self.table(tokens)


class InputIds(TokenModel):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, use_cache=None, labels=None):
        return self.table(input_ids)


def test_a_configuration_in_the_place_of_the_model():
    with pytest.raises(ValueError, match=r"model is 'run.toml', .* by name: initialize\(config=\.\.\.\)"):
        initialize("run.toml")


def test_numpys_numbers_are_numbers():
    run = RunConfig.from_dict({"training.train_steps": np.int64(6), "optimizer.lr": np.float32(0.5)})
    assert (run.training.train_steps, run.optimizer.lr) == (6, 0.5) and type(run.training.train_steps) is int


def test_a_name_of_a_room_is_told_where_it_is():
    for name, room in core._ROOMS.items():
        with pytest.raises(AttributeError, match=f"from core.{room} import {name}"):
            getattr(core, name)
        assert hasattr(importlib.import_module(f"core.{room}"), name)
    assert not hasattr(core, "nothing")


def test_a_module_that_takes_tokens_reads_the_text(corpus):
    config = settings(corpus, optimizer__lr=0.1)
    nets = [TokenModel(), Logits()]
    nets[1].load_state_dict(nets[0].state_dict())

    def of_logits(output, batch):
        losses = nn.functional.cross_entropy(output.transpose(1, 2), batch["labels"], reduction="none")
        return losses.sum(), (batch["labels"] != -100).sum()

    found = []
    for net, more in zip(nets, ({}, {"loss_fn": of_logits}), strict=True):
        model, _, _, loader = initialize(net, config, **more)
        assert loader.batch(0)["tokens"].shape == (8, S)
        found.append([float(model.train_step(batch).loss) for batch in loader])
    assert found[0] == pytest.approx(found[1], rel=1e-5) and found[0][-1] < found[0][0]


def test_a_text_that_a_module_cannot_read_is_refused(corpus, monkeypatch):
    monkeypatch.setattr("core.training.run.engine.initialize.join_world", lambda *args: pytest.fail("joined a world"))
    config = settings(corpus)
    with pytest.raises(ValueError, match=r"forward of Logits takes no labels .*; take them, or give loss_fn\("):
        initialize(Logits(), config)
    with pytest.raises(ValueError, match=r"no tokens among its 5 .*leave the module out and set model.huggingface"):
        initialize(InputIds(), config)
    with pytest.raises(ValueError, match=r"Linear takes no tokens .* give batches=, .*; or leave data.train out"):
        initialize(nn.Linear(4, 1), config, loss_fn=squared_error)


THEIRS = {
    "model_parameters": "leave it out: all parameters of the model",
    "learning_rate": "in config: optimizer.lr",
    "per_device_train_batch_size": "in config: training.micro_batch_size",
    "num_train_epochs": "in config: a run is measured in updates",
    "train_dataset": "in config: give data.train=FILE",
    "data": r"give config=\{'data': \{...\}\}",
    "train_steps": "in config: training.train_steps",
    "nothing_like_it": "its arguments are model, config, batches, loss_fn; in config the parts are",
}


@pytest.mark.parametrize("name", THEIRS)
def test_arguments_of_others_are_answered(name):
    with pytest.raises(ValueError, match=rf"^initialize has no {name} \({THEIRS[name]}"):
        initialize(config={}, **{name: 1})
