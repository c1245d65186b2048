"""Builders for the server's tests: processes that can die, declarations, and a client joined to a Service."""

from __future__ import annotations

import os
from functools import partial
from itertools import count

from kvmosaic.cache.cache import Cache
from kvmosaic.core.types import BootId, Kind
from kvmosaic.layout.groups import Declaration, Group, Shard
from kvmosaic.layout.objects import compose
from kvmosaic.memory.extents import ExtentPool
from kvmosaic.protocol.codec import encode, reply_decoder, request_decoder
from kvmosaic.protocol.messages import (
    PROTOCOL,
    Attach,
    Attached,
    Declare,
    Hello,
    Mapped,
    Reply,
    Request,
    Role,
)
from kvmosaic.server.engines import Session
from kvmosaic.server.peers import Process
from kvmosaic.server.service import Service

MIB = 1 << 20
BOOT_ID = BootId("boot")
_pids = count(100)


class MortalProcess(Process):
    """A process whose pidfd is an eventfd, so that a test can end its life."""

    def __init__(self) -> None:
        super().__init__(next(_pids), os.getuid(), os.eventfd(0, os.EFD_CLOEXEC))

    def die(self) -> None:
        assert self.pidfd is not None
        os.eventfd_write(self.pidfd, 1)

    def __del__(self) -> None:
        if self.pidfd is not None:
            os.close(self.pidfd)


def declaration(
    rank: int = 0, world: int = 1, model: str = "model", block_tokens: int = 16, pages: str = "pages"
) -> Declaration:
    """One full group whose block has 64 KiB on each rank: an object of 256 tokens has 1 MiB a rank."""
    return Declaration(
        rank=rank,
        world=world,
        model=model,
        groups=(Group(Kind.FULL, block_tokens),),
        shards=(Shard(64 << 10, rank),),
        identity={"dtype": "bfloat16", "model": model},
        pages=pages,
        max_num_batched_tokens=8192,
        hash_block_tokens=block_tokens,
    )


class Clock:
    """Time that only a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_service(capacity_bytes: int = 64 * MIB, chunk_tokens: int | None = None) -> Service:
    """A service whose whole arena may be used."""
    pool = ExtentPool(capacity_bytes)
    pool.grow(capacity_bytes)
    composer = partial(compose, chunk_tokens=chunk_tokens, separate=True)
    return Service(Cache(pool), pool, composer, BOOT_ID, Clock())


class Client:
    """One session joined to a service through the codec, without a socket."""

    def __init__(self, service: Service, process: Process | None = None) -> None:
        self.service = service
        self.process = process or MortalProcess()
        self.session = Session(self.process)
        self._requests = request_decoder()
        self._replies = reply_decoder()

    def ask(self, request: Request) -> Reply:
        """The reply to a request, which must come."""
        (received,) = self._requests.feed(encode(request))
        reply = self.service.handle(self.session, received)
        assert reply is not None, f"{request} got no reply"
        assert reply.id == request.id
        self.service.check()
        (answer,) = self._replies.feed(encode(reply))
        return answer

    def post(self, request: Request) -> None:
        """Send a one-way message."""
        (received,) = self._requests.feed(encode(request))
        assert self.service.handle(self.session, received) is None
        self.service.check()

    def hello(self, role: Role, engine: str = "engine") -> Reply:
        return self.ask(Hello(1, PROTOCOL, role, engine))

    def attach(self, weights: str = "") -> Attached:
        """Attach, which must succeed at once."""
        reply = self.ask(Attach(2, weights))
        assert isinstance(reply, Attached), reply
        return reply

    def leave(self) -> None:
        """The session ends; the process lives."""
        self.service.lost(self.session)
        self.service.check()


def worker(service: Service, declared: Declaration, engine: str = "engine", process: Process | None = None) -> Client:
    """A worker that has declared its rank."""
    client = Client(service, process)
    client.hello("worker", engine)
    client.ask(Declare(2, declared))
    return client


def mapped_worker(
    service: Service, declared: Declaration | None = None, engine: str = "engine", process: Process | None = None
) -> Client:
    """A worker of a world of one that has mapped the arena."""
    client = worker(service, declared or declaration(), engine, process)
    client.post(Mapped(0, client.attach().epoch))
    return client


def scheduler(service: Service, engine: str = "engine", process: Process | None = None) -> Client:
    """A scheduler that has introduced itself."""
    client = Client(service, process)
    client.hello("scheduler", engine)
    return client
