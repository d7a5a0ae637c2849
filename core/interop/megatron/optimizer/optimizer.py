"""Megatron's optimizer: what a training loop calls, over a `ShardedOptimizer`."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from core.interop.megatron.optimizer.grad_scaler import GradScaler
from core.interop.megatron.optimizer.optimizer_config import OptimizerConfig
from core.optimizer import ShardedOptimizer
from core.parallel_state import layout_of
from core.parallel_state.collectives import all_reduce
from core.parallel_state.layout import true_part

_SCALER = "grad_scaler"


class MegatronOptimizer:
    """`get_megatron_optimizer` makes it. optimizer: ours, a torch.optim.Optimizer.

    param_groups: as Megatron's, with wd_mult, max_lr and min_lr; rates and decays written there count.
    """

    is_stub_optimizer = False

    def __init__(self, optimizer: ShardedOptimizer, config: OptimizerConfig) -> None:
        self.optimizer = optimizer
        self.config = config
        self.grad_scaler = GradScaler(config, optimizer.ps.device)
        self._scale_was_asked = self._warned = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of parameters that are decayed, then of those that are not; the same number on every rank."""
        return self.optimizer.param_groups

    @property
    def chained_optimizers(self) -> list["MegatronOptimizer"]:
        """Itself: experts' and other parameters have one."""
        return [self]

    @property
    def state(self) -> dict[Tensor, dict[str, Tensor]]:
        """parameter -> exp_avg and the others, this rank's shard."""
        return self.optimizer.state

    def get_parameters(self) -> list[Tensor]:
        """Of all groups."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def get_loss_scale(self) -> Tensor:
        """float32 [1]; gradients are divided by it in the step."""
        self._scale_was_asked = True
        return self.grad_scaler.tensor()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale; scripts give it to the configuration as `grad_scale_func`."""
        return self.get_loss_scale() * loss

    def step(self) -> tuple[bool, float | None, int | None]:
        """(whether parameters were updated, norm before clipping, zeros in the gradients or None).

        The norm is of the whole model: a gradient that several ranks hold counts once. One that is not finite leaves
        everything as it was on every rank: (False, None, None).
        """
        self._tell_of_scale()
        zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None
        stats = self.optimizer.step(loss_scale=self.grad_scaler.scale)
        skipped = bool(stats.skipped)
        self.grad_scaler.update(skipped)
        if skipped:
            return False, None, None
        return True, float(stats.grad_norm), zeros

    def _tell_of_scale(self) -> None:
        scale = self.grad_scaler.scale
        if scale != 1 and not (self._scale_was_asked or self._warned):
            self._warned = True
            warnings.warn(
                f"step() divides gradients by the loss scale {scale:g}, and no loss was multiplied by it: set "
                "config.grad_scale_func = optimizer.scale_loss of the model's configuration, or scale losses by "
                "optimizer.scale_loss(loss)",
                stacklevel=3,
            )

    @torch.no_grad()
    def count_zeros(self) -> int:
        """Zeros in the model's gradients, those that several ranks hold counted once. Collective."""
        ps = self.optimizer.ps
        shard = self.optimizer.shard
        if not shard.finished:
            shard.finish()
        total = torch.zeros(1, dtype=torch.float64, device=ps.device)
        for parameter in self.get_parameters():
            layout = layout_of(parameter)
            if parameter.grad is None:
                continue
            # all ranks read it, one of those that hold the same elements counts
            gradient = true_part(parameter.grad.clone(), layout, ps.coordinate, ps.sizes)
            if layout.owned_by(ps.coordinate):
                total += gradient.numel() - gradient.count_nonzero()
        return int(all_reduce(total, ps.world).item())

    def reload_model_params(self, state_dict: Any = None) -> None:
        """Main weights from the parameters, after these were changed. Raises ValueError: from a state_dict."""
        if state_dict is not None:
            raise ValueError(
                "reload_model_params(state_dict=...) is not here (1 argument of 0): load_state_dict() it into the "
                "model, then reload_model_params()"
            )
        self.optimizer.reload_parameters()

    def state_dict(self) -> dict[str, Any]:
        """This rank's states, for torch.save."""
        return {**self.optimizer.state_dict(), _SCALER: self.grad_scaler.state_dict()}

    def sharded_state_dict(
        self,
        model_sharded_state_dict: Mapping[str, Any] | None = None,
        is_loading: bool = False,
        metadata: Any = None,
        **unused: Any,
    ) -> dict[str, Any]:
        """For `dist_checkpointing.save` and `load`, of any layout; after a load `load_state_dict` takes the counts.

        The model's is not asked: layouts of parameters say what lies where.
        """
        return {**self.optimizer.sharded_state_dict(), _SCALER: self.grad_scaler.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """What `state_dict` gave on this rank, or what `dist_checkpointing.load` gave back.

        Raises ValueError: another rank's, or another layout's `state_dict`.
        """
        state = dict(state_dict)
        scaler = state.pop(_SCALER, None)
        self.optimizer.load_state_dict(state)
        if scaler is not None:
            self.grad_scaler.load_state_dict(scaler)


# Megatron chains one of experts and one of the rest; here one updates both
ChainedOptimizer = MegatronOptimizer
