"""`kvmosaic` with one fault planted in the server: python serve.py FAULT server ..."""

from __future__ import annotations

import sys

from kvmosaic.cache.cache import Cache
from kvmosaic.cache.leases import Held
from kvmosaic.cli import main
from kvmosaic.layout import objects
from kvmosaic.server.engines import Engine


def window_one_chunk_short() -> None:
    reach_chunks = objects._reach_chunks

    def shorter(*arguments):
        reach = reach_chunks(*arguments)
        return reach if reach is None else max(1, reach - 1)

    objects._reach_chunks = shorter


def extents_reused_on_end_of_stream() -> None:
    Engine.buriable = property(lambda engine: engine.may_hold and not engine._has_scheduler())


def old_generation_committed() -> None:
    """The objects of the old generation become visible in the new one."""
    commit = Cache.commit

    def lenient(self, engine, reservation, written, now):
        held = self._reservations._held.get(reservation)
        if held is None:
            return commit(self, engine, reservation, written, now)
        index = self._indexes[held.namespace]
        if held.generation != index.generation:
            revived = []
            for entry, g, extents in held.objects:
                parent = index.get(entry.parent.digest) if entry.parent is not None else None
                if entry.parent is None or parent is not None:
                    entry = index.grow(entry.digest, parent, now)
                if entry.gone or (entry.present | entry.writing) >> g & 1:
                    return commit(self, engine, reservation, written, now)
                entry.writing |= 1 << g
                revived.append((entry, g, extents))
            self._reservations._held[reservation] = Held(held.engine, held.namespace, index.generation, revived)
        return commit(self, engine, reservation, written, now)

    Cache.commit = lenient


def leases_pin_nothing() -> None:
    lookup = Cache.lookup

    def unleased(self, engine, request, *arguments):
        answer = lookup(self, engine, request, *arguments)
        self.release(engine, request)
        return answer

    Cache.lookup = unleased


FAULTS = {
    "window one chunk short": window_one_chunk_short,
    "extents reused on end of stream": extents_reused_on_end_of_stream,
    "old generation committed": old_generation_committed,
    "leases pin nothing": leases_pin_nothing,
}

if __name__ == "__main__":
    FAULTS[sys.argv.pop(1)]()
    main()
