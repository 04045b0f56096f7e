"""A mapping of bounded size that forgets the least recently used entry."""

from collections.abc import Hashable, ItemsView, ValuesView
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Keeps at most `most` values by key. If there is one more, the least recently used is
    forgotten.

    A use writes its time beside the value, so a lookup hashes the key only once. Keys are nested
    tuples here, and hashing one takes over 1 us; `OrderedDict.move_to_end` would hash it a second
    time. To forget a value takes time in proportion to `most`.

    Threads may share it under the GIL, because each change is a single operation of a dict. Two
    uses in two threads may get the same time.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._entries: dict[K, list[Any]] = {}
        """A value and the time of its last use."""
        self._time = 0

    def use(self, key: K) -> V | None:
        """The value, which now counts as the most recently used. None if there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._time = entry[1] = self._time + 1
        found: V = entry[0]
        return found

    def keep(self, key: K, value: V) -> None:
        """Keeps a value, in place of the one that the key had before."""
        self._time += 1
        self._entries[key] = [value, self._time]
        while len(self._entries) > self.most:
            entries = self._entries.copy()  # other threads may change the original meanwhile
            self._entries.pop(min(entries, key=lambda k: entries[k][1]), None)

    def items(self) -> ItemsView[K, V]:
        """Keys and values now, which does not count as a use."""
        return {key: value for key, (value, _) in self._entries.copy().items()}.items()

    def values(self) -> ValuesView[V]:
        """The values now, which does not count as a use."""
        return {key: value for key, (value, _) in self._entries.copy().items()}.values()

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        self._entries.clear()
