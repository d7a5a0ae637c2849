"""Megatron's name of the module that has what stands for a part of a saved tensor."""

from core.dist_checkpointing.state.mapping import ShardedObject as ShardedObject
from core.dist_checkpointing.state.mapping import ShardedTensor as ShardedTensor
