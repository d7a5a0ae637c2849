"""The loop over a tiny model: it learns, stops at NaN, validates when told to, and its first step can be compared."""

import dataclasses
import math
from dataclasses import replace

import pytest
import torch

from core.models.gpt import GPTModel
from core.optimizer import OptimizerConfig, StepStats
from core.parallel_state import ParallelState
from core.pipeline import SingleStage, StepResult
from core.training import PipelineConfig, evaluate_bits_per_byte, next_token_loss, train
from core.training.log.metrics import MetricsLog, flops_per_token
from core.training.model.begin import build_stages
from core.training.run import loop
from core.training.run.compare import first_step_alone
from core.training.run.data import open_corpus
from core.training.run.evaluate import TextLoss
from tests.states import state
from tests.training.tiny import MODEL, S, data_config, prepared, training_config
from tests.twins.adamw import AdamW
from tests.twins.per_parameter import PerParameterGradSync


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("corpus"))


class Job:
    """Everything that a loop needs, on the ranks of `ps`."""

    def __init__(self, ps, made, lr=1e-2, **training):
        self.ps, self.data, self.training = ps, data_config(made), training_config(**training)
        self.corpus = open_corpus(self.data, self.training, ps)
        vocab, self.config = self.corpus.tokenizer.vocab_size, MODEL.transformer()
        self.model = GPTModel(
            self.config,
            MODEL.spec(),
            vocab,
            S,
            parallel=ps,
            share_embeddings_and_output_weights=True,
            seed=MODEL.seed,
        )
        sync = PerParameterGradSync(self.model, ps)
        self.optimizer = AdamW(self.model, ps, OptimizerConfig(lr=lr), grad_sync=sync)
        rows = self.training.global_batch_size // ps.size("dp") // self.training.micro_batch_size
        self.executor = SingleStage(self.model, ps=ps, num_microbatches=rows, grad_sync=sync, seed=1234)
        self.batches = self.corpus.train
        self.log, self.said = MetricsLog(None), []

    def batch(self, step):
        return self.batches.batch(step, self.ps.index("dp"), self.ps.size("dp"))

    def run(self, **more):
        flops = flops_per_token(self.config, self.corpus.tokenizer.vocab_size, S)
        say = self.said.append
        facts = {"flops_per_token": flops, "log": self.log, "say": say} | more
        return train(self.executor, self.optimizer, facts.pop("batch_of", self.batch), self.training, **facts)

    def bits(self):
        rows = self.corpus.validation(self.ps.index("dp"), self.ps.size("dp"))
        return evaluate_bits_per_byte(self.executor, rows, len(self.corpus.valid_text))


def alone(made, **more):
    return Job(ParallelState.single("cpu"), made, **more)


def test_the_loss_falls_and_every_record_is_true(made):
    job = alone(made, train_steps=25, log_interval=10)
    before, first = job.bits(), job.run()
    records = job.log.records
    assert [r.step for r in records] == [1, 10, 20, 25]
    assert [line[:14] for line in job.said] == [f"step {n:5d}/25 |"[:14] for n in (1, 10, 20, 25)]
    assert records[0].loss == first.loss and records[0].grad_norm == first.grad_norm
    assert records[0].loss == pytest.approx(math.log(job.corpus.tokenizer.vocab_size), abs=0.2)
    assert records[-1].loss < records[0].loss - 2 and job.bits() < before - 2
    for r in records:
        assert r.tokens == 8 * S and r.learning_rate == 1e-2
        # the window at the end of an epoch has fewer tokens, and steps are averaged over the interval
        assert r.tokens_per_s == pytest.approx(1e3 * r.tokens / r.step_ms, rel=0.02)
        assert r.tflops_per_s == pytest.approx(
            r.tokens_per_s * flops_per_token(job.config, job.corpus.tokenizer.vocab_size, S) / 1e12
        )


class Unread:
    """A number on a device that waits for nobody, until somebody reads it."""

    def __init__(self, value, reads):
        self.value, self.reads = value, reads

    def __float__(self):
        self.reads.append(self.value)
        return float(self.value)

    __int__ = __float__

    def __add__(self, other):
        return Unread(self.value + (other.value if isinstance(other, Unread) else other), self.reads)

    __radd__ = __add__


class Steps:
    """Stands in for executor and optimizer: steps whose results remember when they were read."""

    learning_rate, loss_scale, device = 0.0, 1.0, torch.device("cpu")

    def __init__(self):
        self.steps, self.reads = 0, []

    def zero_grad(self):
        pass

    def step(self, *args, num_tokens=None):
        if num_tokens is not None:
            return StepStats(self, torch.tensor(False), torch.tensor(0))
        self.steps += 1
        return StepResult(self, self)

    def __float__(self):
        self.reads.append(self.steps)
        return 1.0

    def __int__(self):
        return int(float(self))

    __radd__ = __add__ = __truediv__ = lambda self, other: self


@pytest.mark.parametrize("bar", [False, True])
def test_a_step_that_is_not_logged_is_not_waited_for(bar, monkeypatch):
    """Reading a number waits for the device; a bar moves with every step, and on an accelerator shows the loss of the
    step before, which is on the host by then."""
    job, moved, copies = Steps(), [], []

    class Copy:
        def __init__(self, tensor):
            self.made_after = job.steps

        def read(self):
            copies.append((self.made_after, job.steps))
            return 0.0

    monkeypatch.setattr(loop, "HostCopy", Copy)
    monkeypatch.setattr(loop, "reading_waits", lambda device: True)
    train(
        job,
        job,
        lambda step: {},
        training_config(train_steps=7, log_interval=3),
        flops_per_token=1,
        log=MetricsLog(None),
        say=lambda line: None,
        every_step=(lambda step, loss: moved.append(step)) if bar else None,
    )
    assert set(job.reads) == {1, 3, 6, 7}
    assert copies == ([(1, 1), *((step - 1, step) for step in range(2, 8))] if bar else [])
    assert moved == (list(range(1, 8)) if bar else [])


@pytest.mark.parametrize("every_step", [None, lambda step, loss: None], ids=["lines", "bar"])
def test_validation_comes_at_its_own_interval(made, every_step):
    """Whoever logs or shows a bar: all ranks must come to the same validations."""
    job, calls = alone(made, train_steps=8, log_interval=4, eval_interval=3), []
    text = TextLoss(loss_sum=10 * math.log(2), tokens=10, num_bytes=8)

    def validate():
        calls.append(job.executor.step_index)
        return {"validation": text, "books": replace(text, loss_sum=text.loss_sum / len(calls))}

    job.run(every_step=every_step, validate=validate, tokens_per_step=64)
    assert calls == [3, 6, 8], "and at the end"
    lines = [line for line in job.said if "validation" in line]
    assert lines == [
        "step     3/8 | validation 1.2500 bits per byte | perplexity 2 | best",
        "step     6/8 | validation 1.2500 bits per byte | perplexity 2",
        "step     8/8 | validation 1.2500 bits per byte | perplexity 2",
    ]
    assert "step     8/8 | books 0.4167 bits per byte | perplexity 1.26 | best" in job.said
    found = [(r.step, r.name, r.tokens_seen, r.best) for r in job.log.validations if r.name == "books"]
    assert found == [(n, "books", 64 * n, True) for n in (3, 6, 8)]
    assert [r.tokens_seen for r in job.log.records] == [64 * r.step for r in job.log.records]


def test_records_tell_what_part_of_the_peak_was_used_and_the_memory(made):
    job = alone(made, train_steps=2, log_interval=1)
    job.run(peak_flops=1e12)
    for record, line in zip(job.log.records, job.said, strict=True):
        assert record.mfu == pytest.approx(record.tflops_per_s) and f" | mfu {record.mfu:.1%} | " in line
        assert record.memory_mib > 50 and record.skipped == 0
    without = alone(made, train_steps=1)
    without.run()
    assert without.log.records[0].mfu is None and "mfu" not in without.said[0]


def test_a_peak_that_is_passed_is_none(made):
    job = alone(made, train_steps=1)
    job.run(peak_flops=1.0)
    assert job.log.records[0].mfu is None and "mfu" not in job.said[0]


def test_an_overflow_of_float16_is_one_short_line(made):
    job = alone(made, train_steps=1)
    step = job.optimizer.step
    job.optimizer.step = lambda num_tokens: dataclasses.replace(
        step(num_tokens=num_tokens), skipped=torch.tensor(True), found_inf=torch.tensor(True)
    )
    job.optimizer.loss_scale = torch.tensor(32768.0)
    job.optimizer.non_finite = lambda: pytest.fail("nobody asked")
    job.run()
    assert job.said[-1] == "step     1/1 | skipped: float16 overflow | loss scale 32768"


def test_skipped_steps_are_counted_between_two_records(made):
    job = alone(made, train_steps=6, log_interval=3)
    step, calls = job.optimizer.step, []

    def skipping(num_tokens):
        calls.append(1)
        stats = step(num_tokens=num_tokens)
        skipped, is_spike = len(calls) in (2, 3, 5), len(calls) == 5
        median = stats.grad_norm / 4
        return dataclasses.replace(
            stats,
            skipped=torch.tensor(skipped),
            found_inf=torch.tensor(skipped and not is_spike),
            median_norm=median,
        )

    job.optimizer.step, job.optimizer.non_finite = skipping, lambda: ["a.weight"]
    job.run()
    assert [(r.step, r.skipped, r.spikes) for r in job.log.records] == [(1, 0, 0), (3, 2, 0), (6, 1, 1)]
    assert [line for line in job.said if "skipped" in line] == [
        "step 3 was skipped; not finite: a.weight",
        "1 steps since the last line were skipped, 1 of them as spikes of the gradient norm",
    ]


def test_a_spike_is_told_with_its_norm_and_the_median(made):
    job = alone(made, train_steps=2, log_interval=1)
    step = job.optimizer.step

    def spiking(num_tokens):
        stats, yes = step(num_tokens=num_tokens), torch.tensor(True)
        return dataclasses.replace(stats, grad_norm=torch.tensor(8.0), skipped=yes, median_norm=torch.tensor(2.0))

    job.optimizer.step, job.optimizer.non_finite = spiking, lambda: pytest.fail("nobody asked")
    job.run()
    assert job.said[-1] == "step 2 was skipped; the gradient norm 8 is 4 times the median 2 of those before"


def test_validation_time_is_not_counted_as_training(made, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("core.training.run.loop.time.perf_counter", lambda: now[0])

    def tick(seconds, value):
        now[0] += seconds
        return value

    job = alone(made, train_steps=4, log_interval=2, eval_interval=1)
    job.run(
        batch_of=lambda step: tick(1, job.batch(step)),
        validate=lambda: tick(100, {"validation": TextLoss(1.0, 1, 1)}),
    )
    assert [r.step_ms for r in job.log.records] == pytest.approx([1000] * 3)


def test_without_an_interval_the_loop_validates_at_the_end(made):
    job, calls = alone(made, train_steps=2), []
    job.run(validate=lambda: calls.append(job.executor.step_index) or {})
    assert calls == [2] and job.log.validations == []


def test_a_loss_that_is_not_a_number_ends_the_run(made):
    job = alone(made, train_steps=9, log_interval=3)

    job.optimizer.non_finite = lambda: ["a.weight"]

    def batch_of(step):
        if step == 4:
            job.model.decoder.final_layernorm.weight.data.fill_(torch.nan)
        return job.batch(step)

    with pytest.raises(
        RuntimeError, match=r"the loss of step 5 is not a number; not finite in its gradient: a.weight; lower"
    ):
        job.run(batch_of=batch_of)
    assert [r.step for r in job.log.records] == [1, 3], "found at the next line"


def test_a_resumed_run_goes_on_and_a_finished_one_says_so(made):
    job = alone(made, train_steps=5, log_interval=2)
    steps = []
    job.run(start=3, batch_of=lambda step: steps.append(step) or job.batch(step))
    assert steps == [3, 4] and [r.step for r in job.log.records] == [4, 5]
    with pytest.raises(ValueError, match="train_steps=5 leaves nothing to do after step 5"):
        job.run(start=5)


def test_the_loss_counts_only_labels(made):
    labels = torch.tensor([[1, -100, 2]])
    total, tokens = next_token_loss(torch.tensor([[1.0, 0.0, 2.5]]), {"labels": labels})
    assert (total.item(), tokens.item()) == (3.5, 2)


def run_here(made, tp, sp):
    torch.set_default_dtype(torch.float32)  # the configuration says float32 or bfloat16, whatever the default
    job = Job(state(tp=tp, sp=sp), made, train_steps=3, log_interval=1)
    first = job.run()
    vocab, single = job.corpus.tokenizer.vocab_size, ParallelState.single("cpu")
    full = build_stages(MODEL, PipelineConfig(), vocab, job.data.sequence_length, single)
    other = first_step_alone(full[0], job.training, job.batches)
    return first, other, [r.loss for r in job.log.records], job.bits(), first.against(other)


@pytest.mark.parametrize(
    "world, tp, sp",
    [
        (4, 2, True),
        *(pytest.param(*case, marks=pytest.mark.full) for case in [(2, 2, True), (2, 1, False), (4, 1, False)]),
    ],
)
def test_every_layout_tells_the_same_first_step(ranks, made, world, tp, sp):
    job = alone(made, train_steps=3, log_interval=1)
    want = job.run()
    for first, other, losses, bits, line in ranks(run_here, made, tp, sp, world=world):
        assert (other.loss, other.grad_norm) == pytest.approx((want.loss, want.grad_norm), rel=1e-6)
        assert (first.loss, first.grad_norm) == pytest.approx((want.loss, want.grad_norm), rel=1e-4)
        assert losses == pytest.approx([r.loss for r in job.log.records], rel=1e-3)
        assert bits == pytest.approx(job.bits(), rel=1e-3)
        shown = float(line.rpartition(" ")[2])
        exact = max(abs(first.loss - other.loss), abs(first.grad_norm - other.grad_norm))
        assert shown == pytest.approx(exact, rel=0.06, abs=1e-12) and shown < 1e-4
        assert line.startswith(f"first step here and in one process: loss {first.loss:.6f} and {other.loss:.6f}, ")
