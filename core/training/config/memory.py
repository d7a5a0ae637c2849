"""Bytes that a run's weights, gradients and optimizer states take on a rank, before anything runs."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch

from core.data_parallel.memory import StateBytes, expected_bytes
from core.datasets import TokenFile, open_blend
from core.datasets.corpus.cached import is_text
from core.datasets.shards.manifest import is_list
from core.models.gpt import GPTModel, gpt_stages
from core.models.lora.apply import adapter_numel
from core.models.lora.config import LoraConfig
from core.parallel_state import ParallelConfig, ParallelState
from core.parallel_state.collectives.groups import Group
from core.parallel_state.grid import Grid
from core.training.config.data import DataConfig
from core.training.model.config import DTYPES

# each is built, without memory; that takes about a millisecond
_MOST_LAYERS = 512
# of all elements, of muon the matrices; in numbers of a main weight, of 8 bits codes and scales
_MOMENTS = {
    "adamw": 2,
    "adamw8bit": 2 * (1 / 4 + 1 / 64),
    "sgd": 1,
    "muon": 1,
    "lion": 1,
    "lamb": 2,
    "adafactor": 0,
}


def fullest_rank(sections: Mapping[str, Any]) -> StateBytes:
    """Of the rank that holds the most; `parallel.data` is filled in. Nothing is allocated, no process is needed.

    Raises ValueError, OSError: a model or a text that is not here; a model of one's own (`model.build`).
    """
    model = sections["model"]
    parallel = sections["parallel"]
    sharding = sections["data_parallel"]
    if model.build is not None:
        raise ValueError("a model of your own is built when the run starts")
    if model.layers > _MOST_LAYERS:
        raise ValueError(f"{model.layers} layers are not laid out here, at most {_MOST_LAYERS} are")
    tokens = _vocabulary_size(sections["data"])
    length = sections["data"].sequence_length
    ranks = parallel.pipeline
    placement = sections["pipeline"].placement(ranks) if ranks > 1 else (0,)
    numbers_by_stage = []
    for stage_rank in range(ranks):
        # one rank at each place in the pipeline: its data, context and tensor ranks hold as much
        ps = _planned_rank(parallel, Grid(parallel).rank_at(pp=stage_rank, dp=0, cp=0, tp=0))
        with torch.device("meta"):
            stages = gpt_stages(**model.arguments(tokens, length), placement=placement, parallel=ps)
        numbers_by_stage.append(_numbers(stages, sections.get("lora")))
    optimizer = sections["optimizer"]
    grad_dtype = sharding.grad_dtype
    frozen, trained = max(numbers_by_stage, key=sum)
    state = expected_bytes(
        trained,
        zero_stage=sharding.zero_stage,
        ranks=(parallel.data or 1) * parallel.context // parallel.replicate,
        param_bytes=model.dtype.itemsize,
        grad_bytes=None if grad_dtype is None else DTYPES[grad_dtype].itemsize,
        main_params=optimizer.main_params,
        moments=_MOMENTS[optimizer.optimizer] + (optimizer.ema_decay > 0),
        offload_fraction=sharding.offload_fraction if sharding.offload == "optimizer" else 0.0,
    )
    # frozen ones are in no bucket, and whole on every rank
    return state + StateBytes(weights=frozen * model.dtype.itemsize)


def _numbers(stages: Mapping[int, GPTModel], lora: LoraConfig | None) -> tuple[int, int]:
    """(frozen, trained) parameters of one rank. A table that both ends of a V share is one parameter."""
    parameters = {id(p): p.numel() for stage in stages.values() for p in stage.parameters()}
    whole = sum(parameters.values())
    if lora is None or lora.rank is None:
        return 0, whole
    return whole, sum(adapter_numel(stage, lora) for stage in stages.values())


class _PlannedGroup(Group):
    """A group of processes that nobody has started: only its ranks are read."""

    def __post_init__(self) -> None:
        self.size = len(self.ranks)
        self.gloo = frozenset()
        self.staged = frozenset()


def _planned_rank(parallel: ParallelConfig, rank: int) -> ParallelState:
    """What `rank` of this layout will be."""
    groups: dict[str, Group] = {}
    for name, ranks in Grid(parallel).groups_of(rank).items():
        nobody: Any = None
        groups[name] = _PlannedGroup(name, ranks, ranks.index(rank), nobody, timedelta())
    return ParallelState(parallel, rank, groups=groups)


def _vocabulary_size(data: DataConfig) -> int:
    """Of the text's tokenizer; what the default corpus will have. Raises ValueError: a file that does not tell."""
    if not data.train:
        return data.vocab_size
    prefix = open_blend(data.train)[0][1]
    if is_text(prefix):
        if data.tokenizer is not None:
            raise ValueError(f"{prefix} is prepared when the run starts")
        return data.vocab_size
    card = None if is_list(prefix) else TokenFile(prefix).card
    if card is None:
        raise ValueError(f"{prefix} does not tell how many tokens its tokenizer has")
    return card.vocab_size
