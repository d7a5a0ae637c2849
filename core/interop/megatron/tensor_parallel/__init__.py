"""Megatron's `tensor_parallel` over ours: layers that draw by `init_method`, mappings over the current group."""

from core.interop.megatron.absent import absent_names
from core.interop.megatron.tensor_parallel.layers import (
    ColumnParallelLinear as ColumnParallelLinear,
)
from core.interop.megatron.tensor_parallel.layers import RowParallelLinear as RowParallelLinear
from core.interop.megatron.tensor_parallel.layers import (
    VocabParallelEmbedding as VocabParallelEmbedding,
)
from core.interop.megatron.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region as copy_to_tensor_model_parallel_region,
)
from core.interop.megatron.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region as gather_from_sequence_parallel_region,
)
from core.interop.megatron.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region as gather_from_tensor_model_parallel_region,
)
from core.interop.megatron.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region as reduce_from_tensor_model_parallel_region,
)
from core.interop.megatron.tensor_parallel.mappings import (
    reduce_scatter_to_sequence_parallel_region as reduce_scatter_to_sequence_parallel_region,
)
from core.interop.megatron.tensor_parallel.mappings import (
    scatter_to_sequence_parallel_region as scatter_to_sequence_parallel_region,
)
from core.interop.megatron.tensor_parallel.mappings import (
    scatter_to_tensor_model_parallel_region as scatter_to_tensor_model_parallel_region,
)
from core.interop.megatron.tensor_parallel.mappings import (
    vocab_parallel_cross_entropy as vocab_parallel_cross_entropy,
)
from core.interop.megatron.tensor_parallel.random import checkpoint as checkpoint
from core.interop.megatron.tensor_parallel.random import (
    get_cuda_rng_tracker as get_cuda_rng_tracker,
)
from core.interop.megatron.tensor_parallel.random import (
    model_parallel_cuda_manual_seed as model_parallel_cuda_manual_seed,
)
from core.interop.megatron.tensor_parallel.utils import broadcast_data as broadcast_data

__getattr__ = absent_names(__name__)
