"""Muon on every layout: after three steps every weight is that of torch's Muon and AdamW in one process; float64."""

from dataclasses import dataclass
from functools import cache
from math import prod
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from core import dist_checkpointing
from core.data_parallel import DataParallel
from core.models.gpt import GPTModel, gpt_stages, moe_spec
from core.optimizer import OptimizerConfig, ShardedMuon, build_optimizer, muon, sharded_state_dict
from core.optimizer.muon import newton_schulz
from core.optimizer.state.flat_shard import default_decays
from core.optimizer.state.kernels import Factor
from core.optimizer.state.matrices import Matrix, balanced_owners, in_rounds, matrices_of, plan_rounds
from core.parallel_state import Layout, ParallelState, layout_of
from core.parallel_state.layout import set_layout
from core.pipeline import Pipeline, SingleStage
from core.pipeline.schedule import schedules as named
from core.testing import LiveBytes
from core.training import next_token_loss
from tests.parity.pipelines import SEED, VOCAB, S, batch, config, spec
from tests.parity.shards import whole_weights
from tests.parity.whole import assert_same
from tests.states import state
from tests.transformer.moe import layouts as moe

ROWS, STEPS = 4, 3
# eps: a key's bias has a gradient of rounding errors only, which Adam would divide by their own size
CONFIG = OptimizerConfig(optimizer="muon", lr=0.02, weight_decay=0.1, clip_grad=0.5, adam_eps=1e-5)


LATENT = {"multi_latent_attention": True, "num_query_groups": None, "q_lora_rank": 6, "kv_lora_rank": 8}
LATENT |= {"qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 5, "qk_layernorm": True}


@dataclass(frozen=True)
class On:
    """A layout, and what is trained on it: "llama", "gpt2", "moe" or "latent"."""

    zero: int = 0
    world: int = 2
    style: str = "llama"
    tp: int = 1
    sp: bool = False
    pp: int = 1
    schedule: str = "none"
    expert: int = 1
    replicate: int = 1


def facts_of(style):
    if style == "moe":
        return moe.config(layers=4, shared=True), moe_spec()
    if style == "latent":
        return config(num_layers=4, **LATENT), spec()
    return config(style=style, num_layers=4), spec(style)


def matrices(parameter):
    """A parameter as the matrices [out, in] that its elements are, in the same memory."""
    return parameter.detach().view(-1, *parameter.shape[-2:]).unbind()


@cache
def reference(style):
    """Whole weights of one process: torch's autograd, clipping, Muon and AdamW, nothing of ours but the model."""
    model = GPTModel(*facts_of(style), VOCAB, S, parallel=ParallelState.single("cpu"), seed=SEED)
    named_parameters = dict(model.named_parameters())
    hidden = {n for n, p in named_parameters.items() if ".layers." in n and default_decays(n, layout_of(p))}
    assert 0 < len(hidden) < len(named_parameters)
    pairs = [(p, [torch.nn.Parameter(m) for m in matrices(p)]) for n, p in named_parameters.items() if n in hidden]
    muon = torch.optim.Muon(
        [matrix for _, parts in pairs for matrix in parts], lr=CONFIG.lr, adjust_lr_fn="match_rms_adamw"
    )
    rest = {n: p for n, p in named_parameters.items() if n not in hidden}
    decayed = [p for n, p in rest.items() if default_decays(n, layout_of(p))]
    vectors = [p for n, p in rest.items() if not default_decays(n, layout_of(p))]
    groups = [{"params": decayed}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=CONFIG.lr, weight_decay=0.1, eps=CONFIG.adam_eps)
    data = batch(ROWS)
    for _ in range(STEPS):
        loss = sum(model(data["tokens"][i : i + 1], labels=data["labels"][i : i + 1]).sum() for i in range(ROWS))
        (loss / (data["labels"] != -100).sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CONFIG.clip_grad)
        for parameter, parts in pairs:
            for matrix, gradient in zip(parts, matrices(parameter.grad), strict=True):
                matrix.grad = gradient
        muon.step()
        adamw.step()
        model.zero_grad()
    true = {n: tuple(map(slice, layout_of(p).shape)) for n, p in named_parameters.items()}
    return {n: p.detach()[true[n]].clone() for n, p in named_parameters.items()}


def train(on, steps, save=None, load=None, config=CONFIG):
    """Whole weights after `steps` on this rank's rows; from a checkpoint, and to one."""
    ps = state(tp=on.tp, sp=on.sp, pp=on.pp, expert=on.expert, replicate=on.replicate)
    placement = (0,) if on.pp == 1 else named.placement(on.schedule, on.pp)
    stages = gpt_stages(
        *facts_of(on.style), VOCAB, S, placement=placement, parallel=ps, seed=SEED if load is None else 99
    )
    shard = DataParallel(stages, ps, zero_stage=on.zero, bucket_size=300)
    optimizer = build_optimizer(shard, config)
    assert isinstance(optimizer, ShardedMuon) == (config is CONFIG)
    rows = ROWS // ps.size("dp")
    mine = {key: value[ps.index("dp") * rows :][:rows] for key, value in batch(ROWS).items()}
    if on.pp == 1:
        executor = SingleStage(stages[0], ps=ps, num_microbatches=rows, grad_sync=shard, seed=SEED)
    else:
        facts = {"schedule": on.schedule, "num_microbatches": rows}
        executor = Pipeline(stages, ps=ps, grad_sync=shard, seed=SEED, **facts)
    if load is not None:
        into = {"model": sharded_state_dict(shard), "optimizer": optimizer.sharded_state_dict()}
        optimizer.load_state_dict(dist_checkpointing.load(into, load, ps=ps)["optimizer"])
    for _ in range(steps):
        optimizer.zero_grad()
        optimizer.step(num_tokens=executor.step(mine, next_token_loss).num_tokens)
    if save is not None:
        saved = {"model": sharded_state_dict(shard), "optimizer": optimizer.sharded_state_dict()}
        dist_checkpointing.save(saved, save, ps=ps)
    if on.pp > 1:
        executor.close()
    return whole_weights(shard)


def compare(layouts):
    for on in layouts:
        assert_same(train(on, STEPS), reference(on.style))


def compare_loaded(on, directory):
    assert_same(train(on, STEPS - 2, load=directory), reference(on.style))


# of two ranks and of four; the second of each pair runs in `make test-all`
TWO = (
    [On(0), On(3), On(tp=2, sp=True), On(1, pp=2, schedule="zb-v")],
    [
        On(1),
        On(2),
        On(tp=2),
        On(tp=2, sp=True, style="gpt2"),
        On(tp=2, sp=True, style="latent"),
        On(3, style="latent"),
        On(0, style="gpt2"),
        On(2, style="gpt2"),
        On(1, style="moe", expert=2),
        On(3, style="moe"),
    ],
)
FOUR = (
    [On(2, 4, tp=2)],
    [
        On(1, 4, tp=2, sp=True),
        On(3, 4, tp=2),
        On(0, 4, tp=2, style="gpt2"),
        On(2, 4, pp=2, schedule="zb-v", style="gpt2"),
        On(1, 4, replicate=2),
        On(2, 4, tp=2, sp=True, expert=2, style="moe"),
    ],
)


@pytest.mark.parametrize("layouts", [TWO[0], FOUR[0]])
def test_every_layout_is_torchs_muon_in_one_process(ranks, layouts):
    ranks(compare, layouts, world=layouts[0].world)


@pytest.mark.full
@pytest.mark.parametrize("layouts", [TWO[1], FOUR[1]])
def test_more_layouts_are_torchs_muon_in_one_process(ranks, layouts):
    ranks(compare, layouts, world=layouts[0].world)


SAVED = [
    (On(3, 4, tp=2, sp=True), On(0, 1)),
    pytest.param(On(1, tp=2), On(3, 2), marks=pytest.mark.full),
    pytest.param(On(0, 1), On(2, 4, tp=2), marks=pytest.mark.full),
]


@pytest.mark.parametrize("saved, on", SAVED)
def test_a_checkpoint_goes_on_under_another_layout(ranks, tmp_path, saved, on):
    ranks(train, saved, 2, str(tmp_path / "at"), world=saved.world)
    ranks(compare_loaded, on, str(tmp_path / "at"), world=on.world)


def counted(on, most):
    """What one step of Muon takes beside the states: the most bytes of memory, and each group's calls and bytes."""
    ps = state(tp=on.tp)
    stages = gpt_stages(*facts_of("llama"), VOCAB, S, placement=(0,), parallel=ps)
    shard = DataParallel(stages, ps, zero_stage=on.zero, bucket_size=300)
    optimizer = build_optimizer(shard, CONFIG)
    found = matrices_of(shard.buffers, optimizer._hidden, (), ps)
    optimizer._rounds = plan_rounds(found, most)
    mine = {key: value[:1] for key, value in batch(ROWS).items()}
    SingleStage(stages[0], ps=ps, num_microbatches=1, grad_sync=shard).step(mine, next_token_loss)
    optimizer.zero_grad()
    one = torch.ones((), dtype=torch.float64)
    factor = Factor(one, torch.zeros(()), one.float())
    before = {name: (traffic.calls, traffic.bytes) for name, traffic in ps.traffic().items()}
    lasting = [
        t for state in optimizer._state_buffers for t in (state.updated, state.gradients, *state.states.values())
    ]
    orthogonalised = []

    def count(matrix):
        orthogonalised.append(matrix.numel())
        return newton_schulz(matrix)

    with patch.object(muon, "newton_schulz", count), LiveBytes(*lasting) as probe:
        optimizer.update_rest(factor)
    traffic = {}
    for name, after in ps.traffic().items():
        if calls := after.calls - before[name][0]:
            traffic[name] = calls, after.bytes - before[name][1]
    elements = [(prod(matrix.full), matrix.cut is not None) for matrix in found]
    return probe.peak, traffic, elements, len(optimizer._rounds), orthogonalised


@pytest.mark.parametrize("most", [1, pytest.param(1 << 22, marks=pytest.mark.full)])
def test_scratch_is_bounded_and_every_element_travels_once_each_way(ranks, most):
    """Two bytes an element: to the owner and back, over the data ranks and, where they cut it, over tensor ranks."""
    for zero, tp in ((1, 1), (0, 2), (1, 2)):
        answers = ranks(counted, On(zero, 2 * tp if zero else 2, tp=tp), most, world=2 * tp if zero else 2)
        elements, rounds = answers[0][2], answers[0][3]
        everything, cut = sum(size for size, _ in elements), sum(size for size, is_cut in elements if is_cut)
        largest = max(size for size, _ in elements)
        uncut = everything - cut  # whole on each tensor rank, and there several times
        assert rounds > 4 if most == 1 else rounds <= 2
        for name, expected in (("shard", (cut + tp * uncut) * bool(zero)), ("tp", cut * (tp > 1))):
            moved = sum(traffic.get(name, (0, 0))[1] for _, traffic, *_ in answers)
            assert moved == 2 * 2 * expected, (name, zero, tp)
            assert all(traffic.get(name, (0, 0))[0] <= 2 * rounds for _, traffic, *_ in answers)
        # each matrix once, where it is cut; those of a tensor rank alone by that one
        shares = [sum(orthogonalised) for *_, orthogonalised in answers]
        copies = 1 if zero else len(answers) // tp
        assert sum(shares) == copies * (cut + tp * uncut)
        assert max(shares) <= 1.5 * sum(shares) / len(shares), shares
        # momenta of a round in float64 and bfloat16, what is put together, and Newton-Schulz's products
        owned = 2 * max(most, largest)
        assert max(peak for peak, *_ in answers) <= 12 * min(owned, everything), (zero, tp)


class Unused(torch.nn.Module):
    """Two layers in a stack; the second has no gradient in every other step."""

    stacks = {"layers": 2}

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6, bias=False) for _ in range(2))
        for number, layer in enumerate(self.layers):
            torch.nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(number))

    def forward(self, x, both):
        for layer in self.layers if both else self.layers[:1]:
            x = torch.tanh(layer(x))
        return x.square().sum()


def unused(zero):
    ps, model = state(), Unused().double()
    shard = DataParallel(model, ps, zero_stage=zero, bucket_size=20)
    optimizer = build_optimizer(shard, CONFIG)
    for step in range(4):
        x = torch.randn(6, 6, generator=torch.Generator().manual_seed(step)).chunk(ps.size("dp"))[ps.index("dp")]
        model(x, step % 2 == 0).backward()
        optimizer.step(num_tokens=6)
        optimizer.zero_grad()
    return whole_weights(shard)


def test_a_matrix_without_a_gradient_is_left_out_on_every_rank(ranks):
    (alone,) = ranks(unused, 0, world=1)
    for found in ranks(unused, 1, world=2) + ranks(unused, 3, world=3):
        assert_same(found, alone)


def test_owners_are_balanced_and_rounds_bounded():
    """Of any sizes: everybody's share is at most an equal one and the largest; a round is as large as promised."""
    generator = torch.Generator().manual_seed(0)
    for ranks, most in ((1, 5), (2, 100), (7, 10), (8, 1)):
        sizes = torch.randint(1, 60, (50,), generator=generator).tolist()
        covered = []
        for first, last in in_rounds(sizes, ranks, most):
            inside = sizes[first:last]
            assert sum(inside) <= ranks * max(most, *inside)
            owners = balanced_owners(inside, ranks)
            loads = [sum(s for s, o in zip(inside, owners, strict=True) if o == r) for r in range(ranks)]
            assert max(loads) <= sum(inside) / ranks + max(inside) and max(loads) <= 2 * max(most, *inside)
            covered += range(first, last)
        assert covered == list(range(50))
    assert in_rounds([], 3, 4) == [] and balanced_owners([4, 4, 4, 4], 2) == [0, 1, 0, 1]


@pytest.mark.parametrize("part, full, cut", [((4, 6), (7, 6), 0), ((4, 3), (4, 6), 1), ((8, 2, 3), (8, 4, 3), 1)])
def test_what_is_put_together_is_taken_apart_again(part, full, cut):
    """Also with a padded row, and of a convolution, whose matrix is [out, in * kernel]."""
    whole = torch.randn(full)
    padded = torch.nn.functional.pad(whole, (0, 0, 0, 2 * part[0] - full[0])) if cut == 0 else whole
    parts = [chunk.flatten() for chunk in padded.chunk(2, cut)]
    matrix = Matrix("w", Layout(full), None, (0, 0), part, full, cut, SimpleNamespace(size=2))
    together = matrix.put_together(parts)
    assert torch.equal(together, whole.flatten(1)) and matrix.rows_and_columns == tuple(together.shape)
    for again, expected in zip(matrix.take_apart(together), parts, strict=True):
        assert torch.equal(again, expected)


def test_a_matrix_cut_twice_is_refused():
    weight = torch.nn.Parameter(torch.zeros(4, 4))
    set_layout(weight, Layout((8, 8), {"tp": 0, "ep": 1}))
    slot = SimpleNamespace(name="w", start=0, stop=16)
    buffer = SimpleNamespace(bucket=SimpleNamespace(slots=[slot]), parameters=[weight])
    twice = SimpleNamespace(size=lambda axis: 2)
    with pytest.raises(ValueError, match=r"w: its matrices of \(8, 8\) are cut over 2 axes \(tp, ep\), at most 1"):
        matrices_of([buffer], {"w"}, (), twice)
