"""How evenly experts are used, layer by layer, as a record of a step tells it."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain

from torch import nn

from core.models.gpt import GPTModel
from core.parallel_state import ParallelState
from core.parallel_state.collectives import all_gather_objects
from core.transformer.moe.load import ExpertLoad, Loads


def loads_of(
    stages: Iterable[nn.Module], ps: ParallelState
) -> Callable[[], list[ExpertLoad]] | None:
    """What tells how evenly the last step used the experts of these stages; None for a model without some.

    From now on auxiliary losses are summed for it.
    """
    models = [stage for stage in stages if isinstance(stage, GPTModel)]
    if not any(model.config.num_moe_experts is not None for model in models):
        return None
    for loads in _loads(models):
        loads.log()
    return partial(expert_loads, models, ps)


def expert_loads(stages: Iterable[GPTModel], ps: ParallelState) -> list[ExpertLoad]:
    """Of the last step, all layers of the model in order, on every rank; empty before the first step's end.

    Collective: all-reduces within a pipeline stage, and an all-gather of objects over pp.
    """
    loads_by_layer: list[ExpertLoad] = []
    for loads in _loads(stages):
        loads_by_layer += loads.of_layers()
    group = ps.group("pp")
    if group is not None:
        # each pipeline rank knows the layers of its own stages
        loads_by_layer = list(chain.from_iterable(all_gather_objects(loads_by_layer, group)))
    return sorted(loads_by_layer, key=lambda load: load.layer)


def _loads(stages: Iterable[GPTModel]) -> Iterator[Loads]:
    for stage in stages:
        yield from (listener for listener in stage.stage.listeners if isinstance(listener, Loads))
