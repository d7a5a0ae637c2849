"""What a program does by hand with a stage's weights before a pipeline has them: counts, norms, initial values."""

from collections.abc import Iterable

import torch
from torch import nn

from core.parallel_state.state import ParallelState
from core.pipeline.run.checks.by_hand import StageArithmetic

_ATTRIBUTE = "before_pipeline"


class BeforePipeline:
    """Listens as a `StageArithmetic` does, until `end`. A copy of its module, or one out of a file, has None."""

    def __init__(self, ps: ParallelState, module: nn.Module) -> None:
        self._arithmetic = StageArithmetic(ps, [module])
        self._arithmetic.open()

    def __deepcopy__(self, memo: dict) -> None:
        return None

    def __reduce__(self) -> tuple:
        return type(None), ()

    @torch.compiler.disable
    def end(self) -> set[str]:
        """The module runs, or a pipeline listens: parameters are plain. The kinds that were told."""
        self._arithmetic.end()
        return self._arithmetic.told


def listen_before_pipeline(ps: ParallelState, module: nn.Module) -> BeforePipeline | None:
    """For the attribute `before_pipeline` of a module; None where one rank has all stages."""
    return BeforePipeline(ps, module) if ps.size("pp") > 1 else None


def end_before_pipeline(modules: Iterable[nn.Module]) -> set[str]:
    """A pipeline is made of these, and listens itself, to what was not told yet: the kinds that were."""
    told: set[str] = set()
    for module in modules:
        for part in module.modules():
            before = vars(part).get(_ATTRIBUTE)
            if isinstance(before, BeforePipeline):
                told |= before.end()
                setattr(part, _ATTRIBUTE, None)
    return told
