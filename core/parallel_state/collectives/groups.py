"""Process groups: joining the world, creating groups once in one order, what each of them carried."""

import copy
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

DEFAULT_TIMEOUT_S = 600.0
# backends that a torch is built with, or without
BUILT_IN = ("gloo", "nccl", "xccl", "ucc", "mpi")


@dataclass
class Traffic:
    """What one group carried: calls, bytes handed to it, and seconds the caller spent in it."""

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def add(self, size: int, seconds: float) -> None:
        """Count one collective call and its bytes."""
        self.calls += 1
        self.bytes += size
        self.seconds += seconds


class Closed:
    """Stands where a process group was: gloo closes its connections when the last reference is gone."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            f"the group {self._name!r} was closed after a failure; start the job again"
        )


@cache
def _alive_groups() -> "weakref.WeakSet[Group]":
    """Of this process: a world that is left takes them along, whoever still holds one."""
    return weakref.WeakSet()


@dataclass(eq=False)
class Group:
    """A process group of more than one rank, with what a layer needs to know as plain attributes.

    `rank` is this process's index in `ranks` (global ranks, ascending). `timeout` bounds every wait. `checked`
    compares every call across the ranks before it is made (debugging; slow). `under_way`: messages that nobody has
    waited for yet, each with a `forget()`.
    `gloo`: the types of device whose tensors gloo carries, with CPU cores of ours and waits of the host; `staged`:
    those of them that travel through host memory, because gloo has no messages of theirs.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    process_group: ProcessGroup
    timeout: timedelta
    checked: bool = False
    traffic: Traffic = field(default_factory=Traffic)
    under_way: set[Any] = field(default_factory=set)
    # gradients of gathered columns that were compared; the first ones are
    compared: int = 0
    # and gradients that were summed behind `copy_to_tensor_region`
    compared_copies: int = 0
    # of tensor ranks: what watches a program's own sums over them
    reduced_by_hand: Any = None

    def __post_init__(self) -> None:
        self.size = len(self.ranks)
        served = backends(self.process_group)
        self.gloo = frozenset(
            device_type for device_type, backend in served.items() if backend == "gloo"
        )
        self.staged = self.gloo - {"cpu"}
        self._on_host: Group | None = None
        _alive_groups().add(self)

    def let_go(self) -> None:
        """After its process group was left: hold it no more, whoever still holds this. Gloo's threads end with it."""
        self.under_way.clear()
        for group in (self, self._on_host):
            if group is not None:
                group.process_group = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Group({self.name}, rank {self.rank} of ranks {self.ranks})"

    def __copy__(self) -> "Group":
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"the process group of ranks {list(self.ranks)} is of this process and cannot be pickled, nor a model "
            "that holds it: save sharded_state_dict() by core.dist_checkpointing, and make the model anew"
        )

    def __deepcopy__(self, memo: dict) -> "Group":
        return self  # a copied model talks to the same peers

    @property
    def on_host(self) -> "Group":
        """The same ranks for what lies in host memory: copies of what is `staged`, and forms of messages.

        gloo carries both; beside another backend a link has a gloo group for it (`ParallelState.connect`).
        """
        if self._on_host is None:
            self._on_host = copy.copy(self)
            self._on_host.staged = frozenset()
        return self._on_host

    def add_host_group(self, timeout_s: float) -> None:
        """Beside a backend that knows accelerators only: a gloo group of these ranks, for `on_host`. Collective."""
        process_group = create_group(self.name, self.ranks, timeout_s, "gloo")
        self._on_host = Group(self.name, self.ranks, self.rank, process_group, self.timeout)
        self._on_host.gloo = frozenset({"cpu"})
        self._on_host.staged = frozenset()

    def close(self) -> None:
        """Leave the group; calls of ranks that still wait in it fail at once. Nothing can be sent afterwards."""
        # who holds one of them holds the connection
        while self.under_way:
            self.under_way.pop().forget()
        group = self.process_group
        self.process_group = Closed(self.name)  # type: ignore[assignment]
        if (host_group := self._on_host) is not None:
            other = host_group.process_group
            host_group.process_group = self.process_group
            if isinstance(other, ProcessGroup) and other is not group:
                abandon_group(other)
        if isinstance(group, ProcessGroup):
            abandon_group(group)

    def set_timeout(self, timeout_s: float) -> None:
        """Bound how long a collective of this group may wait; a later call that waits longer fails loudly."""
        self.timeout = timedelta(seconds=timeout_s)
        if self._on_host is not None:
            self._on_host.timeout = self.timeout
        # by backend: a group may have one for each type of device, each with a time of its own
        for device in self.process_group._device_types:
            self.process_group._get_backend(device)._set_default_timeout(self.timeout)


def backends(group: ProcessGroup | None = None) -> dict[str, str]:
    """Device type -> backend name of a group (default: the world's)."""
    config = dist.get_backend_config(group)
    return dict(part.split(":", 1) for part in str(config).split(",") if ":" in part)


def ranks_of(group: ProcessGroup) -> tuple[int, ...]:
    """The global ranks of a torch group, ascending."""
    return tuple(sorted(dist.get_process_group_ranks(group)))


def ranks_of_sum(node: Any) -> tuple[int, ...] | None:
    """Of an autograd node that is torch's differentiable all-reduce, of torch.distributed.nn or its functional
    collectives, the global ranks; None of another node."""
    name = node.name()
    if name == "_AllReduceBackward":
        group: Any = node.group or dist.group.WORLD
        return ranks_of(group)
    if "c10d_functional_all_reduce" in name:
        return ranks_of(group_named(node.group_name))
    return None


def group_named(name: Any) -> ProcessGroup:
    """That which torch's functional collectives mean by a name, a string."""
    return dist.distributed_c10d._resolve_process_group(name)


def available_backends() -> list[str]:
    """The backends of torch.distributed that this torch was built with."""
    if not dist.is_available():
        return []
    return [name for name in BUILT_IN if getattr(dist, f"is_{name}_available", bool)()]


def default_backend(device_type: str) -> str:
    """The backend that a world of this kind of device has if nobody names one: "gloo" for the CPU."""
    if dist.is_available():
        return dist.get_default_backend_for_device(device_type)
    return "none"


def is_initialized() -> bool:
    """Whether a default process group exists."""
    return dist.is_available() and dist.is_initialized()


def world() -> tuple[int, int]:
    """(rank, world size) of the default group; (0, 1) without one."""
    if is_initialized():
        return (dist.get_rank(), dist.get_world_size())
    return (0, 1)


def init_world(backend: str | None, timeout_s: float, **init_options: Any) -> None:
    """Join the default group; `init_options` are what torch.distributed.init_process_group takes beside."""
    with _absent_ranks_told("the world"):
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **init_options)


@contextmanager
def _absent_ranks_told(group: str) -> Iterator[None]:
    """Where gloo could not connect a group: say why that is, instead of "Gloo connectFullMesh failed" alone."""
    try:
        yield
    except RuntimeError as error:
        if "connectFullMesh" not in str(error):
            raise
        raise RuntimeError(
            f"{group} was not connected: one of its ranks ended, or refused its arguments, before it came here; that "
            f"rank's own output says why ({error})"
        ) from error


def destroy_world() -> None:
    """Leave the default group and every group made from it; gloo's connections close with the last reference.

    Functions of torch.distributed.nn hold one: the default group at the time of their import is their default
    argument. None means the same to them.
    """
    if is_initialized():
        dist.destroy_process_group()
    # gloo's threads must end before Python does: it would abort ("terminate called without an active exception")
    for group in tuple(_alive_groups()):
        group.let_go()
    module = sys.modules.get("torch.distributed.nn.functional")
    # whoever imported the module before the world was left has the group in its default arguments
    for function in vars(module).values() if module is not None else ():
        defaults = getattr(function, "__defaults__", None) or ()
        without = [None if isinstance(each, ProcessGroup) else each for each in defaults]
        if any(isinstance(default, ProcessGroup) for default in defaults):
            function.__defaults__ = tuple(without)


def world_group(timeout_s: float, *, checked: bool = False) -> Group | None:
    """The default group as a Group; None for a single process."""
    rank, size = world()
    if size == 1:
        return None
    group = dist.group.WORLD
    assert group is not None
    return Group("world", tuple(range(size)), rank, group, timedelta(seconds=timeout_s), checked)


def world_timeout_s() -> float:
    """How long a wait in the default group may take, as whoever joined it said; our default without one."""
    if not is_initialized():
        return DEFAULT_TIMEOUT_S
    group = dist.group.WORLD
    assert group is not None
    timeouts = []
    for device in group._device_types:
        backend = group._get_backend(device)
        if hasattr(backend, "options"):
            timeouts.append(backend.options._timeout.total_seconds())
    return min(timeouts, default=DEFAULT_TIMEOUT_S)


def create_group(
    name: str, ranks: tuple[int, ...], timeout_s: float, backend: str | None = None
) -> ProcessGroup:
    """A new group of `ranks`; only they take part, so every rank must create its groups in one order.

    backend: default: the world's.

    torch names such a group by how many groups this process has, which differs between ranks as soon as a
    user has groups of their own: the rendezvous would hang. The name is therefore ours: the world's, the ranks,
    and how often this rank set was created (the count lives in the store, and is the same on every member).
    A world bound to a device (`init_process_group(device_id=...)`) would be split instead, which all of its
    ranks must enter: it is unbound meanwhile.
    """
    world = dist.group.WORLD
    assert world is not None
    members = "_".join(map(str, ranks))
    # how often these ranks were grouped: counted in the store, because a local count differs between ranks
    times_created = c10d._get_default_store().add(f"paracore/{members}/{dist.get_rank()}", 1)
    torch_naming = c10d._process_group_name
    bound_device = world.bound_device_id
    world.bound_device_id = None
    c10d._process_group_name = lambda *_, **__: c10d.GroupName(
        f"paracore_{world.group_name}_{members}_{times_created}"
    )
    try:
        with _absent_ranks_told(f"group {name} of ranks {', '.join(map(str, ranks))}"):
            group = dist.new_group(
                list(ranks),
                timeout=timedelta(seconds=timeout_s),
                backend=backend,
                use_local_synchronization=True,
                group_desc=f"{name}:{members}",
            )
    finally:
        c10d._process_group_name = torch_naming
        world.bound_device_id = bound_device
    assert isinstance(group, ProcessGroup)
    return group


def destroy_group(group: ProcessGroup) -> None:
    """Leave one group, unless it went with the world it was made from."""
    if is_initialized() and group in c10d._world.pg_map:
        dist.destroy_process_group(group)


def can_abort(group: ProcessGroup | None = None) -> bool:
    """Whether a group's backends end calls under way when they are told to. gloo's end with its connections."""
    return any(backend != "gloo" for backend in backends(group).values())


def abandon_group(group: ProcessGroup) -> None:
    """Leave one group after a failure. NCCL's own `shutdown` would wait for kernels whose peers never come."""
    if is_initialized() and group in c10d._world.pg_map:
        if can_abort(group):
            leave = c10d._abort_process_group
        else:
            leave = dist.destroy_process_group
        leave(group)


def abandon_world() -> None:
    """Leave the default group after a failure, and all that are left, without waiting for what is under way."""
    if is_initialized() and can_abort():
        c10d._abort_process_group()
    destroy_world()


def mesh(
    groups: list[ProcessGroup], device_type: str, ranks: Any, names: tuple[str, ...]
) -> DeviceMesh:
    """A DeviceMesh over existing groups; nothing new is created."""
    layout = torch.tensor(ranks)
    # torch derives a 1-D mesh from the group itself
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=names)
    return DeviceMesh.from_group(groups, device_type, mesh=layout, mesh_dim_names=names)
