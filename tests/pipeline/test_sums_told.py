"""An optimizer that takes an executor's sums over tokens for means is told so, once; right loops hear nothing."""

import warnings

import pytest
import torch
from torch import nn

from core.data_parallel import DataParallel
from core.optimizer import OptimizerConfig, ShardedSGD, clip_grad_norm_
from core.parallel_state import ParallelState
from core.pipeline import Pipeline, SingleStage
from tests.states import state

ALONE = ParallelState.single("cpu")


def loss(y, part):
    return y.square().sum(), y.numel()


def batch(seed=0, rows=8):
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))


def ours(zero_stage=1, count=loss, ps=ALONE, clip_grad=0.0):
    torch.manual_seed(1)
    model = nn.Linear(4, 4)
    shard = DataParallel(model, ps, zero_stage=zero_stage)
    optimizer = ShardedSGD(shard, OptimizerConfig(lr=0.01, clip_grad=clip_grad))
    return model, optimizer, SingleStage(model, ps=ps, num_microbatches=2, grad_sync=shard)


def torchs():
    torch.manual_seed(1)
    model = nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.01), SingleStage(model, ps=ALONE, num_microbatches=2)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_our_optimizer_tells_once(zero_stage):
    _, optimizer, executor = ours(zero_stage)
    executor.step(batch(), loss)
    with pytest.warns(UserWarning, match=r"sum of losses over 32 tokens.*Call optimizer.step\(result.num_tokens\)"):
        optimizer.step()
    for seed in range(1, 4):  # warnings are errors
        optimizer.zero_grad()
        executor.step(batch(seed), loss)
        optimizer.step()


def test_forgotten_later_is_told_at_the_next_look():
    _, optimizer, executor = ours()
    optimizer.step(executor.step(batch(), loss).num_tokens)
    optimizer.zero_grad()
    executor.step(batch(), loss)
    with pytest.warns(UserWarning, match="32 tokens"):
        optimizer.step()


def clip(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def clip_values(model):
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)


def clamp(model):
    for parameter in model.parameters():
        parameter.grad.clamp_(-0.1, 0.1)


def decay(model):
    for parameter in model.parameters():
        parameter.grad.add_(parameter.detach(), alpha=0.1)


def log(model):
    return sum(parameter.grad.pow(2).sum() for parameter in model.parameters()) ** 0.5


def update_in_place(model, rate=0.05):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(rate * parameter.grad)


def update_by_alpha(model, rate=0.05):
    for parameter in model.parameters():
        parameter.data.add_(parameter.grad, alpha=-rate)


def update_anew(model, rate=0.05):
    for parameter in model.parameters():
        parameter.data = parameter.data - parameter.grad * rate


UPDATES = [update_in_place, update_by_alpha, update_anew]


def dead_zone(model):
    for p in model.parameters():
        p.grad[p.grad.abs() < 1e-3] = 0


def soft_limit(model):
    for p in model.parameters():
        p.grad.copy_(torch.tanh(p.grad * 10) / 10)


CHANGES = [clip, clip_values, clamp, decay, log, dead_zone, soft_limit]


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_right_loops_of_ours_hear_nothing(zero_stage):
    _, optimizer, executor = ours(zero_stage)
    optimizer.step(executor.step(batch(), loss).num_tokens)
    optimizer.zero_grad()
    executor.step(batch(), loss)
    optimizer.step(num_tokens=1)
    optimizer.zero_grad()


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_gradients_divided_by_hand_hear_nothing(zero_stage):
    model, optimizer, executor = ours(zero_stage)
    tokens = executor.step(batch(), loss).num_tokens
    for parameter in model.parameters():
        parameter.grad.div_(float(tokens))
    optimizer.step()


def test_a_plain_backward_after_zero_grad_hears_nothing():
    model, optimizer, executor = ours()
    executor.step(batch(), loss)
    optimizer.zero_grad()
    model(batch()).square().mean().backward()
    optimizer.step()


def test_counts_of_at_most_one_say_that_the_loss_is_meant():
    _, optimizer, executor = ours()
    executor.step(batch(), lambda y, part: (y.square().mean() / 2, 0.5))
    optimizer.step()


def test_a_loss_scale_of_one_over_the_tokens_gives_means():
    _, optimizer, executor = torchs()
    executor.step(batch(), loss, 1 / 32)
    optimizer.step()


def test_torchs_optimizer_is_told():
    _, optimizer, executor = torchs()
    executor.step(batch(), loss)
    with pytest.warns(UserWarning, match="32 tokens.*Divide p.grad by result.num_tokens"):
        optimizer.step()


def test_clipping_is_no_division():
    """A norm of sums below the limit: clipped to less than the mean's gradient it is, or not at all."""
    model, optimizer, executor = torchs()
    executor.step(batch(), loss)
    with pytest.warns(UserWarning, match="norm by hand takes gradients that are sums of losses over 32 tokens"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e3)
    optimizer.step()


def test_clipping_of_ours_is_no_division():
    model, optimizer, executor = torchs()
    executor.step(batch(), loss)
    clip_grad_norm_(model.parameters(), 1e3)
    with pytest.warns(UserWarning, match="sum of losses over 32 tokens"):
        optimizer.step()


@pytest.mark.parametrize("clip", [None, 0.01])
def test_torchs_optimizer_after_a_division_hears_nothing(clip):
    model, optimizer, executor = torchs()
    tokens = executor.step(batch(), loss).num_tokens
    for parameter in model.parameters():
        parameter.grad /= tokens
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


def test_a_scaler_divides_by_its_scale_only():
    model, optimizer, executor = torchs()
    scale = torch.tensor(1024.0)
    executor.step(batch(), loss, scale)
    for parameter in model.parameters():
        parameter.grad /= scale
    with pytest.warns(UserWarning, match="32 tokens"):
        optimizer.step()


def test_another_models_optimizer_hears_nothing():
    _, _, executor = torchs()
    executor.step(batch(), loss)
    other = nn.Linear(4, 4)
    other(batch()).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.01).step()


def in_a_pipeline(told):
    ps = state(pp=2)
    torch.manual_seed(1)
    model = [nn.Linear(4, 4) for _ in range(2)][ps.index("pp")]
    pipeline = Pipeline([model], ps=ps, num_microbatches=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    messages = []
    for _ in range(2):
        tokens = pipeline.step(batch(), loss).num_tokens
        if not told:
            for parameter in model.parameters():
                parameter.grad /= tokens
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        messages += [str(warning.message) for warning in caught]
        optimizer.zero_grad()
    return messages


@pytest.mark.parametrize("told", [True, False])
def test_every_rank_of_a_pipeline_is_told(ranks, told):
    for messages in ranks(in_a_pipeline, world=2, told=told):
        assert len(messages) == told
        assert all("32 tokens" in message for message in messages)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("change", CHANGES)
def test_sums_that_are_changed_by_hand_before_they_are_divided_are_told_once(zero_stage, change):
    model, optimizer, executor = ours(zero_stage)
    for step in range(3):
        tokens = executor.step(batch(step), loss).num_tokens
        if step:
            change(model)
        else:
            with pytest.warns(
                UserWarning, match="by hand takes .* sums of losses over 32 tokens.*step.num_tokens=1."
            ):
                change(model)
        optimizer.step(tokens)
        optimizer.zero_grad()


@pytest.mark.parametrize("change", CHANGES)
def test_sums_of_a_plain_module_are_told_as_well_and_means_are_not(change):
    for divides in (True, False):
        model, optimizer, executor = torchs()
        tokens = executor.step(batch(), loss).num_tokens
        if divides:
            for parameter in model.parameters():
                parameter.grad /= tokens
            change(model)
        else:
            with pytest.warns(UserWarning, match="by hand takes .* sums of losses over 32 tokens"):
                change(model)
            for parameter in model.parameters():
                parameter.grad /= tokens
        assert type(model.weight.grad) is torch.Tensor
        optimizer.step()


def test_what_no_scale_changes_is_right():
    model, optimizer, executor = torchs()
    tokens = executor.step(batch(), loss).num_tokens
    for parameter in model.parameters():
        assert not parameter.grad.isnan().any()
        parameter.grad.sign_()
    optimizer.step()
    assert tokens


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_means_that_are_clipped_hear_nothing_and_are_those_of_clip_grad(zero_stage):
    found = []
    for by_hand in (True, False):
        model, optimizer, executor = ours(zero_stage, clip_grad=0.0 if by_hand else 0.01)
        tokens = executor.step(batch(), loss).num_tokens
        if by_hand:
            for parameter in model.parameters():
                parameter.grad.mul_(1 / tokens)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step(num_tokens=1 if by_hand else tokens)
        found.append(torch.cat([p.flatten() for p in model.state_dict().values()]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=0)


@pytest.mark.parametrize("zero_stage", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("update", UPDATES)
def test_updates_by_hand_from_sums_are_told_and_those_from_means_are_not(zero_stage, update):
    for divides in (True, False):
        model, _, executor = torchs() if zero_stage is None else ours(zero_stage)
        tokens = executor.step(batch(), loss).num_tokens
        if divides:
            update(model, rate=0.05 / float(tokens))
        else:
            with warnings.catch_warnings(record=True, action="always") as caught:
                update(model)
            said = [str(warning.message) for warning in caught if "sums of losses" in str(warning.message)]
            assert len(said) == 1 and "32 tokens" in said[0], [str(warning.message) for warning in caught]


def test_sums_of_several_steps_added_up_hear_nothing():
    model, _, executor = torchs()
    total = [torch.zeros_like(parameter) for parameter in model.parameters()]
    tokens = 0
    for step in range(4):
        tokens += executor.step(batch(step), loss).num_tokens
        for parameter, sum_ in zip(model.parameters(), total, strict=True):
            sum_.add_(parameter.grad)
            parameter.grad = None
    with torch.no_grad():
        for parameter, sum_ in zip(model.parameters(), total, strict=True):
            parameter.sub_(0.05 * sum_ / tokens)


HOOKS = {
    "clamp": (lambda g: g.clamp(-0.01, 0.01), True),
    "norm": (lambda g: g / g.norm().clamp(min=1.0), True),
    "mask": (lambda g: g * (torch.arange(g.numel()).view_as(g) > 2), False),
    "scale": (lambda g: 0.5 * g, False),
}


@pytest.mark.parametrize("zero_stage", [None, 0, 3])
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_that_limit_a_microbatchs_sums_are_told_once(zero_stage, hook):
    change, is_told = HOOKS[hook]
    model, optimizer, executor = torchs() if zero_stage is None else ours(zero_stage)
    for parameter in model.parameters():
        parameter.register_hook(change)
    said = []
    for step in range(3):
        with warnings.catch_warnings(record=True, action="always") as caught:
            executor.step(batch(step), loss)
        optimizer.zero_grad()
        said += [str(warning.message) for warning in caught]
    assert len(said) == is_told, said
    assert all("in a hook on a parameter's gradient" in text and "32" in text for text in said)


def decayed_in_a_pipeline():
    ps = state(pp=2)
    torch.manual_seed(1)
    model = [nn.Linear(4, 4) for _ in range(2)][ps.index("pp")]
    shard = DataParallel([model], ps)
    pipeline = Pipeline([model], ps=ps, num_microbatches=2, grad_sync=shard)
    with warnings.catch_warnings(record=True, action="always") as caught:
        pipeline.step(batch(), loss)
        decay(model)
    shard.remove()
    pipeline.close()
    return [str(warning.message) for warning in caught]


def test_a_decay_by_hand_of_sums_in_buckets_is_told_in_a_pipeline(ranks):
    for said in ranks(decayed_in_a_pipeline, world=2):
        assert len(said) == 1 and "sums of losses over 32 tokens" in said[0], said
