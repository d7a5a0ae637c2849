"""The base of those who know what some functions make of rows."""

from dataclasses import replace
from typing import Any

from core.context_parallel.rows.gradients import GradientRows
from core.context_parallel.rows.wholes import Wholes
from core.parallel_state.by_hand.split_tensor import Call, Follower, SplitTensor


class FollowsRows(Follower):
    """Knows what some functions make of rows; all of them are repeated as well."""

    wholes: Wholes

    def sizes(self, args: tuple, kwargs: dict[str, Any], result: Any) -> Any:
        return self.wholes.sizes(args, kwargs, result)

    def hear(self, call: Call) -> None:
        """After it; `weights.expand_as(losses)` makes no rows of values of the program's own."""
        # `hidden.grad * hidden`: a gradient's
        gradients = [x for x in call.inputs if isinstance(x.seen_by(), GradientRows)]
        if gradients:
            gradients[0].seen_by().follow(replace(call, inputs=gradients))  # type: ignore[union-attr]
        elif not (call.name.endswith("_as") and not isinstance(call.args[0], SplitTensor)):
            self.wholes.heard(call, self.follow)
