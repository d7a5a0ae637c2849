"""A module remembers how its parameters are spread: what replaces one gets its layout, or is refused.

`load_state_dict(assign=True)`, `to("meta")`, `to_empty`, a copy and `module.weight = Parameter(...)` put new objects
into a module, without a layout. The module therefore remembers the layouts, by the parameters' names.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from core.parallel_state.initial import Init
from core.parallel_state.layout import Layout, has_layout, layout_of, set_layout

# attribute of a module: name -> Spread
_SPREAD_ATTRIBUTE = "_spread_parameters"


@dataclass(frozen=True)
class Spread:
    """What a module knows of one parameter. shape: of this rank's shard. renew: what else a new one needs (hooks)."""

    layout: Layout
    initial: Init | None
    shape: tuple[int, ...]
    renew: Callable[[Parameter], None] | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether other ranks hold the rest."""
        return self.shape != self.layout.padded_shape()

    def check(self, name: str, parameter: Tensor) -> None:
        """Raise ValueError for a parameter of another shape."""
        if tuple(parameter.shape) != self.shape:
            if self.is_sharded:
                origin = f"this rank's part of {list(self.layout.shape)}"
            else:
                origin = "built"
            raise ValueError(
                f"{name} is {list(self.shape)}, {origin}, and cannot be replaced by {list(parameter.shape)}; give "
                "every rank its own part (whole tensors: dist_checkpointing.load), or build the model with the new "
                "size"
            )

    def apply_to(self, parameter: Parameter) -> None:
        """Give `parameter` the layout, initial values and hooks of the one it replaces."""
        set_layout(parameter, self.layout)
        if self.initial is not None:
            parameter.initial = self.initial  # type: ignore[attr-defined]
        if self.renew is not None:
            self.renew(parameter)


def remember_spread(
    module: nn.Module, name: str, renew: Callable[[Parameter], None] | None = None
) -> None:
    """Note how `module`'s parameter `name` is spread now."""
    parameter = module._parameters[name]
    assert parameter is not None
    spread = Spread(
        layout_of(parameter), getattr(parameter, "initial", None), tuple(parameter.shape), renew
    )
    module.__dict__.setdefault(_SPREAD_ATTRIBUTE, {})[name] = spread


def keep_layouts(module: nn.Module) -> None:
    """Give every parameter in `module` that was replaced its layout back; note those that are new.

    Raises ValueError: a replacement of another shape; a split parameter that is computed from others now.
    Warns: a parametrization of a split parameter.
    """
    for prefix, submodule in module.named_modules():
        _keep_layouts_of(submodule, f"{prefix}." if prefix else "")


def _keep_layouts_of(module: nn.Module, prefix: str = "") -> None:
    known_spreads: dict[str, Spread] = module.__dict__.get(_SPREAD_ATTRIBUTE, {})
    for name, parameter in module._parameters.items():
        spread = known_spreads.get(name)
        if parameter is None:
            known_spreads.pop(name, None)
        elif has_layout(parameter):
            # a new parameter that brought a layout of its own, as our layers make them
            if spread is None or spread.layout is not layout_of(parameter):
                remember_spread(module, name, spread.renew if spread is not None else None)
        elif spread is not None:
            spread.check(prefix + name, parameter)
            spread.apply_to(parameter)
    for name in known_spreads.keys() - module._parameters.keys():
        _check_computed(module, name, known_spreads.pop(name), prefix + name)


def _check_computed(module: nn.Module, name: str, spread: Spread, full_name: str) -> None:
    """The parameter is no longer there: deleted, renamed (pruning), or computed from others."""
    if not spread.is_sharded or not isinstance(getattr(module, name, None), Tensor):
        return
    # pruning keeps the parameter under another name: then its layout is still known
    if not any(layout == spread.layout for layout in map(layout_of, module.parameters())):
        raise ValueError(
            f"{full_name} of {list(spread.layout.shape)} is split, this rank holding {list(spread.shape)}, and is "
            "now computed from other parameters (weight_norm? a right_inverse?): nobody knows how those are spread; "
            "put the computation around the module, or use tensor_model_parallel_size=1"
        )
    warnings.warn(
        f"{full_name} of {list(spread.layout.shape)} is split, and now computed by a parametrization (or pruned), "
        f"which sees this rank's {list(spread.shape)} only. Elementwise ones are right; norms, ranks and thresholds "
        "of the whole matrix are not: use tensor_model_parallel_size=1 for those",
        stacklevel=2,
    )


class SpreadModule(nn.Module):
    """A module whose parameters are spread: it knows their layouts, and what takes their place gets them at once."""

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        """As torch's. Raises ValueError: a replacement of another shape."""
        spread = self.__dict__.get(_SPREAD_ATTRIBUTE, {}).get(name)
        if spread is not None and param is not None and not has_layout(param):
            spread.check(f"{type(self).__name__}.{name}", param)
        super().register_parameter(name, param)
        if param is not None and has_layout(param):
            remember_spread(self, name)
        elif spread is not None:
            _keep_layouts_of(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "SpreadModule":
        # may put other objects in the parameters' places
        super()._apply(fn, recurse)
        _keep_layouts_of(self)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        # which may swap tensors with all their attributes
        super()._load_from_state_dict(*args)
        _keep_layouts_of(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _keep_layouts_of(self)


def building_device(device: torch.device) -> torch.device:
    """Where parameters are made: `meta` inside `with torch.device("meta")`, else `device`."""
    default = torch.get_default_device()
    if default.type == "meta":
        return default
    return device
