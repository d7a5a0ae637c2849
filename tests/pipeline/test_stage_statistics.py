"""Numbers that a program puts together of one rank's stages: what hooks and modules keep, optimizers' states, arrays,
the same noise on weights; and the generators that an executor does not seed."""

import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from core.pipeline import Pipeline
from tests.pipeline.test_stage_decisions import batch, loss_of
from tests.pipeline.test_stage_traces import stage_of_layers, train
from tests.states import state


class Meter:
    """A callable that is a hook, and has its last value."""

    value = 0.0

    def __call__(self, module, args, output):
        self.value = output.detach().std().item()


class Trainer:
    """Whose method is the hook of all layers."""

    def __init__(self):
        self._stats = {}

    def note(self, module, args, output):
        self._stats.setdefault("rms", []).append(output.detach().square().mean().sqrt())


def with_hooks(how, module):
    kept, total = [], 0.0

    def sums(module, args, output):
        nonlocal total
        total += output.detach().mean().item()

    trainer = Trainer()
    for layer in module:
        if how == "a list":
            layer.register_forward_hook(lambda module, args, output: kept.append(output.detach().norm().item()))
        elif how == "a number":
            layer.register_forward_hook(sums)
        elif how == "an object each":
            layer.register_forward_hook(Meter())
        elif how == "a method":
            layer.register_forward_pre_hook(lambda module, args, trainer=trainer: trainer.note(module, args, *args))
        elif how == "backward":
            layer.register_full_backward_hook(lambda module, before, after: kept.append(after[0].norm().item()))
        elif how == "an attribute":
            layer.register_forward_hook(
                lambda module, args, output: setattr(module, "seen", output.detach().abs().amax())
            )
        elif how == "steering":
            layer.register_forward_hook(lambda module, args, output, shift=1.0: output + shift)
        elif how == "a count":
            layer.register_forward_hook(lambda module, args, output: kept.append("called"))
    if how == "one module":
        module[0].register_forward_hook(lambda module, args, output: kept.append(output.detach().norm().item()))


def hooked(how):
    ps = state(pp=2)
    module = stage_of_layers(ps)
    with_hooks(how, module)
    return [x for x in train(module, ps) if "keeps numbers of" in x]


TOLD = {"a list": "kept", "a number": "total", "an object each": "value", "a method": "trainer"}
TOLD |= {"backward": "kept", "an attribute": "seen"}


@pytest.mark.parametrize("how", [*TOLD, "steering", "a count", "one module"])
def test_what_hooks_keep_of_several_modules(ranks, how):
    for messages in ranks(hooked, how, world=2):
        assert len(messages) == (how in TOLD)
        assert not messages or messages[0].startswith(
            f"`{TOLD[how]}` keeps numbers of 3 modules of this rank (0 to 2)"
        )


def norm_of(p):
    return float(p.detach().norm())


def added_up(parameters):
    total = 0.0
    for p in parameters:
        total += float(p.norm()) ** 2
    return total


def by_name(parameters):
    log = {}
    for i, p in enumerate(parameters):
        log[f"norm/{i}"] = float(p.detach().norm())
    return log, {id(p): float(p.abs().max()) for p in parameters}, [f"{p.norm():.3f}" for p in parameters]


READS = {
    "a sum": lambda parameters: sum(float(p.norm()) ** 2 for p in parameters),
    "a loop": added_up,
    "a list": lambda parameters: [float(p.detach().abs().max()) for p in parameters],
    "a key": lambda parameters: max(parameters, key=lambda p: float(p.data.norm())),
    "a function": lambda parameters: max(map(norm_of, parameters)),
    "by name": by_name,
}


def reads(how, count):
    ps = state(pp=2)
    module = stage_of_layers(ps)
    return train(module, ps, between=lambda: READS[how]([*module.parameters()][:count]))


@pytest.mark.parametrize("how", READS)
@pytest.mark.parametrize("count", [1, 3])
def test_norms_of_weights_that_are_read(ranks, how, count):
    """What Python makes of several is not seen; one alone, or by its name, is what it is."""
    for messages in ranks(reads, how, count, world=2):
        messages = [x for x in messages if "scalar may lead to" not in x]
        assert len(messages) == (count > 1 and how != "by name")
        assert not messages or "takes several weights or gradients out of torch" in messages[0]


class Gauge(nn.Linear):
    """A module of the program's that has the deviation of its last output."""

    deviation = 0.0

    def forward(self, input):
        output = super().forward(input)
        self.deviation = output.detach().std()
        return output


class Features(nn.Linear):
    """One that has its last output, which is no statistic."""

    def forward(self, input):
        self.output = super().forward(input)
        return self.output


def of_own_modules(kind, layers):
    ps = state(pp=2)
    module = nn.Sequential(nn.Sequential(*[kind(4, 4) for _ in range(layers)]))
    return [x for x in train(module, ps) if "keeps numbers of" in x]


@pytest.mark.parametrize("kind, layers, told", [(Gauge, 2, True), (Gauge, 1, True), (Features, 2, False)])
def test_what_modules_keep(ranks, kind, layers, told):
    """The only layer of a stage is one of several of the model."""
    for messages in ranks(of_own_modules, kind, layers, world=2):
        assert len(messages) == told
        assert not messages or "`deviation`" in messages[0]


class Adds(nn.Module):
    """What its parts leave goes on with the activations."""

    def __init__(self, keeps):
        super().__init__()
        self.parts, self.keeps = nn.ModuleList(Gauge(4, 4) for _ in range(2)), keeps

    def forward(self, input):
        total = 0.0
        for part in self.parts:
            input = part(input)
            total = total + part.deviation
        if self.keeps:
            self.total = total
        return input + total


def taken_up(keeps):
    return [x for x in train(Adds(keeps), state(pp=2)) if "keeps numbers of" in x]


@pytest.mark.parametrize("keeps", [False, True])
def test_what_a_stage_takes_up_itself(ranks, keeps):
    """An auxiliary loss that is added to the output is no statistic, unless the sum is kept."""
    for messages in ranks(taken_up, keeps, world=2):
        assert len(messages) == keeps


def in_evaluation(by_all_modules):
    ps = state(pp=2)
    module, kept = stage_of_layers(ps), []

    def note(module, args, output):
        if not module.training:
            kept.append(output.norm().item())

    handles = [layer.register_forward_hook(note) for layer in module if not by_all_modules]
    if by_all_modules:
        handles.append(nn.modules.module.register_module_forward_hook(note))
    pipeline = Pipeline({ps.index("pp"): module}, ps=ps, schedule="1f1b", num_microbatches=2)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        pipeline.step(batch(0), loss_of([]))
        before = len(found)
        pipeline.evaluate(batch(0), loss_of([]))
    pipeline.close()
    for handle in handles:
        handle.remove()
    return before, [str(w.message) for w in found if "`kept` keeps numbers of" in str(w.message)]


@pytest.mark.parametrize("by_all_modules", [False, True])
def test_what_hooks_keep_in_an_evaluation(ranks, by_all_modules):
    for before, messages in ranks(in_evaluation, by_all_modules, world=2):
        assert before == 0 and len(messages) == 1


def between_steps(how):
    """After an evaluation as after a step."""
    ps = state(pp=2)
    module = stage_of_layers(ps)
    pipeline = Pipeline({ps.index("pp"): module}, ps=ps, schedule="1f1b", num_microbatches=2)
    optimizer = torch.optim.AdamW(module.parameters())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = pipeline.step(batch(0), loss_of([]))
        for p in module.parameters():
            p.grad.div_(float(result.num_tokens))
        optimizer.step()
        pipeline.evaluate(batch(0), loss_of([]))
        weights = list(module.parameters())
        if how == "states":
            sum(s["exp_avg_sq"].mean().item() for s in optimizer.state.values())
        elif how == "arrays":
            sum(np.square(p.detach().numpy()).sum() for p in weights)
        elif how == "one array":
            weights[0].detach().numpy()
        elif how == "norms":
            sum(p.detach().norm().item() for p in weights)
        elif how == "states one by one":
            [s["exp_avg_sq"].mean().item() for s in optimizer.state.values()]
    pipeline.close()
    return [str(w.message) for w in found if "of this rank's stages" in str(w.message)]


BETWEEN = {"states": "mean by hand", "arrays": "numpy takes several", "norms": "norm by hand"}


@pytest.mark.parametrize("how", [*BETWEEN, "one array", "states one by one"])
def test_states_arrays_and_norms_after_an_evaluation(ranks, how):
    for messages in ranks(between_steps, how, world=2):
        assert len(messages) == (how in BETWEEN)
        assert not messages or messages[0].startswith(BETWEEN[how])


def noisy_weights(how, steps):
    """Of one seed on both stages, but for "stages"; "anchor": what is added are no draws."""
    ps = state(pp=2)
    stage = ps.index("pp")
    torch.manual_seed(stage)
    module = nn.Sequential(nn.Linear(4, 6 + stage), nn.Linear(6 + stage, 4))
    anchors = [torch.zeros_like(p) for p in module.parameters()]
    pipeline = Pipeline({stage: module}, ps=ps, schedule="1f1b", num_microbatches=2)
    with warnings.catch_warnings(record=True) as found, torch.no_grad():
        warnings.simplefilter("always")
        for number in range(2):
            generator = torch.Generator().manual_seed(10 * number + (stage if how == "stages" else 0))
            for p, anchor in zip(module.parameters(), anchors, strict=True):
                noise = torch.randn(p.shape, generator=generator) if how != "anchor" else anchor - p
                p.mul_(0.9).add_(noise, alpha=0.01)
            with torch.enable_grad():
                (pipeline.step if steps else pipeline.evaluate)(batch(number), loss_of([]))
    pipeline.close()
    return [str(w.message) for w in found if "begins alike on the pipeline" in str(w.message)]


@pytest.mark.parametrize("how, steps", [("one", False), ("one", True), ("stages", False), ("anchor", True)])
def test_noise_of_one_seed_on_the_weights_of_two_stages(ranks, how, steps):
    """Without a single step as well: evaluations at weights that are moved are a gradient (MeZO)."""
    for messages in ranks(noisy_weights, how, steps, world=2):
        assert len(messages) == (how == "one")


class Coin(nn.Linear):
    """A layer that is left out at times."""

    def __init__(self, draw):
        super().__init__(4, 4)
        self.draw = draw

    def forward(self, input):
        return input + super().forward(input) * (self.draw() < 0.5)


DRAWS = {"random": random.random, "numpy.random": np.random.rand, "torch": lambda: torch.rand(())}


def with_coins(name, in_loss):
    ps = state(pp=2)
    random.seed(0)
    np.random.seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4) if in_loss else Coin(DRAWS[name]))

    def loss_fn(output, batch):
        return loss_of([])(output, batch)[0] * (1 + DRAWS[name]()), output.numel()

    messages = train(module, ps, loss_fn=loss_fn if in_loss else None)
    return [message for message in messages if "drew from" in message]


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("in_loss", [False, True])
def test_coins_that_no_executor_seeds(ranks, name, in_loss):
    """The last stage's rank may draw in its `loss_fn`; the others have no such reason."""
    first, last = ranks(with_coins, name, in_loss, world=2)
    assert last == [] and len(first) == (name != "torch" and not in_loss)
    assert not first or f"drew from {name} in a step" in first[0]
