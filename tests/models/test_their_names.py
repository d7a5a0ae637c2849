"""Methods of transformers' models, and classes of its training, that somebody asks for here."""

import copy
import importlib
import pickle
import warnings

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
from core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
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


def decays(model):
    chosen, weights = [], (torch.nn.Linear,)
    for _, module in model.named_modules():
        if isinstance(module, weights):
            chosen += module.parameters(recurse=False)
    return chosen


def with_a_head(model):
    head = nn.Linear(2, 2)
    return head, [m for m in model.modules() if m is not head], isinstance(model, nn.Module)


LOOPS = {
    "linears": lambda m: [x for x in m.modules() if isinstance(x, nn.Linear)],
    "named linears": lambda m: [n for n, x in m.named_modules() if isinstance(x, torch.nn.Linear)],
    "tables": lambda m: [x for x in m.modules() if isinstance(x, nn.Embedding)],
    "a tuple with a name": decays,
    "inside another": lambda m: [x for x in nn.Sequential(m).modules() if isinstance(x, (nn.LayerNorm, nn.Linear))],
}
RIGHT_LOOPS = {
    "both": lambda m: [x for x in m.modules() if isinstance(x, (nn.Linear, ColumnParallelLinear, RowParallelLinear))],
    "norms": lambda m: [x for x in m.modules() if isinstance(x, nn.LayerNorm)],
    "by name": lambda m: [x for n, x in m.named_modules() if n.endswith("linear_fc1")],
    "a linear beside": with_a_head,
    "torch's own walk": lambda m: m.requires_grad_(isinstance(nn.Linear(2, 2), nn.Linear)).double(),
}


@pytest.mark.parametrize("loop", LOOPS | RIGHT_LOOPS)
def test_a_loop_that_asks_for_a_class_of_torchs_is_told(loop):
    """Weights drawn anew, adapters, hooks and decay chosen so would be of no module at all."""
    model = small()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            (LOOPS | RIGHT_LOOPS)[loop](model)
    assert [w.filename for w in told] == [__file__] * (loop in LOOPS)
    if loop in LOOPS:
        asked = "nn.Embedding, VocabParallel" if loop == "tables" else "nn.Linear, ColumnParallelLinear, RowParallel"
        assert f"isinstance(m, ({asked}" in str(told[0].message)
