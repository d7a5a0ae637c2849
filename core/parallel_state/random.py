"""Which seed is mine: pure mixing of names and integers, and a generator seeded for one region."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

_MASK = (1 << 64) - 1


@cache
def _name_hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mix32(*values: int | str) -> int:
    """A well-mixed seed of 32 bits from integers and names (splitmix64, finalised after every part).

    32 on purpose: CPU generators ignore all higher bits of a seed, so packing facts into them would
    silently repeat random numbers.
    """
    # splitmix64 (Steele et al. 2014): add the golden ratio, then two rounds of xor-shift and multiply
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (
            state ^ (_name_hash(value) if isinstance(value, str) else int(value) & _MASK)
        ) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 32


def chosen_seed(default: int) -> int:
    """A seed from what `torch.manual_seed` was told; `default` where nobody called it.

    A process that nobody seeds starts from 64 random bits, other ones on every rank.
    """
    torch_seed = torch.initial_seed()
    # torch draws 64 bits where nobody seeds; a seed that a program chose is nearly always shorter
    if torch_seed < 2**32:
        return mix32("chosen", torch_seed)
    return default


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that operations without one of their own draw from, on any device type."""
    if device.type in ("cpu", "meta"):  # nothing is drawn on meta
        return torch.default_generator
    module = torch.get_device_module(device)
    if device.index is not None:
        index = device.index
    else:
        index = module.current_device()
    if not module.default_generators:
        module.init()
    return module.default_generators[index]


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Every generator that code on a device may draw from: its own, and the CPU's."""
    device_generator = default_generator(device)
    cpu = torch.default_generator
    if device_generator is cpu:
        return [cpu]
    return [cpu, device_generator]


@contextmanager
def kept_generators(device: torch.device) -> Iterator[None]:
    """What is drawn or seeded inside the block, of any generator of a device or the CPU, is forgotten after it."""
    states = [(generator, generator.get_state()) for generator in generators_of(device)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Draw from `seed` inside the block; the user's own random state is untouched by it."""
    generator = default_generator(device)
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)
