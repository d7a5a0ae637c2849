"""Bytes of weights, gradients and optimizer states per rank at each ZeRO stage. Pure."""

from dataclasses import dataclass

from core.parallel_state.flat import PART_ALIGN


@dataclass(frozen=True)
class StateBytes:
    """On one rank: weights, gradients and optimizer (main copies and moments) on the device; host: offloaded ones."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    host: int = 0

    @property
    def device(self) -> int:
        """All but what is offloaded."""
        return self.weights + self.gradients + self.optimizer

    def __add__(self, more: "StateBytes") -> "StateBytes":
        return StateBytes(
            self.weights + more.weights,
            self.gradients + more.gradients,
            self.optimizer + more.optimizer,
            self.host + more.host,
        )


def expected_bytes(
    numel: int,
    *,
    zero_stage: int,
    ranks: int = 1,
    param_bytes: int = 4,
    grad_bytes: int | None = None,
    main_params: bool = True,
    moments: float = 2,
    offload_fraction: float = 0.0,
) -> StateBytes:
    """What `numel` parameters hold between steps on one of `ranks` ranks, padding at a bucket's end included in both.

    Per parameter and with d ranks, AdamW: float32 16 bytes, at stage 1 8 + 8/d, 2 4 + 12/d, 3 16/d; 16-bit weights
    with float32 main weights and gradients 18, 6 + 12/d, 2 + 16/d, 18/d. An offload moves main weights
    and moments to the host.

    param_bytes, grad_bytes: of one element; gradients have 4 at least by default. moments: states of the update, in
    numbers of a main parameter's bytes. Not in it: what stage 3 has gathered at a moment, and what
    stages 2 and 3 have of gradients before they are summed.
    Raises ValueError: an unknown stage, a fraction outside [0, 1], a number below 1 of ranks.
    """
    if zero_stage not in (0, 1, 2, 3) or ranks < 1 or not 0 <= offload_fraction <= 1:
        raise ValueError(
            f"zero_stage={zero_stage}, ranks={ranks}, offload_fraction={offload_fraction}: use a stage of 0 to 3, at "
            "least 1 rank, and a fraction from 0 to 1"
        )
    shard = -(-numel // ranks)
    # elements whose states this rank holds
    updated = shard if zero_stage >= 1 else numel
    # bytes of a main weight, a moment, a gradient sum
    wide = max(4, param_bytes)
    offloaded = updated
    if offload_fraction < 1:
        offloaded = int(updated * offload_fraction) // PART_ALIGN * PART_ALIGN
    state = wide * (moments + int(main_params and param_bytes < 4))
    return StateBytes(
        weights=param_bytes * (shard if zero_stage == 3 else numel),
        gradients=(wide if grad_bytes is None else grad_bytes)
        * (shard if zero_stage >= 2 else numel),
        optimizer=round(state * (updated - offloaded)),
        host=round(state * offloaded),
    )
