"""zarr.json files: what is written is canonical, and only that is read."""

import json
import math

import pytest

from core.dist_checkpointing.format.arrays import STORED_DTYPES, ArrayInfo
from core.dist_checkpointing.format.json_files import canonical_json
from core.dist_checkpointing.format.zarr_metadata import array_metadata, check_metadata, group_metadata, info_of

INFO = ArrayInfo((8, 64, 32), "float32")


def metadata(inner=(1, 4, 32)):
    return json.loads(canonical_json(array_metadata(INFO, (1, 16, 32), inner, {"unit": "m"})))


@pytest.mark.parametrize("dtype", STORED_DTYPES)
@pytest.mark.parametrize("inner", [None, (1, 4, 32)])
def test_own_metadata_pass_the_check(dtype, inner):
    value = array_metadata(ArrayInfo((8, 64, 32), dtype), (1, 16, 32), inner, {"x": [1]})
    check_metadata("model/w", json.loads(canonical_json(value)))
    bits = dtype in ("bfloat16", "float8_e4m3fn", "float8_e5m2")
    assert value["attributes"] == {"x": [1], **({"torch_dtype": dtype} if bits else {})}


def test_canonical_json():
    assert canonical_json({"b": [1.5, None], "a": "é"}) == rb'{"a":"\u00e9","b":[1.5,null]}'
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError):
            canonical_json({"a": value})


def test_groups():
    one = array_metadata(ArrayInfo((2,), "int8"), (2,), None)
    groups = group_metadata({"x": one, "a/b/y": one, "a/z": one}, {"paracore": {"format": 1}})
    assert sorted(groups) == ["", "a", "a/b"]
    assert groups[""]["attributes"] == {"paracore": {"format": 1}}
    assert sorted(groups[""]["consolidated_metadata"]["metadata"]) == ["a", "a/b", "a/b/y", "a/z", "x"]
    with pytest.raises(ValueError, match="'a/z/w' lies inside the array 'a/z'"):
        group_metadata({"a/z": one, "a/z/w": one}, {})


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", "../a", "a/../../b", "a/.", "...", "a\\b", "a\0", "__a", "x/zarr.json"]
)
def test_keys_that_are_no_paths(key):
    with pytest.raises(ValueError, match="cannot be a part of a key"):
        check_metadata(key, metadata())
    with pytest.raises(ValueError, match="cannot be a part of a key"):
        group_metadata({key: metadata()}, {})


def edited(path, value, inner=(1, 4, 32)):
    result = metadata(inner)
    *head, last = path
    at = result
    for step in head:
        at = at[step]
    at[last] = value
    return result


SHARD = ("codecs", 0, "configuration")
CELL = ("chunk_grid", "configuration", "chunk_shape")
HOSTILE = {
    "zarr 4": (("zarr_format",), 4, "zarr_format is 4, this version reads 3; a newer version"),
    "a group": (("node_type",), "group", "node_type"),
    "a new field": (("storage_transformers",), [{"name": "x"}], "'storage_transformers' is unknown"),
    "zstd": (("codecs", 0), {"name": "zstd", "configuration": {}}, "codecs.*zstd"),
    "zstd in a shard": (
        (*SHARD, "codecs", 1),
        {"name": "zstd"},
        "codecs: 1: name is 'zstd', this version reads 'crc32c'",
    ),
    "no checksum": ((*SHARD, "codecs"), [{"name": "bytes", "configuration": {"endian": "little"}}], "codecs"),
    "big endian": ((*SHARD, "codecs", 0, "configuration", "endian"), "big", "codecs"),
    "index at the start": ((*SHARD, "index_location"), "start", "codecs"),
    "no codecs": (("codecs",), [], "not an array's"),
    "codecs are no list": (("codecs",), {"name": "bytes"}, "not an array's"),
    "unknown type": (("data_type",), "complex256", "type is 'complex256'"),
    "bits of nothing": (("data_type",), "uint16", "fill_value is 'NaN', this version reads 65535"),
    "a type of another's bits": (("attributes", "torch_dtype"), "bfloat16", "data_type is 'float32'"),
    "an unhashable type": (("attributes", "torch_dtype"), [], "not an array's"),
    "no attributes": (("attributes",), None, "not an array's"),
    "fill value": (("fill_value",), 0.0, "fill_value"),
    "separator": (("chunk_key_encoding", "configuration", "separator"), "/", "chunk_key_encoding"),
    "grid": (("chunk_grid", "name"), "rectilinear", "chunk_grid"),
    "shape is no list": (("shape",), 8, "not an array's"),
    "shape is text": (("shape",), "abc", "shape is"),
    "negative": (("shape",), [8, -64, 32], "integers from 1"),
    "a fraction": (("shape",), [8, 64.0, 32], "integers from 1"),
    "a truth": (("shape",), [True, 64, 32], "integers from 1"),
    "nothing": (("shape",), [0, 64, 32], "integers from 1"),
    "huge dim": (("shape",), [8, 2**63, 32], "integers from 1"),
    "huge array": (("shape",), [2**31, 2**31, 32], "larger than"),
    "many dims": (("shape",), [1] * 65, "65 dims"),
    "cells of other dims": (CELL, [16, 32], "3 dims in cells of 2"),
    "cell of nothing": (CELL, [1, 0, 32], "integers from 1"),
    "many cells": (("shape",), [8, 2**40, 32], "too many"),
    "huge pieces": ((*SHARD, "chunk_shape"), [1, 5, 32], "do not divide"),
    "pieces of nothing": ((*SHARD, "chunk_shape"), [1, 0, 32], "integers from 1"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_metadata_are_refused(case):
    path, value, message = HOSTILE[case]
    with pytest.raises(ValueError, match=message) as error:
        check_metadata("model/w", edited(path, value))
    assert "'model/w'" in str(error.value) and len(str(error.value)) < 500


def test_a_field_is_missing():
    value = metadata()
    del value["fill_value"]
    with pytest.raises(ValueError, match="'fill_value' is missing"):
        check_metadata("model/w", value)


@pytest.mark.parametrize("value", [None, [], "x", 3, {}, {"codecs": [3]}, {"shape": [3]}])
def test_what_is_no_metadata(value):
    with pytest.raises(ValueError, match="not an array's"):
        check_metadata("model/w", value)


def test_more_dims_than_any_library_reads():
    info = ArrayInfo((1,) * 40, "float32")
    with pytest.raises(ValueError, match="40 dims"):
        check_metadata("w", array_metadata(info, info.shape, None))


def test_a_chunk_larger_than_memory():
    info = ArrayInfo((2**40,), "float32")
    with pytest.raises(ValueError, match="too many or too large"):
        check_metadata("w", array_metadata(info, info.shape, None))


@pytest.mark.parametrize(
    "info",
    [
        ArrayInfo((8, 64, 32), "bfloat16", 2, stacked=True, stack="decoder.layers"),
        ArrayInfo((8, 64, 32), "float32", None, stacked=True),
        ArrayInfo((3, 64, 32), "float32", 1, True, stack="decoder.layers", layers=(1, 2, 7), depth=8, axis="ep"),
        ArrayInfo((64, 32), "float32", 0, ragged=True),
        ArrayInfo((64, 32), "float32", 1),
        ArrayInfo((), "int64"),
    ],
)
def test_metadata_tell_what_the_array_is(info):
    value = json.loads(canonical_json(array_metadata(info, info.shape, None)))
    check_metadata("model/decoder.layers.w", value)
    assert info_of(value) == info


STACK = {"stack": "decoder.layers"}


@pytest.mark.parametrize(
    "attributes, message",
    [
        ({"tp_dim": 3}, "tp_dim is 3, of 3 dims"),
        ({"tp_dim": -1}, "tp_dim is -1"),
        ({"tp_dim": True}, "tp_dim is True"),
        ({"tp_dim": "0"}, "tp_dim is '0'"),
        ({"tp_dim": 0, "stack": "decoder.layers"}, "of which the first counts layers"),
        ({"stack": 1}, "the stack 1 is not"),
        ({"stack": "decoder.layer"}, "not the beginning of its name"),
        ({"stack": "model/decoder.layers"}, "not the beginning of its name"),
        ({"tp_dim": 1, "axis": "tp"}, "the axis 'tp' cuts no dim"),
        ({"axis": "ep"}, "the axis 'ep' cuts no dim"),
        ({"layers": [1], "depth": 9}, "0 rows cannot be of the layers"),
        (STACK | {"layers": list(range(8))}, "of None"),
        (STACK | {"layers": [1, 2], "depth": 9}, r"8 rows cannot be of the layers \[1, 2\] of 9"),
        (STACK | {"layers": list(range(8)), "depth": 8}, "8 rows cannot be"),
        (STACK | {"layers": "01234567", "depth": 9}, "8 rows cannot be"),
        (STACK | {"layers": [0, 1, 2, 3, 4, 5, 6, True], "depth": 9}, "8 rows cannot be"),
        (STACK | {"layers": [0, 1, 2, 3, 4, 6, 5, 7], "depth": 9}, "not ascending numbers below 9"),
        (STACK | {"layers": [0, 1, 2, 3, 4, 5, 6, 9], "depth": 9}, "not ascending numbers below 9"),
    ],
)
def test_attributes_that_cannot_be(attributes, message):
    value = array_metadata(INFO, (1, 16, 32), None, attributes)
    with pytest.raises(ValueError, match=message):
        check_metadata("model/decoder.layers.w", value)
