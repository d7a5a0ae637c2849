"""A folder in, a checkpoint, a folder out: the same bits, under any layout, by command."""

import json
import warnings

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from core.dist_checkpointing import load, save
from core.dist_checkpointing.publish.check import check
from core.dist_checkpointing.storage.checkpoint_dir import open_checkpoint_dir
from core.models.gpt import GPTModel
from core.models.gpt.description import description
from core.models.huggingface import from_huggingface, load_huggingface, save_huggingface
from core.models.huggingface.__main__ import main
from core.models.huggingface.exporting import export_huggingface
from core.models.huggingface.importing import import_huggingface
from core.parallel_state import ParallelState
from tests.models.huggingface import TODAY
from tests.models.test_huggingface import COMMON, CONFIGS
from tests.models.test_huggingface_families import saved
from tests.states import state

KINDS = ["llama3", "llama-tied", "mistral", "qwen2", "qwen3", "phi3", "gpt2", "gpt2-untied"]
KINDS += ["gemma3", "gemma3-scaled", "olmo2", "smollm3", "smollm3-window"]


def tensors_of(folder):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


WITH_EXPERTS = ["mixtral", "qwen3_moe-mixed", "glm4_moe"]
OTHERS = sorted({*CONFIGS, *TODAY} - {*KINDS, *WITH_EXPERTS})


@pytest.mark.parametrize(
    "kind", [*KINDS, *WITH_EXPERTS, *(pytest.param(kind, marks=pytest.mark.full) for kind in OTHERS)]
)
def test_a_folder_comes_back_bit_for_bit(tmp_path, kind):
    _, folder = saved(tmp_path, kind, max_shard_size="20KB")
    (folder / "tokenizer.json").write_text("{}")
    import_huggingface(folder, str(tmp_path / "ckpt"))
    difference = export_huggingface(tmp_path / "ckpt", tmp_path / "out", folder, check=True, file_bytes=20_000)
    before, after = tensors_of(folder), tensors_of(tmp_path / "out")
    assert before.keys() - {"lm_head.weight"} <= after.keys() <= before.keys()
    assert all(torch.equal(after[name], before[name]) for name in after)
    assert 0 < difference < 1e-4 and len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    told = [json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "out")]
    assert told[0] == told[1]
    # and it trains on
    theirs, tokens = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out"), torch.ones(1, 4).long()
    theirs(tokens, labels=tokens).loss.backward()
    assert all(parameter.grad is not None for parameter in theirs.parameters())


@pytest.mark.parametrize("kind", ["llama3", "gpt2", "glm4_moe"])
def test_an_export_of_16_bits_rounds_parameters_alone(tmp_path, kind):
    _, folder = saved(tmp_path, kind)
    import_huggingface(folder, str(tmp_path / "ckpt"))
    arguments = ["export", str(tmp_path / "ckpt"), str(tmp_path / "out"), "--source", str(folder), "--check"]
    assert main([*arguments, "--dtype", "bf16"]) == 0
    before, after = tensors_of(folder), tensors_of(tmp_path / "out")
    for name, tensor in after.items():
        dtype = torch.float32 if name.endswith("correction_bias") else torch.bfloat16
        assert tensor.dtype is dtype and torch.equal(tensor, before[name].to(dtype)), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"


@pytest.mark.parametrize("kind", ["llama3", "gpt2", "glm4_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_import_is_what_a_save_writes(tmp_path, kind, dtype):
    theirs = transformers.AutoModelForCausalLM.from_config({**CONFIGS, **TODAY}[kind](), dtype=dtype)
    for name, buffer in theirs.named_buffers():
        if name.endswith("correction_bias"):
            buffer.copy_(torch.rand(buffer.shape).sub_(0.5))
    theirs.save_pretrained(tmp_path / "hf")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*weights of .* are rounded")  # GLM-4's routers, since transformers 5.24
        import_huggingface(tmp_path / "hf", str(tmp_path / "imported"))
    ps = ParallelState.single("cpu")
    model = GPTModel(**from_huggingface(tmp_path / "hf", params_dtype=dtype).arguments(), parallel=ps)
    load_huggingface(model, tmp_path / "hf")
    save({"model": model.sharded_state_dict()}, str(tmp_path / "saved"), ps=ps)
    imported, written = files_of(tmp_path / "imported"), files_of(tmp_path / "saved")
    assert imported.keys() == written.keys()
    assert all(imported[name] == written[name] for name in imported if "manifest" not in name)
    assert not check(open_checkpoint_dir(str(tmp_path / "imported")), digests=True, full=True)


def test_parts_that_predict_further_tokens_are_left_out(tmp_path):
    """GLM-4.5's files have one behind the last layer; another tensor too many is still refused."""
    theirs = transformers.AutoModelForCausalLM.from_config(TODAY["glm4_moe"]())
    model = GPTModel(**from_huggingface(theirs.config).arguments(), parallel=ParallelState.single("cpu"))
    more = {f"model.layers.4.{name}.weight": torch.ones(3) for name in ("eh_proj", "mlp.gate")}
    with pytest.warns(UserWarning, match="1 parts of the Hugging Face weights predict tokens after the next one"):
        load_huggingface(model, {**theirs.state_dict(), **more})
    with pytest.raises(ValueError, match=r"1 of the Hugging Face weights have no place .*: model.layers.5.x"):
        load_huggingface(model, {**theirs.state_dict(), "model.layers.5.x": torch.ones(3)})


def opened(folder, checkpoint):
    ps = state(tp=2)
    model = GPTModel(**from_huggingface(folder).arguments(), parallel=ps)
    load({"model": model.sharded_state_dict()}, checkpoint, ps=ps)
    other = GPTModel(**from_huggingface(folder).arguments(), parallel=ps)
    load_huggingface(other, folder)
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["phi3", "olmo2"])
def test_an_import_opens_under_another_layout(ranks, tmp_path, kind):
    _, folder = saved(tmp_path, kind)
    import_huggingface(folder, str(tmp_path / "ckpt"))
    assert all(ranks(opened, folder, str(tmp_path / "ckpt"), world=2))


def test_the_commands(tmp_path, capsys):
    _, folder = saved(tmp_path, "qwen3")
    ckpt, out = str(tmp_path / "ckpt"), str(tmp_path / "out")
    assert main(["import", str(folder), ckpt]) == 0
    assert "verified; 2 layers, hidden size 32, vocabulary 101" in capsys.readouterr().out
    assert main(["export", ckpt, out, "--source", str(folder), "--check"]) == 0
    assert "max |logit difference| on 4 prompts: " in capsys.readouterr().out
    assert main(["import", str(folder), ckpt]) == 2
    assert "is a checkpoint already" in capsys.readouterr().err
    assert main(["export", ckpt, out, "--source", str(folder)]) == 2
    assert "is there already; give a directory that is to be made" in capsys.readouterr().err
    assert main(["export", ckpt, str(tmp_path / "alone"), "--check"]) == 0  # an import says what it is
    assert f"the model began as {folder.name}: with --source its other fields" in capsys.readouterr().out
    assert main(["families"]) == 0
    told = capsys.readouterr().out
    assert "qwen3        Qwen3ForCausalLM" in told and "gpt_oss      attention has a learned sink" in told


def test_what_cannot_be_exported_leaves_nothing(tmp_path, monkeypatch):
    _, folder = saved(tmp_path, "llama")
    import_huggingface(folder, str(tmp_path / "ckpt"))
    # a checkpoint that does not say what its model is: shapes and names tell
    ps = ParallelState.single("cpu")
    model = GPTModel(**from_huggingface(folder).arguments(), parallel=ps, seed=5)
    save({"model": model.sharded_state_dict()}, str(tmp_path / "plain"), ps=ps)
    wider = transformers.LlamaConfig(**COMMON | {"intermediate_size": 64})
    wider.save_pretrained(tmp_path / "wider")
    with pytest.raises(ValueError, match=r"linear_fc1.weight is \(2, 48, 32\) in .*, \(2, 64, 32\) by the source"):
        export_huggingface(tmp_path / "plain", tmp_path / "out", tmp_path / "wider")
    CONFIGS["qwen2"]().save_pretrained(tmp_path / "biased")
    with pytest.raises(ValueError, match=r"holds no model/.*linear_qkv.bias, which the source's configuration asks"):
        export_huggingface(tmp_path / "plain", tmp_path / "out", tmp_path / "biased")
    # the same shapes, other numbers: what the checkpoint says of its model, or the logits
    transformers.LlamaConfig(**COMMON, rope_parameters={"rope_type": "default", "rope_theta": 5e2}).save_pretrained(
        tmp_path / "other"
    )
    with pytest.raises(ValueError, match=r"is not the model that .*other describes: rotary_base=10000.0 \(now"):
        export_huggingface(tmp_path / "ckpt", tmp_path / "out", tmp_path / "other", check=True)
    changed = (tmp_path / "other" / "config.json").read_text()

    def another_configuration(source, temporary, dtype, *rest):
        (temporary / "config.json").write_text(changed)

    monkeypatch.setattr("core.models.huggingface.written.copy_companions", another_configuration)
    with pytest.raises(ValueError, match=r"logits differ from ours by .* nothing was written"):
        export_huggingface(tmp_path / "ckpt", tmp_path / "out", folder, check=True)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


def test_a_check_without_transformers_says_so_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("core.models.huggingface.exporting.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install transformers"):
        export_huggingface(tmp_path / "nowhere", tmp_path / "out", check=True)


def dtypes_of(folder):
    return {name: tensor.dtype for name, tensor in tensors_of(folder).items()}


def test_few_weights_of_another_dtype_become_what_most_are(tmp_path, recwarn):
    theirs, folder = saved(tmp_path, "llama")
    theirs.model.norm.half()  # float32 holds them exactly
    theirs.save_pretrained(folder)
    import_huggingface(folder, str(tmp_path / "wider"))
    export_huggingface(tmp_path / "wider", tmp_path / "out", folder)
    assert set(dtypes_of(tmp_path / "out").values()) == {torch.float32} != set(dtypes_of(folder).values())
    assert torch.equal(tensors_of(tmp_path / "out")["model.norm.weight"], theirs.model.norm.weight.float())
    assert not [told for told in recwarn if "rounded" in str(told.message)]
    theirs.bfloat16().model.norm.float().weight.data.uniform_()
    theirs.save_pretrained(folder)
    with pytest.warns(UserWarning, match=r"1 of \d+ weights of .* are rounded to BF16, .*model.norm.weight is F32"):
        import_huggingface(folder, str(tmp_path / "rounded"))


def test_weights_of_eight_bits_are_refused(tmp_path):
    theirs, folder = saved(tmp_path, "llama")
    theirs.model.norm.to(torch.float8_e4m3fn)
    theirs.save_pretrained(folder)
    with pytest.raises(ValueError, match=r"holds weights of F8_E4M3, F64, F32, F16, BF16 are read; model.to"):
        import_huggingface(folder, str(tmp_path / "ckpt"))
    assert not (tmp_path / "ckpt").exists()


def test_a_tied_model_with_another_head_is_not_imported(tmp_path):
    theirs, folder = saved(tmp_path, "llama-tied")
    state = {**theirs.state_dict()}
    state["lm_head.weight"] = 2 * state["lm_head.weight"]
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head.weight differs from the embedding"):
        import_huggingface(folder, str(tmp_path / "ckpt"))
    assert not (tmp_path / "ckpt").exists()


@pytest.mark.parametrize("kind", ["llama", "llama3"])
def test_an_export_says_the_length_that_was_trained(tmp_path, kind):
    """Rotations stay those of the source, whose scaling may follow from its positions."""
    _, folder = saved(tmp_path, kind)
    fields = json.loads((folder / "config.json").read_text())
    fields["rope_parameters"].pop("original_max_position_embeddings", None)
    (folder / "config.json").write_text(json.dumps(fields))
    source = from_huggingface(folder)
    said = fields["max_position_embeddings"]
    for length, expected in ((said - 1, said), (said, said), (said + 9, said + 9)):
        arguments = source.arguments() | {"max_sequence_length": length}
        model = GPTModel(**arguments, parallel=ParallelState.single("cpu"), seed=5)
        save(
            {"model": model.sharded_state_dict()},
            str(path := tmp_path / f"{length}"),
            run={"model": description(model)},
        )
        save_huggingface(model, tmp_path / f"saved{length}", folder)
        assert export_huggingface(path, tmp_path / f"out{length}", folder, check=True) < 1e-4
        for out in (f"saved{length}", f"out{length}"):
            written = from_huggingface(tmp_path / out)
            assert (written.max_sequence_length, written.config) == (expected, source.config)


def test_an_export_stops_at_the_tokens_that_end_a_run_s_answers(tmp_path):
    _, folder = saved(tmp_path, "llama")
    model = GPTModel(**from_huggingface(folder).arguments(), parallel=ParallelState.single("cpu"), seed=5)
    before = {"do_sample": True, "eos_token_id": 3}
    (folder / "generation_config.json").write_text(json.dumps(before))
    run = {"model": description(model), "tokenizer": {"path": None, "identity": "x", "end_of_text": 4}}

    def settings(number, source, ends):
        tokenizer = run["tokenizer"] | ends
        told, path, out = run | {"tokenizer": tokenizer}, str(tmp_path / f"{number}"), tmp_path / f"out{number}"
        save({"model": model.sharded_state_dict()}, path, run=told)
        export_huggingface(path, out, source)
        save_huggingface(model, tmp_path / f"saved{number}", source, tokenizer=tokenizer)
        texts = [(at / "generation_config.json").read_text() for at in (out, tmp_path / f"saved{number}")]
        assert texts[0] == texts[1]
        return json.loads(texts[0])

    assert settings(0, folder, {}) == settings(1, folder, {"answer_ends": [3]}) == before
    assert settings(2, folder, {"answer_ends": [3, 5]}) == before | {"eos_token_id": [3, 5]}
    assert settings(3, None, {"answer_ends": [5]}) == {"eos_token_id": [4, 5]}
    assert settings(4, None, {"answer_ends": [4]}) == {"eos_token_id": 4}
