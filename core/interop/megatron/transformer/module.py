"""The base class of Megatron's modules."""

from typing import Any

from torch import nn

from core.dist_checkpointing.state.mapping import ShardedTensor, sharded_state_dict
from core.interop.megatron.absent import absent_names
from core.parallel_state import current_state


class MegatronModule(nn.Module):
    """An `nn.Module` with a configuration and a sharded state."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def state_dict_for_save_checkpoint(
        self, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        state: dict[str, Any] = self.state_dict(prefix=prefix, keep_vars=keep_vars)
        return state

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, ShardedTensor]:
        """This rank's shard of every parameter, from their layouts. Raises ValueError: sharded_offsets."""
        if sharded_offsets:
            raise ValueError(
                f"{len(sharded_offsets)} sharded_offsets: layouts say where parameters lie; leave them out"
            )
        return sharded_state_dict(self, current_state(), prefix=prefix)


__getattr__ = absent_names(__name__)
