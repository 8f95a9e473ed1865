"""GPU bodies of the operators whose operands stream through shared memory.

A streamed operator has two halves. The *producer* (`producer.py`) fills stages with copies by the copy engine: the
*early* bytes of an item (weights, state), which depend on nothing in the wave before, and its *late* bytes
(activations), once the wave is open. The *consumer* (a file an operator) takes the items in the same order, one stage
each, and gives the stage back.
"""
