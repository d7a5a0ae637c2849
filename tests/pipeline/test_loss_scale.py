"""The scale of float16 on ranks of a pipeline that have no loss."""

import torch

from core.autograd import NullGradSync
from core.optimizer.step.loss_scale import LossScale
from core.pipeline.run.microbatch import StepContext


def test_a_rank_of_a_pipeline_without_a_loss_is_not_told_that_nothing_was_scaled():
    scale = LossScale(8.0, 4, torch.device("cpu"))
    step = StepContext(0, 0, [], None, NullGradSync(), loss_scale=scale.read())
    assert scale.multiplied and float(step.loss_scale) == float(scale.divisor()) == 8.0
