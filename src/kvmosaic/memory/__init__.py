"""The arena's bytes: which are free, and how they are mapped."""

from kvmosaic.memory.extents import ExtentPool

__all__ = ["ExtentPool"]
