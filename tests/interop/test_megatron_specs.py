"""Specs by Megatron's names: what `ModuleSpec` builds, and parts of a layer in Megatron's form."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from core.interop.megatron.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from core.interop.megatron.models.gpt.gpt_model import GPTModel
from core.interop.megatron.transformer.identity_op import IdentityOp
from core.interop.megatron.transformer.spec_utils import ModuleSpec, build_module, import_module
from core.interop.megatron.transformer.transformer_config import TransformerConfig

CONFIG = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, params_dtype=torch.float64)


def test_specs_build_modules():
    spec = ModuleSpec(nn.Linear, params={"bias": False})
    assert build_module(spec, 2, 3).bias is None and build_module(nn.Identity)(1) == 1
    assert isinstance(build_module(ModuleSpec(("torch.nn", "Linear")), 2, 3), nn.Linear)
    assert build_module(ModuleSpec(IdentityOp), 1, size=3)(7) == 7 and build_module(F.gelu) is F.gelu

    class Part(nn.Module):
        def __init__(self, size, submodules):
            super().__init__()
            self.inner = build_module(submodules["inner"], size, size)

    assert build_module(ModuleSpec(Part, submodules={"inner": nn.Linear}), 4).inner.in_features == 4
    with pytest.raises(ImportError, match=r"torch\.nn has no 'Nothing'"):
        import_module(("torch.nn", "Nothing"))
    with pytest.raises(TypeError, match="when instantiating Linear"):
        build_module(ModuleSpec(nn.Linear))


class TheirMLP(nn.Module):
    """Built and called as Megatron's layers do it."""

    def __init__(self, config, returns_bias=True):
        super().__init__()
        self.linear = nn.Linear(config.hidden_size, config.hidden_size, dtype=torch.float64)
        self.returns_bias = returns_bias

    def forward(self, x):
        y = F.linear(x, self.linear.weight)
        return (y, self.linear.bias) if self.returns_bias else (y + self.linear.bias, None)


class TheirNorm(nn.LayerNorm):
    def __init__(self, config, hidden_size, eps):
        super().__init__(hidden_size, eps, dtype=config.params_dtype)


def test_parts_in_megatrons_form(state):
    tokens = torch.arange(12).view(2, 6)
    outputs = []
    for returns_bias in (True, False):
        torch.manual_seed(1)
        mlp = ModuleSpec(TheirMLP, params={"returns_bias": returns_bias})
        spec = dataclasses.replace(get_gpt_layer_local_spec(), mlp=mlp, norm=ModuleSpec(TheirNorm))
        model = GPTModel(CONFIG, spec, 50, 8)
        assert isinstance(model.decoder.final_layernorm, TheirNorm)
        assert model.decoder.layers["0"].mlp.linear.bias.any(), "what is not added must be seen"
        outputs.append(model(tokens))
    assert torch.equal(*outputs)


def test_parts_that_cannot_be_built_name_the_remedy(state):
    spec = get_gpt_layer_local_spec()
    with pytest.raises(ValueError, match=r"TheirMLP\(config, ...\) as an attention: .* attention\(build, spec\)"):
        GPTModel(CONFIG, dataclasses.replace(spec, attention=ModuleSpec(TheirMLP)), 50, 8)
    with pytest.raises(AttributeError, match=r"a Build, whose config has it: build.config.hidden_size"):
        GPTModel(CONFIG, dataclasses.replace(spec, mlp=TheirMLP), 50, 8)
    with pytest.raises(AttributeError, match=r"'submodules': its parts are its own fields .*replace\("):
        _ = spec.submodules.mlp
    assert not hasattr(spec, "nothing")
