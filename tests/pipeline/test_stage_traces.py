"""What programs choose by one rank's stages: halves, thresholds, draws, sums, and penalties that hooks keep."""

import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import prune

from core.pipeline import Pipeline
from tests.pipeline.test_stage_decisions import batch, loss_of
from tests.states import state


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


def rates_from_the_end(counts_all):
    """A decay by depth: the last parameter has the whole rate, and stages have other numbers of them."""
    ps = state(pp=2)
    module = stage_of_layers(ps, 3 + ps.index("pp"))
    parameters = list(module.parameters())
    after = 8 if counts_all and ps.index("pp") == 0 else 0
    rates = [0.01 * 0.9 ** (len(parameters) + after - 1 - i) for i in range(len(parameters))]
    return train(module, ps, groups=[{"params": [p], "lr": lr} for p, lr in zip(parameters, rates, strict=True)])


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


def noisy(seed_of):
    """Noise on gradients, drawn by the generator of each stage."""
    ps = state(pp=2)
    torch.manual_seed(ps.index("pp"))
    module = nn.Sequential(nn.Linear(4, 6 + ps.index("pp")), nn.Linear(6 + ps.index("pp"), 4))
    pipeline = Pipeline({ps.index("pp"): module}, ps=ps, schedule="1f1b", num_microbatches=2)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for step in range(3):
            result = pipeline.step(batch(step), loss_of([]))
            generator = torch.Generator().manual_seed(seed_of(step, ps.index("pp")))
            for p in module.parameters():
                p.grad.div_(float(result.num_tokens))
                p.grad.add_(torch.randn(p.shape, generator=generator) * 0.01)
    pipeline.close()
    return [str(w.message) for w in found if "begins alike on the pipeline" in str(w.message)]


def by_step(step, stage):
    return step


def by_stage(step, stage):
    return 100 * step + stage


@pytest.mark.parametrize("seed_of", [by_step, by_stage])
def test_noise_of_one_seed_on_two_stages(ranks, seed_of):
    for messages in ranks(noisy, seed_of, world=2):
        assert len(messages) == (seed_of is by_step)


def collected_norms():
    """A penalty's norm over all stages, as the first warning says."""
    ps = state(pp=2)
    module = stage_of_layers(ps)
    pipeline = Pipeline({ps.index("pp"): module}, ps=ps, schedule="1f1b", num_microbatches=2)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        total = sum(p.pow(2).sum() for p in module.parameters()).detach()
        dist.all_reduce(total)
        for p in module.parameters():
            dist.all_reduce(p.norm().detach())
    pipeline.close()
    return [str(w.message) for w in found if "of other stages" in str(w.message)]


def test_norms_that_are_summed_over_stages(ranks):
    assert ranks(collected_norms, world=2) == [[], []]


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


@pytest.mark.parametrize("choose", [half_frozen, rates_by_index, rates_from_the_end, last_layer_trained])
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
