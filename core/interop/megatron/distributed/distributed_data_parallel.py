"""Megatron's wrapper for torch's optimizers: gradients stay in `.grad`, and `finish_grad_sync` sums them."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from core.autograd.gradients import is_shown
from core.data_parallel import DataParallel
from core.data_parallel.buffers.gradient import slot_of
from core.field_names import tells_names
from core.interop.megatron.settings import refuse_others
from core.parallel_state import ParallelState, current_state, layout_of
from core.parallel_state.collectives import all_reduce, broadcast
from core.parallel_state.optimizer_steps import before_optimizer_steps
from core.tensor_parallel.summed_gradients import sum_gradient_in_backward
from core.transformer.moe.experts import Experts

# field -> what there is instead
_INSTEAD = {
    "use_megatron_fsdp": "DataParallel(model, parallel_state, zero_stage=3) of core.data_parallel divides weights",
    "use_custom_fsdp": "DataParallel(model, parallel_state, zero_stage=3) of core.data_parallel divides weights",
    "data_parallel_sharding_strategy": "zero_stage=0 to 3 of core.data_parallel.DataParallel is the strategy",
    "fp8_param_gather": "weights are gathered in their own dtype; TransformerConfig(fp8='hybrid') has the products",
    "num_distributed_optimizer_instances": "states are divided over all data ranks; leave it 1",
    "delay_wgrad_compute": "schedules with W actions of core.pipeline.Pipeline delay weight gradients",
}


@tells_names()
@dataclass
class DistributedDataParallelConfig:
    """Megatron's fields that change numbers or memory. Overlapping and bucket sizes do neither here.

    use_distributed_optimizer: `get_megatron_optimizer` divides the states over the data ranks.
    Raises ValueError: what is done by another object here.
    """

    grad_reduce_in_fp32: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    use_distributed_optimizer: bool = False
    check_for_nan_in_grad: bool = False
    bucket_size: int | None = None
    average_in_collective: bool = False
    use_megatron_fsdp: bool = False
    use_custom_fsdp: bool = False
    num_distributed_optimizer_instances: int = 1
    data_parallel_sharding_strategy: str = "no_shard"
    fp8_param_gather: bool = False
    delay_wgrad_compute: bool = False
    align_param_gather: bool = False
    gradient_reduce_div_fusion: bool = True
    pad_buckets_for_high_nccl_busbw: bool = False
    check_for_large_grads: bool = False
    suggested_communication_unit_size: int | None = None
    keep_fp8_transpose_cache: bool = False

    def __post_init__(self) -> None:
        refuse_others(self, _INSTEAD)


class DistributedDataParallel(nn.Module):
    """Calls `module`; `finish_grad_sync` brings the mean of the gradients over the data ranks into every `.grad`.

    With `config.calculate_per_token_loss` the sum, which `finalize_model_grads(..., num_tokens)` divides. Experts'
    are summed over the ranks that hold the same ones, and divided by all data ranks, whose tokens are in them.
    From then until the next forward `main_grad` is the same tensor as `.grad`; zeros where that is None.
    shard: the `DataParallel` that has the gradients, after `get_megatron_optimizer`; else None.
    """

    def __init__(
        self, config: Any, ddp_config: DistributedDataParallelConfig, module: nn.Module, **more: Any
    ) -> None:
        super().__init__()
        self.module = module
        self.config = config
        self.ddp_config = ddp_config
        module_state = getattr(module, "parallel", None)
        if isinstance(module_state, ParallelState):
            self.parallel = module_state
        else:
            self.parallel = current_state()
        for part in module.modules():
            if isinstance(part, Experts):
                # by `finish_grad_sync`: the experts must not do it in backward as well
                part.edp_is_summed = True
        for parameter in module.parameters():
            # Megatron's mark of what sees this rank's rows under sequence parallelism
            if getattr(parameter, "sequence_parallel", False):
                sum_gradient_in_backward(parameter, self.parallel.group("tp"))
        self.shard: DataParallel | None = None
        self._warned = self._shows_main_grads = False
        # what `main_grad` was before the gradient was shown as it
        self._covered: dict[Tensor, Tensor] = {}
        if self.parallel.size("dp-cp") > 1:
            before_optimizer_steps(self._look)

    def _look(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Before any optimizer's step: warn, once, of gradients that `finish_grad_sync` has not brought."""
        if self._warned or self.shard is not None:
            return
        own_ids = {id(parameter) for parameter in self.module.parameters()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad if id(parameter) in own_ids else None
                if gradient is not None and not hasattr(gradient, "is_summed"):
                    self._warned = True
                    warnings.warn(
                        f"{type(optimizer).__name__}.step() takes gradients of this rank's own batch, and the "
                        f"replicas of {self.parallel.size('dp-cp')} ranks part: call "
                        "finalize_model_grads([model]) before it, or finish_grad_sync()",
                        stacklevel=4,
                    )
                    return

    def __getattr__(self, name: str) -> Any:
        # scripts ask the wrapper for what the module has
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._shows_main_grads and torch.is_grad_enabled():
            self._hide_main_grads()
        return self.module(*args, **kwargs)

    def take_shard(self, shard: DataParallel) -> None:
        """From now on `shard` sums and holds the gradients."""
        self.shard = shard

    @torch.no_grad()
    def divide_gradients(self, tokens: Tensor | None) -> None:
        """Of `shard`, after `finish_grad_sync`: sums over the tokens of all ranks, divided by `tokens`; None: they
        stay sums, where those of `shard` are means over the replicas.
        """
        factor = torch.ones((), dtype=torch.float64, device=self.parallel.device)
        if tokens is not None:
            factor = factor / tokens.reshape(())
        for parameter in self.module.parameters():
            slot = slot_of(parameter)
            if slot is not None and parameter.grad is not None:
                # outside of an executor these are means over the replicas
                slot.request_values()
                replicas = 1 if slot.sums.has_executor else self.parallel.size("dp-cp")
                slot.scale(factor * replicas)

    def _parameters_by_group(self) -> dict[str, list[Tensor]]:
        """group name -> parameters whose gradients are summed over it."""
        by_group: dict[str, list[Tensor]] = {}
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                by_group.setdefault(layout_of(parameter).gradient_groups[0], []).append(parameter)
        return by_group

    @torch.no_grad()
    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """All-reduce per group and dtype. A parameter that got no gradient on this rank counts as zeros."""
        if self.shard is not None:
            if not self.shard.finished:
                self.shard.finish()
            self._show_main_grads()
            return
        if self.ddp_config.use_distributed_optimizer:
            raise ValueError(
                "DistributedDataParallelConfig(use_distributed_optimizer=True), and 0 optimizers of "
                "get_megatron_optimizer(config, [model]), which divides the states; leave it False for torch's"
            )
        mean = not getattr(self.config, "calculate_per_token_loss", False)
        replicas = self.parallel.size("dp-cp")
        for name, parameters in self._parameters_by_group().items():
            group = self.parallel.group(name)
            if group is None and replicas == 1:
                continue
            for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
                same = [parameter for parameter in parameters if parameter.dtype == dtype]
                reduce_in_fp32 = self.ddp_config.grad_reduce_in_fp32 and dtype.itemsize < 4
                reduce_dtype = torch.float32 if reduce_in_fp32 else dtype
                # one flat buffer: ranks may differ in which parameters got a gradient, not in what they send
                flat_gradients = []
                for parameter in same:
                    if parameter.grad is None:
                        gradient = torch.zeros_like(parameter)
                    else:
                        gradient = parameter.grad
                    flat_gradients.append(gradient.reshape(-1).to(reduce_dtype))
                total = all_reduce(torch.cat(flat_gradients), group)
                if mean:
                    total /= replicas
                sizes = [parameter.numel() for parameter in same]
                for parameter, gradient in zip(same, total.split(sizes), strict=True):
                    summed = gradient.view(parameter.shape).to(dtype)
                    summed.is_summed = True
                    parameter.grad = summed
        self._show_main_grads()

    def _show_main_grads(self) -> None:
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                gradient: Any = parameter.grad
                if gradient is None:
                    gradient = torch.zeros_like(parameter)
                # operations would add to one that is not
                gradient.is_shown = True
                covered = getattr(parameter, "main_grad", None)
                if covered is not None and not is_shown(covered):
                    self._covered[parameter] = covered
                parameter.main_grad = gradient  # type: ignore[attr-defined]
        self._shows_main_grads = True

    def _hide_main_grads(self) -> None:
        for parameter in self.module.parameters():
            if is_shown(getattr(parameter, "main_grad", None)):
                del parameter.main_grad  # type: ignore[attr-defined]
                # operations add to that of a `DataParallel`
                if parameter in self._covered:
                    parameter.main_grad = self._covered[parameter]  # type: ignore[attr-defined]
        self._covered.clear()
        self._shows_main_grads = False

    def start_grad_sync(self, *unused: Any) -> None:
        """Does nothing: `finish_grad_sync` sums everything."""

    def start_param_sync(self, *unused: Any, **options: Any) -> None:
        """Wait for weights under way: `step` has started to bring them, and the forward waits by itself."""
        if self.shard is not None:
            self.shard.wait()

    def enable_forward_pre_hook(self) -> None:
        """Does nothing: the forward waits for its weights anyway."""

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Wait for weights under way, which a program is about to read."""
        self.start_param_sync()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Does nothing: gradients add up until `finish_grad_sync` anyway."""
        yield

    @torch.no_grad()
    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        """Multiply every gradient by `scaling_factor`."""
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad *= scaling_factor

    def zero_grad_buffer(self) -> None:
        """Set every gradient to zero, as before a step."""
        if self.shard is not None:
            self.shard.zero_grad()
        else:
            self.module.zero_grad()
        if self._shows_main_grads:
            self._show_main_grads()

    @torch.no_grad()
    def broadcast_params(self) -> None:
        """Every parameter from the first rank of its data group."""
        for name, parameters in self._parameters_by_group().items():
            for parameter in parameters:
                broadcast(parameter.data, self.parallel.group(name))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return state

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)
