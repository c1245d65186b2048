import struct
from contextlib import suppress
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.core.types import Kind
from kvmosaic.errors import LocalProtocolError, RemoteProtocolError
from kvmosaic.layout.groups import Declaration, Geometry, Group, ObjectGroup, Shard
from kvmosaic.protocol.codec import encode, reply_decoder, request_decoder
from kvmosaic.protocol.messages import (
    MAX_FRAME_BYTES,
    Attached,
    Attaching,
    Chain,
    Clear,
    Commit,
    Declare,
    Hello,
    Hit,
    Lookup,
    Message,
    Release,
    Reply,
    Request,
    Reserve,
    Status,
    StatusReport,
    Welcome,
)

u32 = st.integers(0, 2**32 - 1)
ids = st.integers(0, 2**63 - 1)
digests = st.binary(max_size=96)
requests = st.one_of(
    st.builds(Hello, ids, u32, st.sampled_from(["worker", "scheduler", "operator"]), st.text()),
    st.builds(Lookup, ids, u32, st.text(), u32, u32, digests),
    st.builds(Release, ids, st.text()),
    st.builds(
        Reserve, ids, u32, st.lists(st.builds(Chain, u32, digests, u32, digests, digests), max_size=3).map(tuple)
    ),
    st.builds(Commit, ids, ids, st.binary(max_size=9)),
    st.builds(Clear, ids, st.text()),
    st.builds(Status, ids),
)

GROUP = Group(Kind.WINDOW, 16, 127, draft=True)
DECLARATION = Declaration(1, 2, "m", (GROUP,), (Shard(4096, 0),), {"dtype": "bf16"}, "p", 8192, 16)
GEOMETRY = Geometry(
    "m", b"n" * 16, 256, (GROUP,), (ObjectGroup(Kind.FULL, None, 0, (0,), (16,), 65536, ((0,),), ((True,),)),), 2, 16
)


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


@given(st.lists(requests, max_size=4), st.data())
def test_messages_arrive_whole_however_the_stream_is_cut(messages: list[Request], data: st.DataObject) -> None:
    stream = b"".join(map(encode, messages))
    decoder = request_decoder()
    received = []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        received += decoder.feed(stream[:size])
        decoder.check()
        stream = stream[size:]
    assert received == messages
    assert decoder.pending_bytes == 0


def test_byte_by_byte_each_message_comes_with_its_last_byte() -> None:
    messages: list[Request] = [Hello(1, 1, "worker", "e"), Declare(2, DECLARATION), Status(3)]
    decoder = request_decoder()
    arrived = {}
    stream = b"".join(map(encode, messages))
    for position in range(len(stream)):
        for message in decoder.feed(stream[position : position + 1]):
            arrived[position + 1] = message
    ends = [len(b"".join(map(encode, messages[: n + 1]))) for n in range(3)]
    assert arrived == dict(zip(ends, messages, strict=True))


def test_what_is_left_in_an_iterator_comes_out_of_the_next() -> None:
    decoder = request_decoder()
    assert next(decoder.feed(encode(Status(1)) + encode(Status(2)))) == Status(1)
    assert list(decoder.feed(encode(Status(3)))) == [Status(2), Status(3)]


def test_geometry_travels_unchanged() -> None:
    attached = Attached(5, "boot", 7, 1 << 40, GEOMETRY)
    assert list(reply_decoder().feed(encode(attached))) == [attached]


@given(st.binary(max_size=200))
def test_foreign_bytes_give_a_protocol_error_or_wait_for_more(noise: bytes) -> None:
    decoder = request_decoder()
    try:
        for message in decoder.feed(noise):
            assert isinstance(message, Message)
    except RemoteProtocolError:
        return
    decoder.check()


@given(st.binary(max_size=64))
def test_a_foreign_body_gives_a_protocol_error(body: bytes) -> None:
    for decoder in (request_decoder(), reply_decoder()):
        with suppress(RemoteProtocolError):
            assert len(list(decoder.feed(frame(body)))) == 1


@given(requests, st.data())
def test_a_flipped_byte_never_does_more_than_change_or_end_the_message(request: Request, data: st.DataObject) -> None:
    damaged = bytearray(encode(request))
    position = data.draw(st.integers(4, len(damaged) - 1))
    damaged[position] ^= data.draw(st.integers(1, 255))
    try:
        (message,) = request_decoder().feed(damaged)
    except RemoteProtocolError:
        return
    assert isinstance(message, get_args(Request))


def test_an_oversize_frame_is_refused_at_its_header() -> None:
    with pytest.raises(RemoteProtocolError, match=str(MAX_FRAME_BYTES)):
        list(request_decoder().feed(struct.pack("<I", MAX_FRAME_BYTES + 1)))
    assert list(request_decoder().feed(struct.pack("<I", MAX_FRAME_BYTES))) == []


def test_http_is_no_frame() -> None:
    with pytest.raises(RemoteProtocolError, match="announced"):
        list(request_decoder().feed(b"GET / HTTP/1.1\r\n\r\n"))


def test_messages_before_a_bad_frame_are_still_given_out() -> None:
    messages = request_decoder().feed(encode(Status(1)) + frame(b"\xc1"))
    assert next(messages) == Status(1)
    with pytest.raises(RemoteProtocolError):
        next(messages)


def test_each_side_reads_only_what_is_meant_for_it() -> None:
    with pytest.raises(RemoteProtocolError):
        list(request_decoder().feed(encode(Welcome(1, "boot"))))
    with pytest.raises(RemoteProtocolError):
        list(reply_decoder().feed(encode(Status(1))))


def test_a_nesting_bomb_is_a_protocol_error() -> None:
    bomb = msgspec.msgpack.encode(["StatusReport", 1])[:-1] + b"\x01\x81\xa1x" + b"\x91" * 100_000 + b"\xc0"
    bomb = b"\x93" + bomb[1:]
    with pytest.raises(RemoteProtocolError, match="cannot be read"):
        list(reply_decoder().feed(frame(bomb)))


def test_text_that_is_no_text_is_a_protocol_error() -> None:
    with pytest.raises(RemoteProtocolError):
        list(request_decoder().feed(encode(Release(0, "abc")).replace(b"abc", b"\xff\xfe\xfd")))


def test_fields_of_a_later_version_are_ignored() -> None:
    body = msgspec.msgpack.encode(["Hello", 1, 99, "worker", "e", "a field of protocol 99"])
    assert list(request_decoder().feed(frame(body))) == [Hello(1, 99, "worker", "e")]


def test_what_cannot_travel_is_our_own_fault() -> None:
    with pytest.raises(LocalProtocolError, match="Lookup takes"):
        encode(Lookup(1, 1, "r", 0, 32, bytes(MAX_FRAME_BYTES)))
    with pytest.raises(LocalProtocolError, match="Commit cannot be encoded"):
        encode(Commit(0, 1 << 70, b""))
    with pytest.raises(LocalProtocolError, match="StatusReport cannot be encoded"):
        encode(StatusReport(1, {"x": object()}))


def test_the_prompts_arrays_travel_as_they_are() -> None:
    """Their size on the wire is their size in memory, so a long prompt costs nothing per chunk."""
    packed = bytes(range(256)) * 1024
    assert len(encode(Lookup(1, 1, "r", 0, 32, packed))) < len(packed) + 40
    hit = Hit(1, 8192, 8192, (0,), (packed,), (b"\1\0\0\0" * 8192,))
    (read,) = reply_decoder().feed(encode(hit))
    assert read == hit


def test_every_message_of_both_sides_has_its_own_tag() -> None:
    tags = [kind.__struct_config__.tag for kind in (*get_args(Request), *get_args(Reply))]
    assert len(set(tags)) == len(tags)
    assert Attaching.__struct_config__.tag in tags
