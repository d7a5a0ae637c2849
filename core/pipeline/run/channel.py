"""Messages between stages: received in the sender's order, posted ahead, sends kept until they have arrived.

gloo loses a send whose handle is dropped, cannot be polled, and takes any number of bytes for any other: so
handles are kept, nothing is polled, and shapes are told once per step before the first message of a boundary.
"""

import pickle
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from core.parallel_state.collectives import Group, Received, irecv, isend
from core.parallel_state.collectives.failure import Unanswered
from core.parallel_state.collectives.p2p import DTYPES, MAX_DIMS, Sent
from core.pipeline.run.boundary import flatten
from core.pipeline.schedule.actions import Action
from core.pipeline.schedule.lower import RankPlan

HEADER = 4 + MAX_DIMS  # int64: form, bytes of a description, dtype, dims, sizes ... and the batch's rows after it
OTHER, CONSTANT, WANTS = 0, 1, 2  # form: any nesting; a tensor that wants no gradient; one that does


@dataclass(frozen=True)
class Form:
    """What crosses a boundary: the nesting, the constants in it, each tensor's shape and dtype, and if it wants a
    gradient.

    The same for all microbatches of a step.
    """

    spec: Any
    constants: tuple[Any, ...]  # None where a tensor stands
    tensors: tuple[tuple[tuple[int, ...], torch.dtype, bool], ...]

    @classmethod
    def of(cls, value: Any) -> tuple["Form", list[Tensor]]:
        """The form of any nesting of tensors and constants, and its tensors."""
        if isinstance(value, Tensor):
            return cls(_LEAF, (None,), ((tuple(value.shape), value.dtype, value.requires_grad),)), [value]
        leaves, spec = flatten(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        constants = tuple(None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves)
        return cls(spec, constants, tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)), tensors

    def fill(self, tensors: Iterable[Tensor]) -> Any:
        """The value again: its nesting and constants, with `tensors` in their places."""
        rest = iter(tensors)
        if self.spec is _LEAF:
            return next(rest)
        return pytree.tree_unflatten([next(rest) if c is None else c[0] for c in self.constants], self.spec)

    def messages(self, direction: str) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of what is sent: the tensors (F), or the gradients that are wanted (B); never nothing."""
        found = [(shape, dtype) for shape, dtype, wants in self.tensors if direction == "F" or wants]
        return found or [((1,), torch.uint8)]

    def __reduce__(self) -> tuple:
        """With the nesting itself in place of its description, which torch does not want to be pickled."""
        skeleton = pytree.tree_unflatten([_HERE if c is None else c[0] for c in self.constants], self.spec)
        return _from_skeleton, (skeleton, self.tensors)

    def header(self) -> tuple[list[int], bytes]:
        """Numbers that say all of a single tensor; for anything else, their second is the size of the bytes."""
        shape, dtype, wants = self.tensors[0] if self.tensors else ((), torch.bool, False)
        if self.spec == _LEAF and self.tensors and len(shape) <= MAX_DIMS and dtype in DTYPES:
            form = WANTS if wants else CONSTANT
            return [form, 0, DTYPES.index(dtype), len(shape), *shape, *[0] * (MAX_DIMS - len(shape))], b""
        text = pickle.dumps(self)
        return [OTHER, len(text), *[0] * (HEADER - 2)], text

    @classmethod
    def read(cls, numbers: list[int]) -> "Form":
        """The inverse for a single tensor."""
        shape = tuple(numbers[4 : 4 + numbers[3]])
        return cls(_LEAF, (None,), ((shape, DTYPES[numbers[2]], numbers[0] == WANTS),))

    @property
    def values(self) -> list[Any]:
        """What is no tensor."""
        return [c[0] for c in self.constants if c is not None]

    def __str__(self) -> str:
        return ", ".join(f"{list(shape)} of {str(dtype).removeprefix('torch.')}" for shape, dtype, _ in self.tensors)


class _Here:
    """Stands where a tensor was."""


_HERE = _Here()


def _from_skeleton(skeleton: Any, tensors: tuple) -> Form:
    leaves, spec = flatten(skeleton)
    return Form(spec, tuple(None if isinstance(leaf, _Here) else (leaf,) for leaf in leaves), tensors)


def _equal(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    try:
        return bool(a == b)
    except (RuntimeError, TypeError, ValueError):  # arrays do not say yes or no
        return pickle.dumps(a) == pickle.dumps(b)


def _check_form(action: Action, form: Form, known: Form) -> None:
    """Raise ValueError unless an output is like the first one of this step."""
    if known.tensors != form.tensors or (known.spec is not form.spec and known.spec != form.spec):
        if str(known) == str(form) and known.spec == form.spec:
            raise ValueError(
                f"stage {action.stage} returns a tensor that wants a gradient for microbatch {action.microbatch}, "
                "and wanted none before in this step; let it depend on trained parameters in every microbatch, or "
                "in none"
            )
        raise ValueError(
            f"stage {action.stage} returns {form} for microbatch {action.microbatch}, and returned {known} "
            "before in this step: within a step every microbatch must have the same shape (pad them); "
            "between steps shapes may change"
        )
    if form.spec is not _LEAF and not _equal(known.constants, form.constants):
        raise ValueError(
            f"stage {action.stage} returns other values beside its tensors for microbatch "
            f"{action.microbatch} than before in this step ({form.values} and {known.values}): what changes "
            "between microbatches must be a tensor"
        )


_LEAF = pytree.tree_flatten(0)[1]


@dataclass(eq=False)
class _Inbox:
    """Everything that one peer will send in this step."""

    peer: int
    group: Group
    todo: deque[Action]
    posted: dict[Action, list[Received]]
    header: Received | None = None  # under way, for the first of `todo`


class Channel:
    """The messages of one rank in one step.

    groups: (sender, receiver) -> group, where this rank is -1. depth: how many receives are posted beyond
    the one that is needed. names: peer -> global rank, for messages to people. rows: of this rank's batch; without
    one it takes those that it is told for its own.
    """

    def __init__(
        self,
        plan: RankPlan,
        groups: Mapping[tuple[int, int], Group],
        names: Callable[[int], int],
        device: torch.device,
        depth: int,
        rows: int | None = None,
    ) -> None:
        self._rows = rows
        self._plan, self._groups, self._names, self._device, self._depth = plan, groups, names, device, depth
        self.forms: dict[tuple[str, int], Form] = {}  # (F or B, receiving stage)
        self._inboxes = {
            action: inbox
            for peer, order in plan.inbox.items()
            for inbox in [_Inbox(peer, groups[peer, -1], deque(order), {})]
            for action in order
        }
        self._sent: dict[Action, list[Sent]] = {}
        for inbox in {id(i): i for i in self._inboxes.values()}.values():
            self._post_ahead(inbox)

    def send(self, action: Action, value: Any) -> None:
        """Start sending an output (SEND_F), its form first at the first microbatch; or gradients (SEND_B).

        Raises ValueError: another form than this step's first microbatch had.
        """
        peer = self._plan.outbox[action]
        group, works = self._groups[-1, peer], []
        other = 1 - group.rank
        tensors = value
        if action.kind == "SEND_F":
            form, tensors = Form.of(value)
            known = self.forms.setdefault(("B", action.stage), form)
            if known is form:
                works += self._send_header(form, group, other)
            else:
                _check_form(action, form, known)
        if not tensors:  # a receive proves that what its sender had read has arrived: it must be one
            tensors = [torch.zeros(1, dtype=torch.uint8, device=self._device)]
        self._sent[action] = works + [isend(t, other, group, header=False) for t in tensors]

    def _send_header(self, form: Form, group: Group, other: int) -> list[Sent]:
        numbers, text = form.header()
        rows = -1 if self._rows is None else self._rows
        messages = [torch.tensor([*numbers, rows], device=self._device)]
        if text:
            messages.append(torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._device))
        return [isend(message, other, group, header=False) for message in messages]

    def take(self, action: Action) -> Any:
        """Wait for a message: an output of the stage before (RECV_F), or the gradients that it wants (RECV_B).

        Posts every receive up to it, in the sender's order, then `depth` more.
        """
        inbox = self._inboxes[action]
        try:
            while action not in inbox.posted:
                self._post(inbox)
            tensors = [received.wait() for received in inbox.posted.pop(action)]
        except RuntimeError as error:
            peer = self._names(inbox.peer)
            raise Unanswered(
                f"waiting for {action} from rank {peer}, which did not send it within "
                f"{inbox.group.timeout.total_seconds():g} s or is gone: {str(error).splitlines()[0]}",
                (peer,),
            ) from error
        self._post_ahead(inbox)
        for send in self._plan.receipts.get(action, ()):
            self._settle(send, arrived=True)
        form = self.forms[action.kind[-1], action.stage]
        if action.kind == "RECV_B":
            return tensors if any(wants for _, _, wants in form.tensors) else []
        for tensor, (_, _, wants) in zip(tensors, form.tensors, strict=False):
            tensor.requires_grad_(wants)
        return form.fill(tensors)

    def _post(self, inbox: _Inbox) -> None:
        """Post the next receive of a peer; waits for the header of a boundary where that is not known yet."""
        action = inbox.todo[0]
        key = (action.kind[-1], action.stage)
        other = 1 - inbox.group.rank
        if key not in self.forms:
            assert key[0] == "F", "a gradient comes after the output that it belongs to was sent"
            self._expect_header(inbox)
            assert inbox.header is not None
            *numbers, rows = inbox.header.wait().tolist()
            inbox.header = None
            self._compare_rows(rows, inbox.peer)
            if numbers[0]:
                self.forms[key] = Form.read(numbers)
            else:
                text = irecv((numbers[1],), torch.uint8, other, inbox.group, device=self._device, header=False).wait()
                self.forms[key] = pickle.loads(text.cpu().numpy().tobytes())
        inbox.posted[inbox.todo.popleft()] = [
            irecv(shape, dtype, other, inbox.group, device=self._device, header=False)
            for shape, dtype in self.forms[key].messages(key[0])
        ]

    def _compare_rows(self, theirs: int, peer: int) -> None:
        """Raise ValueError unless the batches have as many rows: microbatches would not belong together."""
        if theirs >= 0 and self._rows not in (None, theirs):
            raise ValueError(
                f"the batch of this rank has {self._rows} rows, that of rank {self._names(peer)} (or one before) has "
                f"{theirs}: give every pipeline rank the same batch, or None where its stages take nothing from it"
            )
        self._rows = theirs if theirs >= 0 else self._rows

    def _expect_header(self, inbox: _Inbox) -> None:
        if inbox.header is None:
            other = 1 - inbox.group.rank
            inbox.header = irecv((HEADER + 1,), torch.int64, other, inbox.group, device=self._device, header=False)

    def _post_ahead(self, inbox: _Inbox) -> None:
        while inbox.todo and len(inbox.posted) < self._depth:
            action = inbox.todo[0]
            if (action.kind[-1], action.stage) not in self.forms:
                if action.kind == "RECV_F":
                    self._expect_header(inbox)
                return
            self._post(inbox)

    def _settle(self, action: Action, *, arrived: bool = False) -> None:
        for sent in self._sent.pop(action, ()):
            sent.wait(arrived=arrived)

    def drop(self) -> None:
        """After a failure: hold no message any more, so that the connections can be closed."""
        self._sent.clear()
        for inbox in self._inboxes.values():
            inbox.posted.clear()
            inbox.header = None

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        for action in list(self._sent):
            self._settle(action)
