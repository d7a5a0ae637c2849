"""Modules in Megatron's words read of the configuration how they are split, drawn and computed."""

import copy
import dataclasses
import math
import pickle

import pytest
import torch

from core.interop.megatron import parallel_state as mpu
from core.interop.megatron import tensor_parallel as tp_
from core.interop.megatron.transformer.module import MegatronModule
from core.interop.megatron.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from tests.parity.whole import assert_same, whole_gradients, whole_parameters

S, H = 8, 16
FACTS = {"num_layers": 8, "hidden_size": H, "num_attention_heads": 4}


@pytest.fixture
def no_state():
    mpu.destroy_model_parallel()
    yield
    mpu.destroy_model_parallel()


def test_what_was_given_is_what_is_read(no_state):
    given = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 3, "context_parallel_size": 4}
    given |= {"expert_model_parallel_size": 2, "sequence_parallel": True, "bf16": True, "fp16": False}
    given |= {"gradient_accumulation_fusion": True, "moe_token_dispatcher_type": "alltoall", "test_mode": False}
    config = TransformerConfig(**FACTS, **given)
    assert {name: getattr(config, name) for name in given} == given
    assert config.params_dtype == torch.bfloat16
    for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert {name: getattr(other, name) for name in given} == given
    with pytest.raises(AttributeError, match="no attribute 'mtp_num_layers'"):
        _ = config.mtp_num_layers


@pytest.mark.parametrize("kind", [TransformerConfig, MLATransformerConfig])
def test_megatrons_defaults_of_what_was_not_given(no_state, kind):
    config = kind(**FACTS)
    want = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1}
    want |= {"sequence_parallel": False, "bf16": False, "fp16": False, "attention_softmax_in_fp32": True}
    want |= {"deterministic_mode": False, "perform_initialization": True, "embedding_init_method_std": 0.02}
    assert {name: getattr(config, name) for name in want} == want
    # a copy is given the dtype, no bf16
    assert dataclasses.replace(kind(**FACTS, bf16=True), hidden_dropout=0.0).bf16


def test_init_methods_draw_with_the_configurations_std(no_state):
    config = TransformerConfig(**FACTS, init_method_std=0.5, init_method=None)
    for draw, std in ((config.init_method, 0.5), (config.output_layer_init_method, 0.5 / math.sqrt(2 * 8))):
        weight = torch.empty(300, 300)
        torch.manual_seed(1)
        assert draw(weight) is weight
        torch.manual_seed(1)
        assert torch.equal(weight, torch.nn.init.normal_(torch.empty(300, 300), 0.0, std))
    assert config.embedding_init_method.keywords == config.init_method.keywords
    # another one would not be the model's
    with pytest.raises(ValueError, match=r"init_method \(give init_method_std: the model draws normal numbers"):
        TransformerConfig(**FACTS, init_method=torch.nn.init.xavier_uniform_)


class MLP(MegatronModule):
    """As Megatron's: everything but the input is read of the configuration."""

    def __init__(self, config):
        super().__init__(config)
        facts = {"config": config, "bias": True, "skip_bias_add": True}
        self.up = tp_.ColumnParallelLinear(H, 2 * H, init_method=config.init_method, **facts)
        self.down = tp_.RowParallelLinear(2 * H, H, init_method=config.output_layer_init_method, **facts)

    def forward(self, x):
        if self.config.sequence_parallel:
            x = tp_.scatter_to_sequence_parallel_region(x)
        h, bias = self.up(x)
        y, bias = self.down(torch.tanh(h + bias))
        y = y + bias
        if self.config.sequence_parallel:
            y = tp_.gather_from_sequence_parallel_region(y, tensor_parallel_output_grad=False)
        return y


def own_module(tp, in_config, in_state):
    mpu.destroy_model_parallel()
    ps = mpu.initialize_model_parallel(tp, sequence_parallel=in_state)
    try:
        more = {"sequence_parallel": True} if in_config else {}
        config = TransformerConfig(**FACTS, **more, params_dtype=torch.float64, init_method_std=0.3)
        torch.manual_seed(2)
        model, x = MLP(config), torch.randn(S, 2, H, generator=torch.Generator().manual_seed(1)).double()
        y = model(x)
        y.square().mean().backward()
        read = config.tensor_model_parallel_size, config.sequence_parallel
        return read, y.detach(), whole_parameters(model, ps), whole_gradients(model, ps)
    finally:
        mpu.destroy_model_parallel()


@pytest.mark.parametrize("in_config, in_state", [(False, False), (True, False), (False, True)])
def test_a_module_that_reads_them_is_one_ranks(ranks, in_config, in_state):
    ((_, want, weights, gradients),) = ranks(own_module, 1, False, False, world=1)
    for read, y, of_rank, its_gradients in ranks(own_module, 2, in_config, in_state, world=2):
        assert read == (2, in_config or in_state)
        torch.testing.assert_close(y, want, rtol=1e-11, atol=1e-13)
        for name in ("up.weight", "down.weight"):
            assert torch.equal(of_rank[name], weights[name])
        assert_same(its_gradients, gradients)


def assigns():
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(2)
    try:
        config = TransformerConfig(**FACTS)
        with pytest.raises(ValueError, match="tensor_model_parallel_size=1, the state has 2"):
            config.tensor_model_parallel_size = 1
        assert not config.sequence_parallel
        config.sequence_parallel = True
        assert config.sequence_parallel and mpu.current_state().config.sequence_parallel
        with pytest.raises(ValueError, match=r"sequence_parallel=False\), the state has True"):
            config.sequence_parallel = False
        return True
    finally:
        mpu.destroy_model_parallel()


def test_assigned_values_are_the_layers_or_refused(ranks):
    assert ranks(assigns, world=2) == [True, True]
