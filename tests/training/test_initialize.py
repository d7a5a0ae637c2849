"""The facade: what it returns, each part by itself, the raw loop beside `train_step`, and mistakes."""

import gc
import itertools
import signal
import weakref

import pytest
import torch
from torch import nn

from core.models.gpt import GPTModel
from core.optimizer import OptimizerConfig, ShardedAdamW
from core.parallel_state import ParallelConfig, ParallelState
from core.training import RunConfig, initialize
from tests.training.tiny import S, prepared

STEPS = 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("corpus"))


def settings(made, **more):
    """Nested settings of a run that takes milliseconds; `more` under dotted names, __ for the dot."""
    found = {
        "model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48},
        "data": {"train": str(made.train), "valid": str(made.valid), "tokenizer": str(made.tokenizer)},
        "training": {"train_steps": STEPS, "global_batch_size": 8, "micro_batch_size": 8},
        "optimizer": {"lr": 1e-2, "lr_schedule": "constant", "lr_warmup_fraction": 0.0},
        "device": "cpu",
    }
    found["data"]["sequence_length"] = S
    for name, value in more.items():
        section, _, field = name.partition("__")
        found.setdefault(section, {})[field] = value
    return found


def by_train_step(config):
    model, _, _, loader = initialize(config=config)
    return [float(model.train_step(batch).loss) for batch in loader]


def by_hand(config):
    model, optimizer, scheduler, loader = initialize(config=config)
    losses = []
    for batch in loader:
        loss = model.loss(batch)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_the_raw_loop_and_train_step_give_the_same_losses(corpus):
    """Also in the step that holds the last sample of the epoch, which is filled up."""
    mine, theirs = by_hand(settings(corpus)), by_train_step(settings(corpus))
    assert mine == pytest.approx(theirs, rel=1e-6) and theirs[-1] < theirs[0] - 0.1


def test_the_raw_loop_of_float16_weights(corpus):
    """Its gradients carry the loss scale, the loss does not."""
    config = settings(corpus, model__fp16=True, optimizer__initial_loss_scale=2.0**10)
    mine, theirs = by_hand(config), by_train_step(config)
    assert mine == pytest.approx(theirs, rel=2e-3) and theirs[-1] < theirs[0] - 0.1


def test_calling_the_model_gives_losses_per_token(corpus):
    model, *_, loader = initialize(config=settings(corpus))
    batch = loader.batch(0)
    losses = model(batch["tokens"], labels=batch["labels"])
    assert losses.shape == (8, S) and model.loss(batch).item() == pytest.approx(losses.mean().item())


def test_microbatches_change_nothing(corpus):
    assert by_train_step(settings(corpus, training__micro_batch_size=2)) == pytest.approx(by_hand(settings(corpus)))


def under_a_layout(made, more):
    """In a pool process, whose world exists already."""
    model, _, _, loader = initialize(config=settings(made, training__micro_batch_size=4, **more))
    losses = [float(model.train_step(batch).loss) for batch in loader]
    rows = loader.batch(0)["tokens"].shape[0]
    model.parallel.destroy()
    return losses, rows


@pytest.mark.parametrize(
    "more", [{"data_parallel__zero_stage": 3}, {"parallel__pipeline": 2}, {"parallel__tensor": 2}]
)
def test_any_layout_under_the_same_call(ranks, corpus, more):
    (first, rows), (second, _) = ranks(under_a_layout, world=2, made=corpus, more=more)
    assert first == second == pytest.approx(by_train_step(settings(corpus)), rel=1e-5)
    assert rows == (4 if "data_parallel__zero_stage" in more else 8)


def test_each_part_works_alone(corpus):
    model, optimizer, scheduler, loader = initialize(
        config=settings(corpus, optimizer__lr_schedule="cosine", optimizer__lr_warmup_steps=2)
    )
    assert isinstance(optimizer, ShardedAdamW) and isinstance(model.module, GPTModel)
    rates = [scheduler.at(step) for step in range(STEPS)]
    assert rates[0] == pytest.approx(5e-3) and rates[1] == pytest.approx(1e-2) and rates[-1] < rates[1]
    own = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    follower = scheduler.for_optimizer(own)
    seen = []
    for batch in itertools.islice(loader, STEPS):
        told = model.train_step(batch)
        assert (
            told.learning_rate == scheduler.get_last_lr()[0]
            and int(told.num_tokens) == (batch["labels"] != -100).sum()
        )
        seen.append(own.param_groups[0]["lr"])
        own.step()
        follower.step()
    assert seen == pytest.approx(rates) and model.global_steps == STEPS and len(loader) == 0
    assert float(model.evaluate(loader.batch(0)).loss) < 5.6


def test_the_loader_resumes_from_one_integer(corpus):
    *_, loader = initialize(config=settings(corpus))
    unbroken = [batch["tokens"] for batch in loader]
    *_, again = initialize(config=settings(corpus))
    first = next(iter(again))
    assert torch.equal(first["tokens"], unbroken[0]) and again.state_dict() == {"step": 1}
    *_, resumed = initialize(config=settings(corpus))
    resumed.load_state_dict({"step": 2})
    assert len(resumed) == STEPS - 2
    assert all(torch.equal(batch["tokens"], old) for batch, old in zip(resumed, unbroken[2:], strict=True))


def test_a_checkpoint_of_the_facade_goes_on_bit_for_bit(corpus, tmp_path):
    config = settings(corpus, model__dropout=0.1)
    unbroken = by_train_step(config)
    model, _, _, loader = initialize(config=config)
    for batch in itertools.islice(loader, 2):
        model.train_step(batch)
    model.save_checkpoint(tmp_path / "saved")
    model.close()
    for goes_on in (
        settings(corpus, model__dropout=0.1, checkpoint__load=str(tmp_path / "saved" / "global_step2")),
        config,
    ):
        model, _, _, loader = initialize(config=goes_on)
        if goes_on is config:
            assert model.load_checkpoint(tmp_path / "saved") == (str(tmp_path / "saved" / "global_step2"), {})
        assert loader.step == model.global_steps == 2
        assert [float(model.train_step(batch).loss) for batch in loader] == unbroken[2:]


def test_train_step_saves_as_the_configuration_says(corpus, tmp_path):
    config = settings(corpus, checkpoint__directory=str(tmp_path / "kept"), checkpoint__every=3)
    model, _, _, loader = initialize(config=config)
    losses = [float(model.train_step(batch).loss) for batch in itertools.islice(loader, 3)]
    model.close()
    assert [p.name for p in tmp_path.glob("kept/step-*")] == ["step-00000003"]
    model, _, _, loader = initialize(config=config)
    assert model.global_steps == loader.step == 3
    losses += [float(model.train_step(batch).loss) for batch in loader]
    model.close()
    assert losses == by_train_step(settings(corpus))
    assert sorted(p.name for p in tmp_path.glob("kept/step-*")) == ["step-00000003", "step-00000004"]


def test_a_signal_ends_the_loader_after_a_save(corpus, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    model, _, _, loader = initialize(config=settings(corpus, checkpoint__directory=str(tmp_path / "kept")))
    for batch in loader:
        if model.global_steps == 1:
            signal.raise_signal(signal.SIGTERM)
        model.train_step(batch)
    assert model.global_steps == 2 and len(loader) == STEPS - 2
    assert [p.name for p in tmp_path.glob("kept/step-*")] == ["step-00000002"]
    model.close()
    assert signal.getsignal(signal.SIGTERM) is before


class Squares:
    """Batches for a module that is no GPT: x [b, 4] and y [b, 1]."""

    def batch(self, step, rank=0, size=1):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step % 3))
        mine = slice(8 * rank // size, 8 * (rank + 1) // size)
        return {"input": x[mine], "y": x.sum(1, keepdim=True)[mine]}


def squared_error(output, batch):
    return (output - batch["y"]).square().sum(), output.numel()


def test_any_module_with_its_own_batches_and_loss():
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    config = {"training": {"train_steps": 60, "global_batch_size": 8}, "optimizer": {"lr": 0.1}, "device": "cpu"}
    model, _, _, loader = initialize(net, config, batches=Squares(), loss_fn=squared_error)
    losses = [float(model.train_step(batch).loss) for batch in loader]
    assert model.module is net and losses[-1] < 1e-2 * losses[0]
    loader = initialize(nn.Linear(4, 1), config).loader
    assert not loader
    with pytest.raises(ValueError, match=r"0 batches, so its loader has none; .*batches=\.\.\."):
        list(loader)


def test_a_model_of_ones_own_is_checked_against_the_text(corpus):
    config = RunConfig.from_dict(settings(corpus))
    parts = config.model.transformer(), config.model.spec()
    small = GPTModel(*parts, 100, S, parallel=ParallelState.single("cpu"))
    with pytest.raises(ValueError, match=r"vocabulary of 100, .* of 280"):
        initialize(small, config)
    short = GPTModel(*parts, 280, S - 1, parallel=ParallelState.single("cpu"))
    with pytest.raises(ValueError, match=r"15.*sequence_length=16"):
        initialize(short, config)


def test_a_pipeline_cannot_be_called_alone(ranks, corpus):
    assert all("use train_step(batch)" in text for text in ranks(calls_a_stage, world=2, made=corpus))


def calls_a_stage(made):
    model, *_, loader = initialize(config=settings(made, parallel__pipeline=2))
    try:
        model(loader.batch(0)["tokens"])
    except ValueError as error:
        return str(error)
    finally:
        model.parallel.destroy()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"optimizer__lrr": 1}, "optimizer.lr"),
        ({"parallel__tensor": 2}, "world size 1"),
        ({"training__micro_batch_size": 3}, "global_batch_size=8"),
    ],
)
def test_mistakes_are_told_before_anything_is_built(corpus, more, message, monkeypatch):
    monkeypatch.setattr("core.training.run.engine.initialize.join_world", lambda *args: pytest.fail("joined a world"))
    with pytest.raises(ValueError, match=message):
        initialize(config=settings(corpus, **more))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run.toml",), "model is 'run.toml', 1 nn.Module is needed; a configuration is given by name"),
        ((nn.Linear,), "model is the class Linear"),
    ],
)
def test_what_is_given_in_the_wrong_place(arguments, message):
    with pytest.raises(ValueError, match=message):
        initialize(*arguments)
    with pytest.raises(ValueError, match="batches is a list with 0 of the 1 method needed"):
        initialize(nn.Linear(4, 1), batches=[])


def test_a_path_and_a_config_do_the_same(corpus, tmp_path):
    run = RunConfig.from_dict(settings(corpus))
    (tmp_path / "run.toml").write_text(run.to_toml())
    assert by_train_step(tmp_path / "run.toml") == by_train_step(run)


def test_a_model_laid_out_otherwise_is_refused(corpus):
    config = RunConfig.from_dict(settings(corpus))
    other = ParallelState(ParallelConfig(data=1, order=("dp", "pp", "cp", "tp")))
    model = GPTModel(config.model.transformer(), config.model.spec(), 280, S, parallel=other)
    with pytest.raises(ValueError, match="laid out as"):
        initialize(model, config)


def test_the_optimizer_is_the_configurations(corpus):
    config = OptimizerConfig(lr=3e-3, weight_decay=0.0)  # of a constant rate
    _, optimizer, scheduler, _ = initialize(config=settings(corpus, optimizer__lr=3e-3, optimizer__weight_decay=0.0))
    assert optimizer.config == config and scheduler.get_last_lr() == [3e-3]


def test_a_plain_loop_goes_on_after_train_step(corpus):
    """With `zero_grad` first; without it the used gradients are refused, not added to."""
    model, optimizer, _, loader = initialize(config=settings(corpus))
    batches = iter(loader)
    model.train_step(next(batches))
    with pytest.raises(ValueError, match="used up by step 1; call zero_grad"):
        model.loss(next(batches)).backward()
        optimizer.step()
    optimizer.zero_grad()
    loss = model.loss(next(batches))
    loss.backward()
    optimizer.step()
    assert model.global_steps == 2 and loss.item() < 5.6


def test_deterministic_operations_are_for_a_loop_of_ones_own_too(corpus):
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        initialize(config=settings(corpus, training__deterministic=True))
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("saves", [False, True])
def test_a_model_that_is_dropped_is_freed(corpus, tmp_path, saves):
    """With checkpoints once it is closed, which gives signals back; nothing waits for the end of the process."""
    more = {"checkpoint__directory": str(tmp_path / "kept"), "checkpoint__every": 2} if saves else {}
    model, optimizer, _, loader = initialize(config=settings(corpus, **more))
    for batch in loader:
        model.train_step(batch)
    reference = weakref.ref(next(model.module.parameters()))
    if saves:
        model.close()
    del model, optimizer, loader, _
    gc.collect()
    assert reference() is None


def test_a_module_without_a_loss_is_told(corpus):
    """`loss_fn` forgotten, or None: logits and means are no losses of labels, and their sum would be one silently."""
    config = {"training": {"train_steps": 3, "global_batch_size": 8}, "device": "cpu"}
    batch = {"input": torch.randn(8, 4), "labels": torch.zeros(8, dtype=torch.long)}
    model, *_ = initialize(nn.Linear(4, 3), config)
    with pytest.raises(ValueError, match=r"gave \[2, 3\] for labels \[2\].*takes 1 loss per label.*give a loss_fn"):
        model.train_step(batch)
    model, *_ = initialize(nn.Linear(4, 3), config, loss_fn=None)
    with pytest.raises(ValueError, match=r"given loss_fn=None, and this step computes a loss; give loss_fn\(output"):
        model.train_step(batch)
