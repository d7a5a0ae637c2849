"""Megatron's `dist_checkpointing.mapping`, which is ours."""

from core.dist_checkpointing.mapping import ShardedObject as ShardedObject
from core.dist_checkpointing.mapping import ShardedTensor as ShardedTensor
from core.interop.megatron.absent import absent_names

__getattr__ = absent_names(__name__)
