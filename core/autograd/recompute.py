"""Run a region again in backward instead of keeping its activations; at most once per microbatch.

A region is one autograd Function whose inputs are its tensors and its parameters, so gradients,
`torch.autograd.grad`, post-accumulate hooks and DDP see an ordinary node. Where tensors leave it otherwise than as
results, which its first run shows, it is torch's checkpoint instead (core/autograd/leaving.py).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from core.autograd.bag import StageContext
from core.autograd.later import Calls, LazyProduct, calls
from core.autograd.leaving import Parts, Watch, call_with_graph, in_torch_func, is_plain
from core.autograd.module_state import ModuleState
from core.autograd.surroundings import Autocast, random_state, set_random_state

# Set while a region runs again, and read only inside that run, in the same thread: a region inside a region
# then keeps its activations, else it would run a third time.
running_again: ContextVar["_Region | None"] = ContextVar("running_again", default=None)


# Of functions and modules that `recompute` was called with: what their first run showed (`Checked.shown`).
_shown: WeakKeyDictionary[Any, tuple] = WeakKeyDictionary()


def _is(value: Any) -> bool:
    return isinstance(value, Tensor)


def _ends(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> tuple[list, list[Tensor]]:
    """Of an output without a value only the gradient edge is kept."""
    wanted = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and o.requires_grad]
    return [get_gradient_edge(o) if isinstance(o, LazyProduct) else o for o, _ in wanted], [g for _, g in wanted]


def _check_constant(outputs: Sequence[Tensor], constant: Sequence[bool]) -> None:
    if any(c and o.requires_grad for c, o in zip(constant, outputs, strict=True)):
        raise RuntimeError(
            "recompute: a result of the region wants a gradient now, and wanted none the first time with the same "
            "parameters trained; let it depend on them always or never"
        )


class Checked:
    """What is known of a region from its earlier runs.

    done: the parameters named for it are complete; walking a graph takes time, once is enough.
    state: of the modules inside, which the second run finds as the first did.
    leave: whether tensors leave otherwise than as results; None until the first run. handed_out, computed: see Parts.
    tries: how often its second run may still leave out the last product (core/autograd/later.py) in vain. Two, as
    a first run may be held by chance: an error caught in some import keeps the frames under it.
    """

    done = False
    tries = 2

    def __init__(self, module: nn.Module | None = None) -> None:
        self.state = ModuleState(None)
        self.leave: bool | None = None
        self.handed_out = False
        self.computed: list[tuple[nn.Module, str, Any]] = []
        self._trained: list[bool] = []
        self._wants: list[bool] = []
        if module is not None:
            self.see(Parts(module))

    @property
    def shown(self) -> tuple:
        """What the first run showed."""
        return self.leave, self._trained, self._wants

    @shown.setter
    def shown(self, known: tuple) -> None:
        self.leave, self._trained, self._wants = known

    def see_outputs(self, made: Any, sources: Sequence[Tensor]) -> None:
        """After the first run: which of its tensors want no gradient, where these sources are trained."""
        self._trained = [t.requires_grad for t in sources]
        self._wants = [t.requires_grad for t in pytree.tree_leaves(made) if _is(t)]

    def constants(self, made: Sequence[Tensor], sources: Sequence[Tensor]) -> list[bool]:
        """Of each result whether no gradient can come from it; as far as is known."""
        same = len(made) == len(self._wants) and self._trained == [t.requires_grad for t in sources]
        return [not want for want in self._wants] if same else [False] * len(made)

    def see(self, parts: Parts) -> None:
        """Before a run: hooks, computed weights and parts come and go."""
        self.state.refresh(parts.modules)
        self.handed_out, self.computed = parts.handed_out, parts.computed


class _Region:
    """Everything that a second run must find as the first did, but for its tensors: autograd saves those."""

    def __init__(self, fn: Callable, args: tuple, kwargs: dict, stage: StageContext | None) -> None:
        leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.fn, self.stage = fn, stage
        # a tensor passed twice stays one tensor in the second run (attention asks `query is key`)
        place: dict[int, int] = {}
        self.places = [place.setdefault(id(leaf), len(place)) if _is(leaf) else None for leaf in leaves]
        self.constants = [None if _is(leaf) else leaf for leaf in leaves]
        self.tensors: list[Tensor] = list({id(leaf): leaf for leaf in leaves if _is(leaf)}.values())
        self.count = len(self.tensors)
        self.checked, self.calls = Checked(), Calls()
        self.in_backward = False  # its own; one inside `fn` is another
        self.constant: list[bool] = []  # of each result, whether it wants no gradient
        self.out_spec: Any = None
        self.out_places: list[bool] = []
        self.out_constants: list = []

    def remember(self, parameters: Sequence[Tensor]) -> None:
        """The state of the world before the first run."""
        tensors = (*self.tensors, *parameters)
        cpu = torch.device("cpu")
        self.device = next((t.device for t in tensors if t.device.type != "cpu"), cpu)
        self.snapshot = self.stage.snapshot() if self.stage is not None else None
        self.random = random_state(self.device)
        self.autocast = Autocast(self.device)

    def call(self, tensors: Sequence[Tensor]) -> list:
        """Run on these tensors; returns the flat outputs."""
        pairs = zip(self.places, self.constants, strict=True)
        leaves = [constant if place is None else tensors[place] for place, constant in pairs]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        outputs, self.out_spec = pytree.tree_flatten(self.fn(*args, **kwargs))
        return outputs

    def call_first(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The first run, without grad mode; returns the tensors among the outputs and remembers the others."""
        versions = [t._version for t in tensors]
        self.before = self.checked.state.before()
        token = calls.set(self.calls)
        try:
            outputs = self.call(tensors)
        finally:
            calls.reset(token)
        self.checked.state.after(self.before)
        if versions != [t._version for t in tensors]:
            raise RuntimeError(
                "recompute: the region writes into its input, and did not the first time; clone it first"
            )
        self.out_places = [_is(out) for out in outputs]
        self.out_constants = [None if _is(out) else out for out in outputs]
        return [out for out in outputs if _is(out)]

    def call_again(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> tuple[list, list[Tensor]]:
        """The second run, which stops early where it may: where backward starts, and with which gradients."""
        if not self.checked.tries:
            return _ends(self._call_as_first(tensors, None), gradients)
        self.calls.begin_again()
        try:
            ends = _ends(self._call_as_first(tensors, self.calls), gradients)
            self.calls.end()
        except Exception:  # perhaps of something that passes torch's dispatch by and found no value
            if not self.calls.postponed:
                raise
            self.checked.tries = 0
            return _ends(self._call_as_first(tensors, None), gradients)
        self.checked.tries -= self.calls.looked
        return ends

    def _call_as_first(self, tensors: Sequence[Tensor], count: Calls | None) -> list[Tensor]:
        with self.as_first(count):
            outputs = [out for out in self.autocast.again(lambda: self.call(tensors)) if _is(out)]
        _check_constant(outputs, self.constant)
        return outputs

    @contextmanager
    def as_first(self, count: Calls | None = None) -> Iterator[None]:
        """Same bag, same random numbers, same state of modules; the present is put back after it.

        The bag is closed meanwhile, as it was in the first run.
        """
        now, now_stage = random_state(self.device), self.stage.snapshot() if self.stage is not None else None
        set_random_state(self.device, self.random)
        if self.stage is not None:
            self.stage.restore(self.snapshot)  # type: ignore[arg-type]
        bag = self.stage.bag if self.stage is not None else None
        was_open = bag is not None and bag.open
        if bag is not None:
            bag.open = False
        token, other = running_again.set(self), calls.set(count)
        try:
            with torch.enable_grad(), self.checked.state.as_before(self.before):
                yield
        finally:
            running_again.reset(token)
            calls.reset(other)
            if bag is not None:
                bag.open = was_open
            set_random_state(self.device, now)
            if self.stage is not None:
                self.stage.restore(now_stage)  # type: ignore[arg-type]

    def put_back(self) -> None:
        """As before a first run that is tried again."""
        self.checked.state.put_back(self.before)
        set_random_state(self.device, self.random)

    def results(self, made: Sequence[Tensor]) -> Any:
        """The outputs in the form in which `fn` returned them."""
        rest = iter(made)
        pairs = zip(self.out_places, self.out_constants, strict=True)
        leaves = [next(rest) if is_tensor else constant for is_tensor, constant in pairs]
        return pytree.tree_unflatten(leaves, self.out_spec)


def _unlisted(ends: Sequence[Tensor | GradientEdge], sources: Sequence[Tensor]) -> Tensor | None:
    """A parameter that the region read without naming it: it would silently get no gradient."""
    named = {id(t) for t in sources}
    seen = {t.grad_fn for t in sources}  # beyond a computed source its own graph takes over
    todo = [out.node if isinstance(out, GradientEdge) else out.grad_fn for out in ends]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in named:
            return leaf
        todo.extend(following for following, _ in node.next_functions)
    return None


def _check_listed(ends: Sequence[Tensor | GradientEdge], sources: Sequence[Tensor]) -> None:
    if (leaf := _unlisted(ends, sources)) is not None:
        raise RuntimeError(
            f"recompute: the region uses a parameter of shape {list(leaf.shape)} that is neither an argument nor in "
            "`parameters`, and did not the first time, so it would get no gradient; name it there"
        )


@contextmanager
def _hooks_wait(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Hooks on parameters run once, outside, when autograd has the region's whole gradient.

    Something stays in their place, as an operation asks whether a parameter has hooks.
    """
    hooks: list[dict] = [p._backward_hooks for p in parameters if p._backward_hooks]
    kept = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
        each[-1] = lambda gradient: None
    try:
        yield
    finally:
        for each, old in zip(hooks, kept, strict=True):
            each.clear()
            each.update(old)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, region: _Region, *tensors: Tensor) -> Any:
        inputs = tensors[: region.count]
        # An output may be an input, a parameter or somebody's buffer: as an alias, those keep their own history.
        made = tuple(out.detach() for out in region.call_first(inputs))
        ctx.region, ctx.parameters = region, tensors[region.count :]
        ctx.set_materialize_grads(False)  # an unused output gives no gradient, not zeros
        ctx.save_for_backward(*inputs)
        region.constant = region.checked.constants(made, tensors)
        numbers = (t.is_floating_point() or t.is_complex() for t in made)
        ctx.mark_non_differentiable(
            *(t for t, number, constant in zip(made, numbers, region.constant, strict=True) if constant or not number)
        )
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("recompute: no second derivatives through a region (create_graph=True)")
        region: _Region = ctx.region
        needs = ctx.needs_input_grad[1:]
        if all(gradient is None for gradient in gradients):
            return None, *(None for _ in needs)
        # a pack hook (offloading, an outer checkpoint) may have saved a copy that asks for nothing
        saved = zip(ctx.saved_tensors, needs, strict=False)
        inputs = [t.detach().requires_grad_(need) for t, need in saved]
        ends, given = region.call_again(inputs, gradients)
        sources = (*inputs, *ctx.parameters)
        asked = [need and t.requires_grad for t, need in zip(sources, needs, strict=True)]
        found: list = [None] * sum(asked)
        if ends and found:
            starts = [t for t, ask in zip(sources, asked, strict=True) if ask]
            if not region.checked.done:
                _check_listed(ends, sources)
                region.checked.done = True
            region.in_backward = True
            with _hooks_wait(ctx.parameters):
                found = list(torch.autograd.grad(ends, starts, given, allow_unused=True))
        rest = iter(found)
        return None, *(next(rest) if ask else None for ask in asked)


class _NestedError(RuntimeError):
    """A run made nested tensors, whose sizes are others in every run."""


@torch.compiler.disable
def _with_graph(
    region: _Region, args: tuple, kwargs: dict, tensors: Sequence[Tensor], parameters: Sequence[Tensor]
) -> Any:
    """The region as torch's checkpoint; its first time it is watched for what leaves it. Not inside compiled code,
    which knows no checkpoint like this one."""
    checked = region.checked
    watch = Watch() if checked.leave is None and not checked.state.compiled else None
    region.before = checked.state.before()
    token = running_again.set(region)  # regions inside are part of it
    try:
        with watch or nullcontext():
            made = call_with_graph(region.fn, args, kwargs, region.as_first, tensors)
    finally:
        running_again.reset(token)
    checked.state.after(region.before)
    if watch is not None and watch.nested:
        raise _NestedError
    if checked.leave is None:
        ends = [t for t in pytree.tree_leaves(made) if _is(t) and t.requires_grad]
        checked.see_outputs(made, (*tensors, *parameters))
        checked.leave = region.before.leaves or _unlisted(ends, (*tensors, *parameters)) is not None
        checked.leave = checked.leave or (watch is not None and watch.found(made))
    region.before.attributes += checked.computed
    return made


def run_region(
    fn: Callable,
    args: tuple,
    kwargs: dict,
    stage: StageContext | None,
    parameters: Sequence[Tensor],
    checked: Checked,
) -> Any:
    """`recompute`, with the arguments apart, so that none of theirs is taken for ours."""
    if not torch.is_grad_enabled() or running_again.get() is not None or in_torch_func():
        return fn(*args, **kwargs)
    region = _Region(fn, args, kwargs, stage)
    region.remember(parameters)
    region.checked = checked
    tensors, region.tensors = region.tensors, []
    if checked.leave is None and checked.state.scripted:
        checked.leave = False
    if checked.leave is not False or checked.handed_out or not all(map(is_plain, region.constants)):
        try:
            return _with_graph(region, args, kwargs, tensors, parameters)
        except RuntimeError as error:
            if not isinstance(error, _NestedError) and "saved tensor hooks" not in str(error):
                raise
        checked.leave = False  # torch.func or nested tensors inside: torch's checkpoint knows neither
        region.put_back()
    made = _Recompute.apply(region, *tensors, *parameters)
    if not region.before.leaves:
        return region.results(made)
    del made  # not so the first time
    checked.leave = True
    region.put_back()
    return _with_graph(region, args, kwargs, tensors, parameters)


def recompute(
    fn: Callable,
    *args: Any,
    stage: StageContext | None = None,
    parameters: Iterable[Tensor] | None = None,
    **kwargs: Any,
) -> Any:
    """`fn(*args, **kwargs)` that keeps only its inputs and runs again, once, inside backward.

    Arguments and results are any nesting of tensors and constants. `parameters` names every tensor that `fn`
    reads from elsewhere and that needs a gradient; by default those of the module that `fn` is or belongs to.
    No input needs to require a gradient. Random numbers, the stage's microbatch and bag, and autocast are as
    in the first run. A region called inside another one is part of it: nothing runs a third time.

    Its first run is watched: if it keeps tensors otherwise than as results, or reads parameters that nobody named,
    it runs as torch's checkpoint ever after.
    Raises RuntimeError: the region writes into its input; in backward, it used a Parameter that nobody named, and
    did not the first time, or create_graph=True.
    """
    owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    owner = owner if isinstance(owner, nn.Module) else None
    if parameters is None:
        parameters = owner.parameters() if owner is not None else ()
    key = owner if owner is not None else getattr(fn, "__code__", None)
    checked = Checked(owner)
    if key in _shown:
        checked.shown = _shown[key]
    made = run_region(fn, args, kwargs, stage, list(parameters), checked)
    if key is not None and checked.leave is not None:
        _shown[key] = checked.shown
    return made
