"""What the fork server of the pool imports of `core`: once, not once per rank. Nothing here starts a thread."""

import core.data_parallel
import core.models.gpt.gpt_model
import core.optimizer.sharded
import core.pipeline.run.pipeline
import core.training.run.loop  # noqa: F401
