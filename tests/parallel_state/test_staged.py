"""The staged path (accelerator -> host memory -> gloo -> accelerator), with the CPU in the accelerator's place: the
same values, on every collective and in whole steps."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from core.parallel_state import ParallelState, environment
from core.parallel_state.collectives import groups as pg
from core.parallel_state.collectives import irecv, isend
from core.parallel_state.collectives.groups import Group
from tests.parallel_state.test_collectives import equal_definitions, uneven_all_to_all
from tests.parity import pipelines, test_sharded_steps
from tests.parity.test_sharded_steps import result
from tests.pipeline import tiny
from tests.states import state


@contextmanager
def staged(ps):
    """All messages of `ps` are staged, also those of links made inside."""
    plain = Group.__post_init__

    def stage_everything(group):
        plain(group)
        group.staged = frozenset({"cpu"})

    groups = [group for group in (*ps.groups.values(), *ps._links.values(), ps.world) if group is not None]
    Group.__post_init__ = stage_everything
    try:
        for group in groups:
            group.staged = frozenset({"cpu"})
        yield
        assert any(group._on_host is not None for group in (*groups, *ps._links.values())), "nothing was staged"
    finally:
        Group.__post_init__ = plain
        for group in (*groups, *ps._links.values()):
            group.staged = frozenset()


def staged_definitions():
    world = dist.get_world_size()
    with staged(state(tp=world)):
        answers = equal_definitions()
        rows = uneven_all_to_all() if world == 2 else None
    return answers, rows


@pytest.mark.parametrize("world", [2, 3])
def test_staged_collectives_equal_their_definitions(ranks, world):
    answers = ranks(staged_definitions, world=world)
    assert [found for found, _ in answers] == [[{"rank": r} for r in range(world)]] * world
    if world == 2:
        assert [rows for _, rows in answers] == [[[0, 1], [100, 101], [102, 103]], [[2, 3], [4, 5], [104, 105]]]


def messages():
    ps = state(tp=2)
    group, rank = ps.group("tp"), dist.get_rank()
    x = torch.arange(12.0).view(3, 4).t()
    with staged(ps):
        sent = isend(x, 1 - rank, group)
        received = irecv((4, 3), x.dtype, 1 - rank, group).wait()
        sent.wait()
        assert torch.equal(received, x)
        sent = isend(x, 1 - rank, group)
        with pytest.raises(ValueError, match=r"sends shape \(4, 3\).*expects \(4, 2\)"):
            irecv((4, 2), x.dtype, 1 - rank, group)
        irecv((4, 3), x.dtype, 1 - rank, group, header=False).wait()
        sent.wait()


def test_staged_messages_are_checked_like_others(ranks):
    ranks(messages)


def steps(zero, tp, is_staged):
    ps = state(tp=tp)
    if not is_staged:
        return result(zero, torch.float32, tp)
    with staged(ps):
        return result(zero, torch.float32, tp)


@pytest.mark.parametrize(("zero", "tp"), [(3, 1), (1, 2)])
def test_staged_steps_have_the_same_bits(ranks, zero, tp):
    """Tensor parallelism, and ZeRO-3: gathers, sums and the norm."""
    world = 2 * tp
    plain = ranks(steps, zero, tp, False, world=world)
    for (norms, found), (want_norms, want) in zip(ranks(steps, zero, tp, True, world=world), plain, strict=True):
        assert norms == want_norms
        assert all(torch.equal(found[name], want[name]) for name in want)


def one_step(ps):
    stages, sync = pipelines.build((0, 1), ps, num_layers=2)
    pipe = pipelines.Pipeline(stages, ps=ps, schedule="1f1b", num_microbatches=4, grad_sync=sync)
    loss = pipe.step(pipelines.batch(4), pipelines.next_token_loss).loss.item()
    pipe.close()
    return loss, pipelines.gradients_of(pipe.modules.values())


def pipeline(is_staged):
    # links of its own: those of earlier tests are not staged
    ps = ParallelState.build(pipelines.state(pp=2).config, device="cpu")

    try:
        if not is_staged:
            return one_step(ps)
        with staged(ps):
            return one_step(ps)
    finally:
        ps.destroy()


def test_a_staged_pipeline_has_the_same_bits(ranks):
    plain = ranks(pipeline, False)
    for (loss, found), (want_loss, want) in zip(ranks(pipeline, True), plain, strict=True):
        assert loss == want_loss
        assert all(torch.equal(found[name], want[name]) for name in want)


@contextmanager
def another_backend():
    """gloo under another name: everything takes the path of backends that nothing is composed on, such as NCCL."""
    plain, pg.backends = pg.backends, lambda group=None: {"cpu": "another"}
    try:
        yield
    finally:
        pg.backends = plain


def on_another_backend(zero, tp):
    with another_backend():
        ps = ParallelState.build(state(tp=tp).config, device="cpu")
    assert not any(group.gloo for group in (ps.world, *ps.groups.values()))
    test_sharded_steps.state = lambda tp=1: ps
    try:
        return result(zero, torch.float32, tp)
    finally:
        test_sharded_steps.state = state
        ps.destroy()


@pytest.mark.parametrize(("zero", "tp"), [(0, 1), (1, 2), (2, 1), (3, 1)])
def test_steps_on_a_backend_where_nothing_is_composed_have_the_same_bits(ranks, zero, tp):
    """Two replicas: sums of two do not depend on the order."""
    plain = ranks(steps, zero, tp, False, world=2 * tp)
    for (norms, found), (want_norms, want) in zip(
        ranks(on_another_backend, zero, tp, world=2 * tp), plain, strict=True
    ):
        assert norms == want_norms
        assert all(torch.equal(found[name], want[name]) for name in want)


def pipeline_on_another_backend():
    with another_backend():
        ps = ParallelState.build(pipelines.state(pp=2).config, device="cpu")
        try:
            found = one_step(ps)
            links = list(ps._links.values())
            assert links and all(link.on_host.process_group is not link.process_group for link in links)
            sent = 2 if ps.rank == 0 else 0  # a greeting and a form, from the first stage to the second
            assert ps._links[0, 1].on_host.traffic.calls == sent
            return found
        finally:
            ps.destroy()


def test_forms_travel_from_host_to_host_beside_another_backend(ranks):
    """A link has a gloo group beside its own: reading shapes never waits for an accelerator."""
    plain = ranks(pipeline, False)
    for (loss, found), (want_loss, want) in zip(ranks(pipeline_on_another_backend), plain, strict=True):
        assert loss == want_loss
        assert all(torch.equal(found[name], want[name]) for name in want)


def test_processes_share_a_device_on_request_only(monkeypatch):
    """Two ranks of torchrun on a machine with one accelerator."""
    taken = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "set_device_index", taken.append)
    assert environment.local_device("cuda", shared=True) == torch.device("cuda", 0) and taken == [0]
    with pytest.raises(ValueError, match=r"wants device 1 .* this machine has 1.*--parallel.backend gloo"):
        environment.local_device("cuda")


def test_a_backend_that_torch_lacks_is_named(monkeypatch):
    monkeypatch.setattr(pg, "available_backends", lambda: ["gloo"])
    environment.check_backend("cpu:gloo")
    environment.check_backend("somebodys_own")
    for backend in ("nccl", "cpu:gloo,cuda:nccl"):
        with pytest.raises(ValueError, match=r"built without nccl; it has gloo"):
            environment.check_backend(backend)


class FakeWork:
    def __init__(self):
        self.given = []

    def wait(self, *timeout):
        self.given.append(timeout)


def waited_with(gloo):
    """What `wait` of a message is given, where `gloo` carries the CPU's or where another backend does."""
    from core.parallel_state.collectives.p2p import Received

    group = state(tp=2).group("tp")
    before, group.gloo = group.gloo, frozenset({"cpu"} if gloo else ())
    try:
        work = FakeWork()
        Received(torch.zeros(1), work, group).wait()
        return len(work.given[0])
    finally:
        group.gloo = before


def test_only_gloo_is_given_a_time_to_wait(ranks):
    """ProcessGroupNCCL with a time blocks the host until the message is here."""
    assert ranks(waited_with, True) == [1, 1]
    assert ranks(waited_with, False) == [0, 0]


def left(backend):
    """What `abandon` calls on each group, worlds last."""
    ps, calls = ParallelState.build(tiny.pipeline_state().config, device="cpu"), []
    plain = pg.backends, pg.c10d._abort_process_group, dist.destroy_process_group, pg.destroy_world
    pg.backends = lambda group=None: {"cpu": backend}
    pg.c10d._abort_process_group = lambda group=None: calls.append("abort")
    dist.destroy_process_group = lambda group=None: calls.append("destroy")
    pg.destroy_world = lambda: calls.append("end")
    group = ps.group("pp")
    try:
        pg.abandon_group(group.process_group)
        pg.abandon_world()
    finally:
        pg.backends, pg.c10d._abort_process_group, dist.destroy_process_group, pg.destroy_world = plain
    ps.destroy()
    return calls


def test_groups_that_can_abort_do_not_wait_for_their_kernels(ranks):
    assert ranks(left, "nccl") == [["abort", "abort", "end"]] * 2
    assert ranks(left, "gloo") == [["destroy", "end"]] * 2
