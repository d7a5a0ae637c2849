"""The optimizer that a configuration names."""

from core.data_parallel import DataParallel
from core.optimizer.adamw import ShardedAdamW, ShardedAdamW8bit
from core.optimizer.by_name import groups_by_name
from core.optimizer.config import NEEDS_STATES_AT_HAND, OptimizerConfig
from core.optimizer.lion import ShardedLion
from core.optimizer.muon import ShardedMuon
from core.optimizer.sgd import ShardedSGD
from core.optimizer.sharded import ShardedOptimizer
from core.optimizer.state.flat_shard import Decays
from core.optimizer.state.offload import Offload
from core.optimizer.whole.adafactor import ShardedAdafactor
from core.optimizer.whole.lamb import ShardedLamb
from core.parallel_state.layout import Layout


def build_optimizer(
    shard: DataParallel, config: OptimizerConfig, *, offload: Offload | None = None
) -> ShardedOptimizer:
    """`config.optimizer` over a `DataParallel`. Raises ValueError: Muon, LAMB or Adafactor with offload."""
    groups = groups_by_name(config, shard.named_parameters())
    if config.optimizer in NEEDS_STATES_AT_HAND and offload is not None and offload.fraction > 0:
        raise ValueError(
            f"{config.optimizer} takes parameters as a whole where its states are, but offload={offload.kind!r} "
            f"holds a fraction {offload.fraction} of them on the host; use fraction 0, or optimizer='adamw'"
        )
    if config.optimizer == "adafactor":
        return ShardedAdafactor(shard, config, groups=groups)
    if config.optimizer == "lamb":
        return ShardedLamb(shard, config, groups=groups)
    if config.optimizer == "muon":
        return ShardedMuon(
            shard, config, groups=groups, hidden=_hidden_matrices(config.muon_except)
        )
    if config.optimizer == "adamw8bit":
        return ShardedAdamW8bit(shard, config, offload=offload, groups=groups)
    if config.optimizer == "sgd":
        return ShardedSGD(shard, config, offload=offload, groups=groups)
    if config.optimizer == "lion":
        return ShardedLion(shard, config, offload=offload, groups=groups)
    return ShardedAdamW(shard, config, offload=offload, groups=groups)


def _hidden_matrices(muon_except: str) -> Decays | None:
    """A test for matrices that have none of the words of `muon_except` in their name; None if it has no words."""
    excluded = [word.strip().lower() for word in muon_except.split(",") if word.strip()]
    if not excluded:
        return None

    def is_hidden(name: str, layout: Layout) -> bool:
        return not any(word in name.lower() for word in excluded)

    return is_hidden
