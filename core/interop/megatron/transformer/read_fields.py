"""What modules in Megatron's words read of their configuration beside the model's facts."""

from functools import partial
from typing import Any

import torch

from core.interop.megatron.parallel_state import turn_on_sequence_parallel
from core.parallel_state import current_state, model_parallel_is_initialized
from core.transformer.transformer_config import TransformerConfig as ModelConfig

SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
}
# the same numbers with and without: kernels, overlapping, memory, timing; with the defaults of megatron-core 0.16.1
NO_EFFECT: dict[str, Any] = {
    "apply_rope_fusion": False,
    "async_tensor_model_parallel_allreduce": True,
    "attention_softmax_in_fp32": True,
    "autocast_dtype": None,
    "barrier_with_L1_time": True,
    "batch_p2p_comm": True,
    "batch_p2p_sync": True,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "cpu_offloading": False,
    "cross_entropy_loss_fusion": False,
    "deallocate_pipeline_outputs": False,
    "enable_autocast": False,
    "gradient_accumulation_fusion": False,
    "grad_sync_func": None,
    "masked_softmax_fusion": False,
    "memory_efficient_layer_norm": False,
    "moe_grouped_gemm": False,
    "moe_per_layer_logging": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "moe_shared_expert_overlap": False,
    "moe_token_dispatcher_type": "allgather",
    "no_sync_func": None,
    "overlap_p2p_comm": False,
    "param_sync_func": None,
    "perform_initialization": True,
    "persist_layer_norm": False,
    "timers": None,
    "tp_comm_overlap": False,
    "use_ring_exchange_p2p": False,
    "variable_seq_lengths": False,
    "wgrad_deferral_limit": 0,
}
# what is refused with another value
_WITHOUT = {
    "apply_residual_connection_post_layernorm": False,
    "deterministic_mode": False,
    "expert_tensor_parallel_size": 1,
    "fp32_residual_connection": False,
    "moe_router_dtype": "fp32",
}


def _size(name: str) -> property:
    """Of the current state; as it was given, or 1, where there is none yet."""

    def read(config: Any) -> int:
        if model_parallel_is_initialized():
            return current_state().size(SIZES[name])
        return int(vars(config).get(f"_{name}", 1))

    def write(config: Any, size: int) -> None:
        check_sizes({name: size})
        setattr(config, f"_{name}", size)

    return property(read, write, doc=f"{name}, as the layers have it.")


class ReadFields:
    """Of a configuration: what was given is what is read, and Megatron's defaults of what was not."""

    tensor_model_parallel_size = _size("tensor_model_parallel_size")
    pipeline_model_parallel_size = _size("pipeline_model_parallel_size")
    context_parallel_size = _size("context_parallel_size")
    expert_model_parallel_size = _size("expert_model_parallel_size")

    def keep_given(
        self, given: dict[str, Any], sizes: dict[str, int], splits_sequence: bool | None
    ) -> None:
        """Called once, where the model's facts are known."""
        assert isinstance(self, ModelConfig)
        for name, size in sizes.items():
            setattr(self, f"_{name}", size)
        self._splits_sequence = bool(splits_sequence)
        # of a copy with another field (dataclasses.replace), which is given the dtype alone
        dtypes = {
            "bf16": self.params_dtype == torch.bfloat16,
            "fp16": self.params_dtype == torch.float16,
        }
        for name, value in (NO_EFFECT | _WITHOUT | dtypes | given).items():
            # None of init_method, say, is the default that the property gives
            if not hasattr(type(self), name):
                setattr(self, name, value)

    @property
    def sequence_parallel(self) -> bool:
        """Whether layers split sequences over tensor ranks."""
        # over several ranks the state says it to the layers, and a module beside them must do the same
        if model_parallel_is_initialized() and current_state().size("tp") > 1:
            return current_state().config.sequence_parallel
        return self._splits_sequence

    @sequence_parallel.setter
    def sequence_parallel(self, splits_sequence: bool) -> None:
        take_sequence_parallel(splits_sequence)
        self._splits_sequence = bool(splits_sequence)

    @property
    def init_method(self) -> Any:
        """Fills a tensor in place with normal numbers of std `init_method_std`."""
        assert isinstance(self, ModelConfig)
        return _normal(self.init_method_std)

    @property
    def output_layer_init_method(self) -> Any:
        """The same of layers that write to the residual stream: std / sqrt(2 layers)."""
        assert isinstance(self, ModelConfig)
        return _normal(self.output_std)

    @property
    def embedding_init_method(self) -> Any:
        """The same of a table of tokens: `init_method`'s std."""
        return self.init_method

    @property
    def embedding_init_method_std(self) -> float:
        """`init_method_std`."""
        assert isinstance(self, ModelConfig)
        return self.init_method_std


def _normal(std: float) -> Any:
    # of torch's function, so that configurations are copied and pickled
    return partial(torch.nn.init.normal_, mean=0.0, std=std)


def check_sizes(sizes: dict[str, int]) -> None:
    """Raise ValueError: a size that the current state, if there is one, does not have."""
    if not model_parallel_is_initialized():
        return
    wrong = []
    for name, size in sizes.items():
        actual = current_state().size(SIZES[name])
        if size != actual:
            wrong.append(f"{name}={size}, the state has {actual}")
    if wrong:
        raise ValueError(
            f"TransformerConfig: {'; '.join(wrong)}; leave them out: initialize_model_parallel says them"
        )


def take_sequence_parallel(requested: bool | None) -> None:
    """Megatron's configuration says it, here the state does: of models that are made from now on."""
    if requested is None or not model_parallel_is_initialized():
        return
    ps = current_state()
    if requested and ps.size("tp") > 1:
        turn_on_sequence_parallel()
    elif not requested and ps.config.sequence_parallel:
        raise ValueError(
            f"TransformerConfig(sequence_parallel={requested}), the state has True, as initialize_model_parallel or "
            "another configuration said; say the same in both"
        )
