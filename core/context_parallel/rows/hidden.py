"""What a program makes of hidden states that its hooks are given, [s/cp, b, h] of a context rank's rows."""

from typing import Any

from torch import Tensor

from core.context_parallel.rows.outputs import Sums
from core.context_parallel.rows.owner import Owner
from core.context_parallel.rows.uses import is_logarithm, is_rate
from core.parallel_state.by_hand.part_sizes import scales_by_a_part, sizes_of_parts
from core.parallel_state.by_hand.split_tensor import Call

SIZE_REMEDY = (
    "Take the length of whole sequences, h.shape[0] * parallel_state.get_context_parallel_world_size(), or a number "
    "of the program's"
)


class HiddenSums(Sums):
    """Of one hidden state; also what is scaled by the number of its rows, as NEFTune's alpha / sqrt(L d)."""

    def __init__(self, owner: Owner, hidden: Tensor, *, judges_totals: bool = True) -> None:
        super().__init__(owner, hidden, judges_totals=judges_totals)
        # sizes of the rows that C functions took
        self._as_floats: set[int] = set()

    def sizes(self, args: tuple, kwargs: dict[str, Any], result: Any) -> Any:
        """The same; that of the rows is a number that is known again."""
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        group = self._owner.group
        assert group is not None
        if is_logarithm():
            self._as_floats.add(len(args[0]))
        known = sizes_of_parts(result, args[0].axes, dim, group.size, self._as_floats)
        return super().sizes(args, kwargs, known)

    @property
    def makes_rates(self) -> bool:
        """Whether the program has made of the number of rows what is no size: a root, a float."""
        return bool(self._as_floats)

    def follow(self, call: Call) -> None:
        if call.name == "len" and (is_rate() or is_logarithm()):
            self._as_floats.add(call.result)
        values = (call.args, call.kwargs)
        of_rows = any(not x.partial for x in call.inputs)
        if of_rows and scales_by_a_part(call.name, values, self._as_floats):
            what = f"{call.name} scales hidden states by the number of rows which are this context rank's"
            self._owner.tell(what, SIZE_REMEDY)
        super().follow(call)
