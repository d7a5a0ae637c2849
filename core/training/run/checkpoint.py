"""Saving and resuming a training run: what its state is, when it is saved, and what SIGTERM does."""

import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Any, SupportsFloat

from core.dist_checkpointing.manager import CheckpointManager
from core.dist_checkpointing.planning.ranks import from_first
from core.dist_checkpointing.reading.loading import load
from core.dist_checkpointing.reading.stored import StoredCheckpoint
from core.dist_checkpointing.writing.saving import layout_of_ranks
from core.optimizer import ShardedOptimizer
from core.parallel_state import ParallelState
from core.parallel_state.modules import modules_of
from core.pipeline.run.ranges import named
from core.training.config import CheckpointConfig, DataConfig, TrainingConfig
from core.training.log.earlier import RunName, new_name
from core.training.preferences.reference import References
from core.training.resume.adapters import model_state, refuse_other_adapters
from core.training.resume.batch_plan import BatchPlan
from core.training.resume.other_model import refuse_other_model
from core.training.resume.other_optimizer import (
    begin_states,
    fitted_average,
    other_optimizer,
    other_states,
)
from core.training.resume.same_run import (
    changes_of_order,
    changes_of_rate,
    changes_of_update,
    compare_models,
    order_of,
)
from core.training.run.export import ExportAtEnd
from core.training.run.stop import StopFlag

_END_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Checkpoints(AbstractContextManager):
    """The checkpoints of one run; every method is collective.

    `resume()` before the loop, `after_step` as its hook, the context around it. SIGTERM and Ctrl-C then end the run
    after the step under way (on an accelerator one later: `StopFlag`), with a checkpoint, on all ranks at the same
    step; `stopped` is True from then on.
    name: tells the records of this run from those of others; after `resume` that of the run that is gone on with.
    order: what else the order of the data and its vocabulary depend on; a checkpoint with another one is refused.
    began_as: where the first weights are from, for every manifest; a resumed run keeps what its checkpoint says.
    run: what else every manifest says of the run (`facts_of_run`). references: what its preferences are relative to.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        optimizer: ShardedOptimizer,
        ps: ParallelState,
        data: DataConfig,
        training: TrainingConfig,
        say: Callable[[str], None] = print,
        order: Mapping[str, Any] | None = None,
        began_as: Mapping[str, str] | None = None,
        run: Mapping[str, Any] | None = None,
        references: References | None = None,
    ) -> None:
        self.config = config
        self._references = references
        self.optimizer = optimizer
        self.ps = ps
        self.say = say
        self._order = order_of(data, training, order)
        self.plan = BatchPlan(global_batch_size=training.global_batch_size, ramp=training.ramp)
        self._model: Mapping[str, Any] | None = dict(run or {}).get("model")
        self._lora: Mapping[str, Any] | None = dict(run or {}).get("lora")
        self._settings: Mapping[str, Any] = dict(run or {}).get("settings", {})
        self._terminated = False
        self.stopped = False
        self._stop_flag = StopFlag(ps)
        self._saved_step: int | None = None
        self._previous_save_failed = False
        self._average_begins = False
        self._previous_handlers: dict[int, Any] = {}  # of signals
        folder = config.export_huggingface
        if folder is None:
            self._export = None
        else:
            self._export = ExportAtEnd(folder, run or {}, ps, say)
        # told to all ranks: each writes a share of a save
        self.name = RunName(from_first(new_name, ps))
        self.manager: CheckpointManager | None = None
        if config.directory is not None:
            self.manager = CheckpointManager(
                config.directory,
                keep_last=config.keep_last,
                keep_every=config.keep_every,
                keep_hours=config.keep_hours,
                keep_best=config.keep_best,
                keep_best_count=config.keep_best_count,
                keep_best_mode=config.keep_best_mode,
                stale_s=config.stale_seconds,
                share_reads=config.share_reads,
                run=({"began_as": dict(began_as)} if began_as else {})
                | dict(run or {})
                | {"name": self.name.name},
                ps=ps,
            )

    def state(self, step: int) -> dict[str, Any]:
        """Everything that the steps after `step` updates depend on."""
        # a template of another step has the same arrays
        step = max(step, self.plan.start_step)
        state: dict[str, Any] = {}
        if self._references is not None:
            state["reference"] = self._references.state()
        return state | {
            "model": model_state(self.optimizer.shard, self._lora),
            "optimizer": self.optimizer.sharded_state_dict(),
            "training": {"step": step, "samples": self.plan.first_row(step), "order": self._order},
        }

    def resume(self) -> int:
        """Load what the configuration says; the number of updates already made, 0 for a fresh run.

        Raises FileNotFoundError: `resume=must` and nothing to resume. ValueError: another model, another order of the
        data, or a directory with later steps of another run.
        """
        if self.config.load is not None:
            return self._refuse_newer_steps(self.restore(self.config.load))
        if self.manager is None or self.config.resume == "never":
            return self._refuse_newer_steps(0)
        newest = from_first(self._newest, self.ps)
        if newest is not None:
            template = self._template(newest)
        else:
            template = self.state(0)
        try:
            step, state = self.manager.load_latest(template)
        except FileNotFoundError:
            stages = modules_of(self.optimizer.shard.module).values()
            if self.config.resume == "must" or any(
                getattr(stage, "awaits_checkpoint", False) for stage in stages
            ):
                # in the latter case there was a step when the model was built, and no weights were drawn
                raise
            return 0
        self._saved_step = step
        return self._take_over(self.manager.url(step), state)

    def _newest(self) -> str | None:
        """Where the newest step lies; None: there is none, or none that can be found."""
        assert self.manager is not None
        steps = self.manager.steps()
        try:
            if steps:
                return self.manager.url(steps[-1])
            return None
        except (OSError, ValueError):
            # told by the load that follows, which tries the one before
            return None

    def restore(self, url: str) -> int:
        """Load one checkpoint, of any layout; the number of updates already made. Raises ValueError: as `resume`."""
        state = load(self._template(url), url, ps=self.ps, share_reads=self.config.share_reads)
        return self._take_over(url, state)

    def _template(self, url: str) -> dict[str, Any]:
        """What is loaded of a checkpoint: all of `state`, or without the states of an optimizer that may change.

        Collective. Raises ValueError: it was another optimizer, and nobody said that it changes.
        """
        compare_models(url, self._model, self.config.change, self.say)
        refuse_other_adapters(url, self._lora)
        if self._references is not None:
            self._references.refuse_other(url)
        template = self.state(0)
        # a GPT's facts were compared
        if self._model is None and self._lora is None:
            refuse_other_model(template["model"], url, self.ps)
        template["optimizer"], self._average_begins = fitted_average(
            template["optimizer"], url, self.ps
        )
        difference = other_optimizer(template["optimizer"], url, self.ps)
        if difference is None:
            return template
        if "optimizer" not in self.config.change:
            raise ValueError(other_states(url, difference))
        self.say(f"new optimizer states: {difference}")
        return {name: part for name, part in template.items() if name != "optimizer"}

    def _refuse_newer_steps(self, start: int) -> int:
        """`start`, if no other run's checkpoints are newer: retention would keep those and drop this run's."""
        if self.manager is None:
            return start
        steps = from_first(self.manager.steps, self.ps)
        if steps and steps[-1] > start:
            raise ValueError(
                f"{self.config.directory} has step {steps[-1]}, this run begins at {start}: its checkpoints would be "
                "the oldest and go first; give another directory, or checkpoint.resume=auto without load"
            )
        return start

    def _take_over(self, url: str, state: Mapping[str, Any]) -> int:
        """Check a loaded state, give it to the optimizer, and say from where the run goes on; its step."""
        saved = state["training"]
        start_row = self._start_row(url, saved)
        step = int(saved["step"])
        self.plan = replace(self.plan, start_step=step, start_row=start_row)
        if "optimizer" in state:
            self.optimizer.load_state_dict(state["optimizer"])
            if self._average_begins:
                self.optimizer.begin_average()
                self.say(f"the average of the weights begins here: {url} has none")
        else:
            begin_states(self.optimizer, step)
        stored_run = StoredCheckpoint.open(url).run
        # adapters alone keep what this run noted: it has read the weights beside them from there
        if self.manager is not None and (self._lora is None or self._lora["save_base"]):
            self.manager.note({"began_as": stored_run.get("began_as", {})})
        self._take_name(stored_run.get("name"))
        # only told: a checkpoint opens under any layout
        saved_layout = _describe_layout(stored_run.get("layout", {}))
        layout = _describe_layout(layout_of_ranks(self.ps))
        self.say(
            f"resumed from {url}: step {step}, next sample {start_row}, optimizer "
            f"{self.optimizer.step_count} updates ({self.optimizer.skipped_steps} skipped)\n"
            f"layout before: {saved_layout}\nlayout now:    {layout}"
        )
        settings = stored_run.get("settings", {})
        if changed := changes_of_rate(settings, self._settings):
            self.say(f"the learning rate is laid out anew: {', '.join(changed)}")
        if changed := changes_of_update(settings, self._settings):
            self.say(f"the updates are others from here on: {', '.join(changed)}")
        return step

    def _take_name(self, before: Any) -> None:
        """The name of the run that is gone on with; one out of another directory goes on as a run of its own."""
        load = (self.config.load or "").rstrip("/").rpartition("/")[0]
        branches = self.config.load is not None and load != str(self.config.directory).rstrip("/")
        is_new = branches or before is None
        self.name = RunName(self.name.name if is_new else str(before), before, branches)
        if self.manager is not None:
            self.manager.note({"name": self.name.name})

    def _start_row(self, url: str, saved: Mapping[str, Any]) -> int:
        """The row that the next batch begins with. Raises ValueError: another order of the data, unsaid."""
        changed = changes_of_order(url, saved["order"], self._order, self.config.change)
        for change, texts in changed.items():
            self.say(f"changed, as checkpoint.change says: {change}, which was {', '.join(texts)}")
        if "data" in changed:
            return 0
        return int(saved["samples"])

    def __enter__(self) -> "Checkpoints":
        if self.manager is not None:
            try:
                self.manager.prepare(self.state(0))
            except BaseException:
                # releases the directory's lock
                self.manager.close()
                raise
            # Python allows handlers of signals in the main thread only
            if threading.current_thread() is threading.main_thread():
                for number in _END_SIGNALS:
                    self._previous_handlers[number] = signal.signal(number, self._terminate)
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Wait for saves under way, give the directory and the signals back. A second call does nothing."""
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers = {}
        if self.manager is not None:
            self.manager.close()

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._terminated:
            # a second Ctrl-C: do not wait for the step
            raise KeyboardInterrupt
        # only noted: saving inside a handler would run in the middle of a collective
        self._terminated = True

    def before_update(self) -> None:
        """Wait until an asynchronous save has read the parameters (on an accelerator it copies beside the step)."""
        if self.manager is not None:
            self.manager.before_update()

    def after_step(
        self, step: int, *, last: bool, metrics: Mapping[str, SupportsFloat] | None = None
    ) -> bool:
        """After update number `step`: save if it is time; True if the run is to end here (SIGTERM, on any rank).

        After the last one the model is exported, where the configuration says so.

        metrics: for the manifest, and `keep_best`. Raises RuntimeError: a save failed, as `on_failure` says.
        """
        if self.manager is not None:
            self._save_if_due(step, last, metrics)
        if last and not self.stopped:
            self.export()
        return self.stopped

    def export(self) -> None:
        """Write the model for `transformers`, if the configuration says where. Collective."""
        if self._export is not None:
            self.before_update()
            with named("export"):
                self._export(self.optimizer.shard)

    def _save_if_due(
        self, step: int, last: bool, metrics: Mapping[str, SupportsFloat] | None
    ) -> None:
        """Save if it is time; `stopped` from then on where a rank was asked to end."""
        # the scheduler may signal one rank only
        stop = self.stopped = self._stop_flag.look(self._terminated)
        every = self.config.every
        # the last step and a terminated one are saved at once: there is no next step to save beside
        is_due = last or stop or (every > 0 and step % every == 0)
        if is_due and step != self._saved_step:
            if self.config.asynchronous and not (last or stop):
                save = self._save_asynchronously
            else:
                save = self._save_at_once
            with named("save"):
                save(step, metrics)
            self._saved_step = step
        # every rank ends after the same step, so that nobody waits in the next one's collectives
        if stop:
            self.say(
                f"terminated: saved step {step} in {self.config.directory}; the same command goes on from there"
            )

    def _save_asynchronously(self, step: int, metrics: Mapping[str, SupportsFloat] | None) -> None:
        """Start a save beside training.

        A failure of the previous save surfaces here, on all ranks. Depending on `on_failure` this save makes up for
        it, once.
        """
        assert self.manager is not None
        try:
            self.manager.save_async(step, self.state(step), metrics)
            self._previous_save_failed = False
            return
        except RuntimeError as error:
            failed_twice = self.config.on_failure == "retry" and self._previous_save_failed
            if self.config.on_failure == "raise" or failed_twice:
                raise
            self._previous_save_failed = True
            self.say(f"warning: {error}; saving step {step}")
        try:
            self.manager.save_async(step, self.state(step), metrics)
        except RuntimeError as error:
            # this save's own: the previous one's was reported above
            if self.config.on_failure != "warn":
                raise
            self.say(f"warning: {error}; step {step} is not saved")

    def _save_at_once(self, step: int, metrics: Mapping[str, SupportsFloat] | None) -> None:
        """The last chance: a failure of the previous save is reported, and is no reason to lose this one."""
        assert self.manager is not None
        try:
            self.manager.save(step, self.state(step), metrics)
        except RuntimeError as error:
            self.say(f"warning: {error}; saving again")
            self.manager.save(step, self.state(step), metrics)


def _describe_layout(layout: Mapping[str, Any]) -> str:
    return " ".join(f"{axis}={layout[axis]}" for axis in sorted(layout))
