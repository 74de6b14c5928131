# Commands for a fresh machine with Python:
#
#   make demo    train a small model on all GPUs, or on two CPU ranks; results in demo-out/
#   make test    check and test the installed package
#   make test-all    also run the slow tests, and train on the emulated device (hours on two cores)
#   make test-matrix    run the tests with every supported torch, and write docs/compatibility.md (hours; MATRIX_ARGS for
#                       pytest; where there is no GPU, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu)
#   make test-cuda    compile for an H100 on a machine without a GPU, with torch for CUDA in a virtual environment for each
#                     release of CUDA_TORCHES (gigabytes)
#   make parity  write docs/parity.md from a run of the whole parity table (half an hour on two cores)
#   make bench   run most benchmarks (an hour on two cores); TORCHTITAN is a checkout of torchtitan, for SimpleFSDP, which
#                needs tyro and spmd_types in the virtual environment
#   make mutate  disable each precondition of each pass in turn; a test must fail (half an hour on one core)
#   make docs    build the documentation into site/, with warnings as errors
#   make dist    build the wheel and the sdist into dist/; equal commits give equal bytes, with the versions of
#                constraints.txt and one release of Python
#   make setup   create the virtual environment, with the package and everything that the tests need
#
# PYTHON is the interpreter, VENV the folder of the virtual environment, DEMO_ARGS adds options to the demo, PARALLEL has
# pytest's options for parallel tests; empty for one test at a time.

PYTHON ?= python3
VENV ?= .venv
DEMO_ARGS ?=
TORCHTITAN ?=
TORCHES ?= 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
CUDA_TORCHES ?= 2.11.0 2.15.0
MATRIX_ARGS ?=
CONSTRAINTS ?= constraints.txt
# Two tests at a time, because ranks wait for their peers, and for processes of the compiler.
PARALLEL ?= -n 2 --dist worksteal
# Tests that `make test-all` also runs on the emulated device.
ON_A_DEVICE := tests/backend/test_verify.py tests/runtime/test_exceptions.py \
	$(addprefix tests/parity/test_,parity_table.py random_loops.py random_programs.py)
BIN := $(VENV)/bin

PACKAGE_FILES := pyproject.toml README.md LICENSE $(shell find compile_fsdp passes ops -name '*.py' -o -name py.typed -o -name 'page.*')

# Both kinds of installation write into the same virtual environment.
.NOTPARALLEL:
.PHONY: setup demo test test-all test-matrix test-cuda parity mutate bench docs dist clean

setup: $(VENV)/.deps-test $(VENV)/.package

# Without a C++ compiler, Inductor cannot compile for the CPU; the same graphs then run op by op.
demo: $(VENV)/.deps-demo $(VENV)/.package
	@set -e; \
	gpus=$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count())'); \
	if [ "$$gpus" -gt 0 ]; then ranks=$$gpus; size="--preset small"; else ranks=2; size="--preset tiny"; fi; \
	if command -v g++ || command -v clang++; then inner=; else inner="--inner-backend aot_eager"; fi >/dev/null; \
	export OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1}; \
	set -x; \
	$(BIN)/torchrun --standalone --nproc-per-node "$$ranks" examples/train.py $$size $$inner \
		--output demo-out $(DEMO_ARGS)

# Types are checked while the emulated device is compiled.
test: setup
	$(BIN)/ruff check .
	$(BIN)/codespell *.md compile_fsdp passes ops tests docs examples benchmarks
	cd tests && { PYTHONPATH=. $(abspath $(BIN))/python -m helpers.device.extension & building=$$!; \
		$(abspath $(BIN))/mypy --config-file ../pyproject.toml -p compile_fsdp; checked=$$?; \
		wait $$building && exit $$checked; }
	$(BIN)/pytest $(PARALLEL)

test-all: setup
	$(BIN)/pytest $(PARALLEL) -m 'slow or not slow'
	$(BIN)/pytest $(PARALLEL) -m 'slow or not slow' --device emulated $(ON_A_DEVICE)

test-matrix:
	PYTEST_ADDOPTS="$(PARALLEL)" $(PYTHON) tests/helpers/releases/matrix.py $(TORCHES) -- $(MATRIX_ARGS)

test-cuda:
	@set -e; for torch in $(CUDA_TORCHES); do \
		bin=.venv-cuda-$$torch/bin; \
		test -x $$bin/pytest || { $(PYTHON) -m venv .venv-cuda-$$torch; \
			$$bin/python -m pip install torch==$$torch expecttest hypothesis pytest pytest-timeout; }; \
		$$bin/python -m pip install --quiet --no-deps --force-reinstall .; \
		rm -rf build; \
		$$bin/pytest tests/cuda; \
	done

parity: setup
	$(BIN)/pytest -m 'slow or not slow' tests/parity/test_parity_table.py \
		--parity-report docs/parity.md

mutate: setup
	cd tests && PYTHONPATH=. OMP_NUM_THREADS=1 $(abspath $(BIN))/python -m helpers.mutation.run
	cd tests && PYTHONPATH=. OMP_NUM_THREADS=1 $(abspath $(BIN))/python -m helpers.mutation.run --equivalent

bench: setup
	$(BIN)/python benchmarks/pass_scaling.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/drift.py
	$(BIN)/python benchmarks/plan_published.py
	$(BIN)/python benchmarks/passes.py
	PYTHONPATH=$(TORCHTITAN) $(BIN)/python benchmarks/steps.py
	PYTHONPATH=$(TORCHTITAN) $(BIN)/python benchmarks/first_step.py --layers 8 32 \
		--modes block bound $(if $(TORCHTITAN),simple) compile
	$(BIN)/python benchmarks/full_optim_state.py
	if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		PYTHONPATH=$(TORCHTITAN) $(BIN)/python benchmarks/gpu.py; \
	fi

docs: $(VENV)/.deps-docs $(VENV)/.package
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Files in both archives are dated as the last commit.
dist: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct)
dist: $(VENV)/.deps-dist
	$(BIN)/python tests/helpers/releases/distributions.py dist

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The dependencies of an extra are installed once, and again when the versions change.
$(VENV)/.deps-%: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(BIN)/python -m pip install -c $(CONSTRAINTS) 'setuptools>=77' '.[$*]'
	rm -rf build
	rm -f $(VENV)/.package
	touch $@

# The package itself is installed again, without its dependencies, when any of its files changes.
$(VENV)/.package: $(PACKAGE_FILES) | $(BIN)/python
	rm -rf build
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --force-reinstall .
	rm -rf build
	touch $@

clean:
	rm -rf $(VENV) .venv-torch-* .venv-cuda-* build dist demo-out site
