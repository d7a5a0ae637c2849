"""One step over one or many stages; loaded at first use, so that pure schedules need no torch."""

from typing import TYPE_CHECKING

from core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from core.pipeline.run.backward import stage_backward as stage_backward
    from core.pipeline.run.backward import stage_backward_input as stage_backward_input
    from core.pipeline.run.backward import stage_backward_weight as stage_backward_weight
    from core.pipeline.run.megatron import get_forward_backward_func as get_forward_backward_func
    from core.pipeline.run.messages.failure import PipelineError as PipelineError
    from core.pipeline.run.pipeline import Pipeline as Pipeline
    from core.pipeline.run.single_stage import SingleStage as SingleStage
    from core.pipeline.run.step import LossFn as LossFn
    from core.pipeline.run.step import StepResult as StepResult
    from core.pipeline.run.step import call_stage as call_stage
    from core.pipeline.run.step import split_microbatches as split_microbatches
    from core.pipeline.schedule import schedules as schedules
    from core.pipeline.schedule.actions import Action as Action
    from core.pipeline.schedule.actions import Schedule as Schedule
    from core.pipeline.schedule.actions import looped as looped
    from core.pipeline.schedule.actions import v_shape as v_shape
    from core.pipeline.schedule.player import Costs as Costs
    from core.pipeline.schedule.player import play as play
    from core.pipeline.schedule.timeline import Timeline as Timeline
else:
    __getattr__, __dir__ = lazy_exports(__name__)
