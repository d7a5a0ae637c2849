"""Plain `nn.Linear` and `nn.Embedding` inside any module, made to defer their weight gradients; and taken back."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from core.autograd.bag import StageContext
from core.autograd.compiled import make_compilable
from core.autograd.embedding import deferred_embedding
from core.autograd.leaving import in_torch_func
from core.autograd.linear import deferred_linear
from core.autograd.standin import LinearProxy, standins


def _is_plain(weight: object) -> bool:
    """Not a tensor of another kind (DTensor, quantized, sparse, complex), whose gradient is another matter.

    Asked at every call, as hooks compute weights and others replace them.
    """
    return type(weight) is Parameter and weight.layout is torch.strided and weight.is_floating_point()


def _is_usual(x: Tensor) -> bool:
    """What an autograd Function takes: no tensor of another kind, no torch.func around us."""
    kind = type(x)
    return (kind is Tensor or kind is Parameter) and not (x.is_nested or in_torch_func())


class _Rerouted(LinearProxy):
    """Defers where a stage has a bag, else runs the module's own forward: then nothing at all is different.

    stages: those that the module belongs to. A module of two stages defers into the one that has a bag now;
    with bags in both nobody can say which one is running, and the gradient comes at once.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.stages: list[StageContext] = []

    def call(self, input: Tensor) -> Tensor:
        """The module's output; its own forward where anything is unusual."""
        filling = [stage for stage in self.stages if stage.bag is not None]
        if len(filling) == 1 and _is_plain(self.module.weight) and _is_usual(input):
            return self.deferred(input, filling[0])
        y: Tensor = self.plain(input)
        return y

    def deferred(self, x: Tensor, stage: StageContext) -> Tensor:
        """The operation that defers into `stage`."""
        raise NotImplementedError


class _Linear(_Rerouted):
    def deferred(self, x: Tensor, stage: StageContext) -> Tensor:
        module = self.module
        return deferred_linear(x, module.weight, module.bias, stage=stage)  # type: ignore[arg-type]


class _Embedding(_Rerouted):
    def deferred(self, x: Tensor, stage: StageContext) -> Tensor:
        return deferred_embedding(x, self.module.weight, stage=stage)  # type: ignore[arg-type]


def _kind(module: nn.Module) -> Callable[[nn.Module], _Rerouted] | None:
    """What stands in for this module; None for all that is not exactly what we know."""
    if type(module) is nn.Linear and _is_plain(module.weight):
        return _Linear
    if type(module) is nn.Embedding and _is_plain(module.weight):
        special = (module.padding_idx, module.max_norm, module.scale_grad_by_freq or None, module.sparse or None)
        return _Embedding if special == (None,) * 4 else None
    return None


def _modules(module: nn.Module) -> dict[str, nn.Module]:
    """Every module once, but for what DistributedDataParallel reduces by itself: it must see every gradient."""
    found = dict(module.named_modules())
    apart = {id(m) for outer in found.values() if isinstance(outer, DistributedDataParallel) for m in outer.modules()}
    return {name: m for name, m in found.items() if id(m) not in apart}


class RerouteHandle:
    """The modules of a stage that defer; `remove()` gives them their own forward back.

    names: of those modules, inside the module that was rerouted.
    """

    def __init__(self, names: list[str], standins: list[_Rerouted], stage: StageContext) -> None:
        self.names, self._standins, self._stage = names, standins, stage

    def remove(self) -> None:
        """Undo; another stage that shares a module keeps it."""
        for standin in self._standins:
            standin.stages = [stage for stage in standin.stages if stage is not self._stage]
            if not standin.stages:
                standin.remove()
        self._standins = []


def reroute(module: nn.Module, stage: StageContext) -> RerouteHandle:
    """Let every `nn.Linear` and `nn.Embedding` inside `module` defer its weight gradient into the bag of `stage`.

    In place; classes, names, hooks, copies and pickles stay as they are. Only exactly these two classes (an
    embedding without padding_idx, max_norm, scale_grad_by_freq and sparse); a subclass, a module whose forward
    somebody replaced, `F.linear`, and modules that defer by themselves are left alone, and are right all the
    same. Without a bag in `stage` the module's own forward runs.
    """
    names: list[str] = []
    mine: list[_Rerouted] = []
    for name, child in _modules(module).items():
        make = _kind(child)
        chain = list(standins(child))
        lowest = chain[-1] if chain else None
        if make is None:
            continue
        if isinstance(lowest, _Rerouted):
            standin = lowest
        elif lowest is not None and lowest.below is None:  # under a region
            standin = make(child)
            standin.below, lowest.below = None, standin.call
        elif "forward" not in child.__dict__:
            standin = make(child)
            standin.put()
        else:
            continue
        if make is _Linear and getattr(child.weight, "_deferral", None) is None:
            make_compilable(child.weight)
        if not any(known is stage for known in standin.stages):
            standin.stages.append(stage)
            names.append(name)
            mine.append(standin)
    return RerouteHandle(names, mine, stage)
