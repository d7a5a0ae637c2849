"""Plain `nn.Linear` and `nn.Embedding` inside any module, made to defer their weight gradients (split backward)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from core.autograd.bag import StageContext
from core.autograd.embedding import deferred_embedding
from core.autograd.linear import deferred_linear, make_compilable
from core.autograd.proxy import LinearProxy, proxies_of
from core.autograd.recomputation.leaving import in_torch_func


def _is_plain(weight: object) -> bool:
    """Whether it is no tensor of another kind (DTensor, quantized, sparse, complex).

    Checked at every call, because hooks compute weights and programs replace them.
    """
    return (
        type(weight) is Parameter and weight.layout is torch.strided and weight.is_floating_point()
    )


def _is_usual(x: Tensor) -> bool:
    """Whether an autograd Function takes it: no tensor of another kind, no torch.func around us."""
    tensor_class = type(x)
    return (tensor_class is Tensor or tensor_class is Parameter) and not (
        x.is_nested or in_torch_func()
    )


class _DeferringProxy(LinearProxy):
    """Defers where a stage has a bag, else runs the module's own forward.

    stages: those that the module belongs to. A module of two stages defers into the one that has a bag now;
    with bags in both it is unknown which one is running, and the gradient is computed at once.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.stages: list[StageContext] = []

    def call(self, input: Tensor) -> Tensor:
        """The module's output; its own forward where anything is unusual."""
        with_bag = [stage for stage in self.stages if stage.bag is not None]
        if len(with_bag) == 1 and _is_plain(self.module.weight) and _is_usual(input):
            return self.call_deferred(input, with_bag[0])
        y: Tensor = self.call_replaced(input)
        return y

    def call_deferred(self, x: Tensor, stage: StageContext) -> Tensor:
        """The operation that defers into `stage`."""
        raise NotImplementedError


class _LinearProxy(_DeferringProxy):
    def call_deferred(self, x: Tensor, stage: StageContext) -> Tensor:
        module = self.module
        return deferred_linear(x, module.weight, module.bias, stage=stage)  # type: ignore[arg-type]


class _EmbeddingProxy(_DeferringProxy):
    def call_deferred(self, x: Tensor, stage: StageContext) -> Tensor:
        return deferred_embedding(x, self.module.weight, stage=stage)  # type: ignore[arg-type]


def _proxy_class_of(module: nn.Module) -> Callable[[nn.Module], _DeferringProxy] | None:
    """The proxy class for this module; None for all but exactly these two classes."""
    if type(module) is nn.Linear and _is_plain(module.weight):
        return _LinearProxy
    if type(module) is nn.Embedding and _is_plain(module.weight):
        options = (
            module.padding_idx,
            module.max_norm,
            module.scale_grad_by_freq or None,
            module.sparse or None,
        )
        if options == (None,) * 4:
            return _EmbeddingProxy
        return None
    return None


def _reroutable_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Every module once, except inside of a DistributedDataParallel, whose hooks must see every gradient."""
    modules = dict(module.named_modules())
    inside_ddp: set[int] = set()
    for outer in modules.values():
        if isinstance(outer, DistributedDataParallel):
            inside_ddp.update(map(id, outer.modules()))
    # DDP counts gradients as they arrive, and would wait for those that come later
    return {name: inner for name, inner in modules.items() if id(inner) not in inside_ddp}


class RerouteHandle:
    """The modules of a stage that defer; `remove()` gives them their own forward back.

    names: of those modules, inside the module that was rerouted.
    """

    def __init__(
        self, names: list[str], proxies: list[_DeferringProxy], stage: StageContext
    ) -> None:
        self.names = names
        self._standins = proxies
        self._stage = stage

    def remove(self) -> None:
        """Undo; another stage that shares a module keeps it."""
        for proxy in self._standins:
            proxy.stages = [stage for stage in proxy.stages if stage is not self._stage]
            if not proxy.stages:
                proxy.remove()
        self._standins = []


def reroute(module: nn.Module, stage: StageContext) -> RerouteHandle:
    """Let every `nn.Linear` and `nn.Embedding` inside `module` defer its weight gradient into the bag of `stage`.

    In place; classes, names, hooks, copies and pickles stay as they are. Only exactly these two classes (an
    embedding without padding_idx, max_norm, scale_grad_by_freq and sparse); a subclass, a module whose forward
    somebody replaced, `F.linear`, and modules that defer by themselves are left alone, and are right all the
    same. Without a bag in `stage` the module's own forward runs.
    """
    names: list[str] = []
    own_proxies: list[_DeferringProxy] = []
    for name, child in _reroutable_modules(module).items():
        proxy_class = _proxy_class_of(child)
        present = list(proxies_of(child))
        lowest = present[-1] if present else None
        if proxy_class is None:
            continue
        if isinstance(lowest, _DeferringProxy):
            proxy = lowest
        elif lowest is not None and lowest.replaced is None:
            # a region is around it: what it calls is ours
            proxy = proxy_class(child)
            proxy.replaced = None
            lowest.replaced = proxy.call
        # a forward that somebody has replaced stays theirs
        elif "forward" not in child.__dict__:
            proxy = proxy_class(child)
            proxy.install()
        else:
            continue
        if proxy_class is _LinearProxy and getattr(child.weight, "_deferral", None) is None:
            make_compilable(child.weight)
        if not any(other is stage for other in proxy.stages):
            proxy.stages.append(stage)
            names.append(name)
            own_proxies.append(proxy)
    return RerouteHandle(names, own_proxies, stage)
