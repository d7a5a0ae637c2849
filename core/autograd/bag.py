"""The bag that one microbatch's weight gradients wait in, and the context through which operations find it."""

from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from core.autograd.protocols import StepListener

# Compiled graphs hold tensors and numbers only: they reach objects by number. The one table refers weakly, so that
# everything is freed.
_object_of_number: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = count(1)
NO_DEFERRAL = torch.tensor(0)  # the number that stands for no bag


class Ticket:
    """What a compiled graph takes instead of an object: a number, in a tensor, so that it is an input of the graph.

    A copy of the object, or a pickle, has none. has_owner: whether the parameter that it stands for has a
    `main_grad`, as far as it was told (`owner_changed`); where not, autograd takes the gradient: right with one, too.
    """

    def __init__(self, target: Any, has_owner: bool = False) -> None:
        self.has_owner = has_owner
        number = next(_numbers)
        _object_of_number[number] = target
        # no operation that a dispatch mode would see
        self.number = torch.from_numpy(np.asarray(number))

    def __reduce__(self) -> Any:
        return nothing, ()


def nothing() -> None:
    """The copy, or pickle, of an object that belongs to one process and one step: None."""


def object_of(number: Tensor) -> Any:
    """The object of a ticket; None once it is gone."""
    return _object_of_number.get(int(number))


class Thunk(Protocol):
    """One use of one parameter whose weight gradient is still to be computed."""

    parameter: Parameter

    def tensors(self) -> tuple[Tensor, ...]:
        """What it holds until then; nobody may write into it."""
        ...

    def run(self) -> None:
        """Compute the weight gradient and accumulate it into the parameter; called without grad mode."""
        ...


class _CheckedThunk:
    """A thunk that compares how often its tensors were written, when it was made and when it runs."""

    def __init__(self, thunk: Thunk) -> None:
        self.parameter = thunk.parameter
        self._thunk = thunk
        # autograd checks its own saved tensors so; these wait outside of it
        self._versions = [t._version for t in thunk.tensors()]

    def tensors(self) -> tuple[Tensor, ...]:
        return self._thunk.tensors()

    def run(self) -> None:
        for tensor, version in zip(self.tensors(), self._versions, strict=True):
            if tensor._version != version:
                raise RuntimeError(
                    f"a tensor of shape {list(tensor.shape)} that the weight gradient of a parameter of shape "
                    f"{list(self.parameter.shape)} waits for was written {tensor._version - version} times between I "
                    "and W; clone it before writing"
                )
        self._thunk.run()


class WeightGradBag:
    """Thunks in the order in which backward made them. One per use: a weight used twice has two.

    Nothing is keyed by parameter, so tied weights stay additive.

    checked: W raises RuntimeError for a thunk whose tensors were written into since I, naming the parameter.
    compiled: whether compiled code may defer into it (else it breaks its graph, and is right all the same).
    open: whether it takes thunks now. An executor opens it for its own I only: the gradients of a backward that a
    program runs inside a forward are needed there, and are computed at once.
    A copy of a bag is None: a copied model has no W.
    """

    def __init__(self, *, checked: bool = False, compiled: bool = True, open: bool = True) -> None:
        self._thunks: list[Thunk] = []
        self._checked = checked
        self.open = open
        self.ticket = Ticket(self) if compiled else None

    def __len__(self) -> int:
        return len(self._thunks)

    def __reduce__(self) -> Any:
        return nothing, ()

    def put(self, thunk: Thunk) -> None:
        """Add one; called by a deferring operation's backward, where the bag is open."""
        self._thunks.append(_CheckedThunk(thunk) if self._checked else thunk)

    def parameters(self) -> list[Parameter]:
        """The parameter of every thunk in the bag, repeated per use; complete once I has ended."""
        return [thunk.parameter for thunk in self._thunks]

    def tensors(self) -> list[Tensor]:
        """Everything that is held until W."""
        return [tensor for thunk in self._thunks for tensor in thunk.tensors()]

    def run_one(self) -> Parameter:
        """W of the newest thunk: accumulate, let its tensors go, return its parameter."""
        thunk = self._thunks.pop()
        with torch.no_grad():
            thunk.run()
        return thunk.parameter

    def run(self) -> None:
        """W: empty the bag, last in first out, so that memory falls with every thunk."""
        with torch.no_grad():
            while self._thunks:
                # no variable holds it: its tensors are freed before the next one runs
                self._thunks.pop().run()


@dataclass(eq=False)
class StageContext:
    """What the operations of one model or stage share: written by the executor before each F, R and I.

    bag: where weight gradients of the current microbatch are deferred to; None computes them at once.
    seed, step, microbatch: what every random number is a function of. `microbatch` is the *global* index.
    driven: an executor sets these; otherwise the model draws a seed for each forward from torch's generator.
    whole_sequences: the model is given whole sequences on every context rank, not this rank's rows (generation).
    drawn: the model has drawn a seed itself at least once: while such a forward runs, or is run again by torch's
        checkpoint, the generator's own seed is that seed.
    used_step: an operation has made random numbers of seed, step and microbatch, since an executor last asked.
    loss_scale: what an executor multiplies each token's loss by: auxiliary losses start their backward with it.
    averaged_over: how many microbatches a program takes the mean of, each by its own tokens (Megatron's loops):
        auxiliary losses are means over positions there, too; None: they are sums, as the losses are.
    scale_of_plain_loop: loss_scale, as the backward of a plain loop reaches the model's loss; None before.
    listeners: parts of the model that are told where steps begin and end.

    Plain attributes, no thread-local: CUDA's backward runs in other threads. Operations remember the bag they
    saw in their forward.
    """

    bag: WeightGradBag | None = None
    seed: int = 0
    step: int = 0
    microbatch: int = 0
    driven: bool = False
    drawn: bool = False
    used_step: bool = False
    loss_scale: float | Tensor = 1.0
    averaged_over: int | None = None
    scale_of_plain_loop: Tensor | None = None
    whole_sequences: bool = False
    listeners: list[StepListener] = field(default_factory=list)

    def begin_step(self) -> None:
        """Executors call it before the first forward of a step."""
        for listener in self.listeners:
            listener.begin_step()

    def end_step(self) -> None:
        """Executors call it after the last backward of a step, on all ranks: listeners may be collective."""
        for listener in self.listeners:
            listener.end_step()

    def begin(
        self, *, seed: int, step: int, microbatch: int, bag: WeightGradBag | None = None
    ) -> None:
        """An executor takes over for one microbatch."""
        self.seed = seed
        self.step = step
        self.microbatch = microbatch
        self.bag = bag
        self.driven = True

    def release(self) -> None:
        """The executor is done: plain use of the model again."""
        self.bag = None
        self.driven = False

    def snapshot(self) -> tuple:
        """What a region that will be run again begins with; flags and `listeners` stay as they are."""
        return self.bag, self.seed, self.step, self.microbatch, self.driven

    def restore(self, snapshot: tuple) -> None:
        """Go back to a snapshot."""
        self.bag, self.seed, self.step, self.microbatch, self.driven = snapshot
