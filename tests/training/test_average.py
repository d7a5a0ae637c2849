"""Averaged weights in a run: on every layout, frozen, in a checkpoint of any layout, validated, and as a model."""

import json

import pytest
import torch
from torch import nn

from core.dist_checkpointing.__main__ import main as checkpoint_command
from core.dist_checkpointing.reading.loading import load_plain_tensors
from core.training import RunConfig, initialize
from tests.training.test_model_facts import fields_of
from tests.training.tiny import prepared

DECAY = 0.9
RUN = {"optimizer__ema_decay": DECAY, "training__train_steps": 4, "optimizer__lr": 1e-2}
RUN |= {"optimizer__lr_schedule": "constant", "optimizer__lr_warmup_fraction": 0.0}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("corpus"))


class Rows:
    """Batches of numbers for a module of one's own."""

    def batch(self, step, rank=0, size=1):
        rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        return {"input": rows.chunk(size)[rank]}


def squares(output, batch):
    return output.square().sum(), batch["input"].shape[0]


def doubles(zero_stage):
    """Four float64 steps, of which the second is skipped; (name -> average, name -> a plain loop's) of this rank."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(6, 37), nn.Tanh(), nn.Linear(37, 5)).double()
    module[2].bias.requires_grad_(False)
    config = {"optimizer": {"ema_decay": DECAY, "lr": 0.05}, "data_parallel": {"zero_stage": zero_stage}}
    config |= {"training": {"global_batch_size": 8, "micro_batch_size": 2, "train_steps": 4}, "device": "cpu"}
    model, optimizer, *_ = initialize(module, config, batches=Rows(), loss_fn=squares)

    def weights():
        optimizer.shard.unshard(module)
        found = {name: p.detach().clone() for name, p in module.named_parameters()}
        optimizer.shard.reshard(module)
        return found

    expected = weights()
    for step in range(4):
        batch = Rows().batch(step, model.parallel.index("dp"), model.parallel.size("dp"))
        batch = {name: rows * float("inf") if step == 1 else rows for name, rows in batch.items()}
        assert bool(model.train_step(batch).skipped) == (step == 1)
        if step != 1:
            now = weights()
            expected = {name: DECAY * expected[name] + (1 - DECAY) * now[name] for name in now}
    last = weights()
    with model.averaged():
        averages = weights()
    assert all(torch.equal(last[name], now) for name, now in weights().items())
    return averages, expected


@pytest.mark.parametrize(
    ("world", "zero_stage"),
    [(1, 0), (2, 1), (2, 3), *(pytest.param(*case, marks=pytest.mark.full) for case in ((2, 0), (2, 2), (4, 3)))],
)
def test_in_float64_it_is_a_plain_loops_at_every_zero_stage(ranks, world, zero_stage):
    (alone, _), *_ = ranks(doubles, 0, world=1)
    for averages, expected in ranks(doubles, zero_stage, world=world):
        for name, average in averages.items():
            assert (average - expected[name]).abs().max() <= 1e-14, name
            assert (average - alone[name]).abs().max() <= 1e-12, name


def trained(made, fields):
    """Loss of the first batch by the average, after a run."""
    torch.set_default_dtype(torch.float32)  # a rank of the pool may have another
    model, optimizer, _, loader = initialize(config=RunConfig.from_dict(fields_of(made, **RUN | fields)))
    for batch in loader:
        model.train_step(batch)
    assert optimizer.averages
    with model.averaged():
        result = model.evaluate(loader.batch(3))
    model.close()
    return float(result.loss)


LAYOUTS = [
    (2, {"parallel__pipeline": 2, "data_parallel__zero_stage": 2}),
    pytest.param(2, {"parallel__tensor": 2}, marks=pytest.mark.full),
    pytest.param(2, {"data_parallel__zero_stage": 3}, marks=pytest.mark.full),
    pytest.param(4, {"parallel__pipeline": 2, "data_parallel__zero_stage": 3}, marks=pytest.mark.full),
    pytest.param(4, {"parallel__pipeline": 2, "parallel__tensor": 2}, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("world", "layout"), LAYOUTS)
@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_checkpoint_of_any_layout_carries_it(ranks, made, tmp_path, world, layout, bf16):
    """Saved after two steps on several ranks, ended by one process: the average of a run that never ended."""
    fields = {"optimizer__freeze": ["decoder.layers.0.mlp.*"], "model__bf16": bf16}
    unbroken = trained(made, fields)
    kept = fields | {"checkpoint__directory": str(tmp_path), "checkpoint__every": 2}
    ranks(trained, made, kept | layout | {"training__train_steps": 2}, world=world)
    stored = load_plain_tensors(tmp_path / "step-00000002", keys="optimizer/ema/*")
    assert any(".layers.1.mlp" in key for key in stored) and not any(".layers.0.mlp" in key for key in stored)
    assert trained(made, kept) == pytest.approx(unbroken, abs=3e-3 if bf16 else 2e-5)


def test_it_may_begin_at_a_resume_and_is_not_dropped_silently(made, tmp_path):
    kept = {"checkpoint__directory": str(tmp_path)}
    without = {"optimizer__ema_decay": 0.0, "training__train_steps": 2}
    model, _, _, loader = initialize(config=RunConfig.from_dict(fields_of(made, **RUN | kept | without)))
    for batch in loader:
        model.train_step(batch)
    model.close()
    begun, optimizer, *_ = initialize(config=RunConfig.from_dict(fields_of(made, **RUN | kept)))
    states = optimizer.states()
    assert optimizer.step_count == 2 and all(torch.equal(k["ema"].tensor, k["main"].tensor) for k in states.values())
    assert any(bool(k["exp_avg"].tensor.any()) for k in states.values()), "moments go on"
    begun.close()
    assert trained(made, kept) > 0
    message = r"it holds an average of the weights \(ema\), this run keeps none \(optimizer.ema_decay=0\)"
    with pytest.raises(ValueError, match=message):
        initialize(config=RunConfig.from_dict(fields_of(made, **RUN | kept | {"optimizer__ema_decay": 0.0})))


@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_average_is_a_model_by_itself(made, tmp_path, capsys, bf16):
    """`checkpoint average` writes what `evaluate`, `generate` and `checkpoint.weights` read."""
    kept = {"checkpoint__directory": str(tmp_path / "kept"), "model__bf16": bf16}
    kept["optimizer__freeze"] = ["embedding.*", "decoder.layers.0.mlp.*"]
    expected = trained(made, kept)
    step, new = tmp_path / "kept" / "step-00000004", tmp_path / "average"
    assert checkpoint_command(["average", str(step), str(new)]) == 0
    assert "as they are, for they were not trained: embedding.word_embeddings.weight" in capsys.readouterr().out
    assert checkpoint_command(["verify", str(new)]) == 0
    assert checkpoint_command(["average", str(new), str(tmp_path / "again")]) == 2
    assert "0 arrays below optimizer/ema/: its run kept no average" in capsys.readouterr().err
    fields = {"checkpoint__weights": str(new), "optimizer__ema_decay": 0.0, "model__bf16": bf16}
    model, *_, loader = initialize(config=RunConfig.from_dict(fields_of(made, **RUN | fields)))
    assert float(model.evaluate(loader.batch(3)).loss) == pytest.approx(expected, abs=1e-6)


def test_a_run_validates_it_too(made, tmp_path):
    from core.pretrain import main

    fields = fields_of(made, **RUN | {"training__output": str(tmp_path), "training__eval_interval": 2})
    arguments = [word for name, value in fields.items() for word in _flag(name, value)]
    main(arguments)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = {(row["step"], row["validation"]): row["validation_loss"] for row in rows if "validation" in row}
    assert found.keys() == {(step, name) for step in (2, 4) for name in ("validation", "validation.ema")}
    assert found[4, "validation"] != found[4, "validation.ema"]
    assert found[4, "validation"] < found[4, "validation.ema"], "it lags behind weights that still learn"


def _flag(name, value):
    words = value if isinstance(value, tuple | list) else [value]
    flag = "--" + name.replace("_", "-")
    if isinstance(value, dict):
        return []
    return [flag, *map(str, words)]
