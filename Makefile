# make run | test | test-full | soak | fuzz | lint | native | clean. Each target sets up .venv by itself when it is missing or older than requirements*.txt.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed

DIGITS := shards/digits
RUN    := digits-$(shell date +%Y%m%d-%H%M%S)

.PHONY: run test test-full test-long soak fuzz lint native clean

# Digits (examples/digits.zip) from pictures to an evaluated model, on 2 CPU processes: about a minute.
run: $(STAMP) native
	$(PY) scripts/make_shards.py examples/digits.zip $(DIGITS) --split train=0.8,val=0.2 --num-shards 10
	$(PY) run.py --data $(DIGITS)/train --val-data $(DIGITS)/val -c recipes/digits.yaml \
	    --device cpu --nproc-per-node 2 --name $(RUN)
	$(PY) run.py --evaluate --val-data $(DIGITS)/val --resume runs/$(RUN)/checkpoints/best.pt \
	    --device cpu --nproc-per-node 2 --name $(RUN)-evaluation
	@echo
	@echo "shards:      $(DIGITS)/train  $(DIGITS)/val"
	@echo "run:         runs/$(RUN)  (metrics.jsonl, log.txt, TensorBoard events)"
	@echo "best model:  runs/$(RUN)/checkpoints/best.pt"

test: $(STAMP) native
	$(PY) -m pytest -m "not full"

test-full: $(STAMP) native
	$(PY) -m pytest

# Twenty kills a run, for as many seeds as CHAOS_SEEDS names (default 0,1,2).
soak: $(STAMP) native
	CHAOS_SEEDS=$${CHAOS_SEEDS:-0,1,2} $(PY) -m pytest -m full tests/test_chaos.py

# What test-full has beyond test.
test-long: $(STAMP) native
	$(PY) -m pytest -m full

# A million damaged JPEGs through the C decoder under AddressSanitizer: some minutes. FUZZ_SEED (default 1) makes others.
fuzz: $(STAMP) native
	FUZZ_INPUTS=$${FUZZ_INPUTS:-1000000} $(PY) -m pytest -s -m full tests/test_fuzz.py

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m mypy .

# What is in C, where a compiler (and for JPEGs libjpeg-turbo's header) is; silent where not, and where it is built already.
native:
	@sh data/native/build.sh

# Shards and runs stay: they may be yours.
clean:
	rm -rf $(VENV) data/native/*.so .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last: an interrupted install is done again.
$(STAMP): requirements.txt requirements-dev.txt requirements-remote.txt
	test -x $(PY) || $(PYTHON) -m venv --clear $(VENV)
	$(PY) -m pip install -r requirements.txt -r requirements-dev.txt
	touch $@
