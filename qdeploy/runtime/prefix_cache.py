"""Which full blocks of which prefixes lie in the pools: a trie of token blocks (ADR 0006).

A node is one full block of one prefix: its tokens are its key under its parent, so a hit compares
tokens by construction, and two prefixes can't be confused whatever their hashes (R06). Roots are
told apart by the requests' salts; the KV format is the engine's, the same for every node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from qdeploy.runtime.block_pool import BlockPool
from qdeploy.runtime.block_table import NO_BLOCK, Column

Key = tuple[int, ...] | str  # the block's tokens; a root's key is the salt


class PrefixNode:
    """One full block. ids: per column the block that holds it, −1 for none. depth: blocks of the
    prefix, this one included; 0 for a root. num_pins: who keeps it although it may hold nothing.
    """

    __slots__ = ("children", "depth", "ids", "key", "num_pins", "parent")

    def __init__(self, parent: PrefixNode | None, key: Key, num_columns: int) -> None:
        self.parent = parent
        self.key = key
        self.depth: int = -1 if parent is None else parent.depth + 1
        self.ids = [NO_BLOCK] * num_columns
        self.children: dict[Key, PrefixNode] = {}
        self.num_pins = 0


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The first num_tokens tokens needn't be computed; nodes: their blocks, first to last."""

    num_tokens: int = 0
    nodes: tuple[PrefixNode, ...] = ()


class PrefixCache:
    """The trie. It holds no references to blocks: what the pools evict, it forgets."""

    def __init__(self, columns: Sequence[Column], sizes: Sequence[int]) -> None:
        self.columns = columns
        self.block_size = columns[0].group.config.block_size
        self.pools = [
            BlockPool(
                f"{'sealed' if column.sealed else 'open'} (KV group {column.index})",
                size,
                partial(self._forget, index),
            )
            for index, (column, size) in enumerate(zip(columns, sizes, strict=True))
        ]
        self._owners: list[dict[int, PrefixNode]] = [{} for _ in columns]
        self._top = PrefixNode(None, "", len(columns))
        self._top.num_pins = 1

    def root(self, salt: str) -> PrefixNode:
        """The empty prefix of everything with this salt."""
        return self.child(self._top, salt)

    def child(self, node: PrefixNode, key: Key) -> PrefixNode:
        """`node`'s prefix and one block more."""
        if key not in node.children:
            node.children[key] = PrefixNode(node, key, len(self.columns))
        return node.children[key]

    def path(self, token_ids: Sequence[int], salt: str) -> Iterator[PrefixNode]:
        """The known full blocks of a sequence, first to last, until one is unknown."""
        node, size = self._top.children.get(salt), self.block_size
        for end in range(size, len(token_ids) + 1, size):
            node = None if node is None else node.children.get(tuple(token_ids[end - size : end]))
            if node is None:
                return
            yield node

    def attach(self, node: PrefixNode, column: int, block: int) -> None:
        """`block`, which is live, holds node's K/V."""
        node.ids[column] = block
        self._owners[column][block] = node
        self.pools[column].publish(block)

    def match(self, token_ids: Sequence[int], salt: str) -> PrefixHit:
        """The longest prefix of whole blocks, all of which can be read as the position rule asks;
        the last token is always left to compute, since its logits are wanted.

        A hit of n blocks needs what a sequence of n · block_size computed tokens holds.
        """
        nodes = list(self.path(token_ids[: len(token_ids) - 1], salt))
        runs = [self._runs(nodes, column) for column in range(len(self.columns))]
        for num_blocks in range(len(nodes), 0, -1):
            num_tokens = num_blocks * self.block_size
            if all(
                low >= high or run[high] >= high - low
                for column, run in zip(self.columns, runs, strict=True)
                for low, high in column.held(num_tokens)
            ):
                return PrefixHit(num_tokens, tuple(nodes[:num_blocks]))
        return PrefixHit()

    def pin(self, node: PrefixNode | None) -> PrefixNode | None:
        """Keep a node although it may lose its blocks; give it back with `unpin`."""
        if node is not None:
            node.num_pins += 1
        return node

    def unpin(self, node: PrefixNode | None) -> None:
        """Undo one `pin`."""
        if node is not None:
            node.num_pins -= 1
            self._prune(node)

    def findable(self, column: int) -> list[int]:
        """The blocks of a column that some node names."""
        assert all(n.ids[column] == b for b, n in self._owners[column].items()), "owner disagrees"
        return list(self._owners[column])

    def check_integrity(self, pinned: Sequence[PrefixNode]) -> None:
        """Assert that the trie is one, holds nothing useless, and `pinned` explains its pins."""
        nodes = list(self._top.children.values())
        for node in nodes:  # grows while it is walked
            nodes.extend(node.children.values())
            assert node.children or node.num_pins or self._blocks(node), "a useless node"
            assert all(c.parent is node and c.key == k for k, c in node.children.items())
            assert node.num_pins == sum(p is node for p in pinned), "pins disagree with tables"
        assert len({id(n) for n in nodes}) == len(nodes), "not a tree"
        for column in range(len(self.columns)):
            named = [n.ids[column] for n in nodes if n.ids[column] != NO_BLOCK]
            assert sorted(named) == sorted(self.findable(column)), "nodes and owners disagree"

    def _runs(self, nodes: Sequence[PrefixNode], column: int) -> list[int]:
        """[num_nodes + 1]: how many blocks before the i-th lie in `column` without a gap."""
        runs = [0]
        for node in nodes:
            runs.append(0 if node.ids[column] == NO_BLOCK else runs[-1] + 1)
        return runs

    def _forget(self, column: int, block: int) -> None:
        node = self._owners[column].pop(block)
        node.ids[column] = NO_BLOCK
        self._prune(node)

    def _prune(self, node: PrefixNode) -> None:
        """Remove a node that is of no use any more, and then perhaps its parents."""
        while not (node.children or node.num_pins or self._blocks(node)):
            parent = node.parent
            if parent is None:
                return
            del parent.children[node.key]
            node = parent

    @staticmethod
    def _blocks(node: PrefixNode) -> bool:
        return any(block != NO_BLOCK for block in node.ids)
