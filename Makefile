# The two commands that matter: `make demo` and `make test`. Both need Python 3.11 or newer and make, nothing else.
PYTHON ?= python3
BIN := .venv/bin
# two files of tests at a time
TOGETHER := -n 2 --dist loadfile

.PHONY: demo test research-test test-slow fuzz flower-test deploy-test nvflare-test room-test room-pictures check docs format bench bench-secagg bench-flower setup clean

demo: setup
	$(BIN)/quorumark demo

test: setup
	$(BIN)/python -m pytest -m "not slow and not research and not room" $(TOGETHER)

# alignment, attacks and the lab: they train models
research-test: setup
	$(BIN)/python -m pytest -m "research and not slow" $(TOGETHER)

test-slow: setup
	$(BIN)/python -m pytest -m "slow and not deploy"

# damaged files and messages: more of them than `make test` tries, or others (make fuzz SEED=7 COUNT=20000)
SEED ?= 0
COUNT ?= 2000
fuzz: setup
	$(BIN)/python -m tests.kit.fuzz --seed $(SEED) --count $(COUNT)

# Flower in simulation, which brings along Ray: what `make test` skips where they are not installed
flower-test: .venv/.flower
	$(BIN)/python -m pytest -m "not slow and not deploy" tests/flower tests/house/test_golden.py

# Flower as it is deployed: a SuperLink and five SuperNodes on loopback; up to six minutes
deploy-test: .venv/.flower
	$(BIN)/python -m pytest -m deploy -s tests/flower/test_deploy.py

# NVIDIA FLARE: its simulator, and a provisioned server with five sites on loopback
nvflare-test: .venv/.nvflare
	$(BIN)/python -m pytest -m "not slow" $(TOGETHER) tests/nvflare

# a room and its agents on loopback, hostile and killed; up to four minutes
room-test: setup
	$(BIN)/python -m pytest -m "room and not slow" tests/room

# pictures of the room for README and docs, by the walk with a browser
room-pictures: setup
	ROOM_PICTURES=build/pictures $(BIN)/python -m pytest -q tests/room/test_walk.py -k walks
	cp build/pictures/agent-query.png docs/figures/room-agent.png
	cp build/pictures/room-passed.png docs/figures/room-verdict.png

# what must be tidy before anything is tested
check: setup docs
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/house/test_layers.py

# the documentation as a site, in build/docs/site; a link that leads nowhere ends it
docs: setup
	$(BIN)/python docs/site/pages.py build/docs
	$(BIN)/zensical build --config-file build/docs/zensical.toml --clean --strict

format: setup
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# full sizes: a quarter of an hour or more, and 12 GB of free disk; the JSON that is committed comes from here
bench: setup
	$(BIN)/quorumark bench field --json benchmarks/results/field.json
	$(BIN)/quorumark bench shamir --json benchmarks/results/shamir.json
	$(BIN)/quorumark bench dkg --json benchmarks/results/dkg.json
	$(BIN)/quorumark bench dealer --json benchmarks/results/dealer.json
	$(BIN)/quorumark bench round --json benchmarks/results/round.json
	$(BIN)/quorumark bench verify --json benchmarks/results/verify.json
	$(BIN)/quorumark bench plot

# against Flower's own functions
bench-secagg: .venv/.flower
	$(BIN)/quorumark bench secagg --json benchmarks/results/secagg.json

# the same Flower app with and without the mark, deployed and in simulation: a quarter of an hour
bench-flower: .venv/.flower
	rm -rf runs/flower
	mkdir -p runs
	$(BIN)/python examples/flower-hospitals/deploy --out runs/flower --rounds 5 --compare 4
	$(BIN)/quorumark bench flower --deployment runs/flower/summary.json --json benchmarks/results/flower.json

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "quorumark needs Python 3.11 or newer; name one with: make PYTHON=python3.11 …"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e ".[bench,demo,dev,docs,lab,room]"
	@touch $@

.venv/.flower: .venv/.ready
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e ".[flower]"
	@touch $@

.venv/.nvflare: .venv/.ready
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e ".[nvflare]"
	@touch $@

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
