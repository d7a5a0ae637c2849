"""Megatron's pipelines: one function for every layout."""

from core.interop.megatron.pipeline_parallel.schedules import (
    get_forward_backward_func as get_forward_backward_func,
)
