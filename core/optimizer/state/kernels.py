"""torch's fused updates on lists of flat runs: one kernel launch per group of options, however many parameters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from core.optimizer.state.flat_shard import ElementRun


@dataclass(frozen=True, eq=False)
class Factor:
    """What all elements of a step share: tensors of shape [] on one device.

    divisor: float64, gradients are divided by it (averaging, loss scale and gradient clipping in one number).
    found_inf: float32, 1 leaves everything as it is. step: float32, Adam's count after this step.
    """

    divisor: Tensor
    found_inf: Tensor
    step: Tensor

    def on_cpu(self) -> "Factor":
        """The same numbers on the CPU; waits for an accelerator."""
        divisor, found_inf, step = torch.stack([self.divisor, self.found_inf, self.step]).cpu()
        return replace(self, divisor=divisor, found_inf=found_inf.float(), step=step.float())


@dataclass(frozen=True, eq=False)
class Batch:
    """Lists of 1-D tensors, one per run: main weights, gradients of the same dtype, and kind -> states."""

    mains: list[Tensor]
    gradients: list[Tensor]
    states: dict[str, list[Tensor]]

    @classmethod
    def cut(
        cls,
        runs: Sequence[ElementRun],
        main: Tensor,
        gradient: Tensor,
        states: Mapping[str, Tensor],
    ) -> "Batch":
        """Cut the runs out of flat tensors, as views."""

        def views(flat: Tensor) -> list[Tensor]:
            return [flat[run.start : run.stop] for run in runs]

        return cls(
            views(main), views(gradient), {kind: views(state) for kind, state in states.items()}
        )

    @classmethod
    def joined(cls, batches: Sequence["Batch"]) -> "Batch":
        """All of them, for one call."""
        joined = cls([], [], {})
        for batch in batches:
            joined.mains.extend(batch.mains)
            joined.gradients.extend(batch.gradients)
            for kind, states in batch.states.items():
                joined.states.setdefault(kind, []).extend(states)
        return joined


Options = Mapping[str, Any]  # one of `param_groups`
# the last argument is the weight decay
Kernel = Callable[[Batch, Factor, Options, float], None]


def scaled(batch: Batch, factor: Factor) -> Tensor:
    """The number that the kernel divides gradients by; float64 gradients are multiplied here, before the kernel.

    The fused kernels read it as float32, which would round float64 gradients.
    """
    if batch.mains[0].dtype != torch.float64:
        return factor.divisor.float()
    torch._foreach_mul_(batch.gradients, factor.divisor.reciprocal())
    return torch.ones_like(factor.divisor, dtype=torch.float32)


def adamw(batch: Batch, factor: Factor, options: Options, weight_decay: float) -> None:
    """torch.optim.AdamW (fused), arXiv 1711.05101: states exp_avg and exp_avg_sq."""
    beta1, beta2 = options["betas"]
    torch._fused_adamw_(
        batch.mains,
        batch.gradients,
        batch.states["exp_avg"],
        batch.states["exp_avg_sq"],
        [],
        [factor.step] * len(batch.mains),
        lr=options["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=options["eps"],
        amsgrad=False,
        maximize=False,
        grad_scale=scaled(batch, factor),
        found_inf=factor.found_inf,
    )


def sgd(batch: Batch, factor: Factor, options: Options, weight_decay: float) -> None:
    """torch.optim.SGD (fused): state momentum_buffer, or none at momentum 0.

    Raises ValueError: a momentum that is set later.
    """
    momentum = options["momentum"]
    if momentum and "momentum_buffer" not in batch.states:
        raise ValueError(
            f"momentum={momentum} in param_groups, but this optimizer was made with 0 and has no momentum buffers; "
            "make it with OptimizerConfig(momentum=...) above 0"
        )
    # is_first_step would copy gradients into the buffers; buffers of zeros give the same numbers in every step
    torch._fused_sgd_(
        batch.mains,
        batch.gradients,
        batch.states["momentum_buffer"] if momentum else [],
        weight_decay=weight_decay,
        momentum=momentum,
        lr=options["lr"],
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
        grad_scale=scaled(batch, factor),
        found_inf=factor.found_inf,
    )


# elements of scratch at a time; a multiple of PART_ALIGN, so that vector kernels give the same bits
LION_CHUNK = 1 << 22


def lion(batch: Batch, factor: Factor, options: Options, weight_decay: float) -> None:
    """Lion (arXiv 2302.06675, algorithm 2): state exp_avg. torch has none; these are its operations.

    w -= lr (sign(beta1 m + (1 - beta1) g) + decay w), then m = beta2 m + (1 - beta2) g.
    """
    beta1, beta2 = options["betas"]
    skipped = factor.found_inf.bool()
    active = 1.0 - factor.found_inf.double()
    rate = options["lr"] * active
    share = (1 - beta2) * active
    keeps = 1.0 - rate * weight_decay
    flat_runs = zip(batch.mains, batch.gradients, batch.states["exp_avg"], strict=True)
    for run in flat_runs:
        for main, gradient, momentum in zip(*(flat.split(LION_CHUNK) for flat in run), strict=True):
            # 0 for what is not finite: nothing is added then, but 0 times NaN would be NaN
            gradient.div_(factor.divisor).masked_fill_(skipped, 0.0)
            direction = momentum.lerp(gradient, 1 - beta1).sign_()
            main.mul_(keeps).sub_(direction.mul_(rate))
            momentum.lerp_(gradient, share.to(momentum.dtype))
