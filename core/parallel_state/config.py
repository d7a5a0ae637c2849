"""How many ways each axis splits the world. Pure: all mistakes are named before any process group exists."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import isqrt, prod

from core.field_names import tells_names

AXES = ("pp", "dp", "cp", "tp")
CP_COMM_TYPES = ("all_gather", "p2p", "a2a", "a2a+p2p")
# divisors are for messages: a mistyped number must not take minutes
_LARGEST_TRIED = 65536


def divisors(n: int) -> list[int]:
    """Every divisor of `n`, ascending; above 2**32 only those that are at most 65536, or `n` over one of these."""
    small = [d for d in range(1, min(isqrt(max(n, 0)), _LARGEST_TRIED) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def raise_all(subject: str, rules: Iterable[tuple[bool, str]]) -> None:
    """Raise one ValueError with the message of every rule (holds, message) that does not hold."""
    if wrong := [message for holds, message in rules if not holds]:
        raise ValueError(f"{subject}: " + "; ".join(wrong))


@tells_names("parallel")
@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the parallel axes and their order, outermost (slowest network) to innermost.

    Raises ValueError: a size below 1, more than one copy beside context parallelism, or an order that is not a
    permutation of pp, dp, cp, tp.
    """

    tensor: int = 1
    """Ranks that share each layer's matrices."""

    pipeline: int = 1
    """Ranks that share the layers, as stages."""

    context: int = 1
    """Ranks that share each sequence."""

    cp_comm_type: str = "all_gather"
    """How context ranks see each other's keys: "all_gather" (gathered for each layer), "p2p" (a ring), "a2a" (each
    rank computes some heads of the whole sequence), "a2a+p2p" (heads among `ulysses` ranks, a ring of those). No
    number depends on it."""

    ulysses: int | None = None
    """Context ranks that exchange heads, for "a2a+p2p"; "a2a": all of them, else none."""

    data: int | None = None
    """Ranks that share each batch; default: derived from the world size. Give it only to have it checked."""

    expert: int = 1
    """Ranks that share the experts of a layer: the ranks of one stage folded into edp x ep; divides dp x cp x tp."""

    replicate: int = 1
    """Copies of what the data ranks divide, which is spread over data / replicate ranks each (hybrid sharding)."""

    order: tuple[str, ...] = AXES
    """The axes from the outermost (slowest network) to the innermost."""

    sequence_parallel: bool = False
    """Split the sequence over the tensor ranks between the matrix products."""

    backend: str | None = None
    """Of torch.distributed; default: the device's own (nccl on CUDA, gloo on CPUs). "gloo" on an accelerator lets
    several processes share one device, with messages through host memory: to prove a layout, not to train fast."""

    def __post_init__(self) -> None:
        raise_all("ParallelConfig", self._rules())

    def _rules(self) -> Iterator[tuple[bool, str]]:
        for name in ("tensor", "pipeline", "context", "data", "expert", "replicate"):
            size = getattr(self, name)
            yield size is None or size >= 1, f"{name}={size} must be at least 1"
        yield (
            self.replicate <= 1 or self.context == 1,
            f"replicate={self.replicate} with context={self.context} would need more than 8 groups per rank; use "
            "replicate=1, or context=1",
        )
        yield from self._context_rules()
        yield (
            sorted(self.order) == sorted(AXES),
            f"order={self.order} must name each of {AXES} once, outermost first (Megatron lists the innermost first)",
        )

    def _context_rules(self) -> Iterator[tuple[bool, str]]:
        kind = self.cp_comm_type
        ulysses = self.ulysses
        context = self.context
        yield (
            kind in CP_COMM_TYPES,
            f"unknown cp_comm_type {kind!r}; known: {', '.join(CP_COMM_TYPES)}",
        )
        if kind != "a2a+p2p":
            whole = context if kind == "a2a" else 1
            yield (
                ulysses in (None, whole),
                f"ulysses={ulysses} with cp_comm_type={kind}: {whole} of context={context} ranks exchange heads; "
                "leave ulysses out, or use cp_comm_type=a2a+p2p",
            )
            return
        # 1 and all of them are "p2p" and "a2a"
        inner = divisors(context)[1:-1]
        yield (
            ulysses in inner,
            f"ulysses={ulysses} with cp_comm_type=a2a+p2p over context={context} ranks; valid: "
            f"{_listed(inner) or 'none, use a2a or p2p'}",
        )
        yield (
            self.expert == 1,
            f"cp_comm_type=a2a+p2p with expert={self.expert} would need 9 groups per rank, at most 8 are made; use "
            "a2a, p2p or all_gather",
        )

    @property
    def ulysses_ranks(self) -> int:
        """Context ranks that exchange heads; 1: none do."""
        if self.cp_comm_type == "a2a":
            return self.context
        return self.ulysses or 1

    @property
    def model_ranks(self) -> int:
        """Ranks that one replica of the model takes: tensor x pipeline x context."""
        return self.tensor * self.pipeline * self.context

    def for_world(self, world_size: int) -> "ParallelConfig":
        """This configuration with `data` filled in for `world_size` ranks.

        Raises ValueError: the world is not a multiple of the model's ranks, contradicts `data`, the expert axis
        does not fold, or the data axis does not divide into its copies; the message gives the formula and the
        nearest values that work.
        """
        raise_all("ParallelConfig", self._world_rules(world_size))
        return replace(self, data=world_size // self.model_ranks)

    def _world_rules(self, world: int) -> Iterator[tuple[bool, str]]:
        ranks = self.model_ranks
        # for the message: sizes of the world that would do, then sizes of tensor that this world allows
        next_smaller = world // ranks * ranks
        if next_smaller:
            nearest = f"{next_smaller} or {next_smaller + ranks}"
        else:
            nearest = f"{ranks}"
        if world % (self.pipeline * self.context) == 0:
            others = world // self.pipeline // self.context
        else:
            others = 0
        remedy = ""
        if others:
            remedy = f"; with {world} ranks tensor may be {_listed(divisors(others))}"
        if world == 1:
            remedy += f"; torchrun --standalone --nproc-per-node {ranks} starts that many"
        yield (
            world % ranks == 0,
            f"world size {world} is not a multiple of tensor({self.tensor}) x pipeline({self.pipeline}) x "
            f"context({self.context}) = {ranks}; the nearest world sizes are {nearest}{remedy}",
        )
        if world % ranks:
            return
        data = world // ranks
        yield (
            self.data in (None, data),
            f"data={self.data} x {ranks} model ranks is not the world size {world}; leave data out or use {data}",
        )
        # experts are spread over the ranks of one stage, whatever these share of dense layers
        folded = data * self.context * self.tensor
        yield (
            folded % self.expert == 0,
            f"expert={self.expert} does not divide data({data}) x context({self.context}) x tensor({self.tensor})"
            f" = {folded}; valid: {_listed(divisors(folded))}",
        )
        yield (
            data % self.replicate == 0,
            f"replicate={self.replicate} does not divide data({data}); valid: {_listed(divisors(data))}",
        )

    def sizes(self) -> dict[str, int]:
        """Size of every axis, the dense ones (pp dp cp tp) in order, then ep and edp. Needs `data`."""
        assert self.data is not None, "call for_world first"
        size = {"pp": self.pipeline, "dp": self.data, "cp": self.context, "tp": self.tensor}
        folded = self.data * self.context * self.tensor
        return {a: size[a] for a in self.order} | {"ep": self.expert, "edp": folded // self.expert}

    @property
    def world_size(self) -> int:
        """Ranks of the whole grid. Needs `data`."""
        assert self.data is not None, "call for_world first"
        return prod((self.model_ranks, self.data))


def _listed(values: list[int]) -> str:
    return ", ".join(map(str, values))
