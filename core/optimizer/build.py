"""The optimizer that a configuration names."""

from core.data_parallel import DataParallel
from core.optimizer.config import OptimizerConfig
from core.optimizer.muon import ShardedMuon
from core.optimizer.sgd import ShardedSGD
from core.optimizer.sharded import ShardedAdamW, ShardedOptimizer
from core.optimizer.state.flat_shard import Decays
from core.optimizer.state.offload import Offload


def build_optimizer(
    shard: DataParallel, config: OptimizerConfig, *, offload: Offload | None = None
) -> ShardedOptimizer:
    """`config.optimizer` over a `DataParallel`. Raises ValueError: Muon with cut matrices or with offload."""
    if config.optimizer == "muon":
        if offload is not None and offload.fraction > 0:
            raise ValueError(
                f"Muon multiplies matrices where its states are, but offload={offload.kind!r} holds a fraction "
                f"{offload.fraction} of them on the host; use fraction 0, or optimizer='adamw'"
            )
        return ShardedMuon(shard, config, hidden=_hidden(config.muon_except))
    kind = ShardedSGD if config.optimizer == "sgd" else ShardedAdamW
    return kind(shard, config, offload=offload)


def _hidden(words: str) -> Decays | None:
    """The matrices that have none of the words in their name."""
    outer = [word.strip().lower() for word in words.split(",") if word.strip()]
    return (lambda name, layout: not any(word in name.lower() for word in outer)) if outer else None
