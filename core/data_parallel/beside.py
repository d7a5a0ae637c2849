"""What users of DDP try first with a `DataParallel`, which stands beside its module and not for it."""

from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

# of nn.Module, and not ours: load_state_dict, train, to ...
_OF_MODULES = frozenset(name for name in dir(nn.Module) if not name.startswith("_"))


class BesideModule:
    """Says what to call instead."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # nothing at all: a copy
        if (args or kwargs) and len(args) < 2 and "ps" not in kwargs:
            raise TypeError(
                f"{cls.__name__}(module, ps): ps is what parallel_state.initialize_model_parallel(...) returns, for "
                "one process ParallelState.single()"
            )
        return super().__new__(cls)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} stands beside its module and is not called: call the module itself, whose "
            "backward it listens to"
        )

    # a type checker is to see which names there are
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in _OF_MODULES:
                text += f": it stands beside its module; use the module's own {name}"
            raise AttributeError(text)
