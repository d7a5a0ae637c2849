"""Assemble whole tensors from the ranks' parts, by Layout, and compare."""

import torch

from core.parallel_state import layout_of
from core.parallel_state.collectives import all_gather_objects
from core.parallel_state.layout import true_part


def whole(name, local, layout, ps):
    """The whole tensor of `layout` from every rank's `local`; replicas must agree bit for bit."""
    box = layout.box(ps.coordinate, ps.sizes)
    part = true_part(local.detach(), layout, ps.coordinate, ps.sizes).clone()
    result, seen = torch.full(layout.shape, torch.nan, dtype=local.dtype), {}
    for other_box, other in all_gather_objects((box, part), ps.world):
        key = str(other_box)
        if key in seen:
            assert torch.equal(seen[key], other), f"{name}: replicas differ by {(seen[key] - other).abs().max()}"
        seen[key] = other
        result[other_box] = other
    return result


def whole_parameters(model, ps):
    return {n: whole(n, p, layout_of(p), ps) for n, p in model.named_parameters()}


def whole_gradients(model, ps):
    def gradient(p):
        return p.main_grad if getattr(p, "main_grad", None) is not None else p.grad

    return {n: whole(n, gradient(p), layout_of(p), ps) for n, p in model.named_parameters()}


def assert_same(found, expected, tolerance=1e-10):
    """Per tensor: max |difference| <= tolerance * max |expected|, and expected is not zero."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, want in expected.items():
        scale = want.abs().max().item()
        assert scale > 0, f"{name}: the reference is zero, so the comparison says nothing"
        error = (found[name] - want).abs().max().item()
        assert error <= tolerance * scale, f"{name}: error {error:.3e} of {scale:.3e}"


def assembled(tensors, layouts, ps):
    """Whole tensors by name where a rank holds only some of the names; who holds the same must agree bit for bit."""
    mine = {}
    for name, local in tensors.items():
        layout = layouts[name]
        part = true_part(local.detach(), layout, ps.coordinate, ps.sizes).clone()
        mine[name] = layout.shape, layout.box(ps.coordinate, ps.sizes), part
    result, seen = {}, {}
    for theirs in all_gather_objects(mine, ps.world):
        for name, (shape, box, part) in theirs.items():
            key = name, str(box)
            if key in seen:
                assert torch.equal(seen[key], part), f"{name}: replicas differ by {(seen[key] - part).abs().max()}"
            seen[key] = part
            result.setdefault(name, torch.full(shape, torch.nan, dtype=part.dtype))[box] = part
    return result
