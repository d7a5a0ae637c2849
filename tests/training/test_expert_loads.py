"""A run with experts tells how evenly they were used: the same on every layout, layer by layer."""

import json

import pytest

from core.pretrain import main as pretrain
from core.training import initialize, load_run
from core.training.log.experts import loads_of
from core.training.log.metrics import StepRecord, read_metrics
from core.transformer.moe.load import ExpertLoad
from tests.examples.test_pretrain import TINY
from tests.training.tiny import prepared

EXPERTS = ["--model.num-moe-experts=4", "--model.moe-router-topk=2", "--model.style=llama"]
EXPERTS += ["--model.moe-aux-loss-coeff=0.01", "--model.moe-z-loss-coeff=0.001"]
LAYOUTS = [
    (2, ["--parallel.expert=2"]),
    (2, ["--parallel.pipeline=2"]),
    pytest.param(4, ["--parallel.expert=2", "--parallel.tensor=2", "--parallel.pipeline=2"], marks=pytest.mark.full),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def alone(made, tmp_path_factory):
    """The records of one process, and the folder they are in."""
    where = tmp_path_factory.mktemp("alone")
    pretrain([*TINY, *EXPERTS, *texts(made), f"--training.output={where}"])
    return read_metrics(where / "metrics.jsonl"), where


def texts(made):
    return [f"--data.train={made.train}", f"--data.valid={made.valid}"]


def test_one_process_counts_every_row(alone):
    records, where = alone
    rows = 2 * 16 * 2  # a microbatch: two texts of 16 tokens, to two experts each
    for record in records:
        assert [load.layer for load in record.experts] == [0, 1]
        for load in record.experts:
            assert 0 <= load.idlest <= 1 <= load.busiest <= 2 and load.received == rows
            assert 1 <= load.aux < 2 and load.z > 0
        assert record.expert_load == max(load.busiest for load in record.experts)
        assert "| expert load " in record.line(5)
        assert record.aux_loss == sum(load.aux for load in record.experts) / 2
    page = (where / "report.html").read_text()
    assert all(title in page for title in ("Busiest expert", "Auxiliary loss", "Router z loss"))
    row = json.loads((where / "metrics.jsonl").read_text().splitlines()[0])
    assert StepRecord.from_json(row).experts[0] == ExpertLoad(**row["experts"][0])


def test_what_is_not_finite_comes_back_from_a_file():
    load = ExpertLoad(layer=1, busiest=2.0, idlest=0.0, received=3, aux=1.5, z=float("inf"))
    facts = {"step": 1, "loss": 1.0, "grad_norm": 1.0, "learning_rate": 0.1, "tokens_per_s": 1.0}
    record = StepRecord(**facts, tflops_per_s=1.0, step_ms=1.0, tokens=1, experts=(load,))
    row = json.loads(json.dumps(record.to_json(), allow_nan=False))
    assert StepRecord.from_json(row) == record and row["z_loss"] == "Infinity"
    row["experts"][0] = {name: row["experts"][0][name] for name in ("layer", "busiest", "idlest", "received")}
    row["experts"][0]["of_a_later_version"] = 1
    assert StepRecord.from_json(row).experts[0] == ExpertLoad(layer=1, busiest=2.0, idlest=0.0, received=3)


def first_step(flags):
    """How evenly the first step of a run over these ranks used the experts."""
    model, _, _, loader = initialize(config=load_run([*TINY, *EXPERTS, *flags]).run)
    tell = loads_of(model.stages.values(), model.parallel)
    assert tell is not None and tell() == []
    model.train_step(next(iter(loader)))
    return tell()


@pytest.mark.parametrize(("world", "layout"), LAYOUTS)
def test_every_layout_tells_the_same(ranks, made, alone, world, layout):
    records, _ = alone
    for loads in ranks(first_step, [*texts(made), *layout], world=world):
        for load, expected in zip(loads, records[0].experts, strict=True):
            assert (load.layer, load.busiest, load.idlest) == (expected.layer, expected.busiest, expected.idlest)
            assert 0 < load.received <= world * expected.received
            assert (load.aux, load.z) == pytest.approx((expected.aux, expected.z), rel=1e-5)
