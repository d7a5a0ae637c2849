"""What a program does around all layers of a model of ours: on a pipeline every stage does it."""

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from core.parallel_state.by_hand.as_written import is_compiled
from core.parallel_state.by_hand.functions import is_foreign, program_level, replaced_forward
from core.pipeline.run.checks.program_parts import layer_of, parts_of


class OnEveryStage:
    """Warns, once, of forwards and hooks of the program's around a stage's layers that change what goes through.

    Looks in the calls 1, 2, 4, 8 ... of a pipeline. Modules of the program's own are stages as it wrote them.
    """

    def __init__(self, stages: Mapping[int, nn.Module], pipeline_ranks: int) -> None:
        self._stages = stages
        self._ranks = pipeline_ranks
        self._calls = 0
        self._has_told = False
        self._handles: list[RemovableHandle] = []

    def before_call(self) -> None:
        """A call begins, of any kind."""
        self.after_call()
        self._calls += 1
        is_watched = not self._has_told and not self._calls & (self._calls - 1)
        if not is_watched or any(map(is_compiled, self._stages.values())):
            return
        parts = parts_of(self._stages)
        around = {
            n: part
            for n, part in parts.items()
            if not layer_of(n) and any(layer_of(inside) for inside, _ in part.named_modules())
        }
        for name, part in around.items():
            if is_foreign(type(part)) or type(part).__module__.startswith("torch."):
                continue
            if replaced_forward(part):
                self._tell("a forward in the place of that", name)
            self._listen(name, part)

    def after_call(self) -> None:
        """It is over."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _listen(self, name: str, part: nn.Module) -> None:
        """Around the program's hooks: whether another tensor comes out than went in."""
        if any(map(is_foreign, part._forward_pre_hooks.values())):
            given: list[Any] = []

            def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
                given[:] = pytree.tree_leaves((args, kwargs))

            def end(module: nn.Module, args: Any, kwargs: Any) -> None:
                self._compare(given, (args, kwargs), "a forward pre-hook", name)

            how = {"with_kwargs": True}
            self._handles.append(part.register_forward_pre_hook(begin, prepend=True, **how))
            self._handles.append(part.register_forward_pre_hook(end, **how))
        if any(map(is_foreign, part._forward_hooks.values())):
            made: list[Any] = []

            def before(module: nn.Module, args: Any, output: Any) -> None:
                made[:] = pytree.tree_leaves(output)

            def after(module: nn.Module, args: Any, output: Any) -> None:
                self._compare(made, output, "a forward hook", name)

            self._handles.append(part.register_forward_hook(before, prepend=True))
            self._handles.append(part.register_forward_hook(after))

    def _compare(self, before: list[Any], after: Any, what: str, name: str) -> None:
        leaves = pytree.tree_leaves(after)
        if len(leaves) != len(before) or any(
            a is not b for a, b in zip(leaves, before, strict=True)
        ):
            self._tell(what, name)
        before.clear()

    def _tell(self, what: str, name: str) -> None:
        if not self._has_told:
            self._has_told = True
            warnings.warn(
                f"{what} of {name or 'the model'} runs on each of {self._ranks} pipeline ranks, around its layers, "
                "where one process has it once: what it makes of activations every stage makes. Choose a layer by "
                "its number, or a part that one stage has (embedding, decoder.final_layernorm, output_layer)",
                stacklevel=program_level(),
            )
