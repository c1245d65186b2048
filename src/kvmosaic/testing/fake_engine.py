"""An engine without a model: it stores and loads pages whose bytes follow from the digest they stand for.

`python -m kvmosaic.testing.fake_engine --socket S --engine K` is one process of it, with any ranks and perhaps the
scheduler half. It obeys JSON lines on stdin, one answer line each, so that a test can stop, kill or fork it at any
step of the protocol. Plans are JSON too, so they travel between the processes of one engine. Everything goes
through kvmosaic.client, as in a real engine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmosaic.client import Attachment, SchedulerClient, SchedulerSession, WorkerSession
from kvmosaic.core.types import BootId, EngineKey, Kind, Outcome, ReservationId
from kvmosaic.layout.groups import Declaration, Group, Shard
from kvmosaic.protocol.messages import Chain, Hit

Bytes = npt.NDArray[np.uint8]
Plan = dict[str, Any]  # Any: a JSON object; FakeScheduler makes them
Command = Callable[..., Any]  # Any: arguments and answers are JSON values

ATTACH_TIMEOUT_S = 10.0

MODELS: dict[str, tuple[Group, ...]] = {
    "full": (Group(Kind.FULL, 16),),
    "window": (Group(Kind.FULL, 16), Group(Kind.WINDOW, 16, memory_tokens=1000)),
    "state": (Group(Kind.FULL, 16), Group(Kind.STATE, 256)),
}


def declare(model: str, rank: int, world: int, block_bytes: int) -> Declaration:
    """What a rank of a fake engine declares; its groups' blocks differ in size."""
    groups = MODELS[model]
    shards = tuple(Shard(block_bytes + 512 * number, rank) for number in range(len(groups)))
    identity = {"block_bytes": str(block_bytes)}
    return Declaration(rank, world, f"fake-{model}", groups, shards, identity, f"pages of rank {rank}", 8192, 16)


def digest_of(seed: int, chunk: int) -> bytes:
    """The digest of one chunk of the prompt that has this seed."""
    return hashlib.sha256(f"{seed}:{chunk}".encode()).digest()


def compute_pages(digest: bytes, group: int, rank: int, shape: tuple[int, int]) -> Bytes:
    """What the pages of one group hold on one rank for a chunk: [blocks, bytes of a block]."""
    seed = int.from_bytes(hashlib.sha256(digest + bytes((group, rank))).digest()[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


class FakeRank:
    """One rank: the copies between its pages and the arena, and the worker's session."""

    def __init__(self, path: Path, engine: EngineKey, declared: Declaration) -> None:
        self.rank = declared.rank
        self._declared = declared
        self._changed = threading.Condition()
        self._num_copies = 0
        self._release_copy = threading.Event()
        self.session = WorkerSession(path, engine, declared, self._end_copies)
        self.session.start()

    def write(self, plan: Plan) -> int:
        """Compute pages and copy them into the arena. How many objects were written: all, or none if too late."""
        with self._copying(plan) as attachment:
            if attachment is None:
                return 0
            for digest, group, pages, target in self._pieces(attachment, plan):
                computed = compute_pages(digest, group, self.rank, pages.shape)
                _copy_out(computed.reshape(-1), target)
            return len(plan["objects"])

    def count_wrong(self, plan: Plan) -> int:
        """Copy pages out of the arena. How many pieces of objects differ from what was computed for them."""
        num_wrong = 0
        with self._copying(plan) as attachment:
            if attachment is None:
                return len(plan["objects"])
            for digest, group, pages, source in self._pieces(attachment, plan):
                _copy_in(source, pages.reshape(-1))
                num_wrong += not np.array_equal(pages, compute_pages(digest, group, self.rank, pages.shape))
        return num_wrong

    def hold_copy(self, plan: Plan) -> None:
        """Begin a copy that runs until release_copy(): it goes on writing into the plan's extents."""
        running = threading.Event()
        self._release_copy.clear()

        def run() -> None:
            with self._copying(plan) as attachment:
                while attachment is not None and not self._release_copy.wait(0.001):
                    for _, _, _, target in self._pieces(attachment, plan):
                        for piece in target:
                            piece[:] = 0xEE
                    running.set()

        threading.Thread(target=run, daemon=True).start()
        assert running.wait(ATTACH_TIMEOUT_S)

    def release_copy(self) -> None:
        """Let the held copy end."""
        self._release_copy.set()

    def num_copies(self) -> int:
        """How many copies run."""
        with self._changed:
            return self._num_copies

    @contextmanager
    def _copying(self, plan: Plan) -> Iterator[Attachment | None]:
        """Counts as running before it reads the attachment, so _end_copies cannot miss it."""
        with self._changed:
            self._num_copies += 1
        try:
            attachment = self.session.attachment
            if attachment is not None and (attachment.boot_id != plan["boot_id"] or plan["epoch"] < attachment.epoch):
                attachment = None
            yield attachment
        finally:
            with self._changed:
                self._num_copies -= 1
                self._changed.notify_all()

    def _end_copies(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._num_copies == 0)

    def _pieces(self, attachment: Attachment, plan: Plan) -> Iterator[tuple[bytes, int, Bytes, list[Bytes]]]:
        """Per object and group of this rank: digest, group, empty pages, and where the bytes lie in the arena."""
        assert attachment.arena is not None
        for planned in plan["objects"]:
            objects = attachment.geometry.object_groups[planned["object_group"]]
            whole = [np.asarray(view) for view in attachment.arena.view(bytes.fromhex(planned["extents"]))]
            for position, group in enumerate(objects.groups):
                shape = (objects.kept_blocks[position], self._declared.shards[group].block_bytes)
                offset = objects.offsets[self.rank][position]
                pages = np.zeros(shape, dtype=np.uint8)
                yield bytes.fromhex(planned["digest"]), group, pages, _slice(whole, offset, pages.nbytes)


class FakeScheduler:
    """The scheduler half. Makes plans: boot id, epoch, and per object its digest, object group and extents."""

    def __init__(self, path: Path, engine: EngineKey) -> None:
        self.session = SchedulerSession(path, engine)
        self.client = SchedulerClient(self.session)
        self.session.start()

    def reserve(self, seed: int, first: int, count: int) -> Plan | None:
        """A plan to store chunks [first, first + count), with the outcomes; None when nobody answered."""
        attachment = self.client.begin_step()
        if attachment is None:
            return None
        num_groups = len(attachment.geometry.object_groups)
        digests = [digest_of(seed, chunk) for chunk in range(first, first + count)]
        parent = digest_of(seed, first - 1) if first else b""
        wanted = ((1 << num_groups) - 1).to_bytes(4, "little") * count
        reserved = self.client.reserve([Chain(first, parent, 32, b"".join(digests), wanted)])
        if reserved is None:
            return None
        asked = [(digest, group) for digest in digests for group in range(num_groups)]
        granted = [one for one, outcome in zip(asked, reserved.outcomes, strict=True) if outcome == Outcome.GRANTED]
        extents = _split(reserved.extents, reserved.extent_counts)
        objects = [
            {"digest": digest.hex(), "object_group": group, "extents": extent}
            for (digest, group), extent in zip(granted, extents, strict=True)
        ]
        return _plan(attachment, objects) | {
            "reservation": reserved.reservation,
            "outcomes": [Outcome(outcome).name for outcome in reserved.outcomes],
        }

    def commit(self, plan: Plan, written: bool) -> None:
        """End the plan's reservation."""
        marks = bytes([written]) * len(plan["objects"])
        self.client.commit(BootId(plan["boot_id"]), ReservationId(plan["reservation"]), marks)

    def lookup(self, request: str, seed: int, count: int, first: int) -> Plan | None:
        """A plan to load what is there of chunks [first, first + count); boundary `first` when nothing is."""
        attachment = self.client.begin_step()
        if attachment is None:
            return None
        digests = [digest_of(seed, chunk) for chunk in range(first, first + count)]
        answer = self.client.lookup(request, first, 32, b"".join(digests))
        if answer is None:
            return None
        if not isinstance(answer, Hit):
            return _plan(attachment, []) | {"boundary": first}
        objects = []
        for group, begin in enumerate(answer.first_chunks):
            chunks = range(begin, answer.boundary)
            extents = _split(answer.extents[group], answer.extent_counts[group])
            objects += [
                {"digest": digest_of(seed, chunk).hex(), "object_group": group, "extents": extent}
                for chunk, extent in zip(chunks, extents, strict=True)
            ]
        return _plan(attachment, objects) | {"boundary": answer.boundary}


class FakeEngine:
    """What one process of the engine does: any ranks, and the scheduler half or none."""

    def __init__(self, scheduler: FakeScheduler | None, ranks: Sequence[FakeRank]) -> None:
        self._scheduler = scheduler
        self._ranks = tuple(ranks)
        self._sessions = [rank.session for rank in ranks] + ([scheduler.session] if scheduler else [])

    def commands(self) -> dict[str, Command]:
        """What can be asked of it, by name."""
        ours: dict[str, Command] = {
            "wait_ready": self.wait_ready,
            "attachments": self.attachments,
            "write": self.write,
            "count_wrong": self.count_wrong,
            "hold_copy": lambda plan: self._ranks[0].hold_copy(plan),
            "release_copy": lambda: self._ranks[0].release_copy(),
            "copies": lambda: self._ranks[0].num_copies(),
            "shut_sockets": self.shut_sockets,
            "fork": fork,
            "close": self.close,
        }
        if self._scheduler is not None:
            ours |= {
                "reserve": self._scheduler.reserve,
                "commit": self._scheduler.commit,
                "lookup": self._scheduler.lookup,
                "release": self._scheduler.client.release,
                "clear": self._scheduler.client.clear,
                "store": self.store,
                "time_step": self.time_step,
                "counters": self.counters,
            }
        return ours

    def wait_ready(self, timeout_s: float = ATTACH_TIMEOUT_S) -> bool:
        """All halves in this process are attached."""
        return all(session.wait_ready(timeout_s) for session in self._sessions)

    def attachments(self) -> list[tuple[str, int] | None]:
        """Boot id and epoch of each rank, then of the scheduler."""
        attached = [session.attachment for session in self._sessions]
        return [(one.boot_id, one.epoch) if one is not None else None for one in attached]

    def store(self, seed: int, first: int, count: int) -> int:
        """Reserve, write and commit. How many objects were written."""
        assert self._scheduler is not None
        plan = self._scheduler.reserve(seed, first, count)
        if plan is None or not plan["objects"]:
            return 0
        num_written = self.write(plan)
        self._scheduler.commit(plan, written=num_written > 0)
        return num_written

    def write(self, plan: Plan) -> int:
        """What every rank here has written."""
        return min(rank.write(plan) for rank in self._ranks)

    def count_wrong(self, plan: Plan) -> int:
        """What the ranks here have found wrong."""
        return sum(rank.count_wrong(plan) for rank in self._ranks)

    def shut_sockets(self) -> None:
        """As a process may, and stay alive."""
        for session in self._sessions:
            if (attachment := session.attachment) is not None:
                attachment.connection.shutdown()

    def time_step(self, seed: int, num_requests: int) -> float:
        """How long one schedule() with that many lookups keeps the engine waiting, in seconds."""
        assert self._scheduler is not None
        began = time.monotonic()
        self._scheduler.client.begin_step()
        for number in range(num_requests):
            self._scheduler.client.lookup(f"timed {number}", 0, 32, digest_of(seed, 0))
        return time.monotonic() - began

    def counters(self) -> dict[str, float]:
        """The scheduler client's."""
        assert self._scheduler is not None
        counters = self._scheduler.client.counters
        return {name: getattr(counters, name) for name in counters.__slots__}

    def close(self) -> None:
        """An orderly end."""
        for session in self._sessions:
            session.close()


def fork(keep_sockets: bool) -> int:
    """Fork a child that only waits to be killed. It may hold our sockets, as a careless child would."""
    kept = [os.dup(fd) for fd in _socket_fds()] if keep_sockets else []
    pid = os.fork()
    if pid == 0:
        # Nobody may wait for the end of our pipes because of it.
        for fd in range(3):
            os.close(fd)
        while True:
            signal.pause()
    for fd in kept:
        os.close(fd)
    return pid


def main() -> None:
    """Obey the lines of stdin until it ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--engine", type=EngineKey, required=True)
    parser.add_argument("--model", choices=MODELS, default="full")
    parser.add_argument("--block-bytes", type=int, default=4096)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--ranks", default="0", help="comma separated, may be empty")
    parser.add_argument("--no-scheduler", action="store_true")
    options = parser.parse_args()
    numbers = [int(number) for number in options.ranks.split(",") if number]
    declared = [declare(options.model, number, options.world, options.block_bytes) for number in numbers]
    ranks = [FakeRank(options.socket, options.engine, declaration) for declaration in declared]
    scheduler = None if options.no_scheduler else FakeScheduler(options.socket, options.engine)
    commands = FakeEngine(scheduler, ranks).commands()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps(commands[name](**arguments)), flush=True)


def _plan(attachment: Attachment, objects: list[dict[str, object]]) -> Plan:
    return {"boot_id": attachment.boot_id, "epoch": attachment.epoch, "objects": objects}


def _split(extents: bytes, counts: bytes) -> list[str]:
    """The extents of each object, in hex."""
    lengths = 16 * np.frombuffer(counts, dtype="<u4").astype(int)
    ends = np.cumsum(lengths)
    return [extents[end - length : end].hex() for length, end in zip(lengths, ends, strict=True)]


def _slice(whole: list[Bytes], start: int, num_bytes: int) -> list[Bytes]:
    """Bytes [start, start + num_bytes) of an object that lies in several pieces."""
    found = []
    for piece in whole:
        begin, end = max(0, start), min(len(piece), start + num_bytes)
        if begin < end:
            found.append(piece[begin:end])
        start -= len(piece)
    return found


def _copy_out(source: Bytes, target: list[Bytes]) -> None:
    done = 0
    for piece in target:
        piece[:] = source[done : done + len(piece)]
        done += len(piece)


def _copy_in(source: list[Bytes], target: Bytes) -> None:
    done = 0
    for piece in source:
        target[done : done + len(piece)] = piece
        done += len(piece)


def _socket_fds() -> list[int]:
    names = {int(fd): os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
    return [fd for fd, name in names.items() if "socket:" in name]


if __name__ == "__main__":
    main()
