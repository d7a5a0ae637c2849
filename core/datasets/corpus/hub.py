"""Data sets of the Hugging Face Hub by name, `hf://datasets/ORG/NAME[@REVISION][/FILES]`, as local files.

The files lie in the Hub's own cache (HF_HOME), downloaded once; the commit that they are of is in their paths.
"""

import fnmatch
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.extras import install

SCHEME = "hf://"
_FORM = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@([\w.-]+))?(?:/(.+?))?/?")


# ORG/NAME, as `datasets.load_dataset` takes it
_BARE = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def hub_remedy(name: str) -> str:
    """`; for the data set ...` of a name that is not there, if it is ORG/NAME without a folder ORG; else empty."""
    if _BARE.fullmatch(name) is None or Path(name).parent.exists():
        return ""
    return f"; for the data set of the Hugging Face Hub give {SCHEME}datasets/{name}"


_SPLIT = re.compile(r"(?<![a-z])(train|test|validation|valid|dev|eval)(?![a-z])")


def _example(paths: list[str]) -> str:
    """A pattern of the training files among `paths`, or of the first one's split."""
    path = next((path for path in paths if "train" in _SPLIT.findall(path)), paths[0])
    return re.sub(r"\d+", "*", path)


@dataclass(frozen=True)
class HubName:
    """repo: ORG/NAME. revision: a commit, branch or tag. files: a pattern of paths in it, or a folder; "": all."""

    name: str
    repo: str
    revision: str
    files: str

    @classmethod
    def parse(cls, name: str) -> "HubName":
        """Raises ValueError: a name of another form."""
        form = _FORM.fullmatch(name)
        if form is None:
            raise ValueError(
                f"{name} is no data set of the Hub; the form is hf://datasets/ORG/NAME, with @REVISION and /FILES "
                "where they are wanted (hf://datasets/ORG/NAME@main/data/train-*.parquet)"
            )
        repo, revision, files = form.groups(default="")
        return cls(name, repo, revision or "main", files)

    def matching(self, paths: Iterable[str], suffixes: tuple[str, ...]) -> list[str]:
        """Those of `paths` that are meant, sorted: of a known suffix, below `files` or like it.

        Raises ValueError: none; or those of several splits, of which nobody has named one.
        """
        all_paths = sorted(paths)
        selected = []
        for path in all_paths:
            below = not self.files or path.startswith(f"{self.files}/")
            # the card of the data set is no text of it
            is_data = path.endswith(suffixes) and path.rpartition("/")[2] != "README.md"
            if (below and is_data) or fnmatch.fnmatch(path, self.files):
                selected.append(path)
        if not selected:
            like = f" like {self.files!r}" if self.files else ""
            raise ValueError(
                f"{self.name}: none of its {len(all_paths)} files{like} can be read (they are "
                f"{', '.join(all_paths[:3]) or 'none'} ...); read are text, JSON lines and parquet"
            )
        splits = {split for path in selected for split in _SPLIT.findall(path)}
        if len(splits) > 1 and not self.files:
            raise ValueError(
                f"{self.name} has files of {len(splits)} splits ({', '.join(sorted(splits))}), and training text "
                f"must not hold the others; name the files of one, as {self.name}/{_example(selected)}"
            )
        return selected


def is_hub_name(name: object) -> bool:
    """Whether it names something on the Hub."""
    return str(name).startswith(SCHEME)


def hub_files(
    name: str, suffixes: tuple[str, ...], say: Callable[[str], None] | None = None
) -> list[Path]:
    """The local files of a data set, which are downloaded where they are not in the Hub's cache yet.

    suffixes: of the files that can be read. say: told what is downloaded, before it is; None: this process is quiet.
    Without a connection (HF_HUB_OFFLINE=1) those of an earlier download.
    Raises ValueError: no such data set or revision, nothing to read in it, more bytes than the disk has. ImportError.
    """
    hub_name = HubName.parse(name)
    hub = _hub_library(name)
    if say is None:
        hub.utils.disable_progress_bars()
    try:
        return _downloaded(hub, hub_name, suffixes, say)
    except (
        hub.errors.RepositoryNotFoundError,
        hub.errors.RevisionNotFoundError,
        hub.errors.HFValidationError,
    ) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{name}: the Hub has no such data set or revision, or this account may not read it ({reason}); compare "
            "the name with the page's address, and log in by `hf auth login` for what is private or gated"
        ) from error


def _hub_library(name: str) -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError as error:
        raise ImportError(f"{name} needs huggingface_hub: {install('data')}") from error
    return huggingface_hub


def _downloaded(
    hub: Any, hub_name: HubName, suffixes: tuple[str, ...], say: Callable[[str], None] | None
) -> list[Path]:
    repo = {"repo_id": hub_name.repo, "repo_type": "dataset"}
    try:
        info = hub.HfApi().dataset_info(
            hub_name.repo, revision=hub_name.revision, files_metadata=True
        )
    except (hub.errors.OfflineModeIsEnabled, ConnectionError, *_no_connection(hub)):
        return _found_in_cache(hub, hub_name, suffixes)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings}
    paths = hub_name.matching(sizes, suffixes)
    cached = [
        path
        for path in paths
        if isinstance(hub.try_to_load_from_cache(**repo, filename=path, revision=info.sha), str)
    ]
    missing = sum(size for path, size in sizes.items() if path in set(paths) - set(cached))
    _check_space(hub_name, len(paths) - len(cached), missing, hub.constants.HF_HUB_CACHE)
    if say is not None:
        say(
            f"{hub_name.name}: {len(paths):,} files of commit {info.sha[:12]}, {missing / 1e6:,.1f} MB of them to "
            "download"
        )
    # of a pattern's own characters none is meant: these are names
    names = [re.sub(r"([*?[])", r"[\1]", path) for path in paths]
    try:
        # by the name that was given: a run without a connection looks for that
        folder = hub.snapshot_download(**repo, revision=hub_name.revision, allow_patterns=names)
    except (hub.errors.LocalEntryNotFoundError, ConnectionError, *_no_connection(hub)) as error:
        raise ValueError(
            f"{hub_name.name}: the connection to the Hub was lost ({type(error).__name__}: {error}); the same "
            "command goes on with what is downloaded"
        ) from error
    return [Path(folder) / path for path in paths]


def _found_in_cache(hub: Any, hub_name: HubName, suffixes: tuple[str, ...]) -> list[Path]:
    """What earlier calls have downloaded. Raises ValueError: nothing."""
    folder = hub.constants.HF_HUB_CACHE
    repos = hub.scan_cache_dir().repos if Path(folder).exists() else ()
    for repo in repos:
        if (repo.repo_type, repo.repo_id) != ("dataset", hub_name.repo):
            continue
        for revision in repo.revisions:
            if hub_name.revision not in (*revision.refs, revision.commit_hash):
                continue
            root = revision.snapshot_path
            paths = [file.file_path.relative_to(root).as_posix() for file in revision.files]
            return [root / path for path in hub_name.matching(paths, suffixes)]
    raise ValueError(
        f"{hub_name.name}: the Hub was not reached, and none of its files is in the cache {folder}; download it "
        f"where there is a connection (hf download --repo-type dataset {hub_name.repo}), or name files on this disk"
    )


def _no_connection(hub: Any) -> tuple[type[Exception], ...]:
    """What the Hub's library lets through where there is no connection: its HTTP client's own errors."""
    # requests, httpx or httpx2, by the version of the library
    client = sys.modules[type(hub.utils.get_session()).__module__.partition(".")[0]]
    names = ("TransportError", "ConnectionError", "ReadTimeout")
    return tuple(getattr(client, name) for name in names if hasattr(client, name))


def _check_space(hub_name: HubName, count: int, nbytes: int, cache: str) -> None:
    existing = Path(cache)
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if nbytes > free:
        raise ValueError(
            f"{hub_name.name}: {count} files of {nbytes / 1e9:,.1f} GB are to be downloaded, and {cache} has "
            f"{free / 1e9:,.1f} GB; name some of them ({SCHEME}datasets/{hub_name.repo}/data/train-000*.parquet), or "
            "set HF_HOME to a larger disk"
        )
