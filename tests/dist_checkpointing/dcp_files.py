"""Directories as torch's DCP and Megatron's `torch_dist` write them, with pieces wherever a test wants them."""

import io
import json
import pickle
from itertools import pairwise, product

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

VALUE = torch.arange(12.0).view(3, 4)


def whole(tensor):
    """One box: all of it."""
    return [tuple((0, n) for n in tensor.shape)]


def tiles(*cuts):
    """Boxes between these edges of each dim."""
    return list(product(*([*pairwise(edges)] for edges in cuts)))


def rows(*cuts):
    """`VALUE` in pieces of these rows."""
    return {"w": (VALUE, [(cut, (0, 4)) for cut in cuts])}


def saved(value):
    """The bytes of a `torch.save`."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def facts(tensor, boxes):
    """What `.metadata` says of a tensor in these boxes."""
    chunks = [
        dcp.ChunkStorageMetadata(torch.Size([a for a, _ in box]), torch.Size([b - a for a, b in box]))
        for box in boxes
    ]
    return dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=tensor.dtype), tensor.size(), chunks)


def write(folder, tensors, values=(), *, nested=None, change=lambda told: None, blob=lambda name, data: data):
    """tensors: name -> (tensor, boxes that are pieces). nested: name -> its path. change: of the metadata; blob: of
    the bytes of a piece."""
    folder.mkdir()
    told = dcp.Metadata({}, planner_data=nested, storage_data={}, storage_meta=dcp.StorageMeta(), version="1.0.0")
    files = [bytearray(), bytearray()]

    def put(index, value):
        number = len(told.storage_data) % 2
        data = blob(index.fqn, saved(value))
        told.storage_data[index] = _StorageInfo(f"__{number}_0.distcp", len(files[number]), len(data))
        files[number] += data

    for name, (tensor, boxes) in tensors.items():
        told.state_dict_metadata[name] = facts(tensor, boxes)
        for number, box in enumerate(boxes):
            part = tensor[tuple(slice(a, b) for a, b in box)].clone()
            put(dcp.MetadataIndex(name, [a for a, _ in box], number), part)
    for name, value in dict(values).items():
        told.state_dict_metadata[name] = dcp.BytesStorageMetadata()
        put(dcp.MetadataIndex(name), value)
    change(told)
    for number, data in enumerate(files):
        (folder / f"__{number}_0.distcp").write_bytes(data)
    (folder / ".metadata").write_bytes(pickle.dumps(told))
    return folder


def megatron(folder, tensors, values=(), *, common, backend="torch_dist"):
    """With what Megatron adds: `metadata.json`, `common.pt`, and every rank's plan in `.metadata`."""

    def plans(told):
        items = [
            WriteItem(index, WriteItemType.SHARD, TensorWriteData(chunk, entry.properties, entry.size))
            for name, entry in told.state_dict_metadata.items()
            for chunk in getattr(entry, "chunks", ())
            for index in [dcp.MetadataIndex(name, chunk.offsets)]
        ]
        told.all_local_plans = [SavePlan(items), SavePlan([])]

    write(folder, tensors, values, change=plans)
    (folder / "common.pt").write_bytes(saved(common))
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": backend, "sharded_backend_version": 1}))
    return folder
