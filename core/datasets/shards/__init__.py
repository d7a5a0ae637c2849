"""A corpus in shards of which a machine holds a few at a time."""

from typing import TYPE_CHECKING

from core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from core.datasets.shards.local import CommandFetch as CommandFetch
    from core.datasets.shards.local import LocalShards as LocalShards
    from core.datasets.shards.manifest import ShardManifest as ShardManifest
    from core.datasets.shards.streamed import StreamedBatches as StreamedBatches
else:
    __getattr__, __dir__ = lazy_exports(__name__)
