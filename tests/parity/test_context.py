"""Over context ranks, with everything around them, loss, every gradient and the norm equal one process in float64."""

import itertools

import pytest
import torch

from tests.marks import thinned
from tests.parity.contexts import Case, compare

WAYS = [("all_gather", None), ("p2p", None), ("a2a", None)]
MESHES = {  # world -> layouts around the sequence
    2: [{"cp": 2}],
    3: [{"cp": 3}],
    4: [{"cp": 4}, {"cp": 2, "dp": 2}, {"cp": 2, "tp": 2}, {"cp": 2, "tp": 2, "sp": True}, {"cp": 2, "pp": 2}],
}
RECOMPUTE = [("none", "attention"), ("selective", "attention"), ("layer", "attention"), ("layer", "nothing")]
STAGES = [("stage", "attention"), ("stage", "nothing")]
SCHEDULES = ["1f1b", "zb-v", "interleaved-zb"]


def product(world):
    """All cases of a world."""
    flags = list(itertools.product((False, True), repeat=3))
    for mesh, (kind, ulysses), (packed, masked, tied) in itertools.product(MESHES[world], WAYS, flags):
        if world == 3 and kind == "a2a":  # 8 heads do not divide
            continue
        pipeline = mesh.get("pp", 1) > 1
        for recompute, keeps in RECOMPUTE + (STAGES if pipeline else []):
            for zero, style in itertools.product(range(4), ("llama", "gpt2", "windows")):
                chunk = 5 if (zero + len(style) + tied + masked) % 2 else None
                for schedule in SCHEDULES if pipeline else ["1f1b"]:
                    yield Case(
                        **mesh, kind=kind, ulysses=ulysses, packed=packed, masked=masked, tied=tied, zero=zero,
                        style=style, recompute=recompute, keeps=keeps, schedule=schedule, loss_chunk=chunk,
                    )  # fmt: skip
    if world == 4:
        yield from [
            Case(cp=4, kind="a2a+p2p", ulysses=2, packed=p, recompute="layer", style="windows") for p in (0, 1)
        ]


def pairs(case):
    """Every pair of values of a case."""
    values = [(name, getattr(case, name)) for name in case.__dataclass_fields__]
    return set(itertools.combinations(values, 2))


def cover(cases, goal=1.0):
    """Few of `cases` in which nearly every pair of values meets: greedily, from a fixed order."""
    remaining, chosen, left = set().union(*map(pairs, cases)), [], list(cases)
    generator = torch.Generator().manual_seed(0)
    most = len(remaining) * (1 - goal)
    while len(remaining) > most:
        sample = [left[i] for i in torch.randint(len(left), (40,), generator=generator).tolist()]
        best = max(sample, key=lambda case: len(pairs(case) & remaining))
        chosen.append(best)
        remaining -= pairs(best)
    return chosen


@pytest.mark.parametrize("world", MESHES)
def test_a_cover_of_pairs_equals_one_process(ranks, world):
    cases = cover(list(product(world)), goal=1.0 if world == 2 else 0.9)
    assert ranks(compare, cases, world=world) == [{}] * world


def test_heads_inside_and_a_ring_outside_equal_one_process(ranks):
    cases = [case for case in product(4) if case.kind == "a2a+p2p"]
    assert cases and ranks(compare, cases, world=4) == [{}] * 4


@pytest.mark.full
@pytest.mark.parametrize("first, last", thinned([(0, 8), (8, 60), (60, 120)], every=3))
@pytest.mark.parametrize("world", MESHES)
def test_the_product_equals_one_process(ranks, world, first, last):
    cases = list(product(world))
    generator = torch.Generator().manual_seed(1)
    chosen = [cases[i] for i in torch.randperm(len(cases), generator=generator)[:120].tolist()]
    assert ranks(compare, chosen[first:last], world=world, timeout=240) == [{}] * world
