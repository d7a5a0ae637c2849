"""A schedule of your own is a function (ranks, microbatches) -> Schedule. It is drawn, and under torchrun it runs.

python examples/custom_schedule.py
torchrun --standalone --nproc-per-node 2 examples/custom_schedule.py
"""

import os

from core.pipeline import Action, Schedule, looped, play
from core.pipeline.draw.draw import draw_text


def weights_when_idle(ranks: int, microbatches: int) -> Schedule:
    """1F1B, but weight gradients wait until no forward is left: short bubbles for more memory."""
    orders = []
    for rank in range(ranks):
        ahead = min(2 * (ranks - rank) - 1, microbatches)  # forwards before the first backward
        order = [Action("F", rank, m) for m in range(ahead)]
        waiting: list[Action] = []
        for m in range(microbatches):
            order.append(Action("I", rank, m))
            waiting.append(Action("W", rank, m))
            order.append(
                Action("F", rank, m + ahead) if m + ahead < microbatches else waiting.pop(0)
            )
        orders.append(order + waiting)
    return Schedule.make(looped(ranks), orders, "weights-when-idle")


def run_a_step() -> None:
    """Two linear layers per rank, two steps; any module is a stage."""
    import torch
    from torch import nn

    from core import parallel_state
    from core.pipeline import Pipeline

    with parallel_state.launch("cpu") as device:
        ranks = int(os.environ["WORLD_SIZE"])
        ps = parallel_state.ParallelState.build(
            parallel_state.ParallelConfig(pipeline=ranks), device=device
        )
        stage = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        pipeline = Pipeline(stage, ps=ps, schedule=weights_when_idle, num_microbatches=8)
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
        for _ in range(2):  # the first step also warms torch up
            result = pipeline.step(
                {"input": x}, lambda y, part: ((y - part["input"]).square().sum(), y.numel())
            )
        timeline = pipeline.timeline()
        if ps.rank == 0:
            print(f"mean loss {float(result.loss):.4f}; what happened:\n{draw_text(timeline)}")


if __name__ == "__main__":
    played = play(weights_when_idle(4, 8))
    if int(os.environ.get("RANK", 0)) == 0:
        print(
            f"bubble {played.bubble:.1%}, peak memory {played.peaks}\n{draw_text(played.timeline)}"
        )
    if "RANK" in os.environ:
        run_a_step()
