"""A backward after gradients were read or used, and before they are zeroed: added, as under DDP, or refused."""

import pytest
import torch
from torch import nn

from core.autograd import main_grad_of
from core.data_parallel import DataParallel
from core.models.gpt import GPTModel, llama_config, llama_spec
from core.optimizer import OptimizerConfig, ShardedSGD
from core.parallel_state import ParallelState
from core.pipeline import SingleStage
from tests.parity.whole import whole_parameters
from tests.states import state

FULL = pytest.mark.full
VOCAB, S, ROWS = 24, 8, 6
CONFIG = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "params_dtype": torch.float64}


def read(model):
    for p in model.parameters():
        p.grad.norm()


def drop(model):
    """One goes, others are read."""
    read(model)
    model.decoder.layers[0].mlp.linear_fc2.weight.grad = None


def put(model):
    read(model)
    for p in (model.decoder.layers[0].mlp.linear_fc2.weight, model.decoder.final_layernorm.weight):
        p.grad = torch.full(tuple(p.shape), 0.01, dtype=p.dtype)


def put_unread(model):
    weight = model.decoder.layers[0].mlp.linear_fc2.weight
    weight.grad = torch.full(tuple(weight.shape), 0.01, dtype=weight.dtype)


def trained(ps, zero_stage, acts):
    """Parameters of a model whose operations add gradients themselves; an act comes between two backward calls."""
    torch.manual_seed(3)
    model = GPTModel(llama_config(**CONFIG), llama_spec(), VOCAB, S, seed=1, parallel=ps)
    shard = None if zero_stage is None else DataParallel(model, ps, zero_stage=zero_stage, bucket_size=400)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    share = ROWS // ps.size("dp")
    for step, act in enumerate(acts):
        for number in range(2):
            tokens = torch.randint(VOCAB, (ROWS, S + 1), generator=torch.Generator().manual_seed(2 * step + number))
            tokens = tokens[ps.index("dp") * share :][:share]
            model(tokens[:, :-1], labels=tokens[:, 1:]).mean().backward()
            if not number:
                act(model)
        optimizer.step()
        if step:  # torch adds to used gradients, too
            optimizer.zero_grad()
    parameters = whole_parameters(model, ps)
    if shard is not None:
        shard.remove()
    return parameters


def added(zero_stage, sizes, acts):
    expected = trained(ParallelState.single("cpu"), None, acts)
    found = trained(state(**sizes), zero_stage, acts)
    for name, parameter in expected.items():
        torch.testing.assert_close(found[name], parameter, rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("zero_stage", [0, pytest.param(1, marks=FULL), 2, 3])
@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=FULL)])
def test_operations_that_add_gradients_themselves(ranks, world, zero_stage):
    ranks(added, zero_stage, {}, [read, drop, put, put_unread], world=world)


@pytest.mark.parametrize("zero_stage", [pytest.param(0, marks=FULL), 1, pytest.param(3, marks=FULL)])
def test_gradients_of_which_tensor_ranks_hold_parts(ranks, zero_stage):
    """Norms under sequence parallelism: what a sum over tensor ranks has made equal is not summed twice."""
    ranks(added, zero_stage, {"tp": 2, "sp": True}, [read, read], world=4)


class AddsItself(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        main_grad_of(ctx.weight).add_(grad.t() @ ctx.saved_tensors[0])
        return None, None


class OneWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))

    def forward(self, x):
        return AddsItself.apply(x, self.weight)


def nothing_by_autograd(zero_stage):
    model = OneWeight()
    DataParallel(model, state(), zero_stage=zero_stage)
    for times in range(1, 4):
        model(torch.full((2, 3), float(1 + state().rank))).sum().backward()
        assert torch.equal(model.weight.grad.clone(), torch.full((2, 3), 3.0 * times))


@pytest.mark.parametrize("zero_stage", [pytest.param(0, marks=FULL), 2, 3])
def test_a_backward_of_which_autograd_adds_nothing(ranks, zero_stage):
    ranks(nothing_by_autograd, zero_stage)


def read_alone(zero_stage, torchs):
    model = nn.Linear(3, 2)
    optimizer = ShardedSGD(DataParallel(model, state(), zero_stage=zero_stage), OptimizerConfig())
    if torchs:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"here p.grad is asked for by .* not so on every rank"):
        for _ in range(2):
            model(torch.ones(4, 3)).sum().backward()
            if state().rank == 0:
                model.weight.grad.norm()
        optimizer.step()


def number_told(zero_stage, last, zeroes):
    """Rank 0 reads alone in step `last`, after reads of all in the steps before, between two backwards."""
    model = nn.Linear(3, 2)
    DataParallel(model, state(), zero_stage=zero_stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=rf"^step {last}: here p.grad is asked for by .* not so on every rank"):
        for step in range(1, last + 1):
            for _ in range(2):
                model(torch.ones(4, 3)).sum().backward()
                if step < last:
                    model.weight.grad.norm()
            if step == last and state().rank == 0:
                model.weight.grad.norm()
            optimizer.step()
            if zeroes:
                model.weight.grad = model.bias.grad = None


@pytest.mark.parametrize(("last", "zeroes"), [(1, True), (3, True), (3, False)])
@pytest.mark.parametrize("zero_stage", [1, pytest.param(3, marks=FULL)])
def test_the_step_of_a_read_on_one_rank_is_told(ranks, zero_stage, last, zeroes):
    ranks(number_told, zero_stage, last, zeroes)


@pytest.mark.parametrize("torchs", [False, True], ids=["ours", "torch"])
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_a_read_on_one_rank_is_refused_on_all(ranks, zero_stage, torchs):
    ranks(read_alone, zero_stage, torchs)


def after_an_executor():
    model = nn.Linear(3, 1).double()
    shard = DataParallel(model, state(), zero_stage=1)
    executor = SingleStage(model, ps=state(), num_microbatches=2, grad_sync=shard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.ones(4, 3, dtype=torch.float64)

    def step():
        executor.step({"input": rows}, lambda y, part: (y.square().sum() * 1e-3, len(y)))

    step()
    with pytest.raises(RuntimeError, match=r"bias after finish\(\) had summed the gradients .* as executors do"):
        model(rows).sum().backward()
    shard.zero_grad()
    step()
    sums = model.weight.grad.clone()
    optimizer.step()
    model(rows).sum().backward()  # for nobody
    optimizer.zero_grad()
    step()
    assert (model.weight.grad.clone() - sums).abs().max() < 0.5 * sums.abs().max()


def test_after_an_executors_step_it_is_refused(ranks):
    ranks(after_an_executor)


def where_they_lie(zero_stage):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    shard = DataParallel(model, state(), zero_stage=zero_stage)

    def places():
        return [buffer.memory["gradients"][-1].data_ptr() for buffer in shard.buffers]

    held = places()
    model(torch.ones(4, 64)).sum().backward()
    first = [p.grad.norm() for p in model.parameters()]
    model(torch.ones(4, 64)).sum().backward()
    assert places() == held
    for p, norm in zip(model.parameters(), first, strict=True):
        torch.testing.assert_close(p.grad.norm(), 2 * norm)


@pytest.mark.parametrize("zero_stage", [0, pytest.param(1, marks=FULL), 2])
def test_sums_are_added_to_where_they_lie(ranks, zero_stage):
    ranks(where_they_lie, zero_stage)
