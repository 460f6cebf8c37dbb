"""What a shared object asks of others and offers to them, read off its dynamic section."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection


@dataclass(frozen=True)
class Imports:
    """``libraries`` are the sonames a binary needs, ``symbols`` the names it leaves undefined."""

    libraries: frozenset[str]
    symbols: frozenset[str]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    with path.open("rb") as stream:
        try:
            yield ELFFile(stream)
        except ELFError as error:
            raise ValueError(f"{path}: not an ELF file ({error})") from error


@cache
def imports(path: Path) -> Imports:
    """What the binary at ``path`` imports, read once per process. ValueError where it is no ELF file."""
    with _opened(path) as elf:
        dynamic = elf.get_section_by_name(".dynamic")
        table = elf.get_section_by_name(".dynsym")
        needed = (
            {tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"}
            if isinstance(dynamic, DynamicSection)
            else set()
        )
        symbols = (
            {s.name for s in table.iter_symbols() if s.name and s["st_shndx"] == "SHN_UNDEF"}
            if isinstance(table, SymbolTableSection)
            else set()
        )
        return Imports(frozenset(needed), frozenset(symbols))


def exports(path: Path) -> frozenset[str]:
    """Names the shared object at ``path`` defines for others."""
    with _opened(path) as elf:
        return _defined(elf.get_section_by_name(".dynsym"))


def definitions(path: Path) -> frozenset[str]:
    """Global names the object file at ``path`` defines."""
    with _opened(path) as elf:
        return _defined(elf.get_section_by_name(".symtab"))


def _defined(table: Any) -> frozenset[str]:
    if not isinstance(table, SymbolTableSection):
        return frozenset()
    return frozenset(
        s.name
        for s in table.iter_symbols()
        if s.name and s["st_shndx"] != "SHN_UNDEF" and s["st_info"]["bind"] in ("STB_GLOBAL", "STB_WEAK")
    )
