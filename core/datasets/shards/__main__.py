"""Write the list of shards: python -m core.datasets.shards data/part-*.idx --output data/corpus.shards.json"""

import argparse
import sys
from collections.abc import Sequence

from core.datasets.shards.manifest import SUFFIX, ShardManifest


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 1 where a shard cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m core.datasets.shards", description=__doc__)
    parser.add_argument(
        "shards", nargs="+", help="prefixes of token files, or their .idx, in the order of reading"
    )
    parser.add_argument("--output", required=True, help=f"the list, whose name ends with {SUFFIX}")
    options = parser.parse_args(arguments)
    if not options.output.endswith(SUFFIX):
        parser.error(f"--output {options.output} must end with {SUFFIX}, by which a run knows it")
    try:
        manifest = ShardManifest.of(
            [name.removesuffix(".idx").removesuffix(".bin") for name in options.shards]
        )
        manifest.write(options.output)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.output}: {len(manifest.shards)} shards, {manifest.num_tokens:,} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
