"""Where every KV byte lives. Pure data and numpy; imports nothing of vLLM or torch."""

from kvproof.layout.model import Axis, Field, Group, Layout, Resource, Storage

__all__ = ["Axis", "Field", "Group", "Layout", "Resource", "Storage"]
