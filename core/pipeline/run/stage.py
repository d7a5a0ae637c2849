"""One pipeline stage on its rank: forward, recomputation, input gradients and weight gradients of microbatches."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from core.autograd import NullGradSync, StageContext, WeightGradBag, apply_recompute, reroute
from core.autograd.linear import make_compilable
from core.autograd.proxy import has_compiled_code
from core.autograd.recomputation.first_outputs import SameOutputs, magnitudes
from core.autograd.recomputation.module_state import ModuleState, StateBefore
from core.autograd.recomputation.notes import Notes
from core.autograd.recomputation.policy import check_keeps
from core.parallel_state.random import generators_of
from core.pipeline.run.arguments import forward_arguments
from core.pipeline.run.backward import stage_backward_input, stage_backward_weight
from core.pipeline.run.checks.backward_inside import refuse_backward
from core.pipeline.run.messages.boundary import check_leaf, flatten, graphless_view, tree_map
from core.pipeline.run.microbatch import MicrobatchState, StepContext
from core.pipeline.run.shared_memory import InputWrites, NewGradients, write_counts
from core.pipeline.run.step import (
    call_loss_fn,
    call_next_stage,
    call_stage,
    check_loss,
    forward_seed,
    loss_and_tokens,
    scale_like,
    stage_seed,
    without_autocast,
)


def _refuse_lazy(module: nn.Module, index: int) -> None:
    lazy = [name for name, parameter in module.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ValueError(
            f"stage {index} has {len(lazy)} parameters without a shape ({lazy[0]}, ...): lazy modules get "
            "theirs from a forward; run one on a sample before you build the pipeline"
        )


class Stage:
    """Runs any `nn.Module` as stage `index` of `stage_count`.

    policy: activation recomputation: "none", "layer", "selective", names or classes (see `apply_recompute`), or
    "stage": the schedule recomputes the whole stage by R actions. keeps: see `apply_recompute`.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        stage_count: int,
        *,
        policy: Any,
        seed: int,
        device: torch.device,
        keeps: str = "attention",
        context_rank: int = 0,
    ) -> None:
        check_keeps(keeps)
        _refuse_lazy(module, index)
        self.module = module
        self.index = index
        self.device = device
        self.seed = seed
        self.first, self.last = index == 0, index == stage_count - 1

        # our own models carry a context that their operations already hold; foreign modules get a new one
        module_context = getattr(module, "stage", None)
        if isinstance(module_context, StageContext):
            self.context = module_context
        else:
            self.context = StageContext()
        self._patches: list[Any] = [reroute(module, self.context)]
        if policy not in ("none", "stage"):
            try:
                self._patches.append(
                    apply_recompute(module, policy, stage=self.context, keeps=keeps)
                )
            except Exception:
                self.close()
                raise

        self._context_rank = context_rank
        self._forward_arguments = forward_arguments(module)
        self._keeps_activations = keeps == "attention"
        # by microbatch, from F to W
        self._in_flight: dict[int, MicrobatchState] = {}
        self._has_compiled_code = False
        self._module_state = ModuleState(module)
        # per output tensor, once known in this step
        self._outputs_want_grad: list[bool] | None = None
        # the same from earlier steps, by what is trained and which inputs want a gradient
        self._known_wants: dict[Any, list[bool]] = {}
        self._known_wants_key: Any = None
        self._trained_flags: tuple[bool, ...] = ()
        # (module id, attribute) whose tensor wants a gradient
        self._grad_attributes: set[tuple[int, str]] = set()
        self._input_writes = InputWrites()
        self._same_outputs = SameOutputs()
        self._new_gradients = NewGradients([])
        # before layers are compiled, not by a graph break in their first call
        for parameter in self.parameters:
            make_compilable(parameter)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that are trained now."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def close(self) -> None:
        """Give the module its own forwards back."""
        while self._patches:
            self._patches.pop().remove()

    def prepare(self) -> None:
        """Before a step: note what is trained, which buffers exist and whether parts are compiled by torch."""
        self._module_state.refresh(list(self.module.modules()))
        self._has_compiled_code = any(map(has_compiled_code, self.module.modules()))
        self._new_gradients = NewGradients(self.parameters)
        self._outputs_want_grad = None
        self._trained_flags = tuple(p.requires_grad for p in self.module.parameters())

    def tensors_until_weight_grad(self, microbatch: int) -> list[Tensor]:
        """Linear inputs and output gradients that the W of a microbatch still needs."""
        return self._in_flight[microbatch].bag.tensors()

    def clear(self) -> None:
        """Forget all microbatches, after a step or a failure."""
        self._in_flight.clear()
        self.context.release()

    def forward(
        self, microbatch: int, received: Any, step: StepContext, *, keep_graph: bool
    ) -> Any:
        """F: returns the output, detached, for the next stage; each tensor's `requires_grad` says whether this
        stage wants a gradient for it. On the last stage [2] sums of loss and tokens (the output itself without a
        loss; None where R will compute the sums).

        keep_graph: whether I uses the graph of this forward; otherwise R makes it again.
        """
        # cut the graph: what arrives becomes a leaf, whose gradient I sends back
        input_leaves: list[Tensor] = []

        def make_leaf(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.requires_grad:
                return value
            input_leaves.append(value.detach().requires_grad_())
            return input_leaves[-1]

        if step.training:
            received = tree_map(make_leaf, received)
        bag = WeightGradBag(compiled=self._has_compiled_code, open=False)
        state = MicrobatchState(received, input_leaves, step.first_microbatch + microbatch, bag)

        will_recompute = step.training and not keep_graph
        if will_recompute:
            state.input_versions = write_counts(received, step.microbatches[microbatch])
            state.modules_before = self._module_state.before()
            state.notes = Notes(keeps_activations=self._keeps_activations)
        step.sync.before_forward(self.module)

        # activation checkpointing runs F without a graph. Only the very first such F makes one, and drops it at its
        # end: it tells which outputs want a gradient, and so what the next stage must send back
        wants_unknown = will_recompute and not self.last and self._outputs_want_grad is None
        with_graph = keep_graph or (wants_unknown and not self._recall_wants(received))
        noting = state.notes.first_run() if state.notes is not None else nullcontext()
        is_run_again = with_graph and will_recompute
        once = refuse_backward(self.parameters, self.index) if is_run_again else nullcontext()
        with torch.set_grad_enabled(with_graph), noting, once:
            output = self._call(microbatch, state, step, will_recompute=will_recompute)
        if not step.training:
            return self._evaluation_output(output, step)

        self._in_flight[microbatch] = state
        if will_recompute:
            self._module_state.after(state.modules_before)
            self._guard_attributes(state.modules_before, with_graph)
            self._input_writes.notice(state)
        if not self.last:
            return self._hand_over(state, output, keep_graph=keep_graph, with_graph=with_graph)
        if will_recompute:
            return None
        self._remember_loss_edge(state, output, step)
        return loss_and_tokens(output[0], output[1], self.device)

    def _guard_attributes(self, before: StateBefore, with_graph: bool) -> None:
        """Tensors that a graphless F left on modules cannot be differentiated: using them in a loss must raise."""
        for module, name, _ in before.attributes:
            value = module.__dict__.get(name)
            if not isinstance(value, Tensor):
                continue
            if with_graph and value.requires_grad:
                self._grad_attributes.add((id(module), name))
            if (id(module), name) in self._grad_attributes:
                owner = f"`{name}` of a {type(module).__name__} of stage {self.index}"
                module.__dict__[name] = graphless_view(value, owner)

    def _recall_wants(self, received: Any) -> bool:
        """Whether an earlier step, with the same parameters trained, showed which outputs want gradients."""
        leaves, _ = flatten(received)
        inputs_want_grad = tuple(leaf.requires_grad for leaf in leaves if isinstance(leaf, Tensor))
        self._known_wants_key = self._trained_flags, inputs_want_grad
        self._outputs_want_grad = self._known_wants.get(self._known_wants_key)
        return self._outputs_want_grad is not None

    def _evaluation_output(self, output: Any, step: StepContext) -> Any:
        """What a forward without backward returns: sums of a loss, or the output without a graph."""
        if self.last and step.loss_fn is not None:
            return loss_and_tokens(output[0], output[1], self.device)
        if not self.last:
            tree_map(partial(check_leaf, self.index), output)
        return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)

    def recompute(self, microbatch: int, step: StepContext) -> Tensor | None:
        """R, activation checkpointing of a whole stage: builds the graph of a microbatch from the same input,
        weights and random numbers as F.

        Returns [2] sums of loss and tokens on the last stage, whose loss is computed here and not in F.
        Raises RuntimeError: the input was written in place since F, or another output wants a gradient now.
        """
        state = self._in_flight[microbatch]
        if state.input_versions != write_counts(state.received, step.microbatches[microbatch]):
            raise RuntimeError(
                f"stage {self.index} changed its input or its microbatch in place: it cannot be recomputed from it; "
                "clone it in the stage, or use recompute='none'"
            )
        step.sync.before_forward(self.module)
        notes, state.notes = state.notes, None
        assert notes is not None
        with (
            torch.enable_grad(),
            self._module_state.with_state(state.modules_before),
            notes.second_run(),
        ):
            output = self._call(microbatch, state, step)
        if self.last:
            self._remember_loss_edge(state, output, step)
            return loss_and_tokens(output[0], output[1], self.device)

        # the next stage was told in F which gradients to send; what wants one only now would never get it
        tensors = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor)]
        for tensor, wanted in zip(tensors, state.outputs_want_grad, strict=True):
            if tensor.requires_grad and not wanted:
                raise RuntimeError(
                    f"stage {self.index} returned a tensor that wants a gradient for microbatch {microbatch}, and "
                    "wanted none before in this step; let it depend on trained parameters in every microbatch, or "
                    "in none"
                )
        self._remember_output_edges(state, tensors)
        return None

    def _call(
        self,
        microbatch: int,
        state: MicrobatchState,
        step: StepContext,
        *,
        will_recompute: bool = False,
    ) -> Any:
        """The module's output; on the last stage (loss_sum, num_tokens), unless R will compute the loss."""
        # every random number is a function of seed, step and microbatch, so that R draws the dropout mask of F
        base = forward_seed(self.seed, step.forward)
        self.context.begin(seed=base, step=step.step, microbatch=state.global_index, bag=state.bag)
        seed = stage_seed(base, step.step, state.global_index, self.index, self._context_rank)
        received, batch = self._input_writes.inputs(
            state, step.microbatches[microbatch], will_recompute
        )
        # for foreign modules; the pipeline restores them after the step
        with step.draws.seeded(generators_of(self.device), seed):
            if self.first:
                output = call_stage(self.module, batch, self._forward_arguments)
            else:
                output = call_next_stage(self.module, received, batch, self._forward_arguments)
            if will_recompute and self._same_outputs.is_turn():
                state.first_outputs = magnitudes(output)
            elif state.first_outputs:
                name = f"stage {self.index}"
                self._same_outputs.compare(state.first_outputs, magnitudes(output), name)
            if self.last and step.loss_fn is not None and not will_recompute:
                output = call_loss_fn(step.loss_fn, output, batch)
        # a module that stands in two stages must not defer into this microbatch's bag
        self.context.release()
        return output

    def _hand_over(
        self, state: MicrobatchState, output: Any, *, keep_graph: bool, with_graph: bool
    ) -> Any:
        """The output for the next stage, without its graph, each tensor marked by whether it wants a gradient."""
        leaves, nesting = ([output], None) if isinstance(output, Tensor) else flatten(output)
        for leaf in leaves:
            check_leaf(self.index, leaf)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        could_want = [tensor.is_floating_point() or tensor.is_complex() for tensor in tensors]
        earlier_wants = self._outputs_want_grad
        if earlier_wants is not None and len(earlier_wants) == len(tensors):
            pairs = zip(earlier_wants, tensors, strict=True)
            wants_grad = [earlier or tensor.requires_grad for earlier, tensor in pairs]
        elif with_graph:
            wants_grad = [tensor.requires_grad for tensor in tensors]
        else:
            # a graphless F with another number of outputs: ask for every gradient that could be needed
            wants_grad = could_want
        state.outputs_want_grad = wants_grad
        if earlier_wants is None:
            self._outputs_want_grad = wants_grad
            # not known for later steps where the module decides (`with torch.no_grad()` until one)
            sure = wants_grad == could_want or not any(map(any, self._known_wants_key or ()))
            if sure and with_graph and not keep_graph:
                self._known_wants[self._known_wants_key] = wants_grad
        if keep_graph:
            self._remember_output_edges(state, tensors)

        # without the graph, so that the output's memory is free once it is sent
        remaining_wants = iter(wants_grad)
        detached = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                leaf = leaf.detach().requires_grad_(next(remaining_wants))
            detached.append(leaf)
        if nesting is None:
            return detached[0]
        return pytree.tree_unflatten(detached, nesting)

    def _remember_output_edges(self, state: MicrobatchState, tensors: list[Tensor]) -> None:
        """Keep where gradients enter the graph of these outputs, for I."""
        edges = []
        for tensor, wanted in zip(tensors, state.outputs_want_grad, strict=True):
            if wanted:
                edges.append(get_gradient_edge(tensor) if tensor.requires_grad else None)
        state.output_edges = edges

    def _remember_loss_edge(
        self, state: MicrobatchState, loss: tuple[Tensor, Tensor | float], step: StepContext
    ) -> None:
        """The same for the loss, whose gradient is the loss scale."""
        loss_sum, num_tokens = loss
        if check_loss(loss_sum, num_tokens):
            state.output_edges = [get_gradient_edge(loss_sum)]
            state.loss_gradient = [scale_like(loss_sum, step.loss_scale)]

    def input_gradients(
        self, microbatch: int, output_grads: list[Tensor] | None, step: StepContext
    ) -> list[Tensor]:
        """I: takes the gradients of the outputs that want one, returns those of the inputs that do; frees the graph.

        output_grads: None on the last stage. An input that nothing depends on gets zeros: the previous stage waits
        for a message in any case. Autocast is off, as torch recommends for backward: every operation's backward has
        the dtype of its forward.
        """
        state = self._in_flight[microbatch]
        if output_grads is None:
            output_grads = state.loss_gradient
        step.sync.before_input_grad(self.module)
        self.context.loss_scale = step.loss_scale
        # torch's own checkpoint may run a forward again in here: it must find the context of the first time
        self.context.begin(
            seed=self.seed, step=step.step, microbatch=state.global_index, bag=state.bag
        )
        state.bag.open = True
        with without_autocast(self.device):
            gradients = stage_backward_input(
                state.output_edges, output_grads, state.input_leaves, adds=True
            )
        state.bag.open = False
        self.context.release()
        step.sync.after_input_grad(self.module, state.bag.parameters())

        input_grads = [
            torch.zeros_like(leaf) if gradient is None else gradient
            for leaf, gradient in zip(state.input_leaves, gradients, strict=True)
        ]
        self._new_gradients.unshare([*state.bag.tensors(), *input_grads])
        # the graph is gone; until W only the bag is needed
        state.received = None
        state.input_leaves = []
        state.output_edges = []
        state.loss_gradient = []
        return input_grads

    def weight_gradients(self, microbatch: int, step: StepContext) -> None:
        """W: empties the bag; `sync` hears of each parameter whose gradient of this microbatch is complete."""
        # the last of the microbatch: nothing of it stays
        bag, sync = self._in_flight.pop(microbatch).bag, step.sync
        with without_autocast(self.device):
            if isinstance(sync, NullGradSync):
                stage_backward_weight(bag)
            else:
                sync.before_weight_grad(self.module)
                stage_backward_weight(bag, on_ready=sync.ready)
                sync.after_weight_grad(self.module)
