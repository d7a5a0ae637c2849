"""The one tensorstore context of this process: with it go thread pools, caches and the store behind "memory://".

Never one per reader: made and dropped by the thousand, contexts have corrupted the heap (docs/decisions/047).
"""

import os

import tensorstore as ts

# the name by which a specification asks for files that need not be durable
UNSYNCED = "file_io_sync#off"
CONTEXT = ts.Context(
    {
        "file_io_concurrency": {"limit": 32},  # an fsync waits, it does not compute
        "data_copy_concurrency": {"limit": min(4, os.cpu_count() or 1)},
        "file_io_locking": {
            "mode": "none"
        },  # a cell has one writer, and some network file systems have no locks
        "file_io_sync": True,
        UNSYNCED: False,
        "cache_pool": {"total_bytes_limit": 0},  # every byte is used once
    }
)
