"""What a module's own `state_dict()` has beside parameters and buffers, and a sharded state has not."""

import warnings
from collections.abc import Iterator

from torch import nn

from core.parallel_state.by_hand.functions import is_foreign
from core.parallel_state.modules import Modules, modules_of

_TOLD = "_told_of_own_state"


def _own_states(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """(part, by what it adds to, or changes, `state_dict()`)."""
    for part in module.modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            yield part, "get_extra_state"
        elif is_foreign(type(part)._save_to_state_dict):
            yield part, "_save_to_state_dict"
        elif any(map(is_foreign, part._state_dict_hooks.values())):
            yield part, "a state_dict hook"


def tell_of_own_states(modules: Modules) -> None:
    """Warn, once, of what `sharded_state_dict` leaves out."""
    found = [pair for module in modules_of(modules).values() for pair in _own_states(module)]
    if not found or _TOLD in found[0][0].__dict__:
        return
    part, how = found[0]
    part.__dict__[_TOLD] = True
    warnings.warn(
        f"sharded_state_dict has parameters and buffers, and not what {how} of {type(part).__name__} puts into "
        f"state_dict() ({len(found)} such modules): a resume begins without it. Keep it in buffers "
        "(register_buffer), or save it beside the model, as entries of their own: {'model': ..., 'own': "
        "part.get_extra_state()}, and give it back after the load",
        stacklevel=4,
    )
