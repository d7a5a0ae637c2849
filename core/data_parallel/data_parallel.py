"""One model on many data-parallel ranks: who holds which shard of weights, gradients and states, and when it moves.

An all-reduce is a reduce-scatter and an all-gather; ZeRO (arXiv 1910.02054) updates between the two.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from core.autograd.protocols import GradSync
from core.data_parallel.agreement import Agreement
from core.data_parallel.beside import BesideModule
from core.data_parallel.buffers.assembly import (
    buffers_of_stages,
    make_buffers,
    make_slots,
    overlap_pays,
    units_of_stages,
)
from core.data_parallel.buffers.buffer_copies import BufferCopies
from core.data_parallel.buffers.buffers import partial_views, sum_views, unsum
from core.data_parallel.buffers.gradient import ParameterSlot
from core.data_parallel.buffers.life import Phase
from core.data_parallel.buffers.meta import Init, allocate_from_meta, fill_all
from core.data_parallel.buffers.shown import borrowed, show, take, without_gradient
from core.data_parallel.frozen import FrozenWeights
from core.data_parallel.grad_sync import GradientSums
from core.data_parallel.refusals import refuse_owned, refuse_spread, refuse_unknown, refuse_unused
from core.data_parallel.replicas import check_replicas, check_shards
from core.data_parallel.unsynced import Unsynced
from core.data_parallel.watch import UpdateWatch
from core.data_parallel.weights.kept import KeptMemory
from core.data_parallel.weights.start import check_parts, new_parameters
from core.data_parallel.weights.table import Members, Units, own_stage, stages_of
from core.parallel_state.by_hand import Reporter, listen_again, make_plain, watch_rows_of_own
from core.parallel_state.modules import Modules, named_parameters
from core.parallel_state.state import ParallelState


class DataParallel(BesideModule, GradSync):
    """Flat buckets of weights and gradients, summed over the data axes and divided among its ranks.

    Implements `core.autograd.GradSync`, so that executors drive it; `ShardedAdamW(shard, ...)` updates what it holds.
    In a plain loop (`loss.backward(); optimizer.step(); optimizer.zero_grad()`) the optimizer's step sums.

    module: one, or a pipeline's stages on this rank. Parameters stay the same objects, views of the buckets;
    `main_grad` is allocated here. Frozen parameters are left alone, in full on every rank.
    zero_stage: what is divided over the ranks (arXiv 1910.02054): 0 nothing; 1 optimizer states: gradients are
        reduce-scattered once per step, weights gathered after it; 2 gradients too: reduce-scattered in every
        microbatch; 3 weights too: gathered unit by unit before each forward and backward, freed after it.
    bucket_size: elements; default 1 Mi on CPUs, 8 Mi elsewhere. A bucket never crosses a unit.
    grad_dtype: of `main_grad`; default float32 for 16-bit parameters, else the parameter's own. reduce_dtype: what is
        sent is rounded to it; sums are in grad_dtype.
    shard_units: "layer" (elements of ModuleLists and ModuleDicts, blocks in a Sequential), or names, patterns and
        classes of modules.
    overlap: sums start while backward goes on (with an executor, or `backward_passes`), and gathered weights are
        waited for where they are used. Default: at stages 2 and 3, whose memory it bounds, with backward_passes, and
        where the backend works beside us; gloo's copying competes with the computation for CPU cores.
    backward_passes: of a plain loop, how often `backward` is called per step: the last one then overlaps too.
    require_gradients: `finish` raises where a parameter got none. check_replicas_every: steps between two
        comparisons of what several ranks hold (by `finish`, before the update); 0 never.
    broadcast_buffers: buffers that are written are the first data rank's: sent before each forward in training and
        after each step.
    init: of a model on the meta device, which is filled module by module: fills one module's own parameters; default:
        initial values that parameters carry, or the module's reset_parameters().

    Collective when it is made, gathers and sums: all ranks of a data group make the same calls in one order. When it
    is made every rank takes the parameters and buffers of the first rank of its data group, as under DDP.
    Raises ValueError: an unknown stage, a parameter that already has a `main_grad`, two parameters in one memory,
    ranks of a data group that have different parameters to train.
    """

    is_removed = False

    def __init__(
        self,
        module: Modules,
        ps: ParallelState,
        *,
        zero_stage: int = 1,
        bucket_size: int | None = None,
        grad_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        shard_units: Units = "layer",
        overlap: bool | None = None,
        backward_passes: int | None = None,
        require_gradients: bool = False,
        check_replicas_every: int = 0,
        broadcast_buffers: bool = True,
        init: Init | None = None,
    ) -> None:
        if zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"zero_stage={zero_stage!r} is unknown; use 0, 1, 2 or 3")
        self.module = module
        self.ps = ps
        self.zero_stage = zero_stage
        self.backward_passes = backward_passes
        self.require_gradients = require_gradients
        on_meta = allocate_from_meta(module, ps)  # new parameters: before anybody notes one
        self._names = {p: name for name, p in named_parameters(module) if p.requires_grad}
        listened = self._take_over()
        stages = stages_of(module, shard_units)
        self.buffers = make_buffers(
            module,
            self._names,
            stages,
            ps,
            zero_stage=zero_stage,
            bucket_size=bucket_size,
            grad_dtype=grad_dtype,
            reduce_dtype=reduce_dtype,
        )
        if on_meta:
            # module by module, into the buckets: at stage 3 no rank ever holds the whole model
            fill_all(module, ps, on_meta, self.buffers, init)
        if overlap is None:
            overlap = overlap_pays(self.buffers, ps.device, zero_stage, backward_passes)
        self.overlap = overlap
        slots = make_slots(self.buffers, self._names)
        self._stages = [members.module for members in stages.values()]
        self._follow(list(stages.values()), slots)
        self._partial = partial_views(self.buffers)
        self._unused: list[str] = []
        self.missing: list[str] = []
        self.averaged = False
        self._steps = 0
        self._check_every = check_replicas_every
        self.copies = BufferCopies(self._stages if broadcast_buffers else (), ps)
        self.agreement = Agreement(ps, self.buffers, len(slots), FrozenWeights.of(module, slots))
        self._watch = UpdateWatch(
            self.agreement, self.buffers, self._stages, slots, self._adopt_weights
        )
        self._hooks = self._gradient_sums.hook_parameters()
        listen_again(listened, self._names)

    def _follow(self, stages: Sequence[Members], slots: Sequence[ParameterSlot]) -> None:
        """Who holds what (pipeline stages their buckets, units their layers), and who counts gradients."""
        holders = buffers_of_stages(stages, self.buffers)
        self._units = units_of_stages(
            stages,
            holders,
            slots,
            zero_stage=self.zero_stage,
            overlap=self.overlap,
            backward_begins=lambda stage: self._gradient_sums.plain_backward(stage),
        )
        self._unsynced = Unsynced(lambda: self._gradient_sums.arrivals)
        self._gradient_sums = GradientSums(
            holders,
            slots,
            divided=self.zero_stage >= 2,
            overlap=self.overlap,
            backward_passes=self.backward_passes,
            sum_and_average=self._unsynced.reading(self._sum_and_average),
            meet=self._meet,
            zero_all=self.zero_grad,
            unsum=self._unsum,
        )

    def _take_over(self) -> set[Reporter]:
        refuse_spread(self._names)
        check_parts(self.module, self.ps)
        watch_rows_of_own(self.module, self.ps.size("cp"))
        listened = make_plain(self._names)
        self._kept = KeptMemory(self._names)
        refuse_owned(self._names)
        return listened

    def named_parameters(self) -> dict[str, Parameter]:
        """Global name -> every trainable parameter."""
        return {name: p for p, name in self._names.items()}

    def _own_stage(self, stage: nn.Module) -> nn.Module:
        """The stage as it was given to us: an executor may have a compiled one, or a wrapped one in a wrapper."""
        return own_stage(stage, self._stages)

    # what executors call

    def begin_step(self, pairs_per_param: Mapping[Parameter, int], *, split: bool = False) -> None:
        """A step starts. Raises ValueError: the last step's sums have not been zeroed, or it was not finished; a
        trainable parameter that was not here, or not trainable, when this was made."""
        self._gradient_sums.refuse_second()
        refuse_unknown(self._gradient_sums.unknown(pairs_per_param), self.module)
        self._gradient_sums.begin_step(pairs_per_param, split)
        for units in self._units.values():
            units.split = split

    def before_input_grad(self, stage: nn.Module) -> None:
        """ZeRO-3: gather what only the whole stage needs, and prefetch its last layer."""
        self._gradient_sums.backward_begins(self._own_stage(stage))
        if (units := self._units.get(self._own_stage(stage))) is not None:
            units.begin_backward()

    def after_input_grad(self, stage: nn.Module, waiting: Collection[Parameter] = ()) -> None:
        """ZeRO-3: free the stage's parameters; W does not need them."""
        self._gradient_sums.after_input_grad(waiting)
        if (units := self._units.get(self._own_stage(stage))) is not None:
            units.free()

    def before_weight_grad(self, stage: nn.Module) -> None:
        """ZeRO-2 and 3: a sum per microbatch begins."""
        self._gradient_sums.before_weight_grad(self._own_stage(stage))

    def ready(self, param: Parameter) -> None:
        """One (stage, microbatch) pair has delivered all to `param`; its bucket may be reduced."""
        self._gradient_sums.ready(param)

    def after_weight_grad(self, stage: nn.Module) -> None:
        """ZeRO-2 and 3: start the rest of this microbatch's sums, and wait for all."""
        self._gradient_sums.after_weight_grad(self._own_stage(stage))

    def stage_done(self, stage: nn.Module) -> None:
        """ZeRO-0 and 1: start the rest of the stage's sums."""
        self._gradient_sums.stage_done(self._own_stage(stage))

    def unshard(self, stage: nn.Module) -> None:
        """ZeRO-3: gather the whole stage, and free nothing of it until `reshard`."""
        if (units := self._units.get(self._own_stage(stage))) is not None:
            units.gather()
            units.set_unsharded(True)

    def reshard(self, stage: nn.Module) -> None:
        """The end of `unshard`. Raises ValueError, on every rank: they have written other values."""
        self._watch.before_reshard()
        if (units := self._units.get(self._own_stage(stage))) is not None:
            units.set_unsharded(False)

    def finish(self) -> None:
        """Wait until `gradients` of every buffer are the sums over all replicas; the optimizer divides, not this.

        Reduce-scatter per bucket not yet summed; one all-reduce per group of partial sums (and per bucket over HSDP
        copies); stage 0: all-gather per bucket.
        Raises ValueError: called again without `zero_grad` between; with `require_gradients`, on every rank,
        parameters that got none; with `check_replicas_every`, see `check_replicas`.
        """
        self._gradient_sums.refuse_second()
        new = new_parameters(self._stages, self._gradient_sums.known)
        refuse_unknown(self._gradient_sums.unknown(new), self.module)
        self._steps += not self._gradient_sums.is_counted
        self._gradient_sums.finish()
        for buffer in self.buffers:
            buffer.complete()
        # parameters that several ranks of a model hold, each with a part of the gradient (`Layout.partial`)
        for name, views in self._partial.items():
            sum_views(views, self.ps.group(name))
        gathers = [buffer.start_gather_gradients() for buffer in self.buffers]
        for pending in filter(None, gathers):
            pending.wait()
        show(self._gradient_sums.slots)
        self._unused = [slot.name for slot in self._gradient_sums.slots if not slot.delivered]
        self.missing = without_gradient(self._gradient_sums.slots)
        if self.require_gradients:
            refuse_unused(self._unused, self.ps.world)
        if self._check_every and self._steps % self._check_every == 0:
            # before an update: after it every rank has just been sent the same
            self.check_replicas()

    # around the optimizer's step

    def take_weights(self) -> None:
        """Before an update: adopt what the program wrote into parameters, or put in the place of their data.

        Raises ValueError: values of another dtype, shape or device.
        """
        self._kept.look()
        for buffer in self.buffers:
            buffer.take_weights()

    def publish(self) -> None:
        """`weights` of the buffers have changed: bring them to all ranks. All-gather per bucket (stages 1, 2).

        Backends that work beside us are waited for where the weights are used, or by `wait`. Stage 3: what was
        gathered before is dropped.
        """
        for units in self._units.values():
            units.free(keep=False)
        # in the order of the next forward
        for buffer in reversed(self.buffers):
            buffer.publish()
        if not (self.overlap and any(units.may_wait_at_use for units in self._units.values())):
            self.wait()

    def wait(self) -> None:
        """Wait until the parameters that the last step sent have arrived."""
        for buffer in reversed(self.buffers):
            buffer.wait()

    def _sum_and_average(self) -> None:
        """The program asks for values of `p.grad`: sum, and average over the replicas as under DDP; of a step that
        an executor drives they are its sums."""
        if not self.finished:
            self.finish()
        if not (self.averaged or self._gradient_sums.has_executor):
            self.averaged = True
            for buffer in self.buffers:
                buffer.gradients.div_(self.ps.size("dp-cp"))

    def _unsum(self) -> None:
        """A backward adds to what is summed: turn it into contributions of each rank, whose sum it is."""
        unsum(self.buffers, self._partial, self.ps, averaged=self.averaged)
        self.averaged = False

    def _meet(self, asked_for: str, facts: Any) -> None:
        """Before values of `p.grad` are read from other ranks, on gloo: all must ask alike."""
        if self.agreement.is_needed:
            self.agreement.meet(asked_for, facts, self._steps - self._gradient_sums.is_counted)

    def _adopt_weights(self) -> None:
        self.wait()
        self.take_weights()

    def no_sync(self) -> AbstractContextManager[None]:
        """For loops written for DDP: sums come once per step anyway. A read of `p.grad` in it is told."""
        return self._unsynced.begun()

    def take_gradients(self) -> Tensor:
        """Before an update: adopt `p.grad`; None is no gradient. Returns the number of `ChangesByHand.take`."""
        sums = self._gradient_sums
        if borrowed(sums.slots):
            self._sum_and_average()
        if take(sums.slots, sums.changes, float(self.default_divisor)):
            self.missing = without_gradient(sums.slots)
        return sums.changes.take(self.ps.device)

    @property
    def replicas(self) -> int:
        """What gradients are to be divided by for the mean over replicas."""
        return 1 if self.averaged else self.ps.size("dp-cp")

    @property
    def default_divisor(self) -> int:
        """What gradients are divided by where nobody says it: an executor's sums by 1, as in one process."""
        if self._gradient_sums.has_executor:
            return 1
        return self.replicas

    @property
    def finished(self) -> bool:
        """Whether `gradients` of every buffer are the sums over all replicas, used up or not."""
        return self._gradient_sums.phase is not Phase.OPEN

    @property
    def used(self) -> bool:
        """Whether an optimizer has used them, and nothing has come since."""
        return self._gradient_sums.phase in (Phase.STEPPED, Phase.KEPT)

    def stepped(self) -> None:
        """An optimizer has used the gradients up: what arrives before `zero_grad` is dropped."""
        self._gradient_sums.phase = Phase.STEPPED
        self._unsynced.stepped()
        self.copies.send()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero every gradient in place; `main_grad` is never None.

        Of a step that nobody finished too (its sums that have begun are completed: then collective).
        set_to_none: as in torch, a parameter that gets no gradient before the next step is not updated in it; with
        False those that had one have zeros, and decay.
        """
        # sums under way still write into the gradients
        self._gradient_sums.give_up()
        for buffer in self.buffers:
            buffer.zero()
        self._gradient_sums.zeroed(set_to_none=set_to_none)
        self.averaged = False

    def check_replicas(self) -> None:
        """Compare, bit for bit, what several ranks hold: full parameters; at stage 3 the shards, where they
        repeat, and frozen parameters.

        One all-gather of checksums over the world. Raises ValueError, on every rank: a parameter that differs, and
        the rank that is alone with its values (of two: both).
        """
        self.wait()
        if self.zero_stage < 3:
            check_replicas(self.module, self.ps)
        else:
            check_shards(self.buffers, self.module, self.ps)

    def unused(self) -> list[str]:
        """Names of the parameters that backward did not reach on this rank before the last `finish`."""
        return list(self._unused)

    def remove(self) -> None:
        """Undo: full parameters in memory of their own, and gradients in `.grad` again. All-gather at stage 3."""
        if self.is_removed:
            return
        units = self._units.values()
        for part in (*self._hooks, self.copies, self._watch, *units, *self.buffers):
            part.remove()
        self._gradient_sums.zeroed(set_to_none=True)
        self._hooks, self._names, self.is_removed = [], {}, True
