"""Are replicas told the same things? Rates, changes of `p.grad`, weights written by hand, and who reads a gradient.

Replicas stay equal because each does the same to the same numbers. Where a program brings in numbers of a rank's own
(a rate from its own loss, noise of its own generator, a checkpoint that one rank loads) nothing fails: they drift
apart, or a step stitches weights together from different models. So a few numbers per rank travel with the gradient
norm, or go ahead of what a program reads of `p.grad`, and are compared before anything moves.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from core.data_parallel.buffers.buffers import Buffer
from core.data_parallel.frozen import FrozenWeights
from core.parallel_state.collectives import Group, all_gather
from core.parallel_state.collectives.checks import MODULUS, checksum
from core.parallel_state.environment import HostCopy, reading_waits
from core.parallel_state.layout import layout_of
from core.parallel_state.state import ParallelState

# steps between two looks at an accelerator's flags, which are copied to the host meanwhile
READ_EVERY = 64
# flags per float64, which holds integers of up to 53 bits exactly
BITS = 48
# whose numbers must be the same: of options, changes of p.grad, dense weights, experts' weights, what is asked for
_HOLDERS = ("tp-dp-cp", "dp-cp", "dp-cp", "edp", None)
_WEIGHTS = slice(2, 4)


def crc(facts: Any) -> float:
    """A number that stands for what `repr` shows, the same in every process; never 0."""
    return float(zlib.crc32(repr(facts).encode()) + 1)


class Agreement:
    """Compares ranks that hold the same parameters; the verdict is the same on every rank.

    A rank's row: one number of the caller's, `num_words` words of flags, then one number per line of `_HOLDERS`.
    Rows of a step and of a read of `p.grad` have one length and go over one group, so that a rank that steps and one
    that reads notice each other, where other collectives would take each other's messages.
    """

    def __init__(
        self,
        ps: ParallelState,
        buffers: Sequence[Buffer],
        num_parameters: int,
        frozen: FrozenWeights | None = None,
    ) -> None:
        self._ps = ps
        self._buffers = buffers
        self._frozen = frozen or FrozenWeights()
        self.num_words = -(-num_parameters // BITS)
        world_size = ps.grid.config.world_size
        first_of = torch.zeros(len(_HOLDERS), world_size, dtype=torch.int64)
        for number, axes in enumerate(_HOLDERS):
            for ranks in ps.grid.all_groups(axes) if axes else ():
                first_of[number, list(ranks)] = ranks[0]
        # with whom each rank is compared
        self._first = first_of.to(ps.device)
        self._differed = torch.zeros_like(self._first, dtype=torch.bool)
        # ranks whose weights differ, and may do so until the next meeting
        self._passing: Tensor | None = None
        # of an accelerator, under way
        self._flag: HostCopy | None = None
        self._no_numbers = torch.zeros(3, dtype=torch.float64, device=ps.device)
        # Ranks of other stages do not come to a read of `p.grad`; without stages all do.
        group = ps.world if ps.size("pp") == 1 else ps.group("dp-cp")
        self._group: Group | None = group if ps.size("dp-cp") > 1 else None
        # in a step of an optimizer of torch's, before which ranks have met: what it reads it reads alike
        self.in_optimizer = False
        self.meetings = 0  # of all ranks: steps, and reads

    # what is compared

    def weights(self, *, look: bool) -> Tensor:
        """Checksums of dense and of experts' weights that are whole here: [2]; 0 where nobody wrote, but to look."""
        totals: list[Tensor | float] = [0.0, 0.0]
        for buffer in self._buffers:
            kind = 0 if buffer.bucket.group == "dp-cp" else 1
            if (look or buffer.written) and buffer.whole_for_program:
                totals[kind] = totals[kind] + (checksum(buffer.values) + 1).double()
            if buffer.written_in_unit is not None:
                totals[kind] = totals[kind] + buffer.written_in_unit.double()
        if look or self._frozen.written:
            for kind, number in self._frozen.checksums():
                totals[kind] = totals[kind] + number
        if not any(isinstance(total, Tensor) for total in totals):
            return self._no_numbers[:2]
        return torch.stack(
            [torch.as_tensor(total, device=self._ps.device).double() % MODULUS for total in totals]
        )

    def message(
        self, missing_bits: Tensor, options: float, changes: Tensor, *, step: int
    ) -> Tensor:
        """Of a step: flags, and this rank's numbers. options: 0 of those that lie on a device.

        Weights are looked at where they were written, and in steps 1, 2, 4, 8 ...: writes to `.data` leave no trace.
        """
        numbers = self._no_numbers
        if self._ps.world is not None:
            look = not step & (step - 1)
            written = self._frozen.look_for_writes()
            in_buffers = [
                buffer.written or buffer.written_in_unit is not None for buffer in self._buffers
            ]
            if look or written or any(in_buffers):
                numbers = torch.cat((self.weights(look=look), self._no_numbers[:1]))
        return torch.cat(
            (missing_bits, missing_bits.new_full((1,), options), changes.reshape(1), numbers)
        )

    # before an update

    def compare(
        self,
        rows: Sequence[Tensor],
        step: int,
        asked_for: str = "nobody, its optimizer steps",
        may_pass: bool = False,
    ) -> None:
        """Raises ValueError, on every rank, before the update."""
        self.meetings += 1
        if len(rows) == 1:
            return
        numbers = torch.stack(list(rows))[:, -len(_HOLDERS) :].t()
        if len(rows) == self._first.shape[1]:
            first = self._first
        else:
            first = torch.zeros_like(self._first[:, : len(rows)])
        differs = numbers != numbers.gather(1, first)
        before, self._passing = self._passing, differs[_WEIGHTS].clone() if may_pass else None
        if may_pass:
            differs[_WEIGHTS] &= before if before is not None else False
        # who has not written says nothing: nobody can ask again there
        if reading_waits(self._ps.device):
            differs[_WEIGHTS] &= (numbers[_WEIGHTS] != 0) & (
                numbers.gather(1, first)[_WEIGHTS] != 0
            )
            if not self._any_differed_before(differs, step):
                return
            differs = self._differed
        else:
            if bool(differs[_WEIGHTS].any()) and not bool(differs[-1].any()):
                # what one rank wrote may be what was there
                differs[_WEIGHTS] = self._compare_weights(first)
            if not bool(differs.any()):
                return
        # who does something else at all is told first
        if bool(differs[-1].any()):
            which = len(_HOLDERS) - 1
        else:
            which = int(differs.any(1).nonzero()[0])
        rank = int(differs[which].nonzero()[0])
        ranks = range(len(rows)) if first is self._first else self._group.ranks  # type: ignore[union-attr]
        text = _MESSAGES[which].format(
            rank=ranks[rank], holder=ranks[int(first[which, rank])], asked_for=asked_for
        )
        raise ValueError(f"step {step + 1}: {text}")

    def _compare_weights(self, first: Tensor) -> Tensor:
        """Look at all weights: which ranks' differ, [2, ranks]."""
        if first.shape[1] == self._first.shape[1]:
            group = self._ps.world
        else:
            group = self._group
        numbers = all_gather(self.weights(look=True), group).view(-1, 2).t()
        return numbers != numbers.gather(1, first[_WEIGHTS])

    def _any_differed_before(self, differs: Tensor, step: int) -> bool:
        """Of an accelerator: whether ranks differed in any step, as it was known `READ_EVERY` steps ago."""
        if differs.shape != self._differed.shape:
            return False
        self._differed |= differs
        if step % READ_EVERY:
            return False
        before = self._flag
        self._flag = HostCopy(self._differed.any())
        return before is not None and bool(before.read())

    # before a read of p.grad, or a step of torch's optimizer

    def meet(
        self,
        asked_for: str,
        facts: Any,
        step: int,
        *,
        options: float = 0.0,
        changes: Tensor | float = 0.0,
        words: Sequence[int] = (),
        look: bool = False,
        may_pass: bool = False,
    ) -> list[Tensor]:
        """All ranks are about to do the same with `p.grad`. Returns their words, on the device. One all-gather.

        asked_for: what is done, for the message. facts: what must be the same. look: at the weights, too.
        may_pass: other weights are refused if they were others in the meeting before, too.
        Raises ValueError, on every rank: one does something else, or was told something else.
        """
        if self._group is None:
            return []
        row = torch.zeros(
            1 + self.num_words + len(_HOLDERS), dtype=torch.float64, device=self._ps.device
        )
        if words:
            row[1 : 1 + self.num_words] = torch.tensor(list(words), dtype=torch.float64)
        row[-5], row[-4], row[-1] = options, changes, crc(facts)
        if look:
            row[-3:-1] = self.weights(look=True)
            if self._group is not self._ps.world:
                # experts: other ranks of the group hold others
                row[-2] = 0.0
        rows = list(all_gather(row, self._group).view(-1, row.numel()))
        self.compare(rows, step, asked_for, may_pass)
        return [other[1 : 1 + self.num_words] for other in rows]

    @torch.no_grad()
    def compare_outside(self, parameters: Sequence[Tensor], optimizer: str) -> None:
        """Parameters that share an optimizer with those of a `DataParallel`, but lie in none: who sums them?

        Their gradients must be the same on all replicas: summed by hand, by DDP, or of the same data. Those of
        experts and of sharded classes (DTensor) differ by design. One all-gather of one number each.
        Raises ValueError, on every rank, before anything is updated.
        """
        # tensor ranks and stages may hold different parts
        group = self._ps.group("dp-cp")
        assert group is not None, "nobody watches updates where there are no replicas"
        checksums = torch.stack(
            [_checksum_of_gradient(parameter, self._ps.device) for parameter in parameters]
        )
        rows = all_gather(checksums, group).view(-1, len(parameters))
        differs = rows != rows[:1]
        if not bool(differs.any()):
            return
        rank, number = (int(index) for index in differs.nonzero()[0])
        raise ValueError(
            f"{optimizer}.step(): its parameters hold {len(parameters)} that lie in no DataParallel; the gradient of "
            f"number {number} of them, of shape {list(parameters[number].shape)}, is not the same on ranks "
            f"{group.ranks[0]} and {group.ranks[rank]}: nobody sums it over the replicas, which would drift apart. "
            "Make the DataParallel of a module that holds it too, wrap it by DistributedDataParallel, or average its "
            "gradient over parallel_state.get_data_parallel_group() before the step"
        )

    @property
    def is_shared(self) -> bool:
        """Whether there are replicas, on other ranks."""
        return self._group is not None

    @property
    def device(self) -> torch.device:
        """Where the weights are; what is compared is gathered from there."""
        return self._ps.device

    @property
    def is_needed(self) -> bool:
        """Whether ranks that do different things would break each other's messages: those of gloo."""
        group = self._group
        return group is not None and not self.in_optimizer and self._ps.device.type in group.gloo


def _checksum_of_gradient(parameter: Tensor, device: torch.device) -> Tensor:
    """[], int64; 0 where replicas need not agree."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient = parameter.grad
    if (
        type(gradient) is not Tensor
        or gradient.layout is not torch.strided
        or "ep" in layout_of(parameter).split
    ):
        return torch.zeros((), dtype=torch.int64, device=device)
    return checksum(gradient).to(device)


def options_of(param_groups: Sequence[Mapping[str, Any]]) -> float:
    """Stands for all options of torch's param groups; 0 where one lies on a device: reading it would wait."""
    facts = []
    for group in param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        tensors = [value for value in options.values() if isinstance(value, Tensor)]
        if any(reading_waits(tensor.device) for tensor in tensors):
            return 0.0
        facts.append(
            [
                (key, value.tolist() if isinstance(value, Tensor) else value)
                for key, value in options.items()
            ]
        )
    return crc(facts)


_OTHER_OPTIONS = (
    "the options in param_groups (lr, weight_decay ...) of rank {rank} are not those of rank {holder}, which holds "
    "the same parameters or parts of them. A rate must be the same on all: give a scheduler the loss of all ranks "
    "(averaged over get_data_parallel_group() and the pipeline), not one rank's"
)
_OTHER_GRADIENTS = (
    "rank {rank} has put other values into p.grad, or changed it by other numbers, than rank {holder}, which trains "
    "the same parameters on other data; each would update its part by its own. Draw noise with one seed on both, sum "
    "what comes of a rank's own loss or of torch.autograd.grad over parallel_state.get_data_parallel_group(), or "
    "change gradients inside of backward by parameter.register_hook, before they are summed"
)
_OTHER_WEIGHTS = (
    "the weights of rank {rank} are not those of rank {holder}, which trains the same parameters on other data: "
    "written by hand with other values, loaded or drawn on one rank only, updated by a rank's own gradient "
    "(torch.autograd.grad), or by a forward from its own inputs (Embedding(max_norm=)). "
    "Load and write the same on all ranks, and average gradients over parallel_state.get_data_parallel_group(), or "
    "call loss.backward() and an optimizer"
)
_OTHER_READS = (
    "here p.grad is asked for by {asked_for}; not so on every rank (`if rank == 0: print(p.grad.norm())`?): its "
    "values lie on all ranks, so all must ask alike; compute on every rank, norm = p.grad.norm(), and print on one"
)
_MESSAGES = (_OTHER_OPTIONS, _OTHER_GRADIENTS, _OTHER_WEIGHTS, _OTHER_WEIGHTS, _OTHER_READS)
