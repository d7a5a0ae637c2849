"""The weights of one bucket: a flat storage with parameters as views of it; gathered, freed and lent under ZeRO-3.

| weights are | read in the unit | read elsewhere | written | step |
|---|---|---|---|---|
| full (stages 0 to 2) | there | there | kept | updated |
| freed (stage 3) | gathered before | lent, with a warning once | lent, kept | updated |
| gathered: in a unit, or unsharded | there | there | kept when freed | what was written is updated |
| lent: until the next step | there | there | kept | what was written is updated; then freed |
"""

import warnings
from collections.abc import Sequence
from functools import cached_property
from operator import attrgetter
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from core.data_parallel.weights.freed import FreedParameter, GatheredParameter, set_data
from core.data_parallel.weights.kept import ReplacedData
from core.parallel_state.by_hand.functions import program_level
from core.parallel_state.collectives import Group, own_part, start_gather_parts
from core.parallel_state.collectives.checks import checksum
from core.parallel_state.collectives.ops import PendingCollective
from core.parallel_state.flat import Bucket
from core.parallel_state.state import ParallelState

_version_of = attrgetter("_version")
Interval = tuple[int, int]
# version of parameters that are not there: autograd's message shows it
FREED = 2**30


def nan_placeholder(tensor: Tensor) -> Tensor:
    """Stands where memory was freed: the shape is right, reading gives NaN, writing fails."""
    return tensor.new_full((1,) * tensor.dim(), torch.nan).expand(tensor.shape)


def without_memory(parameter: Tensor) -> bool:
    """Whether it only has a shape (strides 0 of all axes that are longer than 1), and is to be filled later."""
    strides = [step for n, step in zip(parameter.shape, parameter.stride(), strict=True) if n > 1]
    return bool(strides) and not any(strides)


class Storage:
    """A flat tensor whose memory comes and goes, while views of it stay what they are."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self._bytes = flat.untyped_storage().nbytes()

    @property
    def has_memory(self) -> bool:
        """Whether it has memory."""
        return self.flat.untyped_storage().nbytes() > 0

    @property
    def is_lent_out(self) -> bool:
        """Whether somebody else has the memory, numpy say: it cannot be freed, and keeps its values."""
        return not self.flat.untyped_storage().resizable()

    def allocate(self) -> None:
        """Have memory, of no defined values."""
        self.flat.untyped_storage().resize_(self._bytes)

    def release(self) -> None:
        """Free the memory; views keep their shapes."""
        self.flat.untyped_storage().resize_(0)


class Weights:
    """The weights' half of `Buffer`; the gradients' half is in buffers.py."""

    ps: ParallelState
    number: int
    bucket: Bucket
    parameters: list[Parameter]
    ranks: Group | None
    stage: int
    updated_interval: Interval
    dtype: torch.dtype
    _gathering: PendingCollective | None

    def _build_weights(self, device: torch.device) -> None:
        # see core/data_parallel/buffers/meta.py
        on_meta = all(map(without_memory, self.parameters))
        # empty memory that is never written costs nothing, and a model on meta may be too large for one device
        new_tensor = torch.empty if on_meta and self.stage == 3 else torch.zeros
        flat = new_tensor(self.bucket.size, dtype=self.dtype, device=device)
        self._full_weights = self._views(flat)
        with torch.no_grad():
            for view, parameter in zip(self._full_weights, self.parameters, strict=True):
                if not on_meta:
                    view.copy_(parameter)
        if self.stage == 3:
            self._placeholders = [nan_placeholder(p.detach()) for p in self.parameters]
        else:
            self._placeholders = []
        self._parameter_tuple = tuple(self.parameters)
        self._classes = [type(p) for p in self.parameters]
        self._storage = Storage(flat)
        # Stage 3. lent: gathered until the next step, because code outside of its unit reads it. unsharded: by
        # `DataParallel.unshard`. data_was_read: a program has its `.data`, whose writes change no version counter.
        self.lent = self.unsharded = self.data_was_read = False
        # a graph of before an update is refused by autograd, which compares versions
        self.updates = 0
        # shared by all buckets of one DataParallel: it warns once
        self.loan_warnings: list[str] = []
        self.weights = flat[slice(*self.updated_interval)]
        self.gathered = True
        self._replaced = ReplacedData()
        # whether `take_weights` found anything that the program wrote since the last step
        self.written = False
        # Stage 3: of what a unit's own forward wrote into its weights (`max_norm`) since the last step
        self.written_in_unit: Tensor | None = None
        # the versions that this left, which a graph of that forward has saved
        self._written_versions: tuple[int, ...] = ()
        if self.stage == 3:
            if on_meta:
                self.weights = torch.zeros_like(self.weights)
            else:
                self.weights = self.weights.clone()
            for parameter in self.parameters:
                parameter.bucket = self  # type: ignore[attr-defined]
            self._set_data(self._full_weights)
            self._set_versions(self.updates)
            self.free()
        else:
            self._set_data(self._full_weights)
        # stages 0 to 2
        self._versions_published = sum(parameter._version for parameter in self.parameters)

    def _views(self, flat: Tensor) -> list[Tensor]:
        pairs = zip(self.bucket.slots, self.parameters, strict=True)
        return [flat[slot.start : slot.stop].view(p.shape) for slot, p in pairs]

    def _set_data(self, views: Sequence[Tensor]) -> None:
        for parameter, view in zip(self.parameters, views, strict=True):
            set_data(parameter, view)

    def _set_versions(self, version: int) -> None:
        """Views of parameters that autograd saved read the storage itself.

        With another version they raise an error; reading a freed storage would crash the process.
        """
        torch._C._autograd._unsafe_set_version_counter(
            self._parameter_tuple, (version,) * len(self._parameter_tuple)
        )

    @cached_property
    def label(self) -> str:
        """What errors call it."""
        names = [slot.name for slot in self.bucket.slots]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f"{names[0]}{more}"

    def store(self, index: int, full: Tensor) -> None:
        """Take the values of parameter `index`; this rank keeps its own elements."""
        if self.stage < 3:
            self._full_weights[index].copy_(full)
            return
        slot = self.bucket.slots[index]
        first, last = self.updated_interval
        start = max(first, slot.start)
        stop = min(last, slot.stop)
        if start < stop:
            elements = full.reshape(-1)[start - slot.start : stop - slot.start]
            self.weights[start - first : stop - first].copy_(elements)

    def start_gather(self) -> None:
        """Stage 3: allocate the full bucket and start to gather the other shards. All-gather over `ranks`."""
        if self.gathered or self._gathering is not None:
            return
        self._storage.allocate()
        flat = self._storage.flat
        assert self.ranks is not None
        with torch.no_grad():
            own_part(flat, self.ranks).copy_(self.weights)
        self._gathering = start_gather_parts(
            flat, self.ranks, tag=2 * self.number, label=f"the gather of {self.label}"
        )

    def gather(self) -> None:
        """Wait until the full parameters are there (`start_gather` if it was not called)."""
        if self.gathered and self._gathering is None:
            return
        if not self.gathered and torch._C._are_functorch_transforms_active():
            raise ValueError(
                f"{self.label} is needed inside of a transform of torch.func (grad, vmap, jvp) at zero_stage=3: it "
                "cannot be gathered and freed in it; use zero_stage=2, or a loop over the samples with "
                "torch.autograd.grad"
            )
        self.start_gather()
        self.wait()
        if not self.gathered:
            self.gathered = True
            self.data_was_read = False
            for parameter, kind in zip(self.parameters, self._classes, strict=True):
                if kind is Parameter:
                    parameter.__class__ = GatheredParameter
                else:
                    parameter.__class__ = kind
            self._set_data(self._full_weights)
            self._set_versions(self.updates)
            if self._written_versions:
                torch._C._autograd._unsafe_set_version_counter(
                    self._parameter_tuple, self._written_versions
                )

    def free(self, *, keep: bool = True) -> None:
        """Stage 3: free the memory of full parameters, if it is not lent; keep: what was written counts."""
        self.wait()
        if self.stage == 3 and not self.lent and (self.gathered or self._storage.has_memory):
            if keep and self.gathered:
                self.take_weights()
            self._drop_values()
            if self._storage.is_lent_out:
                self._take_new_storage()
            self._storage.release()

    def _drop_values(self) -> None:
        if self.gathered:
            self.gathered = False
            self._set_data(self._placeholders)
            self._set_versions(FREED)
            for parameter, kind in zip(self.parameters, self._classes, strict=True):
                if kind is Parameter:
                    parameter.__class__ = FreedParameter

    def lend(self, *, by_all: bool = False) -> None:
        """Stage 3: code outside of the unit reads the values: full until the next step. All-gather.

        by_all: every rank is known to read now, and the program to know that it does: nothing is said.
        """
        if self.gathered:
            return
        # warn before the gather: if other ranks do not read, it waits in vain
        if not (by_all or self.loan_warnings):
            self.loan_warnings.append(self.label)
            of_stages = ""
            if (stages := self.ps.size("pp")) > 1:
                of_stages = (
                    f". A norm or a sum of several weights is of this rank's stages, 1 of {stages}: sum, or take the "
                    "largest, over parallel_state.get_pipeline_model_parallel_group()"
                )
            warnings.warn(
                f"ZeRO stage 3: {self.label} was read outside of its module's forward: gathered, which every rank "
                "must do alike, and kept whole until the next step; what was taken out does not follow later steps. "
                "Around many reads write shard.unshard(model) ... shard.reshard(model); to save, "
                f"sharded_state_dict(shard){of_stages}",
                stacklevel=program_level(),
            )
        self.gather()
        self.lent = True

    def take_weights(self) -> None:
        """Adopt what the program wrote into full parameters, or put in the place of their data.

        Raises ValueError: of another dtype, shape or device.
        """
        self.written = False
        if not self.gathered:
            return
        self._replaced.look()
        self.written = self.lent or self.unsharded or self.data_was_read
        versions = 0
        slots = self.bucket.slots
        for slot, parameter, view in zip(slots, self.parameters, self._full_weights, strict=True):
            if parameter.data_ptr() != view.data_ptr():
                self._adopt_data(parameter, view, slot.name)
                self.written = True
            versions += parameter._version
        if self.stage < 3:
            self.written = self.written or versions != self._versions_published
            return
        assert self.ranks is not None
        published = sum(self._written_versions) or self.updates * len(self.parameters)
        if self.written or versions != published:
            self.weights.copy_(own_part(self._storage.flat, self.ranks))
            # freed before ranks meet: what each of them wrote would be kept in parts
            if not self.whole_for_program:
                before = 0 if self.written_in_unit is None else self.written_in_unit
                self.written_in_unit = checksum(self.values) + before
                self._written_versions = tuple([p._version for p in self.parameters])

    @property
    def whole_for_program(self) -> bool:
        """Whether this rank has all values, and every rank alike: not those of a unit that runs."""
        return self.gathered and (self.stage < 3 or self.lent or self.unsharded)

    @property
    def versions(self) -> int:
        """A number that changes with what a program writes in place; 0 of weights that come and go."""
        if self.whole_for_program:
            return sum(map(_version_of, self._parameter_tuple))
        return 0

    @property
    def values(self) -> Tensor:
        """All of them, without the padding, where they are `whole_for_program`: 1-D."""
        return self._storage.flat[: self.bucket.slots[-1].stop]

    def _adopt_data(self, parameter: Parameter, view: Tensor, name: str) -> None:
        data = parameter.detach()
        if data.shape != view.shape or data.dtype != view.dtype or data.device != view.device:
            self.refuse_moved()
        view.copy_(data)
        set_data(parameter, view)
        self._replaced.add(name, data)

    def refuse_moved(self) -> NoReturn:
        """Raise ValueError: parameters are no views of the buffer any more, and cannot become views again."""
        raise ValueError(
            f"DataParallel: the values of {self.label} do not lie in its buffers any more (model.to() or half() "
            "after it was made?), so updates do not reach them; convert the model first"
        )

    def end_loan(self) -> None:
        """Adopt what was written while it was lent, and free it."""
        if self.lent:
            self.take_weights()
            self._close_loan()

    def _close_loan(self) -> None:
        """Free lent memory by taking new storage: whoever still has a tensor of the loan keeps its values."""
        self._drop_values()
        self._take_new_storage()
        self.lent = False
        self._storage.release()

    def _take_new_storage(self) -> None:
        flat = torch.empty_like(self._storage.flat)
        self._storage, self._full_weights = Storage(flat), self._views(flat)

    def publish(self) -> None:
        """`weights` have changed: start to send them to the other ranks. Stages 1, 2: all-gather over `ranks`."""
        self.updates += 1
        self.written_in_unit = None
        self._written_versions = ()
        if self.stage < 3:
            versions = tuple(parameter._version + 1 for parameter in self._parameter_tuple)
            torch._C._autograd._unsafe_set_version_counter(self._parameter_tuple, versions)
            self._versions_published = sum(versions)
        if self.stage in (1, 2) and self.ranks is not None:
            self._gathering = start_gather_parts(
                self._storage.flat,
                self.ranks,
                tag=2 * self.number,
                label=f"the gather of {self.label}",
            )
        elif self.stage == 3:
            if self.lent:
                self._close_loan()
            self.free(keep=False)

    def wait(self) -> None:
        """Wait for the gather that is under way."""
        if self._gathering is not None:
            pending = self._gathering
            self._gathering = None
            pending.wait()
