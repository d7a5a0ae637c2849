"""Without ZeRO the optimizer counts its parameters, and does not name them: whose states these are is found out."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from core.dist_checkpointing.tools.foreign.dcp_shards import ShardCache
from core.dist_checkpointing.tools.foreign.deepspeed_pieces import (
    MAIN,
    STEP,
    States,
    saved_tensor,
    whole_piece,
)
from core.dist_checkpointing.tools.foreign.torch_archive import ArchivedTensor
from core.parallel_state.flat import whole


def unsharded(
    model: Mapping[str, Any], module: Mapping[str, ArchivedTensor], cache: ShardCache
) -> tuple[States, str | None]:
    """(states by name, why there are none). 16-bit weights are told by their values, others by shape and order."""
    saved = model.get("optimizer")
    if not isinstance(saved, dict):
        return States(), "the checkpoint holds no states of an optimizer"
    inner = saved.get("optimizer_state_dict", saved)
    groups, by_number = inner.get("param_groups", []), inner.get("state", {})
    numbers = [[number for number in group["params"]] for group in groups]
    mains: dict[int, ArchivedTensor] = {}
    for group, tensors in zip(numbers, saved.get("fp32_groups") or [], strict=False):
        mains |= dict(zip(group, tensors, strict=True))
    shapes: dict[int, tuple[int, ...]] = {}
    for number in chain.from_iterable(numbers):
        state = by_number.get(number, {})
        tensor = mains.get(number) or next((t for k, t in state.items() if _is_moment(k, t)), None)
        if tensor is None:
            return (
                States(),
                f"parameter {number} of {len(by_number)} has no state that shows its shape",
            )
        shapes[number] = tensor.shape
    names = _assigned(model, module, numbers, shapes, mains, cache)
    if names is None:
        return States(), (
            "the states have numbers and no names, and several parameters could be theirs (equal shapes, frozen ones "
            "among them, or several groups); save the run once at ZeRO stage 1, which names them"
        )
    states = States()
    for number, name in names.items():
        if number in mains:
            for piece in whole_piece(mains[number]):
                states.add(MAIN, name, piece)
        for kind, value in by_number.get(number, {}).items():
            if kind == STEP:
                states.steps[name] = value
            elif _is_moment(kind, value) and value.shape == shapes[number]:
                states.add(kind, name, whole_piece(value)[0])
    return states, None


def _is_moment(kind: str, value: Any) -> bool:
    return isinstance(value, ArchivedTensor) and kind != STEP


def _assigned(
    model: Mapping[str, Any],
    module: Mapping[str, ArchivedTensor],
    numbers: Sequence[Sequence[int]],
    shapes: Mapping[int, tuple[int, ...]],
    mains: Mapping[int, ArchivedTensor],
    cache: ShardCache,
) -> dict[int, str] | None:
    """number -> name, where there is one way only."""
    buffers, seen, names = set(model.get("buffer_names") or ()), set(), []
    for name, tensor in module.items():
        # a tied one under its first name
        if name not in buffers and tensor.storage not in seen:
            seen.add(tensor.storage)
            names.append(name)
    candidates = {
        number: [
            name
            for name in names
            if module[name].shape == shape
            and (number not in mains or _rounds_to(mains[number], module[name], cache))
        ]
        for number, shape in shapes.items()
    }
    if len(numbers) == 1:  # in the model's own order
        return _in_order(list(numbers[0]), candidates, names)
    name_of_number: dict[int, str] = {}
    while progress := {
        n: c[0] for n, c in candidates.items() if len(c) == 1 and n not in name_of_number
    }:
        name_of_number |= progress
        taken = set(name_of_number.values())
        for number in candidates.keys() - name_of_number.keys():
            candidates[number] = [name for name in candidates[number] if name not in taken]
    unique = len(name_of_number) == len(shapes) == len(set(name_of_number.values()))
    return name_of_number if unique else None


def _in_order(
    numbers: list[int], candidates: Mapping[int, Sequence[str]], names: list[str]
) -> dict[int, str] | None:
    """The one way in which the numbers are some of the names, in order; None: there are none or several."""
    place = {name: position for position, name in enumerate(names)}
    # the earliest and the latest place of each: where these agree there is no other
    earliest = []
    latest = []
    after = -1
    for number in numbers:
        places = [place[name] for name in candidates[number] if place[name] > after]
        if not places:
            return None
        after = min(places)
        earliest.append(after)
    before = len(names)
    for number in reversed(numbers):
        places = [place[name] for name in candidates[number] if place[name] < before]
        if not places:
            return None
        before = max(places)
        latest.append(before)
    if earliest != latest[::-1]:
        return None
    return {number: names[position] for number, position in zip(numbers, earliest, strict=True)}


def _rounds_to(main: ArchivedTensor, weight: ArchivedTensor, cache: ShardCache) -> bool:
    values = [
        cache.fill("", saved_tensor("", t.shape, whole_piece(t)), whole(t.shape))
        for t in (main, weight)
    ]
    return torch.equal(values[0].to(values[1].dtype), values[1])
