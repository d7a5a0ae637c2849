"""Every fact of a model in a run: presets against their publications, what is given beside them, contradictions."""

import dataclasses
import re
import sys

import pytest
import torch

from core.models.gpt import PRESETS, GPTModel, gpt2_config, llama_config
from core.parallel_state import ParallelState
from core.pretrain import main as pretrain_main
from core.training import ModelConfig, RunConfig, initialize
from core.training.config.__main__ import main
from core.training.config.sources import load_run
from core.transformer.transformer_config import RotaryScaling, TransformerConfig
from tests.training.tiny import S, data_config, prepared

# parameters as their makers' weights have them
PUBLISHED = {
    "llama-60m": 58_073_600,
    "llama-160m": 162_417_408,
    "llama-1b": 1_235_814_400,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "gpt2-124m": 124_439_808,
    "gpt2-1.5b": 1_557_611_200,
}


def test_presets_have_the_published_numbers_of_parameters():
    assert {name: preset.parameters for name, preset in PRESETS.items()} == PUBLISHED
    for name, preset in PRESETS.items():
        model = ModelConfig(preset=name, vocab_size=preset.vocab_size, max_position_embeddings=preset.positions)
        arguments = model.arguments(preset.vocab_size, 16) | (
            {} if preset.style == "gpt2" else {"max_sequence_length": 16}  # rotary tables are no parameters
        )
        with torch.device("meta"):
            whole = GPTModel(**arguments, parallel=ParallelState.single("cpu"), seed=0)
        assert whole.num_parameters() == PUBLISHED[name], name


# what transformers says of the same models, offline: sizes of their published config.json files
THEIRS = {
    "llama-8b": {
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "model_type": "llama",
    },
    "qwen3-0.6b": {
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "head_dim": 128,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 3072,
        "model_type": "qwen3",
    },
    "gpt2-124m": {
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "model_type": "gpt2",
    },
}


@pytest.mark.parametrize("name", THEIRS)
def test_a_preset_is_the_published_model(name):
    from core.models.huggingface import from_huggingface

    published = THEIRS[name] | {"vocab_size": PRESETS[name].vocab_size}
    published |= {"max_position_embeddings": PRESETS[name].positions} if "n_embd" not in published else {}
    theirs = from_huggingface(published)
    assert ModelConfig(preset=name).transformer() == theirs.config


def test_every_fact_of_a_transformer_can_be_given():
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    elsewhere = {"params_dtype", "pipeline_dtype"}  # bf16 and fp16; what crosses a stage has the same
    elsewhere |= {"rotary_per_layer"}  # of a Hugging Face folder, or of a model of one's own
    assert {field.name for field in dataclasses.fields(TransformerConfig)} - elsewhere <= fields


GIVEN = {
    "kv_channels": 24,
    "layernorm_epsilon": 1e-6,
    "qk_layernorm": True,
    "activation_func": "relu",
    "gated_linear_unit": False,
    "add_bias_linear": True,
    "rotary_base": 5e5,
    "rotary_percent": 0.5,
    "layernorm_zero_centered_gamma": True,
    "softmax_scale": 0.3,
    "embedding_multiplier": 12.0,
    "init_method_std": 0.01,
    "normalization": "LayerNorm",
    "hidden_dropout": 0.1,
    "use_cpu_initialization": False,
}


def test_what_is_given_reaches_the_model():
    scaling = {"kind": "llama3", "factor": 8, "original_max_position_embeddings": 16}
    told = {f"model.{name}": value for name, value in GIVEN.items()}
    told |= {"model.rotary_scaling": scaling, "model.windows": [4, "None"], "model.add_qkv_bias": True}
    run = RunConfig.from_dict(told | {"model.tie_embeddings": False})
    assert run == RunConfig.from_dict(run.to_dict()) and not run.model.tied
    config = run.model.transformer()
    for name, value in GIVEN.items():
        assert getattr(config, name) == value, name
    assert config.windows == (4, None, 4, None) and config.add_qkv_bias
    assert config.rotary_scaling == RotaryScaling(kind="llama3", factor=8.0, original_max_position_embeddings=16)
    learned = ModelConfig(position_embedding_type="learned_absolute", max_position_embeddings=64)
    assert learned.spec().rotary is None and learned.positions(16) == 64
    nowhere = ModelConfig(position_embedding_type="none").spec()
    assert nowhere.rotary is None and nowhere.positions is None


def test_what_is_given_beside_a_preset_goes_first():
    model = ModelConfig(preset="llama-8b", num_layers=2, rotary_scaling={"kind": "none"}, tie_embeddings=True)
    config = model.transformer()
    assert (config.num_layers, config.hidden_size, config.ffn) == (2, 4096, 14336)
    assert config.rotary_scaling is None and config.rotary_base == 500000.0 and model.tied


CONTRADICTIONS = {
    "unknown": ({"preset": "llama-8"}, "unknown preset 'llama-8'; did you mean llama-8b? known: llama-60m"),
    "style": ({"preset": "gpt2-124m", "style": "llama"}, "style=llama contradicts preset=gpt2-124m, whose style is"),
    "rotary": ({"style": "gpt2", "rotary_base": 5e5}, "rotary_base=500000.0 is of rotary positions, position_embe"),
    "scaling": ({"rotary_scaling": {"kind": "ntk", "factor": 2}}, "unknown kind 'ntk'; known: linear, llama3, yarn"),
    "scaling's field": ({"rotary_scaling": {"kin": "yarn"}}, "rotary_scaling has kin; known: kind, factor, low_freq"),
    "scaling's factor": ({"rotary_scaling": {"kind": "linear"}}, "missing 1 required"),
    "window": ({"windows": ["0"]}, "windows holds '0'; whole numbers of at least 1 and None are windows"),
    "positions": ({"position_embedding_type": "alibi"}, "unknown position_embedding_type 'alibi'; known: rope"),
    "function": ({"build": "mine"}, "build='mine' is no function; write package.module:function"),
    "two models": ({"build": "a:b", "preset": "llama-8b"}, "model.preset=llama-8b and model.build=a:b are 2 models"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_are_refused(case):
    fields, message = CONTRADICTIONS[case]
    with pytest.raises(ValueError) as error:
        RunConfig.from_dict({"model": fields})
    assert message in str(error.value)


def test_latents_reach_the_model_and_are_checked():
    sizes = {"q_lora_rank": 24, "kv_lora_rank": 8, "qk_head_dim": 16, "qk_pos_emb_head_dim": 4, "v_head_dim": 12}
    told = sizes | {"multi_latent_attention": True, "rotary_interleaved": True, "latent_layernorm_epsilon": 1e-6}
    yarn = {"kind": "yarn", "factor": 4, "original_max_position_embeddings": 8, "mscale_all_dim": 1}
    run = RunConfig.from_dict({"model": told | {"rotary_scaling": yarn}})
    assert run == RunConfig.from_dict(run.to_dict())
    config = run.model.transformer()
    assert {name: getattr(config, name) for name in told} == told
    assert config.rotary_scaling.mscale_all_dim == 1 and config.head_size == 20
    with pytest.raises(ValueError, match=r"kv_lora_rank=8 without multi_latent_attention; set that too, or leave"):
        RunConfig.from_dict({"model": {"kv_lora_rank": 8}}).check(1)
    with pytest.raises(
        ValueError, match=r"num_query_groups=4 with multi_latent_attention.*leave num_query_groups out"
    ):
        RunConfig.from_dict({"model": told | {"num_query_groups": 4}}).check(1)


def test_a_preset_that_the_layout_or_other_facts_do_not_allow():
    heads = {"model.preset": "llama-8b", "model.num_attention_heads": 12}
    with pytest.raises(ValueError, match="num_attention_heads=12 does not divide by num_query_groups=8"):
        RunConfig.from_dict(heads).check(1)
    learned = {"model.preset": "gpt2-124m", "model.max_position_embeddings": 64, "data.sequence_length": 128}
    with pytest.raises(
        ValueError, match=r"sequence_length=128 is more than the model's 64 positions; use at most 64"
    ):
        RunConfig.from_dict(learned).check(1)


def test_a_preset_is_spelt_out_with_its_origin(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")  # wide enough for a line of help
    loaded = load_run(["--model.preset", "qwen3-0.6b", "--model.no-tie-embeddings", "--model.qk-layernorm"])
    assert loaded.run.model.tie_embeddings is False and loaded.run.model.qk_layernorm is True
    lines = loaded.lines()
    assert (
        "model.kv_channels = 128  (model.preset)" in lines
        and 'model.normalization = "RMSNorm"  (model.preset)' in lines
    )
    assert "model.tie_embeddings = false  (--model.no-tie-embeddings)" in lines
    assert main(["--explain", "--model.preset", "qwen3-0.6b"]) == 0
    assert re.search(r"^  num_layers +28 +model\.preset +Transformer layers", capsys.readouterr().out, re.M)
    assert 'kv_channels = "None"' in loaded.to_toml(), "it follows the preset where the file is read again"


def test_a_style_in_python_is_whole():
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    llama = llama_config(**sizes, num_query_groups=2, ffn_hidden_size=48)
    assert llama.gated_linear_unit and llama.activation_func == "silu" and not llama.add_bias_linear
    assert llama.normalization == "RMSNorm" and llama.hidden_dropout == llama.attention_dropout == 0
    assert llama == ModelConfig(**sizes, num_query_groups=2, ffn_hidden_size=48).transformer()
    gpt2 = gpt2_config(**sizes, hidden_dropout=0.0)
    assert (gpt2.activation_func, gpt2.normalization, gpt2.hidden_dropout) == ("gelu_tanh", "LayerNorm", 0.0)
    assert gpt2.add_bias_linear and not gpt2.gated_linear_unit and gpt2.attention_dropout == 0.1


OWN = """
import torch
from torch import nn
from core.pipeline import Action, Schedule, looped

class Bigram(nn.Module):
    def __init__(self, vocab_size, width):
        super().__init__()
        self.table = nn.Embedding(vocab_size, width)
        self.out = nn.Linear(width, vocab_size)

    def forward(self, tokens, labels):
        logits = self.out(self.table(tokens))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")

def bigram(run, vocab_size, parallel):
    return Bigram(vocab_size, run.model.transformer().hidden_size)

def unbiased(run, vocab_size, parallel):
    model = bigram(run, vocab_size, parallel)
    model.out = nn.Linear(model.out.in_features, vocab_size, bias=False)
    return model

class NanoGPT(Bigram):
    def forward(self, idx, targets=None):
        logits = self.out(self.table(idx))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

def nano(run, vocab_size, parallel):
    return NanoGPT(vocab_size, 8)

class InputIds(Bigram):
    def forward(self, input_ids, labels):
        return super().forward(input_ids, labels)

def input_ids(run, vocab_size, parallel):
    return InputIds(vocab_size, 8)

def noargs():
    return Bigram(8, 8)

def nothing(run, vocab_size, parallel):
    return "nothing"

def all_forward_first(ranks, microbatches):
    orders = [
        [*(Action("F", r, m) for m in range(microbatches)), *(Action("B", r, m) for m in range(microbatches))]
        for r in range(ranks)
    ]
    return Schedule.make(looped(ranks), orders, "all-forward-first")
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("corpus"))


def fields_of(made, **more):
    data = {f"data.{name}": getattr(data_config(made), name) for name in ("train", "valid", "tokenizer")}
    return (
        data
        | {
            "data.sequence_length": S,
            "model.num_layers": 2,
            "model.hidden_size": 32,
            "model.num_attention_heads": 4,
            "training.train_steps": 8,
            "training.global_batch_size": 8,
            "optimizer.lr": 3e-2,
            "device": "cpu",
        }
        | {name.replace("__", "."): value for name, value in more.items()}
    )


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_parts.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("own_parts", None)


def trained(fields, path):
    torch.set_default_dtype(torch.float32)  # a rank of the pool may have another
    sys.path.insert(0, str(path))
    model, _, _, loader = initialize(config=RunConfig.from_dict(fields))
    losses = [float(model.train_step(batch).loss) for batch in loader]
    model.close()
    return losses


def test_a_model_of_ones_own_in_a_run(ranks, made, own):
    fields = fields_of(made, model__build="own_parts:bigram")
    alone = trained(fields, own)
    assert alone[-1] < alone[0] - 0.5
    for losses in ranks(trained, fields | {"data_parallel.zero_stage": 2}, own, world=2):
        assert losses == pytest.approx(alone, abs=2e-5)


def test_a_model_of_ones_own_that_has_changed_is_no_other_optimizer(made, own, tmp_path):
    fields = fields_of(made, model__build="own_parts:bigram", checkpoint__directory=str(tmp_path / "kept"))
    steps = {"training.train_steps": 2}
    trained(fields | steps, own)
    more = {"training.train_steps": 3}
    told = (
        r"of a model with other weights: of another shape are .*out\.weight \(\[280, 32\] there, \[280, 64\] here\)"
    )
    with pytest.raises(ValueError, match=rf"{told}.*Build the model that was saved \(model\.build"):
        trained(fields | more | {"model.hidden_size": 64}, own)
    with pytest.raises(ValueError, match=r"with other weights: only there are .*out\.bias[^;]*\. Build the model"):
        trained(fields | more | {"model.build": "own_parts:unbiased"}, own)
    assert len(trained(fields | more, own)) == 1, "the same one goes on"


def test_a_model_of_ones_own_writes_no_sample_and_says_so(made, own, tmp_path, monkeypatch, capsys):
    fields = fields_of(made, model__build="own_parts:bigram") | {"training.train_steps": 1}
    fields["training.output"] = str(tmp_path / "out")
    RunConfig.from_dict(fields).to_toml(tmp_path / "run.toml")
    monkeypatch.setattr(sys, "argv", ["pretrain"])
    pretrain_main([f"--config={tmp_path / 'run.toml'}"])
    said = capsys.readouterr().out
    assert "note: no sample: the model of model.build=own_parts:bigram is one's own" in said
    assert "--- and the model goes on" not in said


def test_a_schedule_of_ones_own_in_a_run(ranks, made, own):
    alone = trained(fields_of(made), own)
    fields = fields_of(made, pipeline__schedule="own_parts:all_forward_first", parallel__pipeline=2)
    for losses in ranks(trained, fields, own, world=2):
        assert losses == pytest.approx(alone, abs=2e-5)


WRONG_FUNCTIONS = {
    "model.build": (
        "own_parts:trigram",
        "own_parts has no function trigram; it has Bigram, bigram, unbiased, NanoGPT, nano, InputIds, input_ids, "
        "noargs, nothing",
    ),
    "pipeline.schedule": ("own_parts:bigram", "schedule=own_parts:bigram over pipeline=2 ranks: "),
    "model.build ": ("nowhere_at_all:f", "module nowhere_at_all cannot be imported from"),
    "pipeline.schedule ": ("nowhere_at_all:f", "module nowhere_at_all cannot be imported from"),
}


@pytest.mark.parametrize("name", WRONG_FUNCTIONS)
def test_functions_that_are_none_are_refused_before_any_process_group(made, own, name, monkeypatch):
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *a, **k: pytest.fail("a process group"))
    value, message = WRONG_FUNCTIONS[name]
    fields = fields_of(made) | {name.strip(): value, "parallel.pipeline": 2}
    with pytest.raises(ValueError) as error:
        RunConfig.from_dict(fields).check(2)
    assert message in str(error.value)


def test_what_a_function_returns_is_looked_at(made, own):
    with pytest.raises(ValueError, match=r"model\.build=own_parts:nothing returned a str; return an nn\.Module"):
        trained(fields_of(made, model__build="own_parts:nothing"), own)
    told = r"model\.build=own_parts:noargs is called with 3 arguments, \(run, vocab_size, parallel\), and takes \(\)"
    with pytest.raises(ValueError, match=told):
        trained(fields_of(made, model__build="own_parts:noargs"), own)
    with pytest.raises(
        ValueError, match=r"forward takes 2 names \(idx, targets\), none of .* Return a module around it"
    ):
        trained(fields_of(made, model__build="own_parts:nano"), own)
    with pytest.raises(ValueError, match=r"without a default input_ids, which is none of a run's batches"):
        trained(fields_of(made, model__build="own_parts:input_ids"), own)
