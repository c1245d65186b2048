"""Small geometries, prompts and chains for the cache's tests."""

from collections.abc import Sequence

from kvmosaic.cache.cache import Cache
from kvmosaic.cache.values import Chain, Hit, Miss, Reservation
from kvmosaic.core.types import EngineKey, Kind, Namespace, Outcome
from kvmosaic.layout.fold import fold
from kvmosaic.layout.groups import Geometry, ObjectGroup
from kvmosaic.memory.extents import ExtentPool

QUANTUM = 16 << 10
ENGINE = EngineKey("engine")
OTHER = EngineKey("other")
SPACE = Namespace(b"n" * 16)
GRANTED, PRESENT, NOT_WORTH_IT, NO_ROOM = Outcome


def object_group(kind: Kind, reach: int | None = None, num_bytes: int = QUANTUM, lookahead: int = 0) -> ObjectGroup:
    return ObjectGroup(kind, reach, lookahead, (0,), (1,), num_bytes, ((0,),), ((True,),))


FULL = object_group(Kind.FULL)
STATE = object_group(Kind.STATE, 1)


def window(reach: int) -> ObjectGroup:
    return object_group(Kind.WINDOW, reach)


def geometry_of(*groups: ObjectGroup, model: str = "model") -> Geometry:
    return Geometry(model, SPACE, 256, (), groups, 1, 16)


def cache_of(*groups: ObjectGroup, quanta: int = 64) -> Cache:
    """A cache with one namespace and an arena of so many quanta."""
    cache = Cache(pool_of(quanta))
    cache.open(SPACE, geometry_of(*groups))
    return cache


def pool_of(quanta: int) -> ExtentPool:
    pool = ExtentPool(quanta * QUANTUM, QUANTUM)
    pool.grow(pool.capacity_bytes)
    return pool


def digests(prompt: str) -> list[bytes]:
    """One chunk a letter; like the engine's, each digest contains all letters before it."""
    return [prompt[: i + 1].encode() for i in range(len(prompt))]


def chain(prompt: str, first: int = 0, wanted: int | Sequence[int] = 1) -> Chain:
    """The chunks of a prompt from `first` on, with one mask of wanted objects for all or one for each."""
    every = digests(prompt)
    masks = [wanted] * (len(prompt) - first) if isinstance(wanted, int) else wanted
    return Chain(first, every[first - 1] if first else b"", every[first:], masks)


def reserve(cache: Cache, *chains: Chain, engine: EngineKey = ENGINE, now: float = 0.0) -> Reservation:
    return cache.reserve(engine, SPACE, chains, now)


def store(cache: Cache, *chains: Chain, engine: EngineKey = ENGINE, now: float = 0.0) -> int:
    """Reserve and commit; return how many objects became visible."""
    reservation = reserve(cache, *chains, engine=engine, now=now)
    return cache.commit(engine, reservation.id, b"\1" * len(reservation.objects), now)


def look(
    cache: Cache, prompt: str, first: int = 0, request: str = "request", engine: EngineKey = ENGINE, now: float = 0.0
) -> Hit | Miss:
    return cache.lookup(engine, request, SPACE, first, digests(prompt)[first:], now)


def use(cache: Cache, prompt: str, now: float) -> None:
    """Hit and release."""
    assert isinstance(look(cache, prompt, now=now), Hit)
    cache.release(ENGINE, "request")


def boundary_of(cache: Cache, prompt: str) -> int:
    """The boundary that can be served, 0 for none, whatever may be leased; uses nothing."""
    index = cache._indexes[SPACE]
    present = [entry.present for entry in index.find(digests(prompt), 0)]
    return fold(present, 0, index.geometry.object_groups, len(prompt) - index.shape.lookahead_chunks)[0]


def objects_of(cache: Cache) -> tuple[int, ...]:
    """How many objects each object group has."""
    return cache.stats().namespaces[0].objects


def used_quanta(cache: Cache) -> float:
    return cache._pool.used_bytes / QUANTUM


def outcomes(*expected: Outcome) -> bytes:
    return bytes(expected)
