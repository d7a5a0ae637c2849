"""One gradient over many replicas: flat buckets divided over the ranks (ZeRO)."""

from core.data_parallel.buffers.buffers import Buffer, Segment
from core.data_parallel.data_parallel import DataParallel
from core.data_parallel.ddp import DistributedDataParallel
from core.data_parallel.replicas import check_replicas

__all__ = ["Buffer", "DataParallel", "DistributedDataParallel", "Segment", "check_replicas"]
