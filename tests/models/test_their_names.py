"""Methods of transformers' models, and classes of its training, that somebody asks for here."""

import copy
import importlib
import pickle

import pytest
import torch
from torch import nn

from core import training
from core.autograd import apply_recompute
from core.models.gpt import GPTModel, llama_config, llama_spec
from core.models.gpt.their_methods import ELSEWHERE
from core.models.huggingface import load_huggingface, save_huggingface
from core.models.lora import LoraConfig, apply_lora, merge_lora
from core.parallel_state import ParallelState
from core.training import RunConfig, initialize
from core.training.generate import generate


def small():
    config = llama_config(num_layers=1, hidden_size=16, num_attention_heads=2)
    return GPTModel(config, llama_spec(), 53, 8, parallel=ParallelState.single("cpu"))


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_method_of_theirs_is_answered(name):
    model = small()
    told = f"GPTModel has no {name}; use {ELSEWHERE[name]}"
    with pytest.raises(AttributeError) as error:
        getattr(model, name)
    assert str(error.value) == told
    assert not hasattr(model, name) and getattr(model, name, 3) == 3
    if name.startswith("from_"):
        with pytest.raises(AttributeError) as error:
            getattr(GPTModel, name)
        assert str(error.value) == told and not hasattr(GPTModel, name)


def test_other_names_are_as_of_any_module():
    model = small()
    with pytest.raises(AttributeError, match=r"^'GPTModel' object has no attribute 'nonsense'$"):
        _ = model.nonsense
    assert model.decoder is nn.Module.__getattr__(model, "decoder")
    model.register_buffer("mine", torch.ones(2))
    model.own = nn.Parameter(torch.ones(3))
    assert model.mine.sum() == 2 and model.own is dict(model.named_parameters())["own"]
    empty = GPTModel.__new__(GPTModel)
    assert not hasattr(empty, "decoder") and not hasattr(empty, "generate")
    tokens = torch.arange(6)[None]
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model.state_dict()))):
        if isinstance(again, dict):
            assert again.keys() == model.state_dict().keys()
        else:
            assert torch.equal(again(tokens), model(tokens)) and not hasattr(again, "generate")


def test_what_is_named_instead_is_there(tmp_path):
    """Of each remedy in the words of the table."""
    model = small()
    assert model.parallel.device.type == "cpu" and model.config.params_dtype == torch.get_default_dtype()
    assert model.embedding.word_embeddings is not None and model.output_layer is not None
    assert len(generate(model, [1, 2], new_tokens=2)) == 4
    apply_recompute(model, "layer", stage=model.stage)
    apply_lora(model, LoraConfig(rank=2))
    merge_lora(model)
    assert callable(load_huggingface) and callable(save_huggingface) and callable(initialize)
    assert RunConfig.from_dict({"optimizer.lr": 1e-3}).optimizer.lr == 1e-3


def test_a_module_in_the_place_of_weights_is_told():
    with pytest.raises(ValueError, match=r"weights is a module, Linear; give its state_dict\(\), or the folder"):
        load_huggingface(small(), nn.Linear(2, 2))


@pytest.mark.parametrize(
    "name", ["Trainer", "SFTTrainer", "TrainingArguments", "SFTConfig", "DPOTrainer", "Accelerator"]
)
def test_a_class_of_theirs_is_answered_where_it_is_imported(name):
    with pytest.raises(ImportError, match=rf"^core.training has no {name}; use .*: docs/coming_from.md has a table"):
        exec(f"from core.training import {name}")
    with pytest.raises(ImportError, match=f"core.training has no {name}"):
        getattr(training, name)
    assert name not in dir(training) and importlib.import_module("core.training") is training
