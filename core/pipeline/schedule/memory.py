"""How many bytes a stage keeps, and what lives beside it: counted in one step, for the automatic schedule."""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from core.pipeline.schedule.actions import Action, Schedule
from core.pipeline.schedule.lower import plan

# bytes: the header of a boundary, the sums of a microbatch
SMALL_MESSAGE = 24


def _storages(values: Any) -> dict[int, Any]:
    """The storage of every dense tensor in a nesting, by its address: each once."""
    storages: dict[int, Any] = {}
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Tensor) and is_traceable_wrapper_subclass(leaf):
            # nested tensors, DTensors: count the plain tensors inside
            inner_names, _ = leaf.__tensor_flatten__()
            storages |= _storages([getattr(leaf, name) for name in inner_names])
        elif isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            # a user's own kind of tensor, without memory
            with suppress(NotImplementedError, RuntimeError):
                storage = leaf.untyped_storage()
                storages[storage._cdata] = storage
    return storages


def bytes_of(values: Any) -> int:
    """Bytes of the tensors in a nesting, shared memory once."""
    return sum(storage.nbytes() for storage in _storages(values).values())


class LiveStorages(TorchDispatchMode):
    """Bytes of everything that operations make while it is entered, as long as they live; `peak`: the most so far.

    Whoever refers to it counts: autograd's saved tensors, a Function's own attributes, a module. Not counted is what
    kernels allocate for themselves inside.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        # storage that lives -> bytes, 0 if it is not counted
        self._sizes: dict[int, int] = {}
        # weak references that tell when it is freed
        self._finalizers: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.leave_out((args, kwargs))
        result = func(*args, **(kwargs or {}))
        for key, storage in _storages(result).items():
            self._register(key, storage, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def leave_out(self, values: Any) -> None:
        """Do not count what was there before."""
        for key, storage in _storages(values).items():
            self._register(key, storage, 0)

    def forget(self, values: Iterable[Tensor]) -> int:
        """These are not activations, whoever made them; returns their bytes that were counted so far."""
        before = self.now
        for key in _storages(list(values)):
            self.now -= self._sizes.get(key, 0)
            self._sizes[key] = 0
        return before - self.now

    def _register(self, key: int, storage: Any, size: int) -> None:
        if key not in self._sizes:
            self._sizes[key] = size
            self.now += size
            self._finalizers[key] = weakref.ref(storage, lambda _: self._freed(key))

    def _freed(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)
        self._finalizers.pop(key, None)


@dataclass
class StageMemory:
    """Bytes of one stage and microbatch: `saved` by F when an R follows, by a `graph`, `waiting` between I and W.

    beyond: the most that lives inside one of its actions on top of what is counted before or after it.
    message: of what it hands to the next stage.
    """

    saved: int = 0
    graph: int = 0
    waiting: int = 0
    beyond: int = 0
    message: int = 0


@dataclass
class MemoryWatch:
    """Counts a rank's stages in one step: `around` every action."""

    stages: dict[int, StageMemory] = field(default_factory=dict)
    live: LiveStorages = field(default_factory=LiveStorages)

    def around(
        self,
        action: Action,
        module: nn.Module,
        microbatch: Any,
        received: Any,
        run: Callable[[], tuple[Any, Any]],
    ) -> None:
        """Run an action and count its bytes.

        microbatch: a view of the batch, which the caller holds anyway. received: what another stage gave, which is
        there already. run: does it, and returns (what it hands on, the tensors that it leaves for W, or whether it
        leaves a graph).
        """
        kind = action.kind
        live = self.live
        stage = self.stages.setdefault(action.stage, StageMemory())
        not_activations = [*module.parameters(), *module.buffers(), microbatch]
        received_bytes = bytes_of(received)
        before = live.now
        live.leave_out((not_activations, received))
        live.peak = before
        with live:
            handed_on, left_behind = run()

        # they are the model's, not activations
        gradient_bytes = live.forget(_gradients(module))
        growth = live.now - before
        top = live.peak - before - gradient_bytes
        if kind == "F":
            stage.message = max(stage.message, bytes_of(handed_on))
            stage.saved = max(stage.saved, received_bytes)
        if kind in "FR":
            graph_bytes = growth - _unshared_bytes(handed_on)
            if left_behind:  # a graph, whose input belongs to it
                input_bytes = received_bytes if kind == "F" else stage.saved
                stage.graph = max(stage.graph, graph_bytes + input_bytes)
            stage.beyond = max(stage.beyond, top - graph_bytes)
        elif kind == "I":
            excluded = _storages(not_activations)
            waiting = sum(
                storage.nbytes()
                for key, storage in _storages(left_behind).items()
                if key not in excluded
            )
            stage.waiting = max(stage.waiting, waiting)
            stage.beyond = max(stage.beyond, top - max(0, stage.waiting - stage.graph))
        else:
            stage.beyond = max(stage.beyond, top)


def _gradients(module: nn.Module) -> list[Tensor]:
    gradients: list[Tensor | None] = []
    for parameter in module.parameters():
        gradients += [parameter.grad, getattr(parameter, "main_grad", None)]
    return [gradient for gradient in gradients if gradient is not None]


def _unshared_bytes(handed_on: Any) -> int:
    """Bytes of an output that no graph has saved: two refer to its storage, the tensor and this function."""
    storages = _storages(handed_on)
    unshared = [key for key in storages if torch._C._storage_Use_Count(key) <= 2]
    return sum(storages[key].nbytes() for key in unshared)


def live_peaks(
    schedule: Schedule, stages: Mapping[int, StageMemory], depth: int
) -> tuple[float, ...]:
    """The most bytes that live on each rank: what the player counts, the inside of actions, and messages.

    depth: how many receives are posted ahead. A message counts from the posting of its receive until the action
    that takes it begins (a gradient: until it ends), and from its sending until a later message from the same rank
    proves that it arrived; one between two stages of a rank, from action to action.
    """
    return tuple(_RankWalk(schedule, rank, stages, depth).peak() for rank in range(schedule.ranks))


class _RankWalk:
    """Through the plan of one rank, counting bytes."""

    def __init__(
        self, schedule: Schedule, rank: int, stages: Mapping[int, StageMemory], depth: int
    ) -> None:
        self.schedule = schedule
        self.plan = plan(schedule, rank)
        self.stages = stages
        self.depth = depth
        small_messages = schedule.stages
        # the last stage keeps the sums of every microbatch
        if schedule.placement[-1] == rank:
            small_messages += schedule.microbatches
        self.live = self.peak_bytes = float(SMALL_MESSAGE * small_messages)

        # what each peer will still send, and what is posted of it
        self.expected = {peer: deque(order) for peer, order in self.plan.inbox.items()}
        self.posted: dict[int, set[Action]] = {peer: set() for peer in self.expected}

    def message_size(self, kind: str, stage: int) -> float:
        """Of what F or I of a stage hands on, or a message of it: an output, or the gradient of an input."""
        if kind in ("I", "SEND_B", "RECV_F"):
            stage -= 1  # the boundary before it
        if 0 <= stage < self.schedule.stages - 1:
            return self.stages[stage].message
        return 0.0

    def _post(self, peer: int) -> None:
        action = self.expected[peer].popleft()
        self.posted[peer].add(action)
        self.live += self.message_size(action.kind, action.stage)

    def _post_ahead(self, peer: int) -> None:
        while self.expected[peer] and len(self.posted[peer]) < self.depth:
            self._post(peer)

    def peak(self) -> float:
        """The most at any moment."""
        sender: dict[Action, int] = {}
        for peer, order in self.expected.items():
            sender.update(dict.fromkeys(order, peer))
        for peer in self.expected:
            self._post_ahead(peer)
        for action in self.plan.order:
            if action in sender:
                self._receive(action, sender[action])
            elif action.kind in ("F", "I", "W", "R"):
                self._compute(action)
            # a send refers to what its action handed on: nothing changes
            self.peak_bytes = max(self.peak_bytes, self.live)
        return self.peak_bytes

    def _receive(self, action: Action, peer: int) -> None:
        while action not in self.posted[peer]:
            self._post(peer)
        self.posted[peer].remove(action)
        self._post_ahead(peer)
        self.peak_bytes = max(self.peak_bytes, self.live)
        # these have arrived
        for sent in self.plan.receipts.get(action, ()):
            self.live -= self.message_size(sent.kind, sent.stage)

    def _compute(self, action: Action) -> None:
        kind, stage, microbatch = action
        memory = self.stages[stage]
        recomputed = (stage, microbatch) in self.schedule.recomputed
        after_forward = memory.saved if recomputed else memory.graph
        before, after = {
            "F": (0.0, after_forward),
            "R": (memory.saved, memory.graph),
            "I": (memory.graph, memory.waiting),
            "W": (memory.waiting, 0.0),
        }[kind]
        if kind == "F":
            # from now on it belongs to the graph
            self.live -= self.message_size("RECV_F", stage)
        inside = max(before, after) - before + memory.beyond
        self.peak_bytes = max(self.peak_bytes, self.live + inside)
        self.live += after - before
        if kind in "FI":
            self.live += self.message_size(kind, stage)
        if kind == "I":
            # the gradient of its output
            self.live -= self.message_size("F", stage)
