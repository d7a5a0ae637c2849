# make          sets up .venv once      make test      the tests       make pretrain   a GPT on 4 processes
# make lint     ruff and mypy           make test-all  more of each product (test-full: what test leaves out; test-product: the rest)   make pretrain-long   below gzip
# make docs     the documentation as a site in site/   make test-versions   other versions of torch
SHELL := /bin/bash
TORCH ?= torch==2.13.0
VENV ?= .venv
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
STAMP := $(VENV)/.stamp
# compiled files are kept whatever the environment says: every worker, rank and child imports the same files
RUN := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python
# tests at a time: one worker has the pool of four ranks, the others the tests that need none (tests/workers.py)
WORKERS ?= 2
PYTEST := $(RUN) -m pytest --numprocesses $(WORKERS) --dist loadscope --no-loadscope-reorder
NPROC ?= 4
# a run whose curve is the same on the layouts tried to 1e-4 (docs/benchmarks.md): no gradient is divided by a number as small as its rounding
OPTIMIZER := --optimizer.lr 2e-3 --optimizer.min-lr 2e-4 --optimizer.lr-warmup-steps 40 --optimizer.adam-beta2 0.95 \
	--optimizer.adam-eps 1e-5
LAYOUT ?= --parallel.tensor 2 --parallel.pipeline 2 --parallel.sequence-parallel --pipeline.schedule zb-v --training.micro-batch-size 4
TORCHRUN := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m torch.distributed.run --standalone --nproc-per-node $(NPROC)

.PHONY: setup test test-full test-all test-product test-versions lint docs format pretrain pretrain-long benchmarks
setup: $(STAMP)

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python >= 3.11 not found; install it or set PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' || { echo "venv is missing: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" -e ".[dev]"
	touch $@

test: $(STAMP)
	$(PYTEST) -m "not full" --durations=10

test-full: $(STAMP)
	$(PYTEST) -m "full and not product" -rs --durations=10

# the rest of the products of options, of which test-all runs a part: hours
test-product: $(STAMP)
	$(PYTEST) -m product --durations=10

test-all: test test-full

VERSIONS ?= 2.11.0 2.12.1 2.13.0 latest
test-versions:
	PYTHON=$(PYTHON) $(PYTHON) tests/versions.py $(VERSIONS)

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# links are checked; a warning is an error
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict

format: $(STAMP)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# two pipeline stages of two tensor ranks, saving beside the training; then four tensor ranks go on from step SAVED to LAST.
# STEPS: fewer of the 200, on the same curve
SAVED ?= 90
LAST ?= 100
pretrain: $(STAMP)
	rm -rf runs/pretrain/checkpoints
	$(TORCHRUN) -m core.pretrain $(LAYOUT) $(OPTIMIZER) --training.log-interval 5 \
		$(if $(STEPS),--training.train-steps $(STEPS) --optimizer.lr-decay-steps 200) \
		--checkpoint.directory runs/pretrain/checkpoints --checkpoint.every $(SAVED)
	$(TORCHRUN) -m core.pretrain --parallel.tensor 4 --parallel.sequence-parallel --training.micro-batch-size 16 \
		--training.log-interval 5 --training.train-steps $(LAST) $(OPTIMIZER) --optimizer.lr-decay-steps 200 \
		--training.output runs/resumed \
		--checkpoint.load runs/pretrain/checkpoints/step-$$(printf %08d $(SAVED)) \
		--training.compare-with runs/pretrain/metrics.jsonl

pretrain-long: $(STAMP)
	$(TORCHRUN) -m core.pretrain $(LAYOUT) $(OPTIMIZER) --training.train-steps 1200

benchmarks: $(STAMP)
	$(RUN) -m benchmarks.dense_step
	$(RUN) -m benchmarks.tensor_parallel
	$(RUN) -m benchmarks.pipeline
	$(RUN) -m benchmarks.checkpoint
	$(RUN) -m benchmarks.data_parallel
	$(RUN) -m benchmarks.data
	$(RUN) -m benchmarks.huggingface
	$(RUN) -m benchmarks.accelerator --dry
