"""Where the layers of one model live and over which group they are split: given to every layer's constructor."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.nn import Parameter

from core.autograd import Comm, StageContext
from core.autograd.fp8 import Fp8
from core.parallel_state import Init, Layout
from core.parallel_state.collectives import (
    Group,
    all_gather,
    all_reduce,
    reduce_scatter,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from core.parallel_state.layout import set_layout, true_part
from core.parallel_state.spread import building_device
from core.parallel_state.state import ParallelState
from core.tensor_parallel.own_modules import OwnModules


@dataclass(frozen=True, eq=False)
class Placement:
    """The tensor-parallel group (None: one rank), how activations travel between layers, dtype and device.

    Under `sequence_parallel` the tensors between the parallel regions are [s/tp, b, h] instead of [s, b, h].
    `stage` is the context through which the layers' weight gradients may be deferred.
    filled_by_model: parameters are NaN until the model that holds the layers fills them under their names
        (`initialize_parameters`). Otherwise a layer draws them when it is made, as torch's layers do: every rank
        draws the whole tensor from torch's generator and keeps its part, so that one `torch.manual_seed` on all ranks
        gives the same model over any number of them.
    own_modules: watches the program's own modules in which the layers are; None where the model that holds them
        watches itself.
    fp8: how the linears' products are made of 8-bit factors; None: of the weights' and activations' own dtype.
    """

    group: Group | None = None
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    stage: StageContext = field(default_factory=StageContext)
    filled_by_model: bool = False
    own_modules: OwnModules | None = None
    fp8: Fp8 | None = None

    @classmethod
    def of(cls, ps: ParallelState, dtype: torch.dtype | None = None) -> "Placement":
        """For the layers of a module of one's own: over the tensor ranks of `ps`, on its device.

        dtype: torch's default dtype where it is not given.
        """
        if dtype is None:
            dtype = torch.get_default_dtype()
        group = ps.group("tp")
        splits_sequence = ps.config.sequence_parallel
        own_modules = None
        if group is not None:
            own_modules = OwnModules(group, splits_sequence=splits_sequence)
        return cls(
            group, splits_sequence, dtype, building_device(ps.device), own_modules=own_modules
        )

    @property
    def tp(self) -> int:
        """Ranks of the group."""
        if self.group is None:
            return 1
        return self.group.size

    @property
    def rank(self) -> int:
        """This rank's index in the group."""
        if self.group is None:
            return 0
        return self.group.rank

    @property
    def splits_sequence(self) -> bool:
        """Whether activations between layers are sequence shards (arXiv 2205.05198)."""
        return self.sequence_parallel and self.group is not None

    @property
    def sequence_partial(self) -> frozenset[str]:
        """`Layout.partial` of a replicated parameter applied to sequence shards: each rank saw 1/tp of the tokens."""
        if self.sequence_parallel:
            return frozenset({"tp"})
        return frozenset()

    def parameter(
        self, layout: Layout, init: Init, sizes: Mapping[str, int] | None = None
    ) -> Parameter:
        """This rank's shard of a parameter, with its initial values or NaN (`filled_by_model`).

        sizes: of the axes, where others than tp split it: such a one is the model's to fill. Raises ValueError: a
        split dim does not divide.
        """
        local = layout.local_shape({"tp": self.tp} if sizes is None else sizes)
        # NaN, so that a parameter that nobody filled is found in the first loss
        parameter = Parameter(torch.full(local, torch.nan, dtype=self.dtype, device=self.device))
        set_layout(parameter, layout)
        parameter.initial = init  # type: ignore[attr-defined]
        if not self.filled_by_model and sizes is None and not parameter.is_meta:
            self._draw(parameter, layout, init)
        return parameter

    @torch.no_grad()
    def _draw(self, parameter: Parameter, layout: Layout, init: Init) -> None:
        """Fill this rank's part of a tensor that every rank draws in full, on the CPU: equal on every device."""
        coordinate = {"tp": self.rank}
        sizes = {"tp": self.tp}
        parameter.zero_()  # padded rows stay 0
        target = true_part(parameter, layout, coordinate, sizes)
        if init.is_constant:
            target.fill_(init.mean)
            return
        # all ranks advance the generator alike, so that the next layer's draws agree as well
        full = torch.empty(layout.shape, dtype=torch.float32, device="cpu")
        if init.bound:
            full.uniform_(init.mean - init.bound, init.mean + init.bound)
        else:
            full.normal_(init.mean, init.std)
        target.copy_(full[layout.box(coordinate, sizes)])

    def column_comm(self) -> Comm:
        """Collectives around a matmul whose output features are split: none in forward, dx is summed in backward.

        Under sequence parallelism x is gathered and dx reduce-scattered: the same bytes, a tp-th of the activations.
        """
        if self.group is None:
            return Comm()
        if self.sequence_parallel:
            return Comm(
                before_forward=partial(all_gather, group=self.group),
                after_backward=partial(start_reduce_scatter, group=self.group),
                restart_before_forward=partial(start_all_gather, group=self.group),
            )
        # Megatron's f: identity forward, all-reduce backward
        return Comm(after_backward=partial(start_all_reduce, group=self.group))

    def row_comm(self) -> Comm:
        """Collectives around a matmul whose input features are split: y is summed in forward."""
        if self.group is None:
            return Comm()
        if self.sequence_parallel:
            return Comm(
                after_forward=partial(reduce_scatter, group=self.group),
                before_backward=partial(all_gather, group=self.group),
            )
        # Megatron's g: all-reduce forward, identity backward
        return Comm(after_forward=partial(all_reduce, group=self.group))
