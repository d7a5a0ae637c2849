"""Megatron's `dist_checkpointing`, which is ours."""

from core.dist_checkpointing import ShardedObject as ShardedObject
from core.dist_checkpointing import ShardedTensor as ShardedTensor
from core.dist_checkpointing import load as load
from core.dist_checkpointing import load_common_state_dict as load_common_state_dict
from core.dist_checkpointing import load_plain_tensors as load_plain_tensors
from core.dist_checkpointing import load_tensors_metadata as load_tensors_metadata
from core.dist_checkpointing import save as save
from core.interop.megatron.absent import absent_names

__getattr__ = absent_names(__name__)
