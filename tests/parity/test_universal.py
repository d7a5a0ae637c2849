"""The universal test: on every layout of 1, 2 and 4 ranks the loss, every parameter's gradient (gathered by its
Layout) and the gradient norm equal one process in float64, and the initial weights equal it bit for bit."""

import itertools
from functools import cache

import pytest
import torch
import torch.distributed as dist

from core.models.gpt import GPTModel, gpt2_spec, llama_spec
from core.optimizer import OptimizerConfig
from core.parallel_state import ParallelState
from core.pipeline import SingleStage
from core.tensor_parallel.embedding import padded_vocab_rows
from core.training import next_token_loss
from core.transformer import TransformerConfig
from tests.marks import FULL, PRODUCT
from tests.parity.whole import assert_same, whole_gradients, whole_parameters
from tests.states import state
from tests.twins.adamw import AdamW
from tests.twins.per_parameter import PerParameterGradSync

STYLES = {
    "llama": {
        "normalization": "RMSNorm",
        "activation_func": "silu",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "num_query_groups": 4,
        "qk_layernorm": True,
    },
    "gpt2": {"num_query_groups": 8},
    "gqa with bias": {"num_query_groups": 4, "add_qkv_bias": True, "activation_func": "squared_relu"},
}
VOCAB, S, ROWS = 101, 16, 4
MESHES = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)]  # (dp, tp)


def config(style, **more):
    facts = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 8,
        "ffn_hidden_size": 40,
        "init_method_std": 0.2,
    }
    facts |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": torch.float64}
    return TransformerConfig(**facts | STYLES[style] | more)


def model(style, tied, ps, vocab=VOCAB, **more):
    spec = llama_spec() if style == "llama" else gpt2_spec()
    made = GPTModel(config(style, **more), spec, vocab, S, share_embeddings_and_output_weights=tied, parallel=ps)
    with torch.no_grad():  # biases start at 0 and norms at 1: give their gradients something to depend on
        for name, p in made.named_parameters():
            if p.dim() == 1 or name.endswith("bias"):
                generator = torch.Generator().manual_seed(len(name))
                full = torch.randn(p.parallel_layout.shape, generator=generator, dtype=torch.float64)
                p.add_(0.3 * full[p.parallel_layout.box(ps.coordinate, ps.sizes)])
    return made


def batch(masked, vocab=VOCAB):
    """The global batch; `masked`: uneven ignored labels, the whole of row 0 and (nearly) of row 1 among them."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(vocab, (ROWS, S), generator=generator)
    labels = torch.randint(vocab, (ROWS, S), generator=generator)
    tokens[0, 0] = labels[2, 3] = vocab - 1
    if masked:
        labels[0] = -100
        labels[1, 1:] = -100
        labels[3, ::3] = -100
    return {"tokens": tokens, "labels": labels}


def one_step(style, tied, masked, ps, microbatch=1, vocab=VOCAB, **more):
    """(loss, gradients' owner, gradient norm) of one step on this rank's rows of the global batch."""
    made = model(style, tied, ps, vocab, **more)
    sync = PerParameterGradSync(made, ps)
    optimizer = AdamW(made, ps, OptimizerConfig(lr=1e-3), grad_sync=sync)
    rows = ROWS // ps.size("dp")
    mine = {k: v[ps.index("dp") * rows :][:rows] for k, v in batch(masked, vocab).items()}
    executor = SingleStage(made, ps=ps, num_microbatches=rows // microbatch, grad_sync=sync)
    result = executor.step(mine, next_token_loss)
    gradients = {n: p.main_grad.clone() for n, p in made.named_parameters()}
    stats = optimizer.step(num_tokens=result.num_tokens)
    for n, p in made.named_parameters():
        p.main_grad.copy_(gradients[n])
    loss = result.loss_sum / result.num_tokens
    return made, loss.item(), stats.grad_norm.item(), result.num_tokens.item()


@cache
def reference(style, tied, masked, vocab=VOCAB):
    """The same step in one process, in plain autograd: no executor, no main_grad, no optimizer of ours."""
    made = model(style, tied, ParallelState.single("cpu"), vocab)
    initial = {n: p.detach().clone() for n, p in made.named_parameters()}
    data = batch(masked, vocab)
    tokens = (data["labels"] != -100).sum()
    loss = made(data["tokens"], labels=data["labels"]).sum()
    loss.backward()
    gradients = {n: p.grad for n, p in made.named_parameters()}
    norm = torch.nn.utils.get_total_norm([g / tokens for g in gradients.values()])
    true = {n: made.get_parameter(n).parallel_layout.shape for n in gradients}
    cut = {n: g[tuple(slice(0, size) for size in true[n])] for n, g in gradients.items()}
    return (
        cut,
        {n: w[tuple(slice(0, size) for size in true[n])] for n, w in initial.items()},
        ((loss / tokens).item(), norm.item(), tokens.item()),
    )


def compare(style, tied, masked, tp, sp, vocab=VOCAB):
    ps = state(tp=tp, sp=sp)
    gradients, initial, (loss, norm, tokens) = reference(style, tied, masked, vocab)
    found = whole_parameters(model(style, tied, ps, vocab), ps)
    assert found.keys() == initial.keys()
    for name, value in found.items():
        assert torch.equal(value, initial[name]), f"{name}: initial values depend on the layout"
    made, got_loss, got_norm, got_tokens = one_step(style, tied, masked, ps, vocab=vocab)
    assert got_tokens == tokens
    assert abs(got_loss - loss) <= 1e-10 * abs(loss)
    assert abs(got_norm - norm) <= 1e-10 * norm
    assert_same(whole_gradients(made, ps), gradients)


LAYOUTS = [(dp, tp, sp) for dp, tp in MESHES for sp in ((False, True) if tp > 1 else (False,))]


def cases():
    """The whole product; a quarter of it, in which every pair of values still meets, runs in `make test`."""
    for i, j in itertools.product(range(len(LAYOUTS)), range(len(STYLES))):
        for tied, masked in itertools.product((False, True), repeat=2):
            cover = tied == bool((i + j) % 2) and masked == bool((i // 2 + j) % 2)
            marks = () if cover else FULL if (i + 2 * tied + masked) % 4 == 0 else PRODUCT
            yield pytest.param(*LAYOUTS[i], list(STYLES)[j], tied, masked, marks=marks)


def test_the_cover_meets_every_pair():
    chosen = [case.values for case in cases() if not case.marks]
    for a, b in itertools.combinations([("layout",), (3,), (4,), (5,)], 2):

        def pick(case, key):
            return case[:3] if key == ("layout",) else case[key[0]]

        everything = {(pick(c.values, a), pick(c.values, b)) for c in cases()}
        assert {(pick(c, a), pick(c, b)) for c in chosen} == everything


@pytest.mark.parametrize("dp, tp, sp, style, tied, masked", list(cases()))
def test_every_layout_equals_one_process(ranks, dp, tp, sp, style, tied, masked):
    ranks(compare, style, tied, masked, tp, sp, world=dp * tp)


@pytest.mark.parametrize("tp, sp, tied", [(2, False, True), (2, True, False), (4, False, False), (4, True, True)])
def test_ranks_that_hold_only_padding_of_a_small_vocabulary(ranks, tp, sp, tied):
    assert padded_vocab_rows(20, tp) // tp >= 20, "the last ranks hold no true row"
    ranks(compare, "llama", tied, True, tp, sp, 20, world=tp)


def plain_use(style, tp, sp):
    """No object of ours beside the model: torch's own backward, AdamW and DDP."""
    ps = state(tp=tp, sp=sp)
    made, data = model(style, True, ps), batch(False)
    wrapped = made
    if ps.size("dp") > 1:
        wrapped = torch.nn.parallel.DistributedDataParallel(made, process_group=ps.group("dp").process_group)
    rows = ROWS // ps.size("dp")
    mine = {k: v[ps.index("dp") * rows :][:rows] for k, v in data.items()}
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    losses, first = [], None
    for _ in range(3):
        loss = wrapped(mine["tokens"], labels=mine["labels"]).mean()
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.detach())
        first = first or whole_gradients(made, ps)
        optimizer.step()
    final = whole_parameters(made, ps)
    total = torch.stack(losses)
    if ps.size("dp") > 1:
        dist.all_reduce(total, group=ps.group("dp").process_group)
    return first, final, total / ps.size("dp")


def compare_plain(style, tp, sp):
    got = plain_use(style, tp, sp)
    want = alone(style)
    assert_same(got[0], want[0])
    assert_same(got[1], want[1], 1e-7)  # three steps of Adam amplify the last bits
    torch.testing.assert_close(got[2], want[2], rtol=1e-9, atol=0)


@cache
def alone(style):
    made, data = model(style, True, ParallelState.single("cpu")), batch(False)
    optimizer, losses = torch.optim.AdamW(made.parameters(), lr=1e-2), []
    for step in range(3):
        loss = made(data["tokens"], labels=data["labels"]).mean()
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.detach())
        if step == 0:
            first = {n: p.grad[: p.parallel_layout.shape[0]].clone() for n, p in made.named_parameters()}
        optimizer.step()
    final = {n: p.detach()[: p.parallel_layout.shape[0]].clone() for n, p in made.named_parameters()}
    return first, final, torch.stack(losses)


@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.parametrize("world, tp, sp", [(2, 1, False), (2, 2, False), (2, 2, True), (4, 2, True), (4, 4, True)])
def test_plain_torch_optimizer_and_ddp_train_it(ranks, world, tp, sp, style):
    ranks(compare_plain, style, tp, sp, world=world)


def with_dropout(tp, sp, microbatch):
    ps = state(tp=tp, sp=sp)
    made, loss, norm, _ = one_step(
        "llama", True, True, ps, hidden_dropout=0.2, attention_dropout=0.1, microbatch=microbatch
    )
    return loss, norm, {n: g.norm().item() for n, g in whole_gradients(made, ps).items()}


def test_dropout_does_not_depend_on_dp_at_a_fixed_microbatch_size(ranks):
    one, two, four = (ranks(with_dropout, 1, False, 1, world=n)[0] for n in (1, 2, 4))
    assert one[0] == pytest.approx(two[0], rel=1e-12) and one[0] == pytest.approx(four[0], rel=1e-12)
    for name, norm in one[2].items():
        assert norm == pytest.approx(four[2][name], rel=1e-10)
    without = reference("llama", True, True)[2][0]
    assert abs(one[0] - without) > 1e-3, "dropout does something"


def replicas_with_dropout(sp):
    """`whole` asserts that replicated parameters' gradients agree bit for bit: masks agree where they must."""
    return with_dropout(2, sp, 2)[0]


@pytest.mark.parametrize("sp", [False, True])
def test_dropout_keeps_tensor_replicas_equal(ranks, sp):
    got = ranks(replicas_with_dropout, sp, world=4)
    assert len(set(got)) == 1


def masked_rank(tp):
    """One data rank's labels are all ignored: the loss is still the global sum over the global count."""
    ps = state(tp=tp)
    _, loss, _, tokens = one_step("llama", True, True, ps)
    return loss, tokens


def test_a_rank_whose_tokens_are_all_masked(ranks):
    loss, _, tokens = reference("llama", True, True)[2]
    assert [pytest.approx((loss, tokens), rel=1e-12)] * 4 == ranks(masked_rank, 1, world=4)
