"""A GPT in pipeline stages: each rank builds only its layers, under their global names."""

from collections.abc import Sequence
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
        layer, output = multiplications_per_token(config, vocab_size, sequence_length)
        costs = [*[float(layer)] * config.num_layers, float(output)]
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
    ranks, tied = ps.size("pp"), share_embeddings_and_output_weights
    if set(placement) != set(range(ranks)):
        raise ValueError(
            f"the placement {tuple(placement)} is for ranks {sorted(set(placement))}, the grid has {ranks} pipeline "
            "ranks; every one of them needs a stage"
        )
    ends = placement[0], placement[-1]
    if tied and ends not in ((0, 0), (0, ranks - 1)):
        raise ValueError(
            f"tied embeddings need the first stage on pipeline rank 0 and the last on 0 or {ranks - 1}, the "
            f"placement has them on {ends}"
        )
    stages = len(placement)
    cut = list(layers) if layers is not None else split_layers(config, vocab_size, max_sequence_length, stages)
    if len(cut) != stages or [n for part in cut for n in part] != list(range(config.num_layers)):
        raise ValueError(
            f"layers {cut} are {len(cut)} parts for {stages} stages; together they must be 0 to "
            f"{config.num_layers - 1}, in order"
        )
    made: dict[int, GPTModel] = {}
    for stage, rank in enumerate(placement):
        if rank == ps.index("pp"):
            made[stage] = GPTModel(
                config,
                transformer_layer_spec,
                vocab_size,
                max_sequence_length,
                pre_process=stage == 0,
                post_process=stage == stages - 1,
                layers=cut[stage],
                share_embeddings_and_output_weights=tied,
                tied_with=made.get(0) if 0 < stage == stages - 1 else None,
                ends_share_a_rank=ends[0] == ends[1],
                parallel=ps,
                **more,
            )
    return made
