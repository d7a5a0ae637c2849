"""Adapters of a family whose linears are fused as ours are (Phi-3): named as its model in transformers has them."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file

from core.models.huggingface.exporting import export_huggingface
from core.models.lora.peft_folder import export_adapters
from tests.training.test_begin import SIZES
from tests.training.test_begin import made as made  # the fixture
from tests.training.test_lora import trained


@pytest.fixture(scope="module")
def phi3(made, tmp_path_factory):
    """The folder, and the last checkpoint of a run with adapters that began as it."""
    folder = made.train.parent / "phi3"
    torch.manual_seed(2)
    config = transformers.Phi3Config(**SIZES, pad_token_id=0)
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    shutil.copy(made.tokenizer, folder / "tokenizer.json")
    root = tmp_path_factory.mktemp("phi3")
    trained(made, root, "phi3")
    return folder, f"{root}/step-00000003"


def logits_of(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        return model, model(torch.arange(24)[None]).logits


def test_fused_linears_have_one_adapter(phi3, tmp_path):
    """W + s B A on the names of the file are the folded export's weights."""
    folder, url = phi3
    assert export_adapters(url, tmp_path / "peft") == 4 * 4 * 2
    factors = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert {name.rpartition(".")[2] for name in config["target_modules"]} == {
        *("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    }
    export_huggingface(url, tmp_path / "folded")
    theirs, base = logits_of(folder)
    folded, want = logits_of(tmp_path / "folded")
    assert (base - want).abs().max() > 1e-3, "the adapters do something"
    for name in config["target_modules"]:
        a, b = (factors[f"base_model.model.{name}.lora_{factor}.weight"].double() for factor in "AB")
        weight = theirs.get_submodule(name).weight
        weight.data += config["lora_alpha"] / config["r"] * b @ a
        assert (weight - folded.get_submodule(name).weight).abs().max() < 1e-7


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_peft_loads_all_of_them(phi3, tmp_path):
    peft = pytest.importorskip("peft")
    folder, url = phi3
    export_adapters(url, tmp_path / "peft")
    export_huggingface(url, tmp_path / "folded")
    adapted = peft.PeftModel.from_pretrained(logits_of(folder)[0], str(tmp_path / "peft")).double()
    with torch.no_grad():
        found = adapted(torch.arange(24)[None]).logits
    assert (found - logits_of(tmp_path / "folded")[1]).abs().max() < 1e-6


def test_names_of_a_folder_that_is_gone_are_not_guessed(made, phi3, tmp_path):
    """Llama's and Phi-3's numbers are one model, their names are not."""
    folder = phi3[0].rename(phi3[0].with_name("moved"))
    try:
        with pytest.raises(ValueError, match=r"is not there, and .*LlamaFor.*Phi3For.*; --source HF_DIR"):
            export_adapters(phi3[1], tmp_path / "peft")
        assert not (tmp_path / "peft").exists()
        assert export_adapters(phi3[1], tmp_path / "peft", folder) == 4 * 4 * 2
    finally:
        folder.rename(phi3[0])
    # only one family says all of a qwen3
    trained(made, tmp_path / "run", "qwen3")
    qwen3 = made.train.parent / "qwen3"
    moved = qwen3.rename(qwen3.with_name("elsewhere"))
    try:
        assert export_adapters(f"{tmp_path}/run/step-00000003", tmp_path / "qwen3") == 4 * 7 * 2
    finally:
        moved.rename(qwen3)
