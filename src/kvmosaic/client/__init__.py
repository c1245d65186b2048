"""The client side of the protocol: what engines and commands use to talk to a server."""

from kvmosaic.client.connection import Connection
from kvmosaic.client.halves import SchedulerSession, WorkerSession
from kvmosaic.client.lifecycle import State
from kvmosaic.client.scheduler_client import Counters, SchedulerClient
from kvmosaic.client.session import Attachment

__all__ = [
    "Attachment",
    "Connection",
    "Counters",
    "SchedulerClient",
    "SchedulerSession",
    "State",
    "WorkerSession",
]
