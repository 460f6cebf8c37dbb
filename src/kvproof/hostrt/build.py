"""Builds a stand-in for the binaries installed here: our C sources, and a loud stub for every symbol left over."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from kvproof.hostrt import elf
from kvproof.hostrt.libraries import Library

SOURCES = Path(__file__).parent
FLAGS = ("-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", "-std=gnu11")


class BuildError(ValueError):
    """A stand-in could not be built: no compiler, or the compiler refused. One line; refused like other input."""


def user_cache(*parts: str) -> Path:
    """A folder of kvproof's own in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "kvproof", *parts)


def cache_directory() -> Path:
    """Where built libraries are kept, one folder per content."""
    return user_cache("hostrt")


def users(roots: Iterable[Path]) -> list[Path]:
    """Shared objects under ``roots`` (files count as themselves), sorted."""
    found: set[Path] = set()
    for root in roots:
        found |= {root} if root.is_file() else {p for p in root.rglob("*.so*") if p.is_file() and not p.is_symlink()}
    return sorted(found)


def wanted(library: Library, binaries: Iterable[Path]) -> frozenset[str]:
    """The names of ``library`` that ``binaries`` leave undefined."""
    return frozenset(s for path in binaries for s in elf.imports(path).symbols if library.owns(s))


def build(library: Library, binaries: Iterable[Path]) -> Path:
    """The shared object that stands in for ``library`` for ``binaries``; built once per content. BuildError."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise BuildError("no C compiler (cc, gcc) on PATH; on Debian: apt-get install gcc libc6-dev")
    symbols = wanted(library, binaries)
    sources = [SOURCES / name for name in library.sources]
    target = cache_directory() / _key(library, symbols, sources) / library.soname
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    needs = [str(build(need, binaries)) for need in library.needs]
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        work = Path(directory)
        objects = []
        for source in sources:
            objects.append(work / f"{source.stem}.o")
            _run(compiler, *FLAGS, "-c", str(source), "-o", str(objects[-1]))
        done = frozenset().union(*(elf.definitions(o) for o in objects))
        stubs = work / "stubs.c"
        stubs.write_text(_stubs(library, symbols - done))
        versions = work / "versions.map"
        versions.write_text(_versions(library, symbols | done))
        built = work / library.soname
        _run(
            compiler, *FLAGS, f"-I{SOURCES}", "-shared", f"-Wl,-soname,{library.soname}",
            f"-Wl,--version-script={versions}", str(stubs), *map(str, objects), "-o", str(built),
            "-Wl,--no-as-needed", *needs, "-lpthread", "-ldl",
        )  # fmt: skip
        built.replace(target)
    return target


def directory(built: Iterable[Path]) -> Path:
    """One folder that holds links to all libraries ``built``, for LD_LIBRARY_PATH."""
    paths = sorted(built)
    key = hashlib.sha256("\n".join(map(str, paths)).encode()).hexdigest()[:16]
    folder = cache_directory() / f"set-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    for path in paths:
        link = folder / path.name
        if not link.exists():
            link.unlink(missing_ok=True)
            link.symlink_to(path)
    return folder


def _key(library: Library, symbols: frozenset[str], sources: list[Path]) -> str:
    digest = hashlib.sha256(repr((library, sorted(symbols), FLAGS)).encode())
    for path in [*sorted(SOURCES.glob("*.h")), *sources]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _stubs(library: Library, symbols: frozenset[str]) -> str:
    lines = [f'KVPROOF_STUB("{library.soname}", {symbol})' for symbol in sorted(symbols)]
    return '#include "hostrt.h"\n' + "\n".join(lines) + "\n"


def _versions(library: Library, symbols: frozenset[str]) -> str:
    """A linker version script: exported are the names of the library, under its version node if it has one."""
    names = "".join(f" {symbol};" for symbol in sorted(symbols) if library.owns(symbol))
    exported = f"global:{names} " if names else ""
    return f"{library.version} {{ {exported}local: *; }};\n"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:400])
        raise BuildError(f"{command[0]} ended with exit code {done.returncode}: {first}")
