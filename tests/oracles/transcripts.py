"""Hand-made layout, mismatches and transcripts. Two groups of one layer each over the same frames, 4 blocks.

Group 0: 4 tokens per block, 2 heads of K 8 and V 8 bytes, head-major. Group 1: one 96-byte state per block.
"""

from __future__ import annotations

from dataclasses import replace

from kvproof.bytecode import Decoded, Fill, Mismatch
from kvproof.bytecode.ledger import Judged
from kvproof.layout import Axis, Field, Group, Layout, Resource, Storage
from kvproof.oracles.transcript import Claim, DigestCheck, Load, Named, Observation, Transcript

PAGE = 128
ATTENTION = Resource(
    0, 0, "layers.0.attn", "uint8", 0, 0, PAGE, PAGE, (Axis(4, 16),), (Axis(2, 64), Axis(16, 1)), 1,
    (Field("K", 0, 8), Field("V", 8, 16)),
)  # fmt: skip
STATE = Resource(
    1, 1, "layers.1.mamba", "uint8", 0, 0, PAGE, PAGE, (Axis(1, 0),), (Axis(96, 1),), 0, (Field("ssm", 0, 96),)
)
LAYOUT = Layout(
    "LBHNC", 4, (Storage(0, 4 * PAGE),),
    (Group(0, "full_attention", 4, ("layers.0.attn",), "all"), Group(1, "mamba", 4, ("layers.1.mamba",), "state")),
    (ATTENTION, STATE),
)  # fmt: skip

FOREIGN = Mismatch(
    0, "layers.0.attn", 0, 2, 88, 1, 24, 5, 17, Decoded(0, 9, 24), {"foreign": 8}, ((88, 8, "foreign"),)
)
"""Head 1, token 1, V: 8 bytes of content 9."""
POISON = replace(
    FOREIGN, observed=255, decoded=None, counts={"poison_target": 8}, wrong=((88, 8, "poison_target"),)
)
UNCOMPUTED = replace(
    FOREIGN, observed=254, decoded=None, counts={"poison_uncomputed": 8}, wrong=((88, 8, "poison_uncomputed"),)
)
ZERO = replace(FOREIGN, observed=0, decoded=None, counts={"zero": 8}, wrong=((88, 8, "zero"),))
LOOSE = Mismatch(
    1, "layers.1.mamba", None, 3, 100, 0, 0, Fill.FREE, 7, None, {"foreign": 2}, ((100, 2, "foreign"),)
)
"""Two bytes in the padding behind the state."""


def observed(moment: str, region: str, mismatch: Mismatch = FOREIGN, request: str | None = "b#2") -> Observation:
    return Observation("bulk/9", 7, moment, request, region, mismatch)


LOAD = Load("bulk/9", "b#2", prompt=9, local=0, external=8, claimed=8, asynchronous=False, stored=8, expected=8)
SAVE_CLAIM = Claim("bulk/9", 3, "save", "copy", 4, 256, (1, 2), (1, 2))
LOAD_CLAIM = Claim("bulk/9", 5, "load", "copy", 4, 256, (3,), (3,))
DIGEST = DigestCheck("bulk/9", "b#2", 0, "layers.0.attn", 2, PAGE, True)


def clean() -> Transcript:
    """A run in which everything was judged and everything is right."""
    transcript = Transcript(
        loads=[LOAD], digests=[DIGEST], claims=[SAVE_CLAIM, LOAD_CLAIM], restored_bytes={0: 256, 1: 96},
        saved_bytes={0: 256, 1: 96}, uncomputed_bytes=64, origins_checked=3, names={9: Named("a#1", 9, {0: 1, 1: 3})},
    )  # fmt: skip
    for moment in ("read", "after_load", "at_rest"):
        transcript.judge(moment, Judged(512, 4, {0, 1}, {0, 1, 2, 3}))
    return transcript


def with_observations(*observations: Observation) -> Transcript:
    transcript = clean()
    transcript.observations += observations
    return transcript
