"""One stage on its rank: forward, recomputation, input gradients and weight gradients of its microbatches."""

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from core.autograd import GradSync, NullGradSync, StageContext, WeightGradBag, apply_recompute, reroute
from core.autograd.compiled import make_compilable
from core.autograd.module_state import Before, ModuleState
from core.parallel_state.collectives.p2p import version_of
from core.parallel_state.random import generators_of
from core.pipeline.run.boundary import alias, check_leaf, copied, flatten, left, tree_map
from core.pipeline.run.step import (
    LossFn,
    call_loss_fn,
    call_next_stage,
    call_stage,
    check_loss,
    forward_arguments,
    scale_like,
    stage_seed,
    sums,
    without_autocast,
)


@dataclass(eq=False)
class _HeldForward:
    """What a microbatch leaves behind between its F and its W.

    received: the output of the stage before; its tensors that want a gradient are leaves of this stage's graph
    (`leaves`).
    ends: one per tensor of the output that `wants` a gradient: where that enters the graph, None if it has none. As
    an edge and not as a tensor, so that the output itself is let go at once.
    """

    received: Any
    leaves: list[Tensor]
    microbatch: int
    bag: WeightGradBag
    ends: list[GradientEdge | None] = field(default_factory=list)
    wants: list[bool] = field(default_factory=list)  # of each tensor of the output, as the next stage was told
    seed: list[Tensor] = field(default_factory=list)  # the loss's own gradient, on the last stage
    versions: list[int] = field(default_factory=list)  # of what an R will start from, before F
    before: Before = field(default_factory=Before)  # the state of the modules before F, for R
    given: Any = None  # the copy that F works on, where it may write into it


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
    return [version_of(leaf) for leaf in flatten(values)[0] if isinstance(leaf, Tensor)]


class Stage:
    """Runs one module as stage `index` of `stages`, any `nn.Module`.

    policy: "none", "layer", "selective", names or classes (see `apply_recompute`), or "stage": the executor
    recomputes by R.
    """

    def __init__(
        self, module: nn.Module, index: int, stages: int, *, policy: Any, seed: int, device: torch.device
    ) -> None:
        if lazy := [name for name, p in module.named_parameters() if is_lazy(p)]:
            raise ValueError(
                f"stage {index} has {len(lazy)} parameters without a shape ({lazy[0]}, ...): lazy modules get "
                "theirs from a forward; run one on a sample before you build the pipeline"
            )
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
        self._held: dict[int, _HeldForward] = {}
        self._compiled, self._state = False, ModuleState(module)
        self._wants: list[bool] | None = None  # of the output's tensors in this step, once known
        self._learnt: dict[Any, list[bool]] = {}  # by what is trained and what is received
        self._left: set[tuple[int, str]] = set()  # attributes that want a gradient
        self._trained: tuple[bool, ...] = ()
        self._key: Any = None
        self._writes: bool | None = None  # whether it writes into what it received; None until it was tried
        self._fresh: list[nn.Parameter] = []  # without a gradient so far
        for parameter in self.parameters:  # before layers are compiled, not by a graph break in their first call
            make_compilable(parameter)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What is trained now."""
        return [p for p in self.module.parameters() if p.requires_grad]

    def close(self) -> None:
        """Give the module its own forwards back."""
        while self._undo:
            self._undo.pop().remove()

    def prepare(self) -> None:
        """Before a step: what is trained, which buffers there are, whether compiled code needs a bag it can reach."""
        self._state.refresh(list(self.module.modules()))
        self._compiled = any(
            m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in self.module.modules()
        )
        self._fresh = [p for p in self.parameters if p.grad is None]
        self._wants, self._trained = None, tuple(p.requires_grad for p in self.module.parameters())

    def waiting(self, m: int) -> list[Tensor]:
        """What waits for W of a microbatch."""
        return self._held[m].bag.tensors()

    def clear(self) -> None:
        """Forget everything held, after a step or a failure."""
        self._held.clear()
        self.context.release()

    def forward(self, m: int, received: Any, facts: StepFacts, *, keep: bool) -> Any:
        """F: the output, detached, for the next stage, each tensor saying by `requires_grad` whether it wants a
        gradient; [2] sums on the last stage (the output without a loss; None where R will make the sums).

        keep: whether backward follows from this graph; otherwise R makes it.
        """
        leaves: list[Tensor] = []

        def leaf(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.requires_grad:
                return value
            leaves.append(value.detach().requires_grad_())
            return leaves[-1]

        if facts.training:  # one tensor is the common case, and quicker
            received = leaf(received) if isinstance(received, Tensor) else tree_map(leaf, received)
        held = _HeldForward(received, leaves, facts.first + m, WeightGradBag(compiled=self._compiled, open=False))
        again = facts.training and not keep
        if again:
            held.versions, held.before = _versions(received, facts.parts[m]), self._state.before()
        facts.sync.before_forward(self.module)
        # the first F that R will repeat has a graph as well, until it returns: it says which outputs want gradients
        told = keep or (again and not self.last and self._wants is None and not self._has_learnt(received))
        with torch.set_grad_enabled(told):
            output = self._call(m, held, facts, again=again)
        if not facts.training:
            return (
                sums(output[0], output[1], self.device)
                if self.last and facts.loss_fn is not None
                else self._evaluated(output)
            )
        self._held[m] = held
        if again:
            self._state.after(held.before)
            self._mark_left(held.before, told)
            self._see_writes(held)
        if self.last:
            if again:
                return None
            self._keep_loss(held, output, facts)
            return sums(output[0], output[1], self.device)
        return self._hand_over(held, output, keep=keep, told=told)

    def _mark_left(self, before: Before, told: bool) -> None:
        """After an F that R will repeat: what it put on modules and wanted a gradient has none."""
        for module, name, _ in before.attributes:
            value = module.__dict__.get(name)
            if not isinstance(value, Tensor):
                continue
            if told and value.requires_grad:
                self._left.add((id(module), name))
            if (id(module), name) in self._left:
                module.__dict__[name] = left(value, f"`{name}` of a {type(module).__name__} of stage {self.index}")

    def _has_learnt(self, received: Any) -> bool:
        """Whether an earlier step, with the same parameters trained, told which outputs want gradients."""
        self._key = self._trained, tuple(x.requires_grad for x in flatten(received)[0] if isinstance(x, Tensor))
        self._wants = self._learnt.get(self._key)
        return self._wants is not None

    def _evaluated(self, output: Any) -> Any:
        """An output that nothing follows from, for the next stage or the caller."""
        if not self.last:
            tree_map(partial(check_leaf, self.index), output)
        return tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, output)

    def recompute(self, m: int, facts: StepFacts) -> Tensor | None:
        """R: the graph of the microbatch again, from the same input, weights and random numbers.

        Returns [2] sums on the last stage, whose loss is computed here and not in F.
        """
        held = self._held[m]
        if held.versions != _versions(held.received, facts.parts[m]):
            raise RuntimeError(
                f"stage {self.index} changed its input or its microbatch in place: it cannot be recomputed from it; "
                "clone it in the stage, or use recompute='none'"
            )
        facts.sync.before_forward(self.module)
        with torch.enable_grad(), self._state.as_before(held.before):
            output = self._call(m, held, facts)
        if self.last:
            self._keep_loss(held, output, facts)
            return sums(output[0], output[1], self.device)
        tensors = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor)]
        if any(y.requires_grad and not want for y, want in zip(tensors, held.wants, strict=True)):
            raise RuntimeError(
                f"stage {self.index} returned a tensor that wants a gradient for microbatch {m}, and wanted none "
                "before in this step; let it depend on trained parameters in every microbatch, or in none"
            )
        self._keep(held, tensors)
        return None

    def _call(self, m: int, held: _HeldForward, facts: StepFacts, *, again: bool = False) -> Any:
        """The module's output; on the last stage (loss_sum, num_tokens), which is R's where it will run `again`."""
        self.context.begin(seed=self.seed, step=facts.step, microbatch=held.microbatch, bag=held.bag)
        part = facts.parts[m]
        seed = stage_seed(self.seed, facts.step, held.microbatch, self.index)
        for generator in generators_of(self.device):  # whose states the pipeline puts back after the step
            generator.manual_seed(seed)
        received, part = self._given(held, part, again)
        if self.first:
            output = call_stage(self.module, part, self._arguments)
        else:
            output = call_next_stage(self.module, received, part, self._arguments)
        if self.last and facts.loss_fn is not None and not again:
            output = call_loss_fn(facts.loss_fn, output, part)
        self.context.release()  # a module of two stages defers into the one that has a bag
        return output

    def _given(self, held: _HeldForward, part: Any, again: bool) -> tuple[Any, Any]:
        """What the module is called with: it may write into it, as in one process; R starts from what is held."""
        received = held.received
        if not again or self._writes is False:
            return alias(received) if isinstance(received, Tensor) else tree_map(alias, received), part
        held.given = tree_map(copied, (received, part))
        return held.given

    def _see_writes(self, held: _HeldForward) -> None:
        """After a first F that R will repeat: whether the module wrote into the copy that it was given."""
        if held.given is not None:
            self._writes = bool(self._writes) or any(_versions(held.given))
            held.given = None

    def _hand_over(self, held: _HeldForward, output: Any, *, keep: bool, told: bool) -> Any:
        """The output for the next stage; `told`: its tensors say whether they want a gradient."""
        leaves, spec = ([output], None) if isinstance(output, Tensor) else flatten(output)
        for leaf in leaves:
            check_leaf(self.index, leaf)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        before = self._wants
        if before is not None and len(before) == len(tensors):
            wants = [a or y.requires_grad for a, y in zip(before, tensors, strict=True)]
        elif told:
            wants = [y.requires_grad for y in tensors]
        else:  # nobody could tell
            wants = [y.is_floating_point() or y.is_complex() for y in tensors]
        held.wants = wants
        if before is None:
            self._wants = wants
            if told and not keep:
                self._learnt[self._key] = wants
        if keep:
            self._keep(held, tensors)
        rest = iter(wants)
        made = [leaf.detach().requires_grad_(next(rest)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return made[0] if spec is None else pytree.tree_unflatten(made, spec)

    def _keep(self, held: _HeldForward, tensors: list[Tensor]) -> None:
        """Remember where gradients enter the graph of these outputs."""
        wanted = [y for y, want in zip(tensors, held.wants, strict=True) if want]
        held.ends = [get_gradient_edge(y) if y.requires_grad else None for y in wanted]

    def _keep_loss(self, held: _HeldForward, output: tuple[Tensor, Tensor | float], facts: StepFacts) -> None:
        """The same for the loss, whose gradient is known."""
        if check_loss(*output):
            held.ends, held.seed = [get_gradient_edge(output[0])], [scale_like(output[0], facts.loss_scale)]

    def input_gradients(self, m: int, gradients: list[Tensor] | None, facts: StepFacts) -> list[Tensor]:
        """I: gradients of the outputs that want one in, those of the inputs that do out; the graph is gone after it.

        gradients: None on the last stage. An input that nothing depends on gets zeros: the stage before waits.
        Without autocast, as torch recommends: every operation's backward has the dtype of its forward.
        """
        held = self._held[m]
        facts.sync.before_input_grad(self.module)
        given = zip(held.ends, held.seed if gradients is None else gradients, strict=True)
        pairs = [(end, gradient) for end, gradient in given if end is not None]
        if pairs:
            # whoever runs a forward again in here (torch's checkpoint) finds the context of the first time
            self.context.begin(seed=self.seed, step=facts.step, microbatch=held.microbatch, bag=held.bag)
            held.bag.open = True
            with without_autocast(self.device):
                torch.autograd.backward([end for end, _ in pairs], [gradient for _, gradient in pairs])
            held.bag.open = False
            self.context.release()
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
        with without_autocast(self.device):
            self._empty(bag, sync)

    def _empty(self, bag: WeightGradBag, sync: GradSync) -> None:
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
