"""The files of a checkpoint as objects of a tensorstore key-value store.

It knows neither directories nor renames, but an object appears as a whole or not at all, durable, and may be written
on a condition.
"""

import errno
import json
import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

import tensorstore as ts


class KvCheckpointDir:
    """The objects below a prefix, as a `CheckpointDir`.

    store: ends in "/". context: what it was opened with. url: needed where the store cannot tell it (an endpoint of
    its own). options: those of its address, from the `?` on. secret_spec: entries of its specification that an open
    store does not show, such as credentials.
    """

    def __init__(
        self,
        store: ts.KvStore,
        context: ts.Context | None = None,
        url: str | None = None,
        options: str = "",
        secret_spec: Mapping[str, Any] | None = None,
    ) -> None:
        self._store = store
        self.context = context
        self._options = options
        self._secret_spec = dict(secret_spec or {})
        self.url: str = store.url if url is None else url
        if options:
            self.address = f"{self.url.rstrip('/')}{options}"
        else:
            self.address = self.url

    def kvstore(self, prefix: str = "") -> dict[str, Any]:
        """The store's own driver."""
        spec = self._store.spec().to_json() | self._secret_spec
        return spec | {"path": spec.get("path", "") + prefix}

    def below(self, name: str) -> "KvCheckpointDir":
        """The prefix `name/` in it."""
        store = self._store / f"{name}/"
        url = f"{self.url}{name}/"
        return KvCheckpointDir(store, self.context, url, self._options, self._secret_spec)

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        if not offset and length is None:
            return self._read(name, slice(None)).value
        # one request for the range, where it lies inside of the object
        stop = None if length is None else offset + length
        try:
            return self._read(name, slice(offset, stop)).value
        except ValueError:
            # a range that goes beyond the end is refused, not cut
            return self.read(name)[offset:stop]

    def size(self, name: str, expected: int = 0) -> int | None:
        """Reads one byte where the size is `expected`, else all: a key-value store tells no sizes."""
        try:
            try:
                # the last byte: there is one, and none behind it
                start = max(expected - 1, 0)
                return start + len(self._read(name, slice(start, None)).value)
            except ValueError:
                return len(self.read(name))
        except FileNotFoundError:
            return None

    def names(self, prefix: str = "") -> list[str]:
        start = prefix.rstrip("/") + "/" if prefix else ""
        return sorted(name.decode() for name in self._store.list(_key_range(start)).result())

    def present(self, names: Iterable[str]) -> list[str]:
        """Those of the names that exist, asked for many at a time."""
        futures = {name: self._store.read(name) for name in names}
        return [name for name, future in futures.items() if future.result().state == "value"]

    def sizes(self) -> dict[str, int]:
        """See `CheckpointDir`: here every object is read, stores tell no sizes."""
        return {name: len(self.read(name)) for name in self.names()}

    def write(self, name: str, data: bytes) -> None:
        self._store.write(name, data).result()

    def write_all(self, files: Mapping[str, bytes]) -> None:
        # all are started before the first is waited for: a round trip for all, not for each
        futures = [self._store.write(name, data) for name, data in files.items()]
        for future in futures:
            future.result()

    def swap(self, name: str, old: bytes | None, new: bytes | None) -> bool:
        """A conditional put: compare and swap.

        Its condition is the generation that was read, also of a missing object: an empty `if_equal` is no condition
        for tensorstore. An empty generation in the answer says that it did not hold.
        """
        current = self._store.read(name).result()
        current_value = current.value if current.state == "value" else None
        if current_value != old:
            return False
        answer = self._store.write(name, new, if_equal=current.stamp.generation).result()
        return bool(answer.generation)

    def remove(self, name: str) -> None:
        self._store.write(name, None).result()

    def make_folder(self, folder: str) -> None:
        """Does nothing: there are no directories."""

    def remove_folder(self, folder: str) -> None:
        self.below(folder).remove_all()

    def remove_all(self) -> None:
        """Removes everything below the prefix."""
        self._store.delete_range(_key_range("")).result()

    def touch(self, name: str) -> None:
        """Sets the entry `time` of the object, which is JSON: a key-value store tells no times.

        Raises FileNotFoundError: it is gone, or goes meanwhile. That another one touches it meanwhile is as good.
        """
        old = self.read(name)
        new = json.dumps(json.loads(old) | {"time": time.time()}).encode()
        if not self.swap(name, old, new):
            self.read(name)  # raises if it is gone

    def age(self, name: str) -> float:
        try:
            return time.time() - json.loads(self.read(name))["time"]
        except FileNotFoundError:
            return math.inf

    def last_touch(self, name: str) -> str:
        try:
            return str(json.loads(self.read(name))["time"])
        except FileNotFoundError:
            return ""

    def _read(self, name: str, byte_range: slice) -> ts.KvStore.ReadResult:
        result = self._store.read(name, byte_range=byte_range).result()
        if result.state != "value":
            raise FileNotFoundError(errno.ENOENT, "no such object", self.url + name)
        return result


def _key_range(prefix: str) -> ts.KvStore.KeyRange:
    """Every key that starts with `prefix`, which is empty or ends in "/"."""
    end = prefix[:-1] + "0" if prefix else ""  # "0" follows "/"
    return ts.KvStore.KeyRange(prefix, end)
