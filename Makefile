# Everything here sets itself up: needed are make, Python 3.11 or newer with venv, and, for the
# demonstration and the integration tests, Prometheus and Alertmanager on PATH or apt-get to
# unpack them with (nothing is installed, no root is needed). The exporter's tests build a fake
# driver library and need a C compiler as `cc` (Debian and Ubuntu: apt-get install gcc libc6-dev).

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP_FLAGS := --quiet --disable-pip-version-check
ARGS ?=
# Tests run side by side, a file at a time and the long ones first; with ARGS in one process, so
# that -s and -x work.
JOBS ?= 2
SIDE_BY_SIDE := -n $(JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: help setup demo test check lint types rules generated lock clean

help:
	@echo "make demo ARGS=...   show the whole story on a simulated fleet (--list-faults lists what)"
	@echo "make test ARGS=...   run the tests; ARGS go to pytest"
	@echo "make check           format, lint, types, import contract, rules, tests: what CI runs"
	@echo "make setup           only install into $(VENV), from requirements.lock"
	@echo "make generated       write the files that are made from the code"
	@echo "make lock            pin the dependencies of setup.cfg anew (LOCKER=pip-compile)"

setup: $(VENV)/.ready

$(VENV)/.ready: requirements.lock setup.cfg pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed (set PYTHON=...)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "no venv could be made; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "setting up $(VENV) from requirements.lock; this takes a minute, once" >&2
	@$(BIN)/python -m pip install $(PIP_FLAGS) --require-hashes -r requirements.lock >&2
	@$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps --no-build-isolation --editable . >&2
	@touch $@

demo: setup
	@$(BIN)/sentinel demo $(ARGS)

test: setup
	$(BIN)/python -m pytest $(if $(strip $(ARGS)),$(ARGS),$(SIDE_BY_SIDE))

check: setup lint types rules
	$(BIN)/python -m pytest --no-skips $(SIDE_BY_SIDE) $(ARGS)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy
	$(BIN)/lint-imports

rules: setup
	@promtool=$$($(BIN)/python -m sentinel.lab.servers | sed -n 's/^promtool: //p') && \
		test -n "$$promtool" && \
		"$$promtool" check rules rules/*.rules.yaml && \
		"$$promtool" test rules rules/tests/*.yaml

generated: setup
	$(BIN)/python -m sentinel.cli config example > deploy/sentinel.example.yaml
	$(BIN)/python -c "import sentinel.config as c, sentinel.configfile as f; print(f.reference_page(c.Config), end='')" > docs/configuration.md
	$(BIN)/python -c "import sentinel.web.metrics as m; print(m.reference_page(), end='')" > docs/metrics.md
	$(BIN)/python -c "import sentinel.data as d, sentinel.data.page as p; print(p.metrics_page(d.load_catalog()), end='')" > docs/metrics-read.md
	$(BIN)/python -m sentinel.exporter.metrics docs/exporter.md

LOCKER ?= pip-compile
lock:
	echo "setuptools>=68" > build.in
	$(LOCKER) --quiet --generate-hashes --allow-unsafe --no-emit-options --no-header \
		--strip-extras --no-annotate --extra dev --extra lab --extra postgres --extra kubernetes -o requirements.lock setup.cfg build.in
	rm build.in
	sed -i '1i # Every dependency of the program, the lab and the development tools, pinned with hashes.\n# Made from setup.cfg by `make lock`; installed by `make` with --require-hashes.' requirements.lock

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
