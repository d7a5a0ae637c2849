"""Any module is a stage: what crosses the walls is what crosses them in one process, and so are the gradients."""

import pytest
import torch
from torch import nn

from core.pipeline import PipelineError
from core.pipeline.run.arguments import ForwardArguments
from core.pipeline.run.step import call_next_stage
from tests.pipeline import tiny
from tests.pool import Pool

W = tiny.WIDTH


def linear(s, i=W, o=W):
    made = nn.Linear(i, o).double()
    generator = torch.Generator().manual_seed(7 + s)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2)
    return made


class Stage(nn.Module):
    """A linear layer with an odd interface, by kind."""

    def __init__(self, s, kind):
        super().__init__()
        self.kind, self.index, self.linear = kind, s, linear(s)
        self.extra = nn.Parameter(torch.full((W,), 0.5 + s, dtype=torch.float64))

    def forward(self, *args, **kwargs):
        return getattr(self, self.kind)(*args, **kwargs)

    def tuples(self, x, ids=None, factor=1.0, aside=None):
        """Non-tensors, an integer tensor passed through, an output that only the stage after next uses."""
        ids = torch.arange(len(x)) if ids is None else ids
        aside = x if aside is None else aside + x
        y = self.linear(x) * factor + ids[:, None]
        return y, ids, 1.5, aside * self.extra

    def dicts(self, x, nested=None, name="", **_):
        y = self.linear(x) + (0 if nested is None else nested["list"][0] * nested["list"][1])
        return {"x": y, "nested": {"list": [y * self.extra, x.square()], "text": "t"}, "name": f"a{self.index}"}

    def view(self, x):
        return self.linear(x.reshape(-1, W)).view(-1, W).t().t()[:, :].view_as(x)

    def strided(self, x):
        """Not contiguous: what is sent is not what lies in memory."""
        return self.linear(x if x.shape[-1] == W else x.t()).t() if self.index % 2 == 0 else self.linear(x.t())

    def unused(self, x, never=None):
        return self.linear(x), x * self.extra

    def twice(self, x, again=None):
        """One tensor as two outputs."""
        y = self.linear(x + (0 if again is None else 2 * again))
        return y, y

    def identity(self, x):
        return x if self.index in (1, 2) else self.linear(x)

    def frozen(self, x):
        self.linear.requires_grad_(self.index in (0, 3))
        return self.linear(x)

    def frozen_start(self, x):
        self.linear.requires_grad_(self.index > 1)
        return self.linear(x)

    def cut(self, x):
        """No gradient flows back from stage 2."""
        return self.linear(x.detach() if self.index == 2 else x)

    def no_parameters(self, x):
        if self.index in (1, 3):
            self._parameters.pop("extra", None)
            self._modules.pop("linear", None)
            return torch.sin(x)
        return self.linear(x)

    def scalars(self, x, total=None):
        """A tensor without dims, one without elements, one of booleans."""
        y = self.linear(x) * (1 if total is None else total[0])
        return y, (y.mean(), y[:0], y > 0)

    def low(self, x):
        """16 bits between the stages."""
        return self.linear(x.double()).bfloat16() if self.index < 3 else self.linear(x.double())

    def complex_numbers(self, x):
        y = self.linear(x.real if x.is_complex() else x)
        return torch.complex(y, x.real * self.extra) if self.index < 3 else y + (x.imag if x.is_complex() else 0)

    def many_dims(self, x):
        y = self.linear(x.reshape(-1, W))
        return y.reshape(*([1] * 9), -1, W) if self.index < 3 else y


class OneDict(nn.Module):
    """Its forward takes what the stage before returned as one dict."""

    def __init__(self, s):
        super().__init__()
        self.index, self.linear = s, linear(s)

    def forward(self, state):
        x = state["x"] if isinstance(state, dict) else state
        y = self.linear(x)
        before = state["before"] if isinstance(state, dict) else x
        return {"x": y, "before": y * before, "depth": self.index}


KINDS = [name for name, value in vars(Stage).items() if callable(value) and name not in ("__init__", "forward")]


def loss_of(output, _):
    value = output[0] if isinstance(output, tuple) else output["x"] if isinstance(output, dict) else output
    return value.double().square().sum(), len(value)


def composed(module, x):
    return module(x)


def compare_dicts(schedule, recompute):
    want_loss, want = tiny.alone(4, tiny.rows(8), loss_of, 4, OneDict, composed)
    pipe = tiny.pipeline(schedule, 4, OneDict, recompute=recompute)
    loss = pipe.step(tiny.rows(8), loss_of).loss_sum.item()
    tiny.assert_equal(tiny.gradients(pipe), want)
    pipe.close()
    return abs(loss - want_loss)


def chain(module, x):
    """Plain composition, called as the pipeline calls."""
    return module(x) if module.index == 0 else call_next_stage(module, x, None, ForwardArguments(("x",)))


def compare(kinds, schedules, recomputes):
    wrong = {}
    for kind in kinds:
        want_loss, want = tiny.alone(4, tiny.rows(8), loss_of, 4, lambda s: Stage(s, kind), chain)
        for schedule in schedules:
            for recompute in recomputes:
                pipe = tiny.pipeline(schedule, 4, lambda s: Stage(s, kind), recompute=recompute)
                loss = pipe.step(tiny.rows(8), loss_of).loss_sum.item()
                try:
                    assert abs(loss - want_loss) <= 1e-10 * abs(want_loss), f"loss {loss} {want_loss}"
                    tiny.assert_equal(tiny.gradients(pipe), want)
                except AssertionError as error:
                    wrong[kind, schedule, str(recompute)] = str(error)
                pipe.close()
    return wrong


@pytest.mark.parametrize("schedule, recompute", [("1f1b", "none"), ("zb-v", "stage")])
def test_a_stage_may_take_one_dict(ranks, schedule, recompute):
    world = 2 if schedule == "zb-v" else 4
    assert max(ranks(compare_dicts, schedule, recompute, world=world)) <= 1e-10


@pytest.mark.parametrize("world, schedules", [(2, ["interleaved-zb", "zb-v"])])
def test_odd_stages(ranks, world, schedules):
    assert ranks(compare, KINDS, schedules, ["none", "stage"], world=world) == [{}] * world


@pytest.mark.full
@pytest.mark.parametrize("world, schedules", [(4, ["1f1b", "gpipe", "zb-h1", "zb-h2"])])
def test_odd_stages_each_on_its_rank(ranks, world, schedules):
    assert ranks(compare, KINDS, schedules, ["none", "stage", ["stage", "none"] * 2], world=world) == [{}] * world


class Changing(nn.Module):
    """Its output changes between microbatches."""

    def __init__(self, s, what):
        super().__init__()
        self.inner, self.index, self.what, self.calls = tiny.part(s), s, what, 0

    def forward(self, x, other=None):
        y = self.inner(x.to(torch.float64)[:, :W])
        if self.index:
            return y
        self.calls += 1
        odd = self.calls > 2
        if self.what == "shape" and odd:
            return torch.cat((y, y), 1)
        if self.what == "dtype" and odd:
            return y.float()
        if self.what == "nesting" and odd:
            return (y,)
        return (y, self.calls) if self.what == "value" else y


SAME = "float64 before in this step"
TOLD = {
    "shape": f"stage 0 returns [1, 12] of float64 for microbatch 2, and returned [1, 6] of {SAME}",
    "dtype": f"stage 0 returns [1, 6] of float32 for microbatch 2, and returned [1, 6] of {SAME}",
    "nesting": SAME,
    "value": "other values beside its tensors for microbatch 1 than before in this step ([2] and [1])",
}


def refused(what):
    pipe = tiny.pipeline("1f1b", 4, lambda s: Changing(s, what))
    with pytest.raises(PipelineError) as error:
        pipe.step(tiny.rows(4), tiny.squares)
    return str(error.value)


@pytest.mark.parametrize("what", TOLD)
def test_trap_13_an_output_that_changes_within_a_step_is_refused(what):
    pool = Pool()
    try:
        for text in pool(refused, what):
            assert TOLD[what] in text and "rank 0, stage 0, microbatch" in text and "ValueError" in text
    finally:
        pool.close()


class AnyLength(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.inner = tiny.part(s)

    def forward(self, x):
        return self.inner(x)


def lengths():
    """Sequences of other lengths in every step, and in evaluation between them."""
    pipe = tiny.pipeline("zb-v", 2, AnyLength)
    for length in (3, 5, 1, 4):
        x = torch.randn(2, length, W, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
        for p in (p for module in pipe.modules.values() for p in module.parameters()):
            p.grad = None
        got = pipe.step(x, tiny.squares).loss_sum.item()
        want, gradients = tiny.alone(4, x, microbatches=2, make=AnyLength)
        assert abs(got - want) <= 1e-10 * want
        tiny.assert_equal(tiny.gradients(pipe), gradients)
        assert (
            abs(pipe.evaluate(x[:, :1], tiny.squares).loss_sum.item() - tiny.alone(4, x[:, :1], make=AnyLength)[0])
            < 1e-9
        )


def test_trap_13_lengths_may_change_between_steps(ranks):
    ranks(lengths)


def llama():
    """Decoder layers of Hugging Face, unchanged, in stages that hand over what the layers need."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    facts = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**facts, num_hidden_layers=4, attention_dropout=0.0, attn_implementation="eager")

    class Layers(nn.Module):
        def __init__(self, s):
            super().__init__()
            torch.manual_seed(40 + s)
            self.index, self.layer = s, LlamaDecoderLayer(config, s).double()
            self.rotary = LlamaRotaryEmbedding(config)

        def forward(self, hidden):
            where = torch.arange(hidden.shape[1])[None]
            mask = torch.full((hidden.shape[1],) * 2, -torch.inf, dtype=torch.float64).triu(1)[None, None]
            out = self.layer(
                hidden, attention_mask=mask, position_embeddings=self.rotary(hidden, where), position_ids=where
            )
            return out[0] if isinstance(out, tuple) else out

    x = torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loss, want = tiny.alone(4, x, microbatches=4, make=Layers)
    for recompute in ("none", "stage"):
        pipe = tiny.pipeline("zb-v", 4, Layers, recompute=recompute)
        assert abs(pipe.step(x, tiny.squares).loss_sum.item() - loss) <= 1e-10 * loss
        tiny.assert_equal(tiny.gradients(pipe), want)
        pipe.close()


def test_hugging_face_layers_are_stages(ranks):
    pytest.importorskip("transformers")
    ranks(llama)
