"""A run with adapters: on every layout alike, its small checkpoints, and the ordinary model that comes of it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot
from core.dist_checkpointing.reading.lazy import lazy_tensors
from core.dist_checkpointing.reading.loading import open_stored
from core.models.gpt import GPTModel
from core.models.huggingface import from_huggingface, load_huggingface
from core.models.huggingface.exporting import export_huggingface
from core.models.lora import LoraConfig, apply_lora
from core.models.lora.base import load_adapted
from core.models.lora.peft_folder import export_adapters
from core.parallel_state import ParallelState
from core.training import RunConfig, initialize
from core.training.config.memory import fullest_rank
from core.training.evaluate import main as evaluate
from core.training.generate import main as write_text
from core.training.generation import generate
from tests.training.test_begin import fields_of
from tests.training.test_begin import made as made  # the fixture

LORA = {"lora__rank": 4, "lora__alpha": 8.0, "optimizer__lr_schedule": "constant"}
ZBV = {"parallel__pipeline": 2, "pipeline__schedule": "zb-v", "data_parallel__zero_stage": 1}


def trained(made, directory, kind="llama-tied", **more):
    """(losses, logits of 8 tokens in this process, or none where ranks share the model) of a run that saves."""
    torch.set_default_dtype(torch.float32)  # a rank of the pool may have another
    kept = {"checkpoint__directory": str(directory)} if directory else {}
    run = RunConfig.from_dict(fields_of(made, kind, **LORA | kept | more))
    model, optimizer, _, loader = initialize(config=run)
    losses = [float(model.train_step(batch).loss) for batch in loader]
    names = [name for name, p in optimizer.shard.named_parameters().items()]
    model.close()
    return losses, names


@pytest.fixture(scope="module")
def base(made, tmp_path_factory):
    """A run of three steps in one process: its losses, and its last checkpoint."""
    root = tmp_path_factory.mktemp("lora")
    losses, _ = trained(made, root)
    return losses, f"{root}/step-00000003"


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(2, {"parallel__tensor": 2, "parallel__sequence_parallel": True}, marks=pytest.mark.full),
        (2, ZBV),
        pytest.param(2, {"data_parallel__zero_stage": 3, "training__recompute": "layer"}, marks=pytest.mark.full),
        pytest.param(4, ZBV | {"parallel__tensor": 2}, marks=pytest.mark.full),
    ],
)
def test_every_layout_trains_alike_and_goes_on_from_any(ranks, made, base, tmp_path, world, layout):
    """In float32. Three steps elsewhere, then two more of one process; and the same two from one process's."""
    losses, _ = base
    for found, names in ranks(trained, made, tmp_path / "there", world=world, **layout):
        assert found == pytest.approx(losses, abs=2e-5)
        assert names and all("adapter" in name for name in names)
    more, _ = trained(made, tmp_path / "there", training__train_steps=5)
    alone, _ = trained(made, None, training__train_steps=5)
    assert len(more) == 2 and more == pytest.approx(alone[3:], abs=5e-5)


def test_a_checkpoint_holds_adapters_and_their_states_only(base):
    stored = lazy_tensors(base[1])
    assert stored and all(".adapter.lora_" in key for key in stored if key.startswith(("model/", "optimizer/")))
    assert open_stored(base[1]).run["lora"]["rank"] == 4
    assert stored["model/decoder.layers.mlp.linear_fc1.adapter.lora_B"].shape == (4, 2, 48, 4)


def test_the_base_is_written_where_that_is_asked_for(made, tmp_path):
    """And then nothing else is needed: the folder may be gone."""
    trained(made, tmp_path, lora__save_base=True)
    url = f"{tmp_path}/step-00000003"
    assert "model/embedding.word_embeddings.weight" in lazy_tensors(url)
    alone, _ = trained(made, None, training__train_steps=5)
    more, _ = trained(made, tmp_path, lora__save_base=True, training__train_steps=5)
    assert more == pytest.approx(alone[3:], abs=5e-5)
    assert export_huggingface(url, tmp_path / "hf", check=True) < 1e-4


def model_of(url, made, kind="llama-tied"):
    """The run's model in float64, adapters beside the weights of its folder."""
    arguments = from_huggingface(made.train.parent / kind, params_dtype=torch.float64).arguments()
    model = GPTModel(**arguments, parallel=ParallelState.single("cpu"))
    load_adapted({0: model}, url, model.parallel)
    return model.eval()


def test_an_export_is_the_adapted_model(made, base, tmp_path):
    """Folded into the weights; transformers computes what the adapters do, and our own generate writes the same."""
    difference = export_huggingface(base[1], tmp_path / "hf", check=True)
    assert difference is not None and difference < 1e-5
    adapted = model_of(base[1], made)
    tokens = torch.arange(8)[None]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64)
    plain = transformers.AutoModelForCausalLM.from_pretrained(made.train.parent / "llama-tied", dtype=torch.float64)
    with torch.no_grad():
        expected = adapted(tokens)
        assert (theirs(tokens).logits - expected).abs().max() < 1e-5, "float32 in the files"
        assert (plain(tokens).logits - expected).abs().max() > 1e-2, "it has learned something"
    again = GPTModel(**from_huggingface(tmp_path / "hf").arguments(), parallel=ParallelState.single("cpu"))
    load_huggingface(again, tmp_path / "hf")
    assert generate(again, [1, 2, 3], new_tokens=8) == generate(adapted, [1, 2, 3], new_tokens=8)


def exported(made, folder, **layout):
    """A run that exports at its end."""
    trained(made, None, checkpoint__export_huggingface=str(folder), **layout)


@pytest.mark.parametrize("layout", [pytest.param(ZBV, marks=pytest.mark.full), {"data_parallel__zero_stage": 3}])
def test_ranks_export_at_their_end_what_one_process_does(ranks, made, base, tmp_path, layout):
    ranks(exported, made, tmp_path / "there", world=2, **layout)
    export_huggingface(base[1], tmp_path / "here", made.train.parent / "llama-tied")
    there, here = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("there", "here")
    )
    assert there.keys() == here.keys()
    assert all(torch.allclose(there[name], here[name], atol=1e-5) for name in here)


def with_model(made, directory, apply=False, **more):
    """Losses of a run over a model that the program made."""
    torch.set_default_dtype(torch.float32)
    fields = fields_of(made, "llama-tied", **LORA | more, checkpoint__directory=str(directory))
    folder = fields.pop("model.huggingface")
    fields["data.tokenizer"] = f"{folder}/tokenizer.json"
    run = RunConfig.from_dict(fields)
    own = GPTModel(**from_huggingface(folder).arguments(), parallel=ParallelState.single("cpu"), seed=4)
    if apply:
        apply_lora(own, run.lora)
        run = replace(run, lora=LoraConfig())
    model, _, _, loader = initialize(own, config=run)
    losses = [float(model.train_step(batch).loss) for batch in loader]
    model.close()
    return losses


@pytest.mark.parametrize("apply", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_model_of_the_programs_own(made, tmp_path, apply):
    """Adapted by the run or by the program itself; the run goes on with it either way."""
    alone = with_model(made, tmp_path / "alone", apply, training__train_steps=4)
    first = with_model(made, tmp_path / "run", apply)
    assert first + with_model(made, tmp_path / "run", apply, training__train_steps=4) == pytest.approx(
        alone, abs=5e-5
    )
    stored = lazy_tensors(f"{tmp_path}/run/step-00000004")
    assert all(".adapter.lora_" in key for key in stored if key.startswith("model/"))


@pytest.mark.parametrize(
    "more",
    [
        {"optimizer__optimizer": "muon", "data_parallel__zero_stage": 0},
        pytest.param({"model__bf16": True, "optimizer__ema_decay": 0.9}, marks=pytest.mark.full),
        pytest.param({"data_parallel__offload": "optimizer", "training__loss_chunk": 32}, marks=pytest.mark.full),
    ],
)
def test_a_run_goes_on_as_if_it_had_never_ended(made, tmp_path, more):
    """With other optimizers, dtypes and memory; of Muon's kinds of states adapters have one only."""
    trained(made, tmp_path, **more)
    found, _ = trained(made, tmp_path, training__train_steps=5, **more)
    alone, _ = trained(made, None, training__train_steps=5, **more)
    assert found == pytest.approx(alone[3:], abs=5e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lora__rank": 8}, ["lora.rank=4 (here 8)"]),
        ({"lora__alpha": 16.0}, ["lora.alpha=8.0 (here 16.0)"]),
        ({"lora__modules": ["linear_qkv"]}, ["lora.modules="]),
        ({"lora__rank": None}, ["lora.rank=4 (here None)"]),
        ({"lora__save_base": True}, ["lora.save_base=False (here True)"]),
        ({"training__seed": 9}, ["(here 9): its next batch"]),
        ({"optimizer__optimizer": "sgd"}, ["the states of another optimizer"]),
    ],
)
def test_a_run_that_goes_on_has_the_same_adapters(made, base, change, words):
    with pytest.raises(ValueError) as refused:
        trained(made, Path(base[1]).parent, **{"training__train_steps": 4} | change)
    # checkpoint.weights takes whole models
    remedy = f"model.huggingface=FOLDER, once they are folded in: python -m core.models.huggingface export {base[1]}"
    assert all(word in str(refused.value) for word in [*words, remedy]), refused.value
    assert "checkpoint.weights" not in str(refused.value)


def test_a_run_without_adapters_does_not_go_on_with_them(made, tmp_path):
    trained(made, tmp_path, lora__rank=None, training__train_steps=1)
    with pytest.raises(ValueError, match=r"lora.rank=None \(here 4\)"):
        trained(made, tmp_path)


def test_adapters_beside_the_weights_of_a_checkpoint(made, base, tmp_path):
    """Of another run of ours; where they were is in the checkpoint of the adapters."""
    trained(made, tmp_path / "whole", lora__rank=None, training__train_steps=1)
    weights = {"checkpoint__weights": f"{tmp_path}/whole/step-00000001"}
    found, _ = trained(made, tmp_path / "adapters", **weights)
    assert found[0] < base[0][0] - 0.01, "it begins with what the other run has learned"
    url = f"{tmp_path}/adapters/step-00000003"
    assert export_huggingface(url, tmp_path / "hf", check=True) < 1e-5
    more, _ = trained(made, tmp_path / "adapters", **weights, training__train_steps=4)
    alone, _ = trained(made, None, **weights, training__train_steps=4)
    assert more == pytest.approx(alone[3:], abs=5e-5)


def test_other_weights_are_refused(made, base, tmp_path):
    """A folder in the old one's place, of the same shapes."""
    config = transformers.AutoConfig.from_pretrained(made.train.parent / "llama-tied")
    torch.manual_seed(3)
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(Path(made.tokenizer).read_bytes())
    with pytest.raises(ValueError, match="holds adapters of weights"):
        trained(made, Path(base[1]).parent, model__huggingface=str(tmp_path), training__train_steps=4)
    with pytest.raises(ValueError, match="holds adapters of weights"):
        export_huggingface(base[1], tmp_path / "hf", tmp_path)


def test_a_checkpoint_of_adapters_is_no_model_to_begin_with(made, base):
    with pytest.raises(ValueError, match="holds adapters"):
        RunConfig.from_dict(
            fields_of(made, "llama-tied", checkpoint__weights=base[1], model__huggingface=None)
        ).check(1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"lora__modules": ["q_proj"]},
            [
                "'q_proj' is no linear",
                "their q_proj lies in linear_qkv, which is named instead",
                "self_attention.linear_qkv",
                "mlp.linear_fc2",
            ],
        ),
        (
            {"lora__modules": ["q_proj", "up_proj"]},
            ["linear_qkv, which is named instead; 'up_proj' is no linear of this model; their up_proj lies in"],
        ),
        ({"lora__rank": 64}, ["rank=64 is above the matrix of", "use at most 32"]),
        ({"lora__rank": 0}, ["rank=0 must be at least 1"]),
        ({"lora__dropout": 1.0}, ["dropout=1.0 must be"]),
        ({"lora__alpha": 0.0}, ["alpha=0.0 must be above 0"]),
        ({"model__build": "tests.training.test_own:make", "model__huggingface": None}, ["adapts a GPTModel"]),
    ],
)
def test_what_does_not_fit_is_told_before_anything_starts(made, change, words):
    with pytest.raises(ValueError) as refused:
        RunConfig.from_dict(fields_of(made, "llama-tied", **LORA | change)).check(1)
    assert all(word in str(refused.value) for word in words), refused.value


def test_the_memory_that_is_told_is_what_a_run_holds(made):
    run = RunConfig.from_dict(fields_of(made, "llama-tied", **LORA)).check(1)
    model, *_ = initialize(config=run)
    parameters = list(model.stages[0].parameters())
    adapters = sum(p.numel() for p in parameters if p.requires_grad)
    told = fullest_rank(run.sections())
    model.close()
    assert told.weights == 4 * sum(p.numel() for p in parameters) and told.optimizer == 8 * adapters
    assert told.gradients == 4 * adapters


def test_facts_can_be_read_again(base):
    assert json.loads(json.dumps(open_stored(base[1]).run["lora"]))["modules"]
    assert CheckpointRoot(str(Path(base[1]).parent)).steps() == [3]


def ours_of(theirs, made, kind):
    """A model of transformers' in ours, in float64."""
    arguments = from_huggingface(made.train.parent / kind, params_dtype=torch.float64).arguments()
    model = GPTModel(**arguments, parallel=ParallelState.single("cpu"))
    load_huggingface(model, theirs.state_dict())
    return model.eval()


@pytest.mark.parametrize("kind", ["llama-tied", pytest.param("qwen3", marks=pytest.mark.full)])
def test_a_folder_of_pefts(made, tmp_path, kind):
    """By the names and shapes that peft gives its own, and with the adapted model's numbers as peft computes them."""
    trained(made, tmp_path / "run", kind)
    url = f"{tmp_path}/run/step-00000003"
    count = export_adapters(url, tmp_path / "peft")
    factors = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    folder = made.train.parent / kind
    assert count == len(factors) == 4 * 7 * 2 and config["base_model_name_or_path"] == str(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokens = torch.arange(8)[None]
    expected = model_of(url, made, kind)(tokens).detach()
    # peft's W x + (lora_alpha / r) B A x, by its names
    for name in config["target_modules"]:
        weight = theirs.get_submodule(name).weight
        a, b = (factors[f"base_model.model.{name}.lora_{factor}.weight"].double() for factor in "AB")
        weight.data += config["lora_alpha"] / config["r"] * b @ a
    assert (ours_of(theirs, made, kind)(tokens) - expected).abs().max() < 1e-9


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_peft_itself_loads_the_folder(made, base, tmp_path):
    peft = pytest.importorskip("peft")
    export_adapters(base[1], tmp_path / "peft")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(made.train.parent / "llama-tied", dtype=torch.float64)
    adapted = peft.PeftModel.from_pretrained(theirs, str(tmp_path / "peft")).double()
    tokens, expected = torch.arange(8)[None], model_of(base[1], made)(torch.arange(8)[None])
    assert (adapted(tokens).logits - expected).abs().max() < 1e-6, "its rotary tables are float32"
    merged = ours_of(adapted.merge_and_unload(), made, "llama-tied")
    assert (merged(tokens) - expected).abs().max() < 1e-9


def test_a_folder_of_pefts_is_not_made_of_everything(made, tmp_path):
    trained(made, tmp_path / "gpt2", "gpt2")
    with pytest.raises(ValueError, match="Conv1D"):
        export_adapters(f"{tmp_path}/gpt2/step-00000003", tmp_path / "peft")
    trained(made, tmp_path / "whole", lora__rank=None, training__train_steps=1)
    with pytest.raises(ValueError, match="holds 0 adapters"):
        export_adapters(f"{tmp_path}/whole/step-00000001", tmp_path / "peft")


def test_commands_read_a_checkpoint_of_adapters(made, base, tmp_path, capsys):
    """generate writes what it writes of the exported model; evaluate finds the same loss."""
    export_huggingface(base[1], tmp_path / "hf")
    words = ["--prompt", "def f", "--new-tokens", "6"]
    assert write_text([base[1], *words]) == 0
    said = capsys.readouterr().out
    assert write_text([str(tmp_path / "hf"), *words]) == 0
    assert capsys.readouterr().out == said
    rows = ["--data.sequence-length", "16"]  # the folder has the longest sequence of the one the run began as
    found = []
    for model in (base[1], str(tmp_path / "hf")):
        assert evaluate([model, "--data", str(made.valid), "--json", "--device", "cpu", *rows]) == 0
        found.append(json.loads(capsys.readouterr().out)["texts"])
    losses = [value for texts in found for value in (texts[str(made.valid)]["loss"],)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
