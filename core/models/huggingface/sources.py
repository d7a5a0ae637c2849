"""Where the tensors of a Hugging Face model come from: a state_dict, or the safetensors files of a folder."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from core.models.huggingface.facts import no_folder
from core.parallel_state.layout import Slices

# masks and rotary tables that older transformers stored beside the weights; we compute them
_BUFFERS = re.compile(r"(transformer\.h\.\d+\.attn\.(masked_)?bias|model\..*rotary_emb\.inv_freq)")


class WeightSource(Protocol):
    """Tensors by name, read in parts."""

    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, slices: Slices) -> Tensor: ...


# read from mapped files before they are closed and opened again
MAPPED_BYTES = 128 << 20


class StateDict:
    """A state_dict in memory."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = state

    def names(self) -> Iterable[str]:
        return self._state.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._state[name].shape)

    def read(self, name: str, slices: Slices) -> Tensor:
        return self._state[name][slices]


class Folder:
    """The `.safetensors` files of a folder: each read takes the bytes of the part from the file, no more.

    Raises ValueError: no such files (pickles are not read), an index that names a missing file, a truncated file.
    ImportError: safetensors is missing.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        self._files: dict[str, Any] = {}
        self._read_bytes = 0  # from the files that are open
        self._file_of = self._located()

    def _located(self) -> dict[str, str]:
        """Name of each tensor -> its file. One file is taken before an index, as transformers does."""
        if not self.folder.is_dir():
            raise ValueError(no_folder(self.folder))
        index = self.folder / "model.safetensors.index.json"
        if (self.folder / "model.safetensors").is_file():
            return dict.fromkeys(self._open("model.safetensors").keys(), "model.safetensors")
        if index.exists():
            return self._indexed(index)
        files = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if len(files) > 1:
            raise ValueError(
                f"{self.folder} holds {len(files)} files and no {index.name}; restore it"
            )
        if not files:
            pickles = sorted(path.name for path in self.folder.glob("*.bin"))
            contents = "no weights"
            if pickles:
                contents = f"{pickles[0]}, a pickle that could run code"
            raise ValueError(
                f"{self.folder} holds {contents}, .safetensors files are needed; "
                "model.save_pretrained(folder, safe_serialization=True) writes them"
            )
        return dict.fromkeys(self._open(files[0]).keys(), files[0])

    def _indexed(self, index: Path) -> dict[str, str]:
        """What an index says, if the files hold it."""
        try:
            file_of = {
                str(name): str(file)
                for name, file in json.loads(index.read_text("utf-8"))["weight_map"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} cannot be read: {error!r}; restore it") from None
        files = sorted(set(file_of.values()))
        if missing := [file for file in files if not (self.folder / file).is_file()]:
            raise ValueError(
                f"{self.folder} lacks {len(missing)} of {len(files)} files, {missing[0]}; fetch it again"
            )
        # an index of another download would name tensors that are elsewhere, or leave some out
        names_of_file = {file: set(self._open(file).keys()) for file in files}
        if lost := sorted(
            name for name, file in file_of.items() if name not in names_of_file[file]
        ):
            raise ValueError(
                f"{self.folder}: {lost[0]} is not in {file_of[lost[0]]}, as the index says; restore it"
            )
        if unlisted := sorted(set().union(*names_of_file.values()) - file_of.keys()):
            raise ValueError(
                f"{self.folder}: {unlisted[0]} is in a file, and not in the index; restore it"
            )
        return file_of

    def _open(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._files:
            try:
                self._files[file] = safe_open(self.folder / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{self.folder / file} is damaged or truncated ({error}); fetch it again"
                ) from None
        return self._files[file]

    def names(self) -> Iterable[str]:
        return self._file_of.keys()

    @property
    def nbytes(self) -> int:
        """Of its files together."""
        return sum((self.folder / file).stat().st_size for file in set(self._file_of.values()))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """As safetensors names it: "BF16"."""
        return str(self._slice(name).get_dtype())

    def read(self, name: str, slices: Slices) -> Tensor:
        values: Tensor = self._slice(name)[slices]
        # The pages of a mapped file that were read count as this process's memory until the file is closed.
        self._read_bytes += values.nbytes
        if self._read_bytes > MAPPED_BYTES:
            self._files.clear()
            self._read_bytes = 0
        return values

    def _slice(self, name: str) -> Any:
        return self._open(self._file_of[name]).get_slice(name)


class Recorded:
    """A source that remembers which tensors were asked for, and names what is missing."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._names = set(source.names())
        self.used = set[str]()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def first_names(self, count: int) -> list[str]:
        """Some names, for messages."""
        return list(self._source.names())[:count]

    def use(self, name: str) -> None:
        """Raises ValueError: there is no such tensor."""
        if name not in self._names:
            raise ValueError(
                f"the Hugging Face weights lack {name}, which the configuration asks for; are both of one model?"
            )
        self.used.add(name)

    def shape(self, name: str) -> tuple[int, ...]:
        self.use(name)
        return self._source.shape(name)

    def read(self, name: str, slices: Slices) -> Tensor:
        self.use(name)
        return self._source.read(name, slices)

    def unused(self) -> list[str]:
        """Tensors nobody asked for, without the buffers that are computed here."""
        return [
            name
            for name in self._source.names()
            if name not in self.used and not _BUFFERS.fullmatch(name)
        ]
