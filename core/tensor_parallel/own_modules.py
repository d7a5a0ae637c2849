"""Watches modules of a program's own that hold parallel layers, as `GPTModel` watches itself.

A layer does not know the module it will be in. So the layers that were made with one `Placement.of(ps)` wait until a
forward shows the outermost module around them, which gets two hooks: `SplitWatch` before and after its forwards.
"""

import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree as pytree

from core.autograd.gradients import refuse_transforms
from core.parallel_state import layout_of
from core.parallel_state.by_hand import ByHand, Heard, called_by_core
from core.parallel_state.by_hand.functions import program_level
from core.parallel_state.collectives import Group
from core.parallel_state.spread import SpreadModule
from core.tensor_parallel.chosen_by_class import names_class_of_torch
from core.tensor_parallel.looked_at import LookedAt
from core.tensor_parallel.seen_parts import SplitWeights
from core.tensor_parallel.split_activations import SplitActivations
from core.tensor_parallel.watch import SplitWatch
from core.tensor_parallel.whole_gradients import WholeGradients
from core.tensor_parallel.whole_matrices import watch_optimizers

# without any of the layers, after which they are no longer looked for
_MODULE_CALLS = 10_000


class OwnModules:
    """The layers of one placement over `group` whose outermost module is not known yet."""

    def __init__(self, group: Group, *, splits_sequence: bool) -> None:
        self._group = group
        self._splits_sequence = splits_sequence
        self._waiting: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        # initial values by hand
        self._by_hand: ByHand | None = None
        self._warned_of: set[str] = set()
        self._calls = 0
        self._stop_looking: weakref.finalize | None = None

    def __deepcopy__(self, memo: dict) -> "OwnModules":
        return self  # a copied layer waits here, too

    def __reduce__(self) -> tuple:
        # a layer out of a file is not watched
        return type(None), ()

    def add(self, layer: nn.Module) -> None:
        """Look for the module around `layer`, and meanwhile listen to what is called on its parameters by hand."""
        self._waiting.add(layer)
        self._calls = 0
        if self._by_hand is None:
            self._by_hand = ByHand(self._warn_of_initial_values)
            self._by_hand.open(())
        self._by_hand.add(p for p in layer.parameters() if "tp" in layout_of(p).split)
        if self._stop_looking is None:
            reference = weakref.ref(self)

            def look(module: nn.Module, args: tuple) -> None:
                own = reference()
                if own is not None:
                    own._look(module, args)

            self._stop_looking = weakref.finalize(
                self, register_module_forward_pre_hook(look).remove
            )

    @torch.compiler.disable
    def _look(self, module: nn.Module, args: tuple) -> None:
        """Before the forward of any module."""
        self._calls += 1
        if self._waiting:
            inside = [m for m in module.modules() if m in self._waiting]
        else:
            inside = []
        for layer in inside:
            self._waiting.discard(layer)
        if not self._waiting or self._calls > _MODULE_CALLS:
            assert self._stop_looking is not None
            self._stop_looking()
            self._stop_looking = None
        if not inside:
            return
        ended = None
        if not self._waiting and self._by_hand is not None:
            self._by_hand.end()
            ended, self._by_hand = self._by_hand, None
        elif self._by_hand is not None:
            self._by_hand.close()
            split = []
            for waiting in self._waiting:
                split += [p for p in waiting.parameters() if "tp" in layout_of(p).split]
            self._by_hand.open(split)
        if not any(isinstance(hook, _Before) for hook in module._forward_pre_hooks.values()):
            before = _Before(self._group, self._splits_sequence, after=ended)
            module.register_forward_pre_hook(before, with_kwargs=True)
            # a forward that raises is over, too
            module.register_forward_hook(_After(before), with_kwargs=True, always_call=True)
            watch_optimizers(module)
            before(module, args, _keywords_of_call())

    def warn_of_state_dict(self) -> None:
        """A program has called `state_dict()` of a module with these layers. Warns once."""
        if "state_dict" not in self._warned_of:
            self._warned_of.add("state_dict")
            warnings.warn(
                f"state_dict() holds the parts of one of {self._group.size} tensor ranks: one rank's file loses the "
                "others'. Use dist_checkpointing.save(sharded_state_dict(model, ps), directory), or a file per rank; "
                "a copy in memory for this rank is right",
                stacklevel=program_level(),
            )

    def _warn_of_initial_values(self, heard: Heard) -> None:
        is_width = heard.kind == "shape" and _in_constructor()
        if is_width or not heard.sees_only_shard or heard.kind in self._warned_of:
            return
        self._warned_of.add(heard.kind)
        warnings.warn(heard.message(*self._waiting), stacklevel=program_level())


def _keywords_of_call() -> dict[str, Any]:
    """Those of the module's call: torch gives a hook for all modules none."""
    frame = sys._getframe(1)
    while frame is not None and "_call_impl" not in frame.f_code.co_name:
        frame = frame.f_back  # type: ignore[assignment]
    return (frame.f_locals.get("kwargs") if frame is not None else None) or {}


def _in_constructor() -> bool:
    """Whether a module is being made, which reads the width of its layers for its own forward."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        is_method = code.co_name == "__init__" and code.co_varnames
        if is_method and isinstance(frame.f_locals.get(code.co_varnames[0]), nn.Module):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


# of what is no function of Python's
_NO_CODE = (lambda: None).__code__


class PlacedModule(SpreadModule):
    """A parallel layer: what watches the module that it will be in knows of it, and of its copies."""

    own_modules: OwnModules | None = None
    input_is_split = False  # whether tensor ranks are given different columns
    # the dim of its weight's output dims of which each rank returns a part
    split_output: int | None = None
    is_whole_outside = False  # whether it takes and returns what all ranks have alike
    stands_for = ""  # the name of torch's class that one process has in its place

    def place_in(self, own_modules: OwnModules | None) -> None:
        """Called where the layer is whole."""
        if own_modules is not None:
            self.own_modules = own_modules
            own_modules.add(self)

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """As torch's. Warns of initial values that `fn` has for torch's class alone: `isinstance(m, nn.Linear)`."""
        before = [p._version for p in self.parameters()]
        super().apply(fn)
        code = getattr(getattr(fn, "__func__", fn), "__code__", _NO_CODE)
        is_chosen = names_class_of_torch(code, self.stands_for, type(self).__name__)
        if is_chosen and before == [p._version for p in self.parameters()]:
            warnings.warn(
                f"model.apply(fn): fn names nn.{self.stands_for}, which a {type(self).__name__} is not, and left its "
                f"weights as they were. Choose by isinstance(m, (nn.{self.stands_for}, {type(self).__name__}))",
                stacklevel=program_level(),
            )
        return self

    def _save_to_state_dict(self, *args: Any) -> None:
        if self.own_modules is not None and not called_by_core(sys._getframe(1)):
            self.own_modules.warn_of_state_dict()
        super()._save_to_state_dict(*args)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.own_modules is not None:
            self.own_modules.add(self)


def _hooks_in(module: nn.Module) -> list[dict]:
    """All registries of hooks on what is inside: whoever registers one later makes one longer."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [getattr(part, kind) for part in module.modules() for kind in kinds]


def _tensors_of(values: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]


class _Before:
    """A forward pre-hook of the outermost module; a copy of it watches the copied module anew."""

    def __init__(
        self, group: Group | None, splits_sequence: bool, *, after: ByHand | None = None
    ) -> None:
        self._group = group
        self._splits_sequence = splits_sequence
        self.watch: SplitWatch | None = None
        self._activations: SplitActivations | None = None
        if group is not None:
            self.watch = SplitWatch(group, warns_of_hooks=False, after=after)
            self._activations = SplitActivations(group, compares_factors=True)
            self._gradients = WholeGradients(group)
        self._weights = SplitWeights(group, compares_factors=True) if group is not None else None
        self._looked_at = LookedAt()
        # of the modules inside, and how many the program had when it was last looked
        self._hooks: list[dict] = []
        self._hooks_seen = 0

    def __deepcopy__(self, memo: dict) -> "_Before":
        memo[id(self)] = copy = _Before(self._group, self._splits_sequence)
        return copy

    def __reduce__(self) -> tuple:
        return _Before, (None, False)

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        parameters = list(module.parameters())
        # none: a head that is given the weight of a tied table
        if self.watch is None or not parameters or any(p.is_meta for p in parameters):
            return
        refuse_transforms("a module of parallel layers")
        self.watch.check_before(module, self._shared_inputs(module, args, kwargs))
        assert self._activations is not None and self._weights is not None
        device = parameters[0].device
        self._activations.compare_factors(device)
        self._weights.compare_factors(device)
        self._gradients.before_forward(module)
        self._look_inside(module, _tensors_of((args, kwargs)))

    def _look_inside(self, module: nn.Module, inputs: list[Tensor]) -> None:
        """Follow this forward, if it is one of those."""
        assert self._activations is not None and self._weights is not None
        self._weights.make_plain()
        hooks = sum(map(len, self._hooks)) - self._activations.num_hooks
        has_more = hooks > self._hooks_seen
        is_followed = self._looked_at.begin(module, inputs, again=has_more)
        if has_more or not is_followed:
            self._activations.detach()
        self._hooks_seen = hooks
        if not is_followed:
            return
        if not self._activations.num_hooks:
            self._hooks = _hooks_in(module)
            self._hooks_seen = sum(map(len, self._hooks))
            self._activations.attach(module)
        self._weights.mark_in(module)

    def release(self) -> None:
        """After a forward: weights are listened to otherwise."""
        self._looked_at.end()
        if self._weights is not None:
            self._weights.release()

    def _shared_inputs(
        self, module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> list[Tensor]:
        """What all tensor ranks must be given alike: not columns between split layers, not rows of a sequence."""
        inputs = [
            x for x in _tensors_of((args, kwargs)) if not x.is_meta and x.layout == torch.strided
        ]
        first = next((m for m in module.modules() if isinstance(m, PlacedModule)), None)
        takes_columns = first is None or first.input_is_split
        if self._splits_sequence or takes_columns:
            return [x for x in inputs if not x.is_floating_point() and not x.is_complex()]
        return inputs


class _After:
    """A forward hook: arithmetic by hand is listened to until the next forward.

    Not compiled: in what it registers ranks meet, and one of them may run this forward as it was written.
    """

    def __init__(self, before: _Before) -> None:
        self._before = before

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        self._before.release()
        if self._before.watch is None:
            return
        if torch._C._are_functorch_transforms_active() or _driven_by_executor():
            return
        if not torch.is_grad_enabled():
            self._before.watch.listen_again()
            return
        differentiable = [x for x in _tensors_of(output) if x.requires_grad]
        if any(x.is_meta for x in differentiable):
            return
        self._before.watch.follow_after(module, differentiable, are_replicated=None)


def _driven_by_executor() -> bool:
    """Whether a pipeline's executor runs this forward: it listens itself, over its stages."""
    frame = sys._getframe(1)
    for _ in range(12):
        frame = frame.f_back  # type: ignore[assignment]
        if frame is None:
            return False
        if frame.f_globals.get("__name__", "").startswith("core.pipeline."):
            return True
    return False
