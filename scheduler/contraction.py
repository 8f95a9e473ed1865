"""Contraction: nodes of an acyclic graph become one, as long as it stays acyclic.

Every node has a depth, the phases of the longest chain that ends with it, and a height, those of the longest one that
starts with it. Where a path leads from one phase to another the depth grows, so that phases of one depth are known to
be apart without a search, and a search between two others stays between their depths. Paths that were there from the
start are not searched for: of each node the set of those before it is known.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence

from wpk.ir.errors import CompileError


class Contraction:
    """Nodes 0 to n - 1 in an order in which each follows what it depends on; sets of them become one node."""

    def __init__(self, before: Sequence[Sequence[int]], phases: Sequence[int]) -> None:
        """before: what each node depends on. phases: 1 for a node that takes time, 0 for one that costs nothing."""
        self._before = [set(some) for some in before]
        self._after: list[set[int]] = [set() for _ in before]
        for node, some in enumerate(before):
            for other in some:
                self._after[other].add(node)
        self._above = [0] * len(phases)  # of each node a bit for every one that it must follow from the start
        for node, some in enumerate(before):
            for other in some:
                self._above[node] |= self._above[other] | 1 << other
        self._phases = list(phases)
        self._depth, self._height = [0] * len(phases), [0] * len(phases)
        for node in range(len(phases)):
            self._depth[node] = phases[node] + max((self._depth[i] for i in self._before[node]), default=0)
        for node in reversed(range(len(phases))):
            self._height[node] = phases[node] + max((self._height[i] for i in self._after[node]), default=0)
        self._longest = max(self._depth, default=0)
        self._name = list(range(len(phases)))
        self._members: dict[int, tuple[int, ...]] = {node: (node,) for node in range(len(phases))}

    def leads(self, a: int, b: int) -> bool:
        """Whether b must follow a."""
        if self._above[b] >> a & 1:
            return True
        first, last = self._name[a], self._name[b]
        seen, open = {first}, [first]
        while open:
            for node in self._after[open.pop()]:
                if node == last:
                    return True
                if node not in seen and self._depth[node] <= self._depth[last]:
                    seen.add(node)
                    open.append(node)
        return False

    def apart(self, a: int, b: int) -> bool:
        """Whether neither of two phases must follow the other."""
        depth, other = self._depth[self._name[a]], self._depth[self._name[b]]
        return depth == other or not (self.leads(a, b) if depth < other else self.leads(b, a))

    def longer(self, nodes: Sequence[int]) -> int:
        """Phases by which the longest chain would grow if these became one phase."""
        names = {self._name[i] for i in nodes}
        depth = max((self._depth[other] for i in names for other in self._before[i] - names), default=0)
        height = max((self._height[other] for i in names for other in self._after[i] - names), default=0)
        return max(0, depth + 1 + height - self._longest)

    def join(self, nodes: Sequence[int]) -> None:
        """Make one phase of several; whatever leads from one of them to another must be of them."""
        kept, *rest = nodes
        self._members[kept] = tuple(nodes)
        for gone in rest:
            del self._members[gone]
            self._name[gone] = kept
            for here, there in ((self._before, self._after), (self._after, self._before)):
                for node in here[gone]:
                    there[node].discard(gone)
                    there[node].add(kept)
                here[kept] |= here[gone]
                here[gone] = set()
        for edges in (self._before[kept], self._after[kept]):
            edges.discard(kept)
        for lengths, forward in ((self._depth, self._after), (self._height, self._before)):
            lengths[kept] = max(lengths[i] for i in nodes)
            self._lengthen(kept, lengths, forward)
        self._longest = max(self._longest, self._depth[kept] + self._height[kept] - 1)

    def _lengthen(self, start: int, lengths: list[int], forward: Sequence[set[int]]) -> None:
        """Carry a length that grew on to what it decides."""
        changed = deque([start])
        while changed:
            node = changed.popleft()
            for other in forward[node]:
                if lengths[node] + self._phases[other] > lengths[other]:
                    lengths[other] = lengths[node] + self._phases[other]
                    changed.append(other)

    def order(self) -> Iterator[tuple[int, ...]]:
        """The members of every node, each after all that it depends on; of those that may be next the earliest."""
        waiting, given = {node: len(self._before[node]) for node in self._members}, 0
        ready = [node for node, count in waiting.items() if count == 0]
        heapq.heapify(ready)
        while ready:
            node = heapq.heappop(ready)
            yield self._members[node]
            given += 1
            for other in self._after[node]:
                waiting[other] -= 1
                if waiting[other] == 0:
                    heapq.heappush(ready, other)
        if given < len(self._members):
            raise CompileError(
                "contracted nodes depend on each other in a circle", wanted=len(self._members), found=given
            )
