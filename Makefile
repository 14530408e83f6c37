.DEFAULT_GOAL := help
python := .venv/bin/python

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

.venv/.ready: deploy/setup.sh deploy/locks/all-cpu.txt pyproject.toml
	@deploy/setup.sh

setup: .venv/.ready ## make .venv with everything (done by the other targets when needed)

quickstart: .venv/.ready ## one whole run on this machine: a tiny model learns to add, in minutes
	@.venv/bin/forebay run examples/quickstart.toml

smollm2: .venv/.ready ## a real model: SmolLM2-135M-Instruct learns a reasoning task
	@$(python) -m examples.smollm2
	@.venv/bin/forebay run examples/smollm2.toml

# An S3 server for the weight store's tests, apart because what it depends on does not go with ours.
.peers/moto/.ready: tests/buffer/moto.txt .venv/.ready
	@rm -rf .peers/moto && $(python) -m venv .peers/moto
	@.peers/moto/bin/python -m pip install --quiet --disable-pip-version-check -r $< && touch $@ \
		|| echo "no S3 server could be installed: the tests that need one are skipped"

test: .venv/.ready .peers/moto/.ready ## the whole suite, under 15 minutes on 2 cores
	@.venv/bin/pytest -q

prove: .venv/.ready .peers/moto/.ready ## the long proofs: learning, three shells, kills
	@.venv/bin/pytest -q -s -m prove tests/prove

check: .venv/.ready ## formatting, lints and types
	@.venv/bin/ruff format --check . && .venv/bin/ruff check . && .venv/bin/mypy && .venv/bin/pyright && .venv/bin/lint-imports

wire: .venv/.ready ## generate the protobuf code
	@PATH=$(CURDIR)/.venv/bin:$$PATH $(python) -m grpc_tools.protoc -I proto \
		--python_out=proto --grpc_python_out=proto --mypy_out=quiet:proto proto/forebay/wire/v1/*.proto
	@rm -f proto/forebay/wire/v1/common_pb2_grpc.py proto/forebay/wire/v1/journal_pb2_grpc.py

bench: .venv/.ready ## the benchmark of the first run, beside its synchronous peer
	@$(python) -m benchmarks.first_run

locks: .venv/.ready ## resolve the lock files anew
	@$(python) deploy/locks/lock.py

.PHONY: help setup quickstart smollm2 test prove check wire bench locks
