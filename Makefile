# Every target prepares what it needs; you have to do nothing by hand before it.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3.11
BIN := .venv/bin
ENVIRONMENT := .venv/.complete
UV := 0.13.8
COMPOSE := .cache/compose/tools
# Hundreds of processes start in a test or a demo: none of them should compile again what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## Show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(ENVIRONMENT) ## Real Cassandra, Airflow and Spark here: copy 5 tables during writes, find 0 differences
	@$(BIN)/python -m examples.flights.demo

.PHONY: demo-scylla
demo-scylla: $(ENVIRONMENT) ## A ScyllaDB table (a stand-in): its CDC log, messages and replica; find 0 differences
	@$(BIN)/python -m examples.scylla.demo

.PHONY: test
test: $(ENVIRONMENT) ## Lint, types and all tests (real servers, Spark and Airflow): some 31 minutes on two cores
	@$(MAKE) --no-print-directory -j 3 lint test-jars kernels spark-classes
	@# A test that hangs ends its process, which shows where it is.
	$(BIN)/python -m pytest --numprocesses 2 --dist loadscope --no-loadscope-reorder --max-worker-restart 0 \
	  -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true

.PHONY: test-jars
test-jars: $(ENVIRONMENT)
	@$(BIN)/python -m servers.jars cassandra-5.0 cassandra-4.1 delta kafka

.PHONY: kernels
kernels: $(ENVIRONMENT)
	@$(BIN)/python -m ringsync.warm

.PHONY: spark-classes
spark-classes: $(ENVIRONMENT)
	@$(BIN)/python -m servers.spark

.PHONY: test-chaos
test-chaos: $(ENVIRONMENT) ## The long tests, some three hours: kills, nodes that die, join or leave, outages, all of it at random
	$(BIN)/python -m servers.jars cassandra-5.0 delta gcs kafka apicurio
	$(BIN)/python -m pytest -m chaos

.PHONY: test-scylla
test-scylla: $(ENVIRONMENT) ## The sync of a real ScyllaDB: RINGSYNC_SCYLLA=host:port make test-scylla
	$(BIN)/python -m servers.jars delta
	$(BIN)/python -m pytest -m chaos tests/scylla/test_live.py

.PHONY: test-compose
test-compose: $(ENVIRONMENT) ## docker-compose.yaml by podman, as root, some 50 minutes: build, start, follow a table, restart all
	$(BIN)/python -m servers.jars cassandra-5.0 kafka apicurio
	@# A program that is called, in an environment of its own: its licence is GPL 2, so nothing of ours depends on it.
	@test -x $(COMPOSE)/bin/podman-compose || { $(PYTHON) -m venv $(COMPOSE) && $(COMPOSE)/bin/pip install --quiet podman-compose==1.6.0; }
	PATH="$(CURDIR)/$(COMPOSE)/bin:$$PATH" $(BIN)/python -m pytest -m compose -s tests/compose

.PHONY: lint
lint: $(ENVIRONMENT) ## Format, lint and types only
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

.PHONY: bench
bench: $(ENVIRONMENT) ## Benchmarks against peers, over an hour: each prints a BENCHMARK_RESULT line
	$(BIN)/python bench/page_decode.py
	$(BIN)/python bench/scan.py
	$(BIN)/python bench/commitlog.py
	$(BIN)/python bench/sstable.py
	$(BIN)/python bench/sstable_frame.py
	$(BIN)/python bench/kafka_relay.py
	$(BIN)/python bench/row_reads.py
	$(BIN)/python bench/late_rows.py
	$(BIN)/python bench/scylla_log.py
	$(BIN)/python bench/sync.py lag
	$(BIN)/python bench/sync.py backlog

.PHONY: environment
environment: $(ENVIRONMENT) ## Python environment in .venv with exactly the locked packages

$(ENVIRONMENT): requirements.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "ringsync: error: $(PYTHON) is not on PATH; install Python 3.11 or say make PYTHON=/path/to/python3.11" >&2; exit 3; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' || { echo "ringsync: error: $(PYTHON) is older than Python 3.11" >&2; exit 3; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing the locked Python packages into .venv (about 1.5 GB, once): a minute or two on a fast network"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV) \
	  && $(BIN)/uv pip install --compile-bytecode --python $(BIN)/python --no-deps --requirement requirements.lock \
	  && $(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable . \
	  || { echo "ringsync: error: the Python packages could not be installed: see above; is the package registry reachable and is there 3 GB of free disk space?" >&2; exit 3; }
	@touch $@

.PHONY: lock
lock: $(ENVIRONMENT) ## Resolve requirements.txt and requirements-dev.txt into requirements.lock
	$(BIN)/python -m uv pip compile --quiet --no-header --no-annotate --python-version 3.11 requirements-dev.txt -o requirements.lock

.PHONY: clean
clean: ## Remove environment, caches and the demo's data
	rm -rf .venv .cache .demo
