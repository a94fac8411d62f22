"""Token ids that leave no copy of themselves behind.

Each keeper of ids has a copy of its own and overwrites it at the end (``isolation.ipc.wiping``). A list that
grows would still leave its content in every place that it grew out of; one of ``TokenIds`` does not.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from isolation.ipc.wiping import wipe

if TYPE_CHECKING:
    _Array = array[int]
else:
    _Array = array  # It takes no type argument before Python 3.12.


class TokenIds(_Array):
    """An array of typecode ``I`` that is overwritten before it moves. Slices of it are plain arrays.

    An append costs some 0.1 us more than a plain array's, so it is for requests of which nothing may be kept.
    """

    __slots__ = ("_room",)

    @classmethod
    def copy_of(cls, token_ids: array[int]) -> TokenIds:
        """A copy with room for nothing more yet."""
        made = cls("I", token_ids)
        made._room = len(made)
        return made

    def append(self, token_id: int, /) -> None:
        """Add one id at the end."""
        if len(self) == self._room:
            self._grow()
        super().append(token_id)

    def _grow(self) -> None:
        """Have the allocation moved while it holds zeros."""
        kept = array("I", self)
        wipe(self)
        super().append(0)
        self.pop()  # Gives back no room: an array keeps what it has until it is shorter by 16.
        self[:] = kept
        wipe(kept)
        self._room = (self.__sizeof__() - type(self).__basicsize__) // self.itemsize
