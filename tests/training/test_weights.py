"""A run that begins with a checkpoint's weights; one that goes on with other data, batches or another optimizer."""

from types import SimpleNamespace

import pytest
import torch

from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot
from core.dist_checkpointing.publish.manifest import read_manifest
from core.dist_checkpointing.reading.lazy import lazy_tensors
from core.dist_checkpointing.reading.loading import open_stored
from core.parallel_state import layout_of
from core.training import RunConfig, initialize
from core.training.config.sources import merge
from core.training.model import weights
from core.training.model.begin import began_as, begin
from core.training.resume.batch_plan import BatchPlan
from tests.parity.whole import assembled
from tests.states import state
from tests.training.test_model_facts import fields_of
from tests.training.tiny import prepared

CONSTANT = {"optimizer__lr_schedule": "constant", "optimizer__lr_warmup_fraction": 0.0}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("corpus"))


def run(made, **more):
    """(losses, what was said, model) of a run in this process."""
    torch.set_default_dtype(torch.float32)  # a rank of the pool may have another
    model, _, _, loader = initialize(config=RunConfig.from_dict(fields_of(made, **CONSTANT | more)))
    losses = [float(model.train_step(batch).loss) for batch in loader]
    model.close()
    return losses, model, loader


@pytest.fixture(scope="module")
def base(made, tmp_path_factory):
    """Checkpoints of a run of three steps, every one, per style."""
    roots = {}
    for style in ("llama", "gpt2"):
        roots[style] = str(tmp_path_factory.mktemp(style))
        more = {"checkpoint__directory": roots[style], "checkpoint__every": 1, "checkpoint__asynchronous": False}
        run(made, model__style=style, training__train_steps=3, **more)
    return {style: f"{root}/step-00000003" for style, root in roots.items()}


OTHER = {
    "data__sequence_length": 8,
    "data__seed": 5,
    "training__global_batch_size": 4,
    "training__train_steps": 3,
    "optimizer__optimizer": "sgd",
}


def begun(made, url, layout):
    """The weights on this layout, put together."""
    torch.set_default_dtype(torch.float32)
    ps = state(**layout)
    said = []
    config = RunConfig.from_dict(
        fields_of(made, checkpoint__weights=url, pipeline__schedule="zb-v", model__num_layers=4)
    )
    stages = begin(config, 280, ps, said.append)
    parameters = {name: p for stage in stages.values() for name, p in stage.named_parameters()}
    return assembled(parameters, {name: layout_of(p) for name, p in parameters.items()}, ps), said


@pytest.fixture(scope="module")
def four_layers(made, tmp_path_factory):
    root = str(tmp_path_factory.mktemp("four"))
    run(made, model__num_layers=4, training__train_steps=1, checkpoint__directory=root)
    return f"{root}/step-00000001"


@pytest.mark.parametrize(
    ("world", "layout"), [(2, {"tp": 2}), pytest.param(4, {"tp": 2, "pp": 2}, marks=pytest.mark.full)]
)
def test_weights_of_any_layout_begin_a_run_of_any_other(ranks, made, four_layers, world, layout):
    stored = lazy_tensors(four_layers)
    for found, said in ranks(begun, made, four_layers, layout, world=world):
        for name, tensor in found.items():
            _, _, rest = name.partition("decoder.layers.")
            layer, _, key = rest.partition(".")
            expected = stored[f"model/decoder.layers.{key}"][int(layer)] if rest else stored[f"model/{name}"][...]
            assert torch.equal(tensor, expected), name
        assert said == [f"weights of {four_layers}: {sum(key.startswith('model/') for key in stored)} arrays"]


def test_everything_else_is_new(made, base, tmp_path):
    """Data, length, batch, optimizer and schedule; a second start of the same command goes on."""
    directory = {"checkpoint__directory": str(tmp_path / "new")}
    losses, _, loader = run(made, checkpoint__weights=base["llama"], **OTHER, **directory)
    assert len(losses) == 3 and loader.step == 3
    fresh, *_ = run(made, **OTHER)
    assert losses[0] < fresh[0] - 0.1, "it has learned something"
    longer = OTHER | {"training__train_steps": 5}
    more, _, loader = run(made, checkpoint__weights=base["llama"], **longer, **directory)
    assert len(more) == 2 and loader.step == 5, "it goes on, and does not begin again"
    for step in (3, 5):
        manifest = read_manifest(CheckpointRoot(tmp_path / "new").open(step))
        assert manifest.run["began_as"] == {"weights": base["llama"]}


def trained(made, more):
    return run(made, **more)[0]


def test_the_model_is_that_of_the_weights(base):
    """Nobody has to say it again; what is said wins, and a whole model of another kind replaces it."""
    given = {"checkpoint.weights": base["llama"]}
    draft = merge([], defaults=given)
    stored: dict = open_stored(base["llama"]).run["settings"]
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        assert draft.draft.values[f"model.{name}"] == stored[f"model.{name}"], name
    assert draft.origin["model.hidden_size"] == "checkpoint.weights" and draft.origin["model.seed"] == "default"
    assert merge([], defaults=given | {"model.rotary_base": 500.0}).draft.values["model.rotary_base"] == 500.0
    assert merge([], defaults=given | {"model.preset": "llama-60m"}).draft.values["model.hidden_size"] == 512


def test_every_layout_goes_on_from_weights_alike(ranks, made, base):
    fields = OTHER | {"checkpoint__weights": base["llama"]}
    alone = trained(made, fields)
    layout = {"parallel__pipeline": 2, "data_parallel__zero_stage": 2}
    for losses in ranks(trained, made, fields | layout, world=2):
        assert losses == pytest.approx(alone, abs=2e-5)


def test_learned_positions_grow(made, base):
    name = "embedding.position_embeddings.weight"
    fields = fields_of(made, model__style="gpt2", checkpoint__weights=base["gpt2"], data__sequence_length=24)
    model, *_ = initialize(config=RunConfig.from_dict(fields))
    untouched, *_ = initialize(config=RunConfig.from_dict(fields | {"checkpoint.weights": None}))
    grown, drawn = (dict(each.module.named_parameters())[name] for each in (model, untouched))
    assert grown.shape == (24, 32) and torch.equal(grown[:16], lazy_tensors(base["gpt2"])[f"model/{name}"][...])
    assert torch.equal(grown[16:], drawn[16:])


MISFITS = {
    "shorter positions": (
        "gpt2",
        {"model__style": "gpt2", "data__sequence_length": 8},
        "position_embeddings.weight is (16, 32) there and (8, 32) here; give model.max_position_embeddings=16",
    ),
    "vocabulary": (
        "llama",
        {"model__vocab_size": 300},
        "7 of its 8 arrays fit: embedding.word_embeddings.weight is (280, 32) there and (300, 32) here; give",
    ),
    "width": ("llama", {"model__hidden_size": 48}, "decoder.final_layernorm.weight is (32,) there and (48,) here"),
    "layers": ("llama", {"model__num_layers": 3}, "mlp.linear_fc1.weight is (2, "),
    "style": ("gpt2", {}, "mlp.linear_fc1.bias is there, and nothing here takes it"),
    "untied": ("llama", {"model__tie_embeddings": False}, "output_layer.weight is not there"),
    "load beside it": ("llama", {"checkpoint__load": "x"}, "load=x goes on with a run and weights="),
    "no checkpoint": (None, {}, "checkpoint.weights=nowhere is no checkpoint: there is no such folder"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_weights_of_another_model_are_refused_before_any_process_group(made, base, case, monkeypatch):
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *a, **k: pytest.fail("a process group"))
    style, fields, message = MISFITS[case]
    url = base[style] if style is not None else "nowhere"
    with pytest.raises(ValueError) as error:
        RunConfig.from_dict(fields_of(made, checkpoint__weights=url, **fields)).check(1)
    assert message in str(error.value)


CHANGES = {
    "data": ({"data__seed": 5}, r"data_seed=1234 \(here 5\)"),
    "batch": ({"training__global_batch_size": 4}, r"global_batch_size=8 \(here 4\)"),
    "model": ({"model__rotary_base": 500.0}, r"is of a model with rotary_base=10000.0 \(now 500.0\)"),
    "optimizer": ({"optimizer__optimizer": "sgd"}, "it holds exp_avg, exp_avg_sq of each parameter, this run mom"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_that_goes_on_says_what_changes(made, base, change, capsys):
    fields, message = CHANGES[change]
    start = {"checkpoint__load": base["llama"], "training__train_steps": 4}
    with pytest.raises(ValueError, match=message) as error:
        run(made, **start, **fields)
    assert f'checkpoint.change = ["{change}"]' in str(error.value)
    losses, model, _ = run(made, **start, **fields, checkpoint__change=[change])
    assert len(losses) == 1 and model.global_steps == 4
    row = 0 if change == "data" else 24
    assert f"step 3, next sample {row}," in capsys.readouterr().out


@pytest.mark.parametrize("fields", [{"model__num_layers": 3}, {"model__hidden_size": 64}])
def test_a_run_of_other_sizes_is_another_run(made, base, fields):
    """No change is offered that shapes forbid."""
    with pytest.raises(ValueError, match=r"weights have other shapes.*checkpoint\.directory=ANOTHER") as error:
        run(made, checkpoint__load=base["llama"], training__train_steps=4, **fields)
    assert "checkpoint.change" not in str(error.value)


def test_a_run_that_is_prolonged_says_that_the_rate_is_laid_out_anew(made, base, capsys):
    more = {"checkpoint__load": base["llama"], "training__train_steps": 5}
    run(made, **more, optimizer__lr_schedule="cosine")
    assert "rate is laid out anew: optimizer.lr_schedule=constant (now cosine)" in capsys.readouterr().out
    run(made, **more)
    out = capsys.readouterr().out
    assert "laid out anew" not in out and "updates are others" not in out


def test_a_run_that_goes_on_says_that_its_updates_are_others(made, base, capsys):
    fields = {"optimizer__weight_decay": 0.3, "optimizer__clip_grad": 0.5, "optimizer__adam_beta2": 0.9}
    run(made, checkpoint__load=base["llama"], training__train_steps=4, **fields)
    out = capsys.readouterr().out
    assert "the updates are others from here on: " in out and "laid out anew" not in out
    for change in ("weight_decay=0.1 (now 0.3)", "clip_grad=1.0 (now 0.5)", "adam_beta2=0.999 (now 0.9)"):
        assert f"optimizer.{change}" in out


def test_a_change_that_is_no_field():
    with pytest.raises(ValueError, match="change names 'batches'; known: data, batch, optimizer, model"):
        RunConfig.from_dict({"checkpoint.change": "batches"})


def test_a_smaller_batch_goes_on_with_the_next_row(made, base):
    _, _, whole = run(made, training__train_steps=4)
    fields = {"training__train_steps": 5, "training__global_batch_size": 4, "checkpoint__change": ["batch"]}
    _, _, loader = run(made, checkpoint__load=base["llama"], **fields)
    rows = torch.cat([loader.batch(3)["tokens"], loader.batch(4)["tokens"]])
    assert torch.equal(rows, whole.batch(3)["tokens"])


@pytest.mark.full
def test_a_run_with_another_optimizer_resumes_as_if_it_had_never_ended(made, base, tmp_path):
    """AdamW's bias correction counts the updates since the change, also after another resume."""
    kept = {"checkpoint__every": 1, "checkpoint__asynchronous": False}
    sgd = {"optimizer__optimizer": "sgd", "training__train_steps": 4, "checkpoint__change": ["optimizer"]}
    run(made, checkpoint__load=base["llama"], checkpoint__directory=str(tmp_path / "sgd"), **sgd, **kept)
    url, change = str(tmp_path / "sgd" / "step-00000004"), {"checkpoint__change": ["optimizer"]}
    unbroken, *_ = run(made, checkpoint__load=url, training__train_steps=8, **change)
    first, *_ = run(
        made,
        checkpoint__load=url,
        checkpoint__directory=str(tmp_path / "a"),
        training__train_steps=6,
        **change,
        **kept,
    )
    second, *_ = run(made, checkpoint__directory=str(tmp_path / "a"), training__train_steps=8, **kept)
    assert first + second == unbroken


def test_the_rows_of_a_plan():
    plan = BatchPlan(global_batch_size=8)
    assert [(plan.first_row(step), plan.size(step)) for step in (0, 1, 7)] == [(0, 8), (8, 8), (56, 8)]
    later = BatchPlan(global_batch_size=4, start_step=3, start_row=24)
    assert [(later.first_row(step), later.size(step)) for step in (3, 4)] == [(24, 4), (28, 4)]
    with pytest.raises(ValueError, match="step 2 lies before step 3"):
        later.size(2)


class Steps:
    """Batches of one's own for a linear model."""

    def batch(self, step, rank=0, size=1):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))[rank::size]
        return {"input": x, "y": x.sum(1, keepdim=True)}


def fitted(fields, model=None):
    config = {"training": {"train_steps": 2, "global_batch_size": 16}, "device": "cpu"}
    for name, value in fields.items():
        section, _, key = name.partition(".")
        config.setdefault(section, {})[key] = value
    module = model or torch.nn.Linear(4, 1)
    trained, *_ = initialize(
        module, config, batches=Steps(), loss_fn=lambda out, batch: ((out - batch["y"]).square().sum(), len(out))
    )
    return trained


def test_weights_for_a_module_of_ones_own(tmp_path):
    """The run's own model, which nobody trains, is not compared with them."""
    torch.set_default_dtype(torch.float32)
    first = fitted({"checkpoint.directory": str(tmp_path)})
    for batch in first.loader:
        first.train_step(batch)
    first.close()
    url = str(tmp_path / "step-00000002")
    again = fitted({"checkpoint.weights": url})
    assert torch.equal(again.module.weight, first.module.weight) and again.global_steps == 0
    with pytest.raises(ValueError, match=r"is of another model, .*stages\.0\.weight: its shape is \(1, 4\) in the"):
        fitted({"checkpoint.weights": url}, torch.nn.Linear(4, 2))
    with pytest.raises(
        ValueError, match=r"given a model, and the run says model\.huggingface=hf, .* 2 models for one"
    ):
        fitted({"model.huggingface": "hf"})


def test_a_run_s_file_says_the_model_of_its_weights(made, base, tmp_path):
    """Who evaluates the run, or gives its file again, may not have the weights that it began with."""
    flags = ["--checkpoint.weights", base["gpt2"], "--data.train", str(made), "--model.attention-dropout", "0.0"]
    loaded = merge(flags).loaded()
    path = tmp_path / "run.toml"
    loaded.to_toml(path)
    found, stored = RunConfig.from_toml(path).flat(), open_stored(base["gpt2"]).run["settings"]
    for name in ("model.num_layers", "model.hidden_size", "model.num_attention_heads", "model.style"):
        assert found[name] == loaded.run.flat()[name] == stored[name], name


@pytest.mark.parametrize(
    "said, form",
    [
        ({}, None),
        ({"began_as": {"huggingface": "hf"}}, "hf"),
        ({"began_as": {"weights": "w", "form": "hf"}}, "hf"),
        ({"began_as": {"weights": "w"}}, None),
        ({"imported": {"folder": "hf"}}, "hf"),
    ],
)
def test_weights_keep_the_form_of_the_folder_that_they_began_as(monkeypatch, made, said, form):
    """So that a run of two stages (SFT, then DPO) is exported with the folder's template and special tokens."""
    monkeypatch.setattr(weights, "open_stored", lambda url: SimpleNamespace(run=said))
    config = RunConfig.from_dict(fields_of(made, checkpoint__weights="some/where"))
    assert began_as(config) == {"weights": "some/where"} | ({} if form is None else {"form": form})
