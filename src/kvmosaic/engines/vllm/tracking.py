"""What the scheduler half remembers of one request: digests, frontier, states, lookup.

    tokens   0 ........ own hit ........ hit ........ planned ........ frontier ........ num_tokens
             engine's own      loaded by us    stored or dropped   to plan now      not computed or not hashed

Owns no lease and no block; runs on the engine's scheduler thread.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from kvmosaic.core.types import BootId
from kvmosaic.layout.groups import Geometry
from kvmosaic.protocol.messages import Hit


@dataclass(frozen=True, slots=True)
class Answer:
    """What a lookup from `first_chunk` on said; `hit` is None for a miss, and `boundary` then `first_chunk`."""

    first_chunk: int
    boundary: int
    full_chunks: int
    hit: Hit | None


class RequestState:
    """One request of the engine, for as long as the engine knows it."""

    __slots__ = (
        "_salt",
        "answer",
        "asked",
        "digests",
        "fresh",
        "geometry",
        "life",
        "no_load",
        "own_tokens",
        "planned",
        "request",
        "served",
        "step_ends",
        "trusted",
    )

    def __init__(self, request: Any, adapter: bytes = b"") -> None:  # Any: vLLM's Request
        """`adapter` is what adapters.Adapters says of the request's."""
        self.request = request
        self.geometry: Geometry | None = None
        self.life: tuple[BootId, int] | None = None
        self.own_tokens = 0
        self.digests: list[bytes] = []
        self.planned = 0
        self.step_ends: set[int] = set()
        self.fresh = True
        self.trusted = True
        self.answer: Answer | None = None
        self.asked = False
        self.no_load = False
        self.served = True
        self._salt = adapter

    def readmit(self, own_tokens: int) -> None:
        """The engine admits the request anew, with this much of its own: its block tables are new."""
        self.own_tokens = own_tokens
        self.trusted = True
        self.planned = 0
        self.step_ends.clear()
        self.fresh = True

    def adopt(self, life: tuple[BootId, int], geometry: Geometry) -> None:
        """Serve the request in this life of server and workers; a new one knows nothing of the old one's objects."""
        if self.life == life:
            return
        if self.geometry != geometry:
            self.geometry = geometry
            self.digests = []
        self.life = life
        self.answer = None
        self.planned = 0

    def distrust(self) -> None:
        """The cache was cleared, perhaps for new weights: what the request computed so far is not stored any more."""
        self.answer = None
        self.trusted = False

    def hashed_chunks(self) -> int:
        """Number of whole chunks the engine has hashed; brings `digests` up to date."""
        assert self.geometry is not None
        ratio = self.geometry.chunk_tokens // self.geometry.hash_block_tokens
        hashes = self.request.block_hashes
        available = len(hashes) // ratio
        known = min(len(self.digests), available)
        if known and self.digests[known - 1] != self._digest(hashes[known * ratio - 1]):
            known = 0  # the engine rewrote the request's tokens
        if known < len(self.digests):
            del self.digests[known:]
            self.planned = min(self.planned, known)
        self.digests.extend(self._digest(hashes[i * ratio - 1]) for i in range(known + 1, available + 1))
        return available

    def frontier_chunks(self, num_computed: int, num_drafts: int, num_unsettled: int) -> int:
        """Whole chunks whose tokens are computed, confirmed and hashed once this step has run.

        `num_computed` counts the tokens after the step, `num_drafts` those of them that may be rejected;
        the last `num_unsettled` known tokens may be computed again.
        """
        hashed = self.hashed_chunks()
        assert self.geometry is not None
        settled = min(num_computed - num_drafts, self.request.num_tokens - num_unsettled)
        return min(settled // self.geometry.chunk_tokens, hashed)

    def note_step(self, start: int, end: int) -> None:
        """The step computes tokens [start, end): a state stands at its end, and at the start of a new admission."""
        assert self.geometry is not None
        chunk_tokens = self.geometry.chunk_tokens
        if self.fresh and start and start % chunk_tokens == 0:
            self.step_ends.add(start)
        if end % chunk_tokens == 0:
            self.step_ends.add(end)
        self.fresh = False

    def mark_planned(self, chunks: int) -> None:
        """Chunks below this are stored, loaded or dropped."""
        self.planned = max(self.planned, chunks)
        assert self.geometry is not None
        done = self.planned * self.geometry.chunk_tokens
        self.step_ends = {end for end in self.step_ends if end > done}

    def _digest(self, block_hash: bytes) -> bytes:
        if not self._salt:
            return bytes(block_hash)
        return hashlib.sha256(block_hash + self._salt).digest()
