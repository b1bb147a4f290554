# Every target does the set-up it needs; ARGS="…" goes to the program behind the target.

SHELL := /bin/bash
.DEFAULT_GOAL := help
ARGS ?=
# Debian keeps mosquitto in sbin, which is not always in PATH.
export PATH := $(PATH):/usr/local/sbin:/usr/sbin:/sbin

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{ printf "  make %-14s %s\n", $$1, $$2 }'

.PHONY: setup
setup: ## Make .venv with everything (PYTHON=python3.13 picks the interpreter)
	@scripts/setup

.PHONY: demo
demo: setup ## Play the whole loop: node, clients, fleet, Spark; ends with a report (in .build/demo) and an audit
	@scripts/need-commands java
	@.venv/bin/motorcade demo --report .build/demo $(ARGS)

.PHONY: serve
serve: setup ## Run a node until it is stopped (ARGS="--mqtt 127.0.0.1:1883")
	@.venv/bin/motorcade serve $(ARGS)

.PHONY: test
test: setup ## Run all tests, three at a time (ARGS="tests/unit -k window" runs some, one at a time)
	@scripts/need-commands java mosquitto mosquitto_pub mosquitto_sub node npm redis-server haproxy
	@scripts/npm-packages tests/npm .build/npm
	@$(if $(ARGS),.venv/bin/python -m pytest $(ARGS),scripts/test)

.PHONY: fuzz
fuzz: setup ## Throw broken conversations at a broker for five minutes (ARGS="--minutes 30 --seed 7")
	@.venv/bin/python -m tests.fuzz.fuzz_node $(or $(ARGS),--minutes 5)

ROUNDS ?= 20
ENGINE ?= rocksdb,redis

.PHONY: chaos
chaos: setup ## Kill a node under load and count every message (ROUNDS=100 ENGINE=rocksdb FANOUT=1 or ECQ=1; see docs/chaos.md)
	@scripts/need-commands redis-server
	@.venv/bin/python -m tests.chaos.$(if $(FANOUT),fanout,$(if $(ECQ),ecq,crash)) --rounds $(ROUNDS) --engine $(ENGINE) $(ARGS)

.PHONY: chaos-cluster
chaos-cluster: setup ## Three nodes as one broker under faults, two at a time, with every message counted (ARGS="--faults 150 --redis cluster --forget")
	@scripts/need-commands redis-server
	@.venv/bin/python -m tests.chaos.cluster --rounds $(ROUNDS) $(ARGS)

.PHONY: chaos-grants
chaos-grants: setup ## Subscribe at one node, publish at another, 10 000 times; nothing may be missed (ARGS="--fault stand --redis lone")
	@scripts/need-commands redis-server
	@.venv/bin/python -m tests.chaos.grants $(ARGS)

.PHONY: chaos-dispatch
chaos-dispatch: setup ## Kill leaders, workers and Redis masters under load and count every message (ARGS="--rounds 100")
	@scripts/need-commands redis-server
	@.venv/bin/python -m tests.chaos.dispatch $(ARGS)

.PHONY: chaos-spark
chaos-spark: setup ## Kill pipelines on Spark and compare lake and vehicles with a ledger (ARGS="--rounds 20 --pipeline ingest --cluster")
	@scripts/need-commands java redis-server
	@.venv/bin/python -m tests.chaos.spark $(ARGS)

.PHONY: soak
soak: setup ## Churn everything of a node with ever-new names; nothing may stay (ARGS="--minutes 30 --cycles 3"; see docs/soak.md)
	@.venv/bin/python -m tests.soak.soak $(ARGS)

.PHONY: faults
faults: setup ## Plant known faults in a copy of the sources; a test must find each (ARGS="--only fanout*"; see docs/faults.md)
	@.venv/bin/python -m tests.faults.run $(ARGS)

.PHONY: check
check: setup ## Check format, lint, types and import contracts
	@scripts/check

.PHONY: fmt
fmt: setup ## Format the sources and repair what the linter can repair
	@.venv/bin/ruff check --fix-only --quiet
	@.venv/bin/ruff format

.PHONY: bench
bench: setup ## Measure beside other brokers in the same run
	@scripts/need-commands cc mosquitto node npm
	@PATH="$(CURDIR)/.venv/bin:$$PATH" bench/run $(ARGS)

.PHONY: lock
lock: setup ## Renew the lock files after a change of dependencies (ARGS=--upgrade takes the newest versions)
	@scripts/lock $(ARGS)

.PHONY: clean
clean: ## Remove everything that make has made
	@rm -rf .venv .build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
