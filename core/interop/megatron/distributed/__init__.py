"""Megatron's data parallelism around a model, for torch's optimizers; `core.data_parallel` is what divides states."""

from core.interop.megatron.distributed.distributed_data_parallel import (
    DistributedDataParallel as DistributedDataParallel,
)
from core.interop.megatron.distributed.distributed_data_parallel import (
    DistributedDataParallelConfig as DistributedDataParallelConfig,
)
from core.interop.megatron.distributed.finalize_model_grads import (
    finalize_model_grads as finalize_model_grads,
)
