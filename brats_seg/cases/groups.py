"""Things that belong together because they share an id or a hash."""

from collections.abc import Hashable, Iterable, Sequence


def first_of_group(keys: Sequence[Iterable[Hashable]]) -> tuple[int, ...]:
    """Return for each item the index of the first item of its group.

    Args:
        keys: The keys of each item. Items are in one group when they share a key, or when a chain
            of such items joins them.
    """
    first = list(range(len(keys)))
    seen: dict[Hashable, int] = {}
    for item, own_keys in enumerate(keys):
        for key in own_keys:
            one, other = _root(first, seen.setdefault(key, item)), _root(first, item)
            first[max(one, other)] = min(one, other)
    return tuple(_root(first, item) for item in range(len(keys)))


def _root(first: list[int], item: int) -> int:
    while first[item] != item:
        item = first[item]
    return item
