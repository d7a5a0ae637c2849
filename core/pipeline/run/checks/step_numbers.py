"""The number of an executor's next step, and a program that goes on from a checkpoint without handing it on.

Every random number is a function of it: a new executor at step 0 draws the dropout masks of steps 0, 1, ... again.
"""

import operator
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from core.autograd import StageContext
from core.parallel_state.by_hand.functions import program_level
from core.parallel_state.optimizer_steps import before_optimizer_steps
from core.pipeline.run.checks.plain_loop import is_watched_step, parameters_of


class Draws:
    """Seeds torch's generators for one call of a module after the other; `note` hears of a call that drew."""

    def __init__(self, note: Callable[[], None] | None = None) -> None:
        self._note = note

    @contextmanager
    def seeded(self, generators: Sequence[torch.Generator], seed: int) -> Iterator[None]:
        """Around one call. The generators stay where the call left them."""
        for generator in generators:
            generator.manual_seed(seed)
        if self._note is None:
            yield
            return
        # offsets and words on the host: no device is waited for
        seeds = [generator.get_state() for generator in generators]
        yield
        after = [generator.get_state() for generator in generators]
        if not all(map(torch.equal, seeds, after)):
            self._note()


class StepNumbers:
    """Counts an executor's steps, and warns once where random numbers of steps that were made are drawn again.

    That is: nobody has set `index`, a step drew, and an optimizer over these parameters comes to its update with more
    updates than it made since the executor exists. A loop that goes on looks so, and so does a new executor in the
    middle of a run. A plain loop before the first executor drew other numbers, but cannot be told from them by its
    optimizer: it is told as well, and any number that is set, 0 too, says that this is meant.

    Looks in steps 1, 2, 4, 8 ... of this executor. Optimizers without a count (SGD), or with one on a device, which
    would have to be waited for, are left out.
    """

    def __init__(self, modules: Sequence[nn.Module], contexts: Sequence[StageContext]) -> None:
        self.index = 0
        self._modules = modules
        # whose operations make random numbers without torch's generator
        self._contexts = contexts
        self._is_over = False  # set by the program, or told
        self._drew = False
        self._drew_last_step = False
        # updates since this executor exists
        self._updates: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        # since the last step
        self._forwards = 0
        self._last_batch: list[weakref.ref[Tensor]] = []
        self._told_of_forwards = self._told_of_statistics = False
        before_optimizer_steps(self._look)

    def set(self, index: Any) -> None:
        """The program hands a number on. Raises ValueError: no integer, or below 0."""
        try:
            number = operator.index(index)
        except TypeError:
            number = -1
        if number < 0:
            raise ValueError(
                f"step_index={index!r} must be an integer of at least 0: the number of steps that the run has made, "
                "as step_index of its executor said when it was saved"
            )
        self.index = number
        self._is_over = True

    def begin_step(self) -> Draws:
        """What seeds generators in this step."""
        self._drew = False
        if self._is_over or not is_watched_step(self.index + 1):
            return Draws()
        for context in self._contexts:
            context.used_step = False
        return Draws(self._note)

    def begin_forward(self, batch: Any) -> int:
        """The number of a call without gradients since the last step: dropout that is on in it draws by that.

        Warns, once, where one batch is given again while the model is in train mode and has dropout: the calls are in
        eval mode, and a program that samples masks (MC dropout) would get the same each time.
        """
        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        is_again = (
            bool(tensors)
            and len(tensors) == len(self._last_batch)
            and all(
                reference() is tensor
                for reference, tensor in zip(self._last_batch, tensors, strict=True)
            )
        )
        self._last_batch = list(map(weakref.ref, tensors))
        if is_again and not self._told_of_forwards and any(map(_drops, self._modules)):
            self._told_of_forwards = True
            warnings.warn(
                "forward and evaluate are in eval mode whatever mode the model is in, so that one batch gives the "
                "same outputs again. To sample dropout masks (MC dropout) call model.eval(), then .train() on the "
                "dropout modules: a model in eval mode is left as it is, and each call draws anew",
                stacklevel=program_level(),
            )
        self._forwards += 1
        return self._forwards - 1

    def tell_of_statistics(self) -> None:
        """Warn, once, of `forward` with a model in train mode: it uses running statistics and updates none."""
        if self._told_of_statistics or not any(module.training for module in self._modules):
            return
        self._told_of_statistics = True
        parts = [part for module in self._modules for part in module.modules()]
        keepers = [part for part in parts if getattr(part, "running_mean", None) is not None]
        if keepers:
            warnings.warn(
                "forward is in eval mode whatever mode the model is in: running statistics of "
                f"{type(keepers[0]).__name__} are used and not updated. To compute them anew (precise BN) call the "
                "modules themselves under torch.no_grad(); where eval mode is meant call model.eval() first",
                stacklevel=program_level(),
            )

    def _note(self) -> None:
        self._drew = True

    def end_step(self) -> None:
        """A step was made."""
        self.index += 1
        self._forwards = 0
        if not self._is_over and is_watched_step(self.index):
            used = any(context.used_step for context in self._contexts)
            self._drew_last_step = self._drew or used
        else:
            self._drew_last_step = False

    def _look(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_over:
            return
        seen = self._updates.get(optimizer, 0)
        self._updates[optimizer] = seen + 1
        if not self._drew_last_step:
            return
        made = _updates_of(optimizer, {id(p) for p in parameters_of(self._modules)})
        if made is None or made <= seen:
            return
        self._is_over = True
        before = made - seen
        warnings.warn(
            f"{type(optimizer).__name__} had made {before} updates when this executor began at step 0. Dropout masks "
            "are a function of seed and step here, not of torch's generator: a run that goes on draws those of steps "
            "0, 1, ... again. Save executor.step_index beside the weights and set it after loading, before the first "
            f"step (= {before} if each step was one update; forward_backward takes step_index=). If other code made "
            "these updates, a plain loop say, set it as well, to any number",
            stacklevel=program_level(),
        )


class NumberedSteps:
    """An executor whose steps have a number."""

    _numbers: StepNumbers

    @property
    def step_index(self) -> int:
        """The number of the next step, from 0. A program saves it in its checkpoint, and sets it when it goes on.

        Raises ValueError: it is set to what is no integer, or below 0.
        """
        return self._numbers.index

    @step_index.setter
    def step_index(self, index: int) -> None:
        self._numbers.set(index)


def _drops(module: nn.Module) -> bool:
    """Whether it is in train mode and has a dropout that is on: torch's, or one of that name with its `p`."""
    return module.training and any(
        part.training and "Dropout" in type(part).__name__ and getattr(part, "p", 0) > 0
        for part in module.modules()
    )


def _updates_of(optimizer: Optimizer, ids: set[int]) -> int | None:
    """How many updates an optimizer has made, of parameters of these ids; None: of none, or it does not say."""
    own = [p for group in optimizer.param_groups for p in group["params"] if id(p) in ids]
    if not own:
        return None
    count = getattr(optimizer, "step_count", None)
    if isinstance(count, int):
        return count
    steps = []
    for parameter in own:
        of_parameter = optimizer.state.get(parameter, {})
        step = of_parameter.get("step") if isinstance(of_parameter, dict) else None
        if isinstance(step, Tensor):
            if step.device.type != "cpu" or step.numel() != 1:
                continue
            step = step.item()
        if isinstance(step, (int, float)):
            steps.append(int(step))
    return max(steps, default=None)
