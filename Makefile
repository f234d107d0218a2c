# Everything from a fresh clone, with only python3, pip and make:
#   make serve [MODEL=...] [ARGS="..."]    install for this machine's hardware, then serve a model
#   make test  [ARGS="..."]                install what the tests need, then run them

PYTHON      ?= python3
VENV        ?= .venv
MODEL       ?= smollm2-135m-instruct
ARGS        ?=

# What the machine has: a TPU (a device file, and Google's accelerator on the PCI bus or a TPU VM's environment),
# an NVIDIA GPU (with a driver too old for CUDA 13, CUDA 12), else the CPU. ACCELERATOR=cpu, cuda, cuda12 or tpu decides.
TPU_PCI_IDS := 0x0027|0x0056|0x005e|0x0062|0x0063|0x006f|0x0076
ifndef ACCELERATOR
ACCELERATOR := $(shell \
  has_tpu_file() { ls /dev/accel* /dev/vfio/[0-9]* 2>/dev/null | grep -q .; }; \
  has_tpu_env() { env | grep -qE '^TPU_(NAME|ACCELERATOR_TYPE|WORKER_ID)='; }; \
  has_tpu_pci() { grep -lsx 0x1ae0 /sys/bus/pci/devices/*/vendor | sed 's,vendor$$,device,' | xargs -r grep -qxE '$(TPU_PCI_IDS)'; }; \
  driver() { nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 | cut -d. -f1 | grep -x '[0-9]*'; }; \
  if has_tpu_file && { has_tpu_env || has_tpu_pci; }; then echo tpu; \
  elif major=$$(driver); then if [ "$$major" -lt 580 ]; then echo cuda12; else echo cuda; fi; \
  elif [ -e /dev/nvidia0 ]; then echo cuda; \
  else echo cpu; fi)
endif

# The versions that CI tests, exact on the Python they were resolved for; on any other, or with LOCK= set to nothing,
# the newest that pyproject.toml allows.
ifeq ($(origin LOCK),undefined)
LOCK        := $(shell $(PYTHON) -c 'import sys; print("requirements.lock" * (sys.version_info[:2] == (3, 11)))' 2>/dev/null)
endif
CONSTRAINTS := $(if $(LOCK),--constraint $(LOCK))

BIN         := $(VENV)/bin
INSTALL      = $(BIN)/python -m pip install --disable-pip-version-check --quiet $(CONSTRAINTS)
SOURCES     := pyproject.toml $(wildcard requirements.lock)

.PHONY: help serve install test lint lint-format lint-code lint-imports lint-types check format readme lock clean
.DEFAULT_GOAL := help

help:  ## show these commands
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

serve: $(VENV)/installed-$(ACCELERATOR)  ## serve MODEL (by default a small demo model, fetched once), with ARGS
	$(BIN)/paxserve serve $(MODEL) $(ARGS)

install: $(VENV)/installed-$(ACCELERATOR)  ## install paxserve for this machine's hardware into .venv

test: $(VENV)/installed-test  ## run the default tests, with ARGS for pytest
	$(BIN)/python -m pytest $(ARGS)

lint: lint-format lint-code lint-imports lint-types  ## format, lint, direction of imports, types

lint-format: $(VENV)/installed-dev
	$(BIN)/ruff format --check .

lint-code: $(VENV)/installed-dev
	$(BIN)/ruff check .

lint-imports: $(VENV)/installed-dev
	$(BIN)/lint-imports

lint-types: $(VENV)/installed-dev
	$(BIN)/pyright --pythonpath $(BIN)/python

check: lint test  ## all that CI checks

format: $(VENV)/installed-dev  ## format the code and mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

readme: $(VENV)/installed-$(ACCELERATOR)  ## write the table of flags and docs/compatibility.md anew
	$(BIN)/python -m paxserve.flags --markdown --into README.md
	$(BIN)/python -m paxserve.compatibility docs/vllm_surface.json > docs/compatibility.md

lock:  ## resolve requirements.lock anew, to the newest versions (with Python 3.11)
	rm -rf $(VENV)-lock
	$(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/python -m pip install --quiet --editable '.[dev]' hatchling
	$(VENV)-lock/bin/python -m pip freeze --exclude-editable > requirements.lock
	rm -rf $(VENV)-lock

clean:  ## remove the virtual environment and the tools' caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache dist

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "paxserve needs Python 3.11 or newer; name one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' \
	  || { echo "This Python cannot make virtual environments; on Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# One stamp for each set of extras, so that a second `make` starts at once and a changed pyproject.toml installs again.
$(VENV)/installed-%: $(SOURCES) | $(BIN)/python
	@echo "Installing paxserve for $*; the first time this takes a minute or two."
	$(INSTALL) --editable '.$(addprefix [,$(addsuffix ],$(filter-out cpu,$*)))'
	@touch $@
