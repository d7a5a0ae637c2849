"""Cut matrices put together on one rank each, changed there as a whole, and their parts brought back."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from core.optimizer.state.matrices import MatrixRound
from core.parallel_state.collectives import Group, all_to_all


class MatrixExchange:
    """Parts of matrices on their way to the owners, and back: an all-to-all each way.

    owners: per matrix a rank of `group`. sizes: per matrix the elements of each rank's part. A group of one rank
    (None) sends nothing.
    """

    def __init__(
        self, owners: Sequence[int], sizes: Sequence[Sequence[int]], group: Group | None
    ) -> None:
        self._group = group
        self._sizes = sizes
        self._ranks = 1
        self._rank = 0
        if group is not None:
            self._ranks = group.size
            self._rank = group.rank
        self.owned = [number for number, owner in enumerate(owners) if owner == self._rank]
        self._by_owner = sorted(range(len(owners)), key=owners.__getitem__)
        self._to_send = [0] * self._ranks
        for number, owner in enumerate(owners):
            self._to_send[owner] += sizes[number][self._rank]
        self._to_receive = [sum(sizes[n][r] for n in self.owned) for r in range(self._ranks)]

    def to_owners(self, parts: Sequence[Tensor]) -> list[list[Tensor]]:
        """This rank's flat part of each matrix -> of each that it owns every rank's part. All-to-all."""
        if self._group is None:
            return [[part] for part in parts]
        arrived = all_to_all(
            torch.cat([parts[number] for number in self._by_owner]),
            self._group,
            send_rows=self._to_send,
            receive_rows=self._to_receive,
        )
        # rank by rank, and of each rank matrix by matrix
        sizes = []
        for rank in range(self._ranks):
            sizes += [self._sizes[number][rank] for number in self.owned]
        pieces = arrived.split(sizes)
        count = len(self.owned)
        return [list(pieces[place::count]) for place in range(count)]

    def back(self, parts: Sequence[Sequence[Tensor]], like: Tensor) -> list[Tensor]:
        """The inverse: every rank's part of each matrix that this one owns -> its own part of each. All-to-all.

        like: says dtype and device where this rank owns none.
        """
        if self._group is None:
            return [part for (part,) in parts]
        # as they came: rank by rank, and of each rank matrix by matrix
        flat = []
        for rank in range(self._ranks):
            flat += [rank_parts[rank] for rank_parts in parts]
        arrived = all_to_all(
            torch.cat([like.new_empty(0), *flat]),
            self._group,
            send_rows=self._to_receive,
            receive_rows=self._to_send,
        )
        pieces = arrived.split([self._sizes[n][self._rank] for n in self._by_owner])
        place_of = {number: place for place, number in enumerate(self._by_owner)}
        return [pieces[place_of[number]] for number in range(len(place_of))]


def change_whole(
    plan: MatrixRound, pieces: Sequence[Tensor], change: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """change([rows, columns]) of every full matrix of a round; takes and gives this rank's flat pieces, in order.

    Each matrix is changed on the rank that owns it, and where ranks hold copies of it (data ranks at stage 0,
    tensor ranks of what they do not split) by each of them. Collectives: all-to-alls there and back over the data
    ranks, and inside, over the tensor ranks.
    """
    data_ranks = plan.data_ranks
    if data_ranks is None:
        count = 1
    else:
        count = data_ranks.size
    piece_sizes = []
    for matrix in plan.matrices:
        spans = [matrix.piece(rank) for rank in range(count)]
        piece_sizes.append([stop - start for start, stop in spans])
    over_data = MatrixExchange(plan.data_owners, piece_sizes, data_ranks)
    like = pieces[0]

    # Of the matrices that this data rank owns: the whole part, then from all tensor ranks the full matrix.
    parts = [torch.cat(of_ranks) for of_ranks in over_data.to_owners(pieces)]
    owned_matrices = [plan.matrices[number] for number in over_data.owned]
    owners = [plan.part_owners[number] for number in over_data.owned]
    cut_over = plan.cut_over
    if cut_over is None:
        count = 1
    else:
        count = cut_over.size
    over_parts = MatrixExchange(owners, [[part.numel()] * count for part in parts], cut_over)
    changed = []
    if owned_matrices:
        arrived = over_parts.to_owners(parts)
        for number, of_ranks in zip(over_parts.owned, arrived, strict=True):
            matrix = owned_matrices[number]
            changed.append(matrix.take_apart(change(matrix.put_together(of_ranks))))
        parts = over_parts.back(changed, like)
    returned = []
    for number, part in zip(over_data.owned, parts, strict=True):
        returned.append(list(part.split(piece_sizes[number])))
    return over_data.back(returned, like)
