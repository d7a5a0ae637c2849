"""`ModuleSpec` and `build_module`: a class, or where to import it from, with its parameters and submodules."""

from dataclasses import dataclass, field
from importlib import import_module as load
from typing import Any


@dataclass
class ModuleSpec:
    """module: a class, a function, or (path, name). params: its keywords. submodules: their specs."""

    module: tuple[str, str] | type | Any
    params: dict[str, Any] = field(default_factory=dict)
    submodules: Any = None
    metainfo: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return build_module(self, *args, **kwargs)


def import_module(module_path: tuple[str, str]) -> Any:
    """The object called by the second name in the module of the first. Raises ImportError: there is none."""
    path, name = module_path
    try:
        return getattr(load(path), name)
    except AttributeError as error:
        raise ImportError(f"{path} has no {name!r}") from error


def get_module(spec_or_module: ModuleSpec | type | Any, **more: Any) -> Any:
    """The class or function of a spec."""
    if not isinstance(spec_or_module, ModuleSpec):
        return spec_or_module
    module = spec_or_module.module
    if isinstance(module, tuple):
        return import_module(module)
    return module


def build_module(spec_or_module: ModuleSpec | type | Any, *args: Any, **kwargs: Any) -> Any:
    """An instance, built with `params`, the arguments and `submodules`; a function is returned as it is."""
    module = get_module(spec_or_module)
    if not isinstance(module, type):
        return module
    if isinstance(spec_or_module, ModuleSpec):
        kwargs = {**spec_or_module.params, **kwargs}
        if spec_or_module.submodules is not None:
            kwargs["submodules"] = spec_or_module.submodules
    try:
        return module(*args, **kwargs)
    except Exception as error:
        raise type(error)(f"{error}, when instantiating {module.__name__}") from error
