"""Adapters among dense layers, experts and shared experts: on tensor and expert ranks, and in peft's names."""

import pytest
import torch
from safetensors.torch import load_file

from core.data_parallel import DataParallel
from core.dist_checkpointing import save
from core.models.gpt import GPTModel
from core.models.gpt.description import description
from core.models.huggingface import from_huggingface, load_huggingface
from core.models.lora import LoraConfig, apply_lora, lora_state_dict
from core.models.lora.peft_folder import export_adapters
from core.parallel_state import ParallelState
from core.pipeline import SingleStage
from core.training import next_token_loss
from tests.models.huggingface import TODAY, random_model
from tests.models.lora import set_b
from tests.parity.shards import whole_gradients
from tests.parity.whole import assert_same
from tests.states import state

LORA = LoraConfig(rank=2, alpha=4.0)


def adapted(ps):
    """GLM-4-MoE: layer 0 is dense, the others have experts and shared ones."""
    facts = from_huggingface(TODAY["glm4_moe"](), params_dtype=torch.float64).arguments()
    model = GPTModel(**facts, parallel=ps, seed=3)
    apply_lora(model, LORA)
    set_b({0: model}, ps)
    return model


def gradients(sizes):
    ps = state(**sizes)
    model = adapted(ps)
    shard = DataParallel(model, ps)
    tokens = torch.arange(4 * 9).view(4, 9) % model.vocab_size
    executor = SingleStage(model, ps=ps, num_microbatches=4 // ps.size("dp"), grad_sync=shard)
    rows = 4 // ps.size("dp")
    mine = tokens[ps.index("dp") * rows :][:rows]
    executor.step({"tokens": mine[:, :-1], "labels": mine[:, 1:]}, next_token_loss)
    return whole_gradients(shard)


@pytest.mark.parametrize(
    "sizes", [{"tp": 2, "sp": True, "expert": 2}, pytest.param({"tp": 2}, marks=pytest.mark.full)]
)
def test_dense_and_shared_linears_on_every_layout(ranks, sizes):
    want = gradients({})
    assert any("shared_experts" in name for name in want) and any(".0.mlp.linear_fc1" in name for name in want)
    for found in ranks(gradients, sizes, world=2):
        assert_same(found, want)


def test_peft_names_of_layers_of_two_kinds(tmp_path):
    theirs = random_model(TODAY["glm4_moe"]())
    model = adapted(ParallelState.single("cpu"))
    load = {name: tensor for name, tensor in theirs.state_dict().items()}
    plain = GPTModel(
        **from_huggingface(theirs.config, params_dtype=torch.float64).arguments(), parallel=model.parallel
    )
    load_huggingface(plain, load)
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            own[name].copy_(parameter)
    run = {"model": description(model), "lora": LORA.facts()}
    save({"model": lora_state_dict(model.sharded_state_dict(), model)}, tmp_path / "ckpt", run=run)
    export_adapters(tmp_path / "ckpt", tmp_path / "peft")
    factors = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    names = {name.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] for name in factors}
    assert "model.layers.0.mlp.gate_proj" in names and "model.layers.3.mlp.shared_experts.up_proj" in names
    for name in names:
        a, b = (factors[f"base_model.model.{name}.lora_{factor}.weight"] for factor in "AB")
        load[f"{name}.weight"] = load[f"{name}.weight"] + LORA.scale * b @ a
    load_huggingface(plain, load)
    tokens = torch.arange(8)[None]
    plain.eval(), model.eval()
    assert (plain(tokens) - model(tokens)).abs().max() < 1e-9
