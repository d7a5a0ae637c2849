"""torch's optimizers as leaves of a state: a resumed run is the run that went on, bit for bit, on any layout."""

from pathlib import Path

import pytest
import torch
from torch import nn

from core.dist_checkpointing import CheckpointManager, load, load_tensors_metadata, save
from core.dist_checkpointing.state.mapping import sharded_state_dict
from core.dist_checkpointing.writing.saving import Saver
from core.models.gpt import gpt2_spec, gpt_stages
from core.optimizer import OptimizerConfig
from core.parallel_state import layout_of
from core.parallel_state.modules import named_parameters
from tests.dist_checkpointing import small
from tests.dist_checkpointing.test_dtensor import contents, fully_sharded, placed
from tests.models import gpt
from tests.states import state as parallel
from tests.twins.adamw import AdamW
from tests.twins.per_parameter import PerParameterGradSync


def quick(state, place, ps):
    Saver(str(Path(place).parent), ps, durable=False).save(Path(place).name, state)


def module(seed):
    torch.manual_seed(seed)
    return nn.ModuleDict({"a": nn.Linear(4, 8), "b": nn.Linear(8, 3), "unused": nn.Embedding(5, 2)})


def groups(model):
    return [{"params": [*model["a"].parameters(), *model["unused"].parameters()], "lr": 0.02}, *others(model)]


def others(model):
    return [{"params": model["b"].parameters()}]


def train(model, optimizer, steps):
    for step in steps:
        x = small.whole("x", (6, 4), step).to(model["a"].weight.dtype)
        optimizer.zero_grad()
        model["b"](model["a"](x).tanh()).square().mean().backward()
        optimizer.step()


def same_state(a, b):
    """Of two optimizers: every tensor's bits, type and device, every option."""
    a, b = a.state_dict(), b.state_dict()
    assert a["param_groups"] == b["param_groups"] and a["state"].keys() == b["state"].keys()
    for number, kinds in a["state"].items():
        assert kinds.keys() == b["state"][number].keys()
        for kind, value in kinds.items():
            other = b["state"][number][kind]
            assert type(value) is type(other), (number, kind)
            if isinstance(value, torch.Tensor):
                assert value.dtype == other.dtype and value.device == other.device and torch.equal(value, other)
            else:
                assert value == other


KINDS = {
    "SGD": {"momentum": 0.9},
    "plain SGD": {},
    "AdamW": {"amsgrad": True},
    "Adam": {"lr": torch.tensor(0.01), "foreach": False},
    **{name: {} for name in ("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adamax")},
    **{name: {} for name in ("NAdam", "RAdam", "RMSprop", "Rprop")},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind, tmp_path, single):
    """The new one has made no step, has other options, and an embedding that was never used has no state."""
    made = getattr(torch.optim, kind.split()[-1])
    model = module(0)
    optimizer = made(groups(model), **{"lr": 0.01} | KINDS[kind])
    train(model, optimizer, range(3))
    quick({"model": model.state_dict(), "optimizer": optimizer}, tmp_path / "x", single)
    train(model, optimizer, range(3, 5))
    again = module(1)
    resumed = made(groups(again), **KINDS[kind] | {"lr": torch.tensor(0.5) if "lr" in KINDS[kind] else 0.5})
    found = load({"model": again.state_dict(), "optimizer": resumed}, tmp_path / "x", ps=single)
    assert found["optimizer"] is resumed
    train(again, resumed, range(3, 5))
    same_state(optimizer, resumed)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_into_states_that_are_there(tmp_path, single):
    """Their memory is kept; what the checkpoint has no state of has none."""
    model = module(0)
    optimizer = torch.optim.AdamW(groups(model))
    quick({"model": model.state_dict(), "optimizer": optimizer}, tmp_path / "fresh", single)
    train(model, optimizer, range(2))
    quick({"model": model.state_dict(), "optimizer": optimizer}, tmp_path / "x", single)
    kept = optimizer.state[model["a"].weight]["exp_avg"]
    value = kept.clone()
    train(model, optimizer, range(2, 4))
    load({"model": model.state_dict(), "optimizer": optimizer}, tmp_path / "x", ps=single)
    assert optimizer.state[model["a"].weight]["exp_avg"] is kept and torch.equal(kept, value)
    load({"model": model.state_dict(), "optimizer": optimizer}, tmp_path / "fresh", ps=single)
    assert not optimizer.state_dict()["state"]


def test_several_models_and_optimizers(tmp_path, single):
    """KeyMapping outside of `model` are whole, so that two modules alike do not meet."""

    def made(seed):
        models = module(seed), module(seed + 1)
        optimizers = [torch.optim.AdamW(groups(model)) for model in models]
        state = {name: model.state_dict() for name, model in zip("gd", models, strict=True)}
        return models, optimizers, state | {"optimizers": optimizers}

    models, optimizers, state = made(0)
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(2))
    quick(state, tmp_path / "x", single)
    _, resumed, target = made(7)
    assert load(target, tmp_path / "x", ps=single)["optimizers"] == resumed
    for a, b in zip(optimizers, resumed, strict=True):
        same_state(a, b)
    assert "optimizers/1/exp_avg/d/a.weight" in load_tensors_metadata(tmp_path / "x")


def spread_gpt(ps, kind="AdamW"):
    """This rank's stages, and an optimizer of torch's with two groups, which not every stage fills alike."""
    placement = range(ps.size("pp"))
    config = gpt.config(num_layers=4)
    stages = gpt_stages(config, gpt2_spec(), gpt.VOCAB, gpt.POSITIONS, placement=[*placement], parallel=ps)
    named = dict(named_parameters(stages))
    options = {"SGD": {"momentum": 0.9}, "AdamW": {"weight_decay": 0.1}}[kind]
    bare = [p for name, p in named.items() if "final" in name or "output" in name]
    rest = [p for p in named.values() if not any(p is other for other in bare)]
    found = [{"params": part, **more} for part, more in ((bare, {"lr": 0.3}), (rest, {})) if part]
    return stages, named, getattr(torch.optim, kind)(found, lr=0.1, **options)


def step(named, optimizer, ps, number):
    """One update by gradients that are parts of the same wholes on every layout."""
    for name, p in named.items():
        layout = layout_of(p)
        box = layout.box(ps.coordinate, ps.sizes)
        p.grad = torch.zeros_like(p)
        part = small.whole(name, layout.shape, number)[box].to(p.dtype)
        p.grad[tuple(slice(0, n) for n in part.shape)] = part
    optimizer.step()


def gpt_run(root, tp, pp, kind, written=None):
    """Steps 0 to 4 with a checkpoint after 2, or, given what another layout wrote, 3 and 4 from there."""
    ps = parallel(tp=tp, pp=pp)
    stages, named, optimizer = spread_gpt(ps, kind)
    state = {"model": sharded_state_dict(stages, ps), "optimizer": optimizer}
    if written is None:
        for number in range(3):
            step(named, optimizer, ps, number)
        quick(state, f"{root}/tp{tp}pp{pp}", ps)
    else:
        with torch.no_grad():
            for p in named.values():
                p.fill_(7)
        load(state, f"{root}/{written}", ps=ps)
    for number in (3, 4):
        step(named, optimizer, ps, number)
    quick(state, f"{root}/tp{tp}pp{pp}-from-{written}", ps)


@pytest.mark.parametrize("kind", ["AdamW", pytest.param("SGD", marks=pytest.mark.full)])
def test_tensor_and_pipeline_parallel(ranks, tmp_path, kind):
    """TP 2 goes on under TP 1 and over two stages, and back; the padded vocabulary has 101 rows."""
    layouts = {"tp2pp1": (2, 1), "tp1pp1": (1, 1), "tp1pp2": (1, 2)}
    for tp, pp in layouts.values():
        ranks(gpt_run, str(tmp_path), tp, pp, kind, world=tp * pp)
    first = contents(tmp_path / "tp2pp1")
    assert all(contents(tmp_path / name) == first for name in layouts)
    went_on = contents(tmp_path / "tp2pp1-from-None")
    assert went_on != first
    for written, name in (("tp2pp1", "tp1pp1"), ("tp2pp1", "tp1pp2"), ("tp1pp2", "tp2pp1")):
        tp, pp = layouts[name]
        ranks(gpt_run, str(tmp_path), tp, pp, kind, written, world=tp * pp)
        assert contents(tmp_path / f"{name}-from-{written}") == went_on, (written, name)


def fsdp_run(root, tp, written=None):
    ps = parallel(tp=tp)
    model = fully_sharded(1 if written is None else 2, ps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model.state_dict(), "optimizer": optimizer}

    def update(number):
        for name, p in model.named_parameters():
            parts = torch.distributed.tensor.distribute_tensor(
                small.whole(name, p.shape, number), p.device_mesh, [placed("R") for _ in p.placements]
            )
            p.grad = parts.redistribute(p.device_mesh, p.placements)
        optimizer.step()

    if written is None:
        update(0)
        quick(state, f"{root}/{ps.config.world_size}-{tp}", ps)
    else:
        load(state, f"{root}/{written}", ps=ps)
    update(1)
    quick(state, f"{root}/{ps.config.world_size}-{tp}-from-{written}", ps)


def test_fully_shard(ranks, tmp_path):
    """FSDP2, over tensor parallelism too: uneven rows, ranks with none."""
    layouts = {"1-1": (1, 1), "2-1": (2, 1), "4-2": (4, 2)}
    for world, tp in layouts.values():
        ranks(fsdp_run, str(tmp_path), tp, world=world)
    assert contents(tmp_path / "1-1") == contents(tmp_path / "2-1") == contents(tmp_path / "4-2")
    for written, name in (("4-2", "1-1"), ("1-1", "2-1"), ("2-1", "4-2")):
        world, tp = layouts[name]
        ranks(fsdp_run, str(tmp_path), tp, written, world=world)
        assert contents(tmp_path / f"{name}-from-{written}") == contents(tmp_path / "1-1-from-None")


def replicas(root):
    """Plain data parallelism: states that went apart are told, not half of them saved."""
    ps = parallel()
    model = module(0)
    optimizer = torch.optim.AdamW(groups(model))
    train(model, optimizer, range(2))
    state = {"model": model.state_dict(), "optimizer": optimizer}
    manager = CheckpointManager(root, ps=ps)
    manager.prepare(state)
    manager.save_async(1, state).wait()
    target = torch.optim.AdamW(groups(model), lr=0.7)
    assert manager.load_latest({"model": model.state_dict(), "optimizer": target})[0] == 1
    same_state(optimizer, target)
    manager.close()
    optimizer.state[model["b"].bias]["exp_avg"] += ps.rank
    with pytest.raises(ValueError, match=r"optimizer/exp_avg/b.bias at .* differs between rank 0 and rank 1"):
        save(state, f"{root}/other", ps=ps)


@pytest.mark.full
def test_replicas(ranks, tmp_path):
    ranks(replicas, str(tmp_path), world=2)


def ours(root, tp):
    """Those of `core.optimizer` say themselves what they keep."""
    ps = parallel(tp=tp)

    def made():
        stages, _, _ = spread_gpt(ps)
        found = AdamW(stages, ps, OptimizerConfig(), grad_sync=PerParameterGradSync(stages, ps))
        return found, {"model": sharded_state_dict(stages, ps), "optimizer": found}

    optimizer, state = made()
    optimizer.step_count = 5
    for kinds in optimizer.states().values():
        kinds["exp_avg"].tensor.fill_(3)
    save(state, f"{root}/x", ps=ps)
    again, target = made()
    assert load(target, f"{root}/x", ps=ps)["optimizer"] is again and again.step_count == 5
    assert all((kinds["exp_avg"].tensor == 3).all() for kinds in again.states().values())


def test_our_own(ranks, tmp_path):
    ranks(ours, str(tmp_path), 2, world=2)


def test_frozen_layers(tmp_path, single):
    """In a stack they would be a hole; as tensors of their own they are left out."""
    stages, named, optimizer = spread_gpt(single)
    for name, p in named.items():
        p.grad = None if ".layers.0." in name else torch.ones_like(p)
    optimizer.step()
    told = r"layers\.1\..* has the states \['exp_avg', .*layers\.0\..* has \[\], and layers of a stack"
    with pytest.raises(ValueError, match=told):
        quick({"model": sharded_state_dict(stages, single), "optimizer": optimizer}, tmp_path / "x", single)
    model = {name: p.detach() for name, p in named.items()}
    quick({"model": model, "optimizer": optimizer}, tmp_path / "x", single)
    _, named, target = spread_gpt(single)
    load({"model": {n: p.detach() for n, p in named.items()}, "optimizer": target}, tmp_path / "x", ps=single)
    same_state(optimizer, target)


def spread_adafactor(root):
    ps = parallel(tp=2)
    stages, named, _ = spread_gpt(ps)
    optimizer = torch.optim.Adafactor(named.values())
    step(named, optimizer, ps, 0)
    state = {"model": sharded_state_dict(stages, ps), "optimizer": optimizer}
    with pytest.raises(ValueError, match=r"optimizer/row_var/.*: a state of shape .* has no layout .* spread"):
        save(state, f"{root}/x", ps=ps)
    assert not list(Path(root).iterdir())


def test_states_without_a_layout(ranks, tmp_path):
    ranks(spread_adafactor, str(tmp_path), world=2)


def test_refused(tmp_path, single):
    model = module(0)
    optimizer = torch.optim.AdamW(groups(model))
    train(model, optimizer, range(1))
    place = tmp_path / "x"
    quick({"model": model.state_dict(), "optimizer": optimizer}, place, single)
    with pytest.raises(ValueError, match=r"optimizer: a parameter of shape \[8, 4\] of group 0 is not in the state"):
        save({"optimizer": optimizer}, tmp_path / "y", ps=single)
    newton = torch.optim.LBFGS(model.parameters())
    newton.state[model["a"].weight] = {"old_dirs": [torch.ones(3)]}
    with pytest.raises(ValueError, match=r"optimizer/old_dirs/a.weight is a list of tensors \(LBFGS\)"):
        save({"model": model.state_dict(), "optimizer": newton}, tmp_path / "y", ps=single)
    again = module(1)
    before = [p.clone() for p in again.parameters()]
    for wrong, told in (
        (
            torch.optim.AdamW(again.parameters()),
            r"b.weight: in one group with a.weight here, .*0.02",
        ),
        (torch.optim.SGD(groups(again)), r"an optimizer with .*betas.* was saved, this one has dampening"),
    ):
        with pytest.raises(ValueError, match=told):
            load({"model": again.state_dict(), "optimizer": wrong}, place, ps=single)
        assert not wrong.state
    quick({"model": model.state_dict()}, tmp_path / "bare", single)
    with pytest.raises(ValueError, match=r"missing in the checkpoint: optimizer/param_groups/a.bias"):
        load(
            {"model": again.state_dict(), "optimizer": torch.optim.AdamW(groups(again))}, tmp_path / "bare", ps=single
        )
    part = torch.optim.AdamW(others(again))
    with pytest.raises(ValueError, match=r"not asked for: optimizer/exp_avg/a.bias"):
        load({"model": again.state_dict(), "optimizer": part}, place, ps=single)
    assert all(torch.equal(a, b) for a, b in zip(before, again.parameters(), strict=True)) and not part.state


def test_another_shape_keeps_its_states(tmp_path, single):
    """What does not fit is left as it was, the states of a parameter with it."""
    model = module(0)
    optimizer = torch.optim.AdamW(groups(model))
    train(model, optimizer, range(1))
    quick({"model": model.state_dict(), "optimizer": optimizer}, tmp_path / "x", single)
    again = module(1)
    again["b"] = nn.Linear(8, 5)
    other = torch.optim.AdamW(groups(again))
    state = {"model": again.state_dict(), "optimizer": other}
    _, report = load(state, tmp_path / "x", ps=single, strict="report")
    assert list(report.mismatched) == ["model/b.bias", "model/b.weight"]
    assert other.state.keys() == {again["a"].weight, again["a"].bias}
    train(again, other, range(1, 2))


def test_cast(tmp_path, single):
    model = module(0)
    optimizer = torch.optim.AdamW(groups(model))
    train(model, optimizer, range(1))
    quick({"model": model.state_dict(), "optimizer": optimizer}, tmp_path / "x", single)
    again = module(1).double()
    other = torch.optim.AdamW(groups(again))
    load({"model": again.state_dict(), "optimizer": other}, tmp_path / "x", ps=single, cast=True)
    kept = other.state[again["a"].weight]
    assert kept["exp_avg"].dtype == torch.float64 and kept["step"].dtype == torch.float32 and kept["step"] == 1
    train(again, other, range(1, 2))


def fully_sharded_gpt(root, tp, shard, written=None):
    """FSDP2 over the tensor parallelism of layouts: boxes within boxes, padded rows of the vocabulary among them."""
    from torch.distributed.fsdp import fully_shard

    ps = parallel(tp=tp)
    stages, _, _ = spread_gpt(ps)
    if shard:
        fully_shard(stages[0], mesh=ps.mesh_for("dp"))
    named = dict(named_parameters(stages))
    optimizer = torch.optim.AdamW(named.values(), lr=0.1)
    state = {"model": sharded_state_dict(stages, ps), "optimizer": optimizer}
    if written is not None:
        with torch.no_grad():
            for p in named.values():
                p.fill_(7)
        load(state, f"{root}/{written}", ps=ps)
    for p in named.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    quick(state, f"{root}/{tp}-{shard}-from-{written}", ps)


@pytest.mark.full
def test_fully_shard_over_layouts(ranks, tmp_path):
    for world, tp, shard in ((1, 1, False), (4, 2, True)):
        ranks(fully_sharded_gpt, str(tmp_path), tp, shard, world=world)
    assert contents(tmp_path / "2-True-from-None") == contents(tmp_path / "1-False-from-None")
    for world, tp, shard, written in ((2, 1, True, "2-True-from-None"), (4, 2, True, "1-False-from-None")):
        ranks(fully_sharded_gpt, str(tmp_path), tp, shard, written, world=world)
    ranks(fully_sharded_gpt, str(tmp_path), 1, False, "2-True-from-None", world=1)
    names = ["1-True-from-2-True-from-None", "2-True-from-1-False-from-None", "1-False-from-2-True-from-None"]
    first, *others = [contents(tmp_path / name) for name in names]
    assert all(found == first for found in others) and first != contents(tmp_path / "1-False-from-None")
