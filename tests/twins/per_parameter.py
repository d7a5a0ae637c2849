"""Gradients collected in `main_grad` and summed over the replicas parameter by parameter: the plain twin."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from core.autograd.protocols import GradSync
from core.data_parallel.buffers.buffers import wide
from core.parallel_state.collectives import Group, all_reduce
from core.parallel_state.layout import layout_of
from core.parallel_state.modules import Modules, named_parameters
from core.parallel_state.state import ParallelState


class PerParameterGradSync(GradSync):
    """Implements `core.autograd.GradSync`: nothing is overlapped, `finish` sums every gradient in turn.

    Every trainable parameter of `module` (or of a pipeline's stages on this rank) gets `main_grad`, of its own
    shape, allocated here once and only ever added to in place: by deferring operations directly, and from
    autograd's `.grad` by a hook, which then lets `.grad` go. Frozen parameters are left out.

    grad_dtype: of `main_grad`; by default float32 for 16-bit parameters, else the parameter's own.
    Raises ValueError: a parameter that already has a `main_grad`.

    In a plain loop: `loss.backward()` (any number of times), `sync.finish()`, `optimizer.step()`,
    `optimizer.zero_grad()`.
    """

    def __init__(self, module: Modules, ps: ParallelState, *, grad_dtype: torch.dtype | None = None) -> None:
        self.ps = ps
        self._names = {p: name for name, p in named_parameters(module) if p.requires_grad}
        if taken := [name for p, name in self._names.items() if getattr(p, "main_grad", None) is not None]:
            raise ValueError(
                f"PerParameterGradSync: {taken[0]} and {len(taken) - 1} more of {len(self._names)} parameters "
                "already have a main_grad; remove() the object that made it first"
            )
        self._delivered: set[Tensor] = set()
        self._unused: list[str] = []
        self._summed = False
        self._hooks = []
        self._grads: dict[Tensor, Tensor] = {}
        for parameter in self._names:
            dtype = grad_dtype if grad_dtype is not None else wide(parameter.dtype)
            # strides as the parameter's: fused optimizers walk both as one flat range
            self._grads[parameter] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            parameter.main_grad = self._grads[parameter]  # type: ignore[attr-defined]
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._collect))

    def _collect(self, parameter: Tensor) -> None:
        self._delivered.add(parameter)
        if parameter.grad is not None:  # None: the operation has added to main_grad itself
            self._grads[parameter].add_(parameter.grad)
            parameter.grad = None

    def begin_step(self, pairs_per_param: Mapping[Parameter, int], *, split: bool = False) -> None:
        """A step starts; the counts are not needed where nothing is overlapped.

        Raises ValueError: the last step's sums have not been zeroed.
        """
        self._refuse_summed()
        self._delivered.clear()

    def ready(self, param: Parameter) -> None:
        """`param` has had a contribution that no hook saw."""
        self._delivered.add(param)

    def finish(self) -> None:
        """Sum every `main_grad` over the groups of its layout; nothing divides, that is the optimizer's.

        One all-reduce per parameter and group of more than one rank, in the order of `named_parameters`:
        all over the data axes, then all over each group of partial sums in turn.
        Raises ValueError: called again without `zero_grad` between, which would sum what is summed.
        """
        self._refuse_summed()
        self._summed = True
        self._unused = [name for p, name in self._names.items() if p not in self._delivered]
        groups = {p: layout_of(p).gradient_groups for p in self._names}
        partial = sorted({name for names in groups.values() for name in names[1:]})
        for name in ("dp-cp", "edp", *partial):
            group = self.ps.group(name)
            for parameter, names in groups.items():
                if name in names:
                    _sum(self._grads[parameter], group)

    def _refuse_summed(self) -> None:
        if self._summed:
            raise ValueError(
                "PerParameterGradSync: a second step or finish() after 1 zero_grad() would sum again what is "
                "already summed; call zero_grad() after each optimizer step (microbatches are how to accumulate)"
            )

    def zero_grad(self) -> None:
        """Zero every `main_grad` in place; it is never None and never another tensor."""
        if self._grads:
            torch._foreach_zero_(list(self._grads.values()))
        self._delivered.clear()
        self._summed = False

    def unused(self) -> list[str]:
        """Names of the parameters that backward did not reach on this rank before the last `finish`.

        A parameter counts as reached even if what reached it was zero.
        """
        return list(self._unused)

    def remove(self) -> None:
        """Undo: hooks and `main_grad` go, gradients appear in `.grad` again."""
        for hook in self._hooks:
            hook.remove()
        for parameter in self._names:
            del parameter.main_grad  # type: ignore[attr-defined]
        self._hooks, self._names, self._grads = [], {}, {}


def _sum(gradient: Tensor, group: Group | None) -> None:
    """All-reduce in place; backends want dense rows, which a transposed parameter's gradient is not."""
    if group is None:
        return
    whole = gradient.contiguous()
    all_reduce(whole, group)
    if whole is not gradient:
        gradient.copy_(whole)
