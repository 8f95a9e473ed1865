"""Where each weight of a matrix lies in its tiles: index arithmetic alone, for Python, numba and numba-cuda.

A matrix [n, k] of bf16, n a multiple of 8, is cut into `shares` ranges of whole groups of 8 rows and `splits` ranges of
whole chunks of 64 columns. Each part, a share of rows and of columns, is contiguous: its chunks one after the other,
each chunk its rows, each row 128 bytes, whose eight 16-byte pieces are swapped as TMA's 128-byte swizzle does. The
parts of a share follow each other, then those of the next share; k is padded with zeros to whole chunks.
"""

from __future__ import annotations

from numba.extending import register_jitable

GROUP = 8  # rows
CHUNK = 64  # columns
ROW_BYTES = 128  # of a chunk's row


@register_jitable(error_model="numpy")
def share_of(item, items, shares):
    """The share s, [items * s // shares, items * (s + 1) // shares), that holds an item."""
    return ((item + 1) * shares - 1) // items


@register_jitable(error_model="numpy")
def tile_offset(n, k, shares, splits, row, column):
    """Byte of element (row, column) in the tiles of a matrix [n, k]."""
    groups, chunks = n // GROUP, (k + CHUNK - 1) // CHUNK
    share = share_of(row // GROUP, groups, shares)
    chunk = column // CHUNK
    split = share_of(chunk, chunks, splits)
    first_group, first_chunk = groups * share // shares, chunks * split // splits
    rows = GROUP * (groups * (share + 1) // shares - first_group)
    own_row = row - GROUP * first_group
    part = GROUP * ROW_BYTES * (first_group * chunks) + rows * ROW_BYTES * first_chunk
    piece = (column % CHUNK // 8) ^ (own_row % 8)
    return part + ((chunk - first_chunk) * rows + own_row) * ROW_BYTES + piece * 16 + column % 8 * 2


def tiled_bytes(n, k):
    """Bytes of the tiles of a matrix [n, k]."""
    return n * ((k + CHUNK - 1) // CHUNK) * ROW_BYTES
