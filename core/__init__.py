"""A Megatron-style parallelism core. Import the rooms: `core.parallel_state`, `core.models.gpt`, ..."""
