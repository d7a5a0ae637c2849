"""One stage on its rank: forward, recomputation, input gradients and weight gradients of its microbatches."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from core.autograd import GradSync, NullGradSync, StageContext, WeightGradBag, apply_recompute, reroute
from core.autograd.compiled import give_ticket
from core.autograd.statistics import norms_of, statistics_kept
from core.parallel_state.collectives.p2p import version_of
from core.parallel_state.random import generators_of
from core.pipeline.step import (
    LossFn,
    call_next_stage,
    call_stage,
    check_loss,
    forward_arguments,
    scale_like,
    stage_seed,
    sums,
    told_by,
)


def has_gradient(value: Any) -> bool:
    """Whether it is a tensor of a dtype that can have one."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


@dataclass(eq=False)
class _Held:
    """What a microbatch leaves behind between its F and its W.

    received: the output of the stage before, its floating tensors leaves of this stage's graph (`leaves`).
    ends: one per floating tensor of the output: where its gradient enters the graph, None if it has none. As
    an edge and not as a tensor, so that the output itself is let go at once.
    """

    received: Any
    leaves: list[Tensor]
    microbatch: int
    bag: WeightGradBag
    ends: list[GradientEdge | None] = field(default_factory=list)
    seed: list[Tensor] = field(default_factory=list)  # the loss's own gradient, on the last stage
    versions: list[int] = field(default_factory=list)  # of what an R will start from, before F


@dataclass(frozen=True)
class StepFacts:
    """What every stage is told about a step.

    step: its number. first: the global index of this replica's first microbatch. parts: the microbatches.
    loss_fn: None where outputs are wanted. training: whether backward follows. sync: who reduces gradients.
    """

    step: int
    first: int
    parts: list[Any]
    loss_fn: LossFn | None
    sync: GradSync
    training: bool = False
    loss_scale: float | Tensor = 1.0


def _versions(*values: Any) -> list[int]:
    return [version_of(leaf) for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


class Stage:
    """Runs one module as stage `index` of `stages`, any `nn.Module`.

    policy: "none", "layer", "selective", names or classes (see `apply_recompute`), or "stage": the executor
    recomputes by R.
    """

    def __init__(
        self, module: nn.Module, index: int, stages: int, *, policy: Any, seed: int, device: torch.device
    ) -> None:
        own = getattr(module, "stage", None)
        self.module, self.index, self.device, self.seed = module, index, device, seed
        self.first, self.last = index == 0, index == stages - 1
        self.context = own if isinstance(own, StageContext) else StageContext()
        self._undo: list[Any] = [reroute(module, self.context)]
        if policy not in ("none", "stage"):
            try:
                self._undo.append(apply_recompute(module, policy, stage=self.context))
            except Exception:
                self.close()
                raise
        self._arguments = forward_arguments(module)
        self._held: dict[int, _Held] = {}
        self._compiled, self._norms = False, norms_of(module)
        self._fresh: list[nn.Parameter] = []  # without a gradient so far
        for parameter in self.parameters:  # before layers are compiled, not by a graph break in their first call
            give_ticket(parameter)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What is trained now."""
        return [p for p in self.module.parameters() if p.requires_grad]

    def close(self) -> None:
        """Give the module its own forwards back."""
        while self._undo:
            self._undo.pop().remove()

    def prepare(self) -> None:
        """Before a step: the norms that an R leaves alone, and whether compiled code will need a bag it can reach."""
        self._norms = norms_of(self.module)
        self._compiled = any(
            m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in self.module.modules()
        )
        self._fresh = [p for p in self.parameters if p.grad is None]

    def waiting(self, m: int) -> list[Tensor]:
        """What waits for W of a microbatch."""
        return self._held[m].bag.tensors()

    def clear(self) -> None:
        """Forget everything held, after a step or a failure."""
        self._held.clear()
        self.context.release()

    def forward(self, m: int, received: Any, facts: StepFacts, *, keep: bool) -> Any:
        """F: the output, detached, for the next stage; [2] sums on the last stage (the output without a loss).

        keep: whether backward follows from this graph; otherwise R makes it.
        """
        leaves: list[Tensor] = []

        def leaf(value: Any) -> Any:
            if not has_gradient(value):
                return value
            leaves.append(value.detach().requires_grad_())
            return leaves[-1]

        if facts.training:  # one tensor is the common case, and quicker
            received = leaf(received) if isinstance(received, Tensor) else pytree.tree_map(leaf, received)
        held = _Held(received, leaves, facts.first + m, WeightGradBag(compiled=self._compiled))
        if not keep:
            held.versions = _versions(received, facts.parts[m])
        facts.sync.before_forward(self.module)
        with torch.set_grad_enabled(keep):
            output = self._call(m, held, facts)
        if facts.training:
            self._held[m] = held
        if keep:
            self._keep(held, output, facts)
        if self.last and facts.loss_fn is not None:
            loss_sum, num_tokens = output
            return sums(loss_sum, num_tokens, self.device)
        if isinstance(output, Tensor):
            return output.detach()
        return pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, output)

    def recompute(self, m: int, facts: StepFacts) -> None:
        """R: the graph of the microbatch again, from the same input, weights and random numbers."""
        held = self._held[m]
        if held.versions != _versions(held.received, facts.parts[m]):
            raise RuntimeError(
                f"stage {self.index} changed its input or its microbatch in place: it cannot be recomputed from it; "
                "clone it in the stage, or use recompute='none'"
            )
        facts.sync.before_forward(self.module)
        with torch.enable_grad(), statistics_kept(self._norms):
            self._keep(held, self._call(m, held, facts), facts)

    def _call(self, m: int, held: _Held, facts: StepFacts) -> Any:
        """The module's output; on the last stage (loss_sum, num_tokens)."""
        self.context.begin(seed=self.seed, step=facts.step, microbatch=held.microbatch, bag=held.bag)
        part = facts.parts[m]
        seed = stage_seed(self.seed, facts.step, held.microbatch, self.index)
        for generator in generators_of(self.device):  # whose states the pipeline puts back after the step
            generator.manual_seed(seed)
        if self.first:
            output = call_stage(self.module, part, self._arguments)
        else:
            output = call_next_stage(self.module, held.received, part, self._arguments)
        if self.last and facts.loss_fn is not None:
            output = told_by(facts.loss_fn, output, part)
        self.context.release()  # a module of two stages defers into the one that has a bag
        return output

    def _keep(self, held: _Held, output: Any, facts: StepFacts) -> None:
        """Remember where gradients enter the graph of this output."""
        if self.last:
            leaves = [output[0]] if check_loss(*output) else []
            held.seed = [scale_like(loss, facts.loss_scale) for loss in leaves]
        elif isinstance(output, Tensor):
            leaves = [output] if has_gradient(output) else []
        else:
            leaves = [leaf for leaf in pytree.tree_leaves(output) if has_gradient(leaf)]
        held.ends = [get_gradient_edge(y) if y.requires_grad else None for y in leaves]

    def input_gradients(self, m: int, gradients: list[Tensor] | None, facts: StepFacts) -> list[Tensor]:
        """I: gradients of the output's floating tensors in, those of the input's out; the graph is gone after it.

        gradients: None on the last stage. An input that nothing depends on gets zeros: the stage before waits.
        """
        held = self._held[m]
        facts.sync.before_input_grad(self.module)
        given = zip(held.ends, held.seed if gradients is None else gradients, strict=True)
        pairs = [(end, gradient) for end, gradient in given if end is not None]
        if pairs:
            torch.autograd.backward([end for end, _ in pairs], [gradient for _, gradient in pairs])
        facts.sync.after_input_grad(self.module, held.bag.parameters())
        found = [x.grad if x.grad is not None else torch.zeros_like(x) for x in held.leaves]
        self._own_gradients([*held.bag.tensors(), *found])
        held.received, held.leaves, held.ends, held.seed = None, [], [], []
        return found

    def _own_gradients(self, kept: list[Tensor]) -> None:
        """Autograd may make a view of an output gradient a parameter's `.grad`, and add the next microbatch's into
        it: into what waits for W, or is being sent."""
        first = [(p, p.grad) for p in self._fresh if p.grad is not None]  # none with main_grad, whose owner takes it
        if not first:
            return
        memory = {tensor.untyped_storage().data_ptr() for tensor in kept}
        for parameter, gradient in first:
            if gradient.layout is torch.strided and gradient.untyped_storage().data_ptr() in memory:
                parameter.grad = gradient.clone()
        self._fresh = [p for p in self._fresh if p.grad is None]

    def weight_gradients(self, m: int, facts: StepFacts) -> None:
        """W: empty the bag; a parameter is ready when the last of its thunks has run."""
        bag, sync = self._held.pop(m).bag, facts.sync
        if isinstance(sync, NullGradSync):
            bag.run()
            return
        sync.before_weight_grad(self.module)
        left = Counter(bag.parameters())
        while len(bag):
            parameter = bag.run_one()
            left[parameter] -= 1
            if not left[parameter]:
                sync.ready(parameter)
        sync.after_weight_grad(self.module)
