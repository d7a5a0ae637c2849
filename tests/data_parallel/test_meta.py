"""A model built on meta is filled bucket by bucket: the values of an eager one, and never a whole copy on a rank."""

import pytest
import torch
from torch import nn

from core.data_parallel import DataParallel
from core.data_parallel.weights.weights import without_memory
from core.optimizer import OptimizerConfig, ShardedAdamW
from core.parallel_state import ParallelState
from core.testing.live import LiveBytes
from tests.models.gpt import batch, gpt
from tests.parity.shards import whole_weights
from tests.parity.whole import whole_parameters
from tests.states import state


def build(layers=16, size=32):
    torch.manual_seed(11)
    embed = nn.Embedding(8, size)
    body = [nn.Sequential(nn.Linear(size, size), nn.LayerNorm(size)) for _ in range(layers)]
    return nn.ModuleDict({"embed": embed, "layers": nn.ModuleList(body), "norm": nn.BatchNorm1d(size)})


def same_values(zero):
    eager = build()
    with torch.device("meta"):
        model = build()
    torch.manual_seed(11)
    shard = DataParallel(model, state(), zero_stage=zero)
    found = whole_weights(shard)
    assert all(torch.equal(found[name], p) for name, p in eager.named_parameters())
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), eager.buffers(), strict=True))


@pytest.mark.parametrize("zero", [0, 1, pytest.param(2, marks=pytest.mark.full), 3])
def test_a_model_on_meta_gets_the_values_of_an_eager_one(ranks, zero):
    ranks(same_values, zero, world=2)


def peak():
    with torch.device("meta"):
        model = build(60, 96)
    with LiveBytes() as probe:
        shard = DataParallel(model, state(), zero_stage=3)
    kept = sum(t.untyped_storage().nbytes() for b in shard.buffers for t in (b.weights, b.gradients))
    return probe.peak / kept


def test_building_holds_what_is_kept_and_a_layer(ranks):
    for ratio in ranks(peak, world=2):
        assert ratio <= 1.05, ratio


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))


def test_what_nobody_can_fill_is_refused():
    ps = ParallelState.single("cpu")
    with torch.device("meta"):
        bare, with_buffer = Bare(), nn.Module()
        with_buffer.register_buffer("table", torch.ones(3))
    with pytest.raises(ValueError, match=r"1 buffers are on meta and their modules have no reset_parameters\(\)"):
        DataParallel(with_buffer, ps)
    with pytest.raises(ValueError, match=r"Bare holds 1 parameters on meta .* give DataParallel init="):
        DataParallel(bare, ps)
    with torch.device("meta"):
        bare = Bare()
    DataParallel(bare, ps, init=lambda module: nn.init.constant_(module.weight, 4.0))
    assert (bare.weight == 4).all()


def a_gpt(zero, tp, facts=None):
    """Weights after two steps, of a model built on meta and of an eager one."""
    ps, found = state(tp=tp), []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = gpt("llama", parallel=ps, seed=7, facts=facts or {})
        shard = DataParallel(model, ps, zero_stage=zero)
        optimizer = ShardedAdamW(shard, OptimizerConfig(lr=1e-2))
        for step in range(2):
            tokens, labels = batch(step)
            model(tokens, labels=labels).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        shard.remove()
        found.append(whole_parameters(model, ps))
    assert all(torch.equal(found[0][name], p) for name, p in found[1].items())


@pytest.mark.parametrize("zero, tp, world", [(3, 2, 4), (1, 1, 2), pytest.param(3, 2, 2, marks=pytest.mark.full)])
def test_a_gpt_on_meta_is_the_eager_one(ranks, zero, tp, world):
    ranks(a_gpt, zero, tp, world=world)


def test_what_only_has_a_shape():
    element = torch.zeros(1, 1, 1)
    assert without_memory(element.expand(2, 5, 4)) and without_memory(element.expand(1, 5, 1))
    assert not any(without_memory(torch.zeros(shape)) for shape in ((1, 5, 4), (5, 1), (1,), (), (0, 3)))


# one group of queries on a rank: axes of size 1 in what stands for its weight
@pytest.mark.parametrize("zero, tp, world", [(0, 1, 2), (3, 2, 4)])
def test_one_group_of_queries_on_a_rank(ranks, zero, tp, world):
    ranks(a_gpt, zero, tp, {"num_query_groups": tp, "num_layers": 2}, world=world)


@pytest.mark.parametrize("init", [None, lambda module: [nn.init.ones_(p) for p in module.parameters(recurse=False)]])
def test_buffers_beside_parameters_begin_as_their_module_says(init):
    """A router's bias and counts begin at 0, whoever fills its weight; nothing is left of what memory held before."""
    facts = {"num_moe_experts": 4, "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    facts |= {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1}
    ps = ParallelState.single("cpu")
    with torch.device("meta"):
        model = gpt("llama", parallel=ps, seed=7, facts=facts)
    with pytest.MonkeyPatch.context() as patch:
        # memory is rarely other than 0 where it is new
        patch.setattr(torch, "empty", lambda *shape, _true=torch.empty, **how: _true(*shape, **how).fill_(7))
        DataParallel(model, ps, init=init)
    router = model.decoder.layers[0].mlp.router
    for buffer in (router.expert_bias, router.rows_of_last_step):
        assert buffer.device.type == "cpu" and buffer.dtype == torch.float32 and not buffer.any()
    assert (router.weight == 1).all() == (init is not None)
