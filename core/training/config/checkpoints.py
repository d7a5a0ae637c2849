"""Rules of the checkpoints that a run begins with, or goes on from: they are there, and are checkpoints."""

from collections.abc import Iterator
from pathlib import Path

from core import dist_checkpointing
from core.dist_checkpointing.storage.address import parse_address
from core.their_folders import is_huggingface
from core.training.config.parts import CheckpointConfig


def _no_checkpoint(name: str, url: str) -> str:
    """What is said of checkpoint.load and checkpoint.weights that are none."""
    if is_huggingface(url):
        return (
            f"checkpoint.{name}={url} is a Hugging Face folder, not a checkpoint; give model.huggingface={url} in "
            "its place: the run begins with its weights"
        )
    if Path(url).is_file():
        return (
            f"checkpoint.{name}={url} is a file, not a checkpoint, which is a folder; a program makes one of "
            "torch.save's weights: model.load_state_dict(torch.load(FILE)), then "
            "core.dist_checkpointing.save({'model': model.sharded_state_dict()}, DIR)"
        )
    if (Path(url) / ".metadata").is_file():
        return (
            f"checkpoint.{name}={url} is a checkpoint of torch's DCP or Megatron's; "
            f"`python -m core.dist_checkpointing import {url} DIR` makes one of ours of it"
        )
    # here, so that a configuration is read without what reads checkpoints
    from core.dist_checkpointing.reading.newest import newest_checkpoint

    found = "it has no manifest.json" if Path(url).exists() else "there is no such folder"
    example = "as runs/checkpoints/step-00001000"
    try:
        # of a directory of steps, or of a run's output
        if newest := newest_checkpoint(url):
            example = f"as its newest, {newest.rstrip('/')}"
    except (ValueError, OSError):
        pass
    return (
        f"checkpoint.{name}={url} is no checkpoint: {found}; give a step's own directory, {example}"
    )


def checkpoint_rules(checkpoint: CheckpointConfig) -> Iterator[tuple[bool, str]]:
    """On local disks; object stores are asked when they are read."""
    # one checkpoint to start from
    load = checkpoint.load
    for name, url in (("load", load), ("weights", checkpoint.weights)):
        if url is not None and "://" not in url:
            is_there = (Path(url) / "manifest.json").is_file()
            yield is_there, "" if is_there else _no_checkpoint(name, url)
    # the run's own directory
    directory = checkpoint.directory
    if directory is None:
        return
    try:
        parse_address(directory)
    except ValueError as error:
        yield False, f"checkpoint.directory={directory}: {error}"
        return
    if checkpoint.resume == "must" and load is None and "://" not in directory:
        steps = len(dist_checkpointing.CheckpointRoot(directory).steps())
        yield (
            steps > 0,
            f"checkpoint.resume=must, but {directory} has {steps} steps; use auto for a first run",
        )
