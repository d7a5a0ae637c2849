"""The whole state on disk in an open format, whatever the mesh. Names are loaded at first use: the writer program
and the command line import this package without torch."""

from typing import TYPE_CHECKING

from core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from core.dist_checkpointing.manager import CheckpointManager as CheckpointManager
    from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot as CheckpointRoot
    from core.dist_checkpointing.reading.lazy import lazy_tensors as lazy_tensors
    from core.dist_checkpointing.reading.loading import load as load
    from core.dist_checkpointing.reading.loading import (
        load_common_state_dict as load_common_state_dict,
    )
    from core.dist_checkpointing.reading.loading import load_plain_tensors as load_plain_tensors
    from core.dist_checkpointing.reading.loading import (
        load_tensors_metadata as load_tensors_metadata,
    )
    from core.dist_checkpointing.state.leaves import register as register
    from core.dist_checkpointing.state.mapping import ShardedObject as ShardedObject
    from core.dist_checkpointing.state.mapping import ShardedTensor as ShardedTensor
    from core.dist_checkpointing.state.mapping import sharded_state_dict as sharded_state_dict
    from core.dist_checkpointing.state.names import Concat as Concat
    from core.dist_checkpointing.state.names import Source as Source
    from core.dist_checkpointing.writing.saving import save as save
else:
    __getattr__, __dir__ = lazy_exports(__name__)
