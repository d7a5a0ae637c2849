"""The weights of one bucket: a flat storage, parameters as views of it, gathered, freed and lent (ZeRO-3).

| weights are | read in the unit | read elsewhere | written | step |
|---|---|---|---|---|
| whole (stages 0 to 2) | there | there | kept | updated |
| freed (stage 3) | gathered before | lent, told once | lent, kept | updated |
| gathered: in a unit, or held | there | there | kept when freed | what was written is updated |
| lent: until the next step | there | there | kept | what was written is updated; then freed |
"""

import warnings
from collections.abc import Sequence
from functools import cached_property
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from core.data_parallel.weights.freed import Freed, Whole, set_data
from core.parallel_state.collectives import Group, own_part, start_gather_parts
from core.parallel_state.collectives.ops import PendingCollective
from core.parallel_state.flat import Bucket

Interval = tuple[int, int]
FREED = 2**30  # version of parameters that are not there: autograd's message shows it


def gone(tensor: Tensor) -> Tensor:
    """Stands where memory was given back: the shape is right, reading gives NaN, writing fails."""
    return tensor.new_full((1,) * tensor.dim(), torch.nan).expand(tensor.shape)


def without_memory(parameter: Tensor) -> bool:
    """Whether it only has a shape, and is to be filled later."""
    return parameter.numel() > 1 and not any(parameter.stride())


class Storage:
    """A flat tensor whose memory comes and goes, while views of it stay what they are."""

    def __init__(self, flat: Tensor) -> None:
        self.flat, self._bytes = flat, flat.untyped_storage().nbytes()

    @property
    def there(self) -> bool:
        """Whether it has memory."""
        return self.flat.untyped_storage().nbytes() > 0

    def take(self) -> None:
        """Memory, of no defined value."""
        self.flat.untyped_storage().resize_(self._bytes)

    def give_back(self) -> None:
        """Free the memory of whole parameters; shapes stay."""
        self.flat.untyped_storage().resize_(0)


class Weights:
    """What `Buffer` does with weights."""

    number: int
    bucket: Bucket
    parameters: list[Parameter]
    ranks: Group | None
    stage: int
    held: Interval
    dtype: torch.dtype
    _gathering: PendingCollective | None

    def _build_weights(self, device: torch.device) -> None:
        unfilled = all(map(without_memory, self.parameters))  # see core/data_parallel/buffers/meta.py
        flat = (torch.empty if unfilled and self.stage == 3 else torch.zeros)(
            self.bucket.size, dtype=self.dtype, device=device
        )
        self._whole = self._views(flat)
        with torch.no_grad():
            for view, parameter in zip(self._whole, self.parameters, strict=True):
                if not unfilled:
                    view.copy_(parameter)
        self._missing = [gone(p.detach()) for p in self.parameters] if self.stage == 3 else []
        self._tuple = tuple(self.parameters)
        self._classes = [type(p) for p in self.parameters]
        self._storage = Storage(flat)
        # stage 3. lent: whole until the next step, because somebody outside its unit reads it. kept: by `unshard`.
        # untraced: somebody has had its `.data`, where no version tells of writes
        self.lent = self.kept = self.untraced = False
        self.updates = 0  # a graph of before an update is refused by autograd, which compares versions
        self.told: list[str] = []  # of all buckets of one DataParallel: loans are told once
        self.weights = flat[slice(*self.held)]
        self.gathered = True
        if self.stage == 3:
            self.weights = torch.zeros_like(self.weights) if unfilled else self.weights.clone()
            for parameter in self.parameters:
                parameter.bucket = self  # type: ignore[attr-defined]
            self._point(self._whole)
            self._mark(self.updates)
            self.free()
        else:
            self._point(self._whole)

    def _views(self, flat: Tensor) -> list[Tensor]:
        pairs = zip(self.bucket.slots, self.parameters, strict=True)
        return [flat[slot.start : slot.stop].view(p.shape) for slot, p in pairs]

    def _point(self, views: Sequence[Tensor]) -> None:
        for parameter, view in zip(self.parameters, views, strict=True):
            set_data(parameter, view)

    def _mark(self, version: int) -> None:
        """Views of parameters that autograd saved look at the storage itself: of another version they are an error,
        where a freed storage would be a crash of the process."""
        torch._C._autograd._unsafe_set_version_counter(self._tuple, (version,) * len(self._tuple))

    @cached_property
    def words(self) -> str:
        """What errors call it."""
        names = [slot.name for slot in self.bucket.slots]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f"{names[0]}{more}"

    def put(self, index: int, whole: Tensor) -> None:
        """Take the values of parameter `index`; this rank keeps what it holds."""
        if self.stage < 3:
            self._whole[index].copy_(whole)
            return
        slot, (first, last) = self.bucket.slots[index], self.held
        start, stop = max(first, slot.start), min(last, slot.stop)
        if start < stop:
            part = whole.reshape(-1)[start - slot.start : stop - slot.start]
            self.weights[start - first : stop - first].copy_(part)

    def start_gather(self) -> None:
        """Stage 3: take memory for the whole bucket and ask for the other parts. All-gather over `ranks`."""
        if self.gathered or self._gathering is not None:
            return
        self._storage.take()
        flat = self._storage.flat
        assert self.ranks is not None
        with torch.no_grad():
            own_part(flat, self.ranks).copy_(self.weights)
        self._gathering = start_gather_parts(
            flat, self.ranks, tag=2 * self.number, what=f"the gather of {self.words}"
        )

    def gather(self) -> None:
        """Until the whole parameters are there (`start_gather` if it was not called)."""
        if self.gathered and self._gathering is None:
            return
        self.start_gather()
        self.wait()
        if not self.gathered:
            self.gathered = True
            self.untraced = False
            for parameter, kind in zip(self.parameters, self._classes, strict=True):
                parameter.__class__ = Whole if kind is Parameter else kind
            self._point(self._whole)
            self._mark(self.updates)

    def free(self, *, keep: bool = True) -> None:
        """Stage 3: give the memory of whole parameters back, if it is not lent; keep: what was written counts."""
        self.wait()
        if self.stage == 3 and not self.lent and (self.gathered or self._storage.there):
            if keep and self.gathered:
                self.take_weights()
            self._leave()
            self._storage.give_back()

    def _leave(self) -> None:
        if self.gathered:
            self.gathered = False
            self._point(self._missing)
            self._mark(FREED)
            for parameter, kind in zip(self.parameters, self._classes, strict=True):
                if kind is Parameter:
                    parameter.__class__ = Freed

    def lend(self) -> None:
        """Stage 3: somebody outside of the unit wants the values: whole until the next step. All-gather."""
        if self.gathered:
            return
        if not self.told:  # before the others are waited for
            self.told.append(self.words)
            warnings.warn(
                f"ZeRO stage 3: {self.words} was read outside of its module's forward: gathered, which every rank "
                "must do alike, and kept whole until the next step; what was taken out does not follow later steps. "
                "Around many reads write shard.unshard(model) ... shard.reshard(model); to save, "
                "sharded_state_dict(shard)",
                stacklevel=4,
            )
        self.gather()
        self.lent = True

    def take_weights(self) -> None:
        """What somebody wrote into whole parameters, or put in the place of their data, is what counts.

        Raises ValueError: of another dtype, shape or device.
        """
        if not self.gathered:
            return
        written = self.lent or self.kept or self.untraced
        for parameter, view in zip(self.parameters, self._whole, strict=True):
            if parameter.data_ptr() != view.data_ptr():
                self._adopt(parameter, view)
                written = True
            written = written or parameter._version != self.updates
        if self.stage < 3:
            return
        assert self.ranks is not None
        if written:
            self.weights.copy_(own_part(self._storage.flat, self.ranks))

    def _adopt(self, parameter: Parameter, view: Tensor) -> None:
        data = parameter.detach()
        if data.shape != view.shape or data.dtype != view.dtype or data.device != view.device:
            self.refuse_moved()
        view.copy_(data)
        set_data(parameter, view)

    def refuse_moved(self) -> NoReturn:
        """Raise ValueError: parameters are no views of the buffer any more, and cannot be made so."""
        raise ValueError(
            f"DataParallel: the values of {self.words} do not lie in its buffers any more (model.to() or half() "
            "after it was made?), so updates do not reach them; convert the model first"
        )

    def end_loan(self) -> None:
        """What was written while it was lent counts."""
        if self.lent:
            self.take_weights()
            self._take_back()

    def _take_back(self) -> None:
        """The end of a loan. Who still holds a tensor of it keeps that memory, and the values of then."""
        self._leave()
        flat = torch.empty_like(self._storage.flat)
        self._storage, self._whole, self.lent = Storage(flat), self._views(flat), False
        self._storage.give_back()

    def publish(self) -> None:
        """`weights` have changed: start to bring them to the other ranks. Stages 1, 2: all-gather over `ranks`."""
        self.updates += 1
        if self.stage < 3:
            moved = tuple(parameter._version + 1 for parameter in self._tuple)
            torch._C._autograd._unsafe_set_version_counter(self._tuple, moved)
        if self.stage in (1, 2) and self.ranks is not None:
            self._gathering = start_gather_parts(
                self._storage.flat, self.ranks, tag=2 * self.number, what=f"the gather of {self.words}"
            )
        elif self.stage == 3:
            if self.lent:
                self._take_back()
            self.free(keep=False)

    def wait(self) -> None:
        """Until what is under way has arrived."""
        if self._gathering is not None:
            pending, self._gathering = self._gathering, None
            pending.wait()
