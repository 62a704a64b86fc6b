"""The radix tree against a set of prefixes, one token at a time."""

from __future__ import annotations

from array import array

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.sim.prefix_cache import Node, PrefixCache

Tokens = tuple[int, ...]
few = st.lists(st.sampled_from([1, 2, 300]), max_size=12).map(tuple)


def data(tokens: Tokens) -> bytes:
    return array("i", tokens).tobytes()


class Tree(RuleBasedStateMachine):
    """``held`` maps each prefix in the cache to its last use; ``locks`` are prefixes in use with their node."""

    @initialize()
    def begin(self) -> None:
        self.cache = PrefixCache()
        self.held: dict[Tokens, int] = {}
        self.locks: list[tuple[Tokens, Node]] = []
        self.uses = self.given = 0

    def use(self, tokens: Tokens) -> None:
        self.uses += 1
        for n in range(1, len(tokens) + 1):
            self.held[tokens[:n]] = self.uses

    @rule(tokens=few, cut=st.integers(0, 2))
    def find_and_lock(self, tokens: Tokens, cut: int) -> None:
        limit = max(0, len(tokens) - cut)
        node = self.cache.find(data(tokens), limit)
        assert node.end == max(n for n in range(limit + 1) if n == 0 or tokens[:n] in self.held)
        before = self.cache.locked
        more = self.cache.unlocked(node)
        self.cache.lock(node)
        assert self.cache.locked == before + more
        self.locks.append((tokens[: node.end], node))

    @precondition(lambda self: self.locks)
    @rule(pick=st.integers(0, 99), more=few)
    def grow(self, pick: int, more: Tokens) -> None:
        """A running sequence's prefill ends: what it has joins the cache and stays locked."""
        tokens, node = self.locks.pop(pick % len(self.locks))
        end = self.cache.insert(node, data(more))
        self.cache.lock(end)
        self.cache.unlock(node)
        self.use(tokens + more)
        self.locks.append((tokens + more, end))

    @precondition(lambda self: self.locks)
    @rule(pick=st.integers(0, 99), more=few)
    def leave(self, pick: int, more: Tokens) -> None:
        tokens, node = self.locks.pop(pick % len(self.locks))
        self.cache.insert(node, data(more))
        self.cache.unlock(node)
        self.use(tokens + more)

    @rule(tokens=few)
    def give(self, tokens: Tokens) -> None:
        """Another server takes it: what no other branch has of it goes first."""
        self.cache.given(data(tokens))
        self.given -= 1
        end = max(n for n in range(len(tokens) + 1) if n == 0 or tokens[:n] in self.held)
        for n in range(end, 0, -1):
            behind = [p for p in self.held if len(p) == n + 1 and p[:n] == tokens[:n]]
            if len(behind) > (n < end) or tokens[:n] in self.in_use():
                break
            self.held[tokens[:n]] = self.given

    @rule(share=st.floats(0, 1))
    def evict(self, share: float) -> None:
        count = int(share * (self.cache.size - self.cache.locked))
        self.cache.evict(count)
        for _ in range(count):
            inner = {p[:-1] for p in self.held}
            leaves = [p for p in self.held if p not in inner and p not in self.in_use()]
            del self.held[min(leaves, key=lambda p: self.held[p])]

    @precondition(lambda self: not self.locks)
    @rule()
    def flush(self) -> None:
        self.cache = PrefixCache()
        self.held.clear()

    def in_use(self) -> set[Tokens]:
        return {tokens[:n] for tokens, _ in self.locks for n in range(1, len(tokens) + 1)}

    @invariant()
    def counts_agree(self) -> None:
        assert self.cache.size == len(self.held)
        assert self.cache.locked == len(self.in_use())
        assert all(node.end == len(tokens) for tokens, node in self.locks)


TestTree = Tree.TestCase
TestTree.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_conversation_stays_a_short_path() -> None:
    cache = PrefixCache()
    tokens: Tokens = ()
    for turn in range(50):
        node = cache.find(data(tokens), len(tokens))
        assert node.end == len(tokens)
        cache.lock(node)
        tokens += (turn, turn, turn)
        cache.insert(node, data(tokens[node.end :]))
        cache.unlock(node)
    depth, node = 0, cache.find(data(tokens), len(tokens))
    while node.parent is not None:
        depth, node = depth + 1, node.parent
    assert depth == 1


def test_a_use_of_a_branch_is_a_use_of_its_stem() -> None:
    cache = PrefixCache()

    def use(tokens: Tokens) -> None:
        node = cache.find(data(tokens), len(tokens))
        cache.lock(node)
        cache.insert(node, data(tokens[node.end :]))
        cache.unlock(node)

    for tokens in [(1, 1, 2), (1, 1, 3), (5, 5), (1, 1, 2), (1, 1, 3)]:
        use(tokens)
    cache.evict(3)  # (5, 5) is the oldest, then the end of (1, 1, 2)
    assert [cache.find(data(t), len(t)).end for t in [(5, 5), (1, 1, 2), (1, 1, 3)]] == [0, 2, 3]
    use((6, 6))
    use((1, 1, 3))
    cache.evict(3)  # (6, 6), then the end of (1, 1, 3); the stem was used with it
    assert [cache.find(data(t), len(t)).end for t in [(6, 6), (1, 1, 3)]] == [0, 2]
    use((7,))
    use((1, 1, 3))
    use((8, 8))
    cache.evict(2)
    assert [cache.find(data(t), len(t)).end for t in [(7,), (1, 1, 3), (8, 8)]] == [0, 2, 2]
    cache.evict(2)
    assert [cache.find(data(t), len(t)).end for t in [(1, 1, 3), (8, 8)]] == [0, 2]
