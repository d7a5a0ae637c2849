"""What is said to Megatron's fields and keywords that are another object here, or a field of the configuration."""

import re

import pytest
import torch

from core.interop.megatron import parallel_state as mpu
from core.interop.megatron import utils
from core.interop.megatron.distributed import DistributedDataParallel, DistributedDataParallelConfig
from core.interop.megatron.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from core.interop.megatron.models.gpt.gpt_model import GPTModel
from core.interop.megatron.optimizer import OptimizerConfig, get_megatron_optimizer
from core.interop.megatron.pipeline_parallel.schedules import get_forward_backward_func
from core.interop.megatron.transformer.transformer_config import TransformerConfig
from core.optimizer import OptimizerConfig as OptimizerOfARun


@pytest.fixture
def fresh():
    mpu.destroy_model_parallel()
    yield
    mpu.destroy_model_parallel()


def test_of_the_wrapper():
    for of, words in (
        (
            {"use_megatron_fsdp": True},
            r"use_megatron_fsdp=True is not here; DataParallel\(model, parallel_s",
        ),
        ({"use_custom_fsdp": True}, r"use_custom_fsdp=True is not here; DataParallel.*zero_stage=3"),
        ({"data_parallel_sharding_strategy": "optim"}, "strategy=optim is not here; zero_stage=0 to 3 of"),
        (
            {"num_distributed_optimizer_instances": 2},
            "instances=2 is not here; states are divided over all data ranks; leave it 1",
        ),
        (
            {"fp8_param_gather": True},
            "fp8_param_gather=True is not here; weights are gathered in their own",
        ),
        ({"delay_wgrad_compute": True}, "delay_wgrad_compute=True is not here; schedules with W actions"),
    ):
        with pytest.raises(ValueError, match=words):
            DistributedDataParallelConfig(**of)
    DistributedDataParallelConfig(data_parallel_sharding_strategy="no_shard", delay_wgrad_compute=False)


def test_of_a_configuration(fresh):
    for of, words in (
        (
            {"recompute_modules": ["mlp"]},
            r"recompute_modules \(call apply_recompute\(model, \['mlp'\]\) of core.autogr",
        ),
        ({"cp_comm_type": "p2p"}, r"cp_comm_type \(give initialize_model_parallel\(cp_comm_type=...\)"),
        ({"num_layers_in_first_pipeline_stage": 1}, r"pipeline_stage \(give layers=range\(...\)"),
        ({"pipeline_model_parallel_layout": "Et|tL"}, r"pipeline_model_parallel_layout \(give layers=range"),
    ):
        with pytest.raises(ValueError, match=words):
            TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, **of)


@pytest.mark.parametrize("chunks, lasts", [(None, [0]), (3, [2])])
def test_which_chunk_is_the_last(fresh, chunks, lasts):
    mpu.initialize_model_parallel(1, 1, chunks)
    found = [i for i in range(chunks or 1) if mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=i)]
    assert found == lasts
    words = (
        f"whether chunk 3 is the last depends on their number, which was said to be {chunks or 1}; give initialize"
    )
    with pytest.raises(ValueError, match=words):
        mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=3)


def test_of_a_step():
    words = (
        r"calculate_per_token_loss=True is a field: TransformerConfig\(calculate_per_token_loss=...\); leave it out"
    )
    with pytest.raises(ValueError, match=words):
        get_forward_backward_func()(model=[], forward_step_func=None, calculate_per_token_loss=True)


def test_of_old_names():
    for module, name, words in (
        (mpu, "get_tensor_and_data_parallel_group", "two sums are the same"),
        (mpu, "get_tensor_and_context_parallel_group", "two sums are the same"),
        (mpu, "get_context_parallel_global_ranks", r"group\('cp'\).ranks"),
        (mpu, "get_amax_reduction_group", "scales are of the present largest value"),
        (utils, "is_te_min_version", "Transformer Engine is not used"),
        (utils, "StragglerDetector", "torch.profiler"),
    ):
        with pytest.raises(ImportError, match=words):
            getattr(module, name)


def test_of_methods(fresh):
    mpu.initialize_model_parallel(1, 1)
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=8, max_sequence_length=8)
    model.set_input_tensor(None)
    model.set_input_tensor([None])
    with pytest.raises(ValueError, match=r"a stage here is called with it: model\(input_tensor"):
        model.set_input_tensor(torch.ones(2, 1, 8))
    wrapped = DistributedDataParallel(config=config, ddp_config=DistributedDataParallelConfig(), module=model)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=0.1), [wrapped])
    assert optimizer.chained_optimizers == [optimizer]


@pytest.mark.parametrize(
    "field, value, told",
    [
        (
            "optimizer",
            "adam",
            "did you mean adamw, whose decay is decoupled as that of Megatron's adam? known:",
        ),
        ("optimizer", "adamw_torch", "is unknown, here it is adamw; known: adamw,"),
        ("lr_schedule", "WSD", "lr_schedule='WSD' is unknown; did you mean wsd? known: constant,"),
        ("lr_schedule", "inverse-square-root", "did you mean inverse_sqrt? known: constant,"),
        ("lr_schedule", "cosin", "did you mean cosine? known: constant,"),
        ("lr_schedule", "step", "lr_schedule='step' is unknown; known: constant,"),
    ],
)
def test_values_of_megatrons_flags_get_ours(field, value, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        OptimizerOfARun(**{field: value})
