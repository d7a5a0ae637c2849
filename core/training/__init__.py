"""The loop, its configuration, metrics and report.

Names are loaded at first use: a configuration is read, and refused, without the code that trains.
"""

from typing import TYPE_CHECKING

from core.lazy_exports import lazy_exports
from core.training.their_names import answers_their_names

if TYPE_CHECKING:
    from core.training.config import CheckpointConfig as CheckpointConfig
    from core.training.config import DataConfig as DataConfig
    from core.training.config import DataParallelConfig as DataParallelConfig
    from core.training.config import Loaded as Loaded
    from core.training.config import LoraConfig as LoraConfig
    from core.training.config import ModelConfig as ModelConfig
    from core.training.config import PipelineConfig as PipelineConfig
    from core.training.config import RunConfig as RunConfig
    from core.training.config import TrainingConfig as TrainingConfig
    from core.training.config import load_run as load_run
    from core.training.config import same_on_all_ranks as same_on_all_ranks
    from core.training.config.rules import check_run as check_run
    from core.training.run.engine.initialize import Initialized as Initialized
    from core.training.run.engine.initialize import initialize as initialize
    from core.training.run.evaluate import evaluate_bits_per_byte as evaluate_bits_per_byte
    from core.training.run.evaluate import next_token_loss as next_token_loss
    from core.training.run.loop import train as train
else:
    _load, __dir__ = lazy_exports(__name__)
    __getattr__ = answers_their_names(_load)
