"""Lion beside its plain twin: the same numbers, skipped steps, every cut, states and offload."""

import pytest
import torch

from core.models.gpt import GPTModel
from core.optimizer import Offload, OptimizerConfig, ShardedLion, build_optimizer
from core.optimizer.state import kernels
from core.parallel_state import ParallelState
from core.pipeline import SingleStage
from core.training import next_token_loss
from tests.optimizer.fake_shard import FakeShard
from tests.optimizer.test_sharded import Net, equal, give
from tests.parity.pipelines import SEED, VOCAB, S, batch
from tests.parity.test_muon import On, facts_of, train
from tests.parity.whole import assert_same
from tests.twins.lion import Lion
from tests.twins.per_parameter import PerParameterGradSync

CONFIG = OptimizerConfig(optimizer="lion", lr=0.01, weight_decay=0.2, clip_grad=0.5, lion_beta1=0.8)


def twin_of(model):
    decayed = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.2}, {"params": vectors}]
    return Lion(groups, lr=0.01, betas=(0.8, 0.99))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_steps_are_those_of_the_plain_twin(dtype, monkeypatch):
    monkeypatch.setattr(kernels, "LION_CHUNK", 640)
    model, twin_model = Net(dtype), Net(dtype)
    model.wide.bias, twin_model.wide.bias = (torch.nn.Parameter(m.wide.bias[0].detach()) for m in (model, twin_model))
    ours, twin = build_optimizer(FakeShard(model), CONFIG), twin_of(twin_model)
    assert isinstance(ours, ShardedLion)
    for step in range(5):
        skipped = step == 2
        give(model, step, torch.nan if skipped else 1.0)
        assert ours.step(num_tokens=1).skipped == skipped
        ours.zero_grad()
        if not skipped:
            for p in twin_model.parameters():
                p.main_grad = torch.zeros_like(p)
            give(twin_model, step)
            for p in twin_model.parameters():
                p.grad = p.main_grad
            torch.nn.utils.clip_grad_norm_(twin_model.parameters(), 0.5)
            twin.step()
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for p, q in zip(model.parameters(), twin_model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
        name = next(n for n, other in model.named_parameters() if other is p)
        found = ours.states()[name]["exp_avg"].tensor
        torch.testing.assert_close(found, twin.state[q]["exp_avg"], rtol=tolerance, atol=1e-7)
        assert set(ours.states()[name]) == {"main", "exp_avg"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_cut_and_offload_gives_the_same_bits(dtype):
    def made(offload=None, **cut):
        model = Net(dtype, ragged=True)
        return model, build_optimizer(FakeShard(model, **cut), CONFIG, offload=offload)

    (whole, one), offloaded = made(), made(Offload(fraction=0.5))
    cut = [made(zero_stage=1, ranks=3, rank=rank) for rank in range(3)]
    for step in range(3):
        for model, optimizer in [(whole, one), offloaded, *cut]:
            give(model, step)
            optimizer.step(num_tokens=1e3)  # so small that nobody clips: a part does not know the whole norm
            optimizer.zero_grad()
    equal(one, offloaded[1])
    for _, optimizer in cut:
        for name, kinds in optimizer.states().items():
            for kind, part in kinds.items():
                want = one.states()[name][kind].tensor.reshape(-1)[slice(*part.interval)]
                assert torch.equal(part.tensor, want), (name, kind)


def test_a_spread_model_is_trained_as_in_one_process(ranks):
    (want,) = ranks(train, On(), 3, config=CONFIG, world=1)
    for on in (On(1), On(3), On(tp=2, sp=True)):
        for found in ranks(train, on, 3, config=CONFIG, world=2):
            assert_same(found, want)
    ranks(twins_weights, world=1, want=want)


def twins_weights(want):
    """In one process the plain twin's."""
    ps = ParallelState.single("cpu")
    model = GPTModel(*facts_of("llama"), VOCAB, S, parallel=ps, seed=SEED)
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
    found = {name: p.detach()[tuple(map(slice, want[name].shape))] for name, p in model.named_parameters()}
    assert_same(found, want)
