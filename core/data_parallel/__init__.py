"""One gradient over many replicas: flat buckets divided over the ranks (ZeRO), and the plain twin that sums each."""

from core.data_parallel.buffers.buffers import Buffer, Segment
from core.data_parallel.data_parallel import DataParallel
from core.data_parallel.ddp import DistributedDataParallel
from core.data_parallel.per_parameter import PerParameterGradSync
from core.data_parallel.replicas import check_replicas

__all__ = ["Buffer", "DataParallel", "DistributedDataParallel", "PerParameterGradSync", "Segment", "check_replicas"]
