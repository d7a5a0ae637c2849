"""Configurations that a program makes: a name that is not there is answered, and nothing else changes."""

import dataclasses
import inspect
import pickle

import numpy as np
import pytest
import torch

from core.models.gpt import GPTModel, gpt2_config, gpt2_spec, llama_config
from core.models.gpt.description import described, description
from core.models.lora import LoraConfig
from core.optimizer import OptimizerConfig
from core.parallel_state import ParallelConfig, ParallelState
from core.training import RunConfig
from core.training.config.parts.training import TrainingConfig
from core.transformer.transformer_config import RotaryScaling, TransformerConfig

SIZES = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
MISTAKES = {
    "of transformers": (
        OptimizerConfig,
        {"learning_rate": 1},
        "OptimizerConfig has no learning_rate (did you mean lr?)",
    ),
    "of torch": (
        OptimizerConfig,
        {"betas": (0.9, 0.95), "eps": 1e-8},
        "OptimizerConfig has no betas (give adam_beta1 and adam_beta2), no eps (did you mean adam_eps?)",
    ),
    "of another part": (OptimizerConfig, {"train_iters": 1}, "no train_iters (in a run it is training.train_steps)"),
    "of nobody": (OptimizerConfig, {"foo": 1}, "OptimizerConfig has no foo (help(OptimizerConfig) lists its names)"),
    "misspelt": (
        TransformerConfig,
        {"num_layers": 2, "hiden_size": 8, "num_attention_heads": 2},
        "TransformerConfig has no hiden_size (did you mean hidden_size?)",
    ),
    "of nanoGPT": (
        TransformerConfig,
        SIZES | {"dropout": 0.0, "bias": False},
        "no dropout (give hidden_dropout and attention_dropout), no bias (give add_bias_linear)",
    ),
    "of the model": (TransformerConfig, SIZES | {"vocab_size": 9}, "has no vocab_size (GPTModel takes it)"),
    "a style": (
        llama_config,
        {"num_layers": 2, "hiden_size": 8, "num_attention_heads": 2},
        "llama_config has no hiden_size (did you mean hidden_size?)",
    ),
    "a fact of a style": (gpt2_config, SIZES | {"rope_theta": 1}, "has no rope_theta (did you mean rotary_base?)"),
    "a layout": (ParallelConfig, {"tensor_model_parallel_size": 2}, "(did you mean tensor?)"),
    "of peft": (LoraConfig, {"r": 8}, "LoraConfig has no r (did you mean rank?)"),
    "positions": (RotaryScaling, {"rope_type": "yarn"}, "RotaryScaling has no rope_type (give kind)"),
    "a part": (RunConfig, {"optimiser": OptimizerConfig()}, "RunConfig has no optimiser (did you mean optimizer?)"),
    "a field of a part": (TrainingConfig, {"train_iters": 1}, "no train_iters (did you mean train_steps?)"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_name_that_is_not_there_is_answered(case):
    made, arguments, message = MISTAKES[case]
    with pytest.raises(ValueError) as seen:
        made(**arguments)
    assert message in str(seen.value) and isinstance(seen.value, TypeError)
    assert seen.value.__suppress_context__, "and no TypeError above it"


def test_values_without_names_are_answered():
    for made, name in ((OptimizerConfig, "lr"), (llama_config, "num_layers")):
        with pytest.raises(ValueError, match=rf"{made.__name__} takes values by name, as {name}=3$"):
            made(3)


@pytest.mark.parametrize(
    "made, arguments, message",
    [
        (
            OptimizerConfig,
            {"lr": "1e-3", "weight_decay": "x"},
            "lr='1e-3' is a str; give lr=0.001; weight_decay='x' is a",
        ),
        (OptimizerConfig, {"lr_warmup_steps": 1e3}, "lr_warmup_steps=1000.0 is a float; give lr_warmup_steps=1000"),
        (
            llama_config,
            SIZES | {"hidden_size": 8.5},
            "llama_config: hidden_size=8.5 is a float; give hidden_size=an",
        ),
        (ParallelConfig, {"tensor": "2"}, "ParallelConfig: tensor='2' is a str; give tensor=2"),
        (TrainingConfig, {"train_steps": float("inf")}, "train_steps=inf is a float; give train_steps=an integer"),
        (OptimizerConfig, {"clip_grad": None}, "clip_grad=None; give clip_grad=a number"),
        (OptimizerConfig, {"clip_grad": True}, "clip_grad=True is a bool; give clip_grad=a number"),
        (TransformerConfig, SIZES | {"params_dtype": "bfloat16"}, "is a str; give params_dtype=torch.bfloat16"),
    ],
)
def test_a_text_where_a_number_belongs_is_told(made, arguments, message):
    with pytest.raises(ValueError) as seen:
        made(**arguments)
    assert message in str(seen.value)


def test_numbers_of_other_kinds_are_taken():
    assert OptimizerConfig(lr=1, weight_decay=np.float32(0.5)).lr == 1
    config = TransformerConfig(**SIZES | {"num_layers": np.int64(3)})
    assert config.num_layers == 3 and type(config.num_layers) is int
    model = GPTModel(config, gpt2_spec(), np.int64(10), np.int32(4), parallel=ParallelState.single("cpu"), seed=0)
    assert model(torch.zeros(1, 4, dtype=torch.int32)).shape == (1, 4, 10)
    with pytest.raises(ValueError, match=r"got torch.int32 \(1, 4\); give labels.long\(\)"):
        model(torch.zeros(1, 4, dtype=torch.int32), labels=torch.zeros(1, 4, dtype=torch.int32))


def test_everything_else_is_the_dataclass_s():
    config = OptimizerConfig(lr=0.5)
    assert pickle.loads(pickle.dumps(config)) == config == dataclasses.replace(config, lr=0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.lr = 1.0
    with pytest.raises(ValueError, match="did you mean lr"):
        dataclasses.replace(config, learning_rate=1)
    assert list(inspect.signature(OptimizerConfig).parameters) == [field.name for field in dataclasses.fields(config)]
    assert "hidden_size" in inspect.signature(llama_config).parameters
    # what is missing, and what is of another kind, Python tells well
    with pytest.raises(TypeError, match="missing 2 required keyword-only arguments: 'hidden_size' and"):
        TransformerConfig(num_layers=2)
    with pytest.raises(TypeError, match="not iterable"):
        LoraConfig(modules=3)


def test_a_checkpoint_s_model_with_a_newer_fact_is_refused():
    model = GPTModel(TransformerConfig(**SIZES), gpt2_spec(), vocab_size=8, max_sequence_length=8)
    told = description(model)
    assert described(told)["config"] == model.config
    with pytest.raises(ValueError, match=r"in a way that this version does not know: .*has no newer "):
        described(told | {"config": told["config"] | {"newer": 1}})


def test_a_subclass_is_told_by_its_own_name():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Mine(OptimizerConfig):
        pass

    class Bare(OptimizerConfig):
        pass

    with pytest.raises(ValueError, match=r"^Bare has no learning_rate \(did you mean lr\?\)$"):
        Bare(learning_rate=1)
    assert Mine(lr=2.0).lr == 2.0
