from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproof.findings.logs import normalise_log

SAMPLES = [
    (
        "(MainProcess pid=2641) INFO 11-29 16:06:32 [model.py:733] Resolved architecture: Qwen3ForCausalLM",
        "(MainProcess pid=<pid>) INFO <time> [model.py:733] Resolved architecture: Qwen3ForCausalLM",
    ),
    (
        "\x1b[0;36m(EngineCore_DP0 pid=77)\x1b[0;0m INFO 01-02 03:04:05 [core.py:9] took 3.41 seconds",
        "(EngineCore_DP0 pid=<pid>) INFO <time> [core.py:9] took <duration>",
    ),
    ("W1129 16:06:32.123000 2641 torch/x.py:5] slow", "W<time> <pid> torch/x.py:5] slow"),
    ("2026-11-29T16:06:32.5+00:00 done", "<time> done"),
    ("2026-11-29 16:06:32,123 done in 12 ms", "<time> done in <duration>"),
    ("tensor at 0x7f3a2c001000, poison 0xFF", "tensor at <pointer>, poison 0xFF"),
    ("<Block object at 0x7F3A2C0>", "<Block object at <pointer>>"),
    ("tcp://192.168.7.9:45123 port=8000, port 91", "tcp://<host>:<port> port=<port>, port <port>"),
    ("rank 0 at 10.0.0.1:29500", "rank 0 at <host>:<port>"),
    ("ipc:///tmp/6f1d2c3b-aaaa-bbbb-cccc-0123456789ab", "ipc://<tmp>"),
    ("id 6f1d2c3b-aaaa-bbbb-cccc-0123456789ab", "id <uuid>"),
    ("cmpl-6f1d2c3baaaabbbbcccc0123456789ab-0", "cmpl-<uuid>-0"),
    ("saved to /tmp/tmpx81_z/a/model.bin ok", "saved to <tmp>/a/model.bin ok"),
    ("store /home/me/scratch/kvproof-a1_b2c3d/store", "store <tmp>/store"),
    ("/tmp/x/tmpabcd1234/y", "<tmp>/y"),
    ("load 10%\rload 60%\rload 100%\nnext", "load 100%\nnext"),
    ("100%|###| 7/7 [00:01<00:00, 5.2it/s]", "100%|###| 7/7 [<progress>]"),
    ("throughput: 12.5 tokens/s, 3 reqs", "throughput: <rate>, 3 reqs"),
    ("windows line\r\nunix line\n", "windows line\nunix line\n"),
]


@pytest.mark.parametrize(("line", "expected"), SAMPLES)
def test_known_lines(line, expected):
    assert normalise_log(line) == expected


@pytest.mark.parametrize(
    "line",
    [
        "layer 9 V block 14 byte 512 holds layer 9 K block 14 byte 512",
        "vllm 0.32.0, block_size=16, num_blocks=2048, 151936 tokens",
        "kv_cache_utils.py:1291 GPU KV cache size: 30,528 tokens",
        "rapid 5 support 7 sports 9",
    ],
)
def test_facts_stay(line):
    assert normalise_log(line) == line


def test_two_runs_of_one_line_become_equal():
    template = "(Worker pid={}) INFO {} [x.py:1] init took {} s, ptr {}, tcp://127.0.0.1:{} {}"
    first = template.format(17, "11-29 16:06:32", "3.4", "0x7f0000001000", 4501, "/tmp/tmpabc/kv")
    second = template.format(94213, "12-01 00:00:01", "10", "0x55aa00ff0000", 60123, "/tmp/tmp_99/kv")
    assert normalise_log(first) == normalise_log(second)


FRAGMENTS = [sample for sample, _ in SAMPLES] + [
    "/tmp/",
    "<tmp>",
    "pid=",
    "\x1b[",
    "m",
    "0x",
    "12:34:56",
    "\r",
    "\n",
    "7 s",
]


@settings(max_examples=25)
@given(st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=6), max_size=8).map("".join))
def test_idempotent(text):
    once = normalise_log(text)
    assert normalise_log(once) == once


@settings(max_examples=25)
@given(st.text(alphabet="\x1b[]0123456789;mABKhl\x07\\ abc", max_size=40))
def test_no_complete_colour_code_is_left(text):
    assert "\x1b[0m" not in normalise_log(text + "\x1b[0m")
