"""Whole conversations into as few rows as will hold them: the longest first, each into the fullest row it fits in.

Best-fit decreasing: at most 11/9 of the fewest rows there could be, in practice within a hundredth. No conversation is
cut in two, so no answer is learned without what it answers. Pure arithmetic, the same for the same lengths.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence


def rows_of(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """For each row the numbers of those in it; none is longer than a row."""
    rows: list[list[int]] = []
    by_room: defaultdict[int, list[int]] = defaultdict(list)  # rows that have so much room left
    rooms = 0  # bit r: some row has room r; so the smallest that will do is found in one look
    for number in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        length = lengths[number]
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(number)
        left = room - length
        if left:
            by_room[left].append(row)
            rooms |= 1 << left
    return rows
