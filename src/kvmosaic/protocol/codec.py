"""Messages to frames and back: a little-endian u32 length, then one msgpack message. No I/O.

A Decoder knows only its side's union of messages, so a peer cannot send what is not meant for it. Frames of
any size up to the cap may arrive cut anywhere. After a RemoteProtocolError no next frame is known: close.
Called by the server loop and by the client's connection, each decoder by one thread at a time.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from kvmosaic.errors import LocalProtocolError, RemoteProtocolError
from kvmosaic.protocol.messages import MAX_FRAME_BYTES, Message, Reply, Request

M = TypeVar("M")

_LENGTH = struct.Struct("<I")
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """The frame of one message."""
    try:
        body = _ENCODER.encode(message)
    except (OverflowError, TypeError, msgspec.MsgspecError) as error:
        raise LocalProtocolError(f"{type(message).__name__} cannot be encoded: {error}") from error
    if len(body) > MAX_FRAME_BYTES:
        raise LocalProtocolError(
            f"{type(message).__name__} takes {len(body)} bytes; a frame holds at most {MAX_FRAME_BYTES}"
        )
    return _LENGTH.pack(len(body)) + body


class Decoder(Generic[M]):
    """Collects the bytes of one stream and gives out its messages in order."""

    def __init__(self, messages: Any) -> None:  # Any: a union of message types is not a type to mypy
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(messages)
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[M]:
        """Take the next bytes; the iterator yields every message that is now complete.

        What the caller leaves in the iterator comes first out of the next one. Raises RemoteProtocolError.
        """
        self._buffer += data
        return self._complete()

    @property
    def pending_bytes(self) -> int:
        """Bytes that wait for the rest of their frame."""
        return len(self._buffer)

    def check(self) -> None:
        """The buffer never holds more than one capped frame once its messages were taken."""
        assert self._body_bytes() is None or len(self._buffer) <= _LENGTH.size + MAX_FRAME_BYTES

    def _complete(self) -> Iterator[M]:
        while (body_bytes := self._body_bytes()) is not None:
            end = _LENGTH.size + body_bytes
            if len(self._buffer) < end:
                return
            # The views must be gone before the buffer may shrink, also when decoding fails.
            with memoryview(self._buffer) as whole, whole[_LENGTH.size : end] as body:
                message = self._decode(body)
            del self._buffer[:end]
            yield message

    def _body_bytes(self) -> int | None:
        """Length of the frame at the front, None while its header is incomplete."""
        if len(self._buffer) < _LENGTH.size:
            return None
        body_bytes: int = _LENGTH.unpack_from(self._buffer)[0]
        if body_bytes > MAX_FRAME_BYTES:
            raise RemoteProtocolError(
                f"the peer announced a frame of {body_bytes} bytes; at most {MAX_FRAME_BYTES} are allowed"
            )
        return body_bytes

    def _decode(self, body: memoryview) -> M:
        try:
            return self._decoder.decode(body)
        # A string that is not UTF-8 and a nesting bomb do not come as msgspec's own errors.
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RemoteProtocolError(f"the peer sent a message that cannot be read: {error}") from error


def request_decoder() -> Decoder[Request]:
    """For the server's end of a session."""
    return Decoder(Request)


def reply_decoder() -> Decoder[Reply]:
    """For the client's end of a session."""
    return Decoder(Reply)
