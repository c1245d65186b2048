"""Every exception of kvmosaic.

    MosaicError
    ├── SettingsError        a flag, key or file the user gave cannot be honoured
    ├── Refused              this model, layout or machine is not served, and why
    ├── ProtocolError        a frame or message breaks the protocol
    │   ├── LocalProtocolError    our side built it
    │   └── RemoteProtocolError   the peer sent it
    ├── ServerLost           the connection to the server is gone
    └── DeadlinePassed       the server did not answer in time; the connection stays usable

Expected outcomes (a miss, no room, not ready) are values, never exceptions.
"""


class MosaicError(Exception):
    """Base of all errors raised on purpose by kvmosaic."""


class SettingsError(MosaicError):
    """A setting is wrong; the message names it, its value and the fix."""


class Refused(MosaicError):
    """A model, layout or machine is not served; the message names the value, the limit and the fix."""


class ProtocolError(MosaicError):
    """A frame or a message breaks the protocol."""


class LocalProtocolError(ProtocolError):
    """Our side tried to send something the protocol does not allow."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something the protocol does not allow."""


class ServerLost(MosaicError):
    """The connection to the server is gone."""


class DeadlinePassed(MosaicError):
    """The server did not answer before the deadline; a late reply will be dropped."""
