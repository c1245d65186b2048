"""The client side of the protocol: what engines and commands use to talk to a server."""

from kvmosaic.client.connection import Connection
from kvmosaic.client.scheduler_client import SchedulerClient
from kvmosaic.client.session import Attachment, SchedulerSession, State, WorkerSession

__all__ = ["Attachment", "Connection", "SchedulerClient", "SchedulerSession", "State", "WorkerSession"]
