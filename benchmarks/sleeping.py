"""Stages that nap instead of computing, for ours and for torch: bubbles and the executors' own time, on few cores.

A nap has a deadline: it sleeps until shortly before it and spins the rest, so that it overshoots by
microseconds, for both sides alike.
"""

import ctypes
import time

import torch
from torch import nn

from core.autograd import StageContext

SPIN_S = 1.5e-4


def precise_naps():
    """Ask Linux not to delay wake-ups (PR_SET_TIMERSLACK, 1 ns)."""
    ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)


def nap(seconds):
    deadline = time.perf_counter() + seconds
    if seconds > SPIN_S:
        time.sleep(seconds - SPIN_S)
    while time.perf_counter() < deadline:
        pass


class _Nap(torch.autograd.Function):
    """Naps through F and I, and leaves a W that naps in the bag."""

    @staticmethod
    def forward(ctx, x, weight, stage, seconds):
        ctx.weight, ctx.bag, ctx.seconds = weight, stage.bag, seconds
        nap(seconds["F"])
        return x.clone()

    @staticmethod
    def backward(ctx, gy):
        nap(ctx.seconds["I"])
        ctx.bag.put(_NapThunk(ctx.weight, gy, ctx.seconds["W"]))
        return gy, None, None, None


class _NapThunk:
    def __init__(self, parameter, gy, seconds):
        self.parameter, self._gy, self._seconds = parameter, gy, seconds

    def tensors(self):
        return (self._gy,)

    def run(self):
        nap(self._seconds)


class OurStage(nn.Module):
    """Costs of one stage in seconds: F (and R), I, W."""

    def __init__(self, seconds, hidden):
        super().__init__()
        self.stage, self.seconds = StageContext(), seconds
        self.weight = nn.Parameter(torch.zeros(hidden))

    def forward(self, x):
        return _Nap.apply(x, self.weight, self.stage, self.seconds)


class _NapInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        nap(seconds["F"])
        return x.clone()

    @staticmethod
    def backward(ctx, gy):
        nap(ctx.seconds["I"])
        return gy, None


class _NapWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, seconds):
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx, gy):
        nap(ctx.seconds["W"])
        return gy, None


class TorchStage(nn.Module):
    """The same for torch, whose split finds the two halves in the graph; the first stage's input needs a gradient."""

    def __init__(self, seconds, hidden, first):
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(hidden))
        self.shift = nn.Parameter(torch.zeros(hidden)) if first else None

    def forward(self, x):
        x = x if self.shift is None else x + self.shift
        return _NapInput.apply(x, self.seconds) + _NapWeight.apply(self.weight, self.seconds)
