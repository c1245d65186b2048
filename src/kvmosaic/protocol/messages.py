"""One tagged struct per message on the socket.

Every request with a non-zero `id` gets exactly one reply with that id, `Failed` included; `id` 0 is one-way.
A message never changes meaning: new fields go last with a default, a new meaning is a new message, and an
incompatible change raises PROTOCOL. Arrays that grow with the prompt travel packed in `bytes`: digests
concatenated, extents as little-endian (offset u64, length u64), counts as little-endian u32.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kvmosaic.layout.groups import Declaration, Geometry

PROTOCOL = 1
MAX_FRAME_BYTES = 64 << 20

Role = Literal["worker", "scheduler", "operator"]


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages."""

    id: int


# Session: who is there, and may it map the arena?


class Hello(Message, frozen=True):
    """First message of a session. `engine` is empty for an operator."""

    protocol: int
    role: Role
    engine: str = ""


class Welcome(Message, frozen=True):
    boot_id: str


class Declare(Message, frozen=True):
    """A worker says what its rank holds, and by saying it, that no copy of this process is in flight."""

    declaration: Declaration


class Attach(Message, frozen=True):
    """Asks for the geometry; a worker's `Attached` carries the arena's descriptor as well.

    A scheduler says in `weights` what its engine computes with since its last clear: a name that no other engine
    has, so that it shares nothing with anyone; empty for the weights that were declared.
    """

    weights: str = ""


class Attached(Message, frozen=True):
    """The engine is complete. A plan is valid for a worker iff it carries this `boot_id` and an `epoch` at
    least the one the worker was attached with."""

    boot_id: str
    epoch: int
    arena_bytes: int
    geometry: Geometry


class Attaching(Message, frozen=True):
    """Not all ranks have declared and mapped the arena yet."""

    ranks: tuple[int, ...]
    world: int


class Refusal(Message, frozen=True):
    """This engine is not served until something is changed; `reason` is for the user."""

    reason: str


class Mapped(Message, frozen=True):
    """One-way: the worker has mapped the arena of its last `Attached`."""

    epoch: int


class Detach(Message, frozen=True):
    """One-way: this process has no copy in flight and starts none; it has unmapped the arena."""


# Load: lookup, then release.


class Lookup(Message, frozen=True):
    """Which boundary can be served? `digests` are those of chunks `first_chunk`, `first_chunk` + 1, … of the
    prompt, the last one that may count included; chunks before `first_chunk` are the engine's own hit."""

    epoch: int
    request: str
    first_chunk: int
    digest_bytes: int
    digests: bytes


class Hit(Message, frozen=True):
    """Chunks up to `boundary` (a chunk index) are leased to this request.

    `first_chunks[g]` is the first leased chunk of object group g, `extents[g]` the packed extents of its
    objects up to the boundary, `extent_counts[g]` the packed number of extents of each object. `full_chunks`
    is how deep the full object groups go.
    """

    boundary: int
    full_chunks: int
    first_chunks: tuple[int, ...]
    extents: tuple[bytes, ...]
    extent_counts: tuple[bytes, ...]


class Miss(Message, frozen=True):
    """Nothing beyond the engine's own hit can be served; an earlier lease of the request is gone."""

    full_chunks: int


class NotReady(Message, frozen=True):
    """The epoch is over or the engine incomplete: attach again before asking more."""


class Release(Message, frozen=True):
    """One-way: the request reads its leased bytes no more."""

    request: str


# Store: reserve, then commit.


class Chain(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive chunks to store. `parent` is the digest of chunk `first_chunk` - 1, empty at 0; `wanted`
    has one u32 per chunk, bit g set when the object of group g can be written."""

    first_chunk: int
    parent: bytes
    digest_bytes: int
    digests: bytes
    wanted: bytes


class Reserve(Message, frozen=True):
    epoch: int
    chains: tuple[Chain, ...]


class Reserved(Message, frozen=True):
    """`outcomes` has one byte (core.types.Outcome) per wanted object, chains in order, chunk by chunk, object
    groups ascending. Granted objects, in that order, have `extent_counts[i]` extents in `extents`, and are
    object 0, 1, … of the reservation. `reservation` is 0 when nothing was granted."""

    reservation: int
    outcomes: bytes
    extents: bytes
    extent_counts: bytes


class Commit(Message, frozen=True):
    """One-way: every rank has reported. `written[i]` is 1 when object i is complete; the others are aborted."""

    reservation: int
    written: bytes


# Operators.


class Clear(Message, frozen=True):
    """Forget objects. For an operator `model` names one model, empty means all. An engine leaves its namespace for
    one of its own, named by `weights` as in Attach; what it leaves is forgotten unless another engine uses it."""

    model: str = ""
    weights: str = ""


class Cleared(Message, frozen=True):
    objects: int


class Status(Message, frozen=True):
    pass


class StatusReport(Message, frozen=True):
    report: dict[str, Any]  # Any: a JSON object for people and scripts, not read by our own code


class Failed(Message, frozen=True):
    """The request could not be served; `reason` says why, and the session goes on unless it is closed."""

    reason: str


Request = Hello | Declare | Attach | Mapped | Detach | Lookup | Release | Reserve | Commit | Clear | Status
Reply = Welcome | Attached | Attaching | Refusal | Hit | Miss | NotReady | Reserved | Cleared | StatusReport | Failed
