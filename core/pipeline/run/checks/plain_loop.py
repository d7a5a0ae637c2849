"""What a training loop written for one process gets wrong around a pipeline, without an error of torch's:
gradient clipping by the norm of one stage, a DDP over ranks of other stages, another batch per rank."""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from core.parallel_state.by_hand.functions import program_level
from core.parallel_state.collectives import all_gather, all_gather_objects
from core.parallel_state.collectives.checks import checksum
from core.parallel_state.collectives.groups import ranks_of
from core.parallel_state.environment import HostCopy, reading_waits
from core.parallel_state.optimizer_steps import before_optimizer_steps
from core.parallel_state.state import ParallelState
from core.pipeline.run.checks.before_pipeline import end_before_pipeline
from core.pipeline.run.checks.by_hand import Hears, StageArithmetic
from core.pipeline.run.checks.collected import CollectedStatistics
from core.pipeline.run.checks.host_draws import HostDraws
from core.pipeline.run.checks.on_every_stage import OnEveryStage
from core.pipeline.run.checks.shared_by_layers import SharedByLayers
from core.pipeline.run.checks.updates import StageUpdates
from core.pipeline.run.tied import tell_of_twins

SAMPLED_GRADIENTS = 4  # per rank, the smallest ones
SAMPLED_ELEMENTS = 2  # of each, the largest ones
# relative: elements scaled by one factor differ by rounding only
UNIFORM = 1e-4
# relative: ranks whose factors differ by more clipped by different norms
DIFFERENT = 0.01


def is_watched_step(steps: int) -> bool:
    """Steps 1, 2, 4, 8 ...: checks cost a collective, mistakes of a loop show early."""
    # a power of two has one bit, which minus 1 clears
    return steps > 0 and not steps & (steps - 1)


def parameters_of(modules: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    """Of all modules; one that several hold comes several times."""
    for module in modules:
        yield from module.parameters()


@dataclass(frozen=True)
class SampledElements:
    """The largest elements of a gradient as a pipeline's step left them."""

    parameter: nn.Parameter
    flat: Tensor
    indices: Tensor
    before: Tensor

    @classmethod
    def sample(cls, parameter: nn.Parameter) -> "SampledElements":
        assert parameter.grad is not None
        flat = parameter.grad.reshape(-1)
        indices = flat.abs().topk(min(SAMPLED_ELEMENTS, flat.numel())).indices
        return cls(parameter, flat, indices, flat[indices])

    @classmethod
    def of_smallest(cls, parameters: Iterable[nn.Parameter]) -> "list[SampledElements]":
        """Of a few small gradients; sparse ones are left out."""
        candidates = [
            p for p in parameters if p.grad is not None and p.grad.layout is torch.strided
        ]
        smallest = sorted(candidates, key=Tensor.numel)[:SAMPLED_GRADIENTS]
        return [cls.sample(parameter) for parameter in smallest if parameter.numel()]

    def factors(self) -> Tensor:
        """By what each was multiplied since; [0] if the gradient is another tensor now (a sum over replicas)."""
        gradient = self.parameter.grad
        ratios = self.flat[self.indices] / self.before
        if gradient is None or gradient.data_ptr() != self.flat.data_ptr():
            return ratios[:0]
        return ratios


class ScaleWatch:
    """Finds gradient clipping by the norm of one rank's stages.

    `torch.nn.utils.clip_grad_norm_` on each rank multiplies all its gradients by one factor, which differs from that
    of other ranks. So a few elements per rank are remembered when a pipeline's step ends, and looked at again when
    an optimizer steps; the factors of all ranks are compared at the end of steps 2, 3, 5, 9 ... by one all-gather of
    one number over the world. Noise, clipping by value, signs or a rate per parameter change elements by factors of
    their own: there is nothing to compare.
    """

    def __init__(self, ps: ParallelState, modules: Sequence[nn.Module]) -> None:
        self._ps = ps
        self._modules = modules
        self._steps = 0
        self._samples: list[SampledElements] = []
        # [1]: of this rank's gradients, NaN if they have not one factor
        self._factor: Tensor | None = None
        before_optimizer_steps(self._look_at_factors)

    @torch.no_grad()
    def after_step(self) -> bool:
        """Compare what the optimizer's last step saw, and sample the smallest of the new gradients; whether it did.

        Raises ValueError, on every rank: factors that differ.
        """
        if is_watched_step(self._steps):
            self._compare_factors()
        self._steps += 1
        self._samples = []
        self._factor = None
        if not is_watched_step(self._steps):
            return False
        self._samples = SampledElements.of_smallest(dict.fromkeys(parameters_of(self._modules)))
        return True

    def _look_at_factors(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._samples or self._factor is not None:
            return
        optimized_ids = _ids_of_optimized(optimizer)
        factors = [
            sample.factors() for sample in self._samples if id(sample.parameter) in optimized_ids
        ]
        if not factors:
            return
        all_factors = torch.cat(factors).double()
        # a zero element has no factor
        all_factors = all_factors[all_factors.isfinite()]
        if all_factors.numel():
            is_uniform = (all_factors - all_factors[0]).abs().max() <= UNIFORM * all_factors[
                0
            ].abs()
            self._factor = torch.where(is_uniform, all_factors[:1], torch.nan)

    def _compare_factors(self) -> None:
        local_factor = self._factor
        if local_factor is None:
            local_factor = torch.full((1,), torch.nan, dtype=torch.float64)
        factors = all_gather(local_factor.to(self._ps.device), self._ps.world)
        # ranks without one factor sent NaN
        finite = factors[factors.isfinite()]
        if finite.numel() and finite.max() - finite.min() > DIFFERENT * finite.max():
            raise ValueError(
                f"gradients were scaled by {finite.min().item():.4g} on one rank and by {finite.max().item():.4g} on "
                f"another before the optimizer's step {self._steps}: torch.nn.utils.clip_grad_norm_ takes the "
                "norm of one rank's stages; use core.optimizer.clip_grad_norm_, which takes the model's"
            )


def _ids_of_optimized(optimizer: torch.optim.Optimizer) -> set[int]:
    optimized_ids = set()
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimized_ids.add(id(p))
    return optimized_ids


class PlainLoopWatch:
    """Around a pipeline whose weights a loop of the user's updates: clipping, arithmetic by hand, skipped steps.

    sums: hears as well what is done by hand.
    owns_updates: whether torch's optimizers update the stages; under a `grad_sync` ours compare for themselves.
    count: of all stages.
    """

    def __init__(
        self,
        ps: ParallelState,
        stages: Mapping[int, nn.Module],
        sums: Hears,
        owns_updates: bool,
        has_told_of_twins: bool,
        count: int,
    ) -> None:
        self._by_stage = stages
        self._has_told_of_twins = has_told_of_twins
        self._modules = modules = [*stages.values()]
        self._scales = ScaleWatch(ps, modules) if owns_updates else None
        self.updates = StageUpdates(ps, modules, compares_writes=owns_updates)
        self._ps = ps
        self._arithmetic = StageArithmetic(ps, modules, sums, told=end_before_pipeline(modules))
        self._collected = CollectedStatistics(stages, ps.size("pp"))
        self._shared = SharedByLayers(stages, ps.size("pp"))
        self._around = OnEveryStage(stages, ps.size("pp"))
        # `loss_fn`, which the last stage's rank calls, may draw as it likes
        self._host_draws = HostDraws() if count - 1 not in stages else None
        self._steps = self._evaluations = 0
        self._told_of_numbers = self._told_of_noise = False
        self._extremes: list[HostCopy] = []
        self._arithmetic.open()
        self._stages = ps.size("pp")
        before_optimizer_steps(self._refuse_lbfgs)

    def _refuse_lbfgs(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Raises ValueError: products over one pipeline rank's parameters."""
        if not isinstance(optimizer, torch.optim.LBFGS):
            return
        optimized_ids = _ids_of_optimized(optimizer)
        if any(id(p) in optimized_ids for p in parameters_of(self._modules)):
            raise ValueError(
                f"LBFGS takes products over all parameters, and sees those of 1 of {self._stages} pipeline ranks; "
                "use an elementwise optimizer (AdamW, SGD), or a pipeline of 1 rank"
            )

    def before_call(self, microbatches: int = 0) -> None:
        """A call of the pipeline begins: what it does with parameters is not by hand. microbatches: of a step."""
        self._arithmetic.close()
        self._collected.before_call()
        self._shared.before_call()
        self._around.before_call()
        if self._host_draws is not None and microbatches and is_watched_step(self._steps + 1):
            self._host_draws.before_step()
        self.updates.begin(microbatches)

    def after_forward(self) -> None:
        """A call without gradients is over."""
        self._look_at_layers()
        self._arithmetic.reopen()

    def after_evaluation(self) -> None:
        """On all ranks. A program may train by evaluations alone, of weights with noise on them."""
        self._evaluations += 1
        if is_watched_step(self._evaluations) and not self._told_of_numbers:
            self._compare_numbers()

    def after_step(self) -> None:
        """Raises ValueError, on every rank: gradients were clipped by the norm of one rank's stages."""
        self._look_at_layers()
        if self._host_draws is not None:
            self._host_draws.after_step()
        if is_watched_step(self._steps) and not self._told_of_numbers:
            self._compare_numbers()
        self._steps += 1
        # weights that were drawn, or loaded, after the pipeline was made
        if is_watched_step(self._steps) and not self._has_told_of_twins:
            self._has_told_of_twins = tell_of_twins(self._by_stage, self._ps)
        is_watched = self._scales is not None and self._scales.after_step()
        self._arithmetic.open(look_again=is_watched)

    def _look_at_layers(self) -> None:
        self._around.after_call()
        if not self._collected.after_call(besides=self._shared.told_name):
            self._shared.after_call()

    def _compare_numbers(self) -> None:
        """Warn, once, on every rank, of numbers of one rank's gradients by which it changed them."""
        numbers = all_gather(self._arithmetic.numbers(self._ps.device)[None], self._ps.world)
        # a rank without one number for all of its gradients says nothing
        is_known = numbers.isfinite()
        smallest = torch.where(is_known, numbers, torch.inf).amin(0)
        largest = torch.where(is_known, numbers, -torch.inf).amax(0)
        before = self._extremes
        pairs = [number for pair in zip(smallest, largest, strict=True) for number in pair]
        self._extremes = [HostCopy(number) for number in (*pairs, is_known[:, 2].sum().double())]
        # of an accelerator those of the comparison before, which nothing waits for
        extremes = before if reading_waits(self._ps.device) else self._extremes
        values = [copy.read() for copy in extremes]
        self._look_at_noise(*values[4:])
        for does, low, high in zip(
            ("scaled by", "compared with"), values[:4:2], values[1:4:2], strict=False
        ):
            if -math.inf < high and high - low > DIFFERENT * max(abs(low), abs(high)):
                self._told_of_numbers = True
                if self._arithmetic.has_told_of_gradients:
                    return
                warnings.warn(
                    f"gradients were {does} {low:.4g} on one pipeline rank and "
                    f"{high:.4g} on another before the update of step {self._steps}, as norms, "
                    "thresholds and tests of one rank's stages are. Take them of all ranks: "
                    "OptimizerConfig(clip_grad=...), the norm that step() returns, core.optimizer.get_grad_norm, or "
                    "all_reduce over parallel_state.get_pipeline_model_parallel_group(). Rates of layers belong into "
                    "parameter groups",
                    stacklevel=program_level(),
                )
                return

    def _look_at_noise(self, low: float = 0.0, high: float = 1.0, ranks: float = 0.0) -> None:
        """Warn, once, on every rank, of the same draws that were added to gradients of several stages."""
        world = self._ps.world.size if self._ps.world is not None else 1
        if low == high and ranks > world / self._stages and not self._told_of_noise:
            self._told_of_noise = True
            warnings.warn(
                f"what was added to gradients or weights after step {self._steps} begins alike on the pipeline "
                "ranks: noise of one seed on all of them is the same noise for other layers. Seed by stage, "
                "parallel_state.get_pipeline_model_parallel_rank(), and alike on a stage's replicas",
                stacklevel=program_level(),
            )


class BatchWatch:
    """Compares, in steps 1, 2, 4, 8 ..., the batches that the pipeline ranks of a replica were given.

    The first stage reads its inputs from one, the last its labels from another: a sampler over all ranks, or a seed
    per rank, pairs inputs with other samples' labels. One all-gather of a few numbers over pp, at the end of such a
    step, when every rank is known to be there.
    """

    def __init__(self, ps: ParallelState) -> None:
        self._group = ps.group("pp")
        self._steps = 0
        self._has_warned = False
        # name -> dtype, shape, checksum
        self._fingerprints: dict[str, list[Any]] | None = None

    def before_step(self, batch: Any) -> None:
        """Remember a fingerprint of every tensor that this rank was given."""
        self._steps += 1
        if self._group is None or self._has_warned or not is_watched_step(self._steps):
            return
        if batch is not None:
            leaves = pytree.tree_flatten_with_path(batch)[0]
        else:
            leaves = []
        self._fingerprints = {}
        for path, leaf in leaves:
            is_dense = (
                isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_nested
            )
            if is_dense and leaf.numel():
                self._fingerprints[pytree.keystr(path)] = [
                    str(leaf.dtype),
                    *leaf.shape,
                    int(checksum(leaf)),
                ]

    def after_step(self) -> None:
        """Warns, once, on all pipeline ranks: tensors of one name and shape whose values differ."""
        if self._fingerprints is None or self._group is None:
            return
        per_rank = all_gather_objects(self._fingerprints, self._group)
        self._fingerprints = None
        for rank, fingerprints in enumerate(per_rank):
            for name, fingerprint in fingerprints.items():
                other = _first_different(per_rank, name, fingerprint)
                if other is not None:
                    self._has_warned = True
                    ranks = self._group.ranks
                    warnings.warn(
                        f"the batch{name} of rank {ranks[rank]} is not that of rank {ranks[other]}, and both belong "
                        "to one pipeline: the first stage reads inputs from its own, the last one labels. Give all "
                        "the same (sampler: rank=parallel_state.get_data_parallel_rank(), num_replicas="
                        "parallel_state.get_data_parallel_world_size(), one seed), or None where nothing is read",
                        stacklevel=program_level(),
                    )
                    return


def _first_different(
    per_rank: Sequence[dict[str, list[Any]]], name: str, fingerprint: list[Any]
) -> int | None:
    """The first rank whose tensor of this name has the same dtype and shape, but other values."""
    for rank, fingerprints in enumerate(per_rank):
        other = fingerprints.get(name)
        if other is not None and other[:-1] == fingerprint[:-1] and other != fingerprint:
            return rank
    return None


def refuse_other_groups(modules: Sequence[nn.Module], ps: ParallelState) -> None:
    """Raise ValueError for a DistributedDataParallel whose ranks are not the replicas of its stage."""
    group = ps.group("dp-cp")
    replicas = group.ranks if group is not None else (ps.rank,)
    for module in modules:
        for submodule in module.modules():
            if not isinstance(submodule, DistributedDataParallel):
                continue
            ddp_ranks = ranks_of(submodule.process_group)
            if ddp_ranks != replicas:
                raise ValueError(
                    f"DistributedDataParallel averages over ranks {list(ddp_ranks)}, the replicas of this stage "
                    f"are {list(replicas)}: others hold other stages; use "
                    "core.data_parallel.DistributedDataParallel, or "
                    "process_group=parallel_state.get_data_parallel_group()"
                )
