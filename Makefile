# make env    create .venv with the pinned dependencies and this project (repeated only when the pins change)
# make train  train a small GPT on the Python standard library's source: 2 processes, ZERO3, CPU, two to three minutes
# make test   the tests, JOBS at a time; lint and types are two of them
# make test-settings   the tests under every setting that makes torch choose other kernels, and once each with
#             every backward on another thread and with all cores busy
# make test-timings  the suites that exchange data, over a backend that is neither gloo nor NCCL, which completes each
#             collective as early or as late as allowed, or at random: TIMINGS="random-7" (a seed), TIMED=tests/comm
# make test-faults   the fault tests of checkpoints and of ranks with their full counts
# make test-hosts      torchrun on two to four hosts, which are namespaces of this machine: slow, lossy and broken networks,
#             hosts that are killed, restarts. Needs root, iproute2 and /dev/net/tun, and is skipped where they are missing
# make test-gpu        everything that needs a GPU, in one report; with the python3 that is there, which needs only torch
#             2.11 or newer with CUDA, numpy and pytest: GPU_PYTHON=/path/to/python PIECES="one-rank memory" REPORT=file.md
# make test-oldest     what uses other libraries, with the lowest versions that pyproject.toml allows, in an environment of its own
# make lint   lint and types only
# make docs   build the site into build/site, strictly: a broken link is an error
# make test-everything  the full versions of tests of which `make test` runs a selection: every precision x optimizer x
#             schedule x plan; 500 random models; every way to compile; longer runs, more ranks: an hour on 2 cores

# The first interpreter that starts (stubs of version managers may not), is new enough and can create environments. That of
# the system comes first: distributions build it with profile-guided optimisation, version managers without. The tests
# then take a fifth less time.
WORKS := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in $(foreach name,python3.11 python3.12 python3.13 python3.14 python3,/usr/bin/$(name) $(name)); do \
	if $$python -c '$(WORKS)' >/dev/null 2>&1; then echo $$python; break; fi; done)

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SITE_STAMP := $(VENV)/.site-installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# The number of tests that run in parallel: two more than cores, as many tests wait. Each test has up to 4 ranks.
JOBS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); [ $$n -gt 6 ] && n=6; echo $$((n + 2)))
SIDE_BY_SIDE := -n $(JOBS) --dist worksteal

.PHONY: env train test test-everything test-faults test-gpu test-hosts test-oldest test-settings test-timings lint docs
.DELETE_ON_ERROR:

env: $(STAMP)

# torch is installed first, in its exact version, so that no other package can install another build. The project's
# build back end is pinned and installed beforehand, so that the editable install needs no isolated environment.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make env: no working Python 3.11 or newer with venv was found; set PYTHON=/path/to/python" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt setuptools torch
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

train: $(STAMP)
	$(BIN)/zeroshard train --config configs/small.toml --plan zero3 --nproc 2

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict -p zeroshard

docs: $(SITE_STAMP)
	$(BIN)/mkdocs build --strict

# The packages for the site are installed when it is built for the first time.
$(SITE_STAMP): $(STAMP)
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[dev,docs]'
	@touch $@

test: $(STAMP)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE)

# In an environment of its own. The project is not installed there, so that its files are those of the checkout.
OLDEST := build/oldest
$(OLDEST)/complete: oldest.txt
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip --disable-pip-version-check --quiet install -c constraints.txt torch
	$(OLDEST)/bin/python -m pip --disable-pip-version-check --quiet install -r oldest.txt
	@touch $@
test-oldest: $(OLDEST)/complete
	PYTHONPATH=. $(OLDEST)/bin/python -m pytest -p no:cacheprovider $(SIDE_BY_SIDE) \
		tests/cli tests/train tests/report tests/exchange tests/planning tests/optim tests/integrations

test-settings: $(STAMP)
	$(BIN)/python -m tests.settings $(SETTINGS) -- $(SIDE_BY_SIDE) $(TESTS)

# All timings run, also after one has failed. Tests about gloo itself are skipped (the marker by_gloo).
TIMINGS ?= early late random
TIMED ?= tests/parity tests/model tests/step tests/comm tests/storage tests/runtime
test-timings: $(STAMP)
	@failed=; for timing in $(TIMINGS); do echo "timing: $$timing"; \
		ZEROSHARD_TEST_BACKEND=$$timing $(BIN)/python -m pytest $(SIDE_BY_SIDE) $(TIMED) || failed="$$failed $$timing"; \
		done; test -z "$$failed" || { echo "failed with the timings:$$failed" >&2; exit 1; }

# Not with .venv: its torch has no CUDA.
GPU_PYTHON ?= python3
PIECES ?=
REPORT ?= build/test-gpu/report.md
test-gpu:
	$(GPU_PYTHON) -m tests.gpu.runner --report $(REPORT) $(if $(PIECES),--pieces $(PIECES))

test-everything: $(STAMP)
	ZEROSHARD_TEST_EVERYTHING=1 $(BIN)/python -m pytest $(SIDE_BY_SIDE) --timeout 7200 -rP \
		tests/runtime tests/step tests/comm tests/storage $(wildcard tests/test_*.py) \
		$(addprefix tests/checkpoint/test_,conjugated.py frozen_state.py low_bit.py own_state_dicts.py) tests/parity \
		tests/model tests/gpu tests/planning tests/outside tests/real_models tests/train tests/documents \
		tests/integrations tests/cli/test_cli.py

test-hosts: $(STAMP)
	$(BIN)/python -m pytest -m hosts -s tests/hosts

# The fault tests with their full counts, whose figures docs/reliability.md records: about an hour on 2 cores.
test-faults: $(STAMP)
	ZEROSHARD_FAULTS=full $(BIN)/python -m pytest tests/checkpoint tests/failures --timeout 7200 -s
	ZEROSHARD_FAULTS=full $(BIN)/python -m pytest tests/integrations -k leave_in_seconds -s
