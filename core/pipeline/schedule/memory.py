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

SMALL = 24  # bytes: what says the shapes of a boundary, the sums of a microbatch


def _storages(values: Any) -> dict[int, Any]:
    """The memory of every dense tensor in a nesting, each once."""
    found: dict[int, Any] = {}
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Tensor) and is_traceable_wrapper_subclass(leaf):  # nested ones, DTensors: of their parts
            found |= _storages([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])
        elif isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            with suppress(NotImplementedError, RuntimeError):  # somebody's own kind of tensor, without memory
                storage = leaf.untyped_storage()
                found[storage._cdata] = storage
    return found


def bytes_of(values: Any) -> int:
    """Bytes of the tensors in a nesting, shared memory once."""
    return sum(storage.nbytes() for storage in _storages(values).values())


class Live(TorchDispatchMode):
    """Bytes of everything that operations make while it is entered, as long as they live; `peak`: the most so far.

    Whoever holds it: autograd's saved tensors, a Function's own attributes, a module. Not what kernels take for
    themselves inside.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, int] = {}  # memory that lives -> bytes, 0 if it is not counted
        self._ends: dict[int, Any] = {}  # and who tells when it does no more

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, and look at what it takes and returns."""
        self.leave_out((args, kwargs))
        result = func(*args, **(kwargs or {}))
        for key, storage in _storages(result).items():
            self._see(key, storage, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def leave_out(self, values: Any) -> None:
        """Do not count what was there before."""
        for key, storage in _storages(values).items():
            self._see(key, storage, 0)

    def forget(self, values: Iterable[Tensor]) -> int:
        """These are not activations, whoever made them; returns their bytes that were counted so far."""
        before = self.now
        for key in _storages(list(values)):
            self.now -= self._known.get(key, 0)
            self._known[key] = 0
        return before - self.now

    def _see(self, key: int, storage: Any, size: int) -> None:
        if key not in self._known:
            self._known[key] = size
            self.now += size
            self._ends[key] = weakref.ref(storage, lambda _: self._gone(key))

    def _gone(self, key: int) -> None:
        self.now -= self._known.pop(key, 0)
        self._ends.pop(key, None)


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
    live: Live = field(default_factory=Live)

    def around(
        self, action: Action, module: nn.Module, microbatch: Any, received: Any, run: Callable[[], tuple[Any, Any]]
    ) -> None:
        """Run an action and note what it took.

        microbatch: a view of the batch, which the caller holds anyway. received: what another stage gave, which is
        there already. run: does it, and returns (what it hands on, the tensors that it leaves for W, or whether it
        leaves a graph).
        """
        kind, seen, live = action.kind, self.stages.setdefault(action.stage, StageMemory()), self.live
        own = [*module.parameters(), *module.buffers(), microbatch]
        given, before = bytes_of(received), live.now
        live.leave_out((own, received))
        live.peak = before
        with live:
            handed, left = run()
        lasting = live.forget(_gradients(module))  # the model's, not activations
        growth, top = live.now - before, live.peak - before - lasting
        if kind == "F":
            seen.message, seen.saved = max(seen.message, bytes_of(handed)), max(seen.saved, given)
        if kind in "FR":
            kept = growth - _only_here(handed)
            if left:  # its input belongs to it
                seen.graph = max(seen.graph, kept + (given if kind == "F" else seen.saved))
            seen.beyond = max(seen.beyond, top - kept)
        elif kind == "I":
            mine = _storages(own)
            seen.waiting = max(seen.waiting, sum(s.nbytes() for k, s in _storages(left).items() if k not in mine))
            seen.beyond = max(seen.beyond, top - max(0, seen.waiting - seen.graph))
        else:
            seen.beyond = max(seen.beyond, top)


def _gradients(module: nn.Module) -> list[Tensor]:
    both = (g for p in module.parameters() for g in (p.grad, getattr(p, "main_grad", None)))
    return [g for g in both if g is not None]


def _only_here(handed: Any) -> int:
    """Bytes of an output that no graph has saved: two hold its memory, the tensor and the one who counts."""
    found = _storages(handed)
    return sum(found[key].nbytes() for key in list(found) if torch._C._storage_Use_Count(key) <= 2)


def live_peaks(schedule: Schedule, stages: Mapping[int, StageMemory], depth: int) -> tuple[float, ...]:
    """The most bytes that live on each rank: what the player counts, the inside of actions, and messages.

    depth: how many receives are posted ahead. A message counts from the posting of its receive until the action
    that takes it begins (a gradient: until it ends), and from its sending until a later message from the same rank
    proves that it arrived; one between two stages of a rank, from action to action.
    """
    return tuple(_Walk(schedule, rank, stages, depth).peak() for rank in range(schedule.ranks))


class _Walk:
    """Through the plan of one rank, counting."""

    def __init__(self, schedule: Schedule, rank: int, stages: Mapping[int, StageMemory], depth: int) -> None:
        self.schedule, self.plan, self.stages, self.depth = schedule, plan(schedule, rank), stages, depth
        last = schedule.placement[-1] == rank
        self.held = self.most = float(SMALL * (schedule.stages + last * schedule.microbatches))

    def size(self, kind: str, stage: int) -> float:
        """Of what F or I of a stage hands on, or a message of it: an output, or the gradient of an input."""
        stage -= kind in ("I", "SEND_B", "RECV_F")
        return self.stages[stage].message if 0 <= stage < self.schedule.stages - 1 else 0.0

    def peak(self) -> float:
        """The most at any moment."""
        todo = {peer: deque(order) for peer, order in self.plan.inbox.items()}
        posted: dict[int, set[Action]] = {peer: set() for peer in todo}
        sender = {action: peer for peer, order in todo.items() for action in order}

        def post(peer: int) -> None:
            action = todo[peer].popleft()
            posted[peer].add(action)
            self.held += self.size(action.kind, action.stage)

        def post_ahead(peer: int) -> None:
            while todo[peer] and len(posted[peer]) < self.depth:
                post(peer)

        for peer in todo:
            post_ahead(peer)
        for action in self.plan.order:
            if action in sender:
                peer = sender[action]
                while action not in posted[peer]:
                    post(peer)
                posted[peer].remove(action)
                post_ahead(peer)
                self.most = max(self.most, self.held)
                self.held -= sum(self.size(sent.kind, sent.stage) for sent in self.plan.receipts.get(action, ()))
            elif action.kind in ("F", "I", "W", "R"):
                self._compute(action)
            self.most = max(self.most, self.held)  # a send holds what its action handed on
        return self.most

    def _compute(self, action: Action) -> None:
        kind, s, m = action
        seen, again = self.stages[s], (s, m) in self.schedule.recomputed
        had, takes = {
            "F": (0.0, seen.saved if again else seen.graph),
            "R": (seen.saved, seen.graph),
            "I": (seen.graph, seen.waiting),
            "W": (seen.waiting, 0.0),
        }[kind]
        if kind == "F":
            self.held -= self.size("RECV_F", s)  # from now on it belongs to the graph
        inside = max(had, takes) - had + seen.beyond
        self.most = max(self.most, self.held + inside)
        self.held += takes - had + (self.size(kind, s) if kind in "FI" else 0.0)
        if kind == "I":
            self.held -= self.size("F", s)  # the gradient of its output
