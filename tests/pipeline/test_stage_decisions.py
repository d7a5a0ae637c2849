"""What programs decide from what `loss_fn` collected, which is on the last stage; losses of a stage's own."""

import warnings

import pytest
import torch
from torch import nn

from core.pipeline import Pipeline
from core.pipeline.run.checks.backward_inside import refuse_backward
from tests.states import state


def loss_of(seen):
    def loss_fn(output, batch):
        loss = (output - batch["y"]).square().sum()
        seen.append(loss.item())
        return loss, output.numel()

    return loss_fn


def by_own_losses(optimizer, seen, result):
    if seen and seen[-1] < 1e9:
        optimizer.param_groups[0]["lr"] *= 0.5


def by_the_result(optimizer, seen, result):
    if float(result.loss) < 1e9:
        optimizer.param_groups[0]["lr"] *= 0.5


def by_a_schedule(optimizer, seen, result):
    optimizer.param_groups[0]["lr"] *= 0.9


def stage_of(ps):
    torch.manual_seed(ps.index("pp"))
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def batch(step):
    x, y = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(step))
    return {"input": x, "y": y}


def said_of_rates(decide):
    ps, seen = state(pp=2), []
    module = stage_of(ps)
    pipeline = Pipeline({ps.index("pp"): module}, ps=ps, schedule="1f1b", num_microbatches=2)
    # rates by depth
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1 * (1 + ps.index("pp")))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for step in range(5):
            result = pipeline.step(batch(step), loss_of(seen))
            optimizer.step()
            optimizer.zero_grad()
            decide(optimizer, seen, result)
    pipeline.close()
    return [str(w.message) for w in found if "rate" in str(w.message)]


def test_a_rate_by_what_one_rank_collected_is_told(ranks):
    for messages in ranks(said_of_rates, by_own_losses, world=2):
        assert len(messages) == 1 and "the learning rate was changed by another factor" in messages[0]


@pytest.mark.parametrize("decide", [by_the_result, by_a_schedule], ids=lambda f: f.__name__)
def test_a_rate_by_what_all_share_is_not(ranks, decide):
    assert ranks(said_of_rates, decide, world=2) == [[], []]


class Unfrozen(nn.Module):
    """fairseq's `freeze_finetune_updates`: no gradients until a step."""

    def __init__(self, decides):
        super().__init__()
        self.lin, self.decides, self.step = nn.Linear(4, 4), decides, 0

    def forward(self, input):
        with torch.set_grad_enabled(torch.is_grad_enabled() and not (self.decides and self.step < 2)):
            return self.lin(input).tanh()


def unfrozen(recompute, decides):
    """A first stage that is trained from step 2 on: what is said, and its weight against one process."""
    ps = state(pp=2)
    stage = ps.index("pp")
    torch.manual_seed(0)
    whole = nn.Sequential(Unfrozen(decides), nn.Linear(4, 4)).double()
    torch.manual_seed(0)
    mine = nn.Sequential(Unfrozen(decides), nn.Linear(4, 4)).double()[stage]
    pipeline = Pipeline({stage: mine}, ps=ps, schedule="1f1b", num_microbatches=2, recompute=recompute)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (mine, whole)]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for step in range(5):
            given = {name: x.double() for name, x in batch(step).items()}
            for first in (mine, whole[0]):
                if isinstance(first, Unfrozen):
                    first.step = step
                    first.requires_grad_(decides or step >= 2)
            pipeline.step(given, loss_of([]))
            (whole(given["input"]) - given["y"]).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    pipeline.close()
    pairs = zip(mine.parameters(), whole[stage].parameters(), strict=True)
    error = max(float((p - q).abs().max()) for p, q in pairs)
    return error, [str(w.message) for w in found if "sum of losses" not in str(w.message)]


@pytest.mark.parametrize(("recompute", "decides"), [("none", False), ("stage", False), ("stage", True)])
def test_a_stage_that_is_trained_from_a_step_on(ranks, recompute, decides):
    for error, messages in ranks(unfrozen, recompute, decides, world=2):
        assert error < 1e-12 and messages == []


class WithKeywords(nn.Module):
    """As Hugging Face's: a mask is somewhere in `**kwargs`."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, input, **kwargs):
        scale = kwargs.get("scale")
        return self.lin(input) if scale is None else self.lin(input) * scale


class WithoutReading(WithKeywords):
    def forward(self, input, **kwargs):
        return self.lin(input)


def said_of_keywords(kind):
    ps = state(pp=2)
    stage = ps.index("pp")
    module = kind() if stage else nn.Linear(4, 4)
    pipeline = Pipeline({stage: module}, ps=ps, schedule="1f1b", num_microbatches=2)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for step in range(2):
            pipeline.step(batch(step) | {"scale": torch.ones(8, 1)}, loss_of([]))
    pipeline.close()
    return [str(w.message) for w in found if "kwargs" in str(w.message)]


def test_a_stage_that_reads_a_batch_out_of_its_keywords_is_told(ranks):
    first, last = ranks(said_of_keywords, WithKeywords, world=2)
    assert first == [] and len(last) == 1
    assert "not scale. Write forward(..., scale=None, **kwargs)" in last[0]
    assert ranks(said_of_keywords, WithoutReading, world=2) == [[], []]


def said_of_places(counts_all):
    ps = state(pp=2)
    stage = ps.index("pp")
    torch.manual_seed(stage)
    module = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    pipeline = Pipeline({stage: module}, ps=ps, schedule="1f1b", num_microbatches=2)
    before = 3 * stage if counts_all else 0
    groups = [{"params": m.parameters(), "lr": 0.1 * 0.9 ** (before + i)} for i, m in enumerate(module)]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for step in range(3):
            pipeline.step(batch(step), loss_of([]))
            optimizer.step()
            optimizer.zero_grad()
    pipeline.close()
    return [str(w.message) for w in found if "rates" in str(w.message)]


@pytest.mark.parametrize("counts_all", [False, True])
def test_rates_by_depth_that_begin_again_on_each_stage(ranks, counts_all):
    """A decay over the layers of one's own stage is another model's; over all of them it is right."""
    for messages in ranks(said_of_places, counts_all, world=2):
        assert len(messages) == (not counts_all)
        assert counts_all or "begin again on each of 2 pipeline ranks" in messages[0]


class WithOwnLoss(nn.Module):
    """Its forward gives the gradient of a penalty of its own at once."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, input):
        y = self.lin(input).tanh()
        if torch.is_grad_enabled():
            y.square().mean().backward(retain_graph=True)
        return y


def made():
    torch.manual_seed(0)
    return [WithOwnLoss().double() for _ in range(2)]


def penalised(schedule, recompute):
    ps = state(pp=2)
    whole, mine = made(), made()[ps.index("pp")]
    given = {name: x.double() for name, x in batch(0).items()}
    for part in range(2):
        x, y = (given[name][4 * part : 4 * part + 4] for name in ("input", "y"))
        (whole[1](whole[0](x)) - y).square().sum().backward()
    pipeline = Pipeline({ps.index("pp"): mine}, ps=ps, schedule=schedule, num_microbatches=2, recompute=recompute)
    pipeline.step(given, lambda output, b: ((output - b["y"]).square().sum(), output.numel()))
    pipeline.close()
    pairs = zip(mine.parameters(), whole[ps.index("pp")].parameters(), strict=True)
    return max(float((p.grad - q.grad).abs().max()) for p, q in pairs)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "gpipe"])
def test_backward_inside_of_a_stage_s_forward(ranks, schedule):
    assert max(ranks(penalised, schedule, "none", world=2)) < 1e-12


def test_and_in_one_that_is_run_again_it_is_refused():
    module = WithOwnLoss()
    x = torch.ones(2, 4)
    message = "calls backward\\(\\) in its forward, which recompute='stage' runs twice"
    with refuse_backward(list(module.parameters()), 0), pytest.raises(ValueError, match=message):
        module(x)
    assert all(p.grad is None for p in module.parameters())
    module(x)
    assert module.lin.weight.grad is not None
