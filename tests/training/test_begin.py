"""What a run begins as: a Hugging Face folder, a model of one's own; refused before any process group exists."""

import json
import shutil
import warnings

import pytest
import torch
import transformers
from torch import nn

from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot
from core.dist_checkpointing.publish.manifest import read_manifest
from core.models.gpt import GPTModel
from core.models.huggingface import from_huggingface, load_huggingface
from core.models.huggingface.__main__ import main as export
from core.parallel_state import ParallelState, layout_of
from core.training import RunConfig, initialize, load_run
from core.training.model.begin import begin
from core.training.run.assembly import assemble
from tests.parity.whole import assembled
from tests.states import state
from tests.training.tiny import S, prepared, rewrite_file

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": 290, "use_cache": False}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
KINDS = {
    "llama-tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=12),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=32, n_layer=4, n_head=4, vocab_size=290, n_positions=32, **NO_DROPOUT
    ),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A corpus, and a folder per kind with its tokenizer."""
    directory = tmp_path_factory.mktemp("made")
    corpus = prepared(directory)
    for kind, config in KINDS.items():
        torch.manual_seed(2)
        transformers.AutoModelForCausalLM.from_config(config()).float().save_pretrained(directory / kind)
        shutil.copy(corpus.tokenizer, directory / kind / "tokenizer.json")
    return corpus


def fields_of(made, kind, **more):
    """A short run that begins as that folder; `more` under dotted names, __ for the dot."""
    return {
        "model.huggingface": str(made.train.parent / kind),
        "data.train": str(made.train),
        "data.valid": str(made.valid),
        "data.sequence_length": S,
        "training.global_batch_size": 8,
        "training.train_steps": 3,
        "optimizer.lr": 1e-2,
        "device": "cpu",
    } | {name.replace("__", "."): value for name, value in more.items()}


def begun(made, kind, layout, schedule):
    """The weights that a run begins with, put together, and those of the folder in one process."""
    ps = state(**layout)
    run = RunConfig.from_dict(fields_of(made, kind, pipeline__schedule=schedule))
    stages = begin(run, 280, ps)
    parameters = {name: p for stage in stages.values() for name, p in stage.named_parameters()}
    found = assembled(parameters, {name: layout_of(p) for name, p in parameters.items()}, ps)
    if ps.rank != 0:
        return {}, {}
    whole = GPTModel(**from_huggingface(run.model.huggingface).arguments(), parallel=ParallelState.single("cpu"))
    load_huggingface(whole, run.model.huggingface)
    return found, {name: p.detach()[: layout_of(p).shape[0]] for name, p in whole.named_parameters()}


LAYOUTS = [
    pytest.param(4, "llama-tied", {"tp": 2, "pp": 2}, "zb-v", id="tied-tp2-pp2-zbv"),
    pytest.param(2, "gpt2", {"pp": 2}, "1f1b", id="gpt2-pp2"),
    pytest.param(2, "qwen3", {"tp": 2}, "1f1b", id="qwen3-tp2", marks=pytest.mark.full),
    pytest.param(2, "llama-tied", {"pp": 2}, "1f1b", id="tied-pp2", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("world", "kind", "layout", "schedule"), LAYOUTS)
def test_every_layout_begins_with_the_weights_of_the_folder(ranks, made, world, kind, layout, schedule):
    found, expected = ranks(begun, made, kind, layout, schedule, world=world)[0]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def losses(made, layout, **more):
    run = RunConfig.from_dict(fields_of(made, "llama-tied", **layout, **more))
    model, _, _, loader = initialize(config=run)
    found = [float(model.train_step(batch).loss) for batch in loader]
    table = model.stages[0].embedding.word_embeddings.weight if 0 in model.stages else None
    last = model.stages[max(model.stages)]
    shared = table is not None and last.post_process and last.embedding.word_embeddings.weight is table
    model.close()
    return found, shared


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, {"parallel__pipeline": 2, "pipeline__schedule": "zb-v", "data_parallel__zero_stage": 3}),
        pytest.param(4, {"parallel__tensor": 2, "parallel__pipeline": 2}, marks=pytest.mark.full),
    ],
)
def test_every_layout_trains_on_from_there_alike(ranks, made, world, layout):
    """In float32; the first loss is the folder's own, by transformers' count."""
    alone, _ = losses(made, {})
    per_rank = ranks(losses, made, layout, world=world)
    for found, _ in per_rank:
        assert found == pytest.approx(alone, abs=2e-5)
    assert any(shared for _, shared in per_rank) == (layout.get("pipeline__schedule") == "zb-v")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(made.train.parent / "llama-tied")
    batch = initialize(config=RunConfig.from_dict(fields_of(made, "llama-tied"))).loader.batch(0)
    with torch.no_grad():
        logits = theirs(batch["tokens"]).logits
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
    assert alone[0] == pytest.approx(float(expected), abs=1e-5)


def test_a_run_that_goes_on_reads_no_weights_and_keeps_where_they_are_from(made, tmp_path):
    folder = tmp_path / "llama"
    shutil.copytree(made.train.parent / "llama-tied", folder)
    saved = {"model__huggingface": str(folder), "checkpoint__directory": str(tmp_path / "steps")}
    unbroken, _ = losses(
        made, {"training__train_steps": 4, "model__huggingface": str(folder)}, optimizer__lr_schedule="constant"
    )
    first, _ = losses(made, {"training__train_steps": 2}, **saved, optimizer__lr_schedule="constant")
    next(folder.glob("*.safetensors")).unlink()
    with pytest.raises(ValueError, match=r"model\.huggingface=.*holds no weights"):
        RunConfig.from_dict(fields_of(made, "", model__huggingface=str(folder))).check(1)
    second, _ = losses(made, {"training__train_steps": 4}, **saved, optimizer__lr_schedule="constant")
    assert first + second == pytest.approx(unbroken, abs=1e-7)
    for step in (2, 4):
        manifest = read_manifest(CheckpointRoot(tmp_path / "steps").open(step))
        assert manifest.run["began_as"] == {"huggingface": str(folder)}


def parts_of(run, on_meta):
    ps = ParallelState.single("cpu")
    stages = begin(run, 64, ps, may_be_on_meta=on_meta)
    return stages[0], assemble(stages, run, None, ps, lambda line: None)


@pytest.mark.parametrize("on_meta", [True, False], ids=["meta", "device"])
def test_a_run_that_goes_on_draws_no_weights(tmp_path, monkeypatch, on_meta):
    run = RunConfig.from_dict(
        {"checkpoint.directory": str(tmp_path), "model.num_layers": 2, "model.hidden_size": 16, "device": "cpu"}
        | {"model.num_attention_heads": 4, "data.sequence_length": 8, "training.global_batch_size": 2}
    )
    draws, randn = [], torch.randn
    monkeypatch.setattr(torch, "randn", lambda *args, **how: draws.append(args) or randn(*args, **how))
    first, parts = parts_of(run, on_meta)
    assert draws, "the probe sees nothing"
    with parts.checkpoints as checkpoints:
        checkpoints.manager.save(1, checkpoints.state(1))
    draws.clear()
    second, parts = parts_of(run, on_meta)
    assert all(p.isnan().any() for p in second.parameters()), "what nobody fills must be seen"
    assert parts.checkpoints.resume() == 1
    assert not draws
    for (name, p), q in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q), name
    parts.checkpoints.close()
    # the steps go between a model's construction and its load: no training of NaN
    _, parts = parts_of(run, on_meta)
    shutil.rmtree(tmp_path)
    with pytest.raises(FileNotFoundError, match="has no checkpoint"):
        parts.checkpoints.resume()
    if not on_meta:
        second.init_weights()
        pairs = zip(first.parameters(), second.parameters(), strict=True)
        assert all(torch.equal(p, q) for p, q in pairs), "the initial values of its own are kept"


def goes_on(directory, tied, zero):
    """A pipeline that saves a step, and one that goes on from it; what both hold."""
    ps = state(pp=2)
    torch.set_default_dtype(torch.float32)
    run = RunConfig.from_dict(
        {"checkpoint.directory": directory, "model.num_layers": 2, "model.hidden_size": 16, "device": "cpu"}
        | {"model.num_attention_heads": 4, "data.sequence_length": 8, "training.global_batch_size": 2}
        | {"model.tie_embeddings": tied, "parallel.pipeline": 2, "data_parallel.zero_stage": zero}
    )
    weights = []
    for step in (0, 1):
        with warnings.catch_warnings(action="error"):  # NaN on two ranks is no twin
            stages = begin(run, 64, ps, may_be_on_meta=True)
            parts = assemble(stages, run, None, ps, lambda line: None)
        with parts.checkpoints as checkpoints:
            assert checkpoints.resume() == step
            if not step:
                checkpoints.manager.save(1, checkpoints.state(1))
        weights.append([p.detach().clone() for stage in stages.values() for p in stage.parameters()])
        parts.executor.close()
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    assert not any(p.isnan().any() for p in weights[1])


@pytest.mark.parametrize("tied", [True, False])
def test_a_pipeline_goes_on(ranks, tmp_path, tied):
    ranks(goes_on, str(tmp_path), tied, 1, world=2)


def test_the_head_of_a_run_tells_what_the_folder_s_model_has(made):
    """Facts that are off are in run.toml."""
    loaded = load_run([f"--model.huggingface={made.train.parent / 'qwen3'}", f"--data.train={made.train}"])
    facts = [line for line in loaded.lines() if line.endswith("(model.huggingface)")]
    assert 5 < len(facts) < 30 and any(line.startswith("model.num_layers = ") for line in facts)
    assert not [line for line in facts if line.startswith("model.moe_")]
    assert not [line for line in facts if " = false " in line or ' = "None" ' in line or " = 0 " in line]


@pytest.mark.filterwarnings("always")
def test_an_export_without_a_source_has_the_files_of_the_folder(made, tmp_path, capsys):
    """Its end of text is not the one that closes documents; a folder that is gone or another model's is told."""
    folder = tmp_path / "hf"
    shutil.copytree(made.train.parent / "qwen3", folder)
    for name in ("config.json", "generation_config.json"):
        rewrite_file(folder / name, eos_token_id=[7, 9])
    (folder / "chat_template.jinja").write_text("a template")
    saved = {"model__huggingface": str(folder), "checkpoint__directory": str(tmp_path / "steps")}
    losses(made, {"training__train_steps": 1}, **saved, optimizer__lr_schedule="constant")
    steps = str(tmp_path / "steps")
    assert export(["export", steps, str(tmp_path / "out"), "--check"]) == 0
    assert f"generation files are those of {folder}, which the model began as" in capsys.readouterr().out
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "a template"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == [7, 9]
    rewrite_file(folder / "config.json", intermediate_size=56)
    assert export(["export", steps, str(tmp_path / "other")]) == 0
    assert "hf, which the model began as, cannot be asked" in capsys.readouterr().err
    shutil.rmtree(folder)
    assert export(["export", steps, str(tmp_path / "gone")]) == 0
    told = capsys.readouterr().err
    assert f"warning: {folder}, which the model began as, is not there: its chat template and its own" in told
    assert "eos_token_id is 0, which ends the run's documents. --source HF_DIR says where it is" in told


def broken(made, tmp_path, change):
    folder = tmp_path / "folder"
    shutil.copytree(made.train.parent / "qwen3", folder)
    change(folder)
    return {"model__huggingface": str(folder)}


def rewrite(**fields):
    def change(folder):
        rewrite_file(folder / "config.json", **fields)

    return change


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def pickles(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"anything")


def lose_a_shard(folder):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    theirs.save_pretrained(folder, max_shard_size="20KB")
    sorted(folder.glob("*.safetensors"))[1].unlink()


def test_a_folder_without_a_tokenizer_learns_none_from_the_text(made, tmp_path):
    """Also where only a sentencepiece file lies there; text that was prepared has its own."""
    rows = tmp_path / "text.txt"
    rows.write_text("A text.\n\n" * 200)
    fields = broken(made, tmp_path, lambda folder: (folder / "tokenizer.json").rename(folder / "tokenizer.model"))
    fields |= {"data__valid": [], "data__directory": str(tmp_path / "prepared")}
    run = RunConfig.from_dict(fields_of(made, "", **fields, data__train=str(rows)))
    with pytest.raises(ValueError, match=r"folder has no tokenizer\.json; give data\.tokenizer \(tokenizers' file"):
        run.check(1)
    assert not (tmp_path / "prepared").exists()
    RunConfig.from_dict(fields_of(made, "", **fields)).check(1)
    RunConfig.from_dict(
        fields_of(made, "", **fields, data__train=str(rows), data__tokenizer=str(made.tokenizer))
    ).check(1)


REFUSED = {
    "a pickle": (pickles, "holds pytorch_model.bin, a pickle that could run code"),
    "a truncated file": (truncate, "is damaged or truncated"),
    "a missing shard": (lose_a_shard, "lacks 1 of"),
    "another shape": (rewrite(intermediate_size=56), "in the Hugging Face weights"),
    "a small embedding": (
        rewrite(vocab_size=200),
        "the tokenizer has 280 tokens, the embedding of model.huggingface=",
    ),
    "a foreign model": (
        rewrite(model_type="mystery", auto_map={"AutoModelForCausalLM": "modeling_mystery.Mystery"}),
        "model_type='mystery' is not supported",
    ),
    "no configuration": (lambda folder: (folder / "config.json").unlink(), "config.json does not exist"),
    "tensor ranks": (lambda folder: None, "num_query_groups=2 does not divide over tensor_model_parallel_size=4"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_that_cannot_be_trained_is_refused_before_any_process_group(made, tmp_path, case, monkeypatch):
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *a, **k: pytest.fail("a process group"))
    change, message = REFUSED[case]
    run = RunConfig.from_dict(
        fields_of(made, "", **broken(made, tmp_path, change), parallel__tensor=4 if case == "tensor ranks" else 1)
    )
    with pytest.raises(ValueError) as error:
        run.check(run.parallel.tensor)
    assert message in str(error.value)


GIVEN_TWICE = {
    "model__hidden_size": (64, "model.hidden_size=64 is given beside model.huggingface="),
    "model__windows": (["8"], "model.windows=('8',) is given beside model.huggingface="),
    "model__preset": ("llama-8b", "and model.preset=llama-8b are 2 models for one run"),
    "model__build": ("a:b", "and model.build=a:b are 2 models for one run"),
    "data__tokenizer": ("elsewhere/tokenizer.json", "data.tokenizer=elsewhere/tokenizer.json is given beside model"),
    "data__train": ((), "the default corpus another one; prepare your text (python -m core.datasets.prepare"),
}


@pytest.mark.parametrize("name", GIVEN_TWICE)
def test_what_the_folder_says_is_not_said_again(made, name):
    value, message = GIVEN_TWICE[name]
    changed = {name: value} | ({"data__valid": ()} if name == "data__train" else {})
    with pytest.raises(ValueError) as error:
        RunConfig.from_dict(fields_of(made, "qwen3", **changed)).check(1)
    assert message in str(error.value)


def test_dropout_says_how_a_folder_is_trained_not_what_it_is(made):
    run = RunConfig.from_dict(fields_of(made, "qwen3", model__dropout=0.25, model__attention_dropout=0.0)).check(1)
    config = run.model.transformer()
    assert (config.hidden_dropout, config.attention_dropout) == (0.25, 0.0)
    assert run.resolved()["model.hidden_dropout"] == 0.25
    config = RunConfig.from_dict(fields_of(made, "qwen3")).model.transformer()
    assert (config.hidden_dropout, config.attention_dropout) == (0.0, 0.0), "as config.json says"


def test_a_text_of_another_tokenizer_is_refused(made, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    foreign = prepared(other, files=60)
    fields = fields_of(made, "qwen3", data__train=str(foreign.train), data__valid=str(foreign.valid))
    told = r"was made by tokenizer .*; prepare the text again .*--tokenizer .*qwen3/tokenizer\.json"
    with pytest.raises(ValueError, match=told):
        RunConfig.from_dict(fields).check(1)


def test_the_settings_say_what_the_folder_says_and_are_read_again(made, tmp_path):
    run = RunConfig.from_dict(fields_of(made, "qwen3"))
    assert run.data.tokenizer == str(made.train.parent / "qwen3" / "tokenizer.json")
    assert run == RunConfig.from_dict(run.to_dict()) and run.model.num_layers is None
    assert run.resolved()["model.num_layers"] == 4 and run.resolved()["model.kv_channels"] == 12
    run.to_toml(tmp_path / "run.toml")
    RunConfig.from_toml(tmp_path / "run.toml").check(1)
