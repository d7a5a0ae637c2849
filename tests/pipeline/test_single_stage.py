"""The step of a model that is whole on every rank equals one process with one big batch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from core.autograd import StageContext
from core.optimizer import OptimizerConfig
from core.parallel_state import ParallelState
from core.pipeline import SingleStage
from core.pipeline.run.step import stage_seed
from tests.states import state
from tests.twins.adamw import AdamW
from tests.twins.per_parameter import PerParameterGradSync

ALONE = ParallelState.single("cpu")
MASK = [
    [1, 1, 0],
    [0, 1, 0],
    [1, 1, 1],
    [1, 0, 0],
    [0, 1, 1],
    [0, 0, 0],
    [0, 0, 0],
    [0, 0, 0],
]  # rank 3 of 4: nothing


class Net(nn.Module):
    """tokens [b, s] -> logits [b, s, 5]."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(4)
        self.embedding = nn.Embedding(7, 6, dtype=torch.float64)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(6, 5, dtype=torch.float64)

    def forward(self, tokens):
        return self.head(self.dropout(self.embedding(tokens)).tanh())


def a_batch():
    random = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 7, (8, 3), generator=random)
    labels = torch.randint(0, 5, (8, 3), generator=random)
    return {"tokens": tokens, "labels": labels, "loss_mask": torch.tensor(MASK, dtype=torch.float64)}


def masked_loss(logits, part):
    losses = F.cross_entropy(logits.flatten(0, 1), part["labels"].flatten(), reduction="none")
    return (losses * part["loss_mask"].flatten()).sum(), part["loss_mask"].sum()


def mine(batch, ps):
    """This rank's samples, and of those its part of the sequence (uneven: 3 positions over 2 ranks)."""
    rows = {k: v.chunk(ps.size("dp"))[ps.index("dp")] for k, v in batch.items()}
    return {k: v.tensor_split(ps.size("cp"), dim=1)[ps.index("cp")] for k, v in rows.items()}


def steps(num_microbatches, dropout=0.0, cp=1):
    """Three steps on this rank's part of the batch: results, first gradients, parameters at the end."""
    ps = state(cp=cp)
    model = Net(dropout)
    sync = PerParameterGradSync(model, ps)
    executor = SingleStage(model, ps=ps, num_microbatches=num_microbatches, grad_sync=sync, seed=11)
    optimizer = AdamW(model, ps, OptimizerConfig(lr=0.1, clip_grad=0.1), grad_sync=sync)
    results, gradients = [], None
    for _ in range(3):
        result = executor.step(mine(a_batch(), ps), masked_loss, loss_scale=4.0)
        gradients = gradients or [p.main_grad.clone() for p in model.parameters()]
        norm = optimizer.step(num_tokens=result.num_tokens, loss_scale=4.0).grad_norm
        optimizer.zero_grad()
        results.append((result.loss_sum.item(), result.num_tokens.item(), result.loss.item(), norm.item()))
    assert executor.step_index == 3 and not executor.stage.driven
    return results, gradients, [p.detach() for p in model.parameters()]


def reference():
    """The same in plain torch: one process, the mean over valid tokens, clipped."""
    model, batch = Net(), a_batch()
    decays = [[model.embedding.weight, model.head.weight], [model.head.bias]]
    groups = [{"params": ps, "weight_decay": wd} for ps, wd in zip(decays, (0.01, 0.0), strict=True)]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    results, gradients = [], None
    for _ in range(3):
        optimizer.zero_grad()
        loss_sum, tokens = masked_loss(model(batch["tokens"]), batch)
        (loss_sum / tokens).backward()
        gradients = gradients or [p.grad * tokens * 4.0 for p in model.parameters()]
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        results.append((loss_sum.item(), tokens.item(), (loss_sum / tokens).item(), norm.item()))
    return results, gradients, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    ("world", "cp", "num_microbatches"),
    [(1, 1, 1), (1, 1, 4), (2, 1, 1), (2, 1, 2), (4, 1, 1), (4, 1, 2), (2, 2, 2), (4, 2, 2)],
)
def test_steps_equal_one_process_with_one_batch(ranks, world, cp, num_microbatches):
    results, gradients, parameters = reference()
    everyone = ranks(steps, world=world, cp=cp, num_microbatches=num_microbatches)
    for got_results, got_gradients, got_parameters in everyone:
        assert [x for r in got_results for x in r] == pytest.approx([x for r in results for x in r], rel=1e-12)
        for got, want in zip(got_gradients, gradients, strict=True):
            assert (got - want).abs().max() <= 1e-12 * want.abs().max()
        for got, want in zip(got_parameters, parameters, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
        assert all(map(torch.equal, got_parameters, everyone[0][2])), "replicas keep the same bits"


def test_dropout_does_not_depend_on_who_computes_a_microbatch(ranks):
    """4 microbatches of two samples: on one rank, on two, on four."""
    runs = [ranks(steps, world=n, num_microbatches=4 // n, dropout=0.4)[0] for n in (1, 2, 4)]
    assert runs[0][0][0][0] != pytest.approx(reference()[0][0][0], rel=1e-6), "dropout is on"
    for run in runs[1:]:
        assert [x for r in run[0] for x in r] == pytest.approx([x for r in runs[0][0] for x in r], rel=1e-12)


class Watching(nn.Linear):
    """A model with a stage of its own: writes down what the executor set, and the events around it."""

    def __init__(self, events):
        super().__init__(2, 1, bias=False, dtype=torch.float64)
        self.stage, self.events = StageContext(), events

    def forward(self, x):
        s = self.stage
        self.events.append(("forward", s.seed, s.step, s.microbatch, s.bag, s.driven, self.training))
        return super().forward(x)


class Sync:
    def __init__(self, events, model):
        self.events, self.model = events, model

    def begin_step(self, pairs):
        self.events.append(("begin_step", [pairs[p] for p in self.model.parameters()]))

    def __getattr__(self, name):
        return lambda *a: self.events.append((name, *(x is self.model for x in a)))


def summed(y, _):
    return y.sum(), y.shape[0]


def on_rank():
    ps, events = state(), []
    model = Watching(events)
    executor = SingleStage(model, ps=ps, num_microbatches=2, grad_sync=Sync(events, model), seed=9)
    executor.step_index = 5
    model.weight.register_hook(lambda g: events.append(("gradient",)))
    executor.step(torch.ones(4, 2), summed)
    assert executor.stage is model.stage and not model.stage.driven and executor.step_index == 6
    return events


def test_the_order_of_a_step(ranks):
    def one(microbatch):
        return [
            ("before_forward", True),
            ("forward", 9, 5, microbatch, None, True, True),
            ("before_input_grad", True),
            ("gradient",),
            ("after_input_grad", True),
            ("after_weight_grad", True),
        ]

    for rank, events in enumerate(ranks(on_rank, world=2)):
        want = [("begin_step", [2]), *one(2 * rank), *one(2 * rank + 1), ("stage_done", True), ("finish",)]
        assert events == want


def test_a_foreign_model_is_seeded_per_microbatch_and_the_users_state_is_untouched():
    model = Net(0.5)
    executor = SingleStage(model, ps=ALONE, num_microbatches=2, seed=3)
    before = torch.get_rng_state()
    result = executor.step(a_batch(), masked_loss)
    assert torch.equal(before, torch.get_rng_state())
    total = 0.0
    for m, part in enumerate(range(0, 8, 4)):
        piece = {k: v[part : part + 4] for k, v in a_batch().items()}
        torch.manual_seed(stage_seed(3, 0, m))
        total += masked_loss(model(piece["tokens"]), piece)[0].item()
    assert result.loss_sum.item() == pytest.approx(total, rel=1e-12)
    assert executor.step(a_batch(), masked_loss).loss_sum.item() != pytest.approx(total, rel=1e-6), "another step"


def evaluated():
    ps = state()
    model = Net(0.5)
    executor = SingleStage(model, ps=ps, num_microbatches=2)
    batch = mine(a_batch(), ps)
    model.train()
    model.head.eval()
    result = executor.evaluate(batch, masked_loss)
    assert model.training and model.dropout.training and not model.head.training, "modes are put back one by one"
    assert torch.is_grad_enabled() and executor.step_index == 0 and not executor.stage.driven
    return result.loss_sum.item(), result.num_tokens.item(), executor.forward(batch)


def test_evaluate_and_forward_are_the_plain_model(ranks):
    model, batch = Net(0.5).eval(), a_batch()
    with torch.no_grad():
        logits = model(batch["tokens"])
    want = masked_loss(logits, batch)
    got = ranks(evaluated, world=2)
    for loss_sum, tokens, _ in got:
        assert (loss_sum, tokens) == (pytest.approx(want[0].item(), rel=1e-12), want[1].item())
    torch.testing.assert_close(torch.cat([out for _, _, out in got]), logits)
    assert not got[0][2].requires_grad


def test_forward_joins_any_nesting():
    class Pair(nn.Module):
        def forward(self, x):
            return {"twice": 2 * x, "kind": "pair"}

    got = SingleStage(Pair(), ps=ALONE, num_microbatches=3).forward(torch.arange(6))
    assert got["twice"].tolist() == [0, 2, 4, 6, 8, 10] and got["kind"] == "pair"


def test_the_users_tensors_are_not_changed():
    batch, copy = a_batch(), a_batch()
    kept = []

    def loss_fn(logits, part):
        loss_sum, tokens = masked_loss(logits, part)
        kept.extend([(loss_sum, loss_sum.detach().clone()), (tokens, tokens.clone())])
        return loss_sum, tokens

    model = Net()
    before = [p.detach().clone() for p in model.parameters()]
    SingleStage(model, ps=ALONE, num_microbatches=2).step(batch, loss_fn, loss_scale=3.0)
    assert all(torch.equal(batch[k], copy[k]) for k in batch)
    assert all(torch.equal(now.detach(), then) and now._version == 0 for now, then in kept)
    assert all(map(torch.equal, model.parameters(), before))


def test_without_a_sync_gradients_stay_in_grad():
    model, twin, batch = Net(), Net(), a_batch()
    SingleStage(model, ps=ALONE, num_microbatches=4).step(batch, masked_loss, loss_scale=2.0)
    (2 * masked_loss(twin(batch["tokens"]), batch)[0]).backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_a_loss_without_gradient_needs_a_mask():
    executor = SingleStage(Net(), ps=ALONE)
    assert executor.step(a_batch(), lambda *_: (torch.zeros(()), 0)).num_tokens.item() == 0
    with pytest.raises(ValueError, match="over 24 tokens that depends on 0 trainable parameters"):
        executor.step(a_batch(), lambda out, _: (out.detach().sum(), 24))
    with pytest.raises(ValueError, match=r"a loss of shape \(8, 3\), not 1 number"):
        executor.step(a_batch(), lambda out, _: (out.sum(-1), 24))


@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_an_error_leaves_the_model_as_it_was(call):
    model = Net()
    executor = SingleStage(model, ps=ALONE)

    def fails(*_):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine") as error:
        getattr(executor, call)(a_batch(), fails)
    assert model.training and torch.is_grad_enabled() and not executor.stage.driven, error
    assert executor.step_index == 0


def refused():
    with pytest.raises(ValueError, match="runs 1 pipeline stage, this grid has 2"):
        SingleStage(Net(), ps=state(pp=2))


def test_more_than_one_stage_is_refused(ranks):
    ranks(refused, world=2)
    with pytest.raises(ValueError, match="num_microbatches=0"):
        SingleStage(Net(), ps=ALONE, num_microbatches=0)
