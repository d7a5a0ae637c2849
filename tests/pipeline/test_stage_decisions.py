"""What programs decide from what `loss_fn` collected, which is on the last stage; losses of a stage's own."""

import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import prune

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


def train(module, ps, *, groups=None, loss_fn=None, between=lambda: None):
    """What a rank of two stages hears in four steps."""
    pipeline = Pipeline({ps.index("pp"): module}, ps=ps, schedule="1f1b", num_microbatches=2)
    optimizer = torch.optim.SGD(groups or [p for p in module.parameters() if p.requires_grad], lr=0.01)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for step in range(4):
            result = pipeline.step(batch(step), loss_fn or loss_of([]))
            for p in module.parameters():
                if p.grad is not None:
                    p.grad.div_(float(result.num_tokens))
            optimizer.step()
            optimizer.zero_grad()
            between()
    pipeline.close()
    return [str(w.message) for w in found]


def stage_of_layers(ps, layers=3):
    torch.manual_seed(ps.index("pp"))
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])


def half_frozen(counts_all):
    ps = state(pp=2)
    module = stage_of_layers(ps, 4)
    parameters = list(module.parameters())
    frozen = parameters if counts_all else parameters[: len(parameters) // 2]
    for p in frozen if ps.index("pp") == 0 or not counts_all else ():
        p.requires_grad_(False)
    # each stage has an optimizer
    groups = [{"params": [p], "lr": 0.01} for p in parameters]
    return train(module, ps, groups=groups)


def rates_by_index(counts_all):
    ps = state(pp=2)
    module = stage_of_layers(ps)
    parameters = list(module.parameters())
    before = len(parameters) * ps.index("pp") if counts_all else 0
    return train(
        module, ps, groups=[{"params": [p], "lr": 0.01 * (1 + before + i)} for i, p in enumerate(parameters)]
    )


class Stage(nn.Module):
    """Layers between others."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, input):
        x = self.first(input)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def last_layer_trained(counts_all):
    ps = state(pp=2)
    torch.manual_seed(ps.index("pp"))
    module = Stage().requires_grad_(False)
    if not counts_all or ps.index("pp"):
        module.layers[-1].requires_grad_(True)
    else:
        module.last.requires_grad_(True)  # without a gradient a stage has nothing to do
    return train(module, ps, groups=[{"params": [p], "lr": 0.01} for p in module.parameters()])


def collected(over_data_ranks):
    """Gradients averaged by hand."""
    ps = state(pp=2)
    module = stage_of_layers(ps)
    pipeline = Pipeline({ps.index("pp"): module}, ps=ps, schedule="1f1b", num_microbatches=2)
    group = None if not over_data_ranks else dist.new_subgroups(group_size=1)[0]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for step in range(2):
            result = pipeline.step(batch(step), loss_of([]))
            for p in module.parameters():
                p.grad.div_(float(result.num_tokens))
                dist.all_reduce(p.grad, group=group)
    pipeline.close()
    return [str(w.message) for w in found if "of other stages" in str(w.message)]


@pytest.mark.parametrize("over_data_ranks", [False, True])
def test_gradients_that_are_averaged_over_stages(ranks, over_data_ranks):
    for messages in ranks(collected, over_data_ranks, world=2):
        assert len(messages) == (not over_data_ranks)
        assert over_data_ranks or messages[0].startswith("all_reduce by hand puts together")


@pytest.mark.parametrize("choose", [half_frozen, rates_by_index, last_layer_trained])
@pytest.mark.parametrize("counts_all", [False, True])
def test_what_is_chosen_by_the_order_of_a_stages_parameters(ranks, choose, counts_all):
    """The first half of each stage is not the first half of the model; by its whole order nothing is said."""
    for messages in ranks(choose, counts_all, world=2):
        told = ["begin again on each of 2 pipeline ranks" in message for message in messages]
        assert told.count(True) == (not counts_all)


def pruned(how):
    ps = state(pp=2)
    module = stage_of_layers(ps)
    with torch.no_grad():
        for number, layer in enumerate(module):
            layer.weight.mul_(1 + number + 3 * ps.index("pp"))
    weights = [layer.weight for layer in module]
    if how == "torch":
        prune.global_unstructured([(layer, "weight") for layer in module], prune.L1Unstructured, amount=0.5)
        return train(module, ps)
    everything = torch.cat([w.detach().abs().flatten() for w in weights])
    if how == "stages":
        limits = [everything.median()] * len(weights)
    elif how == "model":
        limits = [torch.tensor(1.0)] * len(weights)
    else:
        limits = [w.detach().abs().median() for w in weights]
    masks = [w.detach().abs() > limit for w, limit in zip(weights, limits, strict=True)]

    def cut():
        with torch.no_grad():
            for w, mask in zip(weights, masks, strict=True):
                w.mul_(mask)

    cut()
    return train(module, ps, between=cut)


@pytest.mark.parametrize("how", ["stages", "torch", "model", "each"])
def test_weights_that_are_pruned_by_a_threshold_of_each_stage(ranks, how):
    """One threshold for the model leaves each stage another share, and one for each matrix all of them the same."""
    for messages in ranks(pruned, how, world=2):
        told = [message for message in messages if "of the weights of each stage are zeros" in message]
        assert len(told) == (how in ("stages", "torch"))
        assert not told or told[0].startswith("0.5 of the weights")


class Kept:
    """A hook's activations, and the loss that reads them."""

    def __init__(self, detaches):
        self.found = {}
        self.detaches = detaches

    def keep(self, module, args, output):
        self.found["x"] = output.detach() if self.detaches else output.square()

    def __call__(self, output, batch):
        loss = (output - batch["y"]).square().sum()
        return loss + sum(x.sum() for x in self.found.values()), output.numel()


def keeps_activations(form, hooked, detaches):
    ps = state(pp=2)
    module, kept = stage_of_layers(ps), Kept(detaches)
    if ps.index("pp") == hooked:
        module[0].register_forward_hook(kept.keep)
    found = kept.found

    def by_closure(output, batch):
        return kept(output, batch) if found or output is not None else None

    def with_default(output, batch, found=found):
        return kept.__call__(output, batch)

    forms = {"object": kept, "method": kept.__call__, "closure": by_closure, "default": with_default}
    forms["partial"] = partial(by_closure)
    return train(module, ps, loss_fn=forms[form])


@pytest.mark.parametrize("form", ["object", "method", "closure", "default", "partial"])
def test_activations_that_a_hook_keeps_where_no_loss_is_made(ranks, form):
    """The last stage's rank calls `loss_fn`, and its dict is empty."""
    first, last = ranks(keeps_activations, form, 0, False, world=2)
    told = [message for message in first if "keeps activations of this rank's stages" in message]
    assert len(told) == 1 and not any("loss_fn" in message for message in last)


def test_activations_that_are_detached_or_of_the_last_stage(ranks):
    for facts in ((0, True), (1, False)):
        first, _ = ranks(keeps_activations, "closure", *facts, world=2)
        assert not any("loss_fn" in message for message in first)


def updated_in_backward(microbatches, through_data):
    ps = state(pp=2)
    module = stage_of_layers(ps, 2)

    def update(p):
        with torch.no_grad():
            if through_data:
                p.data -= 1e-4 * p.grad
            else:
                p -= 1e-4 * p.grad
        p.grad = None

    module[0].weight.register_post_accumulate_grad_hook(update)
    pipeline = Pipeline({ps.index("pp"): module}, ps=ps, schedule="1f1b", num_microbatches=microbatches)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        pipeline.step(batch(0), loss_of([]))
    pipeline.close()
    return [str(w.message) for w in found if "inside of a step" in str(w.message)]


@pytest.mark.parametrize("microbatches, through_data", [(1, True), (2, True), (1, False)])
def test_an_optimizer_in_backward_wants_one_microbatch(ranks, microbatches, through_data):
    for messages in ranks(updated_in_backward, microbatches, through_data, world=2):
        assert len(messages) == (microbatches > 1)


def drawn(how):
    """What a pipeline says of stages whose weights were drawn by hand."""
    ps = state(pp=2)
    stage = ps.index("pp")
    module = nn.Sequential(nn.Linear(4, 6 + stage), nn.Linear(6 + stage, 4))
    generator = torch.Generator().manual_seed(0 if how != "seeds" else stage)
    with torch.no_grad():
        for number, layer in enumerate(module):
            layer.weight.normal_(std=0.1 + number + stage, generator=generator)
            if how == "padded":
                layer.weight[0] = 0
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        Pipeline({stage: module}, ps=ps, schedule="1f1b", num_microbatches=2).close()
    return [str(w.message) for w in found if "the same draws" in str(w.message)]


@pytest.mark.parametrize("how", ["one seed", "seeds", "padded"])
def test_weights_that_one_seed_has_drawn_on_two_stages(ranks, how):
    """Their shapes and deviations differ; zeros say nothing."""
    for messages in ranks(drawn, how, world=2):
        assert len(messages) == (how == "one seed")
        assert not messages or "0.weight of stage 0 and 0.weight of stage 1" in messages[0]
