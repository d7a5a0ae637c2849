"""What `loss_fn` reads beside its arguments: weights, activations of modules, parameters of nobody's."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from core.autograd.graph import nodes_behind
from core.parallel_state.by_hand import ByHand, Heard
from core.parallel_state.by_hand.functions import program_level
from core.parallel_state.collectives import all_gather
from core.parallel_state.state import ParallelState
from core.pipeline.run.checks.halves import HalvesOfRows
from core.pipeline.run.checks.kept_by_hooks import name_of_kept
from core.pipeline.run.checks.plain_loop import parameters_of

_OF_WEIGHTS = (
    "loss_fn takes norms or sums of weights: only those of this rank's stages count, it is called where the last "
    "stage is. Use weight_decay, or call backward() on every rank, before step, for a penalty of its own stages, "
    "times the tokens that gradients are divided by (over the replicas)"
)


class LossWatch:
    """Looks at `loss_fn` in an executor's first step.

    In a pipeline a penalty over the modules' weights, or over activations that hooks have kept, counts for the stages
    of the rank that computes the loss, and for no others. A parameter that only `loss_fn` has (a temperature) gets
    gradients that nobody takes care of.
    """

    def __init__(self, ps: ParallelState, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._is_pipeline = ps.size("pp") > 1
        self._warned_of: set[str] = set()
        self._is_first = True
        # the program's, until its first step is over
        self._loss_fn: Callable[..., Any] | None = None
        self._was_called = False
        self._halves = HalvesOfRows(1)
        self._group, self._device = ps.group("pp"), ps.device

    def around(self, loss_fn: Callable[..., Any], microbatches: int) -> Callable[..., Any]:
        """`loss_fn`, looked at; itself from the second step on. microbatches: of the step."""
        if not self._is_first:
            return loss_fn
        self._is_first = False
        self._halves = HalvesOfRows(microbatches)
        if not self._is_pipeline:
            return partial(self._look_at_graph, loss_fn)
        by_hand = ByHand(self._hear)
        self._loss_fn = loss_fn

        def listened(*arguments: Any) -> Any:
            self._was_called = True
            by_hand.open(parameters_of(self._modules))
            try:
                return self._look_at_graph(loss_fn, *arguments)
            finally:
                by_hand.close()

        return listened

    def after_step(self) -> None:
        """Warn where hooks keep for `loss_fn` what the ranks that do not call it have, and its rank has not got.

        After the first step an all-gather of one number over pp.
        """
        loss_fn, self._loss_fn = self._loss_fn, None
        if loss_fn is None or self._group is None:
            return
        name = name_of_kept(loss_fn)
        reads_its_own = torch.tensor([float(self._was_called and name is not None)])
        of_ranks = all_gather(reads_its_own.to(self._device), self._group)
        if name is not None and not of_ranks.any():
            self._warn_once(
                f"loss_fn reads {name}, which keeps activations of this rank's stages (of a hook or a module): it is "
                "called on the rank of the last stage, which has not got them, and they are in no loss. Let each "
                "stage hand its penalty on with its output, as one of several tensors"
            )

    def _look_at_graph(self, loss_fn: Callable[..., Any], *arguments: Any) -> Any:
        """What `loss_fn` returns; warns of what its graph leads to beside the model's outputs."""
        outputs = [x for x in pytree.tree_leaves(arguments[0]) if isinstance(x, Tensor)]
        # before loss_fn may write into them
        ends = {output.grad_fn for output in outputs}
        begin = _now()
        with self._halves.following(arguments):
            result = loss_fn(*arguments)
        loss = result[0] if isinstance(result, tuple) and result else None
        if not isinstance(loss, Tensor) or loss.grad_fn is None:
            return result
        nodes = list(nodes_behind([loss.grad_fn], ends.__contains__))
        own_ids = {id(parameter) for parameter in parameters_of(self._modules)}
        leaves = [node.variable for node in nodes if hasattr(node, "variable")]
        shapes = [
            list(leaf.shape)
            for leaf in leaves
            if type(leaf) is nn.Parameter and id(leaf) not in own_ids
        ]
        if shapes:
            elsewhere = " here, and nothing on the other pipeline ranks" * self._is_pipeline
            self._warn_once(
                f"the loss reads {len(shapes)} parameters that the model does not have, of shapes {shapes}: their "
                f"gradients are sums over this replica's tokens{elsewhere}; nobody sums them over replicas or "
                "divides them by the tokens. Make them parameters of the (last stage's) module, where loss_fn "
                "can still read them, or freeze them"
            )
        own = [leaf for leaf in leaves if id(leaf) in own_ids]
        # a head, and its bias, may be the loss's
        if self._is_pipeline and (len(own) > 2 or sum(leaf.dim() > 1 for leaf in own) > 1):
            self._warn_once(_OF_WEIGHTS)
        made_before = [node for node in nodes if node._sequence_nr() < begin]
        if self._is_pipeline and made_before:
            self._warn_once(
                "loss_fn reads activations of modules that are not their stage's output (kept by a hook, or on a "
                "module): only those of the last stage count, on this rank; other ranks' are in no loss, and another "
                "stage's on this rank cannot be differentiated twice. Let each stage hand its penalty on with its "
                "output, as one of several tensors"
            )
        return result

    def _hear(self, heard: Heard) -> None:
        if heard.kind == "reduction" and not heard.of_gradient:
            self._warn_once(_OF_WEIGHTS)

    def _warn_once(self, message: str) -> None:
        if message not in self._warned_of:
            self._warned_of.add(message)
            warnings.warn(message, stacklevel=program_level())


def _now() -> int:
    """Nodes of autograd that this thread makes from now on have this number or a later one."""
    with torch.enable_grad():
        node = (torch.zeros((), requires_grad=True) + 0).grad_fn
    assert node is not None
    return node._sequence_nr()
