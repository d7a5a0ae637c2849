"""Stages of a few numbers, for what does not need a model."""

import torch
import torch.distributed as dist
from torch import nn

from core.pipeline import Pipeline
from core.pipeline.schedule import schedules as named
from tests.states import state

WIDTH = 6


def pipeline_state(tp=1):
    world = dist.get_world_size() if dist.is_initialized() else 1
    return state(pp=world // tp, tp=tp)


def part(s, width=WIDTH):
    """Stage s: the same weights wherever it is built."""
    made = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
    generator = torch.Generator().manual_seed(100 + s)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2)
    return made.double()


def rows(count, width=WIDTH, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def squares(output, _):
    """A loss."""
    return output.square().sum(), len(output)


def pipeline(schedule="1f1b", microbatches=4, make=part, **more):
    """Stages from `make(stage)`, as the schedule places them over all ranks of the job."""
    ps = pipeline_state()
    where = schedule.placement if hasattr(schedule, "placement") else named.placement(schedule, ps.size("pp"))
    stages = {s: make(s) for s, rank in enumerate(where) if rank == ps.index("pp")}
    return Pipeline(stages, ps=ps, schedule=schedule, num_microbatches=microbatches, **more)


def gradients(pipe):
    """By stage and name, cloned."""
    return {
        f"{s}.{n}": None if p.grad is None else p.grad.clone()
        for s, module in pipe.modules.items()
        for n, p in module.named_parameters()
    }


def alone(stages, batch, loss_fn=squares, microbatches=4, make=part, call=lambda module, x: module(x)):
    """(loss, gradients by stage and name) of the plain composition, microbatch by microbatch."""
    modules = [make(s) for s in range(stages)]
    total = 0.0
    for x in batch.chunk(microbatches):
        y = x
        for module in modules:
            y = call(module, y)
        loss, _ = loss_fn(y, x)
        if loss.requires_grad:
            loss.backward()
        total += loss.item()
    return total, {f"{s}.{n}": p.grad for s, module in enumerate(modules) for n, p in module.named_parameters()}


def assert_equal(found, want, tolerance=1e-10):
    """Gradients of this rank's stages against those of all; where one is None, the other is None or zero."""
    for name, got in found.items():
        expected = want[name]
        if expected is None or got is None:
            assert all(g is None or not g.any() for g in (got, expected)), name
        else:
            error = (got - expected).abs().max()
            assert error <= tolerance * expected.abs().max(), f"{name}: error {error:.2e}"
