"""What is ours, and what is a user's: nothing not proven ours is replaced or removed, and all of ours goes."""

import os
import shutil
from contextlib import closing

import pytest

from core.dist_checkpointing import CheckpointManager, save
from core.dist_checkpointing.publish.check import check
from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot
from core.dist_checkpointing.publish.index import Watch
from core.dist_checkpointing.storage.checkpoint_dir import open_checkpoint_dir, open_dir
from tests.dist_checkpointing import small, toy
from tests.dist_checkpointing.crash import CrashFs, Killed
from tests.dist_checkpointing.users import files_below, made

A, B = "a" * 32, "b" * 32


# what a save replaces

OTHERS = {
    "receipts of a shop": (
        ["receipts/2026.pdf", "thesis.tex"],
        r"holds 2 entries \(receipts, …\) and is no checkpoint",
    ),
    "a web application": (["manifest.json", "index.html"], r"holds 2 entries \(index.html, …\) and is no checkpoint"),
    "a zarr store": (["zarr.json", "array/zarr.json", "array/c/0"], "holds 2 entries"),
    "one file of our name": (["manifest.json"], r"holds 1 entries \(manifest.json\) and is no checkpoint"),
    "receipts that are none": (["receipts/00000.json", "zarr.json"], "holds 2 entries"),
    "a run": (["zarr.json", "step-00000001/manifest.json"], r"holds other checkpoints \(step-00000001, …\)"),
    "runs": (["receipts/x", "a/step-00000001/manifest.json"], r"holds 2 entries \(a, …\) and is no checkpoint"),
    "nothing but a directory": (["deep/er/.keep"], "holds 1 entries"),
    "its own name": (["x/x"], "holds 1 entries"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_users_directory_is_not_replaced(kind, tmp_path, single):
    files, message = OTHERS[kind]
    made(tmp_path / "x", *files)
    before = files_below(tmp_path)
    for manager in (False, True):
        with pytest.raises(ValueError, match=message):
            save({"a": 1}, tmp_path / "x", ps=single)
        if manager:
            os.rename(tmp_path / "x", tmp_path / "step-00000001")
            with closing(CheckpointManager(tmp_path, ps=single)) as run, pytest.raises(ValueError, match=message):
                run.save(1, {"a": 1})
    assert {name.replace("step-00000001/", "x/", 1): text for name, text in files_below(tmp_path).items()} == before


@pytest.mark.parametrize("extra", ["notes.txt", "receipts/2026.pdf", "model/notes", "a/b/c", "zarr.json.orig"])
def test_what_a_user_put_into_a_checkpoint_stays(extra, tmp_path, single):
    """Of a save that would replace it, and of retention."""
    save(small.state(1), tmp_path / "step-00000001", ps=single)
    made(tmp_path / "step-00000001", extra)
    before = files_below(tmp_path)
    with pytest.raises(ValueError, match=rf"is a checkpoint and holds \d+ more \({extra[0]}.*move that, or choose"):
        save(small.state(2), tmp_path / "step-00000001", ps=single)
    save(small.state(2), tmp_path / "step-00000002", ps=single)
    assert CheckpointRoot(tmp_path).retain(keep_last=1) == []
    assert before.items() <= files_below(tmp_path).items()
    os.unlink(tmp_path / "step-00000001" / extra)
    for folder, _, _ in os.walk(tmp_path / "step-00000001", topdown=False):
        if not os.listdir(folder):
            os.rmdir(folder)
    assert CheckpointRoot(tmp_path).retain(keep_last=1) == [1]


def test_a_step_that_holds_other_files_is_told(tmp_path, caplog):
    for step in (1, 2):
        toy.save(CheckpointRoot(tmp_path), step, step)
    made(tmp_path, "step-00000001/eval.json", "step-00000000/photo.jpg")
    assert CheckpointRoot(tmp_path).retain(keep_last=1) == []
    assert "keeps 2 old steps: step-00000000 holds photo.jpg, which belongs to no checkpoint; move" in caplog.text
    assert len(caplog.records) == 1


def test_files_put_in_while_it_is_saved(tmp_path):
    toy.save(CheckpointRoot(tmp_path), 7, 1)
    place = CheckpointRoot(tmp_path).begin(7, A)
    made(tmp_path, "step-00000007/notes.txt")
    for rank in range(2):
        toy.write_rank(place, rank, 2)
    with pytest.raises(ValueError, match=r"holds 1 more \(notes.txt\)"):
        toy.committed(CheckpointRoot(tmp_path), 7, A)
    assert (tmp_path / "step-00000007" / "notes.txt").read_text() == "mine"
    os.unlink(tmp_path / "step-00000007" / "notes.txt")
    assert toy.version_of(CheckpointRoot(tmp_path).open(7)) == 1


@pytest.mark.parametrize("manifest", [None, b"", b"{", b"\0" * 50, b'{"crc":0,"format":1,"uuid":"x"}'])
def test_a_damaged_checkpoint_is_ours_by_its_receipts(manifest, tmp_path, single):
    save(small.state(1), tmp_path / "x", ps=single)
    (tmp_path / "x" / "manifest.json").unlink()
    if manifest is not None:
        (tmp_path / "x" / "manifest.json").write_bytes(manifest)
    notes = made(tmp_path / "x", "notes.txt") / "notes.txt"
    with pytest.raises(ValueError, match=r"holds 1 more \(notes.txt\)"):
        save(small.state(2), tmp_path / "x", ps=single)
    notes.unlink()
    save(small.state(2), tmp_path / "x", ps=single)
    assert os.listdir(tmp_path) == ["x"] and check(open_checkpoint_dir(tmp_path / "x"), full=True) == []


def test_a_checkpoint_that_nothing_proves(tmp_path, single):
    save(small.state(1), tmp_path / "x", ps=single)
    for name in ("manifest.json", "receipts/00000.json"):
        (tmp_path / "x" / name).write_bytes(b"")
    with pytest.raises(ValueError, match="and is no checkpoint"):
        save(small.state(2), tmp_path / "x", ps=single)


@pytest.mark.parametrize("where", ["x/inner", "x/a/b/c", "x/model/y"])
def test_nothing_is_saved_into_a_checkpoint_however_deep(where, tmp_path, single):
    save(small.state(1), tmp_path / "x", ps=single)
    with pytest.raises(ValueError, match=r"/x is a checkpoint itself; save beside it, not inside"):
        save({"a": 1}, tmp_path / where, ps=single)
    assert check(open_checkpoint_dir(tmp_path / "x"), full=True) == []
    made(tmp_path, "manifest.json")  # of a web application: no checkpoint
    save({"a": 1}, tmp_path / "deep/er", ps=single)


def test_files_and_links_are_not_replaced(tmp_path, single):
    made(tmp_path, "file", "far/x")
    (tmp_path / "step-00000001").symlink_to("far")
    (tmp_path / "loop").symlink_to("loop")
    for name, message in (
        ("file", "is a file or a link, a checkpoint is a directory"),
        ("loop", "is a link to itself"),
    ):
        with pytest.raises(ValueError, match=f"/{name} {message}"):
            save({"a": 1}, tmp_path / name, ps=single)
    told = pytest.raises(ValueError, match="step-00000001 is a file or a link")
    with closing(CheckpointManager(tmp_path, ps=single)) as run, told:
        run.save(1, {"a": 1})
    assert (tmp_path / "step-00000001").is_symlink() and files_below(tmp_path / "far") == {"x": b"mine"}


# what a sweep removes


def test_a_sweep_takes_what_is_ours_and_nothing_else(tmp_path):
    root = CheckpointRoot(tmp_path / "root", stale_s=0)
    toy.save(root, 1, 1)
    theirs = [".tmp-a-b", ".trash-x", f".tmp-x-{A[:31]}", f".tmp-x-{A.upper()}", f".replaced-a-{A}", f".tmp-a-{A}"]
    theirs += [f".trash-{B}", ".trash-step-00000001-backup"]
    top = made(tmp_path / "root", *(f"{name}/file" for name in theirs), f".trash-{A}", f".tmp-{A}")
    (top / f".tmp-link-{A}").symlink_to("step-00000001")
    before = files_below(top)
    root.begin("a-b", B)
    root.begin(2, "c" * 32)
    os.rename(root.temporary(2, "c" * 32).path, top / f".trash-{'d' * 32}")  # killed before it had its mark
    (top / f".tmp-new-{A}").mkdir()  # killed before its heartbeat
    assert sorted(root.leftovers()) == sorted([f".tmp-a-b-{B}", f".trash-{'d' * 32}", f".tmp-new-{A}"])
    assert sorted(root.sweep()) == sorted([f".tmp-a-b-{B}", f".trash-{'d' * 32}", f".tmp-new-{A}"])
    assert files_below(top) == before and (top / f".tmp-link-{A}").is_symlink()


def test_half_of_the_trash_is_known(tmp_path):
    """Killed at every step of a removal: the next sweep takes what is left."""
    fs = CrashFs()
    toy.save(CheckpointRoot(tmp_path, fs=fs), 1, 1)
    begin = fs.step.count
    CheckpointRoot(tmp_path, fs=fs)._strategy.remove("step-00000001")
    assert os.listdir(tmp_path) == [] and fs.step.count - begin > 12
    for at in range(0, fs.step.count - begin, 2):
        toy.save(CheckpointRoot(tmp_path), 1, 1)
        with pytest.raises(Killed):
            CheckpointRoot(tmp_path, fs=CrashFs(at))._strategy.remove("step-00000001")
        made(tmp_path, f".trash-{B}/mine")
        CheckpointRoot(tmp_path, stale_s=0).sweep()
        if (tmp_path / "step-00000001").exists():
            CheckpointRoot(tmp_path)._strategy.remove("step-00000001")
        assert os.listdir(tmp_path) == [f".trash-{B}"]


def test_a_lock_that_was_being_given_back(tmp_path):
    root = CheckpointRoot(tmp_path)
    lock = root.lock()
    shutil.copy(tmp_path / ".lock", tmp_path / f".trash-{A}")
    made(tmp_path, f".trash-{B}")
    (tmp_path / f".trash-{B[:-1]}c").write_text("{")
    (tmp_path / f".trash-{B[:-1]}d").touch()  # after a power loss
    root.sweep()
    lock.release()
    assert sorted(os.listdir(tmp_path)) == [f".trash-{B}", f".trash-{B[:-1]}c"]


# object stores


def test_in_an_object_store_too(single):
    """Content-addressed objects of others, 32 digits and all, and a web application's manifest."""
    url = "memory://ownership"
    store = open_dir(url)
    theirs = {f"blobs/{A}/file", f"blobs/{A}", f"blobs/{A}.trash", f"x/{A}.heartbeat", f"x/{A}/file"}
    theirs |= {"app/manifest.json", f"app/{B}/index.html", f"step-00000001/{A}/x"}
    store.write_all(dict.fromkeys(theirs, b"mine"))
    with pytest.raises(ValueError, match=r"app/manifest.json is there and belongs to no checkpoint: a save would"):
        save({"a": 1}, f"{url}/app", ps=single)
    manager = CheckpointManager(url, ps=single, keep_last=1, stale_s=0)
    for step in (1, 2, 2):
        manager.save(step, {"a": step})
    manager.close()
    CheckpointRoot(url).begin("plain", A)
    CheckpointRoot(url).temporary("plain", A).write("zarr.json", b"{}")
    save({"a": 1}, f"{url}/plain", ps=single)
    assert CheckpointRoot(url, stale_s=0).sweep("plain") == [f"plain/{A}"]
    ours = ("step-00000002", "plain", ".index")
    left = {name: store.read(name) for name in store.names() if not name.startswith(ours)}
    assert left == dict.fromkeys(theirs, b"mine")
    ours = set(store.names()) - theirs
    assert not [name for name in ours if name.startswith(f"plain/{A}") or name.endswith((".trash", ".heartbeat"))]


def test_a_commit_beside_a_sweep_of_an_object_store(monkeypatch):
    """At the moment at which the sweep judges what is being written."""
    root = CheckpointRoot("memory://beside")
    place = root.begin(7, A)
    for rank in range(2):
        toy.write_rank(place, rank, 1)
    real = Watch.unchanged

    def unchanged(watch, url, content):
        with monkeypatch.context() as patch:
            patch.setattr(Watch, "unchanged", real)
            toy.committed(CheckpointRoot("memory://beside"), 7, A)
        return real(watch, url, content)

    monkeypatch.setattr(Watch, "unchanged", unchanged)
    assert root.sweep() == [] and toy.version_of(root.open(7)) == 1
