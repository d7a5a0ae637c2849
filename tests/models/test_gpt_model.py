"""GPTModel as a user calls it: shapes, padding, masks, positions; and what it refuses."""

import dataclasses
import io
import warnings

import pytest
import torch
from torch import nn

from core.models.gpt import GPTModel, gpt2_spec
from core.parallel_state import ParallelConfig, ParallelState
from core.parallel_state.initial import fill
from core.tensor_parallel.embedding import padded_vocab_rows
from tests.models.gpt import POSITIONS, VOCAB, B, S, batch, config, gpt
from tests.parity.whole import assert_same, whole_gradients, whole_parameters
from tests.states import state
from tests.twins.per_parameter import PerParameterGradSync


def logits_here(style, tp, sp):
    ps = state(tp=tp, sp=sp)
    model = gpt(style, parallel=ps)
    logits, gathered = model(batch()[0]), model.gather_logits(model(batch()[0]))
    whole = gpt(style, parallel=ps, parallel_output=False)(batch()[0])
    assert torch.equal(whole, gathered)
    return logits.detach(), gathered.detach()


@pytest.mark.parametrize(
    "style, tp, sp", [("gpt2", 2, False), ("llama", 2, True), ("gpt2", 4, True), ("llama", 4, False)]
)
def test_logits_hold_exactly_the_vocabulary(ranks, single, style, tp, sp):
    alone = gpt(style, parallel=single)
    want = alone(batch()[0])
    assert want.shape == (B, S, VOCAB)
    assert torch.equal(alone.gather_logits(want), want)
    parts = ranks(logits_here, style, tp, sp, world=tp)
    width = padded_vocab_rows(VOCAB, tp) // tp
    for rank, (mine, gathered) in enumerate(parts):
        assert mine.shape == (B, S, width) and gathered.shape == want.shape
        true = max(0, min(width, VOCAB - rank * width))
        assert torch.all(mine[..., true:] == torch.finfo(torch.float64).min)
        torch.testing.assert_close(mine[..., :true], want[..., rank * width :][..., :true], rtol=0, atol=1e-12)
        torch.testing.assert_close(gathered, want, rtol=0, atol=1e-12)
    assert any(rank * width < VOCAB < (rank + 1) * width for rank in range(tp)), "some rank holds padding and more"


def losses_here(tp, sp, dtype):
    tokens, labels = batch()
    return gpt(parallel=state(tp=tp, sp=sp), facts={"params_dtype": dtype})(tokens, labels=labels).detach()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_loss_of_each_token(ranks, single, dtype):
    tokens, labels = batch()
    model = gpt(parallel=single, facts={"params_dtype": dtype})
    loss = model(tokens, labels=labels)
    assert loss.shape == (B, S) and loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    logits = model(tokens).to(loss.dtype)
    want = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    near = {"rtol": 1e-12 if dtype == torch.float64 else 1e-5, "atol": 1e-5 if dtype != torch.float64 else 0.0}
    torch.testing.assert_close(loss, want, **near)
    assert loss[1, 2] == 0 and (loss != 0).sum() == B * S - 1
    rounding = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.3}[dtype]
    for part in ranks(losses_here, 2, True, dtype):
        assert part.dtype == loss.dtype and part[1, 2] == 0
        torch.testing.assert_close(part, loss, rtol=rounding, atol=rounding)


def causal(s=S, b=B):
    return torch.ones(s, s, dtype=torch.bool).triu(1).expand(b, 1, s, s)


@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_no_mask_is_the_causal_mask(single, style):
    model, (tokens, _) = gpt(style, parallel=single), batch()
    for mask in (causal(), causal(b=1)):
        torch.testing.assert_close(model(tokens.int(), None, mask), model(tokens), rtol=0, atol=1e-12)
    no_future = tokens.clone()
    no_future[:, 5:] = 7
    torch.testing.assert_close(model(no_future)[:, :5], model(tokens)[:, :5], rtol=0, atol=1e-12)
    open_mask = torch.zeros(B, 1, S, S, dtype=torch.bool)
    assert (model(tokens, None, open_mask) - model(tokens))[:, :-1].abs().max() > 1e-3


@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_a_hidden_token_is_not_seen(single, style):
    """Row 0 hides its token 2 from all others; in row 1 everybody sees it."""
    model, (tokens, _) = gpt(style, parallel=single), batch()
    mask = causal().clone()
    mask[0, 0, 3:, 2] = True
    other = tokens.clone()
    other[:, 2] = (tokens[:, 2] + 1) % VOCAB
    change = (model(tokens, None, mask) - model(other, None, mask)).abs().amax(-1)
    assert change[0, 3:].max() == 0 and change[1, 3:].min() > 1e-6 and change[:, 2].min() > 1e-6


@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_positions_default_to_the_order_and_packed_ones_start_again(single, style):
    model, (tokens, _) = gpt(style, parallel=single), batch()
    given = torch.arange(S).expand(B, S)
    torch.testing.assert_close(model(tokens, given), model(tokens), rtol=0, atol=1e-12)
    assert (model(tokens, given * 2) - model(tokens)).abs().max() > 1e-3, "positions matter"
    # two documents of 3 and 5 tokens in one row, which do not see each other
    packed = torch.cat((torch.arange(3), torch.arange(5))).expand(B, S)
    mask = causal().clone()
    mask[:, :, 3:, :3] = True
    want = torch.cat((model(tokens[:, :3]), model(tokens[:, 3:])), 1)
    torch.testing.assert_close(model(tokens, packed, mask), want, rtol=0, atol=1e-12)


def packed_here(style, sp):
    tokens, labels = batch()
    positions = torch.stack((torch.arange(S), torch.arange(S) % 3))
    model = gpt(style, parallel=state(tp=2, sp=sp))
    return model(tokens, positions, causal().clone(), labels).detach()


@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_masks_and_positions_over_ranks(ranks, single, style):
    tokens, labels = batch()
    positions = torch.stack((torch.arange(S), torch.arange(S) % 3))
    want = gpt(style, parallel=single)(tokens, positions, None, labels)
    for sp in (False, True):
        for found in ranks(packed_here, style, sp):
            torch.testing.assert_close(found, want, rtol=0, atol=1e-11)


WRONG = {
    "too long": (
        lambda t, y: {"tokens": t.repeat(1, 4)},
        rf"sequence length {4 * S} is more than max_sequence_length={POSITIONS}; shorten the sequences or build",
    ),
    "one sequence": (lambda t, y: {"tokens": t[0]}, rf"tokens must be \[b, s\], got \({S},\); .*tokens\[None\]"),
    "float tokens": (lambda t, y: {"tokens": t.double()}, r"tokens must be int64 or int32, got torch.float64"),
    "hidden states": (
        lambda t, y: {"tokens": torch.zeros(S, B, 8)},
        rf"float\d\d \({S}, {B}, 8\): another stage's output, .* make it with pre_process=False .* gpt_stages",
    ),
    "float mask": (
        lambda t, y: {"tokens": t, "attention_mask": causal().double()},
        rf"attention_mask must be bool \[{B}, 1, {S}, {S}\] .*, got torch.float64 \({B}, 1, {S}, {S}\)",
    ),
    "mask of keys only": (
        lambda t, y: {"tokens": t, "attention_mask": t == 0},
        rf"attention_mask must be bool \[{B}, 1, {S}, {S}\] .* got torch.bool \({B}, {S}\); None is causal",
    ),
    "mask of another batch": (
        lambda t, y: {"tokens": t, "attention_mask": causal(b=3)},
        rf"attention_mask must be .* got torch.bool \(3, 1, {S}, {S}\)",
    ),
    "mask of each head": (
        lambda t, y: {"tokens": t, "attention_mask": causal().expand(B, 8, S, S)},
        rf"attention_mask must be .* got torch.bool \({B}, 8, {S}, {S}\)",
    ),
    "labels of another shape": (
        lambda t, y: {"tokens": t, "labels": y[:, 1:]},
        rf"labels must be int64 \[b, s\] = \({B}, {S}\), got torch.int64 \({B}, {S - 1}\)",
    ),
    "float labels": (
        lambda t, y: {"tokens": t, "labels": y.double()},
        rf"labels must be int64 .*, got torch.float64 \({B}, {S}\)",
    ),
    "positions of another shape": (
        lambda t, y: {"tokens": t, "position_ids": torch.arange(S)},
        rf"position_ids must be int64 \[b, s\] = \({B}, {S}\), got torch.int64 \({S},\)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_inputs_are_refused(single, case):
    make, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        gpt(parallel=single)(**make(*batch()))


def refused_on_ranks():
    model, (tokens, labels) = gpt(parallel=state(tp=2, sp=True)), batch()
    with pytest.raises(ValueError, match=r"sequence length 7 does not divide over 2 .* ranks; pad it to 8, or turn"):
        model(tokens[:, :7])
    for make, message in WRONG.values():
        with pytest.raises(ValueError, match=message):
            model(**make(tokens, labels))
    with pytest.raises(ValueError, match=r"num_attention_heads=3 .*parallel_size=2; valid: 1, 3;.* ffn"):
        gpt(parallel=state(tp=2), facts={"hidden_size": 30, "num_attention_heads": 3, "ffn_hidden_size": 5})
    return model(tokens, labels=labels).sum().item()


def test_wrong_inputs_are_refused_on_every_rank_without_a_hang(ranks):
    first, second = ranks(refused_on_ranks, timeout=20)
    assert first == second, "and the model goes on"


def test_a_dtype_between_stages_that_is_not_the_parameters_is_refused():
    assert config(pipeline_dtype=torch.float64).pipeline_dtype == torch.float64
    with pytest.raises(ValueError, match=r"pipeline_dtype=torch.float32 must be None or params_dtype=torch.float64"):
        config(pipeline_dtype=torch.float32)


def test_each_device_draws_for_itself_only_if_told_so():
    """The meta device cannot draw: that it is asked to shows that the option is heard."""
    nowhere = ParallelState(ParallelConfig().for_world(1), device=torch.device("meta"))
    weight = gpt(parallel=nowhere).output_layer.weight
    there = {"coordinate": nowhere.coordinate, "sizes": nowhere.sizes, "seed": 1}
    fill(weight, "output_layer.weight", weight.initial, draw_on_cpu=True, **there)
    with pytest.raises(RuntimeError, match="META device"):
        fill(weight, "output_layer.weight", weight.initial, draw_on_cpu=False, **there)


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="the same weights on an accelerator")
def test_weights_do_not_depend_on_the_device(single):
    there = gpt(parallel=ParallelState.single())
    for (name, here), other in zip(gpt(parallel=single).named_parameters(), there.parameters(), strict=True):
        assert other.device.type != "cpu" and torch.equal(here, other.cpu()), name


class Plain(nn.Module):
    """Somebody's own MLP: no part of ours, no layout, torch's own initial values."""

    def __init__(self, build):
        super().__init__()
        h = build.config.hidden_size
        self.up, self.down = nn.Linear(h, 24, dtype=torch.float64), nn.Linear(24, h, dtype=torch.float64)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def trained(ps):
    torch.manual_seed(ps.rank)  # ranks need not seed alike: each layer's parts are built under a seed of their own
    model = gpt(parallel=ps, spec=dataclasses.replace(gpt2_spec(), mlp=Plain), seed=1)
    optimizer, (tokens, labels), losses = torch.optim.AdamW(model.parameters(), lr=1e-2), batch(), []
    for _ in range(4):
        loss = model(tokens, labels=labels).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {n: p for n, p in whole_parameters(model, ps).items() if "mlp" in n}


def trained_here(tp, sp):
    return trained(state(tp=tp, sp=sp))


def summed_by_an_owner(sp):
    """The same, where `main_grad`'s owner sums: once, not once more in backward."""
    ps, (tokens, labels) = state(tp=2, sp=sp), batch()
    torch.manual_seed(ps.rank)
    model = gpt(parallel=ps, spec=dataclasses.replace(gpt2_spec(), mlp=Plain), seed=1)
    sync = PerParameterGradSync(model, ps)
    model(tokens, labels=labels).sum().backward()
    sync.finish()
    return whole_gradients(model, ps)


def test_a_part_of_ones_own_has_its_whole_gradient(ranks, single):
    model = gpt(parallel=single, spec=dataclasses.replace(gpt2_spec(), mlp=Plain), seed=1)
    model(batch()[0], labels=batch()[1]).sum().backward()
    want = {
        n: p.grad[: p.parallel_layout.shape[0]] if "mlp" not in n else p.grad for n, p in model.named_parameters()
    }
    for sp in (False, True):
        assert_same(ranks(summed_by_an_owner, sp)[0], want)


def test_a_part_of_ones_own_trains(ranks, single):
    want, weights = trained(single)
    assert want[-1] < want[0] - 1 and any("mlp.up.weight" in name for name in weights)
    for sp in (False, True):
        for found, theirs in ranks(trained_here, 2, sp):
            assert found == pytest.approx(want, rel=1e-7)
            for name, value in weights.items():
                torch.testing.assert_close(theirs[name], value, rtol=0, atol=1e-6)


def test_the_number_of_parameters_is_true_and_the_table_is_padded_in_memory_only(single):
    model = GPTModel(config(), gpt2_spec(), VOCAB, POSITIONS, parallel=single)
    h, f = 32, 40
    layer = (h * 3 * h + 3 * h) + (h * h + h) + (h * f + f) + (f * h + h) + 4 * h
    assert model.num_parameters() == 2 * layer + 2 * VOCAB * h + POSITIONS * h + 2 * h
    assert model.embedding.word_embeddings.weight.shape == (128, h)


def pickled_here():
    model = gpt("llama", parallel=state(tp=2))
    with warnings.catch_warnings(), pytest.raises(TypeError) as error:
        warnings.simplefilter("ignore")  # a file of a rank's parts
        torch.save(model, io.BytesIO())
    return str(error.value)


def test_a_whole_model_in_a_file_is_refused_with_what_to_save(ranks):
    for message in ranks(pickled_here, world=2):
        assert "process group of ranks [0, 1]" in message and "save sharded_state_dict()" in message
