# Thin rules over the `qdeploy` command. `make demo` and `make test` set up what they need.
# Users who bring another torch: make setup TORCH=torch TORCH_INDEX=URL-of-an-index

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
PYTEST_ARGS ?=

BIN := $(VENV)/bin
READY := $(VENV)/.ready
ROOT := $(CURDIR)
RECIPES := $(basename $(notdir $(wildcard recipes/*.yaml)))
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: setup test test-slow test-interop readers check demo bench kernels kernels-asan kernels-arm clean help
help:
	@echo "make demo | test | test-slow | test-interop | readers | check | setup | bench | clean"
	@echo "make kernels | kernels-asan | kernels-arm"
	@echo "make quantize-RECIPE | eval-RECIPE | serve-RECIPE, with RECIPE one of: $(RECIPES)"

setup: $(READY)

# torch comes first and alone, so that TORCH_INDEX serves only what it is meant for. Then what
# builds, so that the wheel of `make test` is built with the same and compiles nothing again.
$(READY): pyproject.toml CMakeLists.txt cmake/kernels.cmake
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q "pip>=23"
	$(BIN)/python -m pip install -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	$(BIN)/python -m pip install -q cmake ninja scikit-build-core
	$(BIN)/python -m pip install -q --no-build-isolation -e ".[dev]"
	touch $@

# Tests run against the built wheel, from another folder: what is tested is what is shipped.
# It is built with what .venv has: once set up, tests need no package index.
WHEEL_ENV := build/wheel-env
define INSTALL_WHEEL
rm -rf build/wheel $(WHEEL_ENV)
$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation -w build/wheel .
$(BIN)/python -m venv --without-pip $(WHEEL_ENV)
$(BIN)/python scripts/install_wheel.py build/wheel $(WHEEL_ENV)
endef
RUN_TESTS = cd $(WHEEL_ENV) && QDEPLOY_TEST_WHEEL="$$(ls $(ROOT)/build/wheel/*.whl)" \
  bin/python -m pytest -c $(ROOT)/pyproject.toml --rootdir $(ROOT) -p no:cacheprovider $(ROOT)/tests

test: $(READY)
	$(INSTALL_WHEEL)
	$(RUN_TESTS) $(PYTEST_ARGS)

test-slow: $(READY)
	$(INSTALL_WHEEL)
	$(RUN_TESTS) -m slow $(PYTEST_ARGS)

# Other tools' code, which nothing else needs.
test-interop: $(READY)
	$(BIN)/python -m pip install -q --no-build-isolation -e ".[interop]"
	$(INSTALL_WHEEL)
	$(RUN_TESTS) -m interop $(PYTEST_ARGS)

# Measures which engines read our formats; writes docs/formats.md's table and what inspect says.
readers: $(READY)
	$(BIN)/python -m pip install -q --no-build-isolation -e ".[interop]"
	QDEPLOY_WRITE_READERS=$(ROOT) $(BIN)/python -m pytest -q -m interop tests/interop/test_readers.py

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# While you work on kernels/cpp: rebuilds what an editable install loads.
CMAKE := PATH="$(abspath $(BIN)):$$PATH" cmake
KERNELS = $(CMAKE) -S . -G Ninja -DCMAKE_BUILD_TYPE=Release -DQDEPLOY_REQUIRE_KERNELS=ON
kernels:
	$(KERNELS) -B build/kernels -DSKBUILD_STATE=editable
	$(CMAKE) --install build/kernels

# Random models and steps through the C ABI. A program ends with 3 on a CPU that can't run it.
SANITIZE ?= address,undefined
STRESS_ARGS ?=
STRESS_BUILD ?= build/stress
ISAS ?= portable avx2 avx512
kernels-asan:
	$(KERNELS) -B $(STRESS_BUILD) -DQDEPLOY_STRESS=ON -DQDEPLOY_SANITIZE=$(SANITIZE)
	$(CMAKE) --build $(STRESS_BUILD) --target $(addprefix stress_,$(ISAS))
	for isa in $(ISAS); do \
	  $(STRESS_BUILD)/stress_$$isa $(STRESS_ARGS) || [ $$? = 3 ] || exit 1; \
	done

# Needs a cross compiler and qemu's user mode, e.g. Debian's g++-aarch64-linux-gnu and qemu-user.
ARM_CXX ?= aarch64-linux-gnu-g++
ARM_RUN ?= qemu-aarch64
kernels-arm:
	$(KERNELS) -B build/arm -DQDEPLOY_STRESS=ON -DCMAKE_CXX_COMPILER=$(ARM_CXX) \
	  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_EXE_LINKER_FLAGS=-static
	$(CMAKE) --build build/arm --target stress_portable _qdeploy_cpu_portable
	$(ARM_RUN) build/arm/stress_portable $(STRESS_ARGS)

bench: $(READY)
	$(BIN)/python benchmarks/cpu.py
	$(BIN)/python benchmarks/runtime.py

demo: $(READY)
	$(BIN)/python scripts/demo.py

quantize-%: $(READY)
	$(BIN)/qdeploy quantize --recipe $* -o artifacts/$* --overwrite

eval-%: $(READY)
	$(BIN)/qdeploy eval artifacts/$*

serve-%: $(READY)
	$(BIN)/qdeploy serve artifacts/$*

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
