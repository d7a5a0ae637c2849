"""The hand-written parts equal their plain twins, and the configuration refuses nonsense in one go."""

import pytest
import torch
import torch.nn.functional as F

from core.autograd import StageContext
from core.parallel_state import ParallelConfig, ParallelState, initialize_parameters
from core.transformer.activations import ACTIVATIONS, gated
from core.transformer.attention.qkv import rotate, rotate_plainly, split_qkv, split_qkv_plainly
from core.transformer.dropout import Dropout
from core.transformer.norm import LayerNorm, RMSNorm
from core.transformer.positions import Rotary
from core.transformer.rules import check_layout
from core.transformer.spec import Build
from core.transformer.transformer_config import TransformerConfig

torch64 = {"dtype": torch.float64}


def build(**kw):
    config = TransformerConfig(**{"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, **kw})
    return Build(config, ParallelState.single("cpu"), StageContext(), layer=0)


def same_gradient(fn, twin, *inputs):
    ours, theirs = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    got, want = fn(*ours), twin(*theirs)
    got, want = ([y] if isinstance(y, torch.Tensor) else list(y) for y in (got, want))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)
    weights = [torch.randn_like(w) for w in want]
    sum((g * u).sum() for g, u in zip(got, weights, strict=True)).backward()
    sum((w * u).sum() for w, u in zip(want, weights, strict=True)).backward()
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("percent", [1.0, 0.5])
@pytest.mark.parametrize("heads, groups", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("positions", [None, "given"])
def test_split_qkv_equals_its_plain_twin(heads, groups, positions, percent):
    b = build(
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=8,
        rotary_percent=percent,
        params_dtype=torch.float64,
    )
    ids = torch.randint(20, (3, 6)) if positions else None
    tables = Rotary(b, 20)(6, ids)
    y = torch.randn(6, 3, (heads + 2 * groups) * 8, **torch64)
    same_gradient(lambda y: split_qkv(y, groups, 8, tables), lambda y: split_qkv_plainly(y, groups, 8, tables), y)
    same_gradient(lambda y: split_qkv(y, groups, 8, None), lambda y: split_qkv_plainly(y, groups, 8, None), y)
    x = torch.randn(3, 4, 6, 8, **torch64)
    same_gradient(lambda x: rotate(x, tables), lambda x: rotate_plainly(x, *tables), x)


def test_rotary_depends_on_distance_only_and_refuses_odd_heads():
    tables = Rotary(build(kv_channels=8, params_dtype=torch.float64), 64)
    q, k = torch.randn(1, 1, 1, 8, **torch64), torch.randn(1, 1, 1, 8, **torch64)

    def score(i, j):
        at = [tables(1, torch.tensor([[n]])) for n in (i, j)]
        return (rotate(q, at[0]) * rotate(k, at[1])).sum()

    torch.testing.assert_close(score(3, 1), score(40, 38))
    assert abs(score(3, 1) - score(3, 2)) > 1e-6
    with pytest.raises(ValueError, match="even number of dims per head, got 3 of kv_channels=3"):
        Rotary(build(hidden_size=12), 8)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated_activation_equals_its_plain_form(name):
    act = ACTIVATIONS[name]
    same_gradient(lambda y: gated(y, act), lambda y: act(y[..., :6]) * y[..., 6:], torch.randn(4, 12, **torch64))


def test_rms_norm_equals_torchs():
    norm = RMSNorm(build(params_dtype=torch.float64), 16)
    x, weight = torch.randn(5, 3, 16, **torch64), torch.randn(16, **torch64)

    def ours(x, w):
        norm.weight.data.copy_(w.detach())
        from core.transformer.norm import _RMSNorm

        return _RMSNorm.apply(x, w, norm.eps)

    same_gradient(ours, lambda x, w: F.rms_norm(x, (16,), w, norm.eps), x, weight)
    wide = torch.randn(8, 16)
    initialize_parameters(norm, seed=0, coordinate={}, sizes={})
    half = RMSNorm(build(params_dtype=torch.bfloat16), 16)
    initialize_parameters(half, seed=0, coordinate={}, sizes={})
    torch.testing.assert_close(half(wide.bfloat16()).float(), F.rms_norm(wide, (16,), eps=1e-5), rtol=2e-2, atol=2e-2)


def test_layer_norm_equals_torchs():
    norm = LayerNorm(build(params_dtype=torch.float64), 16)
    initialize_parameters(norm, seed=0, coordinate={}, sizes={})
    x = torch.randn(5, 3, 16, **torch64)
    torch.testing.assert_close(norm(x), F.layer_norm(x, (16,)))


def test_dropout_is_a_function_of_seed_step_microbatch_layer_and_site():
    b = build()
    x = torch.ones(64, 64)
    state = torch.get_rng_state()

    def mask(layer=0, site="a", **facts):
        b.stage.begin(seed=facts.get("seed", 1), step=facts.get("step", 2), microbatch=facts.get("microbatch", 3))
        return Dropout(Build(b.config, b.parallel, b.stage, layer=layer), 0.25, site, sharded=False)(x)

    reference = mask()
    assert torch.equal(reference, mask())
    assert abs((reference == 0).float().mean() - 0.25) < 0.03 and reference.max() == 1 / 0.75
    for change in ({"seed": 2}, {"step": 3}, {"microbatch": 4}, {"layer": 1}, {"site": "b"}):
        assert not torch.equal(reference, mask(**change)), change
    assert torch.equal(state, torch.get_rng_state()), "the user's random state is untouched"
    assert torch.equal(Dropout(b, 0.25, "a", sharded=False).eval()(x), x)


def test_every_mistake_in_a_config_is_told_at_once():
    with pytest.raises(ValueError) as error:
        TransformerConfig(
            num_layers=0,
            hidden_size=10,
            num_attention_heads=4,
            num_query_groups=3,
            normalization="Layer",
            activation_func="gellu",
            hidden_dropout=1.0,
            pipeline_dtype=torch.bfloat16,
        )
    said = str(error.value)
    assert said.count(";") >= 6
    for part in (
        "num_layers=0 must be at least 1",
        "hidden_size=10 does not divide by num_attention_heads=4; use 8 or 12",
        "num_attention_heads=4 does not divide by num_query_groups=3; valid: 1, 2, 4",
        "unknown normalization 'Layer'; known: LayerNorm, RMSNorm",
        "unknown activation_func 'gellu'; known: gelu, gelu_tanh, silu, relu, squared_relu",
        "hidden_dropout=1.0 must lie in [0, 1)",
        "pipeline_dtype=torch.bfloat16 must be None or params_dtype=torch.float32",
    ):
        assert part in said, said


def test_a_model_that_does_not_fit_the_ranks_is_refused_before_any_process():
    config = TransformerConfig(
        num_layers=2, hidden_size=24, num_attention_heads=12, num_query_groups=6, ffn_hidden_size=30
    )
    check_layout(config, ParallelConfig(tensor=6, pipeline=2))
    with pytest.raises(ValueError) as error:
        check_layout(config, ParallelConfig(tensor=8, pipeline=4))
    said = str(error.value)
    for part in (
        "num_attention_heads=12 does not divide over tensor_model_parallel_size=8; valid: 1, 2, 3, 4, 6, 12",
        "num_query_groups=6 does not divide",
        "ffn_hidden_size=30 does not divide",
        "num_layers=2 cannot fill 4",
    ):
        assert part in said, said


def test_axes_that_no_layer_uses_yet_are_refused():
    config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=4)
    with pytest.raises(ValueError, match="expert=2, and the model has no experts"):
        check_layout(config, ParallelConfig(expert=2))


def test_defaults_follow_megatron():
    config = TransformerConfig(num_layers=2, hidden_size=12, num_attention_heads=4)
    assert (config.num_query_groups, config.ffn_hidden_size, config.kv_channels) == (4, 48, 3)
    assert (
        config.activation is F.gelu
        and TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, activation_func=F.silu).activation
        is F.silu
    )
