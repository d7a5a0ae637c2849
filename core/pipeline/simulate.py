"""What a schedule comes to, before anything runs: `python -m core.pipeline.simulate zb-v --microbatches 8`.

Prints the drawing, the step over its ideal, the bubble and the memory of each rank.
"""

# Standard library only, argparse included: this runs on a laptop without torch.
import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NoReturn

from core.pipeline.draw.draw import draw_svg, draw_text, draw_trace
from core.pipeline.draw.torch_csv import write_csv
from core.pipeline.schedule.actions import Schedule
from core.pipeline.schedule.passes import add_recompute, without_recompute
from core.pipeline.schedule.player import Costs, Played, play
from core.pipeline.schedule.schedules import NAMED, auto_placement, candidates, make
from core.pipeline.search.search import search

DEFAULT_COSTS = "F=1,I=1,W=1,R=1,comm=0,saved=0,graph=1,waiting=1"


@dataclass(frozen=True)
class Simulation:
    """A schedule, played. ideal: the work of the busiest rank; no step is shorter."""

    schedule: Schedule
    played: Played

    @property
    def ideal(self) -> float:
        """The work of the busiest rank."""
        return max(map(self.played.timeline.busy, range(self.schedule.ranks)))

    @property
    def over_ideal(self) -> float:
        """Step over ideal, 1 or more."""
        if self.ideal:
            return self.played.makespan / self.ideal
        return 1.0

    def fits(self, memory_limit: float | None) -> bool:
        """Whether every rank stays within the limit."""
        # memory is a sum of floats, which 0.1 + 0.2 > 0.3 must not fail
        return memory_limit is None or self.played.peak <= memory_limit + 1e-9


def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    recompute: bool = False,
    fused_backward: bool = False,
) -> Simulation:
    """Play a schedule; `costs` are those of a rank's whole slice for one microbatch."""
    if recompute:
        # before costs are charged: an R is an action of its own, with a cost of its own
        schedule = add_recompute(schedule)
    chunks = max(1, schedule.stages // schedule.ranks)
    stage_costs = (costs or Costs()).divided(chunks)
    return Simulation(schedule, play(schedule, stage_costs, fused_backward=fused_backward))


def parse_costs(text: str) -> Costs:
    """`F=1,comm=.05`: what is not named is as in `DEFAULT_COSTS`. Raises ValueError."""
    known_names = [field.name for field in fields(Costs)]
    costs = {}
    # the defaults first: what is named overwrites them
    for word in f"{DEFAULT_COSTS},{text}".split(","):
        name, _, value = word.strip().partition("=")
        if not word.strip():
            continue
        try:
            costs[name] = float(value)
        except ValueError:
            costs[name] = -1.0  # refused below, with the names
        if name not in known_names or not 0 <= costs[name] < float("inf"):
            raise ValueError(
                f"cost {word.strip()!r}: write name=number, 0 or more, names: {', '.join(known_names)}"
            )
    return Costs(**costs)


# flags of others -> what there is
_ANSWERS = {
    "--schedule": "it is the first word, without a flag",
    "--pp": "give --stages P",
    "--pipeline-model-parallel-size": "give --stages P",
    "--num-stages": "give --stages P",
    "--n-microbatches": "give --microbatches M",
    "--num-microbatches": "give --microbatches M",
    "--vpp": "give --chunks V",
}


class _SimulateParser(argparse.ArgumentParser):
    """Every mistake in the arguments ends with exit code 1 and one line, as a schedule's own errors do."""

    def error(self, message: str) -> NoReturn:
        words = (word.partition("=")[0] for word in message.split())
        answers = [f"; {word}: {_ANSWERS[word]}" for word in words if word in _ANSWERS]
        self.exit(1, f"{self.prog}: {message}{''.join(answers)}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _SimulateParser(
        prog="python -m core.pipeline.simulate", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add(
        "schedule",
        nargs="?",
        default="zb-v",
        help=f"one of {', '.join(NAMED)} (default: zb-v); or auto",
    )
    add(
        "--stages",
        type=int,
        default=4,
        metavar="P",
        help="pipeline ranks, Megatron's pipeline_model_parallel_size; "
        "each rank holds one stage per chunk (default: 4)",
    )
    add("--microbatches", type=int, default=8, metavar="M", help="default: 8")
    add(
        "--chunks",
        type=int,
        metavar="V",
        help="stages on each rank, Megatron's virtual stages, where a schedule leaves it open",
    )
    add(
        "--costs",
        default="",
        help="time of F, I, W, R of a rank's whole slice for one microbatch, and comm of one "
        "message; memory: graph after F or R, saved after an F that is recomputed, waiting between I and W "
        f"(default: {DEFAULT_COSTS})",
    )
    add(
        "--recompute", action="store_true", help="run every forward again right before its backward"
    )
    add(
        "--fused-backward",
        action="store_true",
        help="the message of a B leaves after its W, as in most other implementations; ours is I, message, W",
    )
    add(
        "--memory-limit",
        type=float,
        metavar="X",
        help="in full-rank microbatch activations; exit code 1 if the schedule needs more (--list only marks them)",
    )
    add("--list", action="store_true", help="a table of all named schedules at this size")
    add("--width", type=int, default=118, help="columns of the drawing (default: 118)")
    for name, description in (
        ("svg", "a picture"),
        ("trace", "a trace for ui.perfetto.dev"),
        ("csv", "torch's CSV"),
    ):
        add(f"--{name}", type=Path, metavar="FILE", help=f"write {description}")
    return parser


def table(outcomes: Sequence[Simulation], memory_limit: float | None = None) -> str:
    """One line per outcome: step over ideal, bubble, memory of the rank that holds most."""
    lines = [f"{'schedule':18}{'step/ideal':>11}{'bubble':>9}{'peak memory':>13}"]
    for outcome in outcomes:
        played = outcome.played
        bubble = f"{100 * played.bubble:.1f} %"
        mark = "" if outcome.fits(memory_limit) else "   over the limit"
        lines.append(
            f"{outcome.schedule.name:18}{outcome.over_ideal:11.3f}{bubble:>9}{played.peak:13.2f}{mark}"
        )
    return "\n".join(lines) + "\n"


def _describe_excess(outcome: Simulation, limit: float, named: Sequence[Simulation]) -> str:
    smallest = min(named, key=lambda other: other.played.peak)
    by_speed = sorted(named, key=lambda other: other.over_ideal)
    fitting = [other.schedule.name for other in by_speed if other.fits(limit)]
    remedy = "no named schedule is within it"
    if fitting:
        remedy = f"within it, the fastest first: {', '.join(fitting)}"
    rank = outcome.played.peaks.index(outcome.played.peak)
    return (
        f"{outcome.schedule.name} needs {outcome.played.peak:.4g} microbatch activations on rank {rank}, the memory "
        f"limit is {limit:g}; {remedy}; the least is {smallest.played.peak:.4g}, of {smallest.schedule.name}"
    )


def _write_files(
    options: argparse.Namespace, plain: Schedule, outcome: Simulation, title: str
) -> None:
    texts: dict[str, Callable[[], str]] = {
        "svg": lambda: draw_svg(outcome.played.timeline, title),
        "trace": lambda: draw_trace(outcome.played.timeline),
        "csv": lambda: write_csv(without_recompute(plain)),
    }
    for name, text in texts.items():
        path: Path | None = getattr(options, name)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text())
            note = ""
            if name == "csv" and outcome.schedule.recomputed:
                note = " without its R, which torch does not have"
            print(f"wrote {path}{note}")


def _searched_schedule(options: argparse.Namespace, costs: Costs) -> Schedule:
    """What `schedule="auto"` finds for these costs, and how it compares."""
    chunks = 2 if options.chunks is None else options.chunks
    stages = auto_placement(options.stages, chunks)
    recompute = range(len(stages)) if options.recompute else ()
    result = search(
        stages,
        options.microbatches,
        costs.divided(chunks),
        recompute=recompute,
        memory_limit=options.memory_limit,
        candidates=candidates(stages, options.microbatches),
    )
    print(result.summary())
    return result.schedule


def _run(options: argparse.Namespace) -> None:
    costs = parse_costs(options.costs)
    limit = options.memory_limit
    ranks = options.stages
    microbatches = options.microbatches

    def outcome_of(schedule: Schedule) -> Simulation:
        return simulate(
            schedule, costs, recompute=options.recompute, fused_backward=options.fused_backward
        )

    def all_named() -> list[Simulation]:
        outcomes = []
        for name, named in NAMED.items():
            chunks = options.chunks if named.any_chunks else None
            outcomes.append(outcome_of(make(name, ranks, microbatches, chunks)))
        return outcomes

    rank_noun = "rank" if ranks == 1 else "ranks"
    microbatch_noun = "microbatch" if microbatches == 1 else "microbatches"
    title = f"{ranks} {rank_noun}, {microbatches} {microbatch_noun}"
    if options.recompute:
        title += ", recompute"
    if options.list:
        print(f"{title}\n{table(all_named(), limit)}", end="")
        return
    if options.schedule == "auto":
        plain = _searched_schedule(options, costs)
    else:
        plain = make(options.schedule, ranks, microbatches, options.chunks)
    outcome = outcome_of(plain)
    played = outcome.played
    print(f"{plain.name}, {title}\n\n{draw_text(played.timeline, options.width)}")
    print(
        f"step {played.makespan:.4g}, {outcome.over_ideal:.3f} of the ideal {outcome.ideal:.4g} (the busiest rank)"
    )
    print(f"bubble {100 * played.bubble:.1f} % of all ranks' time")
    print(
        f"peak memory {' '.join(f'{peak:.3g}' for peak in played.peaks)} (rank 0, 1 ..., in full microbatches)"
    )
    # before the limit is judged: a schedule that is over it can be looked at
    _write_files(options, plain, outcome, f"{plain.name}, {title}")
    if not outcome.fits(limit):
        raise ValueError(_describe_excess(outcome, limit, all_named()))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        _run(options)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
