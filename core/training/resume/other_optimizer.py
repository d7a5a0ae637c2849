"""Another optimizer than a checkpoint's: what differs in kinds and names of states, and how new ones begin.

The average of the weights is a state that a run may begin to keep at any step.
"""

from collections.abc import Mapping
from typing import Any

from core.dist_checkpointing.format.keys import key_of
from core.dist_checkpointing.planning.ranks import from_first
from core.dist_checkpointing.reading.loading import open_stored
from core.dist_checkpointing.state.mapping import ShardedObject
from core.optimizer import ShardedOptimizer
from core.optimizer.state.average import EMA
from core.parallel_state import ParallelState
from core.parallel_state.collectives import all_gather_objects
from core.training.config import RunConfig
from core.training.resume.adapters import begun_with

_GROUP = "optimizer/"
MAIN = "main"


def other_optimizer(template: Mapping[str, Any], url: str, ps: ParallelState) -> str | None:
    """What differs, in words; None: nothing, or nothing that can be read. All-gather of names over the world."""
    stored, current = _both_sides(template, url, ps)
    if stored is None or stored == current:
        return None
    if words := _other_kinds(_kinds_of_states(stored), _kinds_of_states(current)):
        return words
    only_there = sorted({_name(key) for key in stored - current})
    only_here = sorted({_name(key) for key in current - stored})
    parts = []
    if only_there:
        parts.append(f"only there are those of {', '.join(only_there[:4])}")
    if only_here:
        parts.append(f"only here are those of {', '.join(only_here[:4])}")
    return " and ".join(parts)


def refuse_other_optimizer(run: RunConfig, url: str, ps: ParallelState) -> None:
    """Before the model is built, which alone knows the names: the checkpoint has states of the same kinds.

    Collective. Raises ValueError, on every rank.
    """
    stored = from_first(lambda: sorted(_stored_keys(url) or ()), ps)
    # main weights are left out where the weights are their own; an average may begin
    saved = {*_kinds_of_states(set(stored))} - {MAIN}
    current = {*run.optimizer.state_kinds}
    current -= {EMA} - saved
    # of these kinds a model has only some if it has no hidden matrices, or no vectors, or none that are trained
    may_lack = run.optimizer.optimizer in ("muon", "adafactor") and (
        run.optimizer.freeze or run.model.build is not None or run.lora.rank is not None
    )
    if not stored or "optimizer" in run.checkpoint.change or (may_lack and saved < current):
        return
    if words := _other_kinds(sorted(saved), sorted(current)):
        raise ValueError(other_states(url, words))


def other_states(url: str, difference: str) -> str:
    """What a run is told that would go on with the states of another optimizer."""
    return (
        f"{url} has the states of another optimizer: {difference}; use the same, or begin with new states: "
        f'checkpoint.change = ["optimizer"]; a run from step 0 with these weights is {begun_with(url)}'
    )


def _other_kinds(saved: list[str], current: list[str]) -> str | None:
    """What differs in the kinds of states, in words; None: nothing."""
    if saved == current:
        return None
    if sorted({*current, EMA}) == saved:
        return (
            "it holds an average of the weights (ema), this run keeps none (optimizer.ema_decay=0)"
        )
    return (
        f"it holds {_kinds_in_words(saved)} of each parameter, this run {_kinds_in_words(current)}"
    )


def fitted_average(
    template: Mapping[str, Any], url: str, ps: ParallelState
) -> tuple[Mapping[str, Any], bool]:
    """What is loaded of the optimizer, and whether its average of the weights begins here: the checkpoint has none.

    All-gather of names over the world.
    """
    stored, current = _both_sides(template, url, ps)
    if stored is None or EMA not in _kinds_of_states(current) or EMA in _kinds_of_states(stored):
        return template, False
    states = {}
    for name, kinds in template["states"].items():
        states[name] = {kind: shards for kind, shards in kinds.items() if kind != EMA}
    return {**template, "states": states}, True


def _both_sides(
    template: Mapping[str, Any], url: str, ps: ParallelState
) -> tuple[set[str] | None, set[str]]:
    """Keys of the states in the checkpoint (None: it cannot be read), and of all ranks here."""
    local: set[str] = set()
    for kinds in template["states"].values():
        for shards in kinds.values():
            local.update(shard.key for shard in (shards if isinstance(shards, list) else [shards]))
    in_checkpoint: set[str] | None = None
    if ps.rank == 0:
        in_checkpoint = _stored_keys(url)
    stored, *_ = all_gather_objects(in_checkpoint, ps.world)
    return stored, set().union(*all_gather_objects(local, ps.world))


def begin_states(optimizer: ShardedOptimizer, step: int) -> None:
    """New states in a run that has made `step` updates: rates go on from there, moments begin at zero.

    Weights that were loaded are taken. Before the first step. Collective: `shard.publish()`.
    """
    optimizer.reload_parameters()
    # the other objects of a checkpoint (loss scale and their like) begin as this optimizer has them
    counts = {
        key: part.data
        for key, part in optimizer.sharded_state_dict().items()
        if isinstance(part, ShardedObject)
    }
    # bias corrections count a parameter's own updates, of which there are none yet
    behind = dict.fromkeys(optimizer.shard.named_parameters(), step)
    optimizer.load_state_dict(
        counts | {"step_count": {"steps": step, "behind": behind}, "skipped_steps": 0}
    )


def _stored_keys(url: str) -> set[str] | None:
    try:
        keys = map(key_of, open_stored(url, sizes=False).metadata)
        return {key for key in keys if key.startswith(_GROUP)}
    except (OSError, ValueError):  # told by the load that follows
        return None


def _kinds_of_states(keys: set[str]) -> list[str]:
    return sorted({key.split("/")[1] for key in keys})


def _name(key: str) -> str:
    return key.split("/", 2)[2]


def _kinds_in_words(kinds: list[str]) -> str:
    return ", ".join(kinds) or "nothing"
