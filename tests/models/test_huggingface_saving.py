"""A model that many ranks hold together goes to transformers: bit for bit what a checkpoint's export writes."""

import errno
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from core.data_parallel import DataParallel
from core.dist_checkpointing import save
from core.dist_checkpointing.format.arrays import ArrayInfo
from core.dist_checkpointing.planning import exchange
from core.dist_checkpointing.planning.plan import plan_gathering
from core.models.gpt import gpt_stages
from core.models.gpt.description import description
from core.models.huggingface import exporting, from_huggingface, load_huggingface, save_huggingface
from core.optimizer import sharded_state_dict
from core.parallel_state.collectives import all_to_all
from core.pipeline import schedules
from tests.models.huggingface import TODAY, random_model
from tests.models.test_huggingface import CONFIGS
from tests.models.test_huggingface_folders import files_of
from tests.states import state

FILE_BYTES = 20_000
BYTES_PER_MESSAGE = 16  # parts of messages begin at multiples of it


def made(kind, dtype, weights, ps, schedule):
    """stage -> model of this rank."""
    arguments = from_huggingface({**CONFIGS, **TODAY}[kind](), params_dtype=dtype).arguments()
    pp = ps.size("pp")
    placement = schedules.placement(schedule, pp) if pp > 1 else (0,)
    stages = gpt_stages(**arguments, parallel=ps, placement=placement)
    for stage in stages.values():
        load_huggingface(stage, weights)
    return stages


def both_ways(kind, dtype, weights, layout, zero, schedule, folder):
    """Saves a checkpoint and a folder; (bytes received by each all-to-all, bytes of the largest parameter)."""
    ps = state(**layout)
    stages = made(kind, dtype, weights, ps, schedule)
    shard = DataParallel(stages, ps, zero_stage=zero, bucket_size=500)
    said = description(next(iter(stages.values())))
    save({"model": sharded_state_dict(shard)}, str(folder / "ckpt"), ps=ps, run={"model": said})
    received = []

    def counted(message, group, *, send_rows, receive_rows):
        received.append(sum(receive_rows))
        return all_to_all(message, group, send_rows=send_rows, receive_rows=receive_rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "all_to_all", counted)
        save_huggingface(shard, folder / "live", file_bytes=FILE_BYTES)
    # what `initialize` returns has it; modules know the layout that they were built for
    save_huggingface(SimpleNamespace(shard=shard), folder / "engine", file_bytes=FILE_BYTES)
    if zero < 3:
        modules = nn.ModuleDict({str(number): stage for number, stage in stages.items()})
        save_huggingface(modules if ps.size("pp") > 1 else modules["0"], folder / "modules", file_bytes=FILE_BYTES)
    return received


# layout, ZeRO stage, schedule, dtype, kind
CASES = [
    ({"tp": 2, "pp": 2}, 1, "zb-v", torch.bfloat16, "smollm3"),
    ({"pp": 2}, 3, "1f1b", torch.float32, "gemma3"),
    ({"tp": 2}, 3, "", torch.bfloat16, "gpt2"),
    ({"expert": 2}, 2, "", torch.float32, "mixtral"),
    ({"tp": 2, "pp": 2}, 3, "zb-v", torch.bfloat16, "deepseek_v3"),
]
PLAIN, LAYERED = ("llama3", "phi3", "gpt2-untied"), ("gemma3-scaled", "olmo2", "smollm3-window")
MORE = [
    (layout, zero, schedule, torch.float32, kind)
    for layout, schedule, kinds in [
        ({"tp": 4}, "", PLAIN),
        ({"tp": 2, "pp": 2}, "1f1b", PLAIN),
        ({"pp": 2}, "zb-v", LAYERED),
        ({}, "", LAYERED),
    ]
    for kind in kinds
    for zero in (0, 3)
]
ALL = [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)]


@pytest.mark.parametrize("layout, zero, schedule, dtype, kind", ALL)
def test_all_ranks_write_what_the_export_of_their_checkpoint_writes(
    ranks, tmp_path, layout, zero, schedule, dtype, kind
):
    theirs = random_model({**CONFIGS, **TODAY}[kind]()).to(dtype)
    weights = {name: tensor.detach() for name, tensor in theirs.state_dict().items()}
    received = ranks(both_ways, kind, dtype, weights, layout, zero, schedule, tmp_path, world=4)
    exporting.export_huggingface(tmp_path / "ckpt", tmp_path / "exported", file_bytes=FILE_BYTES, check=True)
    live, exported = files_of(tmp_path / "live"), files_of(tmp_path / "exported")
    assert live == exported and len(live) > 4
    assert files_of(tmp_path / "engine") == live
    assert zero == 3 or files_of(tmp_path / "modules") == live
    # the first rank receives no more at once than one parameter, the others nothing
    largest = max(parameter.nbytes for parameter in theirs.parameters())
    assert max(received[0], default=0) <= 3 * largest + 64 * BYTES_PER_MESSAGE
    assert not any(map(sum, received[1:]))


def test_one_process_writes_its_model_as_it_is(tmp_path):
    config = TODAY["qwen2"]()
    theirs = random_model(config).float()
    theirs.save_pretrained(tmp_path / "source")
    ps = state()
    (stage,) = made("qwen2", torch.float32, theirs.state_dict(), ps, "").values()
    save_huggingface(stage, tmp_path / "live", tmp_path / "source", ps=ps)
    save({"model": stage.sharded_state_dict()}, str(tmp_path / "ckpt"), ps=ps)
    exporting.export_huggingface(tmp_path / "ckpt", tmp_path / "exported", tmp_path / "source")
    assert files_of(tmp_path / "live") == files_of(tmp_path / "exported")
    with pytest.raises(ValueError, match=r"a Linear, a GPTModel is needed: no family .*dist_checkpointing export"):
        save_huggingface(nn.Linear(2, 2), tmp_path / "linear", ps=ps)
    CONFIGS["qwen3"]().save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"the model is not the model that .*other describes: .*qk_layernorm"):
        save_huggingface(stage, tmp_path / "other-out", tmp_path / "other", ps=ps)
    assert not list(tmp_path.glob("*-out")) and not list(tmp_path.glob(".*"))


def failing(weights, folder):
    """What a rank is told where the folder is there, and where the disk is full in the midst of the tensors."""
    ps = state(tp=2)
    stages = made("llama", torch.float32, weights, ps, "")
    told = []

    def full(temporary, files, values_of, progress):
        for tensor in files[0][:2]:
            for _ in values_of(tensor):
                pass
        raise OSError(errno.ENOSPC, "no space left")

    (folder / "there").mkdir(exist_ok=True)
    (folder / "there" / "file").write_text("")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("there", "full"):
            with pytest.raises((ValueError, OSError)) as raised:
                save_huggingface(stages, folder / name, ps=ps)
            told.append(str(raised.value))
            patch.setattr(exporting, "write_files", full)
    save_huggingface(stages, folder / "out", ps=ps)  # nobody was left waiting
    return told


def test_a_failure_of_the_rank_that_writes_is_every_rank_s(ranks, tmp_path):
    weights = random_model(CONFIGS["llama"]()).float().state_dict()
    first, second = ranks(failing, weights, tmp_path, world=2)
    assert "is there already; give a directory that is to be made" in first[0] and second[0] == f"rank 0: {first[0]}"
    assert "no space left" in first[1] and second[1] == f"rank 0: {first[1]}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "there"]


def test_a_hole_is_told():
    arrays = {"w": ArrayInfo((2, 3, 4), "float32", stacked=True)}
    first, second = ((0, 1), (0, 3), (0, 4)), ((1, 2), (0, 2), (0, 4))
    with pytest.raises(ValueError, match=r"w of shape \(2, 3, 4\): no rank holds \(\(1, 2\), \(2, 3\), \(0, 4\)\)"):
        plan_gathering(arrays, [{"w": (first,)}, {"w": (second,)}], 0)
    rest = ((1, 2), (2, 3), (0, 4))
    plans = plan_gathering(arrays, [{"w": (first,)}, {"w": (second, rest)}], 0)
    assert not plans["w", (0, 0, 0)].waves
    (wave,) = plans["w", (1, 0, 0)].waves
    assert [(transfer.box, transfer.source, transfer.destination) for transfer in wave] == [
        (second, 1, 0),
        (rest, 1, 0),
    ]
