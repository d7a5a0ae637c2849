"""The file operations of real programs, tensorstore's threads included: run under strace, its log as changes."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass

import pytest

CALLS = (
    "open,creat,openat,mkdir,mkdirat,write,writev,pwrite64,pwritev,pwritev2,ftruncate,fallocate,fsync,fdatasync,"
    "rename,renameat,renameat2,link,linkat,unlink,unlinkat,rmdir,close"
)
LONGEST = 1 << 20  # bytes of one write that the log holds


def strace(*command, log, **options):
    """Runs a command and all it starts under strace, into the file `log`. Skips where that is not possible."""
    can = (
        shutil.which("strace") and subprocess.run(["strace", "-o", "/dev/null", "true"], check=False).returncode == 0
    )
    if not can and os.environ.get("CI") == "true":
        pytest.fail("strace does not run here: apt-get install strace, and allow ptrace")
    if not can:
        pytest.skip("strace does not run here: apt-get install strace")
    traced = ["strace", "-f", "-y", "-xx", "-s", str(LONGEST), "-o", str(log), "-e", f"trace={CALLS}"]
    subprocess.run([*traced, *map(str, command)], check=True, **options)


@dataclass
class Call:
    """One system call that succeeded; `begin` and `end`: the lines of the log between which it happened."""

    name: str
    arguments: str
    result: str
    begin: int
    end: int

    def strings(self):
        """Every quoted argument."""
        found = re.findall(r'"((?:\\x[0-9a-f]{2})*)"(\.\.\.)?', self.arguments)
        assert not any(cut for _, cut in found), f"a {self.name} of more than {LONGEST} bytes"
        return [_bytes(text) for text, _ in found]

    def paths(self):
        """Every path among the arguments: those that are relative lie in the directory before them."""
        folders = [_bytes(text).decode() for text in re.findall(r"(?:AT_FDCWD|\d+)<([^>]*)>", self.arguments)]
        names = [string.decode() for string in self.strings()]
        if len(folders) < len(names):
            folders = [os.getcwd()] * len(names)
        return [os.path.join(folder, name) for folder, name in zip(folders, names, strict=True)]

    def file(self):
        """The path of the open file that is the first argument."""
        return _bytes(re.match(r"\d+<([^>]*)>", self.arguments)[1]).decode(errors="replace")


def _bytes(text):
    return bytes.fromhex(text.replace("\\x", ""))


def calls(lines):
    """Every call that succeeded. Calls of several threads overlap: such a one has two lines."""
    begun, found = {}, []
    for number, line in enumerate(lines):
        thread, text = re.match(r"(\d+) +(.*)", line.rstrip("\n")).groups()
        if text.endswith("<unfinished ...>"):
            begun[thread] = number, text.removesuffix("<unfinished ...>")
            continue
        begin = number
        if resumed := re.match(r"<\.\.\. \w+ resumed>", text):
            begin, first = begun.pop(thread)
            text = first + text[resumed.end() :]
        if whole := re.fullmatch(r"(\w+)\((.*)\) += (\d+)(<.*>.*)?", text):
            found.append(Call(whole[1], whole[2], whole[3], begin, number))
    return found


def changes(lines, top):
    """What the calls changed below `top`, in order, as `crash.Disk` knows it; paths are relative to `top`.

    A call did what it did at some moment between its two lines. Whatever waited for it comes behind its end, so the
    ends are a possible order; only that a directory may be used before the end of its mkdir. A sync covers what was
    there at its begin, and holds from its end on.
    """
    ordered = []
    for call in calls(lines):
        for late, change in _changes(call):
            paths = [os.path.relpath(path, top) for path in change[1 : 3 if change[0] == "rename" else 2]]
            if not any(path.startswith("..") for path in paths):
                ordered.append((call.end if late else call.begin, (change[0], *paths, *change[1 + len(paths) :])))
    return [change for _, change in sorted(ordered, key=lambda item: item[0])]


def _changes(call):
    """(whether it is so at the end or from the begin on, change) of one call."""
    kind = call.name.removesuffix("at2").removesuffix("at") if not call.name.startswith("open") else "open"
    if kind in ("open", "creat"):
        if kind == "creat" or "O_CREAT" in call.arguments:
            yield True, ("create", *call.paths(), kind == "creat" or "O_TRUNC" in call.arguments)
    elif kind == "mkdir":
        yield False, ("mkdir", *call.paths())
    elif kind in ("write", "writev", "pwritev", "pwritev2"):  # ours go on where the file ends; the oracle test knows
        data = b"".join(call.strings())[: int(call.result)]
        yield True, ("append", call.file(), data[: len(data) // 2])  # a kill may come in the middle
        yield True, ("append", call.file(), data[len(data) // 2 :])
    elif kind in ("fsync", "fdatasync"):
        yield False, ("syncing", call.file(), call.end)
        yield True, ("sync", call.file(), call.end)
    elif kind == "rename":
        yield True, ("rename", *call.paths())
    elif kind in ("unlink", "rmdir"):
        yield True, ("unlink", *call.paths())
    elif kind == "link":
        yield True, ("link", call.paths()[-1])  # nobody does, and `Disk` refuses it
    elif kind != "close":
        yield True, (kind, call.file())
