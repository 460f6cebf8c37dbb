"""`vllm serve` with nothing but the plugin installed: the tiny checkpoint answers a chat over HTTP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[2] / "acceptance"), str(Path(__file__).parents[2] / "support")]
from trace_service import free_port, name_the_distribution, stop, wait_until_healthy  # noqa: E402
from v41_play import checkpoint  # noqa: E402

pytestmark = pytest.mark.engine


def ask(port: int, text: str) -> dict:
    """The answer to one user message, greedy."""
    body = {"model": "v41", "messages": [{"role": "user", "content": text}], "max_tokens": 12, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def test_the_checkpoint_is_served(tmp_path):
    model = checkpoint("deepseek-v41-tiny", tmp_path / "model", dtype="bfloat16")
    name_the_distribution(tmp_path)
    port = free_port()
    environment = {key: value for key, value in os.environ.items() if key != "VLLM_PLUGINS"}
    environment |= {"PYTHONPATH": str(tmp_path), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model), "--served-model-name", "v41"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "1024", "--max-num-seqs", "4"]
    command += ["--num-gpu-blocks-override", "64", "--gpu-memory-utilization", "0.3", "--enable-prompt-tokens-details"]
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=tmp_path)
    try:
        wait_until_healthy(server, port)
        text = "How many rows does a page of the long cache hold, and whose are they? " * 4
        first, second = ask(port, text), ask(port, text)
        assert first["usage"]["completion_tokens"] == 12
        assert first["choices"][0]["message"]["content"]
        assert first["choices"][0] == second["choices"][0] | {"index": 0}
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128, "one block of 128 tokens was hit"
    finally:
        code = stop(server)
    said = (tmp_path / "server.log").read_text(errors="replace")
    assert code == 0, said[-3000:]
    assert "forcing chunked prefill and prefix caching to be disabled" not in said
