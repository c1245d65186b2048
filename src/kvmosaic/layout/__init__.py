"""From the groups an engine declares to object groups, the bytes of an object, and the fold rule. Pure."""

from kvmosaic.layout.fold import fold, needs
from kvmosaic.layout.groups import Declaration, Geometry, Group, ObjectGroup, Shard
from kvmosaic.layout.objects import compose

__all__ = ["Declaration", "Geometry", "Group", "ObjectGroup", "Shard", "compose", "fold", "needs"]
