"""The register of cuda-sim."""

from __future__ import annotations

from kvproof.findings.model import Substitution
from kvproof.platforms import copies, triton_host

SUBSTITUTIONS: tuple[Substitution, ...] = (*copies.SUBSTITUTIONS, triton_host.RUNNER_V2_SUBSTITUTION)
