"""torch's functions by what they do along a dim that is split; one in no table is tried (`split_trials`)."""

# of a rank's part of a sum, the same part of a sum
_LINEAR = """
    add sub mul div truediv neg rsub iadd isub imul itruediv float double half bfloat16 to type_as detach clone
    contiguous view reshape squeeze unsqueeze expand flatten transpose permute getitem view_as sum data
"""
_SUMS = "sum mean nansum nanmean max min amax amin any all"
# by the place of their dims among the arguments, and the dims where none are given (None: all)
_REDUCTIONS = {
    (1, None): """
        var std var_mean std_mean argmax argmin median nanmedian prod aminmax softmax log_softmax softmin
        logsumexp cumsum cumprod count_nonzero mode unique flip gather take_along_dim
    """,
    (2, None): "norm vector_norm quantile nanquantile matrix_norm roll",
    (2, -1): "topk kthvalue diff fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft",
    (1, -1): "sort argsort logcumsumexp cummax cummin",
    (2, 1): "normalize cosine_similarity",
    (99, None): """
        mse_loss l1_loss smooth_l1_loss huber_loss kl_div renorm dist cdist binary_cross_entropy
        binary_cross_entropy_with_logits fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_fft2 fft_ifft2 fft_rfft2
        fft_irfft2 take masked_scatter fused_moving_avg_obs_fake_quant fused_moving_avg_obs_fq_helper
    """,
    (99, 1): "cross_entropy nll_loss local_response_norm",
}
_DRAWS = """
    dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout rand_like randn_like
    randint_like bernoulli normal uniform exponential cauchy geometric log_normal gumbel_softmax rrelu multinomial
    poisson binomial random standard_gamma sample_dirichlet native_dropout fused_dropout trunc_normal
    fractional_max_pool2d fractional_max_pool3d
"""
_KINDS = {
    "draw": _DRAWS,
    "sum": _SUMS,
    "product": "matmul mm bmm linear einsum conv1d conv2d conv3d inner",
    "added": "addmm addmv baddbmm addbmm",
    "vectors": "dot vdot mv",
    "count": "bincount histc histogram",
    "cut": "chunk split tensor_split split_with_sizes unbind getitem setitem narrow select index_select glu",
    "permutation": "transpose swapaxes swapdims permute movedim moveaxis t T mT adjoint H mH",
    "view": "view reshape flatten unflatten squeeze view_as reshape_as ravel",
    "unsqueeze": "unsqueeze",
    "repeat": "repeat tile",
    "join": "cat concat concatenate hstack",
    "exit": "tolist numpy array item",
    "window": """
        avg_pool1d max_pool1d lp_pool1d adaptive_avg_pool1d adaptive_max_pool1d avg_pool2d max_pool2d unfold
        gru lstm rnn_tanh rnn_relu
    """,
    "scatter": "scatter_add index_add scatter_reduce index_reduce index_put put",
}
LINEAR = frozenset(_LINEAR.split())
# linear in each of two, not in both
PRODUCTS = frozenset(["mul", "imul", "div", "truediv", "itruediv"])
KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names.split()}
DIMS_OF: dict[str, tuple[int, int | None]] = {name: (1, None) for name in _SUMS.split()}
for _place, _names in _REDUCTIONS.items():
    KIND_OF |= dict.fromkeys(_names.split(), "reduction")
    DIMS_OF |= dict.fromkeys(_names.split(), _place)

# numbers of columns, where they go, are compared over the ranks; each element of the rest is of its own place
_BY_ELEMENT = """
    abs absolute acos acosh add addcdiv addcmul alias and angle arccos arccosh arcsin arcsinh arctan arctan2
    arctanh asin asinh atan atan2 atanh bfloat16 bitwise_and bitwise_left_shift bitwise_not bitwise_or
    bitwise_right_shift bitwise_xor bool byte cdouble ceil celu cfloat chalf char clamp clamp_max clamp_min clip clone
    complex conj conj_physical contiguous copy copysign cos cosh cpu cuda data deg2rad dequantize detach
    digamma div divide double elu empty_like eq erf erfc erfinv exp exp2 expand expand_as expm1
    fake_quantize_per_tensor_affine fill fix float float_power floor floor_divide floordiv fmax fmin fmod frac frexp
    full_like gcd ge gelu greater greater_equal gt half hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0
    iadd iand idiv ifloordiv igamma igammac ilshift imag imod imul int invert ior ipow irshift isclose isfinite isin
    isinf isnan isneginf isposinf isreal isub itruediv ixor lcm ldexp le leaky_relu lerp less less_equal lgamma log
    log10 log1p log2 log_sigmoid logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit logsigmoid
    long lshift lt map map2 masked_fill maximum minimum mish mod mul multiply mvlgamma nan_to_num ne neg negative
    nextafter not_equal ones_like or pin_memory polar polygamma pos positive pow prelu rad2deg rdiv real reciprocal
    relu relu6 remainder resolve_conj resolve_neg round rpow rshift rsqrt rsub selu sgn short sigmoid sign signbit
    silu sin sinc sinh softplus softshrink softsign sqrt square sub subtract tan tanh tanhshrink threshold to
    true_divide truediv trunc type type_as where xlogy xor zero zeros_like ipu xpu mtia
    broadcast_to broadcast_tensors grad index_fill index_copy scatter
"""
BY_ELEMENT = frozenset(_BY_ELEMENT.split())
# nothing is made of values, or what is made holds on each part: `torch.allclose`, a part's own row numbers
_FACTS = """
    allclose apply array_wrap autocast autocast_to_full_precision autocast_to_reduced_precision backward
    backward_hooks base bool cdata clear_non_serializable_cached_data const_data_ptr contains cuda_array_interface
    data_ptr deepcopy dense_dim device dim dimI dimV dim_order dir dlpack dlpack_device dtype educe_ex reduce_ex
    element_size epr eversed equal format get_device get set delete grad_dtype grad_fn hash itemsize layout len
    module_load name names nbytes ndim ndimension nelement numel output_nr post_accumulate_grad_hooks qscheme
    record_stream register_hook register_post_accumulate_grad_hook repr requires_grad resize resize_as result_type
    promote_types retain_grad retains_grad setstate shape share_memory size sparse_dim storage storage_offset
    storage_type stride untyped_storage version volatile wait nonzero argwhere nonzero_static masked_select index
"""
FACTS = frozenset(_FACTS.split())
_FACT_PREFIXES = (
    "is_",
    "has_",
    "sym_",
    "q_",
    "all_gather",
    "all_reduce",
    "reduce_scatter",
    "broadcast",
)


def kind_of(name: str) -> str:
    """Its table; "element", "fact"; "" where nothing is known of it. `index_add_` is of index_add's kind."""
    name = name.strip("_").removeprefix("foreach_")
    if name in KIND_OF:
        return KIND_OF[name]
    if name in BY_ELEMENT or name.startswith("new_"):
        return "element"
    if name in FACTS or name.startswith(_FACT_PREFIXES):
        return "fact"
    # `unsafe_split`, `permute_copy`; torch.special's are by element but for these two
    plain = name.removeprefix("unsafe_").removeprefix("special_").removesuffix("_copy")
    if plain in KIND_OF:
        return KIND_OF[plain]
    return "element" if plain in BY_ELEMENT or name.startswith("special_") else ""
