"""Where the patches of a frame stand, and their taps into a learned table of positions: host
integers and float32, in the order of merge blocks."""

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int32]
Taps = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]
"""Two places of the table for each place of an axis, and their weights; (size, 2) both."""


def in_merge_blocks(h: int, w: int, merge: int) -> Positions:
    """Row and column of each of h x w patches, (h * w, 2): block by block of merge x merge."""
    blocks = (h // merge, w // merge, merge, merge)
    grid = np.empty((*blocks, 2), dtype=np.int32)
    grid[..., 0] = np.arange(h).reshape(blocks[0], 1, merge, 1)
    grid[..., 1] = np.arange(w).reshape(1, blocks[1], 1, merge)
    return grid.reshape(-1, 2)


def axis_taps(size: int, table_side: int, align_corners: bool) -> Taps:
    """Bilinear taps of an axis of `size` places into a table of `table_side`.

    float32 throughout, in the order of operations that transformers uses: bit-equal to it.
    """
    places = np.arange(size, dtype=np.float32)
    last = np.float32(table_side - 1)
    if align_corners:
        source = places * last / np.float32(max(size - 1, 1))
    else:
        half = np.float32(0.5)
        source = (places + half) * np.float32(table_side) / np.float32(size) - half
    floor = np.floor(source)
    offsets = np.arange(2, dtype=np.int32)
    taps = (floor.astype(np.int32)[:, None] + offsets).clip(0, table_side - 1)
    distance = np.abs(source[:, None] - floor[:, None] - offsets.astype(np.float32))
    return taps, np.maximum(1 - distance, np.float32(0))


def patch_taps(positions: Positions, rows: Taps, columns: Taps, table_side: int) -> Taps:
    """Four places of the flattened table for each patch, and their weights; (patches, 4) both: the
    row's first and second, with the column's first and second each."""
    (row_taps, row_weights), (column_taps, column_weights) = rows, columns
    row, column = positions.T.astype(np.intp)
    indices = (row_taps * np.int32(table_side)).repeat(2, axis=1).take(row, axis=0)
    indices += np.tile(column_taps, 2).take(column, axis=0)
    weights = row_weights.repeat(2, axis=1).take(row, axis=0)
    weights *= np.tile(column_weights, 2).take(column, axis=0)
    return indices, weights
