"""Where the sequences of packed attention end, and the two spellings that kernels read."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from numbers import Integral

import numpy as np
import numpy.typing as npt

from graphhal.errors import BoundariesError

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Boundaries:
    """Cumulative ends of the sequences packed into `rows` rows.

    Born from host integers, so that no device value is ever read back. `ends` is strictly
    increasing, starts above zero and its last entry is the number of rows.

    Attributes:
        ends: cumulative ends, host ints, without a leading zero.
        spare_slots: trailing empty sequences that `cu_seqlens` spells as a repeated end.

    Raises:
        BoundariesError: an end is not a host int, not positive, not above the one before it, or
            past int32.
    """

    ends: tuple[int, ...]
    spare_slots: int = 0

    def __post_init__(self) -> None:
        ends = _as_ints(self.ends, "end {}")
        object.__setattr__(self, "ends", ends)
        if not ends:
            raise BoundariesError("boundaries need at least one end; an empty group has none")
        previous = 0
        for index, end in enumerate(ends):
            if end <= previous:
                raise BoundariesError(
                    f"ends must be strictly increasing from above 0; end {index} is {end} after "
                    f"{previous} in {_shown(ends)}. Drop empty sequences, pass cumulative ends"
                )
            previous = end
        if previous > _INT32_MAX:
            raise BoundariesError(f"ends must fit int32 ({_INT32_MAX}); the last one is {previous}")
        object.__setattr__(self, "spare_slots", _as_int(self.spare_slots, "spare_slots"))
        if self.spare_slots < 0:
            raise BoundariesError(f"spare_slots must be 0 or more, not {self.spare_slots}")

    @classmethod
    def from_lengths(cls, lengths: Iterable[int]) -> "Boundaries":
        """Boundaries of sequences of these lengths (rows each, all above zero)."""
        checked = _as_ints(lengths, "length {}")
        for index, length in enumerate(checked):
            if length <= 0:
                raise BoundariesError(f"length {index} is {length}; a sequence has 1 row or more")
        return cls(tuple(accumulate(checked)))

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Iterable[int], rows: int | None = None) -> "Boundaries":
        """Boundaries from `cu_seqlens` (leading zero; host integers).

        A tail of zeros, or a repeated last end, is how other systems pad the array: both are
        dropped. Rows past the last end (`rows`) become one sequence of their own.
        """
        values = list(_as_ints(cu_seqlens, "cu_seqlens[{}]"))
        if not values or values[0] != 0:
            raise BoundariesError(f"cu_seqlens must start with 0, got {_shown(tuple(values))}")
        while len(values) > 2 and values[-1] == 0:
            values.pop()
        while len(values) > 2 and values[-1] == values[-2]:
            values.pop()
        bounds = cls(tuple(values[1:]))
        return bounds if rows is None else bounds.padded_to(rows)

    @property
    def rows(self) -> int:
        """Number of rows that the sequences cover."""
        return self.ends[-1]

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each sequence, spare slots left out."""
        return tuple(end - start for start, end in zip((0, *self.ends), self.ends, strict=False))

    @property
    def max_seqlen(self) -> int:
        """Rows of the longest sequence."""
        return max(self.lengths)

    @cached_property
    def cu_seqlens(self) -> npt.NDArray[np.int32]:
        """int32 array of 1 + sequences + spare slots entries, leading zero; read-only."""
        array = np.array((0, *self.ends, *(self.ends[-1:] * self.spare_slots)), dtype=np.int32)
        array.flags.writeable = False
        return array

    @property
    def actual_seq_lengths(self) -> list[int]:
        """Ascend TND spelling: cumulative ends, no leading zero, host ints, no empty sequence."""
        return list(self.ends)

    def padded_to(
        self,
        rows: int,
        slots: int | None = None,
        longest: int | None = None,
        allow_empty: bool = True,
    ) -> "Boundaries":
        """The same sequences in a buffer of `rows` rows and `slots` sequence slots.

        The slack becomes ONE isolated dummy sequence, never part of the last real one. Where a
        kernel was captured with a bound that is shorter than the slack (`longest`), the slack
        becomes as many dummy sequences of at most that length as it needs. Slots still free
        after that are empty sequences (`spare_slots`): a repeated end in `cu_seqlens`, nothing at
        all in `actual_seq_lengths`. For a kernel that cannot take an empty sequence
        (`allow_empty=False`) further dummies are cut off the slack until every slot is used.

        Raises:
            BoundariesError: the sequences cover more than `rows`, or do not fit the slots, or
                leave an empty slot that the kernel cannot take.
        """
        slack = _as_int(rows, "rows") - self.rows
        if slack < 0:
            raise BoundariesError(f"{self.rows} rows of sequences do not fit a buffer of {rows}")
        slots = None if slots is None else _as_int(slots, "slots")
        if longest is not None and _as_int(longest, "longest") < 1:
            raise BoundariesError(f"longest must be 1 or more, not {longest}")
        bound = slack if longest is None else min(longest, slack)
        dummies = -(-slack // bound) if slack else 0
        if slots is None:
            return Boundaries((*self.ends, *_cut(self.rows, slack, dummies, bound)))
        spare = slots - len(self.ends) - dummies
        if spare < 0:
            raise BoundariesError(
                f"{len(self.ends)} sequences and {dummies} of padding do not fit {slots} slots"
            )
        if not allow_empty:
            dummies, spare = dummies + spare, 0
            if slack < dummies:
                raise BoundariesError(
                    f"{len(self.ends)} sequences and {slack} padding rows leave one of {slots} "
                    "slots empty, which this platform's kernel cannot take"
                )
        return Boundaries((*self.ends, *_cut(self.rows, slack, dummies, bound)), spare)


def _cut(start: int, rows: int, pieces: int, longest: int) -> Iterator[int]:
    """Ends of `rows` rows cut into `pieces` sequences, each as long as leaves a row to the rest."""
    end, last = start, start + rows
    for left in range(pieces - 1, -1, -1):
        end = min(end + longest, last - left)
        yield end


def _as_ints(values: Iterable[object], what: str) -> tuple[int, ...]:
    try:
        given = tuple(values)
    except TypeError as error:
        raise BoundariesError(f"boundaries are a list of host integers, got {values!r}") from error
    if all(type(value) is int for value in given):  # every new group of sizes comes by here
        return given  # type: ignore[return-value]
    return tuple(_as_int(value, what.format(index)) for index, value in enumerate(given))


def _as_int(value: object, what: str) -> int:
    # A tensor has __index__ too, but reading it may wait for a device.
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise BoundariesError(f"{what} must be a host integer, got {value!r}")
    return int(value)


def _shown(values: tuple[int, ...]) -> str:
    return str(values if len(values) <= 12 else (*values[:6], "…", *values[-3:]))
