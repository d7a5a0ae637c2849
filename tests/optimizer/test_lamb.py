"""LAMB beside its plain twin: the same numbers, and whole parameters' norms on every layout."""

from dataclasses import replace

import pytest
import torch

from core.models.gpt import GPTModel
from core.optimizer import Offload, OptimizerConfig, ShardedLamb, build_optimizer
from core.parallel_state import ParallelState
from core.pipeline import SingleStage
from core.training import next_token_loss
from tests.optimizer.fake_shard import FakeShard
from tests.optimizer.test_sharded import Net, give
from tests.parity.pipelines import SEED, VOCAB, S, batch
from tests.parity.test_muon import On, facts_of, train
from tests.parity.whole import assert_same
from tests.twins.lamb import Lamb
from tests.twins.per_parameter import PerParameterGradSync

CONFIG = OptimizerConfig(optimizer="lamb", lr=0.02, weight_decay=0.2, clip_grad=0.5, adam_beta2=0.98, adam_eps=1e-5)


def twin_of(model, decay=0.2):
    named = dict(model.named_parameters())
    vectors = {n: p for n, p in named.items() if p.dim() <= 1 or n.endswith("bias")}
    groups = [
        {"params": [p for n, p in named.items() if n not in vectors], "weight_decay": decay},
        {"params": list(vectors.values()), "adapt": False},
    ]
    return Lamb(groups, lr=0.02, betas=(0.9, 0.98), eps=1e-5)


@pytest.mark.parametrize("decay", [0.2, 0.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_steps_are_those_of_the_plain_twin(dtype, decay):
    """A first step that is skipped among them, a parameter of zeros, and one that misses an update."""
    model, twin_model = Net(dtype), Net(dtype)
    with torch.no_grad():
        model.second.zero_()
        twin_model.second.zero_()
    shard = FakeShard(model)
    ours, twin = build_optimizer(shard, replace(CONFIG, weight_decay=decay)), twin_of(twin_model, decay)
    assert isinstance(ours, ShardedLamb)
    for p in twin_model.parameters():
        p.main_grad = torch.zeros_like(p)
    for step in range(5):
        skipped = step == 0
        shard.missing = ["first"] if step == 2 else []
        give(model, step, torch.nan if skipped else 1.0)
        give(twin_model, step)
        if step == 2:
            model.first.main_grad.zero_()
        assert ours.step(num_tokens=1).skipped == skipped
        ours.zero_grad()
        if not skipped:
            for p in twin_model.parameters():
                p.grad = p.main_grad.clone()
            if step == 2:
                twin_model.first.grad = None
            torch.nn.utils.clip_grad_norm_(twin_model.parameters(), 0.5)
            twin.step()
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for (name, p), q in zip(model.named_parameters(), twin_model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance, msg=name)
        for kind in ("exp_avg", "exp_avg_sq"):
            found = ours.states()[name][kind].tensor
            torch.testing.assert_close(found, twin.state[q][kind], rtol=tolerance, atol=1e-7)


def twins_weights(style):
    """In one process, of the plain twin."""
    ps = ParallelState.single("cpu")
    model = GPTModel(*facts_of(style), VOCAB, S, parallel=ps, seed=SEED)
    twin, sync = twin_of(model), PerParameterGradSync(model, ps)
    executor = SingleStage(model, ps=ps, num_microbatches=4, grad_sync=sync, seed=SEED)
    for _ in range(3):
        sync.zero_grad()
        result = executor.step(batch(4), next_token_loss)
        for p in model.parameters():
            p.grad = p.main_grad / result.num_tokens
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        twin.step()
        twin.zero_grad()
    true = {name: p.parallel_layout.shape for name, p in model.named_parameters()}
    return {name: p.detach()[tuple(map(slice, true[name]))] for name, p in model.named_parameters()}


LAYOUTS = {
    "llama": [On(1), On(3, 4, tp=2, sp=True)],
    "gpt2": [On(0, tp=2, sp=True), On(2, pp=2, schedule="zb-v"), On(1, 4, replicate=2)],
    "moe": [On(1, expert=2, style="moe"), On(3, 4, tp=2, expert=2, style="moe")],
}


@pytest.mark.parametrize(
    "style", ["llama", *(pytest.param(style, marks=pytest.mark.full) for style in ("gpt2", "moe"))]
)
def test_a_spread_model_is_trained_as_by_the_twin_in_one_process(ranks, style):
    (want,) = ranks(twins_weights, style, world=1)
    for on in LAYOUTS[style]:
        for found in ranks(train, On(**{**vars(on), "style": style}), 3, config=CONFIG, world=on.world):
            assert_same(found, want)


def test_what_lamb_cannot_do_is_refused():
    with pytest.raises(ValueError, match=r"lamb takes parameters as a whole .* fraction 0.5 of them on the host"):
        build_optimizer(FakeShard(Net()), CONFIG, offload=Offload(fraction=0.5))
    with pytest.raises(ValueError, match="lamb updates main parameters, but main_params=False"):
        build_optimizer(FakeShard(Net()), OptimizerConfig(optimizer="lamb", main_params=False))
