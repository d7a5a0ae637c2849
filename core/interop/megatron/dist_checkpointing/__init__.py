"""Megatron's `dist_checkpointing`, which is ours."""

from core.dist_checkpointing import ShardedObject as ShardedObject
from core.dist_checkpointing import ShardedTensor as ShardedTensor
from core.dist_checkpointing import load as load
from core.dist_checkpointing import save as save
