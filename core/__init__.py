"""A Megatron-style parallelism core. Import the rooms: `core.parallel_state`, `core.models.gpt`, ..."""

__version__ = "0.1.0"  # of the distribution paracore
