"""Adapters among dense layers, experts and shared experts: on tensor and expert ranks, and in peft's names."""

import shutil
import warnings

import pytest
import torch
import transformers

from core.data_parallel import DataParallel
from core.dist_checkpointing import save
from core.models.gpt import GPTModel
from core.models.gpt.description import description
from core.models.huggingface import from_huggingface
from core.models.lora import LoraConfig, apply_lora, lora_state_dict
from core.models.lora.peft_folder import export_adapters
from core.parallel_state import ParallelState
from core.pipeline import SingleStage
from core.training import RunConfig, initialize, next_token_loss
from tests.models.huggingface import TODAY
from tests.models.lora import set_b
from tests.parity.shards import whole_gradients
from tests.parity.whole import assert_same
from tests.states import state
from tests.training.test_begin import SIZES, fields_of
from tests.training.tiny import prepared

LORA = LoraConfig(rank=2, alpha=4.0, modules=("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"))


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


def saved(model, directory):
    run = {"model": description(model), "lora": model.lora.facts()}
    save({"model": lora_state_dict(model.sharded_state_dict(), model)}, directory, run=run)
    return directory


def test_adapters_that_peft_takes_for_those_of_experts_are_refused(tmp_path):
    """peft turns targets named gate_proj, up_proj, down_proj into the experts' stacks, and loads no other of them."""
    whole = saved(adapted(ParallelState.single("cpu")), tmp_path / "whole")
    with pytest.raises(
        ValueError, match=r"0\.mlp\.down_proj has adapters, .* in Glm4Moe.* takes down_proj, gate_proj"
    ):
        export_adapters(whole, tmp_path / "peft")
    assert not (tmp_path / "peft").exists()
    model = of_kind("glm4_moe")
    apply_lora(model, LoraConfig(rank=2, modules=("linear_qkv", "linear_proj")))
    assert export_adapters(saved(model, tmp_path / "attention"), tmp_path / "peft") == 4 * 4 * 2
    model = of_kind("mixtral")  # its experts have other names, and no MLPs stand beside them
    apply_lora(model, LoraConfig(rank=2, modules=("linear_qkv", "linear_proj")))
    export_adapters(saved(model, tmp_path / "mixtral"), tmp_path / "peft_mixtral")


def of_kind(kind):
    facts = from_huggingface(TODAY[kind](), params_dtype=torch.float64).arguments()
    return GPTModel(**facts, parallel=ParallelState.single("cpu"))


def adapted_paths(model):
    trained = {name.split(".", 3)[3] for name, p in model.named_parameters() if p.requires_grad}
    assert all(".adapter.lora_" in name for name in trained)
    return {name.partition(".adapter.")[0] for name in trained}


def test_without_modules_every_linear_is_adapted_and_experts_are_told_of():
    model = of_kind("mixtral")
    with pytest.warns(UserWarning) as told:
        apply_lora(model, LoraConfig(rank=2))
    assert [str(one.message) for one in told] == [
        "LoRA: the experts take no adapters and stay frozen; adapters are beside linear_proj, linear_qkv; name these "
        "as modules (lora.modules in a run) to say so"
    ]
    assert adapted_paths(model) == {"self_attention.linear_qkv", "self_attention.linear_proj"}
    assert model.lora.facts()["modules"] == ["linear_proj", "linear_qkv"], "as its checkpoints say"


@pytest.mark.parametrize("kind", ["mixtral", "mistral"])
def test_named_modules_and_dense_models_hear_nothing(kind):
    model = of_kind(kind)
    lora = LoraConfig(rank=2, modules=("linear_proj", "linear_qkv")) if kind == "mixtral" else LoraConfig(rank=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply_lora(model, lora)
    assert len(adapted_paths(model)) == (2 if kind == "mixtral" else 4)


def test_named_modules_are_checked_strictly():
    with pytest.raises(ValueError, match="'linear_fc1' is no linear of this model; there are self_attention"):
        apply_lora(of_kind("mixtral"), LoraConfig(rank=2, modules=("linear_qkv", "linear_fc1")))


def test_a_run_of_experts_without_modules_goes_on(tmp_path, capsys):
    """The check before a run is silent; its checkpoint names the modules, and the same settings open it."""
    corpus = prepared(tmp_path)
    torch.manual_seed(2)
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.MixtralConfig(**SIZES, **sizes)
    folder = tmp_path / "mixtral"
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    shutil.copy(corpus.tokenizer, folder / "tokenizer.json")

    def losses(steps, directory):
        more = {"lora__rank": 2, "training__train_steps": steps, "optimizer__lr_schedule": "constant"}
        fields = fields_of(corpus, "mixtral", **more)
        run = RunConfig.from_dict(fields | {"checkpoint.directory": str(directory)})
        model, _, _, loader = initialize(config=run)
        assert (
            capsys.readouterr().out.count("note: the experts take no adapters and stay frozen; adapters are bes") == 1
        )
        found = [float(model.train_step(batch).loss) for batch in loader]
        model.close()
        return found

    torch.set_default_dtype(torch.float32)
    first = losses(2, tmp_path / "run")
    assert first + losses(3, tmp_path / "run") == pytest.approx(losses(3, tmp_path / "alone"), abs=5e-5)
