"""The case: everything that decides a run, frozen, and written into the evidence before anything else."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

MODES = ("layout", "bulk", "layerwise", "async", "engine")
BYTE_MODES = ("bulk", "layerwise", "async")
"""Modes in which loads are judged byte by byte."""
RUNNERS = ("v1", "v2")
DEFAULT_TOKENS = 1024
DEFAULT_MAX_MODEL_LEN = 1536
"""Tokens; fits every scenario at DEFAULT_TOKENS and blocks of up to 256 tokens."""
HYBRID_MAX_MODEL_LEN = 4096
"""Tokens; hybrid models have blocks of several hundred tokens."""


@dataclass(frozen=True)
class ConnectorSpec:
    """Which connector, as vLLM's ``KVTransferConfig`` wants it. ``name`` is the class name."""

    name: str
    module_path: str | None = None
    extra_config: dict[str, Any] = field(default_factory=dict)

    @property
    def display(self) -> str:
        """As given on the command line."""
        return self.name if self.module_path is None else f"{self.module_path}:{self.name}"

    def kv_transfer_config(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's ``KVTransferConfig``."""
        config: dict[str, Any] = {
            "kv_connector": self.name,
            "kv_role": "kv_both",
            "kv_connector_extra_config": self.extra_config,
        }
        if self.module_path is not None:
            config["kv_connector_module_path"] = self.module_path
        return config


@dataclass(frozen=True)
class Case:
    """One run of ``kvproof check`` or ``kvproof layout``.

    ``model`` is what the user named, ``model_dir`` the directory with config.json. ``tokens`` is the length of the
    longest prompt in tokens, 0 for automatic. ``store`` is the directory a connector may write to.
    ``seed`` decides the byte code, the prompts and the order of free blocks.

    ``cuda_capability`` ("9.0") and ``soc`` ("ascend910b") are declared inputs: nothing guesses them. ``declare_soc``
    lets the SoC differ from the one the installed build was made for. ``varied`` holds declared quantities that
    must not move the layout (memory size, core count, device name); only ``kvproof ablate`` sets it. ``engine_args``
    are arguments of vLLM's ``EngineArgs`` by name, in place of those kvproof chooses.
    """

    model: str
    model_dir: str
    connector: ConnectorSpec | None = None
    platform: str = "cpu"
    runner: str = "v1"
    modes: tuple[str, ...] = ("bulk", "layerwise", "async")
    tokens: int = 0
    max_model_len: int = 0
    block_size: int = 0
    seed: int = 0
    store: str = ""
    cuda_capability: str = ""
    soc: str = ""
    declare_soc: bool = False
    cudagraph_mode: str = ""
    engine_args: dict[str, Any] = field(default_factory=dict)
    varied: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"schema": "kvproof.case/1", **dataclasses.asdict(self)}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Case:
        values = {k: v for k, v in data.items() if k != "schema"}
        connector = values.pop("connector")
        return Case(
            **{**values, "modes": tuple(values["modes"])},
            connector=None if connector is None else ConnectorSpec(**connector),
        )

    def dumps(self) -> str:
        return json.dumps(self.to_json(), indent=2, sort_keys=True)
