"""The vLLM plugin ``kvproof_trace``: three light hooks, and nothing wrapped unless the options say so.

``register`` runs once in every process of an engine, before any scheduler or runner exists, and in the short-lived
child in which vLLM inspects a model class; it imports nothing of vLLM itself and stays silent.
"""

from __future__ import annotations

import functools
from typing import Any

MARK = "_kvproof_trace_options"
"""Attribute of a SchedulerConfig whose engine wants the guard: the config travels to every process, pickled."""


def register() -> None:
    """Entry point of ``vllm.general_plugins``. Hooks run when, and only when, the process imports their module."""
    import wrapt

    wrapt.register_post_import_hook(_hook_config, "vllm.config.vllm")
    wrapt.register_post_import_hook(_hook_scheduler_config, "vllm.config.scheduler")
    wrapt.register_post_import_hook(_hook_worker, "vllm.v1.worker.worker_base")


def _once(owner: Any, name: str, make: Any) -> None:
    """Replace ``owner.name`` by ``make(native)``, once per process."""
    native = getattr(owner, name, None)
    if native is None or getattr(native, "_kvproof_trace", False):
        return
    hook = functools.wraps(native)(make(native))
    hook._kvproof_trace = True  # type: ignore[attr-defined]
    setattr(owner, name, hook)


def _hook_config(module: Any) -> None:
    """Check the options where the configuration is made: a mistake ends the start in its first second."""

    def make(native: Any) -> Any:
        def post_init(self: Any, *args: Any, **kwargs: Any) -> None:
            native(self, *args, **kwargs)
            configured = getattr(self, "additional_config", None)
            if isinstance(configured, dict) and "kv_trace" in configured:
                from kvproof.trace.options import parse

                options = parse(configured)
                if options.enabled and self.scheduler_config is not None:
                    # The scheduler's class is asked for by this object, which does not know additional_config.
                    self.scheduler_config.__dict__[MARK] = options

        return post_init

    _once(module.VllmConfig, "__post_init__", make)


def _hook_scheduler_config(module: Any) -> None:
    """Return a guarded subclass of whatever scheduler class is configured, the custom ones included."""

    def make(native: Any) -> Any:
        def get_scheduler_cls(self: Any) -> Any:
            scheduler_class = native(self)
            options = self.__dict__.get(MARK)
            return scheduler_class if options is None else _guarded(scheduler_class, options)

        return get_scheduler_cls

    _once(module.SchedulerConfig, "get_scheduler_cls", make)


def _guarded(scheduler_class: type, options: Any) -> type:
    class Guarded(scheduler_class):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.kv_trace_guard = _install("scheduler_side", "SchedulerGuard", self, options)

    # Native code and logs that name the class see the one that was configured.
    Guarded.__name__, Guarded.__qualname__ = scheduler_class.__name__, scheduler_class.__qualname__
    Guarded.__module__ = scheduler_class.__module__
    return Guarded


def _hook_worker(module: Any) -> None:
    """Guard the model runner as soon as the worker has made it; its KV cache does not exist yet."""

    def make(native: Any) -> Any:
        def init_device(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = native(self, *args, **kwargs)
            options = self.vllm_config.scheduler_config.__dict__.get(MARK)
            runner = getattr(self.worker, "model_runner", None)
            if options is not None and runner is not None:
                runner.kv_trace_guard = _install(
                    "worker_side", "WorkerGuard", runner, self.vllm_config, int(self.worker.rank), options
                )
            return result

        return init_device

    _once(module.WorkerWrapperBase, "init_device", make)


def _install(module: str, name: str, *args: Any) -> Any:
    """Make a guard; one that cannot be made leaves the engine as it is and says so."""
    import importlib

    try:
        return getattr(importlib.import_module(f"kvproof.trace.{module}"), name)(*args)
    except Exception as error:
        from kvproof.trace.guard import Guard
        from kvproof.trace.writer import LOGGER

        LOGGER.exception("kv_trace: %s could not be put in place; the engine runs without it", name)
        # The log says so too: whoever reads only the worker's file must learn why no step has a trace.
        Guard(args[-1], "scheduler" if module == "scheduler_side" else "worker", None, 0).failed(name, error)
        return None
