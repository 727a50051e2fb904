"""Time the check sums that could verify prepared cases, on as many bytes as a case of full size has.

    python benchmarks/verify.py --megabytes 54

`scale.py` times the verification at the beginning of a run as a whole.
"""

import hashlib
import statistics
import zlib
from collections.abc import Callable
from functools import partial
from random import Random

import deflate
from comparison import Comparison, append_json, options_of, ratios_of, seconds_in_turn, table_of
from machine import version_of

CHECK_SUMS: dict[str, Callable[[bytes], object]] = {
    "crc32 of zlib": zlib.crc32,
    "BLAKE2b": lambda content: hashlib.blake2b(content).digest(),
    "SHA-256": lambda content: hashlib.sha256(content).digest(),
}


def main() -> None:
    """Print the comparison of the check sums."""
    arguments = options_of(__doc__, megabytes=54, rounds=5)
    content = Random(0).randbytes(arguments.megabytes * 1_000_000)
    ways = {"ours": deflate.crc32, **CHECK_SUMS}
    seconds = seconds_in_turn(
        {name: partial(way, content) for name, way in ways.items()}, arguments.rounds
    )
    milliseconds = {name: f"{1e3 * statistics.median(seconds[name]):.1f} ms" for name in ways}
    found = [
        Comparison(
            task=f"check sum of a prepared case, {arguments.megabytes} MB",
            ours=f"{milliseconds['ours']}, crc32 of deflate {version_of('deflate')}",
            peer=name,
            theirs=milliseconds[name],
            ratios=ratios_of(seconds[name], seconds["ours"]),
        )
        for name in CHECK_SUMS
    ]
    print(table_of(found))
    append_json(found, arguments.json)


if __name__ == "__main__":
    main()
