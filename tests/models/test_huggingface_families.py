"""Today's families: scaled rotary positions, windows, fused projections; and every field of a configuration."""

import json
import math
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from core.models.gpt import GPTModel
from core.models.huggingface import FAMILIES, canonical, from_huggingface, load_huggingface
from core.models.huggingface.rows import LLAMA_ROWS
from core.models.huggingface.sources import Folder
from core.parallel_state import ParallelState, layout_of
from core.transformer.attention import self_attention as attention
from tests.marks import FULL, thinned
from tests.models.huggingface import TODAY, exactly, random_model
from tests.models.test_huggingface import COMMON, CONFIGS
from tests.parity.whole import assert_same, whole_gradients
from tests.states import state


def compare(kind, tp):
    theirs = random_model(TODAY[kind]())
    tokens = torch.randint(101, (2, 16))
    with pytest.MonkeyPatch.context() as patch:
        exactly(patch)
        want = theirs(tokens).logits
        want.sin().sum().backward()
    ps = state(tp=tp)
    model = GPTModel(**from_huggingface(theirs.config, params_dtype=torch.float64).arguments(), parallel=ps)
    load_huggingface(model, theirs.state_dict())
    got = model.gather_logits(model(tokens))
    got.sin().sum().backward()
    assert_same({"logits": got}, {"logits": want}, 1e-9)
    gradients = {n: p.grad for n, p in theirs.named_parameters()}
    assert_same(whole_gradients(model, ps), canonical(gradients, model.config), 1e-9)


@pytest.mark.parametrize("kind", TODAY)
@pytest.mark.parametrize("tp", [1, 2, pytest.param(4, marks=pytest.mark.full)])
def test_logits_and_gradients_equal_transformers(ranks, kind, tp):
    ranks(compare, kind, tp, world=tp)


@pytest.mark.parametrize("strip", [1, 3, 16])
def test_a_window_is_attended_to_strip_by_strip(monkeypatch, strip):
    """Nothing of size [s, s], and the same numbers, also with a mask of the user's own."""
    monkeypatch.setattr(attention, "STRIP", strip)
    model = GPTModel(**from_huggingface(TODAY["mistral"]()).arguments(), parallel=ParallelState.single("cpu")).eval()
    core, window = model.decoder.layers[0].self_attention.core_attention, 5
    q, k, v = torch.randn(2, 8, 16, 6), torch.randn(2, 4, 16, 6), torch.randn(2, 4, 16, 6)
    distance = torch.arange(16)[:, None] - torch.arange(16)
    seen = (distance >= 0) & (distance < window)
    mask = torch.zeros(2, 1, 16, 16, dtype=torch.bool)
    mask[1, :, 9:, 8] = True
    causal = distance < 0
    sizes = []
    monkeypatch.setattr(
        attention.F,
        "scaled_dot_product_attention",
        lambda *a, _true=torch.nn.functional.scaled_dot_product_attention, **k: (
            (sizes.append(a[3].shape[-2:].numel()) if a[3] is not None else None) or _true(*a, **k)
        ),
    )
    got = [core(q, k, v)]
    assert max(sizes) <= min(strip, 16) * (min(strip, 16) + window - 1)
    got.append(core(q, k, v, causal | mask))
    monkeypatch.undo()
    for one, hidden in zip(got, (torch.zeros_like(mask), mask), strict=True):
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen & ~hidden, enable_gqa=True)
        torch.testing.assert_close(one, want)


SMALL = {"initializer_range", "rms_norm_eps", "layer_norm_epsilon"}  # numbers that would not matter if they grew by 1


def changed(name, value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1 if name in ("vocab_size", "sliding_window") else 2 * value or 1
    if isinstance(value, float):
        return 100 * value if name in SMALL else value / 2 or 0.5
    return None


def fields():
    for kind, config in [*CONFIGS.items(), *TODAY.items()]:
        for name, value in config().to_dict().items():
            if changed(name, value) is not None and name != "transformers_version":
                yield pytest.param(config, name, id=f"{kind}-{name}")


@pytest.mark.parametrize("config, name", thinned(list(fields()), 2, [FULL]))
def test_a_changed_field_gives_their_numbers_or_is_refused(config, name):
    """Flips each numeric and boolean field: never another number without a word."""
    theirs_or_refused(config, name, changed(name, getattr(config(), name)))


def theirs_or_refused(config, name, value, told=None):
    """told: another word for the field in a refusal."""
    flipped = config()
    try:
        setattr(flipped, name, value)
        theirs = random_model(flipped).eval()
        tokens = torch.randint(100, (2, 12), generator=torch.Generator().manual_seed(0))
        want = theirs(tokens).logits
    except Exception as error:
        pytest.xfail(f"transformers itself refuses it: {error}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a field that nobody reads is told
        try:
            ours = from_huggingface(theirs.config, params_dtype=torch.float64)
            model = GPTModel(**ours.arguments(), parallel=ParallelState.single("cpu")).eval()
        except (ValueError, UserWarning) as error:
            assert name in str(error) or (told is not None and told in str(error))
            return
    load_huggingface(model, theirs.state_dict())
    torch.testing.assert_close(model(tokens), want, rtol=1e-4, atol=1e-4)


def changed_inside(value):
    """(where, the value with one number, flag or kind of layer in it changed)."""
    if not isinstance(value, (dict, list)):
        return
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        other = {"full_attention": "sliding_attention", "sliding_attention": "full_attention"}.get(str(inner))
        other = changed(str(key), inner) if other is None else other
        found = [("", other)] if other is not None else changed_inside(inner)
        for where, new in found:
            copied = value.copy()
            copied[key] = new
            yield f"{key}.{where}".rstrip("."), copied


def fields_inside():
    for kind, config in [*CONFIGS.items(), *TODAY.items()]:
        for name, value in config().to_dict().items():
            if isinstance(value, dict):
                value = {"attention_factor": 0.7} | value  # what nobody here reads
            for where, new in changed_inside(value):
                yield pytest.param(config, name, new, id=f"{kind}-{name}-{where}", marks=pytest.mark.full)


@pytest.mark.parametrize("config, name, value", list(fields_inside()))
def test_a_change_inside_of_a_field_gives_their_numbers_or_is_refused(config, name, value):
    """Flips each number, flag and kind of layer in tables and lists: never another number without a word."""
    theirs_or_refused(config, name, value, told="rotary")


def test_a_field_that_nobody_reads_is_told():
    config = {**CONFIGS["llama"]().to_dict(), "logit_scale": 0.5}
    with pytest.warns(UserWarning, match="the configuration says logit_scale, which nothing here reads"):
        from_huggingface(config)


PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "huggingface_configs.json").read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_configurations_as_published_are_read_without_a_word(name):
    if name == "phi-3-128k":
        with pytest.raises(ValueError, match="rope_type='longrope' is not supported"):
            from_huggingface(PUBLISHED[name])
        return
    ours = from_huggingface(PUBLISHED[name])  # a warning is an error in tests
    assert ours.vocab_size == PUBLISHED[name]["vocab_size"] and ours.config.hidden_size % 64 == 0
    assert (ours.config.rotary_scaling is not None) == (name == "llama-3.1-8b")
    windows = {"mistral-7b-v0.1": (4096,) * 32, "phi-3-mini-4k": (2047,) * 32}
    windows |= {"gemma-3-270m": ((512,) * 5 + (None,)) * 3, "gemma-3-1b": (((512,) * 5 + (None,)) * 5)[:26]}
    assert ours.config.windows == windows.get(name)
    if name == "smollm3-3b":
        assert [one is not None for one in ours.config.rotary_per_layer] == [True, True, True, False] * 9
    if name == "gemma-3-1b":
        assert {one.base for one in ours.config.rotary_per_layer} == {1e4, 1e6}


def test_every_family_is_compared():
    assert {config().model_type for config in [*CONFIGS.values(), *TODAY.values()]} == FAMILIES.keys()


def test_a_family_that_differs_in_a_name(monkeypatch):
    """The rows of another family with another name, one entry."""

    def renamed(name):
        return name.replace("down_proj", "out_proj")

    rows = tuple(replace(row, hf_names=tuple(map(renamed, row.hf_names))) for row in LLAMA_ROWS)
    entry = replace(FAMILIES["llama"], rows=rows)
    monkeypatch.setitem(FAMILIES, "granite_like", entry)
    theirs = random_model(CONFIGS["llama-biased"]()).eval()
    facts = {**theirs.config.to_dict(), "model_type": "granite_like"}
    arguments = from_huggingface(facts, params_dtype=torch.float64).arguments()
    model = GPTModel(**arguments, parallel=ParallelState.single("cpu")).eval()
    load_huggingface(model, {renamed(name): tensor for name, tensor in theirs.state_dict().items()})
    tokens = torch.randint(101, (2, 9))
    torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    load_huggingface(model, theirs.state_dict())  # and Llama's own names are Llama's still


# a folder of safetensors files


def saved(tmp_path, kind, **options):
    model = random_model({**CONFIGS, **TODAY}[kind]()).float()
    model.save_pretrained(tmp_path / "hf", **options)
    return model, tmp_path / "hf"


class Counted(Folder):
    """Counts the elements that are read."""

    elements = 0

    def read(self, name, part):
        values = super().read(name, part)
        Counted.elements += values.numel()
        return values


def read_on_a_rank(folder, kind):
    from core.models.huggingface import reading

    ps = state(tp=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "Folder", Counted)
        model = GPTModel(**from_huggingface(folder).arguments(), parallel=ps)
        Counted.elements = 0
        load_huggingface(model, folder)
    needed = sum(
        math.prod(part.stop - part.start for part in layout_of(p).box(ps.coordinate, ps.sizes))
        for p in model.parameters()
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    other = GPTModel(**from_huggingface(folder).arguments(), parallel=ps)
    load_huggingface(other, theirs.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    return Counted.elements / needed


@pytest.mark.parametrize("kind", ["llama3", "phi3", "gpt2-untied"])
def test_each_rank_reads_its_own_rows_and_columns(ranks, tmp_path, kind):
    """Bytes read by all ranks over bytes of their boxes, at TP=4: at most 1.05."""
    _, folder = saved(tmp_path, kind, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert max(ranks(read_on_a_rank, folder, kind, world=4)) <= 1.05


CONTRADICTIONS = {
    "two ropes": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 7e2}, "rope_scaling": {"type": "linear"}},
        "contra",
    ),
    "partial": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not this family's"),
    "no factor": ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "a field of another kind"),
    "a text": ({"hidden_size": "32"}, "hidden_size='32' is a str; give hidden_size=32"),
    "nothing": ({"rms_norm_eps": None}, "layernorm_epsilon=None; give layernorm_epsilon=a number"),
    "a list": ({"model_type": ["llama"]}, "is not supported; known"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_configurations_that_contradict_themselves(name):
    more, words = CONTRADICTIONS[name]
    with pytest.raises(ValueError, match=words):
        from_huggingface({**CONFIGS["llama"]().to_dict(), **more})


def test_older_fields_and_absent_ones_mean_what_they_do_there():
    facts = {**CONFIGS["llama"]().to_dict(), "rope_parameters": None}
    older = {"rope_type": "default", "rope_theta": 55.0}
    assert from_huggingface({**facts, "rope_scaling": older}).config.rotary_base == 55.0
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling = from_huggingface({**facts, "rope_scaling": llama3}).config.rotary_scaling
    assert scaling.original_max_position_embeddings == COMMON["max_position_embeddings"]
    mistral = {k: v for k, v in TODAY["mistral"]().to_dict().items() if k != "sliding_window"}
    assert from_huggingface(mistral).config.windows == (4096, 4096)
    with pytest.raises(ValueError, match=r"layer_types names .'full_attention'.*all have the window"):
        from_huggingface({**mistral, "layer_types": ["full_attention", "sliding_attention"]})


def test_a_window_leaves_a_mask_of_the_users_own_as_it_is(monkeypatch):
    """Columns that it opens for earlier queries stay open, however long the sequence is."""
    monkeypatch.setattr(attention, "STRIP", 4)
    model = GPTModel(**from_huggingface(TODAY["mistral"]()).arguments(), parallel=ParallelState.single("cpu")).eval()
    core, window = model.decoder.layers[0].self_attention.core_attention, 5
    for s in (4, 16):
        q, k, v = torch.randn(1, 8, s, 6), torch.randn(1, 4, s, 6), torch.randn(1, 4, s, 6)
        distance = torch.arange(s)[:, None] - torch.arange(s)
        prefix = (distance >= 0) | (torch.arange(s) < 3)
        want = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, prefix & (distance < window), enable_gqa=True
        )
        torch.testing.assert_close(core(q, k, v, ~prefix[None, None]), want)


def test_weights_that_are_no_plain_numbers_are_refused(tmp_path):
    theirs, folder = saved(tmp_path, "llama")
    model = GPTModel(**from_huggingface(folder).arguments(), parallel=ParallelState.single("cpu"))
    eight_bits = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in theirs.state_dict().items()}
    with pytest.raises(ValueError, match="float8_e4m3fn: quantized weights are numbers only with their scales"):
        load_huggingface(model, eight_bits)
    with torch.device("meta"):
        empty = GPTModel(**from_huggingface(folder).arguments(), parallel=ParallelState.single("cpu"))
    with pytest.raises(ValueError, match="the model is on meta"):
        load_huggingface(empty, folder)
    filled = empty.to_empty(device="cpu")
    load_huggingface(filled, folder)
    load_huggingface(model, folder)
    assert all(torch.equal(a, b) for a, b in zip(filled.parameters(), model.parameters(), strict=True))


def test_which_files_of_a_folder_count(tmp_path):
    """As in transformers: model.safetensors before an index; without both, one file."""
    theirs, folder = saved(tmp_path, "llama", max_shard_size="20KB")
    model = GPTModel(**from_huggingface(folder).arguments(), parallel=ParallelState.single("cpu"))
    save_file({name: 2 * tensor for name, tensor in theirs.state_dict().items()}, folder / "model.safetensors")
    load_huggingface(model, folder)
    assert torch.equal(model.decoder.final_layernorm.weight, 2 * theirs.model.norm.weight)
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    for text in ('{"weight_map": [1]}', '{"weight_map": null}', "{", "[]"):
        said = index.read_text()
        index.write_text(text)
        with pytest.raises(ValueError, match="cannot be read"):
            load_huggingface(model, folder)
        index.write_text(said)
    index.unlink()
    with pytest.raises(ValueError, match=r"files and no model.safetensors.index.json; restore it"):
        load_huggingface(model, folder)
    with pytest.raises(ValueError, match="is no folder"):
        load_huggingface(model, folder / "config.json")


def test_a_name_of_the_hub_is_no_folder():
    with pytest.raises(ValueError, match=r"hf download meta-llama/Llama-3\.2-1B --local-dir DIR fetches one"):
        from_huggingface("meta-llama/Llama-3.2-1B")


def test_folders_that_cannot_be_read(tmp_path):
    _, folder = saved(tmp_path, "llama", max_shard_size="20KB")
    shards = sorted(folder.glob("*.safetensors"))
    model = GPTModel(**from_huggingface(folder).arguments(), parallel=ParallelState.single("cpu"))
    whole = shards[1].read_bytes()
    shards[1].write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=f"{shards[1].name} is damaged or truncated"):
        load_huggingface(model, folder)
    shards[1].unlink()
    with pytest.raises(ValueError, match=f"lacks 1 of {len(shards)} files, {shards[1].name}; fetch it again"):
        load_huggingface(model, folder)
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ValueError, match=r"pytorch_model.bin, a pickle that could run code"):
        load_huggingface(model, str(folder))
    (folder / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"holds a list, a configuration is an object"):
        from_huggingface(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": {"bits": 4}}))
    with pytest.raises(ValueError, match=r"quantization_config=\{'bits': 4\} is not supported; dequantize"):
        from_huggingface(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config.json does not exist; give a folder"):
        from_huggingface(folder)


def test_the_pages_name_every_family():
    """As people write them: qwen3_moe is Qwen3-MoE."""
    root = Path(__file__).parents[2]
    spelt = {"gemma3_text": "gemma 3", "glm4_moe": "glm-4-moe", "olmo2": "olmo 2", "deepseek_v3": "and -v3"}
    spelt |= {"gpt2": "gpt-2", "phi3": "phi-3"}
    for page, begin in (("README.md", "| weights of Hugging Face"), ("docs/status.md", "| Hugging Face families")):
        lines = (root / page).read_text(encoding="utf-8").splitlines()
        (line,) = [line.lower() for line in lines if line.startswith(begin)]
        names = [spelt.get(kind, kind.replace("_", "-")) for kind in FAMILIES]
        assert not [name for name in names if name not in line], page
