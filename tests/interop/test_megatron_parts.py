"""Megatron's parts by their names: layers, mappings, specs, configuration, seeds."""

import dataclasses
import re
import warnings
from importlib import import_module as import_module_by_name
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from core.interop.megatron import mpu
from core.interop.megatron import tensor_parallel as tp_
from core.interop.megatron.distributed import DistributedDataParallel, DistributedDataParallelConfig
from core.interop.megatron.distributed.finalize_model_grads import finalize_model_grads
from core.interop.megatron.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from core.interop.megatron.models.gpt.gpt_model import GPTModel
from core.interop.megatron.tensor_parallel import random
from core.interop.megatron.tensor_parallel.mappings import tensor_group
from core.interop.megatron.transformer import MegatronModule
from core.interop.megatron.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from core.interop.megatron.utils import divide, get_model_config, get_pg_rank, get_pg_size, unwrap_model
from core.models.gpt import GPTModel as Ours
from core.models.gpt import llama_spec
from core.parallel_state import ParallelState
from core.training import load_run
from core.transformer.transformer_config import RotaryScaling
from core.transformer.transformer_config import TransformerConfig as OurConfig
from tests.parity.whole import assert_same, whole_gradients

CONFIG = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, params_dtype=torch.float64)


class MLP(nn.Module):
    """In Megatron's words."""

    def __init__(self, skip):
        super().__init__()
        torch.manual_seed(4)
        more = {"config": CONFIG, "init_method": nn.init.xavier_normal_, "skip_bias_add": skip}
        self.up, self.down = tp_.ColumnParallelLinear(8, 12, **more), tp_.RowParallelLinear(12, 8, **more)
        with torch.no_grad():
            self.down.bias.fill_(0.5)

    def forward(self, x):
        y, bias = self.up(x)
        y, bias_down = self.down(F.gelu(y if bias is None else y + bias))
        return y if bias_down is None else y + bias_down


def layers(tp, skip):
    mpu.destroy_model_parallel()
    ps = mpu.initialize_model_parallel(tp)
    try:
        model, x = MLP(skip), torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(1))
        y = model(x)
        y.square().sum().backward()
        return y.detach(), whole_gradients(model, ps)
    finally:
        mpu.destroy_model_parallel()


@pytest.mark.parametrize("skip", [False, True])
def test_layers_over_two_ranks_are_those_of_one(ranks, skip):
    ((want, gradients),) = ranks(layers, 1, False, world=1)
    for y, found in ranks(layers, 2, skip, world=2):
        assert torch.allclose(y, want, rtol=1e-12)
        assert_same(found, gradients)


def conjugates():
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(2)
    rank = mpu.get_tensor_model_parallel_rank()
    x = torch.arange(8.0).reshape(4, 2).requires_grad_()
    assert torch.equal(tp_.scatter_to_tensor_model_parallel_region(x), x[:, rank : rank + 1])
    assert torch.equal(tp_.gather_from_tensor_model_parallel_region(x[:, rank : rank + 1]), x)
    assert torch.equal(tp_.scatter_to_sequence_parallel_region(x), x[2 * rank : 2 * rank + 2])
    assert torch.equal(tp_.gather_from_sequence_parallel_region(x[2 * rank : 2 * rank + 2]), x)
    assert torch.equal(tp_.reduce_scatter_to_sequence_parallel_region(x), 2 * x[2 * rank : 2 * rank + 2])
    assert torch.equal(tp_.reduce_from_tensor_model_parallel_region(x), 2 * x)
    tp_.copy_to_tensor_model_parallel_region(x).sum().backward()
    assert (x.grad == 2).all()
    with tp_.get_cuda_rng_tracker().fork():
        other = torch.rand(3)
    data = {"tokens": torch.arange(6).reshape(2, 3)} if rank == 0 else None
    got = tp_.broadcast_data(["tokens"], data, torch.int64)["tokens"]
    group = mpu.get_tensor_model_parallel_group()
    assert tensor_group(group).size == 2 and (get_pg_size(group), get_pg_rank(group)) == (2, rank)
    mpu.destroy_model_parallel()
    return other.tolist(), torch.rand(1).item(), got.tolist()


def test_mappings_seeds_and_batches(ranks):
    (a, after, batch), (b, after_too, batch_too) = ranks(conjugates)
    assert a != b and after == after_too and batch == batch_too == [[0, 1, 2], [3, 4, 5]]


def mean_gradients(per_token):
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel()
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, calculate_per_token_loss=per_token)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), nn.Linear(3, 2))
    model.broadcast_params()
    rank = mpu.get_data_parallel_rank()
    x = torch.arange(12.0).reshape(4, 3)[2 * rank : 2 * rank + 2]
    y = model(x).square().sum()
    with model.no_sync():
        (y if per_token else y / 2).backward()
    finalize_model_grads([model], torch.tensor(2) if per_token else None)
    mpu.destroy_model_parallel()
    weight = model.weight.detach()
    whole = nn.Linear(3, 2)
    whole.load_state_dict(model.state_dict())
    whole(torch.arange(12.0).reshape(4, 3)).square().sum().div(4).backward()
    assert torch.allclose(model.module.weight.grad, whole.weight.grad, rtol=1e-12), (weight, model.weight.grad)
    model.zero_grad_buffer()
    assert model.weight.grad is None


@pytest.mark.parametrize("per_token", [False, True])
def test_gradients_are_the_means_over_replicas(ranks, per_token):
    ranks(mean_gradients, per_token)


def test_the_positions_are_the_models(state):
    facts = {
        "num_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    model = GPTModel(
        TransformerConfig(**facts, rotary_base=1.0),
        get_gpt_layer_local_spec(),
        50,
        8,
        position_embedding_type="rope",
        rotary_base=500,
    )
    other = Ours(
        TransformerConfig(**facts, rotary_base=500.0), llama_spec(), 50, 8, parallel=ParallelState.single("cpu")
    )
    tokens = torch.randint(50, (2, 8))
    assert torch.equal(model(tokens, None, None, labels=tokens.roll(-1, 1)), other(tokens, labels=tokens.roll(-1, 1)))
    assert model(tokens, runtime_gather_output=True).shape == (2, 8, 50) and get_model_config(model) is model.config
    with pytest.raises(ValueError, match="1 arguments are not here: decoder_input"):
        model(tokens, None, None, torch.zeros(1))
    for wrong in ({"position_embedding_type": "yarn"}, {"rope_scaling": True}, {"fp16_lm_cross_entropy": True}):
        with pytest.raises(ValueError, match=r"none of the 3|are not here"):
            GPTModel(CONFIG, get_gpt_layer_local_spec(), 50, 8, **wrong)
    again = TransformerConfig(**facts, recompute_granularity="full")
    GPTModel(again, get_gpt_layer_local_spec(), 50, 8)(tokens, labels=tokens.roll(-1, 1)).sum().backward()


def test_a_configuration_has_facts_only(state):
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, bf16=True, batch_p2p_comm=True)
    assert config.params_dtype is torch.bfloat16
    config.finalize_model_grads_func = finalize_model_grads
    with pytest.raises(ValueError, match="tensor_model_parallel_size=2, the state has 1; leave them out"):
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, tensor_model_parallel_size=2)
    with pytest.raises(ValueError, match=r"has no n_head \(did you mean num_attention_heads\?\) here$"):
        TransformerConfig(n_head=2)
    with pytest.raises(ValueError, match="has no moe_enable_deepep here; leave out what only says how"):
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, moe_enable_deepep=True)
    with pytest.raises(ValueError, match=r"no window_size \(give windows, one per layer: of \(127, 0\) \(128,\)"):
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, window_size=(128, 0))
    with pytest.raises(ValueError, match=r"no num_moe_expert \(did you mean num_moe_experts\?\) here$"):
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, num_moe_expert=4)
    with pytest.raises(ValueError, match="parts that are not here: mtp"):
        get_gpt_layer_local_spec(mtp=True)


def test_8_bits_by_their_names(state):
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    config = TransformerConfig(**sizes, bf16=True, fp8="hybrid", fp8_recipe="tensorwise", fp8_wgrad=False)
    assert (config.fp8, config.fp8_recipe, config.fp8_wgrad) == ("hybrid", "tensorwise", False)
    without = TransformerConfig(**sizes, fp8=None, fp8_recipe="delayed", fp8_margin=0, fp8_amax_history_len=1024)
    assert without.fp8 is None, "what Megatron's arguments say beside it has no effect"
    for wrong, words in (
        ({}, "fp8='hybrid' without fp8_recipe is Megatron's delayed.*give fp8_recipe='tensorwise'"),
        ({"fp8_recipe": "delayed"}, r"fp8_recipe='delayed' is none of tensorwise, rowwise"),
        ({"fp8_recipe": "tensorwise", "fp8_dot_product_attention": True}, "has no fp8_dot_product_attention here"),
    ):
        with pytest.raises(ValueError, match=words):
            TransformerConfig(**sizes, fp8="hybrid", **wrong)


def test_latent_attention_by_their_names(state):
    """Megatron's defaults (yarn by 40 from 4096 positions), neighbours that rotate, and what is refused."""
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "qk_head_dim": 6, "v_head_dim": 8}
    sizes |= {"kv_lora_rank": 8, "q_lora_rank": 12, "qk_pos_emb_head_dim": 4, "hidden_dropout": 0.0}
    sizes |= {"attention_dropout": 0.0}
    config = MLATransformerConfig(**sizes, mscale_all_dim=1.0, add_bias_linear=False)
    assert dataclasses.replace(config) == config, "as shared experts and a program make theirs of it"
    scaling = RotaryScaling(
        kind="yarn", factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0
    )
    facts = {"multi_latent_attention": True, "rotary_interleaved": True, "rotary_scaling": scaling}
    plain = OurConfig(**sizes, **facts, normalization="RMSNorm", add_bias_linear=False)
    spec = get_gpt_layer_local_spec(multi_latent_attention=True)
    found = GPTModel(config, spec, 50, 8, position_embedding_type="rope", rotary_base=500)
    other = Ours(plain, llama_spec(), 50, 8, parallel=ParallelState.single("cpu"))
    tokens = torch.randint(50, (2, 8))
    assert torch.equal(found(tokens), other(tokens))
    unscaled = MLATransformerConfig(**sizes, rope_type="rope", mscale_all_dim=1.0)
    assert unscaled.rotary_scaling is None and unscaled.score_scale(0) == plain.score_scale(0)
    assert MLATransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2).q_lora_rank == 512
    for wrong in ({"rope_type": "linear"}, {"rotary_interleaved": True}, {"cache_mla_latents": True}):
        with pytest.raises(ValueError, match=f"MLATransformerConfig: {next(iter(wrong))}="):
            MLATransformerConfig(**sizes, **wrong)
    with pytest.raises(ValueError, match=r"learned_absolute' with multi_latent_attention.*give 'rope'"):
        GPTModel(config, spec, 50, 8)
    with pytest.raises(ValueError, match=r"multi_latent_attention=False\), and the configuration says .*=True"):
        GPTModel(config, get_gpt_layer_local_spec(), 50, 8, position_embedding_type="rope")


def test_small_things(state):
    class Own(MegatronModule):
        def __init__(self):
            super().__init__(CONFIG)
            self.inner = nn.Linear(2, 2)

    model = Own()
    assert set(model.sharded_state_dict("x.")) == {"x.inner.weight", "x.inner.bias"}
    wrapped = DistributedDataParallel(CONFIG, DistributedDataParallelConfig(), model)
    assert unwrap_model(wrapped) is model and unwrap_model([wrapped]) == [model] and wrapped.inner is model.inner
    assert divide(6, 3) == 2 and get_pg_size() == 1 and mpu.is_initialized()
    with pytest.raises(ValueError, match="7 does not divide by 2"):
        divide(7, 2)
    random.model_parallel_cuda_manual_seed(11)
    assert torch.initial_seed() == 11
    x = torch.ones(2, requires_grad=True)
    random.checkpoint(torch.exp, False, x).sum().backward()
    assert torch.allclose(x.grad, torch.e * torch.ones(2))
    with pytest.raises(ValueError, match="sequence_parallel=True"):
        random.checkpoint(torch.exp, True, x)
    with pytest.raises(ValueError, match="1 arguments ask for groups that are not here"):
        mpu.initialize_model_parallel(1, 1, hierarchical_context_parallel_sizes=[2])


def test_names_of_the_documentation_are_there():
    page = (Path(__file__).parents[2] / "docs" / "from_megatron.md").read_text()
    table = page[page.index("The same, under") : page.index("Renamed (")]
    rows = re.findall(r"^\| `([\w.]+)[^|]*\| (.*) \|$", table, re.M)
    assert sum(len(names.split(",")) for _, names in rows) > 80
    for module, names in rows:
        home = import_module_by_name(f"core.interop.megatron.{module}")
        for name in names.split(", "):
            assert hasattr(home, name.strip("`")), (module, name)


def test_names_that_are_elsewhere_say_where():
    """Every name of the tables "Renamed" and "Not here" is an ImportError with a remedy, or a module's."""
    page = (Path(__file__).parents[2] / "docs" / "from_megatron.md").read_text()
    renamed = re.findall(r"^\| (`[^|]+`) \|", page[page.index("Renamed (") : page.index("Not here:")], re.M)
    names = [name for row in renamed for name in re.findall(r"`([\w.]+)`", row)]
    assert len(names) > 30
    module = ""
    for name in names:
        if "." in name:
            module, _, name = name.rpartition(".")
        with pytest.raises(ImportError, match=r"megatron\.core\..* is not here: (use|leave it out).*docs/from_"):
            getattr(import_module_by_name(f"core.interop.megatron.{module}"), name)
    for name in re.findall(r"[\w]+(?:\.\w+)+", page[page.index("Not here:") :]):
        if name.split(".")[0] in ("datasets", "models", "extensions", "packed_seq_params", "model_parallel_config"):
            with pytest.raises(ImportError, match=r"is not here: (use|only) "):
                import_module_by_name(f"core.interop.megatron.{name}")


def test_a_name_that_nobody_has_is_missing_as_ever():
    specs = import_module_by_name("core.interop.megatron.models.gpt.gpt_layer_specs")
    assert not hasattr(specs, "get_gpt_layer_spec")
    with pytest.raises(ImportError, match="use get_gpt_layer_local_spec\\(\\): there is one implementation"):
        from core.interop.megatron.models.gpt.gpt_layer_specs import (  # noqa: F401
            get_gpt_layer_with_transformer_engine_spec,
        )
    # the same of our own modules, whose names Megatron's scripts are near
    with pytest.raises(ImportError, match="use get_gpt_layer_local_spec"):
        _ = import_module_by_name("core.models.gpt.gpt_layer_specs").get_gpt_layer_with_transformer_engine_spec
    from core.dist_checkpointing.mapping import ShardedTensor
    from core.interop.megatron.dist_checkpointing import mapping
    from core.transformer.attention import SelfAttention

    assert mapping.ShardedTensor is ShardedTensor and SelfAttention.__name__ == "SelfAttention"


@pytest.mark.parametrize("name", ["is_expert", "disable_grad_reduce"])
def test_a_layer_refuses_an_argument_that_asks_for_something_else(state, name):
    facts = {"config": CONFIG, "init_method": nn.init.xavier_normal_}
    for layer in (tp_.ColumnParallelLinear, tp_.RowParallelLinear, tp_.VocabParallelEmbedding):
        layer(4, 8, **facts, stride=1, **{name: False})
        with pytest.raises(ValueError, match=f"1 arguments are not here: {name}"):
            layer(4, 8, **facts, **{name: True})
        with pytest.raises(ValueError, match="1 arguments are not here: stride"):
            layer(4, 8, **facts, stride=2)


@pytest.mark.parametrize(
    "module, remedy",
    [
        ("optimizer.muon", "use build_optimizer(shard, OptimizerConfig(optimizer='muon')) of core.optimizer; "),
        ("transformer.moe.router", "use num_moe_experts of TransformerConfig and core.models.gpt.moe_spec"),
        ("tensor_parallel.cross_entropy", "use vocab_parallel_cross_entropy of tensor_parallel; "),
        ("optimizer.clip_grads", "use clip_grad_norm_"),
        ("models.common.embeddings", "use GPTModel's parts of core.models.gpt"),
        ("somewhere", "docs/from_megatron.md has a table of names"),
    ],
)
def test_a_module_that_is_not_here_says_what_to_use(module, remedy):
    with pytest.raises(ImportError, match=r"^megatron\.core\..* is not here: " + re.escape(remedy)):
        import_module_by_name(f"core.interop.megatron.{module}")


def test_modules_elsewhere_are_missing_as_ever():
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'core\.interop\.nowhere'"):
        import_module_by_name("core.interop.nowhere")


def test_the_answer_to_megatrons_arguments_is_the_pages(capsys):
    page = (Path(__file__).parents[2] / "docs" / "from_megatron.md").read_text()
    flags, answer = re.search(r"^\$ python -m core\.pretrain (.*)\n(error: .*\n(?:  .*\n)+)```", page, re.M).groups()
    with pytest.raises(SystemExit, match="2"):
        load_run(flags.split())
    assert capsys.readouterr().err == answer


def said_in_steps(finalizes):
    """Of two replicas."""
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel()
    model = DistributedDataParallel(CONFIG, DistributedDataParallelConfig(), nn.Linear(3, 2))
    optimizer = torch.optim.Adam(model.parameters())
    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(3):
            model.zero_grad_buffer()
            model(torch.ones(4, 3)).sum().backward()
            if finalizes:
                finalize_model_grads([model])
            optimizer.step()
    mpu.destroy_model_parallel()
    return [str(warning.message) for warning in caught]


def test_gradients_that_nobody_has_summed_are_told_once(ranks):
    for told in ranks(said_in_steps, False, world=2):
        assert len(told) == 1 and "replicas of 2 ranks part: call finalize_model_grads([model])" in told[0]
    assert ranks(said_in_steps, True, world=2) == [[], []]
    assert ranks(said_in_steps, False, world=1) == [[]]


def test_a_spec_may_say_the_norms_of_q_and_k_that_the_configuration_says():
    facts = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    spec = get_gpt_layer_local_spec(qk_layernorm=True)
    model = GPTModel(TransformerConfig(**facts, qk_layernorm=True), spec, vocab_size=8, max_sequence_length=4)
    assert any("q_layernorm" in name for name, _ in model.named_parameters())
    with pytest.raises(ValueError, match="and the configuration says qk_layernorm=False; TransformerConfig"):
        GPTModel(TransformerConfig(**facts), spec, vocab_size=8, max_sequence_length=4)


def test_groups_are_scored_as_megatron_scores_them():
    facts = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "num_moe_experts": 8}
    facts |= {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "add_bias_linear": False}
    for top_k, counted in ((2, 1), (4, 2), (3, 1)):
        assert TransformerConfig(**facts, moe_router_topk=top_k).moe_router_group_score_topk == counted
    config = TransformerConfig(**facts, moe_router_topk=4, moe_router_group_score_topk=1)
    assert dataclasses.replace(config).moe_router_group_score_topk == 1
