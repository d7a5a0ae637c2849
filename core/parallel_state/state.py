"""This rank's coordinate in the grid, and its process groups: built once, passed down, never read from a global."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from core.parallel_state.collectives import groups as pg
from core.parallel_state.collectives.groups import DEFAULT_TIMEOUT_S, Group, Traffic
from core.parallel_state.collectives.p2p import greet
from core.parallel_state.config import ParallelConfig
from core.parallel_state.environment import expect_world, local_device
from core.parallel_state.grid import GROUPS, Grid

if TYPE_CHECKING:
    from core.parallel_state.collectives.groups import DeviceMesh


@dataclass(frozen=True, eq=False)
class ParallelState:
    """Frozen. `group(axis)` is None for an axis of one rank, and every collective takes None for 'nothing to do'.

    config: the sizes, `data` filled in.
    rank: this process's global rank.
    device: where its parameters live.
    groups: name -> Group of every group of more than one rank (names: `grid.GROUPS`).
    world: the group of all ranks; None for a single process.
    """

    config: ParallelConfig
    rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    groups: dict[str, Group] = field(default_factory=dict)
    world: Group | None = None
    _alone: dict[str, Group] = field(default_factory=dict, repr=False)
    _links: dict[tuple[int, int], Group] = field(default_factory=dict, repr=False)

    @classmethod
    def single(cls, device: torch.device | str | None = None) -> "ParallelState":
        """One process, every axis of size 1, no group. Raises ValueError: a device that this machine lacks."""
        return cls(ParallelConfig().for_world(1), device=checked_device(device, {}))

    @classmethod
    def build(
        cls,
        config: ParallelConfig | None = None,
        *,
        device: torch.device | str | None = None,
        timeout_s: float | None = None,
        debug: bool = False,
    ) -> "ParallelState":
        """Collective: every rank of the default group calls it once (a single process may, without one).

        Every group is created here, in the order of `grid.GROUPS`, equal rank sets once; at most 8 per rank.
        timeout_s bounds every wait; default: what the world was joined with (`init_process_group(timeout=...)`).
        `debug` compares every collective call across its ranks before making it.
        Raises ValueError, before any group is created: sizes that do not fit the world, a device that the
        backend does not serve.
        """
        rank, world_size = pg.world()
        expect_world(world_size)
        # everything that may be wrong is found before the first group: groups cannot be left halfway
        config = (config or ParallelConfig()).for_world(world_size)
        served = pg.backends() if pg.is_initialized() else {}
        this_device = checked_device(device, served)
        grid = Grid(config)
        if timeout_s is None:
            timeout_s = pg.world_timeout_s()
        world = pg.world_group(timeout_s, checked=debug)
        # Groups of equal ranks share one process group. All ranks create theirs in one order: another order would
        # deadlock in the rendezvous.
        by_ranks: dict[tuple[int, ...], Any] = {world.ranks: world.process_group} if world else {}
        groups = {}
        for name, ranks in grid.groups_of(rank).items():
            if ranks not in by_ranks:
                by_ranks[ranks] = pg.create_group(name, ranks, timeout_s)
            groups[name] = Group(
                name, ranks, ranks.index(rank), by_ranks[ranks], timedelta(seconds=timeout_s), debug
            )
        return cls(config, rank, this_device, groups, world)

    def __deepcopy__(self, memo: dict) -> "ParallelState":
        # frozen: a copied model lives on the same ranks
        return self

    @cached_property
    def grid(self) -> Grid:
        """The whole layout of ranks."""
        return Grid(self.config)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """axis -> size (pp dp cp tp ep edp)."""
        return self.grid.sizes

    @cached_property
    def coordinate(self) -> dict[str, int]:
        """axis -> position of this rank; `embedding` is 1 on a last stage that repeats the first's weights."""
        position = self.grid.coordinate(self.rank)
        # whose weights are tied their layouts say (`Layout.partial`); the copy is on the last stage
        repeats = self.config.pipeline > 1 and position["pp"] == self.config.pipeline - 1
        return position | {"embedding": int(repeats)}

    def group(self, name: str) -> Group | None:
        """The group of an axis (tp, cp, dp, pp, ep, edp) or a combination (`grid.GROUPS`); None if of size 1."""
        if name not in GROUPS:
            raise ValueError(f"unknown axis {name!r}; known: {', '.join(GROUPS)}")
        return self.groups.get(name)

    def size(self, name: str) -> int:
        """Ranks along an axis or in a combined group."""
        group = self.group(name)
        if group is not None:
            return group.size
        return 1

    def index(self, name: str) -> int:
        """This rank's position along an axis or in a combined group."""
        group = self.group(name)
        if group is not None:
            return group.rank
        return 0

    def pipeline_neighbours(self) -> tuple[int, int]:
        """Global ranks of (previous, next) pipeline stage, cyclic."""
        stages = self.grid.members(self.rank, "pp")
        stage = stages.index(self.rank)
        return stages[stage - 1], stages[(stage + 1) % len(stages)]

    @property
    def _timeout_s(self) -> float:
        if self.world is not None:
            return self.world.timeout.total_seconds()
        return DEFAULT_TIMEOUT_S

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds pipeline stage 0."""
        return self.coordinate["pp"] == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the last pipeline stage."""
        return self.coordinate["pp"] == self.config.pipeline - 1

    @cached_property
    def mesh(self) -> "DeviceMesh | None":
        """A DeviceMesh over the axes of size > 1, on the same groups, for `fully_shard` and DTensor; or None."""
        return self._mesh([a for a in self.config.order if self.sizes[a] > 1])

    def mesh_for(self, *axes: str) -> "DeviceMesh | None":
        """A mesh over exactly these axes; groups of one rank are created for those of size 1 (local, no traffic)."""
        return self._mesh(list(axes))

    def _mesh(self, axes: list[str]) -> "DeviceMesh | None":
        if not axes:
            return None
        # the mesh varies along `axes`, through this rank's own position on all other axes
        fixed = {
            a: p for a, p in self.coordinate.items() if a in self.config.order and a not in axes
        }

        def ranks_at(position: dict[str, int], remaining: list[str]) -> Any:
            if not remaining:
                return self.grid.rank_at(**position)
            axis, *inner = remaining
            return [ranks_at(position | {axis: index}, inner) for index in range(self.sizes[axis])]

        groups = [self.torch_group(axis).process_group for axis in axes]
        return pg.mesh(groups, self.device.type, ranks_at(fixed, axes), tuple(axes))

    def torch_group(self, name: str) -> Group:
        """Like `group`, but for code outside `core/` that wants a torch process group even for one rank.

        (torch takes None for the whole world.) The group of one is made at first use; nobody else takes part.
        """
        group = self.group(name)
        if group is None and name not in self._alone:
            alone = pg.create_group(name, (self.rank,), DEFAULT_TIMEOUT_S)
            self._alone[name] = Group(
                name, (self.rank,), 0, alone, timedelta(seconds=DEFAULT_TIMEOUT_S)
            )
        if group is not None:
            return group
        return self._alone[name]

    def connect(self, links: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Group]:
        """Groups for messages from one global rank to another, one per (sender, receiver); made once, then kept.

        Collective over the ranks named: each passes the links that it is an end of (others are left out). Each
        new link carries one message at once, so that backends which connect at the first one do it here, in one
        order, and not where a receive posted ahead would wait for it.
        """
        # sorted: two ranks that share several links create them in the same order
        own_links = sorted({link for link in links if self.rank in link})
        for sender, receiver in own_links:
            if (sender, receiver) not in self._links:
                ranks = (min(sender, receiver), max(sender, receiver))
                process_group = pg.create_group("link", ranks, self._timeout_s)
                self._links[sender, receiver] = group = Group(
                    "link",
                    ranks,
                    ranks.index(self.rank),
                    process_group,
                    timedelta(seconds=self._timeout_s),
                )
                # shapes of messages travel from host to host, which NCCL does not carry
                if self.device.type not in group.gloo:
                    group.add_host_group(self._timeout_s)
                    greet(group.on_host, ranks.index(sender), torch.device("cpu"))
                greet(group, ranks.index(sender), self.device)
        return {link: self._links[link] for link in own_links}

    def traffic(self) -> dict[str, Traffic]:
        """Calls, bytes and seconds so far, per group name; `link` is all messages between pipeline stages."""
        links = Traffic()
        for link in self._links.values():
            links.calls = links.calls + link.traffic.calls
            links.bytes = links.bytes + link.traffic.bytes
        traffic = {name: group.traffic for name, group in self.groups.items()}
        if self._links:
            traffic["link"] = links
        return traffic

    def set_timeout(self, timeout_s: float) -> None:
        """Bound every wait from now on (the first steps may compile or load; later ones should not)."""
        for group in (self.world, *self.groups.values(), *self._links.values()):
            if group is not None:
                group.set_timeout(timeout_s)

    def destroy(self) -> None:
        """Leave the groups made by `build` (not the default group)."""
        # several names may share one process group, which is left once
        unique_groups = {g.ranks: g.process_group for g in self.groups.values()}
        if self.world is not None:
            unique_groups.pop(self.world.ranks, None)
        links = [*self._links.values(), *(link.on_host for link in self._links.values())]
        others = [g.process_group for g in (*self._alone.values(), *links)]
        for process_group in (*unique_groups.values(), *others):
            pg.destroy_group(process_group)
        self.groups.clear()
        self._alone.clear()
        self._links.clear()

    def leave(self) -> None:
        """The end of a program that has left nothing to communicate: no group is held any more, the default one too.

        Parameters with hooks, and what they hold, live until the interpreter ends. Threads of gloo must not.
        """
        groups = (*self.groups.values(), *self._alone.values(), *self._links.values(), self.world)
        self.destroy()
        for group in groups:
            if group is not None:
                group.let_go()

    def abandon(self) -> None:
        """After a failure: close every group, so that peers that wait for this rank fail at once, not at a timeout.

        The default group goes too: nothing can be communicated afterwards.
        """
        groups = (*self.groups.values(), *self._alone.values(), *self._links.values())
        for group in (*groups, self.world):
            if group is not None:
                group.close()
        pg.abandon_world()


def checked_device(device: torch.device | str | None, served: dict[str, str]) -> torch.device:
    """The device of this process, checked against the machine and what the default group's backends serve."""
    this_device = local_device(None if device is None else str(device))
    if device is None and served.get(this_device.type) in (None, "gloo") and served:
        # a gloo world on a machine with accelerators trains on the CPU
        this_device = torch.device("cpu")
    if served and this_device.type not in served:
        raise ValueError(
            f"device {this_device.type} is not served by the process group's backends {served}; use a device of "
            f"type {', '.join(served)}, or init_process_group with a backend for {this_device.type}"
        )
    return this_device
