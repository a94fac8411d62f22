"""Store outside of the machine for checks, behind no carrier: it keeps what it gets and counts the questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from appliance.common.carrier_wire import ObjectStatus


class StoreOutside:
    """Takes the place of ``appliance.supervisor.kv_carrier`` and the store behind it."""

    def __init__(self) -> None:
        self.asked = 0
        """Objects that were asked for."""
        self._objects: dict[bytes, bytes] = {}
        self._done: list[Callable[[ObjectStatus], None]] = []

    def get(
        self, names: Sequence[bytes], sizes: Sequence[int], _wanted: Callable[[], bool] = lambda: True
    ) -> list[tuple[ObjectStatus, bytes | bytearray]]:
        """Return these objects."""
        self.asked += len(names)
        found = [self._objects.get(name) for name in names]
        return [(ObjectStatus.ABSENT, b"") if body is None else (ObjectStatus.OK, body) for body in found]

    def offer(
        self,
        name: bytes,
        body: memoryview,
        done: Callable[[ObjectStatus], None],
        _wanted: Callable[[], bool],
        *,
        owner: str,
    ) -> bool:
        """Keep an object; ``settle`` tells that it is written."""
        self._objects[name] = bytes(body)
        self._done.append(done)
        return True

    def settle(self) -> None:
        """Tell that all is written, so that nothing is found before it is asked for here."""
        done, self._done = self._done, []
        for one in done:
            one(ObjectStatus.OK)

    def drop(self, name: bytes, *, later: bool = False) -> None:
        """Forget an object."""
        self._objects.pop(name, None)

    def close(self) -> None:
        """Do nothing: no resource is held."""
