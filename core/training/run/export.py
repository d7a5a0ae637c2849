"""The model of a run as a folder that `transformers` loads, made at the run's end."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from core.data_parallel import DataParallel
from core.dist_checkpointing.planning.ranks import from_first
from core.models.huggingface import save_huggingface
from core.models.huggingface.written import form_of_run
from core.parallel_state import ParallelState
from core.parallel_state.config import raise_all


def export_rules(
    folder: str | Path, described_as: Mapping[str, Any] | None, source: str | None
) -> Iterator[tuple[bool, str]]:
    """Whether the model can go to `folder`.

    described_as: what the model is, None where it is no GPTModel. source: the folder that it began as.
    """
    name = f"checkpoint.export_huggingface={folder}"
    path = Path(folder).expanduser()
    yield (
        "://" not in str(folder),
        f"{name}: a local directory is needed; copy the files from there",
    )
    empty = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    yield empty, f"{name} is there already; give a directory that is to be made"
    yield (
        described_as is not None,
        f"{name} needs a GPTModel: no family of Hugging Face's is known for others",
    )
    if described_as is not None and source is None:
        try:
            form_of_run(described_as, None)
        except ValueError as error:
            yield False, f"{name}: {error}"


class ExportAtEnd:
    """Writes the model of a run; collective where it is made, and where it is called.

    facts: of the run, as `facts_of_run` gives them. Raises ValueError on all ranks: a model that cannot be exported.
    """

    def __init__(
        self, folder: str, facts: Mapping[str, Any], ps: ParallelState, say: Callable[[str], None]
    ) -> None:
        self._folder = folder
        self._facts = facts
        self._ps = ps
        self._say = say
        self._source: str | None = facts.get("settings", {}).get("model.huggingface")
        # only the first rank's disk counts; every rank is told
        from_first(
            lambda: raise_all("this run", export_rules(folder, facts.get("model"), self._source)),
            ps,
        )

    def __call__(self, shard: DataParallel) -> None:
        save_huggingface(
            shard,
            Path(self._folder).expanduser(),
            self._source,
            tokenizer=self._facts.get("tokenizer"),
        )
        self._say(f"exported to {self._folder}: AutoModelForCausalLM.from_pretrained loads it")
