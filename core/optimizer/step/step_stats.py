"""What one optimizer step reports, and the constant that torch and this project clip with."""

from dataclasses import dataclass

from torch import Tensor

# added to the norm before dividing by it, as in torch.nn.utils.clip_grad_norm_
CLIP_EPS = 1e-6


@dataclass(frozen=True, eq=False)
class StepStats:
    """Facts of one step, as tensors of shape [] on the parameters' device; `.item()` waits for an accelerator.

    grad_norm: float64, of the whole model's gradient, after averaging and unscaling, before clipping.
    found_inf: bool, the norm was not finite. skipped: bool, no parameter was updated.
    """

    grad_norm: Tensor
    found_inf: Tensor
    skipped: Tensor
