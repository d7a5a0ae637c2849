"""Megatron's checkpoints of a file per rank (`mp_rank_TT[_PPP]/model_optim_rng.pt`) as arrays of the whole model.

Weights of megatron-core's `GPTModel` and of Megatron's older `language_model`, under the names and in the shapes that
`core.models.gpt.GPTModel` saves: layers in one array, heads by group, gate and up apart.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from core.dist_checkpointing.tools.foreign.dcp import ByteRange, SavedTensor
from core.dist_checkpointing.tools.foreign.foreign_checkpoint import ForeignCheckpoint
from core.dist_checkpointing.tools.foreign.megatron_files import MegatronRank, read_ranks
from core.dist_checkpointing.tools.foreign.megatron_settings import settings_of
from core.dist_checkpointing.tools.foreign.torch_archive import ArchivedTensor
from core.parallel_state.flat import Box

# of Megatron's older model, and of Transformer Engine's fused layers: name -> as our local layers call it
RENAMED = {
    r"^language_model\.(embedding|output_layer)\.": r"\1.",
    r"^language_model\.(encoder|transformer)\.": "decoder.",
    r"\.(self_)?attention\.query_key_value\.": ".self_attention.linear_qkv.",
    r"\.(self_)?attention\.dense\.": ".self_attention.linear_proj.",
    r"\.mlp\.dense_h_to_4h\.": ".mlp.linear_fc1.",
    r"\.mlp\.dense_4h_to_h\.": ".mlp.linear_fc2.",
    r"\.input_norm\.": ".input_layernorm.",
    r"\.post_attention_(layer)?norm\.": ".pre_mlp_layernorm.",
    r"\.final_norm\.": ".final_layernorm.",
    r"\.self_attention\.linear_qkv\.layer_norm_": ".input_layernorm.",
    r"\.mlp\.linear_fc1\.layer_norm_": ".pre_mlp_layernorm.",
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(\d+)\.(linear_fc[12])\.weight|(linear_fc[12])\.weight(\d+))"
)
WHOLE = re.compile(r".*(layernorm\.(weight|bias)|linear_(proj|fc2)\.bias)|mlp\.router\.\w+")
BY_ROWS = re.compile(r".*linear_(qkv|fc1)\.(weight|bias)")
BY_COLUMNS = re.compile(r".*linear_(proj|fc2)\.weight")
OUTSIDE = {
    "embedding.word_embeddings.weight": 0,
    "output_layer.weight": 0,
    "embedding.position_embeddings.weight": None,
    "decoder.final_layernorm.weight": None,
    "decoder.final_layernorm.bias": None,
}
# a second copy of the embedding on the last stage; what no layer here keeps
COPIES = ("word_embeddings_for_head", "_extra_state", "rotary_pos_emb.inv_freq")


@dataclass(frozen=True)
class _Place:
    """Where a rank's tensor goes: into array `key`, at `index` of its first dims, of `counts`.

    shape: of the rank's tensor behind these. split: the dim of it that tensor ranks cut.
    """

    key: str
    shape: tuple[int, ...]
    split: int | None = None
    index: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()


class _Layout:
    """What Megatron's arguments say of shapes and ranks."""

    def __init__(self, arguments: Mapping[str, Any], layers: int) -> None:
        self.layers = layers
        self.heads = int(arguments["num_attention_heads"])
        is_grouped = arguments.get("group_query_attention")
        self.groups = int(arguments["num_query_groups"]) if is_grouped else self.heads
        self.tied = not arguments.get("untie_embeddings_and_output_weights")
        self.gated = bool(arguments.get("swiglu"))
        self.experts = int(arguments.get("num_experts") or 0)
        self.tensor_ranks = int(arguments["tensor_model_parallel_size"])
        self.expert_ranks = int(arguments.get("expert_model_parallel_size") or 1)
        expert_tensor_ranks = arguments.get("expert_tensor_parallel_size") or self.tensor_ranks
        if self.experts and expert_tensor_ranks != self.tensor_ranks:
            raise ValueError(
                f"experts are cut over {expert_tensor_ranks} tensor ranks, all else over {self.tensor_ranks}; save "
                "it as torch_dist with Megatron"
            )
        if self.groups % self.tensor_ranks:
            raise ValueError(
                f"{self.groups} query groups over {self.tensor_ranks} tensor ranks: copies of heads are not read; "
                "save it as torch_dist with Megatron"
            )

    def place(self, name: str, shape: tuple[int, ...], first_layer: int, ep: int) -> _Place | None:
        """Of a rank's tensor, by its name with the layer's number in its stage; None: no such place is known."""
        if name in OUTSIDE:
            return _Place(f"model/{name}", shape, OUTSIDE[name])
        layer = _LAYER.fullmatch(name)
        if layer is None:
            return None
        index: tuple[int, ...] = (first_layer + int(layer[1]),)
        counts: tuple[int, ...] = (self.layers,)
        inner = layer[2]
        expert = _EXPERT.fullmatch(inner)
        if expert is not None:
            number = int(expert[1] or expert[4])
            inner = f"mlp.experts.{expert[2] or expert[3]}.weight"
            index += (ep * (self.experts // self.expert_ranks) + number,)
            counts += (self.experts,)
        key = f"model/decoder.layers.{inner}"
        if WHOLE.fullmatch(inner):
            return _Place(key, shape, None, index, counts)
        if BY_COLUMNS.fullmatch(inner):
            return _Place(key, shape, 1, index, counts)
        if not BY_ROWS.fullmatch(inner):
            return None
        if ".linear_qkv." in inner:
            groups = self.groups // self.tensor_ranks
            per_group = self.heads // self.groups + 2
            by_head = (groups, per_group, shape[0] // (groups * per_group), *shape[1:])
            return _Place(key, by_head, 0, index, counts)
        if self.gated:
            return _Place(key, (2, shape[0] // 2, *shape[1:]), 1, index, counts)
        return _Place(key, shape, 0, index, counts)


class _Whole:
    """The arrays of the whole model, put together from ranks' tensors. unplaced: names whose place is not known."""

    def __init__(self, layout: _Layout) -> None:
        self._layout = layout
        # key -> shape and dtype
        self._forms: dict[str, tuple[tuple[int, ...], str]] = {}
        self._shards: dict[str, list[tuple[Box, ByteRange]]] = {}
        self.unplaced: list[str] = []

    def add(self, rank: MegatronRank, name: str, tensor: ArchivedTensor, first_layer: int) -> None:
        """Note where a rank's tensor lies; what several ranks hold is taken once.

        Raises ValueError: it does not go with what other files said of this array.
        """
        for pattern, replacement in RENAMED.items():
            name = re.sub(pattern, replacement, name)
        is_copy = name == "output_layer.weight" and self._layout.tied
        if is_copy or any(part in name for part in COPIES):
            return
        place = self._layout.place(name, tensor.shape, first_layer, rank.ep)
        if place is None:
            self.unplaced.append(name)
            return
        is_expert = len(place.counts) > 1
        if (rank.tp and place.split is None) or (rank.ep and not is_expert):
            return
        box = [(i, i + 1) for i in place.index] + [(0, size) for size in place.shape]
        shape = [*place.counts, *place.shape]
        if place.split is not None:
            dim = len(place.index) + place.split
            size = place.shape[place.split]
            box[dim] = (rank.tp * size, (rank.tp + 1) * size)
            shape[dim] = self._layout.tensor_ranks * size
        form = self._forms.setdefault(place.key, (tuple(shape), tensor.dtype))
        if form != (tuple(shape), tensor.dtype):
            raise ValueError(
                f"{tensor.file}: {name} makes {place.key} {shape} of {tensor.dtype}, another file {list(form[0])} of "
                f"{form[1]}; the files are not of one checkpoint"
            )
        shards = self._shards.setdefault(place.key, [])
        shards.append((tuple(box), tensor.interval(0, tensor.numel)))

    def tensors(self) -> dict[str, SavedTensor]:
        """key -> an array, and where its parts lie."""
        return {
            key: SavedTensor(shape, dtype, tuple(self._shards[key]))
            for key, (shape, dtype) in self._forms.items()
        }


def read_megatron(folder: str) -> ForeignCheckpoint:
    """`model/NAME` of a GPT's weights, and Megatron's arguments as values.

    Raises ValueError: ranks that are missing, a layout that is not read, damage.
    """
    step, ranks = read_ranks(folder)
    first = ranks[0]
    is_old = any("language_model" in chunk for chunk in first.chunks)
    if is_old and float(first.version or 0) < 2:
        raise ValueError(
            f"{step} has Megatron's checkpoint version {first.version}, whose rows of query, key and value lie "
            "otherwise; load and save it with a Megatron of version 2 or later"
        )
    first_layers, count = _first_layers(ranks)
    whole = _Whole(_Layout(first.arguments, count))
    for rank in ranks:
        for number, chunk in enumerate(rank.chunks):
            for name, tensor in _tensors(chunk):
                whole.add(rank, name, tensor, first_layers[number, rank.pp])
    contents = ForeignCheckpoint(str(first.version), whole.tensors())
    contents.skipped = dict.fromkeys(whole.unplaced, "its place in a GPTModel is not known")
    contents.skipped["optimizer"] = (
        "Megatron's states of a file per rank are not read: save it as torch_dist with Megatron for those"
    )
    contents.settings = settings_of(first.arguments)
    contents.values = {f"megatron/{name}": value for name, value in first.values.items()}
    return contents


def _first_layers(ranks: list[MegatronRank]) -> tuple[dict[tuple[int, int], int], int]:
    """(chunk, pipeline rank) -> the number of its first layer in the model; and how many layers there are.

    Interleaved stages: all ranks' first chunks come before all ranks' second ones.
    """
    chunk_of = {(n, rank.pp): chunk for rank in ranks for n, chunk in enumerate(rank.chunks)}
    first_layers = {}
    count = 0
    for number, pp in sorted(chunk_of):
        first_layers[number, pp] = count
        found = set()
        for name, _ in _tensors(chunk_of[number, pp]):
            if match := re.search(r"\blayers\.(\d+)\.", name):
                found.add(int(match[1]))
        if found != set(range(len(found))):
            raise ValueError(f"pipeline rank {pp} holds the layers {sorted(found)} of its stage")
        count += len(found)
    return first_layers, count


def _tensors(chunk: Any, prefix: str = "") -> Iterator[tuple[str, ArchivedTensor]]:
    """All tensors of nested dicts, under their names joined by dots."""
    for name, value in chunk.items():
        path = f"{prefix}{name}"
        if isinstance(value, ArchivedTensor):
            yield path, value
        elif isinstance(value, dict):
            yield from _tensors(value, f"{path}.")
