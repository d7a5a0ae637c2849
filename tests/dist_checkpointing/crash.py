"""What a kill and a power loss leave: a file system and an object store that die at one step, a disk that forgets."""

import os
from pathlib import Path

from core.dist_checkpointing.storage.fs import Fs


class Killed(BaseException):
    """The process is gone: nothing may catch it, nothing works after it."""


class Steps:
    """Counts steps; at number `at` of them, and ever after, there is only Killed."""

    def __init__(self, at=None):
        self.at, self.count = at, 0

    def alive(self):
        if self.at is not None and self.count > self.at:
            raise Killed

    def __call__(self):
        self.alive()
        self.count += 1
        self.alive()


class CrashFs(Fs):
    """No threads, so that the order is always the same. `log` has all that was done; a sync is only logged."""

    def __init__(self, at=None):
        super().__init__()
        self.step, self.log = Steps(at), []

    def _done(self, *change):
        self.log.append(change)

    def map(self, function, items):
        return [function(item) for item in items]

    def mkdir(self, path):
        self.step()
        super().mkdir(path)
        self._done("mkdir", path)

    def write(self, path, data, *, exclusive=False):
        self.step()
        super().write(path, data[: len(data) // 2], exclusive=exclusive)
        self._done("write", path, data[: len(data) // 2])
        self.step()
        super().write(path, data)
        self._done("write", path, data)

    def sync(self, path):
        self.step()
        assert os.path.exists(path)
        self._done("sync", path)

    def rename(self, source, target):
        self.step()
        super().rename(source, target)
        self._done("rename", source, target)

    def unlink(self, path):
        self.step()
        super().unlink(path)
        self._done("unlink", path)

    def rmdir(self, path):
        self.step()
        super().rmdir(path)
        self._done("unlink", path)

    def touch(self, path):
        self.step()
        super().touch(path)

    def read(self, path, offset=0, length=None):
        self.step.alive()
        return super().read(path, offset, length)

    def listdir(self, path):
        self.step.alive()
        return super().listdir(path)


class Node:
    """A file or directory: what it holds `now`, and every state since the last sync, the oldest of which is safe."""

    def __init__(self, now):
        self.now, self.since = now, [b"" if isinstance(now, bytes) else {}]

    def change(self, now):
        self.now = now
        self.since.append(now)

    def sync(self, state=None):
        """`state`, which it had when the sync began, is safe: by default what it has now."""
        known = [number for number, other in enumerate(self.since) if other is (self.now if state is None else state)]
        self.since = self.since[known[0] :] if known else self.since  # none: a later one is safe already


class Disk:
    """The changes of a log as a disk sees them: content and names are safe as far as each was synced."""

    def __init__(self, top):
        self.top = Path(top)
        self.root = Node({})
        self._syncing = {}

    def apply(self, change):
        kind, path, *rest = change
        if kind == "syncing":  # a sync that takes its time is two changes, with one number
            node = self._find(path)
            self._syncing[rest[0]] = node, node.now
            return
        if kind == "sync":
            node, state = self._syncing.pop(rest[0]) if rest else (self._find(path), None)
            node.sync(state)
            return
        parent, name = self._find(os.path.dirname(path)), os.path.basename(path)
        if kind == "mkdir":
            parent.change({name: Node({}), **parent.now})
        elif kind == "write":
            if name not in parent.now:
                parent.change({**parent.now, name: Node(b"")})
            parent.now[name].change(rest[0])
        elif kind == "create":
            if name not in parent.now:
                parent.change({**parent.now, name: Node(b"")})
            elif rest[0]:  # truncated
                parent.now[name].change(b"")
        elif kind == "append":
            parent.now[name].change(parent.now[name].now + rest[0])
        elif kind == "unlink":
            parent.change({other: node for other, node in parent.now.items() if other != name})
        elif kind == "rename":
            assert os.path.dirname(rest[0]) == os.path.dirname(path)
            node = parent.now[name]
            kept = {other: node for other, node in parent.now.items() if other != name}
            parent.change({**kept, os.path.basename(rest[0]): node})
        else:
            raise AssertionError(f"{kind} of {path} is not known")

    def _find(self, path):
        node = self.root
        for part in Path(path).relative_to(self.top).parts:
            node = node.now[part]
        return node

    def left(self, content, names):
        """What a power loss leaves, as nested dicts: of each file and directory the state that these two choose."""
        return _left(self.root, content, names)

    def after_power_loss(self, target, content, names):
        """Writes what is left into `target`."""
        write_tree(self.left(content, names), Path(target))


def _left(node, content, names):
    if isinstance(node.now, bytes):
        return content(node.since)
    return {name: _left(child, content, names) for name, child in names(node.since).items()}


def write_tree(tree, path):
    """Files and directories from nested dicts."""
    if isinstance(tree, bytes):
        path.write_bytes(tree)
        return
    path.mkdir(exist_ok=True)
    for name, child in tree.items():
        write_tree(child, path / name)


def read_tree(path):
    """The inverse of `write_tree`."""
    return {child.name: child.read_bytes() if child.is_file() else read_tree(child) for child in path.iterdir()}


class CrashStore:
    """A tensorstore KvStore that dies at one of its writes. Deleting a range is deleting its keys."""

    def __init__(self, store, step):
        self._store, self._step = store, step
        self.url, self.spec, self.list, self.read = store.url, store.spec, store.list, store.read

    def __truediv__(self, name):
        return CrashStore(self._store / name, self._step)

    def write(self, *args, **kwargs):
        self._step()
        return self._store.write(*args, **kwargs)

    def delete_range(self, span):
        for key in sorted(self._store.list(span).result()):
            self.write(key, None).result()
        return self._store.delete_range(span)
