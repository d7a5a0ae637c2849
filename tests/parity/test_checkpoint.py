"""Any layout to any layout: all write the same bytes, and each reads them back bit for bit, model and optimizer."""

import hashlib
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from core import dist_checkpointing
from core.dist_checkpointing.state.mapping import sharded_state_dict, sharded_states
from core.models.gpt import gpt_stages, llama_spec
from core.optimizer import OptimizerConfig
from core.parallel_state import layout_of
from core.parallel_state.modules import named_parameters, named_stacks
from core.transformer import TransformerConfig
from tests.marks import PRODUCT
from tests.states import state
from tests.twins.adamw import AdamW
from tests.twins.per_parameter import PerParameterGradSync

VOCABULARY, KINDS = 2731, ("main", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class On:
    """A layout: stages of layers on pipeline ranks, tensor ranks, the rest of the world data ranks."""

    world: int
    tp: int = 1
    placement: tuple[int, ...] = (0,)
    layers: tuple[int, ...] = (6,)
    zero: bool = False
    cp: int = 1

    @property
    def pp(self):
        return max(self.placement) + 1

    def __str__(self):
        cut = "+".join(map(str, self.layers)) + "on" + "".join(map(str, self.placement))
        return f"w{self.world}-tp{self.tp}-{cut}{'-zero' * self.zero}{f'-cp{self.cp}' * (self.cp > 1)}"


LAYOUTS = [
    On(1),
    On(2, tp=2),
    On(3, tp=3),
    On(4, tp=4),
    On(2),
    On(2, zero=True),
    On(3, zero=True),
    On(4, zero=True),
    On(2, placement=(0, 1), layers=(3, 3)),
    On(2, placement=(0, 1), layers=(4, 2)),
    On(3, placement=(0, 1, 2), layers=(2, 2, 2)),
    On(4, placement=(0, 1, 2, 3), layers=(1, 2, 2, 1)),
    On(2, placement=(0, 1, 1, 0), layers=(1, 2, 2, 1)),
    On(2, placement=(0, 1, 0, 1), layers=(2, 1, 2, 1)),
    On(4, tp=2, placement=(0, 1), layers=(1, 5)),
    On(4, tp=2, placement=(0, 1, 1, 0), layers=(2, 1, 1, 2)),
    On(4, tp=2, zero=True),
    On(4, placement=(0, 1), layers=(2, 4)),
    On(4, placement=(0, 1), layers=(4, 2), zero=True),
    On(2, cp=2),
    On(4, cp=4),
    On(4, cp=2, zero=True),
]
# one process; cuts that do and do not divide; states cut at any element; uneven stages, several on a rank
COVER = [LAYOUTS[i] for i in (0, 2, 6, 11, 13, 15, 16, 18, 21)]


def whole(name, kind, shape):
    """The value of one global tensor, the same everywhere."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{kind} {name}".encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float32)


def build(on, dtype, tied):
    """(stages, optimizer) with undefined values."""
    ps = state(tp=on.tp, pp=on.pp, cp=on.cp)
    config = TransformerConfig(
        num_layers=6,
        hidden_size=96,
        num_attention_heads=24,
        num_query_groups=12,
        ffn_hidden_size=1536,
        normalization="RMSNorm",
        activation_func="silu",
        gated_linear_unit=True,
        attention_dropout=0.0,
        params_dtype=dtype,
    )
    starts = [sum(on.layers[:i]) for i in range(len(on.layers))]
    cut = [range(start, start + n) for start, n in zip(starts, on.layers, strict=True)]
    stages = gpt_stages(
        config,
        llama_spec(),
        VOCABULARY,
        32,
        placement=on.placement,
        layers=cut,
        share_embeddings_and_output_weights=tied,
        parallel=ps,
    )
    return ps, stages, AdamW(stages, ps, OptimizerConfig(), grad_sync=PerParameterGradSync(stages, ps))


def expected(name, layout, box, kind):
    return whole(name, kind, layout.shape)[box]


def fill(stages, optimizer, ps, empty):
    """Every state has its part of the whole value, or zeros; padded rows hold something else."""
    for name, parts in optimizer.states().items():
        for kind in KINDS:
            part = parts[kind]
            part.tensor.copy_(torch.zeros(()) if empty else expected(name, part.layout, part.box, kind))
    for name, p in named_parameters(stages):
        layout = layout_of(p)
        box = layout.box(ps.coordinate, ps.sizes)
        with torch.no_grad():
            value = torch.zeros(()) if empty else expected(name, layout, box, "main")
            p.fill_(-9.0)
            p[tuple(slice(0, s.stop - s.start) for s in box)] = value.to(p.dtype)


def zero_states(optimizer, ps, empty):
    """name -> kind -> this data rank's interval of all states laid end to end, as a sharded optimizer holds them."""
    layouts = {name: parts["main"].layout for name, parts in optimizer.states().items()}
    sizes = {name: torch.Size(layout.local_shape(ps.sizes)).numel() for name, layout in layouts.items()}
    total, rank, dp = sum(sizes.values()), ps.index("dp"), ps.size("dp")
    first, last = total * rank // dp, total * (rank + 1) // dp
    found, at = {}, 0
    for name, layout in layouts.items():
        start, stop = max(0, first - at), min(sizes[name], last - at)
        at += sizes[name]
        if start >= stop:
            continue
        box = layout.box(ps.coordinate, ps.sizes)
        found[name] = {}
        for kind in KINDS:
            local = torch.full(layout.local_shape(ps.sizes), -9.0, dtype=torch.float32)
            value = torch.zeros(()) if empty else expected(name, layout, box, kind)
            local[tuple(slice(0, s.stop - s.start) for s in box)] = value
            flat = local.view(-1)[start:stop].clone()
            found[name][kind] = SimpleNamespace(tensor=flat, layout=layout, interval=(start, stop), box=box)
    return found


def sharded(on, stages, optimizer, ps, zero):
    states = optimizer.sharded_state_dict()
    if on.zero:
        states["states"] = sharded_states(zero, ps, stacks=named_stacks(stages))
    return {"model": sharded_state_dict(stages, ps), "optimizer": states, "step": 7}


def round_trip(on, directory, dtype, tied):
    """Save this layout's parts, read the first layout's files into empty ones, compare with the values."""
    ps, stages, optimizer = build(on, dtype, tied)
    fill(stages, optimizer, ps, empty=False)
    zero = zero_states(optimizer, ps, empty=False) if on.zero else None
    dist_checkpointing.save(sharded(on, stages, optimizer, ps, zero), f"{directory}/{on}", ps=ps)
    fill(stages, optimizer, ps, empty=True)
    empty = zero_states(optimizer, ps, empty=True) if on.zero else None
    loaded = dist_checkpointing.load(sharded(on, stages, optimizer, ps, empty), f"{directory}/{LAYOUTS[0]}", ps=ps)
    assert loaded["step"] == 7
    for name, p in named_parameters(stages):
        layout = layout_of(p)
        box = layout.box(ps.coordinate, ps.sizes)
        part = p[tuple(slice(0, s.stop - s.start) for s in box)]
        assert torch.equal(part, expected(name, layout, box, "main").to(dtype)), name
        assert loaded["model"][name].data_ptr() == p.data_ptr() and loaded["model"][name].shape == p.shape
        rest = p[box[0].stop - box[0].start :] if layout.padding else p[:0]
        assert (rest == -9).all(), "padded rows are nobody's business"
    check_states(optimizer, zero, empty)


def check_states(optimizer, zero, empty):
    if empty is None:
        for name, parts in optimizer.states().items():
            for kind, part in parts.items():
                assert torch.equal(part.tensor, expected(name, part.layout, part.box, kind)), (name, kind)
        return
    for name, parts in zero.items():
        for kind, part in parts.items():
            assert torch.equal(part.tensor, empty[name][kind].tensor), (name, kind)


def digest(directory):
    """One hash of every path and byte that does not tell who wrote."""
    found = hashlib.sha256()
    for path in sorted(Path(directory).rglob("*")):
        name = str(path.relative_to(directory))
        if path.is_file() and name != "manifest.json" and not name.startswith("receipts"):
            found.update(name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


@pytest.mark.parametrize(
    ("layouts", "dtype", "tied"),
    [
        pytest.param(COVER, torch.bfloat16, True, id="cover-bf16-tied"),
        pytest.param(LAYOUTS, torch.bfloat16, True, id="bf16-tied", marks=PRODUCT),
        pytest.param(LAYOUTS, torch.float32, False, id="fp32-untied", marks=pytest.mark.full),
        pytest.param(LAYOUTS, torch.bfloat16, False, id="bf16-untied", marks=PRODUCT),
    ],
)
def test_every_layout_writes_the_same_bytes_and_reads_them(ranks, tmp_path, layouts, dtype, tied):
    hashes = {}
    for on in layouts:
        ranks(round_trip, on, str(tmp_path), dtype, tied, world=on.world)
        hashes[str(on)] = digest(tmp_path / str(on))
    assert set(hashes.values()) == {hashes[str(LAYOUTS[0])]}, hashes
    counts = [len(list(array.parent.glob("c*"))) for array in (tmp_path / str(LAYOUTS[0])).rglob("zarr.json")]
    assert {1, 2, 6} <= set(counts), "whole stacks, a cut vocabulary, and layers apart"
