"""A run goes on under another layout of ranks as if nothing had happened: its losses are the unbroken one's."""

from dataclasses import dataclass

import pytest
import torch

from core import dist_checkpointing
from core.dist_checkpointing import sharded_state_dict
from core.models.gpt import gpt_stages, llama_spec
from core.optimizer import OptimizerConfig
from core.pipeline import Pipeline, SingleStage
from core.pipeline.schedule import schedules
from core.training import next_token_loss
from core.transformer import TransformerConfig
from tests.marks import PRODUCT
from tests.states import state
from tests.twins.adamw import AdamW
from tests.twins.per_parameter import PerParameterGradSync

VOCABULARY, S, BATCH, STEPS, SAVED = 67, 8, 8, 6, 3


@dataclass(frozen=True)
class On:
    """A layout and what runs on it."""

    world: int
    tp: int = 1
    pp: int = 1
    schedule: str = "1f1b"
    recompute: str = "none"
    sp: bool = False


def batch(step):
    tokens = torch.randint(VOCABULARY, (BATCH, S + 1), generator=torch.Generator().manual_seed(step))
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def train(on, directory, start):
    """Losses of steps `start` to the end on this layout; a checkpoint after `SAVED` updates when it starts at 0."""
    ps = state(tp=on.tp, pp=on.pp, sp=on.sp)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=16,
        num_attention_heads=8,
        num_query_groups=4,
        ffn_hidden_size=24,
        normalization="RMSNorm",
        activation_func="silu",
        gated_linear_unit=True,
        params_dtype=torch.float64,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    placement = schedules.placement(on.schedule, on.pp) if on.pp > 1 else (0,)
    stages = gpt_stages(
        config,
        llama_spec(),
        VOCABULARY,
        S,
        placement=placement,
        share_embeddings_and_output_weights=True,
        parallel=ps,
        seed=1 + start,  # a resumed run starts from other weights, unless they are loaded
    )
    sync = PerParameterGradSync(stages, ps)
    schedule = OptimizerConfig(lr=1e-2, lr_schedule="cosine", lr_warmup_steps=2, lr_decay_steps=STEPS)
    optimizer = AdamW(stages, ps, schedule, grad_sync=sync)
    count = BATCH // ps.size("dp")
    if on.pp == 1:
        executor = SingleStage(stages[0], ps=ps, num_microbatches=count, grad_sync=sync)
    else:
        facts = {"schedule": on.schedule, "recompute": on.recompute, "num_microbatches": count}
        executor = Pipeline(stages, ps=ps, grad_sync=sync, **facts)

    def sharded(step):
        model = sharded_state_dict(stages, ps)
        return {"model": model, "optimizer": optimizer.sharded_state_dict(), "step": step}

    if start:
        loaded = dist_checkpointing.load(sharded(0), directory, ps=ps)
        optimizer.load_state_dict(loaded["optimizer"])
        assert loaded["step"] == optimizer.step_count == start
    losses, rows = [], slice(ps.index("dp") * count, (ps.index("dp") + 1) * count)
    for step in range(start, STEPS):
        optimizer.zero_grad()
        result = executor.step({name: t[rows] for name, t in batch(step).items()}, next_token_loss)
        optimizer.step(num_tokens=result.num_tokens)
        losses.append(float(result.loss_sum) / float(result.num_tokens))
        if step + 1 == SAVED and not start:
            dist_checkpointing.save(sharded(SAVED), directory, ps=ps)
    return losses


LAYOUTS = [
    On(4, tp=4),
    On(4),
    On(4, pp=4),
    On(1),
    On(4, tp=2, pp=2, schedule="zb-v", recompute="stage", sp=True),
]


@pytest.mark.parametrize(
    ("saved", "layouts"),
    [
        (LAYOUTS[-1], LAYOUTS[:2]),
        pytest.param(LAYOUTS[-1], LAYOUTS[2:], marks=pytest.mark.full),
        pytest.param(LAYOUTS[2], LAYOUTS, marks=PRODUCT),
    ],
)
def test_the_curve_goes_on_under_every_layout(ranks, tmp_path, saved, layouts):
    unbroken = ranks(train, saved, str(tmp_path / "c"), 0, world=saved.world)
    for on in layouts:
        for losses in ranks(train, on, str(tmp_path / "c"), SAVED, world=on.world):
            assert losses == pytest.approx(unbroken[0][SAVED:], rel=1e-11), on
    assert unbroken[0][-1] != pytest.approx(unbroken[0][SAVED], rel=1e-3), "something was learnt"
