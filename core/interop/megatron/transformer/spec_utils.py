"""`ModuleSpec` and `build_module`: a class, or where to import it from, with its parameters and submodules."""

from dataclasses import dataclass, field
from importlib import import_module as load
from inspect import signature
from typing import Any

from torch import nn

from core.transformer.spec import Build, TransformerLayerSpec


@dataclass
class ModuleSpec:
    """module: a class, a function, or (path, name). params: its keywords. submodules: their specs."""

    module: tuple[str, str] | type | Any
    params: dict[str, Any] = field(default_factory=dict)
    submodules: Any = None
    metainfo: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """An instance. As a part of a layer (`replace(spec, mlp=ModuleSpec(MyMLP))`) a class whose first argument is
        `config` is built of the configuration, and may return (output, bias), which is added.

        Raises ValueError: an attention of that form, whose forward is another here.
        """
        if args and isinstance(args[0], Build) and _takes_config(get_module(self)):
            return self._part(*args)
        return build_module(self, *args, **kwargs)

    def _part(self, build: Build, *more: Any) -> nn.Module:
        if more and isinstance(more[0], TransformerLayerSpec):
            raise ValueError(
                f"{get_module(self).__name__}(config, ...) as an attention: it is called with (hidden states, mask, "
                "rotary tables) here, and made by attention(build, spec); subclass core.transformer.attention."
                "self_attention.SelfAttention, or swap core_attention, as examples/custom_layer_spec.py does"
            )
        given: dict[str, Any] = {}
        if more:  # of a norm: its last dim
            given = {"hidden_size": more[0], "eps": build.config.layernorm_epsilon}
        part: nn.Module = build_module(self, config=build.config, **given)
        part.register_forward_hook(_add_bias)
        return part


def _takes_config(module: Any) -> bool:
    """Whether it is a class in Megatron's form: `__init__(self, config, ...)`."""
    if not isinstance(module, type):
        return False
    return next(iter(signature(module).parameters), None) == "config"


def _add_bias(part: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Of (output, bias), which Megatron's layers add with the dropout behind."""
    if not isinstance(output, tuple):
        return output
    x, bias = output
    return x if bias is None else x + bias


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
