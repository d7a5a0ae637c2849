"""Detects what a plain torch loop breaks in a model that is split over tensor ranks, where it first shows.

torch's own tools know nothing of tensor parallelism: `clip_grad_norm_` takes the norm of one rank's shard, DDP over
the default group sends one rank's shard to the others, a GradScaler skips on one rank alone, a sampler gives every
rank its own batch. None of them raises; each breaks one of two invariants that are cheap to check: replicated tensors
are equal on all tensor ranks, split ones are not. A norm of one shard breaks neither: such functions are observed
(`by_hand`).
"""

import warnings
import weakref
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from core.parallel_state.by_hand import ByHand, Heard
from core.parallel_state.by_hand.functions import program_level
from core.parallel_state.collectives import Group, all_gather
from core.parallel_state.collectives.checks import checksum, fingerprint
from core.parallel_state.collectives.groups import ranks_of
from core.parallel_state.layout import layout_of
from core.parallel_state.spread import keep_layouts
from core.tensor_parallel.differences import (
    BATCH,
    compare_experts,
    difference_message,
    follow_sums,
    has_full_memory,
)
from core.tensor_parallel.hooked_gradients import HookedGradients
from core.tensor_parallel.seen_parts import HookedParts, modules_between_split, of_program
from core.tensor_parallel.summed_gradients import (
    Penalties,
    first_replicated,
    is_added_up,
    is_replicated,
    sum_gradients_of_foreign,
    warn_of_whole_gradients,
)

_MIXED = (
    "{name} by hand puts together different parts of a weight, those of other tensor ranks: average gradients over "
    "group=parallel_state.get_data_parallel_group(), or wrap the model in core.data_parallel.DistributedDataParallel"
)
_HOOK_OF_ROWS = (
    "this rank's rows, [s/tp, b, h], under sequence parallelism: sums, means and norms are of these rows, and what "
    "is added to the loss of them counts once on each tensor rank. core.tensor_parallel."
    "gather_from_sequence_region(x, group, to_tensor_region=False) gives all rows"
)
_HOOK_OF_PARTS = (
    "this tensor rank's part of weights, and of activations between parallel linears ([s, b, h/tp]): what is "
    "elementwise is right, norms, means and columns by number are of the part. core.tensor_parallel.full_tensor "
    "gives a whole weight, gather_from_tensor_region a whole activation"
)
_USED_IN_ROWS = (
    ". A parameter that it uses and the model does not hold gets the gradient of this part only: register it in the "
    "model, or pass it through core.tensor_parallel.sum_gradient"
)


class SplitWatch:
    """Compares weights and inputs over the tensor ranks in forwards 1, 2, 4, 8 ... and in the first one
    after an update. One all-gather of a number per parameter over the group, then; nothing in between.

    sums_foreign: adapters put into the model after it was made see sequence shards, and get their gradients summed.
    expert_group: the ranks that hold a model's other experts, data ranks among them.
    warns_of_hooks: of hooks on modules between split ones, found by the names that a `GPTModel` gives.
    after: who listened to the parameters before.
    """

    def __init__(
        self,
        group: Group | None,
        *,
        expert_group: Group | None = None,
        sums_foreign: bool = False,
        warns_of_hooks: bool = True,
        after: ByHand | None = None,
    ) -> None:
        self._group = group
        self._expert_group = expert_group
        self._sums_foreign = sums_foreign
        self._forwards = 0
        self._warned_of_hooks = not (warns_of_hooks and group is not None)
        # what hooks on modules between split ones are given
        self._hooked_parts: HookedParts | None = None
        self._hooked_gradients: HookedGradients | None = None
        if group is not None and warns_of_hooks:
            self._hooked_parts = HookedParts(group, self._warn_of_hook)
            self._hooked_gradients = HookedGradients(
                group, partial(self._warn_of_hook, what="a backward hook")
            )
        self._warned_of_parts = self._warned_of_sums = False
        self._penalties = Penalties()
        # observes arithmetic between forwards
        self._by_hand: ByHand | None = None
        self._listened_before = after
        self._split: list[tuple[nn.Module, str]] = []
        self._forwards_with_gradients = 0
        # kinds of arithmetic, on weights, on gradients or on states
        self._warned_of: set[tuple[str, bool, bool]] = set()
        # a parameter, and its version in the last forward
        self._probe: tuple[Tensor, int] | None = None

    def __deepcopy__(self, memo: dict) -> "SplitWatch":
        copy = SplitWatch(
            self._group, expert_group=self._expert_group, sums_foreign=self._sums_foreign
        )
        copy._warned_of_hooks = self._warned_of_hooks
        return copy

    @torch.compiler.disable
    def check_before(self, module: nn.Module, inputs: Sequence[Tensor | None]) -> None:
        """Before a forward of `module`. inputs: what must be the same on all tensor ranks, None left out.

        Raises ValueError, on every rank of the group: what differs and should not, or does not and should.
        """
        if self._by_hand is not None:
            self._by_hand.close()
        self._detach_from_hooks()
        # under torch.func's transforms values cannot be compared
        if torch._C._are_functorch_transforms_active():
            return
        self._forwards += 1
        # an optimizer writes in place, which autograd's counter shows
        updated = self._probe is not None and self._probe[0]._version != self._probe[1]
        # powers of two: a run of many steps compares a few dozen times
        if self._forwards & (self._forwards - 1) and not updated:
            return
        # only the first update is waited for
        if self._forwards == 1 or updated:
            probe = next((p for p in module.parameters() if p.requires_grad), None)
            if probe is not None and not updated:
                self._probe = (probe, probe._version)
            else:
                self._probe = None
        keep_layouts(module)
        if self._sums_foreign:
            sum_gradients_of_foreign(module, self._group)
        self._look_at_hooks(module)
        if self._group is not None:
            self._compare(self._group, module, [x for x in inputs if x is not None])
        if self._expert_group is not None:
            compare_experts(self._expert_group, module)

    def follow_after(
        self, module: nn.Module, outputs: Sequence[Tensor], *, are_replicated: bool | None
    ) -> None:
        """After a forward with gradients: observe arithmetic by hand until the next one.

        outputs: those that want a gradient. are_replicated: every tensor rank has all of them, so that their
        gradients must be the same on all; None: those that have the same values are.
        """
        self._detach_from_hooks()
        self._forwards_with_gradients += 1
        is_compared = not self._forwards_with_gradients & (self._forwards_with_gradients - 1)
        by_hand = self.observe(module, look_again=is_compared)
        for output in outputs:
            if self._group is not None and is_compared:
                follow_sums(output, self._group)
            if self._group is not None and is_compared and are_replicated is not False:
                _compare_gradient(output, self._group, is_replicated=are_replicated)
            output.register_hook(by_hand.pause_in_backward)

    def listen_again(self) -> None:
        """After a forward without gradients: as before it."""
        if not torch.compiler.is_compiling():
            self._detach_from_hooks()
        if self._by_hand is not None and not torch.compiler.is_compiling():
            self._by_hand.open(self._split_parameters())

    def observe(self, module: nn.Module, *, look_again: bool = True) -> ByHand:
        """Until the next forward, warn of arithmetic by hand on split parameters: once for each kind.

        look_again: for parameters that were replaced; going through all modules costs more than the rest of it.
        """
        if self._by_hand is None:
            self._by_hand = ByHand(
                partial(self._warn_of_arithmetic, weakref.ref(module)),
                gradients=True,
                states=True,
                after=self._listened_before,
            )
            self._listened_before = None
        if look_again:
            self._split = []
            for submodule in module.modules():
                for name, p in submodule.named_parameters(recurse=False):
                    if {"tp", "ep"} & layout_of(p).split.keys() or is_added_up(p):
                        self._split.append((submodule, name))
            self._split += first_replicated(module)
        self._by_hand.open(self._split_parameters())
        return self._by_hand

    def _split_parameters(self) -> list[nn.Parameter]:
        # by name: a reference to a parameter itself would keep torch from swapping it
        found = [submodule._parameters.get(name) for submodule, name in self._split]
        return [parameter for parameter in found if parameter is not None]

    def _warn_of_arithmetic(self, module: weakref.ref, heard: Heard) -> None:
        model_alive = module()
        if is_replicated(heard.parameter) or is_added_up(heard.parameter):
            self._penalties.follow(model_alive, heard, self._mixes_shards(heard))
            return
        mixes_shards = self._mixes_shards(heard)
        kind = (heard.kind, heard.of_gradient, bool(heard.of_state))
        if (
            model_alive is None
            or kind in self._warned_of
            or not (heard.sees_only_shard or mixes_shards)
        ):
            return
        self._warned_of.add(kind)
        warnings.warn(
            _MIXED.format(name=heard.name) if mixes_shards else heard.message(model_alive),
            stacklevel=program_level(),
        )

    def _mixes_shards(self, heard: Heard) -> bool:
        """Whether a collective puts together different parts."""
        if heard.kind != "sum":
            return False
        is_expert = "ep" in layout_of(heard.parameter).split
        group = self._expert_group if is_expert else self._group
        return group is not None and len(set(ranks_of(heard.group)) & set(group.ranks)) > 1

    def _look_at_hooks(self, module: nn.Module) -> None:
        """A user's hook sees shards: what it does with them is followed; that of a forward is told at once under
        sequence parallelism, where parameters that it brings along have no layout as well."""
        if self._hooked_parts is None or self._hooked_gradients is None:
            return
        self._hooked_parts.compare_factors(next(module.parameters()).device)
        split = modules_between_split(module)
        self._hooked_gradients.attach(module, split, has_rows=self._sums_foreign)
        if self._warned_of_hooks:
            return
        if not self._sums_foreign:
            self._hooked_parts.attach(module, split)
            return
        for name, submodule in module.named_modules():
            if what := of_program(submodule):
                seen = _HOOK_OF_PARTS if name in split else _HOOK_OF_ROWS
                self._warn_of_hook(name, seen, what=what)
                return

    def _detach_from_hooks(self) -> None:
        if self._hooked_parts is not None and self._hooked_gradients is not None:
            self._hooked_parts.detach()
            self._hooked_gradients.detach()

    def _warn_of_hook(
        self, name: str, seen: str = _HOOK_OF_PARTS, *, what: str = "a forward hook"
    ) -> None:
        if not self._warned_of_hooks:
            self._warned_of_hooks = True
            remedy = _USED_IN_ROWS if self._sums_foreign else ""
            says = f"{what} on {name or 'the model'} sees {seen}{remedy}"
            warnings.warn(says, stacklevel=program_level())

    def _compare(self, group: Group, module: nn.Module, inputs: Sequence[Tensor]) -> None:
        named = list(module.named_parameters())
        if not all(has_full_memory(p) for _, p in named):
            return
        _refuse_different_counts(
            torch.tensor([[len(named), len(inputs)]], device=named[0][1].device), group
        )
        # activations of a stage before may differ by rounding
        floating = [x for x in inputs if x.is_floating_point()]
        if floating:
            other = _unlike_rank(
                torch.cat([fingerprint(x.detach()) for x in floating]), group, 0.01
            )
            if other is not None:
                raise ValueError(difference_message(group, BATCH, other, self._forwards))
        inputs = [x for x in inputs if not x.is_floating_point()]
        # experts may lie on one tensor rank each
        replicated = [
            (name, p) for name, p in named if not {"tp", "ep"} & layout_of(p).split.keys()
        ]
        split = {name: p for name, p in named if "tp" in layout_of(p).split and p.dim() > 1}
        # one number per tensor, all in one message: equal checksums are taken for equal values
        local_sums = torch.stack(
            [checksum(x) for x in (*inputs, *(p for _, p in replicated), *split.values())]
        )
        gathered = all_gather(local_sums[None], group).cpu()
        labels = [BATCH] * len(inputs) + [name for name, _ in replicated]
        differs = (gathered[:, : len(labels)] != gathered[0, : len(labels)]).any(0)
        if differs.any():
            column = int(differs.nonzero()[0])
            other = int((gathered[:, column] != gathered[0, column]).nonzero()[0])
            shapes = [x.shape for x in (*inputs, *(p for _, p in replicated))]
            raise ValueError(
                difference_message(group, labels[column], other, self._forwards, shapes[column])
            )
        split_sums = gathered[:, len(labels) :]
        are_equal = (split_sums == split_sums[0]).all(0)
        # parts that are all equal were drawn or broadcast as if they were whole; NaN is of a run that diverged
        are_alike = split_sums[0].any() and are_equal.all()
        if are_alike and all(p.isfinite().all() for p in split.values()):
            raise ValueError(
                f"all {len(split)} split weights are the same on the {group.size} tensor ranks, which hold "
                "different parts. DistributedDataParallel over the default group broadcasts one rank's: use "
                "core.data_parallel.DistributedDataParallel, or process_group=parallel_state."
                "get_data_parallel_group(). One rank's state_dict() loaded on all: use dist_checkpointing.load. "
                "model.apply(...) draws the same on each: use the layers' own initial weights, or a generator per "
                "rank"
            )
        self._warn_of_equal_parts(split, are_equal)
        if self._forwards > 1 and not self._warned_of_sums:
            self._warned_of_sums = warn_of_whole_gradients(named, group)

    def _warn_of_equal_parts(self, split: dict[str, Parameter], are_equal: Tensor) -> None:
        """Warns, once: some split weights were drawn alike on all ranks.

        What does not vary along the split dim (constants, Mamba's A_log of each channel) is alike by right.
        """
        if self._warned_of_parts:
            return
        for (name, parameter), is_equal in zip(split.items(), are_equal.tolist(), strict=True):
            first = parameter.detach().narrow(layout_of(parameter).split["tp"], 0, 1)
            if is_equal and not (parameter == first).all() and parameter.isfinite().all():
                self._warned_of_parts = True
                warnings.warn(
                    f"{name} is the same on the tensor ranks, which hold different parts of it: ranks that are "
                    "seeded alike draw alike. Draw the whole and keep this rank's part, or use a generator of its "
                    "own per rank",
                    stacklevel=program_level(),
                )
                return


def _refuse_different_counts(numbers: Tensor, group: Group) -> None:
    """Raise ValueError if counts differ: messages of different lengths would be mixed up or deadlock."""
    gathered = all_gather(numbers, group).tolist()
    if any(rank_numbers != gathered[0] for rank_numbers in gathered):
        raise ValueError(
            f"the tensor ranks {list(group.ranks)} have {[n for n, _ in gathered]} parameters and are "
            f"called with {[n for _, n in gathered]} tensors; build one model on all of them, and call it alike"
        )


def split_watch(
    group: Group | None, expert_group: Group | None, *, sums_foreign: bool
) -> SplitWatch | None:
    """A watch of a model over these groups; None where nothing is split."""
    if group is None and expert_group is None:
        return None
    return SplitWatch(group, expert_group=expert_group, sums_foreign=sums_foreign)


def _unlike_rank(numbers: Tensor, group: Group, tolerance: float) -> int | None:
    """Index of the first rank whose fingerprints, one after the other, are off the first's by `tolerance` of the
    largest; None where all agree."""
    gathered = all_gather(numbers[None], group).cpu().unflatten(1, (-1, 2))
    sizes = gathered[..., 0].amax(0).clamp(min=1e-300)
    is_close = (gathered - gathered[0]).abs().amax(2) <= tolerance * sizes
    unlike = ~(is_close | ~sizes.isfinite()).all(1)
    if unlike.any():
        return int(unlike.nonzero()[0])
    return None


def _compare_gradient(output: Tensor, group: Group, *, is_replicated: bool | None) -> None:
    """In the first backward through `output`: two numbers of its gradient over the group, and two of its own.

    is_replicated: None is where the values of `output` are the same on all ranks.
    Raises ValueError there, on every rank, if they differ by more than rounding: each rank would train another loss.
    """
    is_first = True
    values = None
    if is_replicated is None:
        detached = output.detach()
        if detached.numel() == 0 or (detached == detached.reshape(-1)[0]).all():
            # parts of a head that begins with zeros, or has padded rows only: no other rank's are like it. A rank
            # that did not come to the comparison would leave the others waiting
            values = detached.new_full((2,), 1.0 + group.rank, dtype=torch.float64)
        else:
            values = fingerprint(detached)

    def hook(gradient: Tensor) -> None:
        nonlocal is_first
        if not is_first or torch._C._are_functorch_transforms_active():
            return
        is_first = False
        if values is not None and _unlike_rank(values, group, 1e-4) is not None:
            return
        numbers = fingerprint(gradient.detach())
        if _unlike_rank(numbers, group, 0.01) is not None:
            of_ranks = all_gather(numbers[None, :1], group).flatten().tolist()
            norms = ", ".join(f"{x:.6g}" for x in of_ranks)
            raise ValueError(
                f"the tensor ranks {list(group.ranks)} computed different losses of one output: its gradient "
                f"has the norms {norms}, or other signs. They share one model and must compute the same loss: the "
                "same mask, weights and random numbers on each; seed by parallel_state.get_data_parallel_rank()"
            )

    output.register_hook(hook)
