"""The phases of one step: what has become of the gradients, and which calls may come next.

| phase | backward | finish | step | zero_grad |
|---|---|---|---|---|
| fresh | accumulating | summed | stepped, nothing moves | fresh |
| accumulating | accumulating | summed | stepped | fresh, sums that have begun are completed |
| summed | accumulating, on top of the sums | refused | stepped | fresh |
| summed, by an executor | refused: its part would be in no sum | refused | stepped | fresh |
| kept, of an executor | stepped: what comes is dropped | refused | stepped | fresh |
| stepped | stepped: what comes is dropped, as `zero_grad` will | refused | refused | fresh |

Kept: an optimizer of torch's has used all of them, and `.grad` can still be read. Of a plain loop it is as summed:
torch adds to what stands in `.grad`.
"""

from enum import IntEnum


class Phase(IntEnum):
    """Of the gradients of one `DataParallel`; fresh and accumulating differ by what has arrived."""

    OPEN = 0  # fresh or accumulating: contributions are added
    SUMMED = 1  # `finish` has run
    STEPPED = 2  # an optimizer has used them up
    KEPT = 3  # an optimizer of torch's has used them; they can be read

    def refuse_second(self) -> None:
        """Raise ValueError: gradients are summed and used once."""
        if self is not Phase.OPEN:
            raise ValueError(
                "DataParallel: a second step or finish() after 1 zero_grad() would sum again what is already summed; "
                "call zero_grad() after each optimizer step (microbatches are how to accumulate), model.zero_grad() "
                "where an optimizer has some of the parameters"
            )

    def drops(self, name: str) -> bool:
        """Whether a contribution to parameter `name` that comes now is for nobody.

        After an optimizer's step it is: `zero_grad` comes before the next (a second network's loss, a saliency map).
        Raises RuntimeError: between `finish` and the step it would be lost.
        """
        if self is Phase.SUMMED:
            raise RuntimeError(
                f"a backward reached {name} after finish() had summed the gradients of this step, as executors do at "
                "the end of theirs (in a plain loop: while p.grad of one parameter is another's); call backward "
                "before it, or step and zero_grad() before the next. What is to be added to an executor's sums "
                "belongs into its loss_fn"
            )
        return self in (Phase.STEPPED, Phase.KEPT)
