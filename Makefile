# Two commands do everything on a machine with Python >= 3.10 and a C++ compiler:
#   make demo    make test
PYTHON ?= python3
BIN := .venv/bin
RANKS = $(shell $(BIN)/python -c "import torch; print(min(torch.cuda.device_count(), 2) or 2)")
# Where there is no GPU, DeepSpeed must be told so, and a rank gets one thread.
CPU = $(shell $(BIN)/python -c "import torch; print('' if torch.cuda.is_available() else 'DS_ACCELERATOR=cpu')")
LAUNCH = OMP_NUM_THREADS=1 $(CPU) $(BIN)/python -m torch.distributed.run --nproc_per_node=$(RANKS)

.PHONY: help demo test test-all check bench clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*## /\t/' | expand -t 12

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10))" || \
		{ echo "Python 3.10 or newer is needed, $(PYTHON) is $$($(PYTHON) --version); try make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[test]"
	@touch $@

demo: .venv/.installed ## supervise a small model, then PPO on it, and draw the curves in runs/demo (2 minutes)
	$(LAUNCH) -m rlhf_examples.ppo configs/demo.yaml

test: .venv/.installed ## the test suite but for what is slow
	$(BIN)/python -m pytest -m "not slow"

test-all: .venv/.installed ## every test
	$(BIN)/python -m pytest

check: .venv/.installed ## ruff, format, layout and the tests that need no ranks
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/python -m pytest -q tests/test_layout.py tests/test_config.py tests/decoding tests/weights tests/rlhf_examples/test_losses.py

bench: .venv/.installed ## seconds of one ZeRO-3 generate: this engine, gather everything, plain ZeRO-3
	$(LAUNCH) -m benchmarks.generate

clean: ## remove what was made, but not .venv
	rm -rf runs build dist .pytest_cache .ruff_cache *.egg-info
