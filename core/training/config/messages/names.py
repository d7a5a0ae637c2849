"""What is said about a name that no field has: the nearest one, or ours for a name from elsewhere."""

import re
from collections.abc import Mapping
from difflib import get_close_matches

from core.elsewhere import ELSEWHERE, REMARKS, TORCHTITAN
from core.field_names import ALIKE
from core.training.config.fields import Field
from core.training.config.messages.deepspeed import DEEPSPEED
from core.training.config.messages.huggingface import HUGGINGFACE
from core.training.config.messages.megatron import MEGATRON

# words of `ParallelConfig` and of the layers' rules -> the field of a run that says the same
_IN_A_RUN = (
    (r"^(ParallelConfig|DataConfig|model): ", ""),
    (r"\btensor_model_parallel_size\b", "parallel.tensor"),
    (r"(?<![\w.])(tensor|pipeline|context|data|expert|replicate)(?=[=(]\d)", r"parallel.\1"),
    (
        r"(?<![\w.])(num_attention_heads|num_query_groups|ffn_hidden_size|hidden_size|num_layers)(?==)",
        r"model.\1",
    ),
    (r"(?<![\w.])(global_batch_size|micro_batch_size|recompute)(?==)", r"training.\1"),
    (r"(?<![\w.])(sequence_length)(?==)", r"data.\1"),
    (r"(?<![\w.])(schedule)(?==)", r"pipeline.\1"),
    (
        r"(?<![\w.])(zero_stage|offload|offload_fraction|grad_dtype|reduce_dtype)(?==)",
        r"data_parallel.\1",
    ),
)


def in_the_runs_names(text: str) -> str:
    """A rule's message with the names that the user writes: parallel.tensor=3 for tensor_model_parallel_size=3."""
    for pattern, name in _IN_A_RUN:
        text = re.sub(pattern, name, text)
    return text


def unknown(name: str, fields_by_name: Mapping[str, Field]) -> str:
    """What is said about a name that no field has: the nearest one that there is."""
    sections = sorted({field.section for field in fields_by_name.values()} - {""})
    if name in sections:
        first = _first_of_section(name, fields_by_name)
        remedy = MEGATRON.get(name, f"give {name}.{first} or others")
        return f"{name} is a part of a run, with fields of its own; {remedy}"
    if remark := _remark(name, fields_by_name):
        return f"unknown {name}; {remark}"
    section, _, key = name.rpartition(".")
    nearest = _nearest(name, section, key, fields_by_name)
    if nearest:
        return f"unknown {name or repr(name)}; did you mean {' or '.join(nearest)}?"
    first = name.partition(".")[0]
    keys = {field.key for field in fields_by_name.values()}
    if section and first not in sections and (first in keys or _remark(first, fields_by_name)):
        # a group of theirs, of which we have one field: zero_optimization.stage
        return f"unknown {name}{unknown(first, fields_by_name).removeprefix(f'unknown {first}')}"
    if section in sections:
        return f"unknown {name}; `python -m core.training.config --template` lists the fields of {section}"
    if close := get_close_matches(section, sections, n=1, cutoff=ALIKE):
        return f"unknown {name}; did you mean the part {close[0]}?"
    return f"unknown {name or repr(name)}; the parts are {', '.join(sections)}"


def _remark(name: str, fields_by_name: Mapping[str, Field]) -> str:
    """What to do in the place of giving `name`; empty: nothing but a field's name is known."""
    _, dot, key = name.rpartition(".")
    if name in TORCHTITAN:
        return ""
    # theirs may be the name of a field of ours that means something else: --load
    if not dot or all(field.key != key for field in fields_by_name.values()):
        for answers in (MEGATRON, DEEPSPEED, HUGGINGFACE):
            if key in answers:
                return answers[key]
    return REMARKS.get(name) or REMARKS.get(key, "")


def _nearest(name: str, section: str, key: str, fields_by_name: Mapping[str, Field]) -> list[str]:
    """Fields that were probably meant; none rather than one that is merely spelt alike somewhere."""
    if name in TORCHTITAN:
        return [TORCHTITAN[name]]
    if key in ELSEWHERE:
        return [ELSEWHERE[key]]
    if same_key := [field.name for field in fields_by_name.values() if field.key == key]:
        return same_key
    if not section and (
        titans := {ours for theirs, ours in TORCHTITAN.items() if theirs.endswith(f".{key}")}
    ):
        return sorted(titans)
    # in its own part, then in all; a part is compared with parts, so that it lends no likeness to the name
    own = [field.key for field in fields_by_name.values() if field.section == section]
    if close := get_close_matches(key, own, n=1, cutoff=ALIKE):
        return [f"{section}.{close[0]}" if section else close[0]]
    return _by_key(key, fields_by_name)


def _first_of_section(section: str, fields_by_name: Mapping[str, Field]) -> str:
    return next(field.key for field in fields_by_name.values() if field.section == section)


def _by_key(key: str, fields_by_name: Mapping[str, Field]) -> list[str]:
    nearest = get_close_matches(
        key, [field.key for field in fields_by_name.values()], n=1, cutoff=ALIKE
    )
    return [field.name for field in fields_by_name.values() if field.key in nearest]
