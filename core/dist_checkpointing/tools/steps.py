"""The commands for a directory of steps: `prune` and `tag`."""

import argparse
from dataclasses import fields

from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot, step_name
from core.dist_checkpointing.publish.retention import MODES, Retention
from core.dist_checkpointing.tools.console import say


def _tag(options: argparse.Namespace) -> int:
    root = CheckpointRoot(options.root)
    if options.delete:
        if options.name not in root.tags():
            raise ValueError(
                f"{root.url} has no tag {options.name}; tags there: {', '.join(root.tags()) or 'none'}"
            )
        root.untag(options.name)
    elif options.name is not None:
        if options.step is None and not root.steps():
            raise FileNotFoundError(f"{options.root} holds no steps; give the directory above them")
        root.tag(options.name, options.step if options.step is not None else root.steps()[-1])
    for name, step in sorted(root.tags().items()):
        print(f"{name} {step_name(step)}")
    return 0


def _prune(options: argparse.Namespace) -> int:
    root = CheckpointRoot(options.root)
    rules = {field.name: getattr(options, field.name) for field in fields(Retention)}
    # an object store shows no age of heartbeats: they are watched for a while
    root.watch()
    if not root.steps() and not root.leftovers(thorough=True):
        raise FileNotFoundError(
            f"{options.root} holds no steps, nor what killed jobs left; give the directory above"
        )
    if options.dry_run:
        removed = root.surplus(**rules)
        verb = "would remove"
        swept = root.leftovers(thorough=True)
    else:
        lock = root.lock()
        try:
            # first: it makes the index of an object store complete
            swept = root.sweep(thorough=True)
            removed = root.retain(**rules)
            verb = "removed"
        finally:
            lock.release()
    for name in [*map(step_name, removed), *swept]:
        say(f"{verb} {name}")
    remaining = len(set(root.steps()) - set(removed))
    say(
        f"{root.url}: {verb} {len(removed)} steps, {remaining} {'would be' if options.dry_run else 'are'} kept"
    )
    return 0


def add_step_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add both to those of `python -m core.dist_checkpointing`."""
    prune = commands.add_parser("prune", help="remove old steps, and what killed jobs left")
    prune.add_argument("root", help="a directory of steps, or a URL")
    prune.add_argument(
        "--keep-last", type=int, required=True, metavar="N", help="newest steps to keep"
    )
    prune.add_argument("--keep-every", type=int, metavar="N", help="keep multiples of N too")
    prune.add_argument("--keep-hours", type=float, metavar="H", help="keep one per H hours too")
    prune.add_argument(
        "--keep-best", metavar="METRIC", help="keep those with the smallest values of a metric too"
    )
    prune.add_argument(
        "--keep-best-count", type=int, default=1, metavar="N", help="how many (default 1)"
    )
    prune.add_argument(
        "--keep-best-mode", choices=MODES, default="min", help="max: the largest values"
    )
    prune.add_argument("--dry-run", action="store_true", help="only say what would go")
    prune.set_defaults(run=_prune)

    tag = commands.add_parser(
        "tag", help="let a name stand for a step, which is then kept; without a name: list them"
    )
    tag.add_argument("root", help="a directory of steps, or a URL")
    tag.add_argument("name", nargs="?", help="letters, digits, _.=+-")
    tag.add_argument("--step", type=int, metavar="N", help="default: the newest")
    tag.add_argument("--delete", action="store_true", help="remove the tag, not the step")
    tag.set_defaults(run=_tag)
