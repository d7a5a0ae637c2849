"""Which steps stay: the rules as a pure function, what they cost, and what they remember."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.dist_checkpointing import CheckpointManager
from core.dist_checkpointing.__main__ import main
from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot, step_name
from core.dist_checkpointing.publish.retention import Retention, StepFacts, checked_metrics
from core.parallel_state import ParallelState
from tests.dist_checkpointing.toy import STORES, save, store

HOUR = 3600.0


def facts(*losses, hours=1.0):
    """Of steps 1, 2, 3 ..., saved so many hours apart."""
    return {n: StepFacts(HOUR * hours * n, {} if x is None else {"loss": x}) for n, x in enumerate(losses, 1)}


@pytest.mark.parametrize(
    "rules, known, kept",
    [
        ({}, facts(3, 2, 1), set()),
        ({"keep_every": 2}, facts(3, 2, 1, 0), {2, 4}),
        ({"keep_best": "loss"}, facts(3, 1, 2), {2}),
        ({"keep_best": "loss"}, facts(3, 1, 1), {2}),
        ({"keep_best": "loss", "keep_best_count": 2}, facts(3, 1, 2), {2, 3}),
        ({"keep_best": "loss", "keep_best_count": 9}, facts(3, None, 2), {1, 3}),
        ({"keep_best": "loss", "keep_best_mode": "max"}, facts(3, 1, None), {1}),
        ({"keep_best": "other"}, facts(3, 1, 2), set()),
        ({"keep_hours": 2}, facts(*5 * [0]), {1, 3, 5}),
        ({"keep_hours": 1.5}, facts(*5 * [0]), {1, 3, 5}),
        ({"keep_hours": 0.1}, facts(*3 * [0]), {1, 2, 3}),
        ({"keep_hours": 2, "keep_best": "loss"}, facts(5, 1, 2), {1, 2, 3}),
    ],
)
def test_the_rules(rules, known, kept):
    assert Retention(**rules).protected(known, known) == kept


def test_steps_of_which_nothing_is_known_are_kept_by_number_only():
    assert Retention(keep_every=2, keep_hours=1, keep_best="loss").protected([1, 2, 3], {}) == {2}


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(-5, 5)), max_size=12),
    st.floats(0.1, 50),
    st.integers(1, 4),
    st.sampled_from(["min", "max"]),
)
def test_what_stays_stays(times, hours, count, mode):
    """Dropping the others changes no decision: steps kept by time stay as long as the rule is the same."""
    known = {n: StepFacts(HOUR * sum(t for t, _ in times[: n + 1]), {"m": v}) for n, (_, v) in enumerate(times)}
    rule = Retention(keep_hours=hours, keep_best="m", keep_best_count=count, keep_best_mode=mode)
    kept = rule.protected(known, known)
    assert rule.protected(kept, {n: known[n] for n in kept}) == kept
    assert len(kept) >= min(count, len(known))
    best = sorted(known, key=lambda n: known[n].metrics["m"], reverse=mode == "max")[:count]
    assert {known[n].metrics["m"] for n in best} <= {known[n].metrics["m"] for n in kept}


@pytest.mark.parametrize(
    "rules, words",
    [
        ({"keep_last": 0}, "keep_last=0 must be at least 1"),
        ({"keep_every": 0}, "keep_every=0 must be at least 1"),
        ({"keep_hours": 0.0}, "keep_hours=0.0 must be above 0"),
        ({"keep_best_count": 0}, "keep_best_count=0 must be at least 1"),
        ({"keep_best_mode": "low"}, "unknown keep_best_mode 'low'; known: min, max"),
    ],
)
def test_bad_rules(rules, words):
    with pytest.raises(ValueError, match=words):
        Retention(**rules)


def test_metrics_are_numbers():
    assert checked_metrics({"a": torch.tensor(2.0), "b": 1, "c": math.nan, "d": math.inf}) == {"a": 2.0, "b": 1.0}
    with pytest.raises(ValueError, match=r"metrics\['a'\] is a str, no number"):
        checked_metrics({"a": "low"})
    told = StepFacts.from_run({"time": 1e400, "metrics": {"a": "low", "b": True, "c": 2, "d": math.nan}})
    assert told == StepFacts(0.0, {"c": 2}) and StepFacts.from_run({"metrics": [1]}) == StepFacts(0.0)


@pytest.fixture(params=STORES)
def root(request, tmp_path):
    return CheckpointRoot(store(request.param, tmp_path))


def counted(root, monkeypatch):
    """The names of manifests that are read from now on."""
    read, found = type(root.files).read, []

    def noting(place, name, *rest):
        if name.endswith("manifest.json"):
            found.append(place.url + name)
        return read(place, name, *rest)

    monkeypatch.setattr(type(root.files), "read", noting)
    return found


def steps_in(found):
    return {n for n in range(31) if any(step_name(n) in name for name in found)}


def test_a_save_reads_the_manifests_of_the_steps_it_keeps(root, monkeypatch):
    """Not those of all steps there are (1,000 kept steps made a save 15 times as long)."""
    for step in range(30):
        save(root, step, step)
    found = counted(root, monkeypatch)
    assert root.retain(keep_last=3, keep_every=1) == []
    assert steps_in(found) == {27, 28, 29}
    root.retain(keep_last=3, keep_every=1, keep_hours=1)  # once
    assert steps_in(found) == set(range(30))
    save(root, 30, 30)
    found.clear()
    root.retain(keep_last=3, keep_every=1, keep_hours=1)
    assert steps_in(found) == {28, 29, 30}


@pytest.mark.parametrize("text", [b"", b"{}", b'{"steps":{"1":[0.0,{"loss":-9}]}}', None])
def test_what_is_not_remembered_is_read_again(root, text, monkeypatch):
    """And a user's file of that name is left alone."""
    for step in (1, 2, 3):
        save(root, step, step)
    root.retain(keep_last=9, keep_hours=1)
    found = counted(root, monkeypatch)
    assert root.facts([1, 2, 3]).keys() == {1, 2, 3} and not found
    root.files.remove(".retention.json") if text is None else root.files.write(".retention.json", text)
    assert root.facts([1, 2, 3])[1].metrics == {} and steps_in(found) == {1, 2, 3}
    assert text is None or root.files.read(".retention.json") == text


single = ParallelState.single("cpu")


def saved(manager, step, **metrics):
    return manager.save(step, {"w": torch.full((3,), float(step))}, metrics)


@pytest.mark.full
def test_the_best_steps_of_a_run_stay(tmp_path):
    with_best = {"keep_last": 1, "keep_best": "validation.loss", "keep_best_count": 2}
    manager = CheckpointManager(tmp_path, ps=single, **with_best)
    for step, loss in enumerate([5.0, 2.0, math.nan, 3.0, 1.0, 4.0]):
        saved(manager, step, **{"validation.loss": loss})
    assert manager.steps() == [1, 4, 5]
    saved(manager, 4, **{"validation.loss": 9.0})  # again, and worse now
    saved(manager, 6, **{"validation.loss": 8.0})
    assert manager.steps() == [1, 5, 6]
    handle = manager.save_async(7, {"w": torch.zeros(3)}, {"validation.loss": torch.tensor(0.5)})
    handle.wait()
    manager.close()
    assert manager.steps() == [1, 7]
    with pytest.raises(ValueError, match=r"metrics\['a'\] is a list"):
        saved(manager, 8, a=[1])


def test_commands(tmp_path, capsys):
    manager = CheckpointManager(tmp_path, ps=single, keep_last=9)
    for step, loss in enumerate([5.0, 2.0, 3.0, 1.0, 4.0]):
        saved(manager, step, loss=loss)
    manager.close()
    assert main(["tag", str(tmp_path), "release", "--step", "0"]) == 0
    assert main(["tag", str(tmp_path), "newest"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["newest step-00000004", "release step-00000000"]
    prune = ["prune", str(tmp_path), "--keep-last", "1", "--keep-best", "loss"]
    assert main([*prune, "--dry-run"]) == 0 and manager.steps() == [0, 1, 2, 3, 4]
    assert main(prune) == 0 and manager.steps() == [0, 3, 4]
    assert main(["tag", str(tmp_path), "release", "--delete"]) == 0
    assert main([*prune[:4], "--keep-best", "loss", "--keep-best-mode", "max"]) == 0
    assert manager.steps() == [0, 4], "3 has the smaller loss"
    capsys.readouterr()
    assert main(["tag", str(tmp_path), "release", "--delete"]) == 2
    assert "has no tag release; tags there: newest" in capsys.readouterr().err
    assert main(["tag", str(tmp_path / "none"), "release"]) == 2
    assert "holds no steps" in capsys.readouterr().err
