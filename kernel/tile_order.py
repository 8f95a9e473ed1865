"""Where each weight of a matrix lies in its tiles: index arithmetic alone, for Python, numba and numba-cuda.

A matrix [n, k] of bf16 or f32, n a multiple of 8, is cut into `shares` ranges of whole groups of 8 rows and `splits`
ranges of whole chunks of columns: 128 bytes, 64 columns of bf16 or 32 of f32. Each part, a share of rows and of
columns, is contiguous: its chunks one after the other, each chunk its rows, each row 128 bytes, whose eight 16-byte
pieces are swapped as TMA's 128-byte swizzle does. The parts of a share follow each other, then those of the next share;
k is padded with zeros to whole chunks.
"""

from __future__ import annotations

from numba.extending import register_jitable

GROUP = 8  # rows
CHUNK = 64  # columns of bf16
ROW_BYTES = 128  # of a chunk's row
PIECE_BYTES = 16


@register_jitable(error_model="numpy")
def share_of(item, items, shares):
    """The share s, [items * s // shares, items * (s + 1) // shares), that holds an item."""
    return ((item + 1) * shares - 1) // items


@register_jitable(error_model="numpy")
def tile_offset(n, k, shares, splits, row, column, width=2):
    """Byte of element (row, column) in the tiles of a matrix [n, k] of elements of `width` bytes."""
    depth, piece_columns = ROW_BYTES // width, PIECE_BYTES // width
    groups, chunks = n // GROUP, (k + depth - 1) // depth
    share = share_of(row // GROUP, groups, shares)
    chunk = column // depth
    split = share_of(chunk, chunks, splits)
    first_group, first_chunk = groups * share // shares, chunks * split // splits
    rows = GROUP * (groups * (share + 1) // shares - first_group)
    own_row = row - GROUP * first_group
    part = GROUP * ROW_BYTES * (first_group * chunks) + rows * ROW_BYTES * first_chunk
    piece = (column % depth // piece_columns) ^ (own_row % 8)
    place = piece * PIECE_BYTES + column % piece_columns * width
    return part + ((chunk - first_chunk) * rows + own_row) * ROW_BYTES + place


def tiled_bytes(n, k, width=2):
    """Bytes of the tiles of a matrix [n, k] of elements of `width` bytes."""
    return n * -(-k * width // ROW_BYTES) * ROW_BYTES
