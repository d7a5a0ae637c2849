"""Gradients gather in main_grad and are summed over the replicas, once."""

import pytest
import torch
from torch import nn

from core.autograd import StageContext, WeightGradBag, deferred_linear
from core.data_parallel import check_replicas
from core.parallel_state import Layout, ParallelState
from core.parallel_state.layout import set_layout
from tests.states import state
from tests.twins.per_parameter import PerParameterGradSync

ALONE = ParallelState.single("cpu")


def net(dtype=torch.float64):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6, dtype=dtype), nn.Tanh(), nn.Linear(6, 3, dtype=dtype))


class Branches(nn.Module):
    """One of two branches is taken; `frozen` never learns."""

    def __init__(self):
        super().__init__()
        self.taken, self.left, self.frozen = (nn.Linear(3, 3) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.frozen(self.taken(x))


def on_one_of(dp_batch, mask):
    """Every rank: its own rows of the batch, summed losses of valid rows; gradients after the sum."""
    ps = state()
    model = net()
    sync = PerParameterGradSync(model, ps)
    x, valid = (t.chunk(ps.size("dp"))[ps.index("dp")] for t in (dp_batch, mask))
    (model(x).square().sum(-1) * valid).sum().backward()
    sync.finish()
    return [p.main_grad for p in model.parameters()]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_summed_gradients_are_those_of_one_process(ranks, world):
    torch.manual_seed(3)
    batch = torch.randn(8, 4, dtype=torch.float64)
    mask = torch.tensor([1, 0, 1, 1, 0, 1, 0, 0], dtype=torch.float64)  # with 4 ranks the last has nothing
    model = net()
    (model(batch).square().sum(-1) * mask).sum().backward()
    for got in ranks(on_one_of, world=world, dp_batch=batch, mask=mask):
        for g, p in zip(got, model.parameters(), strict=True):
            assert (g - p.grad).abs().max() <= 1e-12 * p.grad.abs().max()


def test_grad_is_moved_into_main_grad_and_main_grad_stays_where_it_is():
    model = net()
    sync = PerParameterGradSync(model, ALONE)
    places = [p.main_grad.data_ptr() for p in model.parameters()]
    x = torch.randn(5, 4, dtype=torch.float64)
    twin = net()
    for _ in range(2):
        model(x).sum().backward()
        twin(x).sum().backward()
        assert all(p.grad is None for p in model.parameters())
    sync.finish()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.main_grad, q.grad)
    sync.zero_grad()
    assert [p.main_grad.data_ptr() for p in model.parameters()] == places
    assert not any(p.main_grad.any() for p in model.parameters())


@pytest.mark.parametrize(
    ("dtype", "grad_dtype", "expected"),
    [
        (torch.bfloat16, None, torch.float32),
        (torch.float16, None, torch.float32),
        (torch.float32, None, torch.float32),
        (torch.float64, None, torch.float64),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float64, torch.float64),
    ],
)
def test_dtype_of_main_grad(dtype, grad_dtype, expected):
    model = net(dtype)
    PerParameterGradSync(model, ALONE, grad_dtype=grad_dtype)
    model(torch.ones(2, 4, dtype=dtype)).sum().backward()
    assert all(p.main_grad.dtype == expected and p.main_grad.any() for p in model.parameters())


@pytest.mark.parametrize("deferred", [True, False], ids=["in a bag", "at once"])
def test_an_operation_that_adds_to_main_grad_itself_counts_once(deferred):
    model = nn.Linear(4, 3, dtype=torch.float64)
    sync = PerParameterGradSync(model, ALONE)
    bag = WeightGradBag() if deferred else None
    x = torch.randn(5, 4, dtype=torch.float64)
    y = deferred_linear(x, model.weight, model.bias, stage=StageContext(bag=bag))
    y.square().sum().backward()  # autograd gets None for the weight: the hook fires without a gradient
    if bag is not None:
        assert not model.weight.main_grad.any()
        sync.ready(bag.run_one())
    sync.finish()
    torch.testing.assert_close(model.weight.main_grad, 2 * y.detach().T @ x)
    torch.testing.assert_close(model.bias.main_grad, 2 * y.detach().sum(0))
    assert model.weight.grad is None and sync.unused() == []


def test_unused_parameters_are_named_and_frozen_ones_left_out():
    model = Branches()
    sync = PerParameterGradSync(model, ALONE)
    assert not hasattr(model.frozen.weight, "main_grad")
    model.left(torch.ones(1, 3)).sum().backward()
    sync.begin_step({})  # what came before a step does not count for it
    model(torch.ones(2, 3)).sum().backward()
    sync.finish()
    assert sync.unused() == ["left.weight", "left.bias"]
    assert model.frozen.weight.grad is None
    sync.zero_grad()
    assert sync.unused() == ["left.weight", "left.bias"], "asked after the optimizer's step"
    sync.finish()
    assert sync.unused() == ["taken.weight", "taken.bias", "left.weight", "left.bias"]


def test_summing_twice_is_refused():
    model = net()
    sync = PerParameterGradSync(model, ALONE)
    sync.finish()
    with pytest.raises(ValueError, match=r"after 1 zero_grad\(\) would sum again"):
        sync.finish()
    with pytest.raises(ValueError, match="would sum again"):
        sync.begin_step({})
    sync.zero_grad()
    sync.begin_step({})
    sync.finish()


def test_one_owner_of_main_grad_at_a_time():
    model = net()
    sync = PerParameterGradSync(model, ALONE)
    with pytest.raises(ValueError, match=r"0\.weight and 3 more of 4 parameters already have a main_grad"):
        PerParameterGradSync(model, ALONE)
    sync.remove()
    model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    assert all(p.grad is not None and not hasattr(p, "main_grad") for p in model.parameters())
    PerParameterGradSync(model, ALONE)


def partial_and_split():
    ps = state(tp=2)
    model = nn.ParameterDict(
        {name: nn.Parameter(torch.zeros(4, 3)) for name in ("split", "partial", "same", "turned")}
    )
    set_layout(model["split"], Layout((8, 3), {"tp": 0}))
    set_layout(model["partial"], Layout((4, 3), partial={"tp"}))
    model["turned"] = nn.Parameter(torch.zeros(3, 4).t())  # rows of it are not contiguous
    sync = PerParameterGradSync(model, ps)
    for p in model.values():
        p.main_grad.fill_(10.0**ps.rank)
    sync.finish()
    return {name: p.main_grad.unique().tolist() for name, p in model.items()}


def test_groups_come_from_the_layout(ranks):
    data = {"split": [101.0], "partial": [1111.0], "same": [101.0], "turned": [101.0]}
    other = {"split": [1010.0], "partial": [1111.0], "same": [1010.0], "turned": [1010.0]}
    assert ranks(partial_and_split, world=4) == [data, other, data, other]


def tied_over_stages():
    """First and last stage name and order their parameters differently; only the tied one is summed."""
    ps = state(pp=2)
    tied, own = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    set_layout(tied, Layout((2,), partial={"embedding"}))
    model = nn.ParameterDict({"a": tied, "b": own} if ps.is_first_stage else {"a": own, "b": tied})
    sync = PerParameterGradSync(model, ps)
    tied.main_grad.fill_(10.0**ps.rank)
    own.main_grad.fill_(10.0**ps.rank)
    sync.finish()
    return tied.main_grad[0].item(), own.main_grad[0].item()


def test_a_tied_parameter_is_summed_over_the_ends(ranks):
    assert ranks(tied_over_stages, world=4) == [(1111.0, 11.0)] * 2 + [(1111.0, 1100.0)] * 2


def compare(change):
    ps = state(tp=2)
    model = net()
    set_layout(model[0].weight, Layout((12, 4), {"tp": 0}))
    with torch.no_grad():
        model[0].weight[0] += ps.index("tp")  # other parts of a split parameter may differ
        model[2].bias[1] += change and ps.rank == 3
    check_replicas(model, ps)


def test_check_replicas_names_the_parameter_on_every_rank(ranks):
    ranks(compare, world=4, change=False)
    with pytest.raises(AssertionError) as failure:
        ranks(compare, world=4, change=True)
    told = [line for line in str(failure.value).split("\n") if line.startswith("ValueError")]
    assert len(told) == 4 and all(
        "2.bias (part [(0, 3)]) on rank 3 is not what most hold, as rank 0 does" in line for line in told
    )
