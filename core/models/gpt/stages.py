"""A GPT in pipeline stages: each rank builds only its layers, under their global names."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from core.models.gpt.gpt_model import GPTModel
from core.parallel_state import ParallelState, current_state
from core.pipeline.schedule.partition import partition
from core.transformer.flops import multiplications_per_token
from core.transformer.spec import TransformerLayerSpec
from core.transformer.transformer_config import TransformerConfig


def split_layers(
    config: TransformerConfig,
    vocab_size: int,
    sequence_length: int,
    stages: int,
    costs: Sequence[float] | None = None,
) -> list[range]:
    """The layers of each stage by their matmul FLOPs, the output layer's counted on the last stage.

    costs: of each layer, and last of the output layer, measured, in any unit.
    Raises ValueError: fewer layers than stages; a wrong number of costs.
    """
    if costs is None:
        layer_costs, output_cost = multiplications_per_token(config, vocab_size, sequence_length)
        # by their matmuls, in which most of a stage's time goes
        costs = [*map(float, layer_costs), float(output_cost)]
    if len(costs) != config.num_layers + 1:
        raise ValueError(
            f"{len(costs)} costs for num_layers={config.num_layers}; give one for each layer and one for the "
            "output layer"
        )
    return partition(costs[:-1], stages, last=costs[-1])


def gpt_stages(
    config: TransformerConfig,
    transformer_layer_spec: TransformerLayerSpec,
    vocab_size: int,
    max_sequence_length: int,
    *,
    placement: Sequence[int],
    layers: Sequence[range] | None = None,
    share_embeddings_and_output_weights: bool = False,
    parallel: ParallelState | None = None,
    **more: Any,
) -> dict[int, GPTModel]:
    """stage -> GPTModel of this rank's stages, to be handed to `Pipeline`.

    placement: stage -> pipeline rank, as the schedule has it (`schedules.placement("zb-v", ranks)`). layers: of
    each stage; default `split_layers`. Tied weights are one parameter where both ends share a rank (V
    placements); otherwise both ends hold the table and its gradient is summed over them.
    `more`: as for GPTModel. Raises ValueError: layers that are not all of them, a placement for other ranks.
    """
    ps = parallel if parallel is not None else current_state()
    ranks = ps.size("pp")
    tied = share_embeddings_and_output_weights
    _refuse_placement(placement, ranks, tied=tied)
    end_ranks = placement[0], placement[-1]
    stages = len(placement)
    if layers is None:
        layers = split_layers(config, vocab_size, max_sequence_length, stages)
    layers_of_stage = list(layers)
    numbers = list(chain.from_iterable(layers_of_stage))
    if len(layers_of_stage) != stages or numbers != list(range(config.num_layers)):
        raise ValueError(
            f"layers {layers_of_stage} are {len(layers_of_stage)} parts for {stages} stages; together they must be 0 "
            f"to {config.num_layers - 1}, in order"
        )
    models: dict[int, GPTModel] = {}
    for stage, rank in enumerate(placement):
        if rank == ps.index("pp"):
            models[stage] = GPTModel(
                config,
                transformer_layer_spec,
                vocab_size,
                max_sequence_length,
                pre_process=stage == 0,
                post_process=stage == stages - 1,
                layers=layers_of_stage[stage],
                share_embeddings_and_output_weights=tied,
                # stage 0 was built first, if this rank has it: the same parameter for both ends
                tied_with=models.get(0) if 0 < stage == stages - 1 else None,
                ends_share_a_rank=end_ranks[0] == end_ranks[1],
                parallel=ps,
                **more,
            )
    return models


def _refuse_placement(placement: Sequence[int], ranks: int, *, tied: bool) -> None:
    if set(placement) != set(range(ranks)):
        raise ValueError(
            f"the placement {tuple(placement)} is for ranks {sorted(set(placement))}, the grid has {ranks} pipeline "
            "ranks; every one of them needs a stage"
        )
    end_ranks = placement[0], placement[-1]
    # the embedding group is made of these pipeline ranks
    if tied and end_ranks not in ((0, 0), (0, ranks - 1)):
        raise ValueError(
            f"tied embeddings need the first stage on pipeline rank 0 and the last on 0 or {ranks - 1}, the "
            f"placement has them on {end_ranks}"
        )
