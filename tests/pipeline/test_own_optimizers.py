"""Optimizers of one's own over a pipeline: norms of several gradients or weights are of one rank's stages."""

import warnings

import pytest
import torch
from torch import nn

from core.pipeline import Pipeline
from tests.pipeline.test_plain_loop import batch, loss, stages
from tests.states import state

OF_STAGES = "of this rank's stages"


class Own(torch.optim.Optimizer):
    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            self.update(group["params"], group["lr"])


class AdaGradNorm(Own):
    total = 0.0

    def update(self, params, lr):
        for p in params:
            self.total += p.grad.pow(2).sum()
        for p in params:
            p.add_(p.grad / (self.total**0.5), alpha=-lr)


class AdaGradNormInNumbers(Own):
    total = 0.0

    def update(self, params, lr):
        self.total += sum(p.grad.norm(2).item() ** 2 for p in params)
        for p in params:
            p.data.add_(p.grad.data, alpha=-lr / self.total**0.5)


class ListNorm(Own):
    def update(self, params, lr):
        norm = torch.stack(torch._foreach_norm([p.grad for p in params])).norm()
        for p in params:
            p.add_(p.grad / norm, alpha=-lr)


class Clips(Own):
    def update(self, params, lr):
        torch.nn.utils.clip_grad_norm_(params, 1e9)
        for p in params:
            p.add_(p.grad, alpha=-lr)


class DoG(Own):
    def update(self, params, lr):
        self.first = getattr(self, "first", None) or [p.detach().clone() for p in params]
        distance = torch.stack([(p - q).pow(2).sum() for p, q in zip(params, self.first, strict=True)]).sum().sqrt()
        for p in params:
            p.add_(p.grad, alpha=-float(distance + lr))


class Lars(Own):
    def update(self, params, lr):
        for p in params:
            ratio = p.norm() / (p.grad.norm() + 1e-6)
            s = self.state[p]
            if not s:
                s["buf"] = torch.zeros_like(p)
            s["buf"].mul_(0.9).add_(p.grad, alpha=float(ratio))
            p.add_(s["buf"], alpha=-lr)


class LarsOfLists(Own):
    def update(self, params, lr):
        ws, gs = torch._foreach_norm(params), torch._foreach_norm([p.grad for p in params])
        for p, w, g in zip(params, ws, gs, strict=True):
            p.add_(p.grad * (w / g), alpha=-lr)


class Adafactor(Own):
    def update(self, params, lr):
        for p in params:
            g = p.grad
            if g.dim() == 2:
                row, col = g.pow(2).mean(1), g.pow(2).mean(0)
                u = g / (torch.outer(row, col) / row.mean()).sqrt().add(1e-8)
            else:
                u = g.sign()
            u = u / max(1.0, (u.norm() / u.numel() ** 0.5).item())
            p.add_(u, alpha=-lr)


def momentum_update(p, gradient, momentum, lr):
    momentum.mul_(0.9).add_(gradient)
    p.sub_(lr * momentum / (gradient.norm() + 1e-3))


class Compiled(Own):
    """As torchao's: what it has compiled takes tensors of torch's own classes only."""

    update_one = staticmethod(momentum_update)

    def __init__(self, params):
        super().__init__(params)
        torch.compiler.reset()

    def update(self, params, lr):
        update = torch.compile(self.update_one, backend="eager", fullgraph=True, dynamic=True)
        for p in params:
            if not self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
            update(p, p.grad, self.state[p]["momentum"], lr)


def said_of(make):
    """What is told in five steps; afterwards nobody listens to parameters or states."""
    ps = state(pp=2)
    model = stages(ps)
    optimizer = make(model.parameters())
    with warnings.catch_warnings(record=True, action="always") as caught:
        pipeline = Pipeline([model], ps=ps, num_microbatches=2)
        for step in range(5):
            tokens = pipeline.step(batch(step), loss).num_tokens
            for p in model.parameters():
                p.grad /= tokens
            optimizer.step()
            optimizer.zero_grad()
        pipeline.evaluate(batch(0), loss)
    pipeline.close()
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert all(type(value) is torch.Tensor for one in optimizer.state.values() for value in one.values())
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("make", [AdaGradNorm, AdaGradNormInNumbers, ListNorm, Clips, DoG])
def test_norms_of_several_are_told_once(ranks, make):
    for told in ranks(said_of, make):
        assert len(told) == 1 and OF_STAGES in told[0], told


@pytest.mark.parametrize("make", [Lars, LarsOfLists, Adafactor, Compiled])
def test_norms_of_one_parameter_after_the_other_are_right(ranks, make):
    assert ranks(said_of, make) == [[], []]


def of_distances(use):
    """What is told of a loop that takes the distance to the initial weights before each step."""
    ps = state(pp=2)
    model = stages(ps)
    first = [p.detach().clone() for p in model.parameters()]
    with warnings.catch_warnings(record=True, action="always") as caught:
        pipeline = Pipeline([model], ps=ps, num_microbatches=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(5):
            optimizer.zero_grad()
            use(sum((p - q).pow(2).sum() for p, q in zip(model.parameters(), first, strict=True)), model)
            tokens = pipeline.step(batch(step), loss).num_tokens
            for p in model.parameters():
                p.grad /= tokens
            optimizer.step()
    pipeline.close()
    return [str(w.message) for w in caught]


def logged(distance, model):
    return distance.item()


def printed(distance, model):
    return f"{distance:.3f} {next(model.parameters()).norm():.3f}"


def rooted(distance, model):
    (0.1 * distance.sqrt()).backward()


def detached(distance, model):
    return (0.1 * distance).detach()


def penalised(distance, model):
    (0.1 * distance).backward()


def its_gradients(distance, model):
    parameters = list(model.parameters())
    for p, gradient in zip(parameters, torch.autograd.grad(0.1 * distance, parameters), strict=True):
        p.grad = gradient


@pytest.mark.parametrize("use", [logged, printed, rooted, detached])
def test_the_value_of_a_sum_over_several_weights_is_told(ranks, use):
    for told in ranks(of_distances, use):
        assert len(told) == 1 and "of several weights is " + OF_STAGES in told[0], told


@pytest.mark.parametrize("use", [penalised, its_gradients])
def test_the_gradient_of_a_sum_over_several_weights_is_right(ranks, use):
    assert ranks(of_distances, use) == [[], []]
