"""Which functions are wrong on a shard of a tensor, and whether a program called one."""

import dis
import linecache
import sys
from functools import partial
from typing import Any

import torch.fx
from torch import Tensor, nn

_REDUCTIONS = """
    norm foreach_norm vector_norm matrix_norm cond sum mean prod var std var_mean std_mean max min amax amin aminmax
    argmax argmin median nanmedian quantile mode sort argsort topk kthvalue logsumexp softmax log_softmax normalize
    iter unbind nonzero mse_loss l1_loss smooth_l1_loss huber_loss kl_div cross_entropy histogram fft fft2
    rfft cumsum cumprod renorm count_nonzero unique histc svd svdvals qr eigh eigvals eigvalsh det slogdet inv pinv
    matrix_rank cosine_similarity dist cdist cov corrcoef nansum nanmean trace
"""
_PRODUCTS = "matmul mm bmm mv dot inner outer vdot linear einsum tensordot addmm baddbmm chain_matmul multi_dot kron"
# with one seed on all ranks every shard gets the same numbers
_DRAWS = """
    randn_like rand_like randint_like normal_ uniform_ bernoulli bernoulli_ dropout feature_dropout exponential_
    cauchy_ geometric_ log_normal_ random_ trunc_normal_ multinomial xavier_uniform_ xavier_normal_ kaiming_uniform_
    kaiming_normal_ orthogonal_ sparse_ eye_ dirac_
"""
# a width, a fan-in or a count is another on a shard; a buffer of that shape is right
_SHAPES = "shape size numel nelement len"
# row numbers of a shard are not row numbers of the full tensor
_INDICES = """
    getitem setitem select slice index_select index_fill_ index_copy_ index_add_ index_put_ index_fill index_copy
    index_add index_put narrow embedding masked_fill masked_fill_ masked_select gather scatter scatter_ scatter_add_
    numpy array tolist dlpack
"""
KIND_OF_FUNCTION = {
    **dict.fromkeys(_REDUCTIONS.split(), "reduction"),
    **dict.fromkeys(_PRODUCTS.split(), "product"),
    **dict.fromkeys(_DRAWS.split(), "draw"),
    **dict.fromkeys(_INDICES.split(), "index"),
    **dict.fromkeys(_SHAPES.split(), "shape"),
}
# a momentum of one's own, say
NEW_BUFFERS = {"zeros_like", "ones_like", "full_like", "empty_like"}
# of several weights or gradients one
JOINS = ("cat", "stack", "hstack", "vstack", "concat")
# over all ranks where nothing is found, which is nearly always
_GUARDS = {"all": False, "any": True}
# what a penalty is not for, whose gradient alone is each rank's own: somebody looks at its value
_READS = "item float int format tolist numpy sqrt rsqrt pow log exp detach data gt lt"
READS_OF_VALUE = frozenset(_READS.split())
# their result on a shard is not the shard of the result; a file is of one rank
WRONG_ON_SHARDS = {"reduction", "product", "draw", "index", "shape", "file"}
# torch's own frames between a program and `__torch_function__`
_TORCH_FRAMES = {
    "torch._tensor",
    "torch.overrides",
    "torch.functional",
    "torch.nn.functional",
    "torch.nn.utils",
}
_TORCH_FRAMES |= {
    "torch.distributed.distributed_c10d",
    "torch.distributed.c10d_logger",
    "torch.distributed._functional_collectives",
    "torch._ops",
    "torch._library.autograd",
    "torch.nn.init",
}
# svd_lowrank, max_pool1d
_TORCH_FRAMES |= {"torch.autograd", "torch._lowrank", "torch._lobpcg", "torch._jit_internal"}
_TORCH_CALLERS = ("torch.nn.modules.module", "torch.nn.modules.container")


def called_by_program(frame: Any) -> bool:
    """Whether a program called, not torch's or our own code; torch.nn.utils is a program's hand."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module not in _TORCH_FRAMES and not module.startswith("torch.nn.utils."):
            return not module.startswith(("torch.", "core.")) and module != "torch"
        frame = frame.f_back
    return False


def frame_of_program(frame: Any) -> Any:
    """The first of the frames from `frame` on that is neither torch's nor ours; None where there is none."""
    while frame is not None and _is_ours_or_torchs(frame):
        frame = frame.f_back
    return frame


def program_level() -> int:
    """The `stacklevel` at which a warning of the function that asks is of the program's line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _is_ours_or_torchs(frame):
        frame, level = frame.f_back, level + 1
    return level


def _is_ours_or_torchs(frame: Any) -> bool:
    # code that is executed from a text may have None
    module = str(frame.f_globals.get("__name__"))
    return module == "torch" or module.startswith(("torch.", "core."))


def line_of_program(frame: Any) -> str:
    """The line of a program that runs, of the frames from `frame` on; "" where there is none, or no file of it."""
    frame = frame_of_program(frame)
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno) if frame is not None else ""


def called_by_core(frame: Any) -> bool:
    """Whether our code called, which knows what a part is: torch's frames between are passed over."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith("torch.") and module != "torch":
            return bool(module.startswith("core."))
        frame = frame.f_back
    return False


def called_by_torch_module(frame: Any) -> bool:
    """Whether a module of torch's (a GRU, a BatchNorm) called, before any code that is not torch's."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith("torch.") and module != "torch":
            return False
        if module.startswith("torch.nn.modules.") and module not in _TORCH_CALLERS:
            return True
        frame = frame.f_back
    return False


def is_foreign(hook: Any) -> bool:
    """Whether a hook is a program's, not torch's or our own."""
    while isinstance(hook, partial):
        hook = hook.func
    # a list's `append` has no module
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return not module.startswith(("core.", "torch."))


def replaced_forward(module: nn.Module) -> list[Any]:
    """The forward that a program has put in the place of a module's own, or its class's; [] where it has not."""
    # a traced module's class has none
    forward = vars(module).get("forward", getattr(type(module), "forward", None))
    is_traced = isinstance(module, torch.fx.GraphModule)
    is_own = is_traced or forward is None or is_foreign(type(module)) or not is_foreign(forward)
    return [] if is_own or _is_checkpoint(forward) else [forward]


def _is_checkpoint(forward: Any) -> bool:
    """Whether it gives its arguments to `torch.utils.checkpoint`, and makes nothing of them."""
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    if code is None or "checkpoint" not in (*code.co_names, *code.co_freevars):
        return False
    names = [each.opname for each in dis.get_instructions(code)]
    calls = [name for name in names if name.startswith("CALL") and "INTRINSIC" not in name]
    made = ("BINARY_OP", "BINARY_SUBSCR", "BINARY_SLICE", "COMPARE_OP", "UNARY_NEGATIVE")
    # a function inside of it, or another call, may make something of them
    return len(calls) == 1 and not {"MAKE_FUNCTION", *made}.intersection(names)


def kind_of_call(name: str, result: Any) -> str | None:
    """What a function is that returned `result`; None: elementwise, a view, a fact.

    `isfinite(x).all()` and `isnan(x).any()` are reductions where they found something in this rank's part.
    """
    is_one = name in _GUARDS and isinstance(result, Tensor) and result.numel() == 1
    if is_one and bool(result) is _GUARDS[name]:
        return "reduction"
    return KIND_OF_FUNCTION.get(name)


def function_name(func: Any) -> str:
    """vector_norm of `torch.linalg.vector_norm`, matmul of `@`, grad of `p.grad`."""
    name: str = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        # properties of torch's that are written in Python have no name of their own
        own: str = getattr(func.__self__, "__name__", "") or func.__self__.fget.__name__
        return own.strip("_") if own.startswith("__") else own
    if name in KIND_OF_FUNCTION:
        return name
    return name.removeprefix("linalg_").removeprefix("__r").strip("_")
