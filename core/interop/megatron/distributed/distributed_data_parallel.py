"""Megatron's wrapper for torch's optimizers: gradients stay in `.grad`, and `finish_grad_sync` sums them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from core.parallel_state import ParallelState, current_state, layout_of
from core.parallel_state.collectives import all_reduce, broadcast

_SHARDED = (
    "DataParallel(model, parallel_state, zero_stage=1) and ShardedAdamW divide the states (docs/from_megatron.md)"
)


@dataclass
class DistributedDataParallelConfig:
    """Megatron's fields that change numbers or memory. Overlapping and bucket sizes do neither here.

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

    def __post_init__(self) -> None:
        for name in ("use_distributed_optimizer", "overlap_param_gather", "use_megatron_fsdp"):
            if getattr(self, name):
                raise ValueError(f"{name}=True is another object here: {_SHARDED}; or leave it False")


class DistributedDataParallel(nn.Module):
    """Calls `module`; `finish_grad_sync` brings the mean of the gradients over the data ranks into every `.grad`.

    With `config.calculate_per_token_loss` the sum, which `finalize_model_grads(..., num_tokens)` divides.
    """

    def __init__(
        self, config: Any, ddp_config: DistributedDataParallelConfig, module: nn.Module, **more: Any
    ) -> None:
        super().__init__()
        self.module, self.config, self.ddp_config = module, config, ddp_config
        own = getattr(module, "parallel", None)
        self.parallel = own if isinstance(own, ParallelState) else current_state()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def _trained(self) -> dict[str, list[Tensor]]:
        """group name -> parameters whose gradients are summed over it."""
        found: dict[str, list[Tensor]] = {}
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                found.setdefault(layout_of(parameter).gradient_groups[0], []).append(parameter)
        return found

    @torch.no_grad()
    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """All-reduce per group and dtype. A parameter that got no gradient on this rank counts as zeros."""
        mean = not getattr(self.config, "calculate_per_token_loss", False)
        for name, parameters in self._trained().items():
            if (group := self.parallel.group(name)) is None:
                continue
            for dtype in dict.fromkeys(p.dtype for p in parameters):
                same = [p for p in parameters if p.dtype == dtype]
                wide = torch.float32 if self.ddp_config.grad_reduce_in_fp32 and dtype.itemsize < 4 else dtype
                parts = [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1).to(wide) for p in same]
                total = all_reduce(torch.cat(parts), group)
                if mean:
                    total /= group.size
                for p, part in zip(same, total.split([p.numel() for p in same]), strict=True):
                    p.grad = part.view(p.shape).to(dtype)

    def start_grad_sync(self, *unused: Any) -> None:
        """Nothing: `finish_grad_sync` does it all."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients add up until `finish_grad_sync` anyway."""
        yield

    @torch.no_grad()
    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        """Multiply every gradient by `scaling_factor`."""
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad *= scaling_factor

    def zero_grad_buffer(self) -> None:
        """Set every gradient to zero, as before a step."""
        self.module.zero_grad()

    @torch.no_grad()
    def broadcast_params(self) -> None:
        """Every parameter from the first rank of its data group."""
        for name, parameters in self._trained().items():
            for parameter in parameters:
                broadcast(parameter.data, self.parallel.group(name))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return found

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)
