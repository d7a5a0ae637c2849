"""Whether the weights of a model stay the same on all context ranks: without a sum of their gradients they part."""

import weakref

import torch
from torch import Tensor, nn

from core.parallel_state.collectives.checks import fingerprint
from core.parallel_state.layout import layout_of

NUM_SYNCED = 2
_MOST_NODES = 50
SYNCED_REMEDY = (
    "Wrap the model in core.data_parallel.DataParallel(model, ps), or sum its gradients over parallel_state."
    "get_data_parallel_group(with_context_parallel=True), as torch's DDP does with this group"
)


class SyncedWeight:
    """The smallest weight that trains, of one model, and one of a head of the program's, as they are compared."""

    def __init__(self) -> None:
        self._weight: weakref.ref[nn.Parameter] | None = None
        self._of_head: weakref.ref[nn.Parameter] | None = None

    def choose(self, model: nn.Module) -> None:
        """Before a forward; the first time counts."""
        if self._weight is None:
            # those that ZeRO stage 3 has freed, and DTensors, are of other classes
            plain = (p for p in model.parameters() if type(p) is nn.Parameter and p.requires_grad)
            trained = [p for p in plain if "ep" not in layout_of(p).split]
            if trained:
                self._weight = weakref.ref(min(trained, key=torch.numel))

    def choose_behind(self, made: Tensor) -> None:
        """A parameter that `made` of a model's outputs was made with; the first counts."""
        if self._of_head is not None:
            return
        level, seen = [made.grad_fn], 0
        while level and seen < _MOST_NODES:
            node = level.pop()
            seen += 1
            variable = getattr(node, "variable", None)
            if type(variable) is nn.Parameter:
                self._of_head = weakref.ref(variable)
                return
            level += [following for following, _ in node.next_functions] if node else []

    @torch.no_grad()
    def numbers(self) -> Tensor:
        """[NUM_SYNCED]; zeros where they are not here, as at ZeRO stage 3."""
        numbers = torch.zeros(NUM_SYNCED, dtype=torch.float64)
        with torch._C.DisableTorchFunctionSubclass():
            for reference in filter(None, (self._weight, self._of_head)):
                weight = reference()
                if weight is not None and weight.numel():
                    numbers = numbers.to(weight.device) + fingerprint(weight.detach().double())
        return numbers


def told_of_weights(numbers: Tensor) -> str:
    """What is said where ranks have other weights, [ranks, NUM_SYNCED]."""
    # of a run that has diverged nothing is said
    if bool((numbers == numbers[:1]).all() | ~numbers.isfinite().all()):
        return ""
    return (
        f"weights differ between the {len(numbers)} context ranks after an update: each has the gradient of its own "
        "rows, which nobody sums"
    )
