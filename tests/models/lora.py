"""A small GPT with adapters over any layout, and what one process and the plain twin make of it."""

from functools import cache

from core.autograd import apply_recompute
from core.data_parallel import DataParallel
from core.models.gpt import GPTModel, gpt_stages
from core.models.lora import LoraConfig, apply_lora
from core.parallel_state import Init, ParallelState
from core.parallel_state.initial import fill
from core.pipeline import Pipeline, SingleStage
from core.pipeline.schedule import schedules as named
from core.training import next_token_loss
from tests.parity.pipelines import SEED, VOCAB, S, batch, config, spec
from tests.twins.low_rank import reference

LAYERS, M = 4, 4
LORA = LoraConfig(rank=3, alpha=6.0)


def set_b(stages, ps):
    """B as a trained one: zero would make every gradient of A zero."""
    for stage in stages.values():
        for name, p in stage.named_parameters():
            if name.endswith("lora_B"):
                fill(p, name, Init(std=0.3), seed=11, coordinate=ps.coordinate, sizes=ps.sizes)


def adapted(ps, placement=(0,), lora=LORA, style="llama", **more):
    """stage -> GPTModel of this rank, with adapters."""
    facts = {"parallel": ps, "placement": placement, "seed": 5}
    stages = gpt_stages(config(0.0, style, num_layers=LAYERS, **more), spec(style), VOCAB, S, **facts)
    apply_lora(stages, lora)
    set_b(stages, ps)
    return stages


@cache
def twin(rows, style="llama"):
    """(gradients by name, loss) of the plain twin over the first rows of the batch."""
    ps = ParallelState.single("cpu")
    model = adapted(ps, style=style)[0]
    names = dict(model.named_parameters())
    factors = {}
    for name in names:
        if name.endswith("adapter.lora_A"):
            place = name.removesuffix("adapter.lora_A")
            factors[f"{place}weight"] = names[name], names[f"{place}adapter.lora_B"]
    made = {"parallel": ps, "seed": 5}
    plain = GPTModel(config(0.0, style, num_layers=LAYERS), spec(style), VOCAB, S, **made)
    return reference(plain, factors, LORA.scale, batch(rows), rows)


def executor_of(stages, ps, schedule, policy, shard=None):
    more = {"ps": ps, "num_microbatches": M, "seed": SEED}
    if shard is not None:
        more["grad_sync"] = shard
    if schedule != "none":
        return Pipeline(stages, schedule=schedule, recompute=policy, **more)
    (model,) = stages.values()
    apply_recompute(model, policy, stage=model.stage)
    return SingleStage(model, **more)


def placement_of(schedule):
    return (0,) if schedule == "none" else named.placement(schedule, 2)


def sharded_step(ps, schedule, policy, zero, lora=LORA, style="llama"):
    """(DataParallel after one step's gradients, the step's result) on this rank's rows of the batch."""
    stages = adapted(ps, placement_of(schedule), lora, style)
    shard = DataParallel(stages, ps, zero_stage=zero, bucket_size=300)
    executor = executor_of(stages, ps, schedule, policy, shard)
    mine = {k: v[ps.index("dp") * M :][:M] for k, v in batch(M * ps.size("dp")).items()}
    return shard, executor.step(mine, next_token_loss)
