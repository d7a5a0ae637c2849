"""A Megatron-style parallelism core. Import the rooms: `core.parallel_state`, `core.models.gpt`, ..."""

__version__ = "0.1.0"  # of the distribution paracore

_ROOMS = {
    "initialize": "training",
    "RunConfig": "training",
    "GPTModel": "models.gpt",
    "TransformerConfig": "transformer",
    "DataParallel": "data_parallel",
    "ShardedAdamW": "optimizer",
    "OptimizerConfig": "optimizer",
    "Pipeline": "pipeline",
    "initialize_model_parallel": "parallel_state",
    "save": "dist_checkpointing",
    "load": "dist_checkpointing",
}


def __getattr__(name: str) -> object:
    """Raises AttributeError, which says where a name is that a newcomer looks for here."""
    where = f": from core.{_ROOMS[name]} import {name}" if name in _ROOMS else ""
    raise AttributeError(f"module 'core' has no attribute {name!r}{where}")
