"""All trace faults, in the order they are run and listed, and the rules no fault can reach on the CPU build."""

from __future__ import annotations

from kvproof.faults.trace import (
    bindings,
    connectors,
    contents,
    dummies,
    handovers,
    lifecycles,
    reads,
    results,
    schedules,
    speculations,
    writes,
)
from kvproof.faults.trace.model import Planted, TraceFault

KINDS: dict[str, tuple[type[TraceFault], ...]] = {
    "schedule": schedules.FAULTS,
    "binding": bindings.FAULTS,
    "handover": handovers.FAULTS,
    "write": writes.FAULTS,
    "read": reads.FAULTS,
    "dummy": dummies.FAULTS,
    "speculation": speculations.FAULTS,
    "connector": connectors.FAULTS,
    "result": results.FAULTS,
    "lifecycle": lifecycles.FAULTS,
    "content": contents.FAULTS,
}


def _name(fault: type[TraceFault], engine: str) -> str:
    return fault.base_name() if engine == fault.engines[0] else f"{fault.base_name()}-on-{engine}"


CATALOGUE: dict[str, Planted] = {
    _name(fault, engine): Planted(_name(fault, engine), fault, engine)
    for faults in KINDS.values()
    for fault in faults
    for engine in fault.engines
}

_DCP = (
    "needs decode context parallelism, hence two tensor-parallel ranks: with one rank vLLM refuses the configuration "
    "(tp_size must be divisible by dcp_size), and two CPU workers need two NUMA nodes and an attention backend that "
    "returns the log-sum-exp of a decode step, which the CPU's does not"
)
UNREACHABLE: dict[str, str] = {
    "dcp_local_slot_mismatch": _DCP,
    "dcp_local_seq_len_mismatch": _DCP,
    "pcp_partition_mismatch": "needs prefill context parallelism: vLLM refuses it for model runner V1, and with V2 two "
    "CPU workers need two NUMA nodes and an attention backend that supports it, which the CPU's does not",
}


def select(names: list[str]) -> list[Planted]:
    """The faults with these names, all for none. ValueError for a name that is not in the catalogue."""
    for name in names:
        if name not in CATALOGUE:
            raise ValueError(
                f"--only {name}: not one of the {len(CATALOGUE)} faults that kvproof faults --trace --list names"
            )
    return [planted for name, planted in CATALOGUE.items() if not names or name in names]
