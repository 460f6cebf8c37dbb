"""What a platform is: what it declares, what it substitutes, and the few places where staging asks it.

A platform object is cheap: constructing one imports neither torch nor vLLM. Its methods are called in this order, the
first two in the process of the command line, the others in the child that stages the engine::

    require  environment  |  declare  before_import  install  engine_arguments  constructing  host
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvproof.findings.case import Case
from kvproof.findings.model import Substitution

if TYPE_CHECKING:
    import torch

    from kvproof.platforms.device_memory import Memory
    from kvproof.platforms.native_copies import NativeCopies


class PlatformResolvedError(RuntimeError):
    """Something imported torch or vLLM, and with it resolved the platform, before it could be declared."""


@dataclass(frozen=True)
class TransferHooks:
    """What a cache operator calls of the KV connector before its first and after its last use of the cache."""

    before: Callable[[], None]
    after: Callable[[], None]


class Platform:
    """A platform that needs nothing; others override what they need."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line for ``kvproof platforms``."""
    register: ClassVar[tuple[Substitution, ...]] = ()
    """Everything this platform may substitute, with the reason why the layout cannot notice."""
    variations: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Name of a declared quantity that must not move the layout -> other values ``kvproof ablate`` tries."""
    inputs: ClassVar[dict[str, str]] = {}
    """Options that declare the hardware and decide the layout -> the values they take, in words."""
    asserts: ClassVar[tuple[str, ...]] = ()
    """Options that say how an input is taken, and decide nothing themselves."""
    computes: ClassVar[bool] = True
    """Whether a model can run here and say something: a stand-in has no kernels."""
    declares: ClassVar[bool] = False
    """Whether every interpreter of the run must start with :meth:`declare`."""
    load_format: ClassVar[str] = "kvproof"
    """Name under which vLLM finds the loader that constructs the model without weights."""
    runner_places: ClassVar[bool] = False
    """Whether the runner allocates KV memory on its own instead of where vLLM's KVCacheTensor says."""

    def here(self) -> None:
        """ValueError, one line with the next step, where this environment cannot run the platform at all."""

    def require(self, case: Case) -> None:
        """ValueError, one line, where the case does not declare enough or this environment cannot run it."""
        self.here()

    def environment(self, case: Case) -> dict[str, str]:
        """Variables the staging process must be started with."""
        del case
        return {}

    def declare(self, case: Case) -> None:
        """Put declarations in place, in every interpreter of the run, before torch or vLLM are imported."""

    def before_import(self, case: Case) -> None:
        """In the child that stages, before it imports vLLM."""

    def install(self, case: Case) -> tuple[Substitution, ...]:
        """Stand-ins that need vLLM imported; returns the register of what this run substitutes."""
        del case
        return ()

    def engine_arguments(self, case: Case) -> dict[str, Any]:
        """Arguments of vLLM's EngineArgs that this platform decides."""
        del case
        return {}

    def constructing(self) -> contextlib.AbstractContextManager[Any]:
        """Context under which vLLM constructs the model without weights."""
        import torch

        return torch.device("meta")

    def transfer_hooks(self, layer: str, module: Any) -> TransferHooks | None:
        """The hooks of a cache layer whose production operator calls them itself. None where vLLM's decorator does
        (Attention, MLAAttention) or nobody."""
        del layer, module
        return None

    def native_copies(self) -> NativeCopies | None:
        """Copies made by compiled code through a stand-in runtime library; None where there is no such library."""
        return None

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A CPU tensor over the same bytes; shape, strides and dtype are those of ``tensor``."""
        return tensor

    def memory(self, storages: Sequence[torch.UntypedStorage]) -> Memory:
        """The bytes of the KV storages, as the harness reads and writes them. Storages are those of :meth:`host`."""
        from kvproof.platforms.device_memory import Memory

        return Memory(storages)

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """A zero tensor where the runner expects the model's output."""
        import torch

        return torch.zeros(*shape, dtype=dtype)
