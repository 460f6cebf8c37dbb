"""Config-only descriptions of public models: what the engine needs to lay out a cache, and no weights.

Each file under ``configs/`` holds the facts of one model's ``config.json``. Nothing here imports torch or
vLLM, so listing and writing a model takes milliseconds. `checkpoint` and `deepseek_v41` add random weights.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

__all__ = ["ZooModel", "describe", "max_positions", "names", "new_directory", "resolve", "write"]

_CONFIGS = files(__name__) / "configs"


@dataclass(frozen=True)
class ZooModel:
    """One bundled model."""

    name: str
    family: str
    """The kind of cache it is bundled for: dense, sliding-window, latent, mamba-hybrid …"""
    summary: str
    """One sentence: what cache it has."""
    config: Mapping[str, Any]
    """The content of its ``config.json``."""
    files: Mapping[str, Any]
    """Further JSON files of the model directory, by file name."""

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object (public interface of ``kvproof zoo show``)."""
        return {
            "name": self.name,
            "family": self.family,
            "summary": self.summary,
            "config": dict(self.config),
            "files": dict(self.files),
        }


def names() -> list[str]:
    """Every bundled model's name, sorted."""
    found = (file.name for file in _CONFIGS.iterdir())
    return sorted(name.removesuffix(".json") for name in found if name.endswith(".json"))


def describe(name: str) -> ZooModel:
    """The bundled model ``name``; ValueError, with the close matches, where there is none."""
    # Compared with the list rather than opened: a name such as "../x" must never become a path.
    if name not in names():
        raise ValueError(f"model {name!r} is not bundled; {_suggestion(name)}")
    raw = json.loads((_CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return ZooModel(raw["name"], raw["family"], raw["summary"], raw["config"], raw.get("files", {}))


def write(name: str, directory: Path | str) -> Path:
    """Write the bundled model ``name`` as a model directory and return its path.

    ``directory`` is made if absent. ValueError, before anything is written, for an unknown name and for a
    directory that is a file, not empty, or not writable.
    """
    model = describe(name)
    target = new_directory(directory)
    try:
        return _store(model, target)
    except OSError as error:
        raise ValueError(f"directory {str(target)!r} cannot be written: {error.strerror}") from None


def new_directory(directory: Path | str) -> Path:
    """``directory`` as a path, which is not made here; ValueError unless it is absent or an empty directory."""
    target = Path(directory)
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ValueError(f"directory {str(target)!r} is not an empty directory; name a new one")
    except OSError as error:
        raise ValueError(f"directory {str(target)!r} cannot be written: {error.strerror}") from None
    return target


def resolve(model: str, workdir: Path) -> Path:
    """The model directory that ``model`` names; it holds a ``config.json``.

    An existing directory is used as it is and wins over a bundled name, as it does for vLLM. A bundled model
    is written to ``workdir / model``, over whatever an earlier call left there. ValueError, in one line: an
    unknown name, or a directory whose ``config.json`` is missing, not a JSON object, or names no model.
    """
    # os.path: unlike Path.is_dir it answers False for a name too long to be a path, and "" is not ".".
    if os.path.isdir(model):
        _check_config(Path(model) / "config.json")
        return Path(model)
    if os.path.exists(model):
        raise ValueError(f"model {model!r} is a file; name its directory, which must hold a config.json")
    if model not in names():
        raise ValueError(f"model {model!r} is neither a directory nor bundled; {_suggestion(model)}")
    try:
        return _store(describe(model), workdir / model)
    except OSError as error:
        raise ValueError(f"directory {str(workdir)!r} cannot be written: {error.strerror}") from None


def _store(model: ZooModel, target: Path) -> Path:
    target.mkdir(parents=True, exist_ok=True)
    for file_name, content in {"config.json": model.config, **model.files}.items():
        (target / file_name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return target


def _suggestion(name: str) -> str:
    close = difflib.get_close_matches(name.lower(), names(), n=3, cutoff=0.5)
    return f"did you mean {', '.join(close)}?" if close else f"bundled: {', '.join(names())}"


def _check_config(path: Path) -> None:
    """Raise ValueError unless ``path`` holds a JSON object that says which model it describes."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"model {str(path.parent)!r} has no config.json") from None
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is not JSON: {error}") from None
    problem = _config_problem(config)
    if problem:
        raise ValueError(f"{str(path)!r}: {problem}")


def _config_problem(config: Any) -> str | None:
    """What keeps a parsed ``config.json`` from describing a model, or None."""
    if not isinstance(config, dict):
        return f"a JSON {type(config).__name__}, must be an object"
    model_type, architectures = config.get("model_type"), config.get("architectures")
    if not (isinstance(model_type, str) and model_type):
        return f"model_type is {model_type!r}, must be a non-empty string"
    listed = isinstance(architectures, list) and all(isinstance(entry, str) for entry in architectures)
    if not (listed and architectures):
        return f"architectures is {architectures!r}, must be a non-empty list of strings"
    return None


def max_positions(directory: Path) -> int:
    """``max_position_embeddings`` of a resolved model directory in tokens, 0 where its config names none."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and isinstance(part.get("max_position_embeddings"), int):
            return int(part["max_position_embeddings"])
    return 0
