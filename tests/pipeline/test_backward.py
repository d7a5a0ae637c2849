"""I and W on their own: what they take, what they return, what they leave, what they cost."""

import gc
import weakref
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge

from benchmarks.pipeline_backward import GeluLayer, Ours, Stage, Torch, extra_forwards, held
from core.autograd import StageContext, WeightGradBag, deferred_linear, reroute
from core.pipeline import stage_backward, stage_backward_input, stage_backward_weight
from core.pipeline.run import stage as stage_module
from core.testing import LiveBytes
from tests.flops import matmul_flops
from tests.pipeline import tiny


def stage_of(layers=4):
    torch.manual_seed(0)
    module, stage = nn.Sequential(*[GeluLayer(16) for _ in range(layers)]), StageContext()
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    return module, stage


def begin(stage, **options):
    bag = WeightGradBag(**options)
    stage.begin(seed=0, step=0, microbatch=0, bag=bag)
    return bag


def test_only_linear_inputs_and_output_gradients_are_held_between_i_and_w():
    module, stage = stage_of()
    reroute(module, stage)
    bag = begin(stage)
    x, gy = torch.randn(2, 8, 16, requires_grad=True), torch.randn(2, 8, 16)
    unit = x.numel() * x.element_size()
    with LiveBytes(x, gy, *module.parameters(), *(p.grad for p in module.parameters())) as bytes_:
        y = module(x)
        assert bytes_.live > 64 * unit, "the probe itself sees nothing"
        stage_backward_input(y, gy, x)
        del y
        gc.collect()
        held = bytes_.live
        stage_backward_weight(bag)
        assert bytes_.live == 0
    waiting = 4 * (1 + 3 + 1 + 1 + 1 + 4 + 4 + 1)  # x and dy of qkv, out, up, down
    assert waiting == 64
    assert held == (waiting - 1) * unit  # of which one is the given gradient, the caller's own


def test_the_counts_of_the_benchmark():
    """One extra forward and 64 activations; torch's own split shows that the counters count."""
    shape = (2, 8, 16)
    assert held(Ours(Stage(GeluLayer, 4, 16), shape)) == pytest.approx(64, abs=0.01)
    assert held(Torch(Stage(GeluLayer, 4, 16), shape)) > 100
    assert extra_forwards(Ours(Stage(GeluLayer, 4, 16), shape)) == 0
    for policy, peer in (("layer", 7), ("stage", 25)):
        assert extra_forwards(Ours(Stage(GeluLayer, 4, 16), shape, policy)) == 1
        assert extra_forwards(Torch(Stage(GeluLayer, 4, 16, policy), shape)) == peer


def test_flops_of_both_halves_are_those_of_a_plain_backward():
    a = torch.randn(3, 4)
    with matmul_flops() as counter:
        torch.zeros(3, 5).addmm_(a, torch.randn(4, 5))
    assert counter.get_total_flops() == 2 * 3 * 4 * 5, "addmm_ is not counted"
    module, stage = stage_of()
    x = torch.randn(2, 8, 16, requires_grad=True)
    y = module(x).sum()
    with matmul_flops() as plain:
        y.backward()
    for p in module.parameters():
        p.main_grad = torch.zeros_like(p)
    reroute(module, stage)
    bag = begin(stage)
    y = module(x).sum()
    with matmul_flops() as first:
        stage_backward_input(y, None, x)
    with matmul_flops() as second:
        stage_backward_weight(bag)
    linears = 4 * 2 * 16 * (16 * 16 * (3 + 1 + 4 + 4))
    assert second.get_total_flops() == linears
    assert first.get_total_flops() + linears == plain.get_total_flops()


def test_edges_let_the_outputs_go():
    module, stage = stage_of(1)
    reroute(module, stage)
    bag = begin(stage)
    x = torch.randn(2, 8, 16, requires_grad=True)
    y = module(x)
    gy, edge, alive = torch.ones_like(y), get_gradient_edge(y), weakref.ref(y)
    del y
    assert alive() is None
    dx = stage_backward_input([edge, "text"], [gy, None], {"x": x, "n": 3})
    stage_backward_weight(bag)
    module.zero_grad()
    module(z := x.detach().requires_grad_()).sum().backward()
    torch.testing.assert_close(dx["x"], z.grad)
    assert dx["n"] is None and x.grad is None


def test_what_comes_back_for_the_inputs():
    x, unused, ids = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True), torch.arange(3)
    x.grad = torch.full((3,), 9.0)  # of somebody else: not ours to return
    y = x * x
    found = stage_backward_input((y, None, ids, 3), (torch.ones(3), None, None, None), (x, (unused, x), ids, "s"))
    torch.testing.assert_close(found[0], 2 * x.detach())
    assert found[1:] == ((None, None), None, None)
    assert x.grad is None


def test_outputs_without_graph_and_without_gradient():
    x = torch.randn(3, requires_grad=True)
    outputs = {"y": x * 2, "unused": x * 3, "constant": torch.ones(3), "n": 4}
    given = {"y": torch.ones(3), "unused": None, "constant": torch.ones(3), "n": None}
    torch.testing.assert_close(stage_backward_input(outputs, given, x), torch.full((3,), 2.0))
    assert stage_backward_input(torch.ones(3), torch.ones(3), (torch.ones(3), None)) == (None, None)
    assert stage_backward_input((), None, ()) == ()
    same = torch.randn(3, requires_grad=True)  # a stage that returns its input
    torch.testing.assert_close(stage_backward_input(same, torch.ones(3), same), torch.ones(3))
    edge = get_gradient_edge(same)
    torch.testing.assert_close(stage_backward_input(edge, torch.ones(3), same), torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_loss_gets_ones_of_its_own_dtype(dtype):
    for shape in ((), (1,), (1, 1)):
        x = torch.randn(shape, dtype=dtype, requires_grad=True)
        for output in (x * 2, get_gradient_edge(x * 2)):
            found = stage_backward(output, None, x)
            assert torch.equal(found, torch.full(shape, 2, dtype=dtype))


@pytest.mark.parametrize(
    "outputs, gradients, message",
    [
        (lambda x: x * 2, lambda: torch.ones(4), r"output 0 is \(3,\) of torch.float32, its gradient is \(4,\)"),
        (lambda x: x * 2, lambda: torch.ones(3).double(), "its gradient is .* of torch.float64"),
        (lambda x: get_gradient_edge(x * 2), lambda: torch.ones(3).double(), "gradient is .* of torch.float64"),
        (lambda x: get_gradient_edge(x * 2), lambda: torch.ones(1, 3), r"gradient is \(1, 3\)"),
        (lambda x: (x * 2, x), lambda: (torch.ones(3),), "2 outputs but 1 gradients"),
        (lambda x: (x, x * 2), lambda: (None, 3.0), "gradient of output 1 is a float"),
        (lambda x: x * 2, lambda: None, r"shape \(3,\) is not a loss of 1 number"),
    ],
)
def test_refused(outputs, gradients, message):
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(ValueError, match=message):
        stage_backward_input(outputs(x), gradients(), x)


def test_an_input_with_a_graph_of_its_own_is_refused():
    x = torch.randn(3, requires_grad=True) * 2
    with pytest.raises(ValueError, match=r"input 1 of shape \(3,\) was computed"):
        stage_backward_input((x * 2).sum(), None, (None, x))


def test_a_written_output_gradient_is_found():
    module, stage = stage_of(1)
    reroute(module, stage)
    for spoil in (None, "gradient", "input"):
        bag = begin(stage, checked=True)
        x, gy = torch.randn(2, 8, 16, requires_grad=True), torch.randn(2, 8, 16)
        stage_backward_input(module(x), gy, x)
        assert len(bag) == 4 and len(bag.parameters()) == 4
        if spoil is None:
            bag.run()
            continue
        held = bag._thunks[0].tensors()[spoil == "gradient"]
        held.mul_(2)
        while len(bag) > 1:
            bag.run_one()
        with pytest.raises(RuntimeError, match=r"parameter of shape \[16, 64\] waits for was written 1 times"):
            bag.run()


def test_trap_04_what_never_arrives_is_no_error():
    """An unused branch, a frozen weight: nothing in the bag, nothing in .grad, nobody waits."""
    stage = StageContext()
    module = nn.ModuleDict({"used": nn.Linear(3, 3), "unused": nn.Linear(3, 3), "frozen": nn.Linear(3, 3)})
    module["frozen"].requires_grad_(False)
    reroute(module, stage)
    bag = begin(stage)
    x = torch.randn(2, 3, requires_grad=True)
    stage_backward(module["frozen"](module["used"](x)).sum(), None, x, bag)
    has = {name: p.grad is not None for name, p in module.named_parameters()}
    assert {name.split(".")[0] for name, there in has.items() if there} == {"used"}


def test_trap_01_a_hook_of_a_deferred_parameter_fires_once_with_the_gradient():
    """Without an owner of main_grad the hook is a stranger's: it must not see None, nor wait for W."""
    module, stage, seen = nn.Linear(3, 3), StageContext(), []
    module.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    reroute(module, stage)
    bag = begin(stage)
    stage_backward(module(torch.randn(2, 3)).sum(), None, None, bag)
    assert len(seen) == 1 and torch.equal(seen[0], module.weight.grad)
    module.weight.main_grad, module.weight.grad = torch.zeros(3, 3), None
    owner = []
    module.weight.register_post_accumulate_grad_hook(lambda p: owner.append(p.grad))
    module.weight._post_accumulate_grad_hooks.popitem(last=False)
    bag = begin(stage)
    stage_backward_input(module(torch.randn(2, 3)).sum(), None, None)
    assert (owner, len(bag)) == ([None], 1)  # why an owner's hook asks `p.grad is not None`
    bag.run()
    assert module.weight.main_grad.any()


def test_trap_02_uses_are_counted_in_the_bag():
    """One leaf, one deferred and one plain use: one hook in I and one thunk in W, and both parts arrive."""
    module, stage = nn.Linear(3, 3, bias=False), StageContext()
    x = torch.randn(2, 3)
    (module(x) + F.linear(x, module.weight)).sum().backward()
    expected, module.weight.grad = module.weight.grad, None
    reroute(module, stage)
    bag = begin(stage)
    stage_backward_input((module(x) + F.linear(x, module.weight)).sum(), None, None)
    torch.testing.assert_close(2 * module.weight.grad, expected)
    assert bag.parameters() == [module.weight]
    bag.run()
    torch.testing.assert_close(module.weight.grad, expected)


def test_trap_03_the_bag_is_complete_at_the_end_of_i():
    """Not in forward: a use whose gradient never comes makes no thunk."""
    module, stage = nn.Linear(3, 3), StageContext()
    reroute(module, stage)
    bag = begin(stage)
    used, _ = module(torch.randn(2, 3)), module(torch.randn(2, 3))
    assert len(bag) == 0
    stage_backward_input(used.sum(), None, None)
    assert len(bag) == 1


def test_trap_06_a_checkpoints_pack_hook_does_not_lose_the_weight():
    module, stage = nn.Linear(3, 3), StageContext()
    x = torch.randn(2, 3)
    module(x).square().sum().backward()
    expected = module.weight.grad
    module.weight.grad = None
    reroute(module, stage)
    bag = begin(stage)
    y = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)
    stage_backward(y.square().sum(), None, None, bag)
    torch.testing.assert_close(module.weight.grad, expected)


def test_trap_18_gradients_in_views_of_a_flat_buffer():
    """main_grad is a slice of one buffer, and the output gradient is not contiguous."""
    flat, stage = torch.zeros(3 * 4 + 5), StageContext()
    weight = nn.Parameter(torch.randn(3, 4))
    weight.main_grad = flat[2 : 2 + 12].view(3, 4)
    x, gy = torch.randn(2, 5, 4), torch.randn(3, 5, 2).permute(2, 1, 0)
    bag = begin(stage)
    stage_backward(deferred_linear(x, weight, stage=stage), gy, x, bag)
    torch.testing.assert_close(flat[2:14].view(3, 4), gy.reshape(-1, 3).t() @ x.reshape(-1, 4))
    assert not flat[:2].any() and not flat[14:].any() and weight.grad is None


def executed_split(schedule, microbatches):
    """How often the executor called the public I and W, and how many such actions there are."""
    pipe = tiny.pipeline(schedule, microbatches)
    calls = Counter()

    def counted(function):
        def call(*args, **kwargs):
            calls[function.__name__] += 1
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for function in (stage_backward_input, stage_backward_weight):
            patch.setattr(stage_module, function.__name__, counted(function))
        pipe.step(tiny.rows(microbatches), tiny.squares)
    pipe.close()
    return calls, len(pipe.stages) * microbatches


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_the_executor_runs_these_functions(ranks, schedule):
    for calls, actions in ranks(executed_split, schedule, 4, world=2):
        assert calls == {"stage_backward_input": actions, "stage_backward_weight": actions}


def test_a_parameter_is_ready_after_its_last_use():
    torch.manual_seed(0)
    tied, single, context = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), StageContext()
    module = nn.Sequential(tied, single, tied)
    reroute(module, context)
    bag = begin(context)
    x = torch.randn(2, 4, requires_grad=True)
    stage_backward_input(module(x).sum(), None, x)
    ready = []
    stage_backward_weight(bag, on_ready=lambda parameter: ready.append((parameter, len(bag))))
    # newest first: the last backward was that of the first layer, which is the tied one's second use
    assert [(id(parameter), waiting) for parameter, waiting in ready] == [
        (id(single.weight), 1),
        (id(tied.weight), 0),
    ]
    expected = torch.autograd.grad(nn.Sequential(tied, single, tied)(x).sum(), [tied.weight, single.weight])
    torch.testing.assert_close(tied.weight.grad, expected[0])
    torch.testing.assert_close(single.weight.grad, expected[1])
