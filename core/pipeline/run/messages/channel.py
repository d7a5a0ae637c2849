"""Messages between stages: received in the sender's order, posted ahead, sends kept until they have arrived.

gloo loses a send whose handle is dropped, cannot be polled, and accepts any number of bytes for any other. So
handles are kept, nothing is polled, and shapes are sent once per step, before the first message of a boundary. Shapes
travel from host to host (`Group.on_host`): reading them never waits for an accelerator.
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
from core.pipeline.run.messages.boundary import flatten
from core.pipeline.schedule.actions import Action
from core.pipeline.schedule.lower import RankPlan

# A header is int64: kind of form, bytes of a description, dtype, number of dims, sizes ...; after it the batch's rows
HEADER_LENGTH = 4 + MAX_DIMS
# Kinds of form: any nesting (a pickled description follows); one tensor without, and with, a gradient
ANY_NESTING = 0
ONE_CONSTANT = 1
ONE_WITH_GRAD = 2

_TENSOR_NESTING = pytree.tree_flatten(0)[1]


@dataclass(frozen=True)
class Form:
    """What crosses a boundary, without its numbers; the same for all microbatches of a step.

    tensors: (shape, dtype, whether it wants a gradient) of each.
    """

    nesting: Any
    constants: tuple[Any, ...]  # per leaf: None for a tensor, (value,) for a constant
    tensors: tuple[tuple[tuple[int, ...], torch.dtype, bool], ...]

    @classmethod
    def of(cls, value: Any) -> tuple["Form", list[Tensor]]:
        """The form of any nesting of tensors and constants, and its tensors."""
        # the common case, without pytree
        if isinstance(value, Tensor):
            return cls(
                _TENSOR_NESTING, (None,), ((tuple(value.shape), value.dtype, value.requires_grad),)
            ), [value]
        leaves, nesting = flatten(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        constants = tuple(None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves)
        shapes = tuple(
            (tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in tensors
        )
        return cls(nesting, constants, shapes), tensors

    def fill(self, tensors: Iterable[Tensor]) -> Any:
        """The value again: its nesting and constants, with `tensors` where the sender had its own."""
        remaining = iter(tensors)
        if self.nesting is _TENSOR_NESTING:
            return next(remaining)
        leaves = []
        for constant in self.constants:
            if constant is None:  # a tensor
                leaves.append(next(remaining))
            else:
                leaves.append(constant[0])
        return pytree.tree_unflatten(leaves, self.nesting)

    def messages(self, direction: str) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of what is sent: the tensors (F), or the gradients that are wanted (B); never nothing."""
        messages = []
        for shape, dtype, wants_grad in self.tensors:
            if direction == "F" or wants_grad:
                messages.append((shape, dtype))
        return messages or [((1,), torch.uint8)]

    def __reduce__(self) -> tuple:
        # torch does not want its description of a nesting to be pickled: send the nesting itself, with placeholders
        leaves = []
        for constant in self.constants:
            if constant is None:
                leaves.append(_PLACEHOLDER)
            else:
                leaves.append(constant[0])
        return _form_from_skeleton, (pytree.tree_unflatten(leaves, self.nesting), self.tensors)

    def header(self) -> tuple[list[int], bytes]:
        """HEADER_LENGTH numbers that describe a single tensor; for anything else the second one is the length of
        the pickled description that is returned beside them."""
        if self.nesting == _TENSOR_NESTING and self.tensors:
            shape, dtype, wants_grad = self.tensors[0]
            if len(shape) <= MAX_DIMS and dtype in DTYPES:
                kind = ONE_WITH_GRAD if wants_grad else ONE_CONSTANT
                padding = [0] * (MAX_DIMS - len(shape))
                return [kind, 0, DTYPES.index(dtype), len(shape), *shape, *padding], b""
        description = pickle.dumps(self)
        return [ANY_NESTING, len(description), *[0] * (HEADER_LENGTH - 2)], description

    @classmethod
    def from_header(cls, numbers: list[int]) -> "Form":
        """The inverse of `header` for a single tensor."""
        kind, _, dtype_index, dims, *sizes = numbers
        shape = tuple(sizes[:dims])
        return cls(_TENSOR_NESTING, (None,), ((shape, DTYPES[dtype_index], kind == ONE_WITH_GRAD),))

    @property
    def values(self) -> list[Any]:
        """The constants between the tensors, in their order."""
        return [constant[0] for constant in self.constants if constant is not None]

    def __str__(self) -> str:
        return ", ".join(
            f"{list(shape)} of {str(dtype).removeprefix('torch.')}"
            for shape, dtype, _ in self.tensors
        )


class _Placeholder:
    """Stands for a tensor in a pickled nesting."""


_PLACEHOLDER = _Placeholder()


def _form_from_skeleton(skeleton: Any, tensors: tuple) -> Form:
    leaves, nesting = flatten(skeleton)
    constants = tuple(None if isinstance(leaf, _Placeholder) else (leaf,) for leaf in leaves)
    return Form(nesting, constants, tensors)


def _are_equal(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    try:
        return bool(first == second)
    except (RuntimeError, TypeError, ValueError):
        # arrays compare to arrays, not to a bool
        return pickle.dumps(first) == pickle.dumps(second)


def _check_form(action: Action, form: Form, earlier: Form) -> None:
    """Raise ValueError unless an output is like the first one of this step."""
    same_nesting = earlier.nesting is form.nesting or earlier.nesting == form.nesting
    if earlier.tensors != form.tensors or not same_nesting:
        if str(earlier) == str(form) and same_nesting:
            raise ValueError(
                f"stage {action.stage} returns a tensor that wants a gradient for microbatch {action.microbatch}, "
                "and wanted none before in this step; let it depend on trained parameters in every microbatch, or "
                "in none"
            )
        raise ValueError(
            f"stage {action.stage} returns {form} for microbatch {action.microbatch}, and returned {earlier} "
            "before in this step: within a step every microbatch must have the same shape (pad them); "
            "between steps shapes may change"
        )
    if form.nesting is not _TENSOR_NESTING and not _are_equal(earlier.constants, form.constants):
        raise ValueError(
            f"stage {action.stage} returns other values beside its tensors for microbatch "
            f"{action.microbatch} than before in this step ({form.values} and {earlier.values}): what changes "
            "between microbatches must be a tensor"
        )


@dataclass(eq=False)
class _Inbox:
    """Everything that one peer will send in this step, in its order."""

    peer: int
    group: Group
    expected: deque[Action]
    posted: dict[Action, list[Received]]
    header: Received | None = None  # under way, for the first of `expected`

    @property
    def source(self) -> int:
        """The peer's rank in the group of two."""
        return 1 - self.group.rank


class Channel:
    """The messages of one rank in one step.

    groups: (sender, receiver) -> group of two, where this rank is -1. prefetch_depth: how many receives are posted
    beyond the one that is needed. global_rank: of a pipeline rank, for error messages. rows: of this rank's batch;
    without one it takes the number that arrives for its own.
    """

    def __init__(
        self,
        plan: RankPlan,
        groups: Mapping[tuple[int, int], Group],
        global_rank: Callable[[int], int],
        device: torch.device,
        prefetch_depth: int,
        rows: int | None = None,
    ) -> None:
        self._rows = rows
        self._plan = plan
        self._groups = groups
        self._device = device
        self._global_rank = global_rank
        self._prefetch_depth = prefetch_depth
        # the form of outputs and gradients, by (F or B, receiving stage); known after the first message of a step
        self.forms: dict[tuple[str, int], Form] = {}
        # by every action that it will receive
        self._inboxes: dict[Action, _Inbox] = {}
        self._pending_sends: dict[Action, list[Sent]] = {}
        for peer, actions in plan.inbox.items():
            inbox = _Inbox(peer, groups[peer, -1], deque(actions), {})
            self._inboxes.update(dict.fromkeys(actions, inbox))
            self._post_ahead(inbox)

    def send(self, action: Action, value: Any) -> None:
        """Start sending an output (SEND_F), its form first at the first microbatch; or gradients (SEND_B).

        Raises ValueError: another form than this step's first microbatch had. Unanswered: the peer is gone.
        """
        # every pair of ranks has two groups, one per direction: gloo matches messages by their order in a group
        group = self._groups[-1, self._plan.outbox[action]]
        destination = 1 - group.rank
        tensors, header = value, []
        if action.kind == "SEND_F":
            form, tensors = Form.of(value)
            # what goes forward says what will come back: gradients have the forms of the outputs
            first_form = self.forms.setdefault(("B", action.stage), form)
            if first_form is form:
                header = self._header(form)
            else:
                _check_form(action, form, first_form)
        # never send nothing: a later receive from there proves that earlier sends have arrived
        if not tensors:
            tensors = [torch.zeros(1, dtype=torch.uint8, device=self._device)]
        try:
            works = [isend(message, destination, group.on_host, header=False) for message in header]
            works += [isend(tensor, destination, group, header=False) for tensor in tensors]
        except RuntimeError as error:
            peer = self._global_rank(self._plan.outbox[action])
            raise Unanswered(
                f"sending {action} to rank {peer}, which closed its connection or is gone: "
                f"{str(error).splitlines()[0]}",
                (peer,),
            ) from error
        self._pending_sends[action] = works

    def _header(self, form: Form) -> list[torch.Tensor]:
        numbers, description = form.header()
        # -1: this rank was given no batch
        rows = -1 if self._rows is None else self._rows
        messages = [torch.tensor([*numbers, rows])]
        if description:
            messages.append(torch.frombuffer(bytearray(description), dtype=torch.uint8))
        return messages

    def take(self, action: Action) -> Any:
        """Wait for a message: an output of the previous stage (RECV_F), or the gradients that it wants (RECV_B).

        Posts every receive up to it, in the sender's order, then prefetches `prefetch_depth` more.
        Raises Unanswered: the message did not come within the timeout of the group.
        """
        inbox = self._inboxes[action]
        try:
            while action not in inbox.posted:
                self._post(inbox)
            tensors = [received.wait() for received in inbox.posted.pop(action)]
        except RuntimeError as error:
            peer = self._global_rank(inbox.peer)
            raise Unanswered(
                f"waiting for {action} from rank {peer}, which did not send it within "
                f"{inbox.group.timeout.total_seconds():g} s or is gone: {str(error).splitlines()[0]}",
                (peer,),
            ) from error
        self._post_ahead(inbox)
        # the peer computed this message from earlier ones of ours: those have arrived, and can be freed
        for send in self._plan.receipts.get(action, ()):
            self._wait_sent(send, arrived=True)

        form = self.forms[action.kind[-1], action.stage]
        if action.kind == "RECV_B":
            any_wanted = any(wants_grad for _, _, wants_grad in form.tensors)
            if any_wanted:
                return tensors
            return []
        # the stage cuts its graph at tensors that require grad
        for tensor, (_, _, wants_grad) in zip(tensors, form.tensors, strict=False):
            tensor.requires_grad_(wants_grad)
        return form.fill(tensors)

    def _post(self, inbox: _Inbox) -> None:
        """Post the next receive of a peer; waits for the header of a boundary where that is not known yet."""
        action = inbox.expected[0]
        direction = action.kind[-1]
        boundary = (direction, action.stage)
        if boundary not in self.forms:
            assert direction == "F", "a gradient comes after the output that it belongs to was sent"
            self._receive_form(inbox, boundary)
        messages = self.forms[boundary].messages(direction)
        inbox.posted[inbox.expected.popleft()] = [
            irecv(shape, dtype, inbox.source, inbox.group, device=self._device, header=False)
            for shape, dtype in messages
        ]

    def _receive_form(self, inbox: _Inbox, boundary: tuple[str, int]) -> None:
        self._expect_header(inbox)
        assert inbox.header is not None
        *numbers, rows = inbox.header.wait().tolist()
        inbox.header = None
        self._compare_rows(rows, inbox.peer)
        kind, length = numbers[:2]
        if kind != ANY_NESTING:
            self.forms[boundary] = Form.from_header(numbers)
            return
        # any other nesting: its pickled description follows the header
        message = irecv((length,), torch.uint8, inbox.source, inbox.group.on_host, header=False)
        self.forms[boundary] = pickle.loads(message.wait().numpy().tobytes())

    def _compare_rows(self, sender_rows: int, peer: int) -> None:
        """Raise ValueError unless the batches have as many rows: microbatches would not belong together."""
        if sender_rows < 0:  # the sender was given no batch
            return
        if self._rows not in (None, sender_rows):
            raise ValueError(
                f"the batch of this rank has {self._rows} rows, that of rank {self._global_rank(peer)} (or one "
                f"before) has {sender_rows}: give every pipeline rank the same batch, or None where its stages take "
                "nothing from it"
            )
        self._rows = sender_rows

    def _expect_header(self, inbox: _Inbox) -> None:
        if inbox.header is None:
            shape = (HEADER_LENGTH + 1,)
            inbox.header = irecv(
                shape, torch.int64, inbox.source, inbox.group.on_host, header=False
            )

    def _post_ahead(self, inbox: _Inbox) -> None:
        """Prefetch: post receives until `prefetch_depth` are under way, as far as their shapes are known."""
        while inbox.expected and len(inbox.posted) < self._prefetch_depth:
            action = inbox.expected[0]
            if (action.kind[-1], action.stage) not in self.forms:
                if action.kind == "RECV_F":
                    self._expect_header(inbox)
                # waiting for the header here could deadlock: the peer may wait for us first
                return
            self._post(inbox)

    def _wait_sent(self, action: Action, *, arrived: bool = False) -> None:
        for sent in self._pending_sends.pop(action, ()):
            sent.wait(arrived=arrived)

    def drop(self) -> None:
        """After a failure: forget all messages, so that gloo can close the connections."""
        self._pending_sends.clear()
        for inbox in self._inboxes.values():
            inbox.posted.clear()
            inbox.header = None

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        for action in list(self._pending_sends):
            self._wait_sent(action)
