"""An engine in three processes: one trace across them, wrong options refused early, logs that survive a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine
CHILD = Path(__file__).parents[2] / "support" / "traced_llm.py"
TIMEOUT_S = 180


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@contextmanager
def child(model: Path, kv_trace: dict[str, Any], plugins: str | None = None, **wanted: Any) -> Iterator[Any]:
    """A running child in a process group of its own; whatever is left of the group ends with the block."""
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    env["VLLM_LOGGING_LEVEL"] = "WARNING"  # vLLM logs to standard output
    env.pop("VLLM_PLUGINS", None)
    if plugins is not None:
        env["VLLM_PLUGINS"] = plugins
    command = [sys.executable, str(CHILD), json.dumps({"model": str(model), "kv_trace": kv_trace, **wanted})]
    with subprocess.Popen(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        watchdog = threading.Timer(TIMEOUT_S, lambda: os.killpg(process.pid, signal.SIGKILL))
        watchdog.start()
        try:
            yield process
        finally:
            watchdog.cancel()
            if any_left(process.pid):
                os.killpg(process.pid, signal.SIGKILL)


def any_left(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition: Callable[[], Any]) -> Any:
    """The condition's first true value; the test fails when it stays false."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never happened"
        threading.Event().wait(0.01)
    return value


def logs(directory: Path) -> dict[str, Path]:
    """The log file per role."""
    return {path.name.split("-")[1]: path for path in directory.glob("*.jsonl")}


def events(path: Path) -> tuple[list[dict[str, Any]], bytes]:
    """(whole lines, torn rest); a line in the middle that does not parse fails the test."""
    *whole, rest = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in whole], rest


def first_line(process: Any, start: str) -> str:
    """The child's next line that begins so; vLLM's own lines go to the same stream."""
    for line in process.stdout:
        if line.startswith(start):
            return str(line)
    raise AssertionError(process.stderr.read()[-3000:])


def step(trace: str) -> int:
    return int(trace.split("-")[1])


def kill_in_the_middle(process: Any, directory: Path, role: str) -> int:
    """Kill the process that writes ``role``'s log once the long round is under way; its pid."""
    first_line(process, "pid ")
    before = until(lambda: logs(directory).get(role))
    pid = int(before.stem.rsplit("-", 1)[1])
    size = before.stat().st_size
    until(lambda: before.stat().st_size > size + 20_000)
    os.kill(pid, signal.SIGKILL)
    return pid


@pytest.fixture(scope="module")
def killed_core(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run for several tests: it serves, then its EngineCore is killed. Every installed plugin is loaded."""
    directory = tmp_path_factory.mktemp("log-core")
    with child(model, {"enabled": True, "path": str(directory), "full_check_every": 4}, long=True) as process:
        served = first_line(process, "served ")
        worker = int(until(lambda: logs(directory).get("worker")).stem.rsplit("-", 1)[1])
        pid = kill_in_the_middle(process, directory, "scheduler")
        # vLLM's worker ends with its parent; its main process waits for the dead core for ever, guard or not.
        until(lambda: not alive(worker))
    return {"served": served, "pid": pid, "main": process.pid, "directory": directory}


def test_scheduler_and_worker_share_their_traces(killed_core: dict[str, Any]) -> None:
    assert killed_core["served"] == "served 30\n"
    found = {role: events(path)[0] for role, path in logs(killed_core["directory"]).items()}
    assert set(found) == {"scheduler", "worker"}
    pids = {role: {event["pid"] for event in mine} for role, mine in found.items()}
    assert all(len(one) == 1 for one in pids.values())
    assert len(set.union(*pids.values(), {killed_core["main"]})) == 3
    bound = {event["trace"]: event["requests"] for event in found["scheduler"] if event["event"] == "kv.bind"}
    written = {event["trace"]: event["requests"] for event in found["worker"] if event["event"] == "kv.write"}
    assert len(written) > 20
    engine = {trace.split("-")[0] for trace in (*bound, *written)}
    assert len(engine) == 1
    # The killed process's log ends a little earlier (lines are flushed within 10 ms), and has no hole before that.
    both = bound.keys() & written.keys()
    assert len(both) > 20
    last = max(map(step, bound))
    assert all(step(trace) > last for trace in written.keys() - both)
    assert all(set(bound[trace]) == set(written[trace]) for trace in both)
    assert [event for mine in found.values() for event in mine if event["event"] == "kv.violation"] == []


def test_a_killed_engine_core_leaves_whole_lines(killed_core: dict[str, Any]) -> None:
    whole, rest = events(logs(killed_core["directory"])["scheduler"])
    assert whole[0]["event"] == "kv.enabled"
    assert {event["pid"] for event in whole} == {killed_core["pid"]}
    assert b"\n" not in rest
    # The worker notices, ends by itself and says all it knows.
    worker, rest = events(logs(killed_core["directory"])["worker"])
    assert rest == b""
    assert worker[-1]["step"] is None or worker[-1]["step"] >= max(e["step"] or 0 for e in whole) - 2


def test_a_killed_worker_leaves_whole_lines_and_an_allow_list_of_plugins_is_enough(
    model: Path, tmp_path: Path
) -> None:
    options = {"enabled": True, "path": str(tmp_path)}
    with child(model, options, plugins="kvproof_trace", long=True) as process:
        pid = kill_in_the_middle(process, tmp_path, "worker")
        _, errors = process.communicate()
    assert process.returncode != 0, errors[-2000:]
    whole, _ = events(logs(tmp_path)["worker"])
    assert {event["pid"] for event in whole} == {pid}
    assert sum(event["event"] == "kv.write" for event in whole) > 10
    scheduler, rest = events(logs(tmp_path)["scheduler"])
    assert rest == b""
    assert scheduler[0]["event"] == "kv.enabled"


def test_a_wrong_option_ends_the_start_before_the_model_loads(model: Path, tmp_path: Path) -> None:
    words = "kv_trace.action: 'rasie' is none of log, raise, did you mean raise"
    options = {"enabled": True, "action": "rasie"}
    with child(model, {**options, "path": str(tmp_path / "log")}) as process:
        output, errors = process.communicate()
    assert process.returncode == 1
    assert "served" not in output
    assert [line for line in errors.splitlines() if words in line], errors[-2000:]
    assert "ValueError" in errors or "Value error" in errors
    assert "oading" not in output + errors  # neither "Loading weights" nor "Model loading"
    assert not (tmp_path / "log").exists()
