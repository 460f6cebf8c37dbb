# Everything a person or a CI does here. `make` alone lists it.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
BIN := $(VENV)/bin
ENV := $(VENV)/.kvproof-env
ENV_CUDA := .venv-cuda/.kvproof-env
ENV_CUDA_032 := .venv-cuda-0.32/.kvproof-env
ENV_ASCEND := .venv-ascend/.kvproof-env
PYTEST_ARGS ?=
PURE := tests/layout tests/bytecode tests/findings tests/oracles tests/trace/rules

export VENV
export VLLM_NO_USAGE_STATS := 1

.PHONY: help env env-cuda env-cuda-0.32 env-ascend demo test test-cuda test-cuda-0.32 test-ascend test-upstream test-pure lint bench bench-platforms bench-trace faults faults-trace acceptance-trace clean

help: ## list the targets
	@sed -nE 's/^([a-z0-9.-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 26

env: $(ENV) ## create the virtual environment (pinned, idempotent; TORCH_WHEEL=... where pip sees no CPU torch)

$(ENV): requirements/cpu.lock pyproject.toml scripts/env.sh
	@scripts/env.sh

env-cuda: $(ENV_CUDA) ## the environment of cuda-sim: vLLM's CUDA wheel, Python 3.12 (4.5 GB to download, 10 GB on disk)

$(ENV_CUDA): requirements/cuda.lock pyproject.toml scripts/env.sh
	@VENV=.venv-cuda scripts/env.sh cuda

env-cuda-0.32: $(ENV_CUDA_032) ## the same with vLLM 0.32.0

$(ENV_CUDA_032): requirements/cuda-0.32.lock pyproject.toml scripts/env.sh
	@VENV=.venv-cuda-0.32 scripts/env.sh cuda-0.32

env-ascend: $(ENV_ASCEND) ## the environment of ascend-sim: vllm-ascend, torch_npu (700 MB to download, 4 GB on disk)

$(ENV_ASCEND): requirements/ascend.lock pyproject.toml scripts/env.sh
	@VENV=.venv-ascend scripts/env.sh ascend

demo: env ## the main job: real model configurations against real connectors, under 5 minutes
	@scripts/demo.sh

test: env lint ## the whole test suite: style, types, layers, pytest (PYTEST_ARGS="-k layout")
	$(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

test-cuda: env-cuda ## what needs vLLM's CUDA wheel, no GPU: layouts, round trips, planted faults, UCM
	.venv-cuda/bin/python -m pytest -n 2 tests/platforms/cuda tests/platforms/test_environment.py tests/hostrt $(PYTEST_ARGS)

test-cuda-0.32: env-cuda-0.32 ## layouts and round trips of vLLM 0.32.0's CUDA wheel
	.venv-cuda-0.32/bin/python -m pytest -n 2 tests/platforms/cuda/test_layouts.py tests/platforms/cuda/test_round_trips.py tests/platforms/test_environment.py $(PYTEST_ARGS)

test-ascend: env-ascend ## what needs vllm-ascend, no NPU and no CANN: layouts, operators, round trips, planted faults
	.venv-ascend/bin/python -m pytest -n 2 tests/platforms/ascend tests/platforms/test_environment.py $(PYTEST_ARGS)

test-upstream: env env-cuda env-ascend ## vLLM's and vllm-ascend's own tests, plain and with kvproof (docs/upstream-tests.md)
	.venv-cuda/bin/python scripts/upstream_tests.py cuda
	.venv-ascend/bin/python scripts/upstream_tests.py ascend
	$(BIN)/python scripts/upstream_tests.py cpu

test-pure: env ## only the tests that need neither torch nor vLLM (seconds)
	$(BIN)/python -m pytest $(PURE) $(PYTEST_ARGS)

lint: env ## ruff, mypy, import contracts
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports

bench: env ## benchmarks, as ratios measured in one process
	$(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/deepseek_v41.py

bench-platforms: env env-cuda env-ascend ## seconds and memory of whole checks on cuda-sim and ascend-sim
	$(BIN)/python benchmarks/platforms.py

bench-trace: env ## what kv_trace costs a decoding step, on and off in one engine
	$(BIN)/python benchmarks/trace.py

acceptance-trace: env ## kv_trace in a real `vllm serve`, asked over HTTP; writes acceptance-trace/report.md
	$(BIN)/python tests/acceptance/trace_service.py

faults-trace: env ## plant a fault for every rule of kv_trace in a running engine, show which rule catches it
	$(BIN)/kvproof faults --trace

faults: env ## plant every fault of the catalogue, show which oracle catches it
	$(BIN)/kvproof faults

clean: ## remove the environment and everything generated
	rm -rf $(VENV) .venv-cuda .venv-cuda-0.32 .venv-ascend build dist demo-evidence evidence model-checks bench-results acceptance-trace .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests benchmarks scripts -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
