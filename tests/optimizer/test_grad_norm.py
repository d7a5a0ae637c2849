"""The global norm counts every true element once, on every layout."""

import pytest
import torch
from torch import nn

from core.optimizer.step.grad_norm import sum_of_squares
from core.parallel_state import Layout, ParallelState
from core.parallel_state.layout import set_layout, true_part
from tests.states import state
from tests.twins.grad_norm import squared_grad_norm

LAYOUTS = {
    "rows": Layout((8, 3), {"tp": 0}),
    "columns": Layout((3, 8), {"tp": 1}),
    "norm": Layout((5,), partial={"tp"}),
    "padded": Layout((5, 3), {"tp": 0}, padding={0: 11}),  # with 4 tensor ranks the last two hold padding only
    "replicated": None,
    "tied": Layout((4, 2), partial={"embedding"}),
    "expert": Layout((4, 3), {"ep": 0}),
}


def whole(name, pp):
    """The gradient of the whole parameter `name`; stages hold different ones, except the tied."""
    shape = LAYOUTS[name].shape if LAYOUTS[name] else (2, 2)
    stage = 0 if name == "tied" else pp
    seed = 10 * list(LAYOUTS).index(name) + stage
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def norm_on(**sizes):
    ps = state(**sizes)
    parameters = []
    for name, layout in LAYOUTS.items():
        full = whole(name, ps.coordinate["pp"])
        layout = layout or Layout(full.shape)
        p = nn.Parameter(torch.zeros(layout.local_shape(ps.sizes)))
        if name != "replicated":
            set_layout(p, layout)
        p.main_grad = torch.full_like(p, 1e3, requires_grad=False)  # padding that must not count
        true_part(p.main_grad, layout, ps.coordinate, ps.sizes).copy_(full[layout.box(ps.coordinate, ps.sizes)])
        parameters.append(p)
    calls = 0 if ps.world is None else ps.world.traffic.calls
    total = squared_grad_norm(parameters, ps)
    assert ps.world is None or ps.world.traffic.calls == calls + 1
    assert total.dtype == torch.float64 and total.shape == ()
    return total.item()


@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        (1, {}),
        (2, {"tp": 2}),
        (2, {}),
        (4, {"tp": 2}),
        (4, {"tp": 4}),
        (4, {"cp": 2}),
        (4, {"pp": 2}),
        (4, {"pp": 2, "tp": 2}),
        (4, {"expert": 2}),
        (4, {"tp": 2, "expert": 4}),
    ],
    ids=str,
)
def test_norm_is_that_of_one_process(ranks, world, sizes):
    stages = range(sizes.get("pp", 1))
    parts = {(name, 0 if name == "tied" else pp) for name in LAYOUTS for pp in stages}
    want = sum(whole(name, pp).square().sum().item() for name, pp in parts)
    got = ranks(norm_on, world=world, **sizes)
    assert len(set(got)) == 1, "the same bits everywhere"
    assert got[0] == pytest.approx(want, rel=1e-13)


def test_float32_gradients_are_summed_exactly_enough():
    """torch's own norm is 1e-5 off here; so are not the rows."""
    g = torch.rand(1_000_003, generator=torch.Generator().manual_seed(0))
    want = g.double().square().sum().item()
    p = nn.Parameter(g)
    p.main_grad = g
    assert squared_grad_norm([p], ParallelState.single("cpu")).item() == pytest.approx(want, rel=1e-7)


def test_16_bit_gradients_are_summed_in_float32():
    p = nn.Parameter(torch.zeros(3000, dtype=torch.bfloat16))
    p.main_grad = torch.full_like(p, 3.0, requires_grad=False)
    assert squared_grad_norm([p], ParallelState.single("cpu")).item() == pytest.approx(27_000, rel=1e-6)


@pytest.mark.parametrize("kind", ["cpu", "accelerator"])
def test_both_ways_of_summing(kind):
    device = torch.device("cpu") if kind == "cpu" else torch.device("meta")  # any other kind takes the other way
    grads = [torch.full((3, 700), 2.0), torch.full((5,), 3.0, dtype=torch.float64), torch.full((1024,), 1.0)]
    assert sum_of_squares(grads, device).item() == pytest.approx(4 * 2100 + 9 * 5 + 1024, rel=1e-6)
    assert sum_of_squares(grads, device).dtype == torch.float64


def test_a_rank_that_owns_nothing_contributes_zero():
    assert squared_grad_norm([], ParallelState.single("cpu")).item() == 0.0
