"""Where an operation adds the gradient of a parameter."""

from torch import Tensor


def main_grad_of(parameter: Tensor) -> Tensor | None:
    """The buffer that gradients of `parameter` are added to, in place; None where nobody owns one.

    Its owner may give it memory, or zeros, when the first contribution comes (`take_main_grad`); until then
    `main_grad` itself may be unreadable. So operations that add to it, ours or yours, ask here each time.
    """
    take = getattr(parameter, "take_main_grad", None)
    found: Tensor | None = take() if take is not None else getattr(parameter, "main_grad", None)
    return found
