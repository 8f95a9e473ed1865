"""GPU bodies that a whole block of threads runs together, for operators that one thread a part would be too slow for.

They have the signature of `wpk.ops.blockwise`: all threads of a block call a body with the same arguments. What other
blocks wrote is read past the first cache (`ptx.load_l2*`); many loads are issued before any is used, and neighbouring
lanes take neighbouring words. How a result's sum is cut into pieces depends on sizes that belong to its session alone:
the bits are the same in any slot, in any company and for any cut of the work into tasks.
"""
