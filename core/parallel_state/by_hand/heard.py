"""What was called on a parameter by hand, and what its user reads."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from core.parallel_state.by_hand.functions import WRONG_ON_SHARDS
from core.parallel_state.layout import layout_of

_FULL_TENSOR_REMEDY = (
    "core.tensor_parallel.full_tensor(parameter) is the whole, with a gradient; or sum over "
    "parallel_state.get_tensor_model_parallel_group()"
)
_FILE_REMEDY = (
    "core.dist_checkpointing.save(model.sharded_state_dict(), directory) writes the whole model, "
    "core.tensor_parallel.full_tensor(parameter) is the whole; or write a file per rank"
)
_STATE_REMEDY = (
    "choose elements by their values, or by this rank's rows; sum over "
    "parallel_state.get_tensor_model_parallel_group()"
)
_GUARD_REMEDY = (
    "it found something that the other ranks' parts may not have, and what one rank decides by it the others do not. "
    "Decide by what all have: flag = torch.isfinite(g).all().int(); torch.distributed.all_reduce(flag, "
    "op=torch.distributed.ReduceOp.MIN, group=parallel_state.get_tensor_model_parallel_group())"
)
_GRADIENT_REMEDY = (
    "core.tensor_parallel.full_tensor(p.grad, like=p) is one of them whole; core.optimizer.get_grad_norm(parameters) "
    "is the norm of the whole model's, clip_grad_norm_ beside it clips by it"
)


# a norm that tensor ranks have taken together: of one parameter it is right, of several it is of a pipeline rank's
WHOLE_NORM = "whole norm"


# of a gradient that is summed later: what is made of a part is no part of what is made of the whole
OF_WHOLE_GRADIENT = ("clamped", "compared", "signed", "reduction")


@dataclass(frozen=True)
class Heard:
    """A function `name` of a kind: `WRONG_ON_SHARDS`, "sum", "combined" (numbers of several parameters), WHOLE_NORM;
    of gradients also those of `Change`.

    Called on a parameter or its gradient, or on what elementwise functions made of either.
    """

    parameter: Parameter
    of_gradient: bool
    kind: str = ""
    name: str = ""
    joined: bool = False  # several of them, by cat, stack or a function of a list
    reduced: str = ""  # the function that made one number of it
    of_state: str = (
        ""  # the name of an optimizer's state, exp_avg: of that instead of the parameter
    )
    is_penalty: bool = False  # numbers of several weights, summed with a gradient
    factor: float | None = None  # of a gradient that is "scaled" or "applied", where it is known
    is_number: bool = True  # of a reduction: one number, not one for each row
    along_whole_dims: bool = False  # each rank has all of what was reduced: rows of a column linear
    result: Tensor | None = None  # of a reduction, if it wants a gradient
    group: Any = None  # of an all_reduce by hand, kind "sum"; None is the world
    adds: bool = False  # whether it adds up; it may as well average, or send one rank's

    @property
    def sees_only_shard(self) -> bool:
        """Whether tensor or expert ranks hold the rest of what was reduced, multiplied or drawn for."""
        layout = layout_of(self.parameter)
        is_split = bool({"tp", "ep"} & layout.split.keys())
        is_shard = is_split and tuple(self.parameter.shape) != layout.padded_shape()
        # how much memory states take is each rank's own
        if self.of_state and self.kind == "shape":
            return False
        return is_shard and self.kind in WRONG_ON_SHARDS and not self.along_whole_dims

    def explain(self, error: Exception, name: str) -> None:
        """torch does not take sizes or row numbers of the whole in a function `name`: say why."""
        called = replace(self, kind="product", name=name)
        if called.sees_only_shard:
            error.add_note(called.message())

    def message(self, *modules: nn.Module) -> str:
        """What a user reads of a function of a part; the parameter is one of the modules'."""
        named = (pair for module in modules for pair in module.named_parameters())
        name = next((name for name, p in named if p is self.parameter), "a parameter")
        shape = list(self.parameter.shape)
        full_shape = list(layout_of(self.parameter).padded_shape())
        subject = "the gradient of " if self.of_gradient else ""
        if self.of_state:
            subject = f"{self.of_state} of "
        if self.kind == "shape":
            remedy = (
                "buffers of that shape are right; widths, fan-ins, counts and draws of the whole want "
                "core.parallel_state.layout_of(parameter).shape"
            )
        elif self.kind == "file":
            return f"a file gets {shape} of {subject}{name}, this rank's part of {full_shape}: {_FILE_REMEDY}"
        elif self.of_state:
            remedy = _STATE_REMEDY
        elif self.kind == "index":
            whole = "full_tensor(p.grad, like=p)" if self.of_gradient else "full_tensor"
            remedy = f"rows and columns by number are this rank's; core.tensor_parallel.{whole} gives the whole"
        elif self.name in ("all", "any"):
            remedy = _GUARD_REMEDY
        elif self.of_gradient:
            remedy = _GRADIENT_REMEDY
        elif self.kind == "draw":
            remedy = "ranks that are seeded alike draw the same for their parts; give each a generator of its own"
        else:
            remedy = _FULL_TENSOR_REMEDY
        return f"{self.name} by hand sees {shape} of {subject}{name}, this rank's part of {full_shape}: {remedy}"
