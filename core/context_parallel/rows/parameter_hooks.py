"""What a program's hooks do with gradients of parameters, of which a context rank makes the part of its own rows."""

from torch import nn

from core.context_parallel.rows.owner import Owner
from core.parallel_state.by_hand import ByHand, Heard
from core.parallel_state.by_hand.heard import OF_WHOLE_GRADIENT
from core.parallel_state.by_hand.hooked import has_hooks
from core.parallel_state.layout import layout_of

_REMEDY = (
    "A factor or a mask is right there; a limit, a sign or a norm is of the whole gradient: change p.grad after the "
    "backward, when DataParallel has summed it, or clip by core.optimizer.clip_grad_norm_"
)


class ParameterHooks:
    """Of one model: listened to in the backward of some forwards."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._by_hand = ByHand(self._hear, gradients=True)
        self.listens = False

    def attach(self, model: nn.Module) -> None:
        """Listen until `detach`; without hooks it costs nothing. Of what tensor ranks split a `SplitWatch` hears."""
        hooked = [p for p in model.parameters() if has_hooks(p) and not _is_part(p)]
        if hooked:
            self.listens = self._by_hand.open_for_hooks(hooked)

    def detach(self) -> None:
        """Let the hooks run as they are."""
        self.listens = False
        self._by_hand.close()

    def _hear(self, heard: Heard) -> None:
        if heard.of_gradient and heard.kind in OF_WHOLE_GRADIENT:
            what = (
                f"{heard.name} in a hook on the gradient of a parameter, {list(heard.parameter.shape)}, takes that "
                "of rows which are this context rank's"
            )
            self._owner.tell(what, _REMEDY)


def _is_part(parameter: nn.Parameter) -> bool:
    return tuple(parameter.shape) != layout_of(parameter).padded_shape()
