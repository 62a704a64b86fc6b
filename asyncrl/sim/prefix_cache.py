"""The prefix cache of a simulated server: which token sequences it holds KV for (SGLang's radix cache).

A radix tree. A node holds a run of tokens (as bytes, so that a whole run is compared by one memcmp); the path from the
root spells a prefix. Sequences that are running lock the deepest node they use, which keeps the path to it; what
nobody uses stays until its room is needed, and then goes least recently used first, from the end of a branch inwards.
A use of a prefix is a use of each of its tokens. Nothing here costs more than the depth of a path and a copy of bytes.

Pure: no clock, as uses are counted.
"""

from __future__ import annotations

import heapq

ITEM = 4
"""Bytes of a token (``array("i")``)."""


class Node:
    """A run of tokens behind ``parent``'s. ``end`` counts the tokens from the root to its own last one."""

    __slots__ = ("children", "data", "end", "locks", "parent", "used")

    def __init__(self, parent: Node | None, data: bytearray, end: int, used: int) -> None:
        self.parent = parent
        """None at the root, and once the node is evicted."""
        self.data = data
        self.end = end
        self.used = used
        """When it was last used. A use of its children is not booked here before they are gone."""
        self.locks = 0
        """Sequences that lock it itself, plus children that are locked: not 0 exactly if it must stay."""
        self.children: dict[bytes, Node] = {}
        """By their first token."""

    @property
    def tokens(self) -> int:
        return len(self.data) // ITEM

    def __repr__(self) -> str:
        return f"<Node {self.end - self.tokens}…{self.end}, {self.locks} locks, {len(self.children)} children>"


class PrefixCache:
    """``size`` tokens are held, ``locked`` of them for running sequences; the rest can be evicted."""

    def __init__(self) -> None:
        self.size = 0
        self.locked = 0
        self._root = Node(None, bytearray(), 0, 0)
        self._uses = self._given = 0
        self._nodes = 0
        self._unused: list[tuple[int, int, Node]] = []
        """Heap of leaves without locks, by last use; with stale entries."""
        self._offers = 0

    def find(self, data: bytes, limit: int) -> Node:
        """The node that ends the longest held prefix of ``data``, of at most ``limit`` tokens. Not a use."""
        return self._descend(self._root, data, limit * ITEM)

    def unlocked(self, node: Node) -> int:
        """Tokens that ``lock(node)`` would lock."""
        tokens = 0
        while node.parent is not None and not node.locks:
            tokens += node.tokens
            node = node.parent
        return tokens

    def lock(self, node: Node) -> None:
        """Keep the path to ``node`` until ``unlock``."""
        while node.parent is not None:
            node.locks += 1
            if node.locks > 1:
                return
            self.locked += node.tokens
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Undo one ``lock``, and book a use."""
        self._use(node)
        above = node
        while above.parent is not None:
            above.locks -= 1
            if above.locks:
                break
            self.locked -= above.tokens
            above = above.parent
        self._offer(node)

    def insert(self, node: Node, data: bytes) -> Node:
        """Hold ``data`` behind ``node``, which the caller has locked (or is the root); the node that ends it. A use."""
        deepest = self._descend(node, data, len(data))
        rest = data[(deepest.end - node.end) * ITEM :]
        if rest:
            new = len(rest) // ITEM
            self.size += new
            mine = 1 if deepest is node else 0
            if deepest.parent is not None and not deepest.children and deepest.locks <= mine:
                # Nobody else ends here: one long node, so that paths stay short over many turns.
                deepest.data += rest
                deepest.end += new
                if deepest.locks:
                    self.locked += new
            else:
                leaf = Node(deepest, bytearray(rest), deepest.end + new, 0)
                deepest.children[rest[:ITEM]] = leaf
                self._nodes += 1
                deepest = leaf
        self._use(deepest)
        self._offer(deepest)
        return deepest

    def given(self, data: bytes) -> None:
        """Another server has ``data`` now: what it alone holds of it, and does not use, is the first to go."""
        node = leaf = self.find(data, len(data) // ITEM)
        self._given -= 1
        while node.parent is not None and not node.locks and len(node.children) <= (node is not leaf):
            node.used = self._given
            node = node.parent
        self._offer(leaf)

    def evict(self, tokens: int) -> None:
        """Forget ``tokens`` tokens that nobody uses, the least recently used first."""
        while tokens > 0:
            used, _, node = self._unused[0]
            parent = node.parent
            if parent is None or node.locks or node.children or node.used != used:
                heapq.heappop(self._unused)
                continue
            gone = min(tokens, node.tokens)
            tokens -= gone
            self.size -= gone
            if gone < node.tokens:
                del node.data[-gone * ITEM :]
                node.end -= gone
                return
            heapq.heappop(self._unused)
            del parent.children[bytes(node.data[:ITEM])]
            node.parent = None
            self._nodes -= 1
            parent.used = max(parent.used, used)
            self._offer(parent)

    def _use(self, node: Node) -> None:
        self._uses += 1
        node.used = self._uses

    def _offer(self, node: Node) -> None:
        """It may be evicted, if nobody uses it."""
        if node.locks or node.children or node.parent is None:
            return
        self._offers += 1
        heapq.heappush(self._unused, (node.used, self._offers, node))
        if len(self._unused) > 64 + 2 * self._nodes:
            fresh = {id(e[2]): e for e in self._unused if e[2].used == e[0] and e[2].parent is not None}
            self._unused = [e for e in fresh.values() if not e[2].locks and not e[2].children]
            heapq.heapify(self._unused)

    def _descend(self, node: Node, data: bytes, stop: int) -> Node:
        """The end of the longest held prefix of ``data[:stop]``, which follows ``node``."""
        at = 0
        while at < stop:
            child = node.children.get(data[at : at + ITEM])
            if child is None:
                break
            size = len(child.data)
            if at + size <= stop and data.startswith(child.data, at):
                node = child
                at += size
                continue
            return self._split(child, _common(data, at, child.data, min(size, stop - at) // ITEM))
        return node

    def _split(self, node: Node, tokens: int) -> Node:
        """Part ``node`` behind its first ``tokens``; the new node that holds these. The old one keeps the rest, so
        whoever locked its end still does."""
        parent = node.parent
        assert parent is not None
        size = tokens * ITEM
        upper = Node(parent, node.data[:size], node.end - node.tokens + tokens, node.used)
        upper.locks = 1 if node.locks else 0
        del node.data[:size]
        upper.children[bytes(node.data[:ITEM])] = node
        parent.children[bytes(upper.data[:ITEM])] = upper
        node.parent = upper
        self._nodes += 1
        return upper

    def __repr__(self) -> str:
        return f"<PrefixCache {self.size} tokens in {self._nodes} nodes, {self.locked} locked>"


def _common(data: bytes, at: int, other: bytearray, most: int) -> int:
    """How many tokens ``data`` from byte ``at`` and ``other`` have in common, at most ``most``; by bisection."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if data[at + low * ITEM : at + middle * ITEM] == other[low * ITEM : middle * ITEM]:
            low = middle
        else:
            high = middle - 1
    return low
