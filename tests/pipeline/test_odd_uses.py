"""Uses of a pipeline that nobody thinks of first."""

import pytest
import torch
from torch import nn

from core.pipeline import Pipeline, SingleStage
from core.pipeline.schedule import schedules as named
from core.pipeline.schedule.actions import Action, Schedule
from tests.pipeline import tiny
from tests.states import state
from tests.twins.per_parameter import PerParameterGradSync


def shared(recompute):
    """One module is stage 0 and stage 3, both on rank 0 of a V: its gradient has both parts, also with an owner."""
    ps = state(pp=2)
    one = tiny.part(0)
    modules = {0: one, 3: one} if ps.rank == 0 else {1: tiny.part(1), 2: tiny.part(2)}
    whole = nn.Sequential(one_whole := tiny.part(0), tiny.part(1), tiny.part(2), one_whole)
    for x in tiny.rows(4).chunk(4):
        tiny.squares(whole(x), x)[0].backward()
    want = {n: p.grad for n, p in whole.named_parameters()}
    for owner in (False, True):
        sync = PerParameterGradSync(modules, ps) if owner else None
        facts = {"schedule": "zb-v", "num_microbatches": 4, "grad_sync": sync, "recompute": recompute}
        pipe = Pipeline(modules, ps=ps, **facts)
        pipe.step(tiny.rows(4), tiny.squares)
        for s, module in modules.items():
            for name, p in module.named_parameters():
                got = p.main_grad if owner else p.grad
                torch.testing.assert_close(got, want[f"{s % 3}.{name}"], rtol=1e-10, atol=1e-12)
        pipe.close()
        if sync is not None:
            sync.remove()
        for p in (p for module in modules.values() for p in module.parameters()):
            p.grad = None


@pytest.mark.parametrize("recompute", ["none", "stage"])
def test_one_module_as_two_stages_of_a_rank(ranks, recompute):
    ranks(shared, recompute)


def modes():
    """Under no_grad and inference_mode around it; gradients of two steps add up in `.grad`."""
    pipe = tiny.pipeline("1f1b", 4)
    want, gradients = tiny.alone(2, tiny.rows(4))
    with torch.inference_mode():
        inside = pipe.evaluate(tiny.rows(4), tiny.squares).loss_sum.item()
        shape = pipe.forward(tiny.rows(6))
    with torch.no_grad():
        losses = [pipe.step(tiny.rows(4), tiny.squares).loss_sum.item() for _ in range(2)]
    assert inside == pytest.approx(want) and losses == [pytest.approx(want)] * 2
    assert shape is None if pipe.ps.rank == 0 else shape.shape == (6, tiny.WIDTH)
    tiny.assert_equal(tiny.gradients(pipe), {name: 2 * g for name, g in gradients.items()})
    other = tiny.pipeline("zb-v", 2)  # beside the first, over the same connections
    pairs = [(other.step(tiny.rows(2), tiny.squares), pipe.evaluate(tiny.rows(2), tiny.squares)) for _ in range(2)]
    assert len({loss.loss_sum.item() for loss, _ in pairs}) == len({e.loss_sum.item() for _, e in pairs}) == 1


def test_modes_around_it_accumulation_and_two_pipelines(ranks):
    ranks(modes)


def replicas_only(schedule):
    """One pipeline rank, two replicas: the same as `SingleStage`."""
    ps = state()
    found = []
    for make in (SingleStage, Pipeline):
        stages = [tiny.part(s) for s in range(len(named.placement(schedule, 1)))]
        model = nn.Sequential(*stages)
        sync = PerParameterGradSync(stages, ps)
        more = {"schedule": schedule} if make is Pipeline else {}
        runs = make(stages if make is Pipeline else model, ps=ps, num_microbatches=2, grad_sync=sync, **more)
        mine = tiny.rows(4)[2 * ps.index("dp") :][:2]
        loss = runs.step(mine, tiny.squares).loss_sum.item()
        found.append(
            (loss, [p.main_grad for p in model.parameters()], runs.evaluate(mine, tiny.squares).loss_sum.item())
        )
    (loss, one, seen), (other_loss, other, other_seen) = found
    assert loss == pytest.approx(other_loss, rel=1e-12) and seen == pytest.approx(other_seen, rel=1e-12)
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_replicas_without_pipeline_ranks(ranks):
    for schedule in ("1f1b", "zb-v"):
        ranks(replicas_only, schedule)


class Half(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.inner = tiny.part(s).to(torch.bfloat16)

    def forward(self, x):
        return self.inner(x.bfloat16())


def sixteen_bits():
    """bfloat16 stages over float32 main gradients: bit for bit those of one process in the same order."""
    ps = state(pp=2)
    stages = [Half(ps.rank)]
    sync = PerParameterGradSync(stages, ps)
    pipe = Pipeline(stages, ps=ps, schedule="zb-h1", num_microbatches=4, grad_sync=sync)
    loss = pipe.step(tiny.rows(4).float(), lambda y, _: (y.float().square().sum(), 1)).loss_sum.item()
    whole = nn.Sequential(Half(0), Half(1))
    owner = PerParameterGradSync(whole, ps)
    one = SingleStage(whole, ps=ps.single("cpu"), num_microbatches=4, grad_sync=owner)
    want = one.step(tiny.rows(4).float(), lambda y, _: (y.float().square().sum(), 1)).loss_sum.item()
    assert loss == want
    for p, q in zip(stages[0].parameters(), whole[ps.rank].parameters(), strict=True):
        assert p.main_grad.dtype == torch.float32
        torch.testing.assert_close(p.main_grad, q.main_grad, rtol=1e-2, atol=1e-3)


def test_sixteen_bit_stages(ranks):
    ranks(sixteen_bits)


class Grows(nn.Module):
    """Nested: a stage that holds another stage's kind of module under the same names."""

    def __init__(self, s):
        super().__init__()
        self.inner = nn.ModuleDict({"a": tiny.part(s)})
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x, *, factor=1.0, mask=None):
        y = self.inner["a"](x) * self.scale * factor
        return y if mask is None else y * mask


def named_inputs():
    """Every stage takes by name what it wants of the microbatch; constants come along."""
    ps = state(pp=2)
    data = {"x": tiny.rows(4), "mask": (tiny.rows(4, seed=1) > 0).double(), "factor": 1.5, "other": "text"}
    pipe = tiny.pipeline("zb-v", 2, Grows, recompute="stage")
    loss = pipe.step(data, lambda y, part: (y[part["mask"] > 0].square().sum(), 1)).loss_sum.item()
    modules = [Grows(s) for s in range(4)]
    total = torch.zeros((), dtype=torch.float64)
    for x, mask in zip(data["x"].chunk(2), data["mask"].chunk(2), strict=True):
        y = x
        for module in modules:
            y = module(y, factor=1.5, mask=mask)
        total = total + y[mask > 0].square().sum()
    total.backward()
    assert loss == pytest.approx(total.item(), rel=1e-12) and ps
    tiny.assert_equal(
        tiny.gradients(pipe), {f"{s}.{n}": p.grad for s, m in enumerate(modules) for n, p in m.named_parameters()}
    )


def test_stages_take_by_name_what_they_want_of_the_microbatch(ranks):
    ranks(named_inputs)


class Position(nn.Module):
    """The gradient of `table` is a view of the one of the linear's output, which waits for W."""

    def __init__(self):
        super().__init__()
        self.linear, self.table = nn.Linear(5, 5), nn.Parameter(torch.ones(3, 5))
        nn.init.constant_(self.linear.bias, 0.5)
        nn.init.constant_(self.linear.weight, 0.25)

    def forward(self, x):
        return self.linear(x) + self.table.unsqueeze(0)


def test_a_gradient_of_autograd_is_no_view_of_what_waits_for_w():
    schedule = Schedule.make((0,), [[Action(kind, 0, m) for kind in "FIW" for m in range(4)]])
    x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found, plain = Position().double(), Position().double()

    def loss(y, _):
        return y.sin().sum(), 1

    Pipeline([found], ps=state(), schedule=schedule, num_microbatches=4).step(x, loss)
    for part in x.chunk(4):
        loss(plain(part), part)[0].backward()
    for ours, theirs in zip(found.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
