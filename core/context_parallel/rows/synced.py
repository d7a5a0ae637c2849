"""Whether the weights of a model stay the same on all context ranks: without a sum of their gradients they part."""

import weakref

import torch
from torch import Tensor, nn

from core.parallel_state.collectives.checks import fingerprint
from core.parallel_state.layout import layout_of

NUM_SYNCED = 2
SYNCED_REMEDY = (
    "Wrap the model in core.data_parallel.DataParallel(model, ps), or sum its gradients over parallel_state."
    "get_data_parallel_group(with_context_parallel=True), as torch's DDP does with this group"
)


class SyncedWeight:
    """The smallest weight that trains, of one model, as it is compared."""

    def __init__(self) -> None:
        self._weight: weakref.ref[nn.Parameter] | None = None

    def choose(self, model: nn.Module) -> None:
        """Before a forward; the first time counts."""
        if self._weight is None:
            # those that ZeRO stage 3 has freed, and DTensors, are of other classes
            plain = (p for p in model.parameters() if type(p) is nn.Parameter and p.requires_grad)
            trained = [p for p in plain if "ep" not in layout_of(p).split]
            if trained:
                self._weight = weakref.ref(min(trained, key=torch.numel))

    @torch.no_grad()
    def numbers(self) -> Tensor:
        """[NUM_SYNCED]; zeros where it is not here, as at ZeRO stage 3."""
        weight = self._weight() if self._weight is not None else None
        with torch._C.DisableTorchFunctionSubclass():
            if weight is None or not weight.numel():
                return torch.zeros(NUM_SYNCED, dtype=torch.float64)
            return fingerprint(weight.detach().double())


def told_of_weights(numbers: Tensor) -> str:
    """What is said where ranks have other weights, [ranks, NUM_SYNCED]."""
    # of a run that has diverged nothing is said
    if bool((numbers == numbers[:1]).all() | ~numbers.isfinite().all()):
        return ""
    return (
        f"weights differ between the {len(numbers)} context ranks after an update: each has the gradient of its own "
        "rows, which nobody sums"
    )
