"""What lives on a rank in a step, counted from outside, against what "auto" says and promises."""

import contextlib
import gc
import io
import weakref

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from core.pipeline import Pipeline
from core.pipeline import schedules as named
from core.pipeline.memory import live_peaks
from tests.pipeline import tiny

HIDDEN, M, ROWS, LENGTH = 16, 8, 2, 8


class Counter(TorchDispatchMode):
    """Bytes of all memory that was made inside and lives, whoever made it; the most so far."""

    def __init__(self, known):
        super().__init__()
        self.now = self.most = 0
        self.seen = {}
        for tensor in known:
            self.note(tensor, count=False)

    def note(self, tensor, count=True):
        storage = tensor.untyped_storage()
        if storage._cdata not in self.seen:
            size = storage.nbytes() * count
            self.now += size
            self.seen[storage._cdata] = size, weakref.ref(storage, lambda _, key=storage._cdata: self.gone(key))

    def gone(self, key):
        self.now -= self.seen.pop(key)[0]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.note(leaf)
        self.most = max(self.most, self.now)
        return result


class Whole(torch.autograd.Function):
    """Keeps its input on `ctx`, where autograd's own tools do not look."""

    @staticmethod
    def forward(ctx, x):
        ctx.kept = x.exp()
        return x.clone()

    @staticmethod
    def backward(ctx, gy):
        return gy


class Layers(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(HIDDEN, 2, 4 * HIDDEN, batch_first=True, dropout=0.0) for _ in range(1)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return Whole.apply(x)


def batch():
    return torch.randn(ROWS * M, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def live_step(pipe, x):
    """The most bytes that live at a time in a step, beside parameters, their gradients and the batch."""
    parameters = [p for module in pipe.modules.values() for p in module.parameters()]
    for p in parameters:  # gradients are there, so that none is made inside
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    gc.collect()
    with Counter([*parameters, *(p.grad for p in parameters), x]) as counter:
        pipe.step(x, tiny.squares)
    return counter.most


def made(schedule, recompute, limit=None):
    ps = tiny.pipeline_state()
    placement = named.placement("1f1b" if schedule == "auto" else schedule, ps.size("pp"))
    stages = {s: Layers(s) for s, rank in enumerate(placement) if rank == ps.index("pp")}
    return Pipeline(stages, ps=ps, schedule=schedule, num_microbatches=M, recompute=recompute, memory_limit=limit)


def limits(recompute, parts):
    """part of the first schedule's -> (limit, live bytes, what was printed) or the refusal."""
    x, found = batch(), {}
    for part in parts:
        first = made("auto", recompute)
        with contextlib.redirect_stdout(io.StringIO()):
            first.step(x, tiny.squares)
        first.ps.set_timeout(30)
        from core.parallel_state.collectives import all_gather_objects

        memory = {}
        for each in all_gather_objects(first._tuner.memory.stages, first.ps.group("pp")):
            memory |= each
        predicted = live_peaks(first.schedule, memory, first.receive_ahead)
        real = live_step_of(first, x)
        pipe = made("auto", recompute, max(predicted) * part)
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            pipe.step(x, tiny.squares)
            try:
                pipe.step(x, tiny.squares)
            except ValueError as error:
                found[part] = predicted, real, str(error)
                continue
            live = live_step(pipe, x)
        found[part] = predicted, real, max(predicted) * part, live, said.getvalue()
    return found


def live_step_of(pipe, x):
    pipe._tuner.steps = 9
    return live_step(pipe, x)
