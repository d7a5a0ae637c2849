"""The fields of Megatron's optimizer, and the key by which parameters get options of their own."""

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor

from core.field_names import tells_names
from core.interop.megatron.settings import refuse_others

_OFFLOAD = "offload=Offload(...) of core.optimizer.build_optimizer"
_LOW_PRECISION = "optimizer='adamw8bit' of core.optimizer.build_optimizer keeps moments in 8 bits; or leave it out"
# field -> what there is instead of another value than the default
_INSTEAD = {
    "decoupled_lr": "give get_megatron_optimizer(config_overrides={ParamKey(name='*embedding*'): {'max_lr': ...}})",
    "decoupled_min_lr": "give get_megatron_optimizer(config_overrides={ParamKey(name=...): {'min_lr': ...}})",
    "decoupled_weight_decay": "leave it True: the decay is AdamW's, of sgd torch's",
    "optimizer_cpu_offload": f"use {_OFFLOAD}; or leave it False",
    "optimizer_offload_fraction": f"use {_OFFLOAD}; or leave it 0",
    "use_precision_aware_optimizer": _LOW_PRECISION,
    "main_grads_dtype": "give DistributedDataParallelConfig(grad_reduce_in_fp32=...); or leave it out",
    "main_params_dtype": "leave it out: main weights are float32",
    "exp_avg_dtype": _LOW_PRECISION,
    "exp_avg_sq_dtype": _LOW_PRECISION,
    "reuse_grad_buf_for_mxfp8_param_ag": "leave it False",
    "fp8_recipe": "give it to TransformerConfig: updates are of main weights",
}
_MUON = "build_optimizer(shard, OptimizerConfig(optimizer='muon')) of core.optimizer"


@tells_names()
@dataclass
class OptimizerConfig:
    """Megatron's fields and defaults. Overlapping, pinning and timing change no number, and do nothing.

    lr: what a scheduler's rates replace. bf16, fp16: main weights follow from the parameters' dtype anyway; fp16 has
    a dynamic loss scale, or loss_scale. use_distributed_optimizer: states are divided over the data ranks.
    Raises ValueError: what is not here, with what to use.
    """

    lr: float | None = None
    min_lr: float | None = None
    decoupled_lr: float | None = None
    decoupled_min_lr: float | None = None
    weight_decay: float = 0.01
    apply_wd_to_qk_layernorm: bool = False
    fp8_recipe: str | None = None
    fp16: bool = False
    bf16: bool = False
    reuse_grad_buf_for_mxfp8_param_ag: bool = False
    params_dtype: torch.dtype = torch.float32
    use_precision_aware_optimizer: bool = False
    store_param_remainders: bool = True
    main_grads_dtype: torch.dtype = torch.float32
    main_params_dtype: torch.dtype = torch.float32
    exp_avg_dtype: torch.dtype = torch.float32
    exp_avg_sq_dtype: torch.dtype = torch.float32
    optimizer: str = "adam"
    loss_scale: float | None = None
    initial_loss_scale: float = 2.0**32
    min_loss_scale: float = 1.0
    loss_scale_window: float = 1000
    hysteresis: int = 2
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    decoupled_weight_decay: bool = True
    sgd_momentum: float = 0.9
    muon_momentum: float = 0.95
    muon_split_qkv: bool = True
    muon_use_nesterov: bool = False
    muon_scale_mode: str = "spectral"
    muon_fp32_matmul_prec: str = "medium"
    muon_num_ns_steps: int = 5
    muon_tp_mode: str = "blockwise"
    muon_extra_scale_factor: float = 1.0
    use_distributed_optimizer: bool = False
    overlap_param_gather: bool = False
    overlap_param_gather_with_optimizer_step: bool = False
    optimizer_cpu_offload: bool = False
    optimizer_offload_fraction: float = 0.0
    use_torch_optimizer_for_cpu_offload: bool = False
    overlap_cpu_optimizer_d2h_h2d: bool = False
    pin_cpu_grads: bool = True
    pin_cpu_params: bool = True
    clip_grad: float = 1.0
    log_num_zeros_in_grad: bool = False
    barrier_with_L1_time: bool = False
    timers: Callable | None = None
    config_logger_dir: str = ""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises ValueError: a value that is not here; fields may have been changed since."""
        refuse_others(self, _INSTEAD)
        name = type(self).__name__
        if self.optimizer not in ("adam", "sgd"):
            use = _MUON if "muon" in self.optimizer else "adam (its decay is AdamW's) or sgd"
            raise ValueError(f"{name}: optimizer={self.optimizer!r} is not here; use {use}")
        if self.fp16 and self.bf16:
            raise ValueError(f"{name}: fp16 and bf16 are both True; leave 1 of 2")


@tells_names()
@dataclass
class AdamOptimizerConfig(OptimizerConfig):
    """Of adam."""

    optimizer: str = "adam"


@tells_names()
@dataclass
class SGDOptimizerConfig(OptimizerConfig):
    """Of sgd."""

    optimizer: str = "sgd"


def _as_tuple(value: Any) -> tuple:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


@dataclass(frozen=True)
class ParamKey:
    """Parameters by patterns of names, true attributes, predicates of (parameter) or of (parameter, name): any."""

    name: str | tuple[str, ...] = ()
    attr: str | tuple[str, ...] = ()
    predicate: Any = ()
    with_name_predicate: Any = ()

    def matches(self, param: Tensor, param_name: str) -> bool:
        """Whether one of them holds of a parameter."""
        return (
            any(fnmatch(param_name, pattern) for pattern in _as_tuple(self.name))
            or any(getattr(param, name, False) for name in _as_tuple(self.attr))
            or any(holds(param) for holds in _as_tuple(self.predicate))
            or any(holds(param, param_name) for holds in _as_tuple(self.with_name_predicate))
        )
