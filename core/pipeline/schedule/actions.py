"""A schedule is data: which stage lives where, and what each rank does in which order. Standard library only."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

COMPUTE = ("F", "B", "I", "W", "R")
COMMUNICATION = ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD")
KINDS = (*COMPUTE, *COMMUNICATION)
MAX_LENGTH = 12  # characters of a kind or a number
# longest kinds first: a regular expression takes the first alternative that fits
_KIND_PATTERN = "|".join(sorted(KINDS, key=len, reverse=True))
_ACTION_PATTERN = re.compile(rf"([0-9]+)({_KIND_PATTERN})([0-9]*)")


class Action(NamedTuple):
    """What a rank does next; as text `2I5` is kind I of stage 2 on microbatch 5.

    F forward; I input gradients, W weight gradients, B both; R recompute the forward (activation checkpointing);
    SEND_F, RECV_F outputs to and inputs from the neighbouring stage, SEND_B, RECV_B their gradients; UNSHARD,
    RESHARD, REDUCE_GRAD parameters and gradients of a whole stage (no microbatch).
    """

    kind: str
    stage: int
    microbatch: int | None = None

    def __str__(self) -> str:
        if self.microbatch is None:
            return f"{self.stage}{self.kind}"
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """The inverse of `str`. Raises ValueError."""
        match = _ACTION_PATTERN.fullmatch(text.strip())
        if match is None or max(map(len, match.groups())) > MAX_LENGTH:
            raise ValueError(
                f"{text[:40]!r} is not an action; write stage, kind, microbatch as in 2I5, kinds: {', '.join(KINDS)}"
            )
        stage, kind, microbatch = match.groups()
        return cls(kind, int(stage), int(microbatch) if microbatch else None)


Order = tuple[Action, ...]


@dataclass(frozen=True)
class Schedule:
    """placement[s] is the rank of stage s; orders[r] is what rank r does, in order.

    A schedule of compute actions (F, I, W, B, R) is complete: sends, receives and the rest are inferred from it
    by `lower`. Pure, hashable, the same on every rank.
    """

    placement: tuple[int, ...]
    orders: tuple[Order, ...]
    name: str = "custom"

    @classmethod
    def make(
        cls, placement: Iterable[int], orders: Iterable[Iterable[Action]], name: str = "custom"
    ) -> "Schedule":
        """A schedule from any iterables: stages' ranks, and one order of actions per rank."""
        return cls(tuple(placement), tuple(tuple(order) for order in orders), name)

    @property
    def ranks(self) -> int:
        """How many ranks it runs on."""
        return len(self.orders)

    @property
    def stages(self) -> int:
        """How many stages it has."""
        return len(self.placement)

    @cached_property
    def microbatches(self) -> int:
        """How many microbatches it processes."""
        microbatches = (action.microbatch for action in chain.from_iterable(self.orders))
        return 1 + max((index for index in microbatches if index is not None), default=-1)

    @cached_property
    def recomputed(self) -> frozenset[tuple[int, int | None]]:
        """(stage, microbatch) of every R."""
        actions = chain.from_iterable(self.orders)
        return frozenset(
            (action.stage, action.microbatch) for action in actions if action.kind == "R"
        )

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, ascending."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    def text(self) -> str:
        """One line for the placement, one per rank; `parse` is the inverse."""
        lines = [f"{self.name}: {' '.join(map(str, self.placement))}"]
        lines += [" ".join(map(str, order)) for order in self.orders]
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """From `text()`. Raises ValueError: something that is not an action, or no placement."""
        head, *rows = text.removesuffix("\n").split("\n")
        name, colon, placement_text = head.rpartition(":")
        # `isdecimal` alone would take other scripts' digits, and a number of any length
        ranks = placement_text.split()
        are_numbers = all(
            rank.isascii() and rank.isdecimal() and len(rank) < MAX_LENGTH for rank in ranks
        )
        if not colon or not ranks or not are_numbers:
            raise ValueError(
                f"a schedule's text starts with `name: rank of stage 0, of stage 1 ..`, got {head[:60]!r}"
            )
        orders = [[Action.parse(word) for word in row.split()] for row in rows]
        return cls.make(map(int, ranks), orders, name)


def looped(ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Placement 0 1 .. P-1, 0 1 .. P-1, ...: Megatron's virtual pipeline stages."""
    return tuple(stage % ranks for stage in range(ranks * chunks))


def v_shape(ranks: int, chunks: int = 2) -> tuple[int, ...]:
    """Placement 0 1 .. P-1, P-1 .. 1 0: the first and the last stage share rank 0 (a zigzag for more chunks)."""
    placement: list[int] = []
    for chunk in range(chunks):
        goes_down = chunk % 2 == 0
        placement += range(ranks) if goes_down else reversed(range(ranks))
    return tuple(placement)


def check_placement(placement: Sequence[int], ranks: int) -> None:
    """Raise ValueError unless every rank 0 .. ranks-1 has a stage and no other rank has."""
    without_stage = sorted(set(range(ranks)) - set(placement))
    if without_stage:
        raise ValueError(
            f"the placement {tuple(placement)} gives no stage to rank {without_stage[0]} of {ranks} ranks; each "
            "needs at least 1 stage"
        )
    unknown_ranks = sorted(set(placement) - set(range(ranks)))
    if unknown_ranks:
        raise ValueError(
            f"the placement {tuple(placement)} puts a stage on rank {unknown_ranks[0]}, but there are {ranks} ranks, "
            f"0 to {ranks - 1}"
        )
