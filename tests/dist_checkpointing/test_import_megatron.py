"""`import` of Megatron's checkpoints of a file per rank.

tests/data/megatron.zip holds models of megatron-core 0.16.1, saved as Megatron does, and their logits:
llama (2 tensor x 2 pipeline ranks), gpt (2 pipeline ranks, interleaved, tied), moe (2 pipeline x 2 expert ranks).
"""

import argparse
import re
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from core.dist_checkpointing import load, load_common_state_dict, load_plain_tensors
from core.dist_checkpointing.__main__ import main
from core.dist_checkpointing.tools.foreign.megatron_settings import settings_of
from core.models.gpt import GPTModel, get_gpt_layer_local_spec, llama_spec
from core.training.config.sources import merge
from core.training.model.config import ModelConfig
from core.training.run.facts import model_of_checkpoint
from core.transformer import TransformerConfig
from tests.states import state as parallel

ARCHIVE = Path(__file__).parents[1] / "data" / "megatron.zip"
SHAPE = {
    "num_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
LLAMA = SHAPE | {"num_query_groups": 2, "ffn_hidden_size": 24, "gated_linear_unit": True, "activation_func": "silu"}
LLAMA |= {"add_bias_linear": False, "normalization": "RMSNorm", "layernorm_epsilon": 1e-5}
MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 8,
}
CONFIGS = {"llama": LLAMA, "gpt": SHAPE, "moe": LLAMA | MOE}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The directories that Megatron saved into, by model."""
    folder = tmp_path_factory.mktemp("megatron")
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(folder)
    return folder


def gpt(kind, ps=None):
    config = TransformerConfig(**CONFIGS[kind], params_dtype=torch.float32)
    spec = get_gpt_layer_local_spec() if kind == "gpt" else llama_spec()
    return GPTModel(config, spec, 32, 16, share_embeddings_and_output_weights=kind == "gpt", parallel=ps)


def imported(source, path, capsys):
    """What `import` printed."""
    assert main(["import", str(source), str(path)]) == 0
    return capsys.readouterr().out


def logits(kind, path, tokens, **sizes):
    ps = parallel(**sizes)
    model = gpt(kind, ps)
    load({"model": model.sharded_state_dict()}, path, ps=ps)
    with torch.no_grad():
        part = model(tokens)
    # sequences first under tensor parallelism
    return part if part.shape[:2] == tokens.shape else part.transpose(0, 1)


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_are_megatrons(ranks, saved, kind, tmp_path, capsys):
    told = imported(saved / kind, tmp_path / "ours", capsys)
    assert "1 left out" in told and "left out: optimizer: Megatron's states" in told
    values = load_common_state_dict(tmp_path / "ours")
    assert values["megatron/iteration"] == 7 and values["megatron/args/num_layers"] == 4
    reference = torch.load(saved / kind / "logits.pt")
    for tp in (1, 2):
        found = ranks(logits, kind, str(tmp_path / "ours"), reference["tokens"], tp=tp, world=tp)
        # a rank's columns, padded
        whole = torch.cat(found, -1)[..., :32]
        torch.testing.assert_close(whole, reference["logits"], rtol=0, atol=5e-7)


OLD_NAMES = {  # ours -> those of Megatron before megatron-core
    "embedding.": "language_model.embedding.",
    "decoder.": "language_model.encoder.",
    "output_layer.": "language_model.output_layer.",
    "self_attention.linear_qkv.": "self_attention.query_key_value.",
    "self_attention.linear_proj.": "self_attention.dense.",
    "mlp.linear_fc1.": "mlp.dense_h_to_4h.",
    "mlp.linear_fc2.": "mlp.dense_4h_to_h.",
    "pre_mlp_layernorm.": "post_attention_norm.",
    "input_layernorm.": "input_norm.",
    "final_layernorm.": "final_norm.",
}
FUSED_NAMES = {  # Transformer Engine's layers
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
}


def rewritten(source, target, change):
    """A copy of a checkpoint whose files' contents `change(content, folder's name)` has changed."""
    shutil.copytree(source, target)
    for path in target.rglob("model_optim_rng.pt"):
        content = torch.load(path, weights_only=False)
        change(content, path.parent.name)
        torch.save(content, path)
    return target


def renamed(names):
    def change(content, folder):
        for key in [key for key in content if re.fullmatch(r"model\d*", key)]:
            tensors = {}
            for name, tensor in content[key].items():
                for ours, theirs in names.items():
                    name = name.replace(ours, theirs)
                tensors[name] = tensor
            content[key] = tensors

    return change


@pytest.mark.parametrize("names", [OLD_NAMES, FUSED_NAMES], ids=["old", "fused"])
@pytest.mark.parametrize("kind", ["llama", "gpt"])
def test_other_names_are_the_same_arrays(saved, tmp_path, capsys, kind, names):
    imported(saved / kind, tmp_path / "a", capsys)
    imported(rewritten(saved / kind, tmp_path / "theirs", renamed(names)), tmp_path / "b", capsys)
    expected, found = load_plain_tensors(tmp_path / "a"), load_plain_tensors(tmp_path / "b")
    assert expected.keys() == found.keys() and len(found) >= 9
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def test_what_has_no_place_is_told(saved, tmp_path, capsys):
    def change(content, folder):
        content["model"]["decoder.layers.0.odd.weight"] = torch.ones(3)

    told = imported(rewritten(saved / "llama", tmp_path / "theirs", change), tmp_path / "ours", capsys)
    assert "left out: decoder.layers.0.odd.weight: its place in a GPTModel is not known" in told


def without_arguments(content, folder):
    del content["args"]


def more_tensor_ranks(content, folder):
    content["args"] = argparse.Namespace(
        **vars(content["args"]) | {"tensor_model_parallel_size": 4, "num_query_groups": 4}
    )


def fewer_groups(content, folder):
    content["args"] = argparse.Namespace(**vars(content["args"]) | {"num_query_groups": 1})


def old_version(content, folder):
    renamed(OLD_NAMES)(content, folder)
    content["model"] = {"language_model": content["model"]}
    content["checkpoint_version"] = 1.0


def another_width(content, folder):
    if folder == "mp_rank_01_000":
        name = "decoder.layers.0.self_attention.linear_proj.weight"
        content["model"][name] = content["model"][name][:, :2].clone()


def a_layer_is_missing(content, folder):
    names = [name for name in content["model"] if ".layers.0." in name]
    for name in names:
        del content["model"][name]


@pytest.mark.parametrize(
    "change, message",
    [
        (without_arguments, "does not hold Megatron's arguments"),
        (more_tensor_ranks, "has the files of 4 ranks, of 4 tensor x 2 pipeline x 1 expert ranks"),
        (fewer_groups, "1 query groups over 2 tensor ranks"),
        (old_version, "checkpoint version 1.0"),
        (another_width, "the files are not of one checkpoint"),
        (a_layer_is_missing, r"pipeline rank 0 holds the layers \[1\] of its stage"),
    ],
)
def test_what_does_not_fit_together_is_refused(saved, tmp_path, capsys, change, message):
    source = rewritten(saved / "llama", tmp_path / "theirs", change)
    assert main(["import", str(source), str(tmp_path / "ours")]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "ours").exists()


def test_a_missing_file_and_a_missing_step_are_named(saved, tmp_path, capsys):
    source = tmp_path / "theirs"
    shutil.copytree(saved / "llama", source)
    shutil.rmtree(source / "iter_0000007" / "mp_rank_01_001")
    assert main(["import", str(source), str(tmp_path / "ours")]) == 2
    assert "the files of 3 ranks, of 2 tensor x 2 pipeline x 1 expert ranks: [(1, 1, 0)]" in capsys.readouterr().err
    (source / "latest_checkpointed_iteration.txt").write_text("8")
    assert main(["import", str(source), str(tmp_path / "ours")]) == 2
    assert "names '8', which is not there" in capsys.readouterr().err


LLAMA_ARGUMENTS = {
    "num_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "ffn_hidden_size": 24,
    "swiglu": True,
}
LLAMA_ARGUMENTS |= {"group_query_attention": True, "num_query_groups": 2, "position_embedding_type": "rope"}
LLAMA_ARGUMENTS |= {"rotary_base": 500000, "rotary_percent": 0.5, "norm_epsilon": 1e-6, "add_bias_linear": False}
LLAMA_ARGUMENTS |= {"normalization": "RMSNorm", "untie_embeddings_and_output_weights": True, "moe_router_topk": 2}


def test_arguments_are_settings_of_a_run():
    found = settings_of(LLAMA_ARGUMENTS | {"seq_length": 8, "use_rope_scaling": True, "rope_scaling_factor": 4.0})
    of_model = {name.removeprefix("model."): value for name, value in found.items() if name.startswith("model.")}
    assert found["data.sequence_length"] == 8 and "moe_router_topk" not in of_model
    assert of_model["rotary_scaling"]["kind"] == "llama3" and of_model["rotary_scaling"]["factor"] == 4.0
    config = ModelConfig(**of_model).transformer()
    assert (config.rotary.base, config.rotary.percent, config.layernorm_epsilon) == (500000, 0.5, 1e-6)
    assert config.gated_linear_unit and not config.add_bias_linear and config.num_query_groups == 2
    gpt2 = {"position_embedding_type": "learned_absolute", "bias_gelu_fusion": True, "rotary_base": 10000}
    found = settings_of(gpt2)
    assert found["model.activation_func"] == "gelu_tanh" and "model.rotary_base" not in found
    assert settings_of(gpt2 | {"bias_gelu_fusion": False})["model.activation_func"] == "gelu"
    assert found["model.tie_embeddings"] and found["model.style"] == "gpt2"


@pytest.mark.parametrize("unknown", [{"multi_latent_attention": True}, {"position_embedding_type": "mrope"}])
def test_arguments_of_parts_that_are_not_here_are_no_settings(unknown):
    assert settings_of(LLAMA_ARGUMENTS | unknown) == {}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_run_takes_the_models_facts_from_the_checkpoint(saved, kind, tmp_path, capsys):
    def change(content, folder):
        """What Megatron itself says of shared experts, and these files do not."""
        said = {name: value for name, value in MOE.items() if name.startswith("moe")} if kind == "moe" else {}
        said |= {"add_bias_linear": kind == "gpt"}
        content["args"] = argparse.Namespace(**vars(content["args"]) | said)

    imported(rewritten(saved / kind, tmp_path / "theirs", change), tmp_path / "ours", capsys)
    merged = merge(["--checkpoint.weights", str(tmp_path / "ours"), "--data.sequence-length", "16"])
    config = merged.draft.sections["model"]
    expected = gpt(kind).config
    found = config.transformer()
    names = ("num_layers", "hidden_size", "num_query_groups", "ffn_hidden_size", "normalization", "gated_linear_unit")
    for name in (*names, "num_moe_experts", "add_bias_linear", "kv_channels"):
        assert getattr(found, name) == getattr(expected, name), name
    assert config.tied == (kind == "gpt") and config.vocab_size == 32
    arguments = model_of_checkpoint(tmp_path / "ours")
    model = GPTModel(**arguments)
    load({"model": model.sharded_state_dict()}, tmp_path / "ours")
    reference = torch.load(saved / kind / "logits.pt")
    with torch.no_grad():
        torch.testing.assert_close(model(reference["tokens"]), reference["logits"], rtol=0, atol=5e-7)
