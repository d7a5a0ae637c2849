"""What one optimizer step reports, and the constant that torch and this project clip with."""

from dataclasses import dataclass

from torch import Tensor

# added to the norm before dividing by it, as in torch.nn.utils.clip_grad_norm_
CLIP_EPS = 1e-6


@dataclass(frozen=True, eq=False)
class StepStats:
    """Facts of one step, as tensors of shape [] on the parameters' device; `.item()` waits for an accelerator.

    grad_norm: float64, of the whole model's gradient, after averaging and unscaling, before clipping.
    found_inf: bool, the norm was not finite. skipped: bool, no parameter was updated: for that, or because the norm
    was a spike (`skip_grad_norm_above`). median_norm: float64, of the norms before, that it was compared with; NaN as
    long as too few are known, None where nothing is compared.
    """

    grad_norm: Tensor
    found_inf: Tensor
    skipped: Tensor
    median_norm: Tensor | None = None

    def spike_in_words(self) -> str:
        """What a step that was skipped as a spike had; empty of others. Waits for an accelerator."""
        if self.median_norm is None or bool(self.found_inf) or not bool(self.skipped):
            return ""
        norm, median = float(self.grad_norm), float(self.median_norm)
        return f"the gradient norm {norm:.4g} is {norm / median:.3g} times the median {median:.4g} of those before"
