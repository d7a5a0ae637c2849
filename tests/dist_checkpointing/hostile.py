"""`python -m tests.dist_checkpointing.hostile FOLDER OUT`: what every command says of every directory in a folder, in
little memory. Without torch, as the command line is."""

import os
import resource
import sys
from pathlib import Path

from core.dist_checkpointing.__main__ import main

MEMORY = 2 << 30  # bytes, beside what importing this takes


def watched(folder, out):
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    for name in sorted(os.listdir(folder)):
        path = f"{folder}/{name}"
        new = f"{out}/{len(os.listdir(out))}"
        for words in ("verify", path), ("verify", "--fast", path), ("inspect", path), ("diff", path, path):
            said(name, *words)
        said(name, "export", path, new)


def said(name, *words):
    print(f"== {name}: {' '.join(words[:-1])}", flush=True)
    print("status", main(words), flush=True)


if __name__ == "__main__":
    watched(*sys.argv[1:])
