"""Who follows what a program makes of a batch that was cut for context ranks: entries [b, s/cp], a rank's rows."""

import weakref
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from core.parallel_state.by_hand import split_axes
from core.parallel_state.by_hand.split_tensor import SplitTensor
from core.parallel_state.collectives import Group

# attribute of a model in whose forwards without gradients hooks were given a context rank's rows
HOOKED = "hooks_saw_rows"


class FollowsBatches(Protocol):
    """Follows the batches of one model."""

    def follow_batch(self, batch: Mapping[str, Any], whole: Mapping[str, Any]) -> None:
        """`batch` was cut of `whole` sequences; a forward may follow."""
        ...

    def follow_rows(self, rows: Tensor, whole: Tensor) -> None:
        """Something else [b, s] was cut."""
        ...


# of the model that was made last over these ranks: one tells
_FOLLOWERS: "weakref.WeakKeyDictionary[Group, weakref.ref[FollowsBatches]]" = (
    weakref.WeakKeyDictionary()
)


def follow_batches(group: Group, follower: FollowsBatches) -> None:
    """Let `follower` see what is cut for the context ranks of `group` from now on."""
    _FOLLOWERS[group] = weakref.ref(follower)


def _follower(group: Group | None) -> FollowsBatches | None:
    reference = _FOLLOWERS.get(group) if group is not None else None
    return reference() if reference is not None else None


def batch_is_cut(group: Group | None, batch: Mapping[str, Any], whole: Mapping[str, Any]) -> None:
    """`batch` has the rows of this rank of `group`; whole: the sequences, tokens [b, s] among them."""
    if (follower := _follower(group)) is not None:
        follower.follow_batch(batch, whole)


def rows_are_cut(group: Group | None, rows: Tensor, whole: Tensor) -> None:
    """`rows` [b, s/cp] are this rank's of `whole`, which belongs to a batch: advantages, weights, masks."""
    if (follower := _follower(group)) is not None:
        follower.follow_rows(rows, whole)


def followed_as(whole: Any, part: Tensor) -> Tensor:
    """`part`: some sequences of `whole`, or a copy of it, which is followed if that is."""
    if type(whole) is SplitTensor and not whole.partial and part is not whole:
        follower = whole.seen_by()
        if follower is not None and len(whole.axes) == part.dim():
            follower.mark(part, (*split_axes.plain(part.shape[:1]), *whole.axes[1:]))
            if (sequences := getattr(whole, "of_sequences", None)) is not None:
                part.of_sequences = sequences  # type: ignore[attr-defined]
    return part
