"""What a ds_config.json, and the arguments of scripts that DeepSpeed starts, are here."""

from collections.abc import Iterable

AS_COMMAND = "python -m core.interop.deepspeed FILE --data-ranks N prints the flags that it means, key by key"
AS_CALL = (
    "from core.interop.deepspeed import from_deepspeed; from_deepspeed(FILE, data_ranks=N).fields"
)
# of the keys that a ds_config has, those that nobody else's file has
_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "zero_optimization",
    "gradient_clipping",
)
_STAGE = "give data_parallel.zero_stage: 1, the default, 2 or 3"
_RECOMPUTE = "give training.recompute=layer"
_ONE_STAGE = "leave it out: parallel.pipeline says how many stages there are, 1 by default"

# name -> what to do instead
DEEPSPEED = {
    "deepspeed_config": AS_COMMAND,
    "ds_config": AS_COMMAND,
    "zero_stage": _STAGE,
    "deepspeed_activation_checkpointing": _RECOMPUTE,
    "checkpoint_activations": _RECOMPUTE,
    "no_pipeline_parallel": _ONE_STAGE,
    "ds_pipeline_enabled": _ONE_STAGE,
    "ds_sequence_parallel_size": "give parallel.context",
    "cpu_optimizer": "give data_parallel.offload=optimizer",
    "universal_checkpoint": "leave it out: every checkpoint opens under any layout",
    "zero_reduce_bucket_size": "give data_parallel.bucket_size, in elements",
    "zero_allgather_bucket_size": "give data_parallel.bucket_size, in elements",
}


def is_deepspeeds(keys: Iterable[str]) -> bool:
    """Whether a mapping with these keys is a ds_config."""
    return not set(_KEYS).isdisjoint(keys)
