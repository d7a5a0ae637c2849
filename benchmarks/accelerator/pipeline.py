"""What schedules cost on one rank: a split backward, recomputation, four stages under zb-v, against one stage."""

import torch

from benchmarks.accelerator.bench import GPT_1B4, TINY, Bench, batch, gpt
from core.autograd import apply_recompute
from core.data_parallel import DataParallel
from core.models.gpt import gpt_stages, llama_spec
from core.pipeline import Pipeline, SingleStage
from core.pipeline.schedule import schedules
from core.training import next_token_loss

MICROBATCHES = 4


def step_of(b, executor, size):
    rows = batch(size, b.device, rows=MICROBATCHES * (1 if b.dry else size.rows))
    sync = executor.grad_sync

    def step():
        sync.zero_grad()
        executor.step(rows, next_token_loss)

    return step


def whole(b, size, recompute="none", *, pipeline=False):
    """One model on one rank: SingleStage, or a pipeline of one stage, whose backward is split."""
    ps = b.state()
    model = gpt(size, torch.bfloat16, ps)
    made = {
        "ps": ps,
        "num_microbatches": MICROBATCHES,
        "grad_sync": DataParallel(model, ps, zero_stage=0),
    }
    if pipeline:
        return step_of(b, Pipeline([model], schedule="1f1b", recompute=recompute, **made), size)
    apply_recompute(model, recompute, stage=model.stage)
    return step_of(b, SingleStage(model, **made), size)


def four_stages(b, size):
    """Four stages on one rank, in the order of zb-v with one rank's view of it."""
    ps = b.state()
    config = gpt(size, torch.bfloat16, ps).config
    schedule = schedules.make("zb-v", 1, MICROBATCHES)
    placement = schedule.placement
    stages = gpt_stages(
        config, llama_spec(), size.vocab, size.sequence, placement=placement, parallel=ps
    )
    shard = DataParallel(stages, ps, zero_stage=0)
    pipe = Pipeline(
        stages, ps=ps, schedule=schedule, num_microbatches=MICROBATCHES, grad_sync=shard
    )
    return step_of(b, pipe, size)


def run(b: Bench):
    """Ratios of medians to SingleStage's."""
    size = TINY if b.dry else GPT_1B4
    base = {}

    def plain(b):
        base["s"] = b.seconds(whole(b, size), rounds=2 if b.dry else 8)
        return f"{base['s'] * 1e3:.1f} ms"

    b.line("pipeline: SingleStage", plain)
    cases = {
        "split_over_one_backward": lambda b: whole(b, size, pipeline=True),
        "recompute_layer_over_none": lambda b: whole(b, size, "layer"),
        "recompute_selective_over_none": lambda b: whole(b, size, "selective"),
        "zb_v_on_one_rank_over_one_stage": lambda b: four_stages(b, size),
    }
    for name, build in cases.items():

        def compare(b, name=name, build=build):
            b.figures[name] = b.seconds(build(b), rounds=2 if b.dry else 8) / base["s"]
            return f"{b.figures[name]:.3f}"

        b.line(f"pipeline: {name}", compare)
