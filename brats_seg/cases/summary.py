"""An index in a few lines for the screen."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from brats_seg.cases.case import Case, CaseIndex

Item = TypeVar("Item")


def summarise(index: CaseIndex) -> tuple[str, ...]:
    """Say what an index holds, release by release, and in one line each what is wrong."""
    return (
        f"{_count(len(index.cases), 'case')}, {len(index.usable)} usable, "
        f"{len(index.trainable)} of these with a label map",
        *_release_lines(index.cases),
        *_problem_lines(index.cases),
        *_remark_lines(index.cases),
    )


def _release_lines(cases: Iterable[Case]) -> Iterator[str]:
    for release, of_release in _grouped(cases, lambda case: case.release):
        yield f"{release}: {_count(len(of_release), 'case')}"
        for labels, group in _grouped(of_release, _labels):
            values = sorted({value for case in group for value in case.label_values})
            of_values = f"label values {' '.join(map(str, values))}, " if values else ""
            yield f"  {_count(len(group), 'case')}: {of_values}{labels}"


def _labels(case: Case) -> str:
    if case.label is None:
        return "no label map"
    if not case.label_convention:
        return "no label map that can be read"
    return f"read as {case.label_convention}"


def _problem_lines(cases: Iterable[Case]) -> Iterator[str]:
    broken = [case for case in cases if not case.usable]
    if broken:
        yield f"{_count(len(broken), 'case')} cannot be used:"
        yield from (f"  {problem}" for case in broken for problem in case.problems)


def _remark_lines(cases: Iterable[Case]) -> Iterator[str]:
    remarks = [(remark, case.case_id) for case in cases for remark in case.remarks]
    if remarks:
        yield "remarks:"
    for remark, group in _grouped(remarks, lambda pair: pair[0]):
        whose = group[0][1] if len(group) == 1 else _count(len(group), "case")
        yield f"  {whose}: {remark}"


def _grouped(items: Iterable[Item], key: Callable[[Item], str]) -> Iterable[tuple[str, list[Item]]]:
    """Put items of equal key together, in the order in which the keys first occur."""
    groups: defaultdict[str, list[Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups.items()


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
