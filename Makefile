# Targets: demo test test-newest lint bench wheel lock drift check package env clean
#
# Where python3 already imports torch, triton and pytest, it is used as it is and nothing is installed.
# Elsewhere the first target that needs it makes .venv; it is brought up to date when pyproject.toml changes.

PYTHON3 ?= python3
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0
TRITON_NEWEST ?= triton==3.9.0
TARGETS ?= sm_80,sm_86,sm_89,sm_90,sm_100,sm_120,gfx942,gfx950
JOBS ?= $(shell nproc)

export PYTHONPATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))

has_all := $(shell $(PYTHON3) -c 'import torch, triton, pytest' 2>/dev/null && echo yes)
ifeq ($(has_all),yes)
PY := $(PYTHON3)
READY :=
else
PY := .venv/bin/python
READY := .venv/.ready
endif

.PHONY: demo test test-newest lint bench wheel lock drift check package env clean
.DELETE_ON_ERROR:

demo: $(READY)
	$(PY) examples/demo.py

test: $(READY)
	TRITON_INTERPRET=1 $(PY) -m pytest -q -rs tests/interpreted
	$(PY) -m pytest -q -rs tests

ifeq ($(has_all),yes)
test-newest:
	@echo "test-newest: skipped, $(PYTHON3) brings its own Triton and nothing is installed here"
else
test-newest: .venv-newest/.ready $(READY)
	$(PY) build_aot.py --targets sm_90 --out .aot/first_lane
	TRITON_INTERPRET=1 .venv-newest/bin/python -m pytest -q -rs -m newest tests/interpreted
	AOT_OF_ANOTHER_TRITON=.aot/first_lane .venv-newest/bin/python -m pytest -q -rs -m newest tests
endif

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

bench: $(READY)
	mkdir -p bench_out
	for name in forward backward varlen window host cold_start; do \
	    $(PY) benchmarks/bench_$$name.py --json bench_out/$$name.json || exit 1; done

# The wheel with every target, checked against aot.lock and, installed, entry by entry.
wheel: $(READY)
	$(PY) build_aot.py --targets $(TARGETS) --profile core --jobs $(JOBS)
	rm -rf dist
	$(PY) -m pip wheel . --no-deps --no-build-isolation --wheel-dir dist
	WHEEL_UNDER_TEST=$$(echo dist/*.whl) $(PY) -m pytest -q -rs tests/test_installed_wheel.py
	ls -l dist

# After a change to the kernels or to what is declared: compile everything and write aot.lock anew.
lock: $(READY)
	$(PY) build_aot.py --profile core --jobs $(JOBS) --lock

# Compile everything from nothing, in another folder, and compare every byte with aot.lock.
drift: $(READY)
	rm -rf .aot/drift
	$(PY) build_aot.py --profile core --jobs $(JOBS) --work .aot/drift/work --out .aot/drift/out
	$(PY) build_aot.py --profile core --check --out .aot/drift/out

check: $(READY)
	$(PY) build_aot.py --profile core --check

# Source distribution and wheel without kernels, as an index would take them.
package: $(READY)
	rm -rf .aot/package
	$(PY) -m build --no-isolation --outdir .aot/package
	$(PY) -m twine check --strict .aot/package/*

env: $(READY)
	@$(PY) -c 'import sys, torch, triton; print(sys.executable, torch.__version__, "triton", triton.__version__)'

clean:
	rm -rf .aot build dist src/flashattn/_aot src/*.egg-info

# Triton comes last and with --no-deps: the CUDA builds of torch pin another version of it.
define make_env
	test -x $(1)/bin/python || $(PYTHON3) -m venv $(1)
	$(1)/bin/python -m pip install --quiet '$(TORCH)'
	$(1)/bin/python -c "$$EXTRAS" $(3) | xargs -d '\n' $(1)/bin/python -m pip install --quiet
	$(1)/bin/python -m pip install --quiet --no-deps '$(2)'
	touch $@
endef

# The requirements of the package, torch and triton aside, and of the extras named; one a line.
define EXTRAS
import sys
try:
    import tomllib
except ImportError:
    from pip._vendor import tomli as tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
lines = [line for line in project["dependencies"] if not line.startswith(("torch", "triton"))]
lines += [line for extra in sys.argv[1:] for line in project["optional-dependencies"][extra]]
print("\n".join(lines))
endef
export EXTRAS

.venv/.ready: pyproject.toml
	$(call make_env,.venv,$(TRITON),test dev)

.venv-newest/.ready: pyproject.toml
	$(call make_env,.venv-newest,$(TRITON_NEWEST),test)
