"""The evidence directory: what a run was asked, what it saw and what it concluded, one file each.

Files appear in the order in which the run learns them, ``case.json`` first, so the evidence of a run that died says
how far it came. Every file but the two that grow (transcript and log) is written whole or not at all.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from kvproof.findings.logs import normalise_log
from kvproof.findings.model import Report

CASE_SCHEMA = "kvproof.case/1"
CASE = "case.json"
LAYOUT = "layout.json"
TRANSCRIPT = "transcript.jsonl"
REPORT = "report.json"
FINDINGS = "findings.json"
COUNTERS = "counters.json"
JUNIT = "junit.xml"
HTML = "report.html"
LOG = "log.txt"
NORMALISED_LOG = "log.normalised.txt"
FAULTS = "faults.json"
"""Where a directory keeps the output of ``kvproof faults --json``; no run of ``check`` writes it."""
FILES = (CASE, LAYOUT, TRANSCRIPT, REPORT, FINDINGS, COUNTERS, JUNIT, HTML, LOG, NORMALISED_LOG)
"""Every file name kvproof writes into an evidence directory."""


def is_evidence(path: Path) -> bool:
    """True if ``path`` is a directory whose ``case.json`` carries our schema."""
    try:
        case = json.loads((path / CASE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(case, dict) and case.get("schema") == CASE_SCHEMA


class Evidence:
    """Writer of one evidence directory.

    The constructor only looks: it refuses a path that cannot become an evidence directory and leaves no trace, so
    bad input writes nothing. :meth:`write_case` begins the run: it creates the directory and takes an earlier
    evidence's files away; files that are not ours stay. Exactly one process calls it.

    Raises ValueError, one line naming path and reason.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        try:
            self._check()
        except OSError as error:
            raise ValueError(f"evidence directory {self.path}: {error.strerror or error}") from error

    def _check(self) -> None:
        if self.path.exists():
            if not self.path.is_dir():
                raise ValueError(f"evidence directory {self.path}: is not a directory")
            if any(self.path.iterdir()) and not is_evidence(self.path):
                raise ValueError(f"evidence directory {self.path}: is not empty and holds no kvproof evidence")
        parent = self.path
        while not parent.exists():
            parent = parent.parent
        # Only writing proves that one can write: permission bits say nothing to root or on a read-only mount.
        probe = parent / f".kvproof.{os.getpid()}"
        probe.touch(exist_ok=False)
        probe.unlink()

    @property
    def log_path(self) -> Path:
        """Where the child process writes its full log, after :meth:`write_case`."""
        return self.path / LOG

    def write_case(self, case: dict[str, Any]) -> None:
        """Begin the run: ``case.json``, everything that decides the run."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for name in FILES[1:]:
                (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            raise ValueError(f"evidence directory {self.path}: {error.strerror or error}") from error
        self._write_json(CASE, {"schema": CASE_SCHEMA} | case)

    def write_layout(self, layout: dict[str, Any]) -> None:
        """``layout.json`` from ``Layout.to_json()``."""
        self._write_json(LAYOUT, {"schema": "kvproof.layout/1"} | layout)

    def append_transcript(self, record: dict[str, Any]) -> None:
        """One more line of ``transcript.jsonl``, on disk when this returns to the caller."""
        line = json.dumps(record, default=_plain, separators=(",", ":"))
        with (self.path / TRANSCRIPT).open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")

    def write_report(self, report: Report) -> None:
        """Everything that follows from the finished report, and the normalised log as far as it is written."""
        # Imported here: template engine and XML cost more than the whole package, and only a finished run needs them.
        from kvproof.findings import html, junit

        self._write_json(FINDINGS, {"schema": "kvproof.findings/1", "findings": [f.to_json() for f in report.findings]})
        self._write_json(COUNTERS, {"schema": "kvproof.counters/1", "counters": report.counters})
        self._write_text(JUNIT, junit.render(report))
        self._write_text(HTML, html.render(report))
        self.write_normalised_log()
        # Last: a directory with report.json is complete.
        self._write_json(REPORT, report.to_json())

    def write_normalised_log(self) -> None:
        """``log.normalised.txt`` from ``log.txt``; call it again once the process that writes the log has ended."""
        if self.log_path.exists():
            log = self.log_path.read_text(encoding="utf-8", errors="replace")
            self._write_text(NORMALISED_LOG, normalise_log(log))

    def _write_json(self, name: str, data: dict[str, Any]) -> None:
        self._write_text(name, _dump(data))

    def _write_text(self, name: str, text: str) -> None:
        # Lone surrogates (undecodable file names) must not lose the report.
        data = text.encode("utf-8", errors="backslashreplace")
        temporary = self.path / f".{name}.{os.getpid()}"
        try:
            temporary.write_bytes(data)
            os.replace(temporary, self.path / name)
        finally:
            temporary.unlink(missing_ok=True)


def _dump(data: dict[str, Any]) -> str:
    """JSON with a line per key and per item of a top-level list: readable, diffable, and as fast as without lines."""

    def compact(value: Any) -> str:
        return json.dumps(value, default=_plain)

    def lines(value: Any) -> str:
        if isinstance(value, list | tuple) and value:
            return "[\n" + ",\n".join(map(compact, value)) + "\n]"
        return compact(value)

    return "{\n" + ",\n".join(f"{compact(key)}: {lines(value)}" for key, value in data.items()) + "\n}\n"


def _plain(value: Any) -> Any:
    """numpy scalars and arrays as Python values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no place in evidence")
