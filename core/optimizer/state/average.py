"""An exponential moving average of the weights (EMA), cut over ranks as the optimizer's other states are."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from core.data_parallel import DataParallel
from core.optimizer.state.state_buffers import StateBuffer, paired_chunks

EMA = "ema"  # kind of state: a checkpoint has optimizer/ema/NAME


class WeightAverage:
    """After each update ema = decay ema + (1 - decay) w, w the main weights; a skipped step leaves it.

    It begins as the weights before the first update. Parameters that are not trained have none: their weights are
    their average. Buffers of modules (running statistics) are not averaged.
    lent: whether the weights of the model are the average at this moment.
    """

    def __init__(self, state_buffers: Sequence[StateBuffer], decay: float) -> None:
        self._state_buffers = [buffer for buffer in state_buffers if EMA in buffer.states]
        self._decay = decay
        self.lent = False
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """The average is the weights of now."""
        for state_buffer in self._state_buffers:
            state_buffer.states[EMA].copy_(_averaged(state_buffer))

    def update(self, found_inf: Tensor) -> None:
        """Take the weights of a step; with `found_inf` it stays as it is. No wait but for an offload's host."""
        share = (1.0 - self._decay) * (1.0 - found_inf.to(torch.float64))
        for state_buffer in self._state_buffers:
            ema = state_buffer.states[EMA]
            share_here = share.to(ema.device, ema.dtype)
            for target, source in paired_chunks(ema, _averaged(state_buffer)):
                target.lerp_(source.to(ema.device, ema.dtype), share_here)

    @contextmanager
    def as_weights(self, shard: DataParallel) -> Iterator[None]:
        """Inside, the model's weights are the average; afterwards what they were, bit for bit. Collective.

        Weights of 32 bits or more and the average change places, so that this takes no memory; others are the
        average rounded. After an error over several ranks weights stay `lent`: other ranks may hold averages still.
        """
        shard.take_weights()
        self.lent = True
        give_back = [_lend(state_buffer) for state_buffer in self._state_buffers]
        try:
            shard.publish()
            yield
        except BaseException:
            for restore in give_back:
                restore()
            # a collective here would wait for ranks that are somewhere else
            if shard.ps.world is None:
                self._return(shard)
            raise
        for restore in give_back:
            restore()
        self._return(shard)

    def _return(self, shard: DataParallel) -> None:
        self.lent = False
        shard.publish()


def _averaged(state_buffer: StateBuffer) -> Tensor:
    """What the average is of: main weights; weights that have none are their own."""
    updated = state_buffer.updated
    if updated is None:
        return state_buffer.weights
    return updated


@torch.no_grad()
def _lend(state_buffer: StateBuffer) -> Callable[[], None]:
    """Write the average into the weights; the function that undoes it."""
    ema = state_buffer.states[EMA]
    weights = state_buffer.weights
    if ema.dtype == weights.dtype:
        _swap(ema, weights)
        return lambda: _swap(ema, weights)
    # 16 bits: the main weights give them back, unless somebody has written others by hand, or there are none
    kept = weights.clone()
    weights.copy_(ema)

    def restore() -> None:
        weights.copy_(kept)

    return restore


@torch.no_grad()
def _swap(first: Tensor, second: Tensor) -> None:
    for a, b in paired_chunks(first, second):
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept)
