"""A DeepSpeed loop on what `initialize` returns: one process's numbers, checkpoints, what it is asked."""

import pytest
import torch
from torch import nn

from core.interop.deepspeed import from_deepspeed
from core.training import initialize
from core.training.run.engine.their_methods import ELSEWHERE

pytestmark = pytest.mark.filterwarnings("ignore:.*has no gradient_clipping")
STEPS, GAS, MICRO = 3, 2, 2
DS = {
    "train_micro_batch_size_per_gpu": MICRO,
    "gradient_accumulation_steps": GAS,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_type": "linear"}},
}


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        self.double()
        generator = torch.Generator().manual_seed(3)
        for p in self.parameters():
            p.data = torch.randn(p.shape, dtype=torch.float64, generator=generator)

    def loss(self, x):
        return (self(x) - x.sum(1, keepdim=True)).square().mean()


def rows(step, ranks):
    """[GAS, ranks, MICRO, 4]: of one update."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(GAS, ranks, MICRO, 4, dtype=torch.float64, generator=generator)


def one_process(ranks, steps=STEPS):
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, weight_decay=0.1)
    norms = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.05 * min(1.0, max(0, step - 1) / 3)
        net.loss(rows(step, ranks).reshape(-1, 4)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in net.parameters()], norms


def engine_of(ranks=1, stage=0, **more):
    fields = from_deepspeed(DS | {"zero_optimization": {"stage": stage}} | more, data_ranks=ranks).fields
    return initialize(Net(), fields | {"device": "cpu"})[0]


def trained(engine, ranks, first=0, last=STEPS):
    """DeepSpeed's loop, on this rank's rows."""
    norms = []
    for step in range(first, last):
        for m, micro in enumerate(rows(step, ranks)):
            x = micro[engine.global_rank]
            loss = (engine(x) - x.sum(1, keepdim=True)).square().mean()
            assert engine.is_gradient_accumulation_boundary() == (m == GAS - 1)
            half = engine.backward(loss)
            assert half.item() == pytest.approx(loss.item() / GAS)
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms


def by_engine(stage, ranks):
    engine = engine_of(ranks, stage)
    norms = trained(engine, ranks)
    shard = engine.optimizer.shard
    counts = engine.global_steps, engine.micro_steps, engine.gradient_accumulation_steps(), engine.world_size
    shard.remove()
    weights = [p.detach().clone() for p in engine.module.parameters()]
    engine.parallel.destroy()
    return weights, norms, counts


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.full), 2, 3])
def test_a_deepspeed_loop_is_one_process(ranks, stage):
    want, norms = one_process(2)
    for weights, seen, counts in ranks(by_engine, world=2, stage=stage, ranks=2):
        assert counts == (STEPS, STEPS * GAS, GAS, 2)
        assert seen == pytest.approx(norms, rel=1e-10)
        for got, its in zip(weights, want, strict=True):
            torch.testing.assert_close(got, its, rtol=1e-10, atol=1e-12)


def test_what_it_is_asked():
    engine = engine_of(stage=1)
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (MICRO * GAS, MICRO)
    assert engine.zero_optimization_stage() == 1 and engine.gradient_clipping() == 0.5
    assert engine.device == torch.device("cpu") and (engine.local_rank, engine.global_rank) == (0, 0)
    assert engine.get_lr() == [0.0] and engine.get_global_grad_norm() is None and not engine.was_step_applied()
    trained(engine, 1)
    assert engine.get_lr() == [pytest.approx(0.05 * 2 / 3)] == engine.get_lr() and engine.was_step_applied()
    assert engine.global_samples == STEPS * MICRO * GAS and engine.skipped_steps == 0
    assert engine.loss is not engine.module.loss, "the engine's own go before the module's"
    assert not engine.eval().training and engine.train().training and not engine.module.eval().training
    with pytest.raises(AttributeError, match=r"no train_batch here; use train_step\(batch\)"):
        engine.train_batch()
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = engine.nothing_of_the_kind


def test_names_of_deepspeeds_engine():
    engine = engine_of(stage=2)
    assert engine.get_batch_info() == (MICRO * GAS, MICRO, GAS) and engine.mp_world_size == 1
    assert engine.optimizer_name() == "adamw" and engine.get_mom() == [(0.9, 0.999)]
    assert engine.zero_optimization() and not engine_of().zero_optimization()
    assert not engine.fp16_enabled() and not engine.bfloat16_enabled()
    half = initialize(nn.Linear(2, 2), {"device": "cpu", "model": {"bf16": True}})[0]
    assert half.bfloat16_enabled() and not half.fp16_enabled()
    plain = engine_of(scheduler={}, optimizer={"type": "SGD", "params": {"lr": 0.5, "momentum": 0.25}})
    plain.set_lr(0.125)
    assert plain.get_lr() == [0.125] and plain.get_mom() == [0.25]
    plain.empty_partition_cache()
    plain.destroy()
    for name, instead in ELSEWHERE.items():
        assert not hasattr(engine, name), name
        with pytest.raises(AttributeError, match="the engine has no") as told:
            getattr(engine, name)
        assert str(told.value) == f"the engine has no {name} here; use {instead}"


def module_states(stage):
    engine = engine_of(2, stage)
    want = {name: p.clone() for name, p in Net().state_dict().items()}
    found = {name: p.clone() for name, p in engine.module_state_dict().items()}
    torch.testing.assert_close(found, want, rtol=0, atol=0)
    for checkpoint in ({"module": {n: w + 1 for n, w in want.items()}}, {n: w + 2 for n, w in want.items()}):
        engine.load_module_state_dict(checkpoint)
        again = {name: p.clone() for name, p in engine.module_state_dict().items()}
        torch.testing.assert_close(again, checkpoint.get("module", checkpoint), rtol=0, atol=0)
    engine.parallel.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_by_name(ranks, stage):
    ranks(module_states, stage, world=2)


def test_attributes_of_the_module_are_found():
    net = Net()
    net.config = {"name": "mine"}
    engine, *_ = initialize(net, {"device": "cpu"})
    assert engine.config == {"name": "mine"}


def test_a_boundary_that_the_loop_says_and_no_sync():
    """LLM trainers count themselves: backward without the division, the update where they say."""
    want, _ = one_process(1)
    engine = engine_of()
    for step in range(STEPS):
        with engine.no_sync():
            x = rows(step, 1)[0][0]
            engine.backward((engine(x) - x.sum(1, keepdim=True)).square().mean() / 2, scale_wrt_gas=False)
            with pytest.raises(ValueError, match="inside no_sync"):
                engine.step()
        x = rows(step, 1)[1][0]
        engine.backward((engine(x) - x.sum(1, keepdim=True)).square().mean())
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
    for got, its in zip(engine.module.parameters(), want, strict=True):
        torch.testing.assert_close(got, its, rtol=1e-10, atol=1e-12)


def test_nobody_said_that_a_step_waits():
    """Sizes left to a Trainer, or not given: a step updates, as in DeepSpeed, whatever our own defaults are."""
    sizes = dict.fromkeys(["train_batch_size", "train_micro_batch_size_per_gpu"], "auto")
    for config in (sizes, {"train_batch_size": 32}):
        engine, *_ = initialize(Net(), from_deepspeed(config, data_ranks=1).fields | {"device": "cpu"})
        assert engine.gradient_accumulation_steps() == 1
        assert engine.train_batch_size() == engine.train_micro_batch_size_per_gpu()
        engine.backward(engine.module.loss(rows(0, 1)[0][0]))
        engine.step()
        assert engine.global_steps == engine.micro_steps == 1


@pytest.mark.parametrize("loss", [torch.ones(2), 1.0, None], ids=str)
def test_a_loss_that_is_none(loss):
    with pytest.raises(ValueError, match="backward needs a loss of 1 number"):
        engine_of().backward(loss)


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_a_module_of_ones_own_is_16_bit_where_the_file_says_so(name, dtype):
    net = nn.Linear(2, 2).float()
    initialize(
        net, from_deepspeed({"train_batch_size": 1, name: {"enabled": True}}, data_ranks=1).fields | {"device": "cpu"}
    )
    assert net.weight.dtype == dtype
    net = nn.Linear(2, 2).double()
    initialize(
        net,
        from_deepspeed({"train_batch_size": 1, name: {"enabled": False}}, data_ranks=1).fields | {"device": "cpu"},
    )
    assert net.weight.dtype == torch.float64


def test_float16_carries_its_scale_once():
    """Also in a loss that is float16 itself, and in `engine.loss`, which carries it already."""
    config = DS | {
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "fp16": {"enabled": True, "initial_scale_power": 12},
    }
    config = {k: v for k, v in config.items() if k not in ("scheduler", "gradient_clipping")}
    torch.manual_seed(0)
    net, twin = nn.Linear(4, 1).half().float(), nn.Linear(4, 1)  # the engine makes it float16
    twin.load_state_dict(net.state_dict())
    fields = from_deepspeed(config, data_ranks=1).fields | {"device": "cpu"}
    engine, *_ = initialize(net, fields, loss_fn=lambda out, batch: ((out.float() * 0.1).square().sum(), out.numel()))
    x = torch.randn(2, 4)
    engine.backward((engine(x.half()) * 0.1).square().mean())
    engine.step()
    engine.backward(engine.loss({"input": x.half()}))
    engine.step()
    (twin(x) * 0.1).square().mean().backward()
    want = torch.cat([p.grad.flatten() for p in twin.parameters()]).norm()
    assert engine.was_step_applied() and engine.get_global_grad_norm() == pytest.approx(float(want), rel=1e-2)
    torch.testing.assert_close(net.bias.float(), twin.bias - 0.5 * twin.bias.grad, rtol=1e-3, atol=1e-4)


class Rows:
    def batch(self, step, rank=0, size=1):
        return {"input": rows(step, size)[:, rank].reshape(-1, 4)}


def test_batches_of_our_loader_are_cut():
    fields = from_deepspeed(DS, data_ranks=1).fields | {"device": "cpu"}
    fields["training"]["train_steps"] = STEPS

    def loss_fn(out, batch):
        return (out - batch["input"].sum(1, keepdim=True)).square().sum(), out.numel()

    engine, _, _, loader = initialize(Net(), fields, batches=Rows(), loss_fn=loss_fn)
    assert engine.training_dataloader is loader
    for micro in loader.microbatches():
        engine.backward(engine.loss(micro))
        engine.step()
    want, _ = one_process(1)
    assert engine.global_steps == STEPS and engine.micro_steps == STEPS * GAS
    for got, its in zip(engine.module.parameters(), want, strict=True):
        torch.testing.assert_close(got, its, rtol=1e-10, atol=1e-12)
    loader.step = 0
    with pytest.raises(ValueError, match=r"rows of all 2 microbatches.*loader.microbatches\(\)"):
        for batch in loader:
            engine.backward(engine.loss(batch))


def test_checkpoints_by_directory_and_tag(tmp_path):
    want, _ = one_process(1)
    engine = engine_of(stage=1)
    trained(engine, 1, last=2)
    engine.save_checkpoint(tmp_path, client_state={"epoch": 3, "best": [0.5, None]})
    engine.save_checkpoint(tmp_path, tag="best", save_latest=False)
    assert (tmp_path / "latest").read_text() == "global_step2" and (tmp_path / "best").is_dir()
    again = engine_of()
    path, client = again.load_checkpoint(str(tmp_path))
    assert path == str(tmp_path / "global_step2") and client == {"epoch": 3, "best": [0.5, None]}
    assert again.global_steps == 2 and again.micro_steps == 2 * GAS and again.get_lr() == engine.get_lr()
    trained(again, 1, first=2)
    for got, its in zip(again.module.parameters(), want, strict=True):
        torch.testing.assert_close(got, its, rtol=1e-10, atol=1e-12)
    warm = engine_of()
    assert warm.load_checkpoint(tmp_path, tag="best", load_module_only=True) == (str(tmp_path / "best"), {})
    assert warm.global_steps == 0
    for got, its in zip(warm.module.parameters(), engine.module.parameters(), strict=True):
        torch.testing.assert_close(got, its, rtol=0, atol=0)
    assert again.load_checkpoint(tmp_path / "best")[0] == str(tmp_path / "best"), "the checkpoint itself"


def test_checkpoints_that_are_not_there_or_cannot_be(tmp_path):
    engine = engine_of()
    with pytest.warns(UserWarning, match="has no file `latest` and is no checkpoint; nothing is loaded"):
        assert engine.load_checkpoint(tmp_path) == (None, None)
    for state in ({"model": torch.ones(2)}, {"sizes": {1: 2}}, {"pair": (1, 2)}):
        with pytest.raises(ValueError, match="JSON does not give back"):
            engine.save_checkpoint(tmp_path, client_state=state)
    with pytest.raises(ValueError, match="load_module_only=True"):
        engine.load_checkpoint(tmp_path, load_optimizer_states=False)
    with pytest.raises(ValueError, match="exclude_frozen_parameters"):
        engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    assert not list(tmp_path.iterdir())


# biases, output layer: after 3 updates of 2 microbatches by DeepSpeed 0.19.8's own engine, float32, on a CPU
THEIRS = {
    "adamw": [-0.8357628, -0.4418769, -0.0594831, 0.05837533, 0.441614, 0.8368614, -0.8606138, -0.4764809,
        -0.09487524, 0.130586, 0.4947541, 0.8694209, -1.118311],
    "adamw default decay": [-0.848565, -0.4491307, -0.06070145, 0.05941118, 0.449085, 0.8498309, -0.8716141,
        -0.4821888, -0.09547854, 0.1326845, 0.5015264, 0.8807683, -1.133928],
    "sgd": [-0.9335707, -0.5382106, -0.1711716, 0.169822, 0.5273102, 0.9177278, -0.8663921, -0.502952,
        -0.1602823, 0.1831913, 0.5220224, 0.8779677, -1.100734],
    "adamw clipped, warm": [-0.9988999, -0.5989386, -0.1989828, 0.1989773, 0.5989492, 0.9989247, -0.9989139,
        -0.5989612, -0.1989939, 0.1997377, 0.5990654, 0.998942, -1.000893],
    "muon": [-0.8368537, -0.4422742, -0.04916826, 0.04818531, 0.443525, 0.8397716, -0.921662, -0.5456223,
        -0.17893, 0.1989622, 0.5628857, 0.9328665, -1.131786],
}  # fmt: skip
PLAIN = {"lr": 0.05, "weight_decay": 0.1}
RUNS = {
    "adamw": {"optimizer": {"type": "AdamW", "params": PLAIN | {"torch_adam": True}}},
    "adamw default decay": {"optimizer": {"type": "Adam", "params": {"lr": 0.05, "torch_adam": True}}},
    "sgd": {"optimizer": {"type": "SGD", "params": PLAIN | {"momentum": 0.9}}},
    "adamw clipped, warm": {
        "optimizer": {"type": "AdamW", "params": PLAIN | {"torch_adam": True}},
        "gradient_clipping": 0.5,
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 8, "warmup_num_steps": 2}},
    },
    "muon": {"optimizer": {"type": "Muon", "params": PLAIN | {"torch_adam": True}}},
}


@pytest.mark.parametrize("name", RUNS)
def test_the_same_loop_gave_the_same_weights_there(name):
    """Muon's to bfloat16, in which both orthogonalise."""
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).float()
    for p in net.parameters():
        p.data = torch.linspace(-1, 1, p.numel(), dtype=torch.float32).reshape(p.shape)
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    engine, *_ = initialize(net, from_deepspeed(sizes | RUNS[name], data_ranks=1).fields | {"device": "cpu"})
    for i in range(6):
        x = torch.cos(torch.arange(8, dtype=torch.float32) * (i + 1)).reshape(2, 4)
        engine.backward((engine(x) - x.sum(1, keepdim=True)).square().mean())
        engine.step()
    got = torch.cat([p.detach().flatten() for p in list(net.parameters())[1:]])
    allowed = 1e-3 if name == "muon" else 2e-6
    torch.testing.assert_close(got, torch.tensor(THEIRS[name], dtype=torch.float32), rtol=0, atol=allowed)
