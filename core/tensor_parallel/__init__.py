"""One matmul over many ranks: parallel linears, embedding, cross entropy, sequence parallelism. Plain tensors."""

from core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from core.tensor_parallel.embedding import VocabParallelEmbedding, padded_vocab_rows
from core.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from core.tensor_parallel.mappings import (
    copy_to_tensor_region,
    dropout_in_tensor_region,
    fill_from_full,
    full_tensor,
    gather_from_sequence_region,
    gather_from_tensor_region,
    reduce_from_tensor_region,
    reduce_scatter_to_sequence_region,
    scatter_to_sequence_region,
    scatter_to_tensor_region,
    sum_gradient,
)
from core.tensor_parallel.placement import Placement
from core.tensor_parallel.summed_gradients import sum_gradients_of_foreign

__all__ = [
    "ColumnParallelLinear",
    "Placement",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "copy_to_tensor_region",
    "dropout_in_tensor_region",
    "fill_from_full",
    "full_tensor",
    "gather_from_sequence_region",
    "gather_from_tensor_region",
    "padded_vocab_rows",
    "reduce_from_tensor_region",
    "reduce_scatter_to_sequence_region",
    "scatter_to_sequence_region",
    "scatter_to_tensor_region",
    "sum_gradient",
    "sum_gradients_of_foreign",
    "vocab_parallel_cross_entropy",
]
