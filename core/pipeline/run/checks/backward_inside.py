"""A stage's forward that calls `backward()` itself, of a loss of its own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.nn import Parameter


@contextmanager
def refuse_backward(parameters: Sequence[Parameter], stage: int) -> Iterator[None]:
    """Around a forward with a graph that is run again for its gradients.

    Raises ValueError: gradients of `parameters` are computed in it, and would be a second time.
    """

    def refuse(gradient: Tensor) -> None:
        raise ValueError(
            f"stage {stage} calls backward() in its forward, which recompute='stage' runs twice: its gradients would "
            "be counted twice. Return the loss beside the output, for the next stage to add and loss_fn to take, or "
            "use recompute='none' or 'layer'"
        )

    hooks = [p.register_hook(refuse) for p in parameters if p.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
