"""A batch that grows: which rows each step takes, on every layout and after a resume; what is refused."""

import pytest
import torch

from core.training import RunConfig, TrainingConfig, initialize
from core.training.resume.batch_plan import BatchPlan
from tests.training.test_model_facts import fields_of
from tests.training.tiny import prepared

PLAIN = {"optimizer__lr_schedule": "constant", "optimizer__lr_warmup_fraction": 0.0, "training__micro_batch_size": 1}
RAMP = {"training__rampup_batch_size": [2, 2, 12], "training__global_batch_size": 8, "training__train_steps": 6}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("corpus"))


def test_the_sizes_grow_in_equal_shares_of_the_rows():
    """Megatron's rule: of 1200 rows 400 with 16, 400 with 32, 400 with 48, then 64; whole steps."""
    plan = BatchPlan(global_batch_size=64, ramp=(16, 16, 1200))
    sizes, row = [], 0
    for step in range(60):
        assert plan.first_row(step) == row
        sizes.append(plan.size(step))
        expected = 16 * (1 + row // 400) if row < 1200 else 64
        assert plan.size(step) == expected, (step, row)
        row += plan.size(step)
    assert sorted(set(sizes)) == [16, 32, 48, 64] and sizes == sorted(sizes)


@pytest.mark.parametrize("step", range(8))
def test_a_plan_from_the_middle_is_the_same_plan(step):
    whole = BatchPlan(global_batch_size=8, ramp=(2, 2, 21))
    later = BatchPlan(global_batch_size=8, ramp=(2, 2, 21), start_step=step, start_row=whole.first_row(step))
    for k in range(step, 12):
        assert (later.first_row(k), later.size(k)) == (whole.first_row(k), whole.size(k))


def trained(made, fields):
    """(losses, rows of each step on this rank)."""
    torch.set_default_dtype(torch.float32)  # a rank of the pool may have another
    model, _, _, loader = initialize(config=RunConfig.from_dict(fields_of(made, **PLAIN | fields)))
    losses, rows = [], []
    for batch in loader:
        rows.append(len(batch["tokens"]))
        losses.append(float(model.train_step(batch).loss))
    model.close()
    return losses, rows


LAYOUTS = [
    (2, {"parallel__pipeline": 2, "pipeline__schedule": "zb-h1"}),
    pytest.param(2, {"data_parallel__zero_stage": 2}),
    pytest.param(2, {"parallel__pipeline": 2, "training__recompute": "stage"}, marks=pytest.mark.full),
    pytest.param(4, {"parallel__pipeline": 2, "data_parallel__zero_stage": 3}, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("world", "layout"), LAYOUTS)
def test_every_layout_takes_the_same_rows(ranks, made, world, layout):
    alone, rows = trained(made, RAMP)
    assert rows == [2, 2, 4, 6, 8, 8]
    data_ranks = world // layout.get("parallel__pipeline", 1)
    for losses, local_rows in ranks(trained, made, RAMP | layout, world=world):
        assert losses == pytest.approx(alone, abs=2e-5)
        assert [count * data_ranks for count in local_rows] == rows


def test_a_run_that_grows_resumes_as_if_it_had_never_ended(made, tmp_path):
    unbroken, _ = trained(made, RAMP)
    kept = RAMP | {"checkpoint__directory": str(tmp_path)}
    first, _ = trained(made, kept | {"training__train_steps": 3})
    second, rows = trained(made, kept)
    assert first + second == unbroken and rows == [6, 8, 8]


REFUSED = {
    "words": ([2, 2], "rampup_batch_size=2 2 must be 3 whole numbers, start increment samples, as 16 16 100000"),
    "no number": ([2, 2, "many"], "rampup_batch_size=2 2 many must be 3 whole numbers"),
    "steps": ([3, 2, 12], "rampup_batch_size=3 2 12 does not lead to global_batch_size=8 in steps of 2"),
    "beyond": ([16, 2, 12], "rampup_batch_size=16 2 12 does not lead to global_batch_size=8"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_grow_is_refused(case):
    words, message = REFUSED[case]
    with pytest.raises(ValueError) as error:
        RunConfig.from_dict({"training.rampup_batch_size": words, "training.global_batch_size": 8})
    assert message in str(error.value)


def test_what_does_not_divide_is_refused_with_what_does():
    fields = {
        "training.rampup_batch_size": [2, 6, 12],
        "training.global_batch_size": 8,
        "training.micro_batch_size": 2,
    }
    with pytest.raises(ValueError, match=r"start=2 is not a multiple of micro_batch_size=2 x data\(2\) = 4; use 4"):
        RunConfig.from_dict(fields | {"training.micro_batch_size": 2}).check(2)
    auto = {"pipeline.schedule": "auto", "parallel.pipeline": 2, "training.rampup_batch_size": [2, 2, 12]}
    with pytest.raises(ValueError, match="schedule=auto is searched for one number of microbatches"):
        RunConfig.from_dict(auto).check(2)
    assert TrainingConfig(rampup_batch_size=()).ramp is None
