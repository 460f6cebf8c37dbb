"""Bytes that name their own origin, poison, and the ledger of what memory must hold. Pure numpy."""

from kvproof.bytecode.code import ByteCode, Decoded, Fill
from kvproof.bytecode.contents import Contents
from kvproof.bytecode.ledger import Ledger, Mismatch

__all__ = ["ByteCode", "Contents", "Decoded", "Fill", "Ledger", "Mismatch"]
