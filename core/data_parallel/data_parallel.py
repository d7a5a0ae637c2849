"""One model on many data-parallel ranks: who holds which part of weights, gradients and states, when it moves."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from core.autograd.protocols import GradSync
from core.data_parallel.buffers.buffer_copies import BufferCopies
from core.data_parallel.buffers.buffers import Buffer, partial_views, sum_views
from core.data_parallel.buffers.gradient import ParameterSlot
from core.data_parallel.buffers.life import Phase
from core.data_parallel.buffers.meta import Init, fill_all, stand_up
from core.data_parallel.buffers.units import StageUnits, Unit
from core.data_parallel.grad_sync import GradientSums
from core.data_parallel.replicas import check_replicas, check_shards
from core.data_parallel.weights.start import same_on_all
from core.data_parallel.weights.table import Members, Units, entries_of, stages_of
from core.parallel_state.collectives import all_gather_objects
from core.parallel_state.flat import Bucket, bucket_table
from core.parallel_state.modules import Modules, named_parameters
from core.parallel_state.state import ParallelState


class DataParallel(GradSync):
    """Flat buckets of weights and gradients, summed over the data axes and divided among its ranks.

    Implements `core.autograd.GradSync`, so that executors drive it; `ShardedAdamW(shard, ...)` updates what it holds.
    In a plain loop (`loss.backward(); optimizer.step(); optimizer.zero_grad()`) the optimizer's step sums.

    module: one, or a pipeline's stages on this rank. Parameters stay the same objects, views of the buckets;
    `main_grad` is allocated here. Frozen parameters are left alone, whole on every rank.
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
        where the backend works beside us; gloo's copies take the cores that compute, and are cheaper all at once.
    backward_passes: of a plain loop, how often `backward` is called per step: the last one then overlaps too.
    require_gradients: `finish` raises where a parameter got none. check_replicas_every: steps between two
        comparisons of what several ranks hold (by `finish`, before the update); 0 never.
    broadcast_buffers: buffers that forwards write are the first data rank's: sent after each step, and before each
        further forward of a step.
    init: of a model on the meta device, which is filled module by module: fills one module's own parameters; default:
        initial values that parameters carry, or the module's reset_parameters().

    Collective when it is made, gathers and sums: all ranks of a data group make the same calls in one order. When it
    is made every rank takes the parameters and buffers of the first rank of its data group, as under DDP.
    Raises ValueError: an unknown stage, a parameter that already has a `main_grad`, two parameters in one memory,
    ranks of a data group that have different parameters to train.
    """

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
            raise ValueError(f"zero_stage={zero_stage} is unknown; use 0, 1, 2 or 3")
        self.module, self.ps, self.zero_stage = module, ps, zero_stage
        self.backward_passes, self.require_gradients = backward_passes, require_gradients
        unfilled = stand_up(module, ps)
        self._names = {p: name for name, p in named_parameters(module) if p.requires_grad}
        self._refuse_owned()
        stages = stages_of(module, shard_units)
        size = bucket_size if bucket_size is not None else 2**20 if ps.device.type == "cpu" else 2**23
        cut = {"dp-cp": ps.size("shard"), "edp": ps.size("edp")}
        table = bucket_table(entries_of(module, stages), cut, size)
        same_on_all(module, table, ps)
        self.buffers = self._make_buffers(table, {"grad_dtype": grad_dtype, "reduce_dtype": reduce_dtype})
        if unfilled:
            fill_all(module, ps, unfilled, self.buffers, init)
        beside = any(b.ranks is not None and not b.ranks.composed for b in self.buffers)
        self.overlap = overlap if overlap is not None else beside or zero_stage >= 2 or backward_passes is not None
        places = self._places()
        buffer_of = {place.parameter: place.buffer for place in places}
        self._stages = [members.module for members in stages.values()]
        holders = {m.module: self._held_by({buffer_of[p] for p in m.parameters}) for m in stages.values()}
        made = {m.module: self._units_of(m, holders[m.module]) for m in stages.values()}
        self._units = {module: units for module, units in made.items() if units is not None}
        unit_of = {p: unit for units in self._units.values() for unit in units.layers for p in unit.parameters}
        for place in places:
            place.unit = unit_of.get(place.parameter)
        self._sums = GradientSums(
            holders,
            places,
            divided=zero_stage >= 2,
            overlap=self.overlap,
            passes=backward_passes,
            wanted=self._wanted,
            zero=self.zero_grad,
        )
        self._partial = partial_views(self.buffers)
        self._unused: list[str] = []
        self.missing, self.averaged = list[str](), False
        self._steps, self._compare_every = 0, check_replicas_every
        self.copies = BufferCopies(self._stages if broadcast_buffers else (), ps)
        self._hooks = [
            place.parameter.register_post_accumulate_grad_hook(partial(self._sums.hooked, place)) for place in places
        ]

    def _make_buffers(self, table: Sequence[Bucket], dtypes: Mapping[str, torch.dtype | None]) -> tuple[Buffer, ...]:
        parameters, told = self.named_parameters(), list[str]()
        made = tuple(
            Buffer(number, bucket, parameters, self.ps, zero_stage=self.zero_stage, **dtypes)
            for number, bucket in enumerate(table)
        )
        for buffer in made:
            buffer.told = told
        return made

    def _places(self) -> list[ParameterSlot]:
        found = ((buffer, i, p) for buffer in self.buffers for i, p in enumerate(buffer.parameters))
        return [ParameterSlot(p, self._names[p], buffer, i) for buffer, i, p in found]

    def _refuse_owned(self) -> None:
        if taken := [name for p, name in self._names.items() if getattr(p, "main_grad", None) is not None]:
            raise ValueError(
                f"DataParallel: {taken[0]} and {len(taken) - 1} more of {len(self._names)} parameters already have a "
                "main_grad: a parameter belongs to 1 group only; remove() the object that made it first"
            )

    def _held_by(self, here: Collection[Buffer]) -> list[Buffer]:
        return [buffer for buffer in self.buffers if buffer in here]

    def _units_of(self, stage: Members, buffers: Sequence[Buffer]) -> StageUnits | None:
        """Where weights or gradients come and go, or gathered weights are waited for."""
        remote = [b for b in buffers if b.ranks is not None]
        later = self.overlap and self.zero_stage in (1, 2) and any(not b.ranks.composed for b in remote if b.ranks)
        if not remote or not (later or self.zero_stage >= 2):
            return None
        layers = {name: Unit(module) for name, module in stage.units.items()}
        root = Unit(stage.module)
        for buffer in buffers:
            alone = all(p in stage.names for p in buffer.parameters)
            (layers[buffer.bucket.unit] if alone and buffer.bucket.unit else root).take_in(buffer)
        return StageUnits(
            root,
            list(layers.values()),
            frees=self.zero_stage == 3,
            divided=self.zero_stage >= 2,
            backward_begins=lambda: self._sums.plain_backward(stage.module),
        )

    def named_parameters(self) -> dict[str, Parameter]:
        """Global name -> every trainable parameter."""
        return {name: p for p, name in self._names.items()}

    # what executors call

    def _known(self, stage: nn.Module) -> nn.Module:
        """The stage as it was given to us: an executor may have a wrapped or compiled one, if there is only one."""
        if stage not in self._stages and len(self._stages) != 1:
            raise ValueError(
                f"DataParallel holds {len(self._stages)} stages, and {type(stage).__name__} is none of them; give it "
                "and the executor the same modules"
            )
        return stage if stage in self._stages else self._stages[0]

    def begin_step(self, pairs_per_param: Mapping[Parameter, int], *, split: bool = False) -> None:
        """A step starts. Raises ValueError: the last step's sums have not been zeroed, or it was not finished; a
        trainable parameter that was not here, or not trainable, when this was made."""
        self._sums.refuse_second()
        self._refuse_unknown(pairs_per_param)
        self._sums.begin_step(pairs_per_param, split)
        for units in self._units.values():
            units.split = split

    def before_input_grad(self, stage: nn.Module) -> None:
        """Stage 3: what the whole stage needs is gathered, and its last layer asked for."""
        self._sums.backward_begins(self._known(stage))
        if (units := self._units.get(self._known(stage))) is not None:
            units.begin_backward()

    def after_input_grad(self, stage: nn.Module, waiting: Collection[Parameter] = ()) -> None:
        """Stage 3: the stage's parameters are freed; W does not need them."""
        self._sums.after_input_grad(waiting)
        if (units := self._units.get(self._known(stage))) is not None:
            units.free()

    def before_weight_grad(self, stage: nn.Module) -> None:
        """Stages 2, 3: a sum per microbatch begins."""
        self._sums.before_weight_grad(self._known(stage))

    def ready(self, param: Parameter) -> None:
        """One pair has delivered all to `param`; its bucket may start."""
        self._sums.ready(param)

    def after_weight_grad(self, stage: nn.Module) -> None:
        """Stages 2, 3: the rest of this microbatch's sums."""
        self._sums.after_weight_grad(self._known(stage))

    def stage_done(self, stage: nn.Module) -> None:
        """Stages 0, 1: the rest of the stage's sums start."""
        self._sums.stage_done(self._known(stage))

    def unshard(self, stage: nn.Module) -> None:
        """Stage 3: gather the whole stage, and free nothing of it until `reshard`."""
        if (units := self._units.get(self._known(stage))) is not None:
            units.need()
            units.keep(True)

    def reshard(self, stage: nn.Module) -> None:
        """The end of `unshard`."""
        if (units := self._units.get(self._known(stage))) is not None:
            units.keep(False)

    def finish(self) -> None:
        """Until `gradients` of every buffer are the sums over all replicas; nothing divides, that is the optimizer's.

        Reduce-scatter per bucket not yet summed; one all-reduce per group of partial sums (and per bucket over HSDP
        copies); stage 0: all-gather per bucket.
        Raises ValueError: called again without `zero_grad` between; with `require_gradients`, on every rank,
        parameters that got none; with `check_replicas_every`, see `check_replicas`.
        """
        self._sums.refuse_second()
        self._refuse_unknown(self._appeared())
        self._sums.finish()
        for buffer in self.buffers:
            buffer.complete()
        for name, views in self._partial.items():
            sum_views(views, self.ps.group(name))
        gathers = [buffer.start_gather_gradients() for buffer in self.buffers]
        for pending in gathers:
            if pending is not None:
                pending.wait()
        self._sums.show()
        self._unused = [place.name for place in self._sums.places if not place.delivered]
        self.missing = [place.name for place in self._sums.places if not (place.delivered or place.zeros)]
        if self.require_gradients:
            self._refuse_unused()
        self._steps += 1
        if self._compare_every and self._steps % self._compare_every == 0:
            self.check_replicas()  # before an update: after it every rank has just been sent the same

    def _appeared(self) -> list[Parameter]:
        """Trainable parameters that nobody sums: unfrozen, replaced or added since this was made.

        In every step, so without a function call per module.
        """
        found: dict[int, Parameter] = {}
        known, modules = self._sums.known, list(self._stages)
        for module in modules:  # grows while it is walked
            for child in module._modules.values():
                if child is not None:
                    modules.append(child)  # noqa: PERF401
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) not in known and parameter.requires_grad:
                    found[id(parameter)] = parameter
        return list(found.values())

    def _refuse_unknown(self, parameters: Iterable[Tensor]) -> None:
        if unknown := self._sums.unknown(parameters):
            names = [name for name, p in named_parameters(self.module) if id(p) in unknown]
            raise ValueError(
                f"DataParallel: {len(unknown)} trainable parameters ({', '.join(names[:3]) or 'of another module'}) "
                "are summed by nobody: replaced (load_state_dict(assign=True)?) or unfrozen later; remove() this "
                "and make it anew, with its optimizer"
            )

    def _refuse_unused(self) -> None:
        everywhere = enumerate(all_gather_objects(self._unused, self.ps.world))
        if found := [f"{names[0]} on rank {rank} ({len(names)} there)" for rank, names in everywhere if names]:
            raise ValueError(
                f"parameters without a gradient in this step: {'; '.join(found)}; freeze them, use them, or leave "
                "require_gradients off"
            )

    # around the optimizer's step

    def take_weights(self) -> None:
        """Before an update: what somebody wrote into parameters, or put in the place of their data, is what counts.

        Raises ValueError: values of another dtype, shape or device.
        """
        for buffer in self.buffers:
            buffer.take_weights()

    def publish(self) -> None:
        """`weights` of the buffers have changed: bring them to all ranks. All-gather per bucket (stages 1, 2).

        Backends that work beside us are waited for where the weights are used, or by `wait`. Stage 3: what was
        gathered before is dropped.
        """
        for units in self._units.values():
            units.free(keep=False)
        for buffer in reversed(self.buffers):  # in the order of the next forward
            buffer.publish()
        if not (self.overlap and any(units.waits for units in self._units.values())):
            self.wait()

    def wait(self) -> None:
        """Until the parameters that the last step sent have arrived."""
        for buffer in reversed(self.buffers):
            buffer.wait()

    def _wanted(self) -> None:
        """Somebody asks for values of `p.grad`: summed, and averaged over the replicas as under DDP; of a step that
        an executor drives they are its sums."""
        if not self.finished:
            self.finish()
        if not (self.averaged or self._sums.driven):
            self.averaged = True
            for buffer in self.buffers:
                buffer.gradients.div_(self.ps.size("dp-cp"))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """For loops that have it from DDP. Stages 0 and 1 sum once per step anyway; 2 and 3 cannot wait: whole
        gradients are what they do not hold."""
        yield

    def take_gradients(self) -> None:
        """Before an update: what somebody has made of `p.grad` counts; None is no gradient."""
        if self._sums.borrowed():
            self._wanted()
        if self._sums.take(float(self.default_divisor)):
            self.missing = [place.name for place in self._sums.places if not (place.delivered or place.zeros)]

    @property
    def replicas(self) -> int:
        """What gradients are to be divided by for the mean over replicas."""
        return 1 if self.averaged else self.ps.size("dp-cp")

    @property
    def default_divisor(self) -> int:
        """What gradients are divided by where nobody says: an executor's sums by nothing, as in one process."""
        return 1 if self._sums.driven else self.replicas

    @property
    def finished(self) -> bool:
        """Whether `gradients` of every buffer are the sums over all replicas, used up or not."""
        return self._sums.phase is not Phase.OPEN

    def stepped(self) -> None:
        """An optimizer has used the gradients up: what arrives before `zero_grad` is dropped."""
        self._sums.phase = Phase.STEPPED
        self.copies.send()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero every gradient in place; `main_grad` is never None.

        Of a step that nobody finished too (its sums that have begun are completed: then collective).
        set_to_none: as in torch, a parameter that gets no gradient before the next step is not updated in it; with
        False those that had one have zeros, and decay.
        """
        self._sums.give_up()
        for buffer in self.buffers:
            buffer.zero()
        self._sums.zeroed(set_to_none=set_to_none)
        self.averaged = False

    def check_replicas(self) -> None:
        """Compare, bit for bit, what several ranks hold: whole parameters; at stage 3 the parts, where they repeat,
        and frozen parameters.

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
        """Undo: whole parameters of their own, the next gradients in `.grad` again. All-gather at stage 3."""
        for hook in self._hooks:
            hook.remove()
        self.copies.remove()
        for units in self._units.values():
            units.remove()
        for buffer in self.buffers:
            buffer.remove()
        self._sums.zeroed(set_to_none=True)
        self._hooks, self._names = [], {}
