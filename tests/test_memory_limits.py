"""Which graphs a memory limit leaves, in plain numbers."""

import pytest

from graphhal.memory_limits import first_to_keep, fitting

POOLED = [(40, 42), (30, 2), (20, 2), (10, 2)]
APART = [(40, 40), (20, 20), (10, 10)]
ODD = [(40, 10), (20, 100), (10, 2)]


@pytest.mark.parametrize(
    ("costs", "arenas", "limit", "first"),
    [
        (POOLED, 0, 48, 0),
        (POOLED, 0, 47, 1),  # 31.5 and 4
        (POOLED, 0, 35, 2),  # 21 and 2
        (POOLED, 0, 12, 3),
        (POOLED, 0, 10, 0),
        (POOLED, 40, 88, 0),
        (POOLED, 40, 87, 1),
        (POOLED, 40, 66, 1),  # 30 of arenas, where 40 would leave no room
        (APART, 0, 70, 0),
        (APART, 0, 69, 1),
        (APART, 0, 29, 2),
        (ODD, 0, 50, 0),  # the second fits no room that another beginning leaves
        ([], 0, 1, 0),
    ],
)
def test_most_graphs_are_kept_and_of_as_many_the_smallest(costs, arenas, limit, first):
    assert first_to_keep(costs, arenas, limit) == first


def test_a_graph_that_does_not_fit_takes_no_room():
    assert list(fitting(ODD, 0, 12, 0)) == [True, False, True]
    assert list(fitting(ODD, 0, 9, 0)) == [False, False, False]
