"""The bag that one microbatch's weight gradients wait in, and the context through which operations find it."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from core.autograd.main_grad import main_grad_of
from core.autograd.tickets import Ticket, none


class Thunk(Protocol):
    """One use of one parameter whose weight gradient is still to be computed."""

    parameter: Parameter

    def tensors(self) -> tuple[Tensor, ...]:
        """What it holds until then; nobody may write into it."""
        ...

    def run(self) -> None:
        """Compute the weight gradient and accumulate it into the parameter; called without grad mode."""
        ...


class _Checked:
    """A thunk that knows how often its tensors had been written when it was made."""

    def __init__(self, thunk: Thunk) -> None:
        self.parameter, self._thunk = thunk.parameter, thunk
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

    checked: W raises RuntimeError for a thunk whose tensors somebody wrote into since I, naming the parameter.
    compiled: whether compiled code may defer into it (else it breaks its graph, and is right all the same).
    open: whether it takes thunks now. An executor opens it for its own I only: the gradients of a backward that
    somebody runs inside a forward are needed there, and come at once.
    A copy of a bag is None: a copied model has no W.
    """

    def __init__(self, *, checked: bool = False, compiled: bool = True, open: bool = True) -> None:
        self._thunks: list[Thunk] = []
        self._checked, self.open = checked, open
        self.ticket = Ticket(self) if compiled else None

    def __len__(self) -> int:
        return len(self._thunks)

    def __reduce__(self) -> Any:
        return none, ()

    def put(self, thunk: Thunk) -> None:
        """Add one; called by a deferring operation's backward, where the bag is open."""
        self._thunks.append(_Checked(thunk) if self._checked else thunk)

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
                self._thunks.pop().run()


@dataclass(eq=False)
class StageContext:
    """What the operations of one model or stage share: written by the executor before each F, R and I.

    bag: where weight gradients of the current microbatch are deferred to; None computes them at once.
    seed, step, microbatch: what every random number is a function of. `microbatch` is the *global* index.
    driven: an executor sets these; otherwise the model draws a seed for each forward from torch's generator.
    drawn: it has; it is the generator's own seed while that forward runs (or is run again by torch's checkpoint).

    Plain attributes, no thread-local: CUDA's backward runs in other threads. Operations remember the bag they
    saw in their forward.
    """

    bag: WeightGradBag | None = None
    seed: int = 0
    step: int = 0
    microbatch: int = 0
    driven: bool = False
    drawn: bool = False

    def begin(self, *, seed: int, step: int, microbatch: int, bag: WeightGradBag | None = None) -> None:
        """An executor takes over for one microbatch."""
        self.seed, self.step, self.microbatch, self.bag, self.driven = seed, step, microbatch, bag, True

    def release(self) -> None:
        """The executor is done: plain use of the model again."""
        self.bag, self.driven = None, False

    def snapshot(self) -> tuple:
        """The whole state, for a region that will be run again."""
        return self.bag, self.seed, self.step, self.microbatch, self.driven

    def restore(self, snapshot: tuple) -> None:
        """Go back to a snapshot."""
        self.bag, self.seed, self.step, self.microbatch, self.driven = snapshot


def delivers(node: Any, parameter: Tensor, region: Any) -> bool:
    """Whether a backward (`node`, its input 1 the parameter) may put the gradient there by itself, past autograd.

    Not where somebody waits for it in autograd: a computed weight's own graph, a hook on the parameter
    (`main_grad` has an owner, whose hooks know about None), second derivatives, `torch.autograd.grad`.
    """
    if not parameter.is_leaf or parameter._backward_hooks or torch.is_grad_enabled():
        return False
    if parameter._post_accumulate_grad_hooks and getattr(parameter, "main_grad", None) is None:
        return False
    if region is not None and region.in_backward:  # asks for everything, and passes on what it gets
        return True
    try:
        return bool(torch._C._will_engine_execute_node(node.next_functions[1][0]))
    except RuntimeError:  # what it says of a leaf that `torch.autograd.grad` asks for
        return False


def check_unwritten(weight: Tensor, version: int) -> None:
    """Raise RuntimeError for a weight that was written since the forward; autograd does so for what it saves."""
    if weight._version != version:
        raise RuntimeError(
            f"a weight of shape {list(weight.shape)} was written {weight._version - version} times between a forward "
            "and its backward, which would use the new values; write weights between steps (an optimizer in backward "
            "needs num_microbatches=1), or clone the weight in forward"
        )


def accumulate(parameter: Parameter, gradient: Tensor) -> None:
    """Add a finished gradient into `main_grad` where there is one (never rebinding it), else into `.grad`."""
    gradient = gradient.view(parameter.shape)
    main_grad = main_grad_of(parameter)
    if main_grad is not None:
        main_grad.add_(gradient)
    elif parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    elif parameter.grad.layout is not torch.strided:  # of a sparse embedding that shares the weight
        parameter.grad = gradient.to(parameter.dtype) + parameter.grad
    else:
        parameter.grad.add_(gradient)
