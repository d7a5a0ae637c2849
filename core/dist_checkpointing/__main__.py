"""`python -m core.dist_checkpointing inspect|verify|sign|diff|reshard|prune|tag|export|average|import PATH …`:
checkpoints on a machine without accelerators or the model, and, but for `average` and `import`, without torch. PATH
is a checkpoint, or a directory of steps, of which the newest is taken.

Exit code 0: fine; 1: `verify` found damage, `diff` a difference; 2: an error, printed on standard error.
"""

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Sequence

from core.dist_checkpointing.planning.cuts import check_layout
from core.dist_checkpointing.publish.check import check
from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot, step_name
from core.dist_checkpointing.publish.manifest import MANIFEST, SIGNATURE, read_manifest
from core.dist_checkpointing.reading.stored import StoredCheckpoint
from core.dist_checkpointing.storage.address import below
from core.dist_checkpointing.storage.checkpoint_dir import open_checkpoint_dir
from core.dist_checkpointing.tools.console import progress, say, size_text
from core.dist_checkpointing.tools.diff import differences
from core.dist_checkpointing.tools.export import DTYPES, export, per_rank, tensors
from core.dist_checkpointing.tools.offline import check_new, write_offline
from core.dist_checkpointing.tools.reshard import GOOD_AMPLIFICATION, amplification, copy, cut_for
from core.dist_checkpointing.tools.show import facts, text
from core.dist_checkpointing.tools.sign import sign, unsigned
from core.dist_checkpointing.tools.steps import add_step_commands
from core.their_folders import huggingface_told

PATH = (
    "a checkpoint, or a directory of steps, of which the newest is taken; or a URL (gs://, s3://)"
)


def find(path: str) -> str:
    """The checkpoint at a path or URL, or the newest step there, which is printed. FileNotFoundError: neither."""
    if _holds_manifest(path):
        return path
    root = CheckpointRoot(path)
    steps = root.steps()
    if not steps:
        raise FileNotFoundError(
            huggingface_told(path, "a checkpoint")
            or f"{path} is no checkpoint, it has no {MANIFEST}, and no directory of steps; give one of the two"
        )
    newest = steps[-1]
    say(f"{path}: the newest of {len(steps)} steps, {step_name(newest)}", error=True)
    try:
        return root.open(newest).address
    except OSError:
        # it cannot be read: the command that reads it reports why
        return below(root.files.address, step_name(newest))


def _holds_manifest(path: str) -> bool:
    """Also True if the manifest cannot be read: the command that reads it reports why."""
    directory = open_checkpoint_dir(path)
    try:
        return directory.size(MANIFEST) is not None
    except (OSError, ValueError):
        return True


def _inspect(options: argparse.Namespace) -> int:
    stored = StoredCheckpoint.open(find(options.path))
    if options.json:
        # DEL is the one control character that JSON does not escape, and terminals obey
        print(json.dumps(facts(stored), indent=2).replace("\x7f", "\\u007f"))
    else:
        say(text(stored))
    return 0


def _verify(options: argparse.Namespace) -> int:
    directory = open_checkpoint_dir(find(options.path))
    begin = time.perf_counter()
    problems = check(directory, digests=options.fast, full=not options.fast, jobs=options.jobs)
    if options.key and not problems:
        problems = unsigned(directory, options.key)
    seconds = time.perf_counter() - begin
    if problems:
        say(problems)
        say(f"{directory.url}: {len(problems)} problems, {seconds:.1f} s")
        return 1
    files = read_manifest(directory).files
    size = size_text(sum(size for size, _ in files.values()))
    verdict = "every byte is right"
    if options.fast:
        verdict = "their sizes and digests are right"
    if options.key:
        verdict += f", signed by {options.key}"
    say(f"{directory.url}: {len(files)} files, {size}, {verdict}, {seconds:.1f} s")
    return 0


def _sign(options: argparse.Namespace) -> int:
    directory = open_checkpoint_dir(find(options.path))
    count = sign(directory, options.key)
    say(f"{directory.url}{SIGNATURE}: {count} files are signed")
    return 0


def _diff(options: argparse.Namespace) -> int:
    a, b = (StoredCheckpoint.open(find(path)) for path in (options.a, options.b))
    lines = list(differences(a, b))
    say(lines or f"the same: {len(a.keys)} arrays, {len(a.objects)} objects")
    if lines:
        return 1
    return 0


def _reshard(options: argparse.Namespace) -> int:
    stored = StoredCheckpoint.open(find(options.source))
    tp = options.tp
    pp = options.pp
    check_layout({key: stored.info(key) for key in stored.keys}, tp, pp)
    if options.per_rank:
        return _write_per_rank(stored, options.destination, tp, pp)
    begin = time.perf_counter()
    layout = f"tp={tp} pp={pp}"
    # is a copy worth it: bytes read over bytes needed, with the cells of today and with new ones
    metadata = cut_for(stored, tp)
    before, after = (amplification(stored, cut, tp, pp) for cut in (stored.metadata, metadata))
    if not options.copy and before <= max(GOOD_AMPLIFICATION, after):
        hint = ""
        if before > GOOD_AMPLIFICATION:
            hint = ", which a copy would not better because the arrays are small"
        say(
            f"no data movement needed: of {stored.directory.url} the ranks of {layout} read {before:.2f} times the "
            f"bytes they need{hint}; load it at {layout} as it is"
        )
        return 0
    total = sum(map(stored.nbytes, stored.keys))
    with progress("copying", total) as done:
        copy(stored, options.destination, metadata, {"resharded": {"tp": tp, "pp": pp}}, done)
    say(
        f"{options.destination}: {_size_and_time(total, begin)}, verified; {layout} reads {after:.2f} times the "
        f"bytes it needs, {before:.2f} before"
    )
    return 0


def _write_per_rank(stored: StoredCheckpoint, destination: str, tp: int, pp: int) -> int:
    begin = time.perf_counter()
    total = sum(tensor.nbytes for tensor in tensors(stored))
    with progress("writing", total) as done:
        ranks = per_rank(stored, destination, tp, pp, done)
    written_bytes = sum(tensor.nbytes for rank_tensors in ranks.values() for tensor in rank_tensors)
    say(f"{destination}: {len(ranks)} ranks, {_size_and_time(written_bytes, begin)}")
    return 0


def _export(options: argparse.Namespace) -> int:
    stored = StoredCheckpoint.open(find(options.source))
    begin = time.perf_counter()
    dtype = DTYPES[options.dtype]
    total = sum(tensor.nbytes for tensor in tensors(stored, dtype))
    with progress("exporting", total) as done:
        exported = export(stored, options.destination, dtype, done)
    say(f"{options.destination}: {len(exported)} tensors, {_size_and_time(total, begin)}")
    return 0


def _average(options: argparse.Namespace) -> int:
    try:
        from core.dist_checkpointing.tools.average import averaged_bytes, write_averaged
    except ImportError as error:
        raise ValueError(
            f"average rounds to the dtype of the weights, and {error}: install torch"
        ) from None
    stored = StoredCheckpoint.open(find(options.source))
    begin = time.perf_counter()
    check_new(options.destination)
    nbytes = averaged_bytes(stored)
    with progress("averaging", nbytes) as done:
        copied = write_averaged(stored, options.destination, done)
    as_they_are = ""
    if copied:
        as_they_are = f"; as they are, for they were not trained: {', '.join(copied)}"
    say(
        f"{options.destination}: the averaged weights, {_size_and_time(nbytes, begin)}, verified{as_they_are}"
    )
    return 0


def _import(options: argparse.Namespace) -> int:
    try:
        from core.dist_checkpointing.tools.importing import plan, run_of
    except ImportError as error:
        raise ValueError(f"import reads files of torch, and {error}: install torch") from None
    begin = time.perf_counter()
    # before hours of reading
    check_new(options.destination)
    imported = plan(options.source)
    metadata = imported.metadata
    nbytes = imported.nbytes
    with progress("importing", nbytes) as done:
        cells = imported.cells(metadata, done)
        write_offline(
            options.destination, metadata, imported.attributes, run_of(imported), nbytes, cells
        )
    for key, reason in sorted(imported.skipped.items()):
        say(f"left out: {key}: {reason}")
    if imported.note:
        say(imported.note)
    counts = (
        f"{len(metadata)} arrays, {len(imported.objects)} values, {len(imported.skipped)} left out"
    )
    say(f"{options.destination}: {counts}, {_size_and_time(nbytes, begin)}, verified")
    return 0


def _size_and_time(nbytes: int, begin: float) -> str:
    seconds = time.perf_counter() - begin
    return f"{size_text(nbytes)} in {seconds:.1f} s"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m core.dist_checkpointing", description="Tools for checkpoints."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    inspect = commands.add_parser(
        "inspect", help="arrays, objects, sizes, and the layout that wrote them"
    )
    inspect.add_argument("path", help=PATH)
    inspect.add_argument("--json", action="store_true", help="for programs")
    inspect.set_defaults(run=_inspect)

    verify = commands.add_parser("verify", help="is every file the one that was saved")
    verify.add_argument("path", help=PATH)
    verify.add_argument(
        "--fast", action="store_true", help="sizes and digests only: a few bytes of each file"
    )
    verify.add_argument(
        "-j", "--jobs", type=int, default=32, metavar="N", help="files at a time (default 32)"
    )
    verify.add_argument(
        "--key", metavar="PEM", help="and is it signed by the owner of this public key"
    )
    verify.set_defaults(run=_verify)

    sign = commands.add_parser("sign", help="sign every file, for stores that others can write to")
    sign.add_argument("path", help=PATH)
    sign.add_argument("--key", metavar="PEM", required=True, help="an Ed25519 private key")
    sign.set_defaults(run=_sign)

    diff = commands.add_parser("diff", help="where two checkpoints differ, by their digests")
    diff.add_argument("a", help=PATH)
    diff.add_argument("b", help=PATH)
    diff.set_defaults(run=_diff)

    _add_writing_commands(commands)
    add_step_commands(commands)
    return parser


def _add_writing_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Commands that make another checkpoint, or files for other programs."""
    reshard = commands.add_parser(
        "reshard", help="a copy for another layout, if one is needed at all"
    )
    reshard.add_argument("source", help=PATH)
    reshard.add_argument("destination", help="a directory or URL that is to be made")
    reshard.add_argument("--tp", type=int, required=True, metavar="N", help="tensor-parallel size")
    reshard.add_argument(
        "--pp", type=int, default=1, metavar="N", help="pipeline-parallel size (default 1)"
    )
    reshard.add_argument(
        "--copy", action="store_true", help="copy also where nothing needs to move"
    )
    reshard.add_argument(
        "--per-rank",
        action="store_true",
        help="weights as mp_rank_XX/*.safetensors, for other programs",
    )
    reshard.set_defaults(run=_reshard)

    export_parser = commands.add_parser("export", help="the model's weights in another format")
    export_parser.add_argument("source", help=PATH)
    export_parser.add_argument("destination", help="a directory that is to be made")
    export_parser.add_argument("--to", choices=["safetensors"], default="safetensors")
    export_parser.add_argument(
        "--dtype", choices=DTYPES, default="as-saved", help="of floating values (default as-saved)"
    )
    export_parser.set_defaults(run=_export)

    average = commands.add_parser(
        "average",
        help="the averaged weights of a run with optimizer.ema_decay, as a checkpoint of a model",
    )
    average.add_argument("source", help=PATH)
    average.add_argument("destination", help="a directory or URL that is to be made")
    average.set_defaults(run=_average)

    import_parser = commands.add_parser(
        "import",
        help="a directory of torch's DCP, Megatron's torch_dist, or DeepSpeed's, as a checkpoint",
    )
    import_parser.add_argument("source", help="a directory that holds .metadata, or latest")
    import_parser.add_argument("destination", help="a directory or URL that is to be made")
    import_parser.set_defaults(run=_import)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (ValueError, OSError, RuntimeError) as error:
        say(f"error: {' '.join(str(error).split())}", error=True)
    except MemoryError as error:
        say(f"error: out of memory: {error}", error=True)
    except KeyboardInterrupt:
        say("interrupted, nothing was changed", error=True)
    except Exception as error:
        say(
            f"error: {type(error).__name__}: {error}: a mistake of this program, please report it",
            error=True,
        )
    return 2


def _use_one_heap() -> None:
    """With glibc: one heap for all threads.

    Else each of tensorstore's threads keeps what it freed, which comes to several times what is in use at any moment.
    """
    arena_max = -8  # M_ARENA_MAX of malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(arena_max, 1)


if __name__ == "__main__":
    _use_one_heap()
    sys.exit(main())
