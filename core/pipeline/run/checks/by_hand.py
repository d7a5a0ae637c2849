"""What a loop written for one process does by hand between a pipeline's steps: arithmetic with the weights and
gradients of one rank's stages."""

import math
import sys
import warnings
import weakref
from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from core.parallel_state.by_hand import WHOLE_NORM, ByHand, Heard
from core.parallel_state.by_hand.functions import (
    frame_of_program,
    line_of_program,
    program_level,
)
from core.parallel_state.by_hand.read_numbers import is_kept_by_name
from core.parallel_state.collectives.groups import ranks_of
from core.parallel_state.layout import layout_of
from core.parallel_state.state import ParallelState

_COUNTS = ("numel", "nelement")
# numbers that nobody follows from there on
_TAKES_OUT = ("numpy", "array", "tolist", "float")
# steps between two looks at an accelerator's numbers: each look waits for it
READ_EVERY = 64


class Hears(Protocol):
    """Who is told as well of what a program does by hand."""

    def hear(self, heard: Heard) -> None: ...


class StageArithmetic:
    """Warns of norms, counts and reductions by hand, between a pipeline's steps, of several weights or gradients.

    Of one of them they are right, and nothing is said; together they are of this rank's stages, not the model's. The
    same goes for norms, products and random draws of a weight that tensor ranks split. Each kind is told once.
    """

    def __init__(
        self,
        ps: ParallelState,
        modules: Sequence[nn.Module],
        sums: Hears | None = None,
        told: Collection[str] = (),
    ) -> None:
        self._pipeline = ps.group("pp")
        # a module may have this: without cycles it is freed where nobody has it any more
        self._references = [weakref.ref(module) for module in modules]
        self._sums = sums
        self._parameters = [p for module in modules for p in module.parameters()]
        # of parameters whose gradients were reduced
        self._reduced_ids: set[int] = set()
        self._taken_ids: set[int] = set()
        self.told = {*told}
        self._numbers = StageNumbers()
        # how many there are to be scaled
        self._gradients = 0
        own = weakref.ref(self)

        def hear(heard: Heard) -> None:
            if (arithmetic := own()) is not None:
                arithmetic._hear(heard)

        self._by_hand = ByHand(hear, gradients=True, numbers=True, states=True)

    @property
    def _modules(self) -> list[nn.Module]:
        found = [reference() for reference in self._references]
        return [module for module in found if module is not None]

    def open(self, *, look_again: bool = False) -> None:
        """Until `close`; look_again: for parameters that were replaced or added."""
        if look_again:
            self._parameters = [p for module in self._modules for p in module.parameters()]
        self._reduced_ids.clear()
        self._taken_ids.clear()
        self._numbers = StageNumbers()
        self._gradients = sum(p.grad is not None for p in self._parameters)
        self._by_hand.open(self._parameters)

    def reopen(self) -> None:
        """After a call that left weights and gradients as they were."""
        self._by_hand.open(self._parameters)

    def close(self) -> None:
        """A call of the pipeline begins: what it does with parameters is not by hand."""
        self._by_hand.close()

    def end(self) -> None:
        """Nothing is listened to again."""
        self._by_hand.end()
        self._parameters = []

    @property
    def has_told_of_gradients(self) -> bool:
        """Whether a norm by hand, of which such a number comes mostly, was told."""
        return "gradients" in self.told

    def numbers(self, device: torch.device) -> Tensor:
        """What `StageNumbers.as_tensor` gives of this step."""
        return self._numbers.as_tensor(self._gradients, device)

    def _hear(self, heard: Heard) -> None:
        if self._sums is not None:
            self._sums.hear(heard)
        self._numbers.hear(heard)
        is_reduction = heard.kind == "reduction"
        if heard.kind == "scaled":
            # by its own norm, as a layer's rate is
            self._reduced_ids.discard(id(heard.parameter))
        if heard.kind == "sum" and self._mixes_stages(heard):
            self._warn_once(
                "stages",
                f"{heard.name} by hand puts together weights or gradients of other stages: pipeline ranks hold other "
                "layers. Average gradients over group=parallel_state.get_data_parallel_group(with_context_parallel="
                "True), or give the Pipeline a grad_sync, which does it",
            )
        if heard.sees_only_shard:
            self._warn_once("a shard", heard.message(*self._modules))
        elif heard.kind == "taken" and is_kept_by_name(frame_of_program(sys._getframe())):
            return
        elif heard.name in _TAKES_OUT:
            self._taken_ids.add(id(heard.parameter))
            if len(self._taken_ids) > 1 or heard.joined:
                self._warn_once(
                    "numbers",
                    f"{heard.name} takes several weights or gradients out of torch: what is made of them together is "
                    "of this rank's stages; sum, or take the largest, over "
                    "parallel_state.get_pipeline_model_parallel_group(). Each by its name is right",
                )
        elif heard.kind == "combined" and heard.of_gradient:
            self._warn_of_gradients()
        elif heard.name in _COUNTS and "element_size" in line_of_program(sys._getframe()):
            # how much memory this rank's take
            return
        elif heard.kind == "combined" or (is_reduction and heard.joined and not heard.of_gradient):
            self._warn_once(
                "counts" if heard.name in _COUNTS else "weights",
                f"{heard.name} by hand of several weights is of this rank's stages; sum, or take the largest, over "
                "parallel_state.get_pipeline_model_parallel_group()",
            )
        elif (is_reduction or heard.kind == WHOLE_NORM) and heard.of_gradient:
            # one gradient alone may be looked at; two in a row are on their way to a norm
            self._reduced_ids.add(id(heard.parameter))
            if len(self._reduced_ids) > 1 or heard.joined:
                self._warn_of_gradients()

    def _mixes_stages(self, heard: Heard) -> bool:
        """Whether a collective is over several pipeline ranks, and not of a number of each, a norm.

        The two ends of a tied table are one parameter.
        """
        is_tied = "embedding" in layout_of(heard.parameter).partial
        if self._pipeline is None or heard.reduced or is_tied:
            return False
        return len({*ranks_of(heard.group)} & {*self._pipeline.ranks}) > 1

    def _warn_of_gradients(self) -> None:
        self._warn_once(
            "gradients",
            "gradients were reduced by hand (norm, max, mean): together they are of this rank's stages. "
            "core.optimizer.get_grad_norm(parameters) is the model's norm, core.optimizer.clip_grad_norm_ "
            "clips by it; those of one layer, which one stage has, are right as they are",
        )

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self.told:
            self.told.add(kind)
            warnings.warn(message, stacklevel=program_level())


class StageNumbers:
    """Python numbers by which a program scales this rank's gradients, or with which it compares them.

    A norm or a quantile by numpy or lists leaves no other trace; of one rank's stages it is another on each rank.
    """

    def __init__(self) -> None:
        # by parameter, since the last step of the pipeline
        self._factors: dict[int, float] = {}
        self._thresholds: set[float] = set()
        # how the first tensor that was added begins
        self._added: float | None = None

    def hear(self, heard: Heard) -> None:
        """What is done with a gradient."""
        if heard.kind == "scaled" and heard.factor is not None:
            key = 0 if heard.joined else id(heard.parameter)
            self._factors[key] = self._factors.get(key, 1.0) * heard.factor
        elif heard.kind == "compared" and heard.factor is not None:
            self._thresholds.add(heard.factor)
        elif heard.kind == "added" and self._added is None:
            self._added = heard.factor

    def as_tensor(self, count: int, device: torch.device) -> Tensor:
        """float64 [3]: the factor of all gradients, the only threshold, how what is added begins; NaN: there is none.

        count: how many parameters have gradients.
        """
        factors = set(self._factors.values())
        # the others' is 1, but of a list the first stands for all
        if 0 not in self._factors and len(self._factors) < count:
            factors.add(1.0)
        one_of_each = [*factors] if len(factors) == 1 else [math.nan]
        one_of_each += [*self._thresholds] if len(self._thresholds) == 1 else [math.nan]
        one_of_each.append(math.nan if self._added is None else self._added)
        return torch.tensor(one_of_each, dtype=torch.float64, device=device)
