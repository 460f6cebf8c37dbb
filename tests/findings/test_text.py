from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproof.findings.text import counted, human_bytes, printable, printable_block


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (37_748_736, "36.00 MiB"),
        (2**60, "1024.00 PiB"),
    ],
)
def test_human_bytes(count, text):
    assert human_bytes(count) == text


def test_counted():
    assert [counted(n, "byte") for n in (0, 1, 1200)] == ["0 bytes", "1 byte", "1,200 bytes"]


def test_printable_takes_the_teeth_out():
    assert printable("a\x1b[31mb\u202ec\nd\x00") == "a[31mbc d"


@settings(max_examples=25)
@given(st.text())
def test_printable_is_one_line_of_printable_characters(text):
    line = printable(text)
    assert not {unicodedata.category(c) for c in line} & {"Cc", "Cf", "Cs", "Cn"}
    assert printable(line) == line


def test_block_keeps_lines_and_indentation():
    assert printable_block("step:\n\tError\x1b: x\n  y") == "step:\n        Error: x\n  y"
