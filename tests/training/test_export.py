"""A model that was born in a run of ours goes to transformers without a source: as the family that says all of it."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file

from core.datasets.prepare import main as prepare
from core.datasets.tokenizers.trained import train_tokenizer
from core.dist_checkpointing import save
from core.models.gpt import GPTModel, gpt2_config, gpt2_spec, llama_config, llama_spec
from core.models.gpt.description import described, description
from core.models.huggingface.__main__ import main
from core.models.huggingface.exporting import export_huggingface
from core.models.huggingface.families import FAMILIES, HuggingFaceModel, from_huggingface
from core.models.huggingface.matching import matching_family
from core.parallel_state import ParallelState
from core.pretrain import main as pretrain
from core.training import RunConfig, initialize
from core.training.generate import main as generate_command
from tests.models.huggingface import TODAY
from tests.models.test_huggingface import CONFIGS
from tests.models.test_huggingface_folders import files_of
from tests.training.tiny import prepared

MODEL = {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "ffn_hidden_size": 36}


def born(style, **facts):
    """Our form of a model of a run."""
    sizes = {"vocab_size": 53, "max_sequence_length": 16, "share_embeddings_and_output_weights": True}
    config, spec = {"llama": (llama_config, llama_spec), "gpt2": (gpt2_config, gpt2_spec)}[style]
    facts = MODEL | {"hidden_dropout": 0.0, "attention_dropout": 0.0} | facts
    return HuggingFaceModel(config=config(**facts), transformer_layer_spec=spec(), **sizes)


LATENT = {"multi_latent_attention": True, "kv_lora_rank": 10, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4}
LATENT |= {"v_head_dim": 5, "qk_layernorm": True, "latent_layernorm_epsilon": 1e-6}
MATCHES = [
    ("llama", {}, "llama"),
    ("llama", {"num_query_groups": 2, "kv_channels": 8, "rotary_base": 500.0}, "llama"),
    ("llama", {"add_bias_linear": True}, "llama"),
    ("llama", {"add_qkv_bias": True}, "qwen2"),
    ("llama", {"qk_layernorm": True, "windows": (None, 5)}, "qwen3"),
    ("llama", {"windows": (5, 5)}, "mistral"),
    ("llama", {"hidden_dropout": 0.1, "rotary_percent": 0.5, "kv_channels": 8}, "phi3"),
    ("llama", {"activation_func": F.gelu}, "llama"),
    ("gpt2", {"hidden_dropout": 0.1, "attention_dropout": 0.2}, "gpt2"),
    ("llama", LATENT, "deepseek_v3"),
    ("llama", LATENT | {"q_lora_rank": 8, "layernorm_epsilon": 1e-6, "rotary_interleaved": True}, "deepseek_v3"),
]


@pytest.mark.parametrize("style, facts, kind", MATCHES)
def test_a_born_model_is_of_the_first_family_that_says_all_of_it(tmp_path, style, facts, kind):
    """Written from its description, as JSON, and of the same logits in transformers: --check refuses others."""
    exported_as(born(style, **facts), kind, tmp_path)


@pytest.mark.parametrize(
    "kind", ["llama3", "gemma3", "gemma3-scaled", "olmo2", "smollm3-window", "deepseek_v3", "deepseek_v2"]
)
def test_a_model_of_any_family_needs_no_source(tmp_path, kind):
    config = TODAY[kind]()
    exported_as(from_huggingface(config), config.model_type, tmp_path)


def exported_as(made, kind, tmp_path):
    model = GPTModel(**made.arguments(), parallel=ParallelState.single("cpu"), seed=5)
    told = json.loads(json.dumps(description(model)))
    save({"model": model.sharded_state_dict()}, str(tmp_path / "ckpt"), ps=model.parallel, run={"model": told})
    assert export_huggingface(tmp_path / "ckpt", tmp_path / "out", check=True) < 1e-4
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert fields["model_type"] == kind and fields["architectures"] == [FAMILIES[kind].architecture]
    again = from_huggingface(tmp_path / "out")  # a warning is an error in tests: nothing is overlooked
    assert matching_family(again)[1] == matching_family(HuggingFaceModel(**described(told)))[1]


@pytest.mark.parametrize("kind", [*CONFIGS, *TODAY])
def test_what_a_family_says_is_said_again(kind):
    """A configuration, our form, described as JSON, the fields of a family that has all of it, the same form."""
    ours = from_huggingface({**CONFIGS, **TODAY}[kind]())
    with torch.device("meta"):
        model = GPTModel(**ours.arguments(), parallel=ParallelState.single("cpu"), seed=0)
    assert HuggingFaceModel(**described(json.loads(json.dumps(description(model))))) == ours
    family, fields = matching_family(ours)
    again = from_huggingface(fields)
    assert matching_family(again) == (family, fields)


def squared(x):
    return x * x


REFUSED = [
    (
        born("gpt2", num_query_groups=2),
        r"no family .* has num_query_groups=2 \(gpt2: 4\), which .*; gpt2 has all else",
    ),
    (born("llama", normalization="LayerNorm"), r"normalization=LayerNorm \(llama: RMSNorm\)"),
    (born("llama", gated_linear_unit=False), r"gated_linear_unit=False \(llama: True\)"),
    (born("llama", embedding_multiplier=3.0), r"embedding_multiplier=3.0 \(llama: 1.0\)"),
    (born("llama", windows=(5, 4)), r"windows=\(5, 4\)"),
]


@pytest.mark.parametrize("model, message", REFUSED)
def test_a_fact_that_no_family_has_is_named(model, message):
    with pytest.raises(ValueError, match=message):
        matching_family(model)


def test_checkpoints_that_do_not_say_their_model(tmp_path):
    ps = ParallelState.single("cpu")
    model = GPTModel(**born("llama").arguments(), parallel=ps, seed=5)
    save({"model": model.sharded_state_dict()}, str(tmp_path / "ckpt"), ps=ps)
    with pytest.raises(ValueError, match="says nothing of its model: give --source"):
        export_huggingface(tmp_path / "ckpt", tmp_path / "out")
    own = replace(llama_spec(), mlp=lambda build: torch.nn.Identity())
    made = GPTModel(**born("llama").arguments() | {"transformer_layer_spec": own}, parallel=ps, seed=5)
    with pytest.raises(ValueError, match=r"of a spec of the run's own .*; known: gpt2, llama, gemma3, olmo2"):
        described(description(made))
    made = GPTModel(**born("llama", activation_func=squared).arguments(), parallel=ps, seed=5)
    with pytest.raises(ValueError, match=r"unknown activation_func 'tests.training.test_export.squared'"):
        described(description(made))
    assert not (tmp_path / "out").exists()


def test_a_run_goes_to_transformers_with_its_tokenizer(tmp_path, capsys, monkeypatch):
    """initialize() trains on a text; the folder has its logits, its tokenizer and its end of text."""
    text = tmp_path / "text.txt"
    text.write_text("the house has floors and rooms, the rooms have walls. " * 200)
    train_tokenizer([text.read_text()], 300).save(tmp_path / "tokenizer.json")
    options = ["--input", text, "--output", tmp_path / "t", "--tokenizer", tmp_path / "tokenizer.json"]
    assert not prepare([str(option) for option in options])
    config = {
        "model": MODEL,
        "data": {"train": str(tmp_path / "t"), "split": "1,0,0", "sequence_length": 16},
        "training": {"global_batch_size": 4, "micro_batch_size": 2, "train_steps": 2},
        "checkpoint": {"directory": str(tmp_path / "ckpt"), "export_huggingface": str(tmp_path / "at-end")},
    }
    monkeypatch.chdir(tmp_path)
    model, _, _, loader = initialize(config=config)
    assert not (tmp_path / "at-end").exists()
    for batch in loader:
        model.train_step(batch)
    (step,) = sorted((tmp_path / "ckpt").glob("step*"))[-1:]
    capsys.readouterr()
    words = ["--prompt", "the rooms have", "--new-tokens", "3"]
    assert generate_command([str(step), *words]) == 0
    assert capsys.readouterr().out.startswith("the rooms have")
    train_tokenizer(["another text altogether " * 50], 280).save(tmp_path / "other.json")
    with pytest.raises(ValueError, match=r"other.json is tokenizer .*, the run of .* had .*; give that one"):
        generate_command([str(step), *words, "--tokenizer", str(tmp_path / "other.json")])
    (tmp_path / "t.tokenizer.json").rename(tmp_path / "moved.json")
    with pytest.raises(ValueError, match=r"t.tokenizer.json, is not there; give --tokenizer FILE"):
        generate_command([str(step), *words])
    with pytest.warns(UserWarning, match=r"t.tokenizer.json is not there; put its tokenizer.json into"):
        export_huggingface(step, tmp_path / "without")
    (tmp_path / "moved.json").rename(tmp_path / "t.tokenizer.json")
    assert main(["export", str(step), str(tmp_path / "out"), "--check"]) == 0
    assert "max |logit difference| on 4 prompts: " in capsys.readouterr().out
    assert files_of(tmp_path / "at-end") == files_of(tmp_path / "out")  # what all ranks wrote after the last step
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("the rooms have walls", return_tensors="pt").input_ids
    ours = next(iter(model.stages.values())).eval()
    torch.testing.assert_close(theirs(ids).logits, ours(ids), rtol=1e-5, atol=1e-6)
    assert tokenizer.decode(ids[0]) == "the rooms have walls"
    assert theirs.generation_config.eos_token_id == tokenizer.eos_token_id == 0
    loss = theirs(ids, labels=ids).loss
    loss.backward()  # and it trains on
    assert all(p.grad is not None for p in theirs.parameters())


def test_weights_of_16_bits_are_checked_as_they_are_written(tmp_path, capsys):
    """Where the checkpoint holds the float32 main weights: the folder has the rounded ones, and so has the check."""
    made = prepared(tmp_path)
    sizes = {
        "model.num-layers": 1,
        "model.hidden-size": 16,
        "model.num-attention-heads": 2,
        "data.sequence-length": 8,
    }
    sizes |= {"training.train-steps": 2, "training.global-batch-size": 2, "optimizer.lr": 1e-2, "device": "cpu"}
    sizes |= {
        "data.train": made.train,
        "checkpoint.directory": tmp_path / "ckpt",
        "training.output": tmp_path / "run",
    }
    pretrain(["--model.bf16", *(f"--{name}={value}" for name, value in sizes.items())])
    step = tmp_path / "ckpt" / "step-00000002"
    difference = export_huggingface(step, tmp_path / "out", check=True)
    assert difference is not None and difference < 1e-5
    (weights,) = (tmp_path / "out").glob("*.safetensors")
    assert {tensor.dtype for tensor in load_file(weights).values()} == {torch.bfloat16}
    # the run, and its directory of steps, stand for their newest checkpoint
    for number, name in enumerate(("run", "ckpt")):
        assert main(["export", str(tmp_path / name), str(tmp_path / f"out{number}")]) == 0
        assert f"the newest checkpoint of {tmp_path / name}: {step}" in capsys.readouterr().out
        assert files_of(tmp_path / f"out{number}") == files_of(tmp_path / "out")
        assert generate_command([str(tmp_path / name), "--prompt", "def", "--new-tokens", "1"]) == 0
        assert capsys.readouterr().out.startswith("def")


def test_a_run_that_is_over_exports_what_it_is_asked_for(tmp_path, capsys):
    """A finished run is asked for a folder: it is written from the newest checkpoint, nothing is trained."""
    made = prepared(tmp_path)
    flags = [f"--data.train={made.train}", f"--data.valid={made.valid}", f"--data.tokenizer={made.tokenizer}"]
    sizes = {
        "model.num-layers": 2,
        "model.hidden-size": 32,
        "model.num-attention-heads": 4,
        "data.sequence-length": 16,
    }
    sizes |= {"training.train-steps": 1, "training.global-batch-size": 2, "device": "cpu"}
    flags += [f"--{name}={value}" for name, value in sizes.items()]
    flags += [f"--training.output={tmp_path / 'run'}", f"--checkpoint.directory={tmp_path / 'ckpt'}"]
    pretrain(flags)
    capsys.readouterr()
    pretrain([*flags, f"--checkpoint.export-huggingface={tmp_path / 'hf'}"])
    said = capsys.readouterr().out
    assert "nothing to do: 1 of 1 steps" in said and f"exported to {tmp_path / 'hf'}: AutoModel" in said
    export_huggingface(tmp_path / "ckpt" / "step-00000001", tmp_path / "out")
    assert files_of(tmp_path / "hf") == files_of(tmp_path / "out")
    with pytest.raises(SystemExit) as ended:
        pretrain([*flags, f"--checkpoint.export-huggingface={tmp_path / 'hf'}"])
    assert ended.value.code and "is there already; give a directory that is to be made" in capsys.readouterr().err


CANNOT_LEAVE = [
    (
        {"model.style": "gpt2", "model.num_query_groups": 2},
        r"export_huggingface=\S+: no family of .*num_query_groups=2",
    ),
    ({"model.build": "tests.training.tiny:prepared"}, r"export_huggingface=\S+ needs a GPTModel"),
    ({"checkpoint.export_huggingface": "s3://bucket/hf"}, r"s3://bucket/hf: a local directory is needed; copy"),
]


@pytest.mark.parametrize("values, message", CANNOT_LEAVE)
def test_what_cannot_leave_at_the_end_is_told_before_the_run(tmp_path, values, message):
    with pytest.raises(ValueError, match=message):
        RunConfig.from_dict({"checkpoint.export_huggingface": str(tmp_path / "hf")} | values).check(1)


def test_a_model_of_the_program_s_own_is_refused_before_its_first_step(tmp_path):
    config = {"checkpoint": {"export_huggingface": str(tmp_path / "hf")}, "training": {"train_steps": 1}}
    with pytest.raises(ValueError, match=r"export_huggingface=\S+ needs a GPTModel"):
        initialize(torch.nn.Linear(2, 2), config=config)
