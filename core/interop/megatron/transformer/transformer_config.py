"""Megatron's `TransformerConfig`: its fields that are a model's facts, checked against the layout of ranks."""

from dataclasses import fields
from typing import Any

import torch

from core.parallel_state import current_state, model_parallel_is_initialized
from core.transformer.transformer_config import TransformerConfig as Facts

_FACTS = frozenset(field.name for field in fields(Facts))
_SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
}
# how a step is run, kept as attributes; functions that scripts put there
_KEPT = {
    "finalize_model_grads_func": None,
    "calculate_per_token_loss": False,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "virtual_pipeline_model_parallel_size": None,
}
# the same numbers with and without: kernels, overlapping, memory, timing
_NO_EFFECT = frozenset(
    (
        "apply_rope_fusion",
        "async_tensor_model_parallel_allreduce",
        "attention_softmax_in_fp32",
        "autocast_dtype",
        "barrier_with_L1_time",
        "batch_p2p_comm",
        "batch_p2p_sync",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "cpu_offloading",
        "cross_entropy_loss_fusion",
        "deallocate_pipeline_outputs",
        "enable_autocast",
        "gradient_accumulation_fusion",
        "grad_scale_func",
        "grad_sync_func",
        "masked_softmax_fusion",
        "memory_efficient_layer_norm",
        "no_sync_func",
        "overlap_p2p_comm",
        "param_sync_func",
        "perform_initialization",
        "persist_layer_norm",
        "timers",
        "tp_comm_overlap",
        "use_ring_exchange_p2p",
        "variable_seq_lengths",
        "wgrad_deferral_limit",
    )
)


class TransformerConfig(Facts):
    """Ours, taking Megatron's other fields: sizes are compared with the current state, bf16 and fp16 become
    `params_dtype`, fields without effect on numbers are dropped.

    Raises ValueError: a size that is not the current one; a field that is not here, unless it is None, False or 0.
    """

    def __init__(self, **given: Any) -> None:
        facts = {name: given.pop(name) for name in list(given) if name in _FACTS}
        kept = {name: given.pop(name, default) for name, default in _KEPT.items()}
        for name in ("bf16", "fp16"):
            if given.pop(name, False):
                facts.setdefault("params_dtype", torch.bfloat16 if name == "bf16" else torch.float16)
        _check_sizes({name: given.pop(name) for name in list(given) if name in _SIZES})
        _check_sequence(given.pop("sequence_parallel", None))
        unknown = [name for name, value in given.items() if name not in _NO_EFFECT and value not in (None, False, 0)]
        if unknown:
            raise ValueError(
                f"TransformerConfig: {len(unknown)} fields are not here: {', '.join(sorted(unknown))}; leave out "
                "(docs/from_megatron.md)"
            )
        super().__init__(**facts)
        for name, value in kept.items():
            setattr(self, name, value)


def _check_sizes(sizes: dict[str, int]) -> None:
    if not model_parallel_is_initialized():
        return
    here = {name: current_state().size(axis) for name, axis in _SIZES.items()}
    if wrong := [f"{name}={n}, the state has {here[name]}" for name, n in sizes.items() if n != here[name]]:
        raise ValueError(
            f"TransformerConfig: {'; '.join(wrong)}; leave them out: initialize_model_parallel says them"
        )


def _check_sequence(wanted: bool | None) -> None:
    if wanted is None or not model_parallel_is_initialized():
        return
    ps = current_state()
    if bool(wanted) != ps.config.sequence_parallel and ps.size("tp") > 1:
        raise ValueError(
            f"TransformerConfig(sequence_parallel={wanted}), the state has {ps.config.sequence_parallel}; say it "
            "once, core.parallel_state.initialize_model_parallel(..., sequence_parallel=True)"
        )
