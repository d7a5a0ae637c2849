"""`import` of what DeepSpeed 0.19.8 wrote (tests/data/deepspeed.zip), against what its engine held, bit for bit.

Each folder is of `Net` below after 3 steps of AdamW in two groups (stage 0: one), on 2 ranks (stage 1: 3), in
bfloat16 but for stage 2; stage 3 with sub-groups of 30 elements. `truth.pt`: main weights and moments of the engine.
"""

import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from core.data_parallel import DataParallel
from core.dist_checkpointing import lazy_tensors, load, load_common_state_dict
from core.dist_checkpointing.__main__ import main
from core.optimizer import OptimizerConfig, ShardedAdamW, sharded_state_dict
from tests.dist_checkpointing.test_import_hostile import Evil
from tests.parity.shards import whole_weights
from tests.states import state as parallel

DATA = Path(__file__).parents[1] / "data" / "deepspeed.zip"
STAGES = ["stage0", "stage1", "stage2", "stage3"]
STEP = "global_step3"


class Net(nn.Module):
    """What the folders are of."""

    def __init__(self):
        super().__init__()
        self.emb, self.frozen = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 6, bias=False)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 11, bias=False)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.head.weight = self.emb.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x, y):
        h = self.frozen(self.emb(x))
        h = self.norm(h + self.b(torch.tanh(self.a(h)))) * self.scale
        return nn.functional.cross_entropy(self.head(h).float(), y)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepspeed")
    with zipfile.ZipFile(DATA) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def imported(saved):
    for stage in STAGES:
        assert main(["import", str(saved / stage), str(saved / f"ours-{stage}")]) == 0
        assert main(["verify", str(saved / f"ours-{stage}")]) == 0
    return saved


def truth(saved, stage):
    return torch.load(saved / stage / "truth.pt", weights_only=True)


@pytest.mark.parametrize("stage", STAGES)
def test_every_number_is_the_engines(imported, stage):
    tensors, expected = lazy_tensors(imported / f"ours-{stage}"), truth(imported, stage)
    main_group = "model" if stage == "stage2" else "optimizer/main"
    assert len(expected["params"]) == 7
    for name, kinds in expected["params"].items():
        for kind, value in kinds.items():
            key = f"{main_group}/{name}" if kind == "fp32" else f"optimizer/{kind}/{name}"
            assert torch.equal(tensors[key][...], value), key
    for name, value in expected["frozen"].items():
        assert torch.equal(tensors[f"model/{name}"][...], value)
    assert torch.equal(tensors["model/seen"][...], expected["seen"])
    assert torch.equal(tensors["model/head.weight"][...], tensors["model/emb.weight"][...]), "tied"
    stored = {key for key in tensors if not key.startswith("deepspeed/")}
    groups = 3 if main_group == "model" else 4  # main weights beside those of 16 bits, two moments
    assert len(stored) == groups * 7 + 2 + 1 + 1


def test_frozen_weights_of_one_rank(tmp_path):
    """Stage 3 over one rank: one file, in which the module's tensors are as empty as those of many."""
    with zipfile.ZipFile(DATA.with_name("deepspeed_one_rank.zip")) as archive:
        archive.extractall(tmp_path)
    assert main(["import", str(tmp_path / "stage3"), str(tmp_path / "ours")]) == 0
    tensors = lazy_tensors(tmp_path / "ours")
    weights = torch.load(tmp_path / "stage3" / "truth.pt", weights_only=True)
    assert {"frozen.weight", "frozen.bias"} < weights.keys()
    for name, value in weights.items():
        assert torch.equal(tensors[f"model/{name}"][...], value), name


@pytest.mark.parametrize("stage", ["stage0", "stage1"])
def test_weights_of_16_bits_are_the_files_own(imported, stage):
    """They are not stored, but the main weights rounded: the same bits."""
    tensors = lazy_tensors(imported / f"ours-{stage}")
    module = torch.load(imported / stage / STEP / "mp_rank_00_model_states.pt", weights_only=True)["module"]
    for name, value in module.items():
        found = tensors[f"model/{name}"][...]
        assert found.dtype == value.dtype and torch.equal(found, value), name


def test_a_universal_checkpoint_is_the_same(imported, tmp_path):
    """What ds_to_universal.py made of stage 1: for layouts that are not read, such as Megatron's tensor ranks."""
    assert main(["import", str(imported / "universal"), str(tmp_path / "ours")]) == 0
    found, expected = (lazy_tensors(path) for path in (tmp_path / "ours", imported / "ours-stage1"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key][...], expected[key][...]) for key in expected)
    values = [load_common_state_dict(path) for path in (tmp_path / "ours", imported / "ours-stage1")]
    assert values[0] == values[1]
    broken = imported / "universal" / "global_step3_universal" / "zero" / "a.weight" / "fp32.pt"
    shutil.copytree(imported / "universal", tmp_path / "theirs")
    (tmp_path / "theirs" / broken.relative_to(imported / "universal")).unlink()
    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "other")]) == 2


def test_counts_and_values(imported):
    """Without ZeRO DeepSpeed makes a step of zeros at its start, which its optimizer counts."""
    for stage, steps in zip(STAGES, (4, 3, 3, 3), strict=True):
        values = load_common_state_dict(imported / f"ours-{stage}")
        assert values["optimizer/step_count"] == steps and values["optimizer/skipped_steps"] == 0
        assert values["deepspeed/global_steps"] == 3 and values["deepspeed/mine"] == [1, "two"]


def goes_on(path, stage, zero):
    """(whole main weights, loss of a further step) of an optimizer of ours that loads the import."""
    ps, net = parallel(), Net()
    net.to(torch.float32 if stage == "stage2" else torch.bfloat16)
    net.seen = net.seen.float()
    shard = DataParallel(net, ps, zero_stage=zero)
    optimizer = ShardedAdamW(shard, OptimizerConfig(lr=1e-2))
    state = {"model": sharded_state_dict(shard), "optimizer": optimizer.sharded_state_dict()}
    optimizer.load_state_dict(load(state, path, ps=ps, strict="report")[0]["optimizer"])
    report = load(state, path, ps=ps, strict="report")[1]
    states = {n: {k: s.tensor.clone() for k, s in kinds.items()} for n, kinds in optimizer.states().items()}
    count = optimizer.step_count
    weights = whole_weights(shard)
    tokens = torch.arange(4)
    loss = net(tokens, tokens + 1)
    loss.backward()
    optimizer.step()
    return weights, str(report), states, count, loss.item()


@pytest.mark.parametrize(("stage", "world", "zero"), [("stage1", 1, 0), ("stage2", 2, 1), ("stage3", 2, 3)])
def test_our_optimizer_goes_on(ranks, imported, stage, world, zero):
    for weights, report, states, count, loss in ranks(goes_on, imported / f"ours-{stage}", stage, zero, world=world):
        expected = truth(imported, stage)["params"]
        assert report == "", "all of it is asked for, and everything is there"
        assert count == 3 and loss == loss
        for name, kinds in expected.items():
            assert torch.equal(weights[name], kinds["fp32"].to(weights[name].dtype)), name
            if world == 1:
                for kind, ours in (("fp32", "main"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
                    assert torch.equal(states[name][ours].view_as(kinds[kind]), kinds[kind]), (name, kind)


def test_the_next_step_is_torchs(imported, saved, single):
    """Bias corrections go on with step 4: torch's AdamW from the engine's weights, moments and count."""
    expected, tokens = truth(saved, "stage2"), torch.arange(4)
    ours, theirs = Net(), Net()
    shard = DataParallel(ours, single)
    optimizer = ShardedAdamW(shard, OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.0, adam_beta2=0.999))
    state = {"model": sharded_state_dict(shard), "optimizer": optimizer.sharded_state_dict()}
    optimizer.load_state_dict(load(state, imported / "ours-stage2", ps=single)["optimizer"])
    load({"model": theirs.state_dict()}, imported / "ours-stage2", ps=single)
    adamw = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            kinds = expected["params"][name]
            adamw.state[parameter] = {"step": torch.tensor(3.0)} | {k: kinds[k] for k in ("exp_avg", "exp_avg_sq")}
    for net, step in ((ours, optimizer.step), (theirs, adamw.step)):
        net(tokens, tokens + 1).backward()
        step()
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        decayed = "norm" not in name and "bias" not in name and name != "scale"  # vectors are not, by default
        if decayed or not p.requires_grad:
            assert torch.allclose(p, q, atol=1e-7), name


def test_a_plain_module_of_torchs(imported, single):
    net = Net()
    load({"model": net.state_dict()}, imported / "ours-stage2", ps=single)
    for name, kinds in truth(imported, "stage2")["params"].items():
        assert torch.equal(dict(net.named_parameters())[name], kinds["fp32"])


def refused(folder, tmp_path, capsys):
    assert main(["import", str(folder), str(tmp_path / "ours")]) == 2
    assert not (tmp_path / "ours").exists()
    return capsys.readouterr().err


def removed(step):
    (step / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()


def last_removed(step):
    (step / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()


def tensor_parallel(step):
    shutil.copy(step / "mp_rank_00_model_states.pt", step / "mp_rank_01_model_states.pt")


def pipeline(step):
    shutil.copy(step / "mp_rank_00_model_states.pt", step / "layer_01-model_00-model_states.pt")


def elsewhere(step):
    (step.parent / "latest").write_text("../elsewhere")


def gone(step):
    (step.parent / "latest").write_text("global_step9")


def damaged(step):
    path = step / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    data = bytearray(path.read_bytes())
    at = data.index(b"data/0") + 200
    data[at : at + 40] = bytes(byte ^ 1 for byte in data[at : at + 40])
    path.write_bytes(data)


def other_order(step):
    """The file of another rank: what it says of its parameters is not what lies there."""
    first, second = (step / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))
    shutil.copy(second, first)


REFUSED = {
    removed: ["has the files of ranks [0, 2]"],
    last_removed: ["has 2 files of optimizer states, of 3 data ranks"],
    tensor_parallel: ["tensor-parallel rank 1", "ds_to_universal.py"],
    pipeline: ["a PipelineModule", "layer_01-model_00-model_states.pt", "ds_to_universal.py"],
    elsewhere: ["names '../elsewhere', which is no step"],
    gone: ["names global_step9, which is not there"],
    damaged: ["damaged"],
    other_order: ["rank 0 says to hold"],
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_is_not_read_is_refused_by_name(saved, tmp_path, capsys, change):
    shutil.copytree(saved / "stage1", tmp_path / "theirs")
    change(tmp_path / "theirs" / STEP)
    told = refused(tmp_path / "theirs", tmp_path, capsys)
    assert all(word in told for word in REFUSED[change]), told


def test_pickles_run_nothing(saved, tmp_path, capsys):
    """Whatever they name becomes a record; as a value it is left out, in the place of a tensor it is refused."""
    folder, trap = tmp_path / "theirs", tmp_path / "trap"
    shutil.copytree(saved / "stage2", folder)
    path = folder / STEP / "mp_rank_00_model_states.pt"
    whole = torch.load(path, weights_only=True)
    torch.save(whole | {"mine": Evil(trap), "more": [Evil(trap)]}, path)
    assert main(["import", str(folder), str(tmp_path / "ours")]) == 0
    told = capsys.readouterr().out
    assert "left out: deepspeed/mine:" in told and "left out: deepspeed/more:" in told
    torch.save(whole | {"param_shapes": Evil(trap)}, path)
    assert main(["import", str(folder), str(tmp_path / "other")]) == 2
    assert not trap.exists() and not (tmp_path / "other").exists()


def test_states_that_could_be_several_parameters_are_left_out_by_name(saved, tmp_path, capsys):
    """Stage 0 numbers its parameters; of two groups, and without main weights, nobody can tell two vectors apart."""
    folder = tmp_path / "theirs"
    shutil.copytree(saved / "stage0", folder)
    path = folder / STEP / "mp_rank_00_model_states.pt"
    whole = torch.load(path, weights_only=True)
    del whole["optimizer"]["fp32_groups"]
    (group,) = whole["optimizer"]["optimizer_state_dict"]["param_groups"]
    halves = [dict(group, params=group["params"][:4]), dict(group, params=group["params"][4:])]
    whole["optimizer"]["optimizer_state_dict"]["param_groups"] = halves
    torch.save(whole, path)
    assert main(["import", str(folder), str(tmp_path / "ours")]) == 0
    told = capsys.readouterr().out
    assert "left out: optimizer: the states have numbers and no names" in told and "ZeRO stage 1" in told
    tensors = lazy_tensors(tmp_path / "ours")
    assert "model/a.weight" in tensors and not any(key.startswith("optimizer/") for key in tensors)
