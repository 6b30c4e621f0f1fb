# Two commands: make course, make test. On a laptop without a GPU, CPU=1 takes PyTorch's CPU build.
PYTHON ?= python3
BIN := .venv/bin
VIRTUAL := .virtual_gpu
PIP_OPTIONS := $(if $(CPU),--extra-index-url https://download.pytorch.org/whl/cpu)
PYTEST := $(BIN)/python -m pytest -q --durations=10
ALL_OF := $(foreach part,bad_input decide faults forks machines models plan predict,tests/test_$(part).py)
# CARD=T4: on a virtual one, with these values.
ON = $(if $(CARD),$(VIRTUAL)/bin/python -m virtual_gpu --card $(CARD) --values $(1),$(if $(wildcard .venv/installed),$(BIN)/python,$(PYTHON)))
NBVAL := -p nbval -o addopts= --nbval-lax --nbval-current-env --nbval-cell-timeout=300 --nbval-sanitize-with=tests/sanitize.cfg
LESSONS = PYTHONPATH="$(CURDIR)" $(PYTEST) $(NBVAL)
# Two lessons share the processors; on a GPU they come one by one.
HALF = $$(( ($$(getconf _NPROCESSORS_ONLN) + 1) / 2 ))
TWO = $(if $(shell command -v nvidia-smi),,-n 2 --dist loadfile)

# ONLY="00 05" chooses lessons.
course: .venv/installed
	$(BIN)/python scripts/course.py run $(if $(ONLY),--only $(ONLY))

lesson: .venv/installed
	$(BIN)/python scripts/course.py lesson $(L)

record: $(if $(CARD),$(VIRTUAL)/installed)
	$(call ON,all) scripts/course.py record $(if $(ONLY),--only $(ONLY))
	$(if $(CARD),$(call ON,small) scripts/course.py record $(if $(ONLY),--only $(ONLY)))

record-predictions: $(if $(CARD),$(VIRTUAL)/installed)
	$(call ON,small) scripts/record_predictions.py

# What each technique of notebooks/recipe.py saves on a virtual T4.
recipe: CARD ?= T4
recipe: $(VIRTUAL)/installed
	$(call ON,small) scripts/recipe.py

lab: .venv/installed
	PYTHONPATH="$(CURDIR)" $(BIN)/jupyter lab --notebook-dir=notebooks

# Fast tests first, two at a time but for those that hold a time; then every lesson from a foreign folder, two at a
# time. A lesson that failed runs once more, whole: on a shared machine a time outside its bounds may be a neighbour's.
test: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check tutorial_utils virtual_gpu scripts tests
	OMP_NUM_THREADS=1 $(PYTEST) -n 2 --dist worksteal -m "not alone and not nbval"
	$(PYTEST) -m alone $$(grep -rl --include="*.py" mark.alone tests)
	rm -rf reports/nbval && mkdir -p reports/nbval && cp notebooks/[0-9]*.ipynb reports/nbval
	$(if $(TWO),OMP_NUM_THREADS=$(HALF)) $(LESSONS) $(TWO) reports/nbval || { again=$$(grep -o 'reports/nbval/[^:]*' .pytest_cache/v/cache/lastfailed | sort -u); \
		test -n "$$again" && $(LESSONS) $$again; }

# Besides: every lesson in a fork's folder without a network, twice in a row, and on machines that are imitated; each
# fault with a whole lesson; each proof broken in every way, and lesson 14 in a script by Inductor (PART=proofs); all
# predictions; 2,000 cases of bad input; random plans.
test-all: test all-of
all-of: .venv/installed
	$(if $(filter proofs,$(PART)),,COURSE_TEST_ALL=1 $(PYTEST) $(if $(PART),tests/test_$(PART).py,$(ALL_OF)))
	$(if $(filter-out proofs,$(PART)),,COURSE_TEST_ALL=1 $(PYTEST) tests/lessons -k "proof_can_fail or torch_compile and competition_script")

# Needs pip and a network, and none of the course's packages.
kit:
	$(PYTHON) scripts/kit.py $(WHEELS)

# The lessons and their tests with the versions of Kaggle, Colab or the newest: P=kaggle, colab, newest.
platform:
	$(PYTHON) scripts/platforms.py $(P) $(if $(CPU),--cpu) $(if $(ONLY),--only $(ONLY)) $(if $(WITH),--python $(WITH))

# The CUDA build of torch on a card that is not there; needs gcc. `make virtual-gpu-test` tries it.
virtual-gpu: $(VIRTUAL)/installed
virtual-gpu-test: $(VIRTUAL)/installed
	VIRTUAL_GPU_PYTHON=$(VIRTUAL)/bin/python $(PYTEST) tests/virtual_gpu

# Every lesson on a virtual card: CARD=T4, or another of tutorial_utils/facts/gpus.toml.
runner: CARD ?= T4
runner: $(VIRTUAL)/installed
	rm -rf reports/runner && mkdir -p reports/runner && cp $(or $(foreach n,$(ONLY),notebooks/$(n)_*.ipynb),notebooks/[0-9]*.ipynb) reports/runner
	PYTHONPATH="$(CURDIR)" $(call ON,all) -m pytest -q --durations=10 $(subst timeout=300,timeout=900,$(NBVAL)) reports/runner

$(VIRTUAL)/installed: requirements.txt .venv/installed
	$(BIN)/python -m virtual_gpu.environment $(VIRTUAL)
	touch $@

# pip would compile on one processor. Some files are templates and do not compile; Python compiles later what is left.
.venv/installed: requirements.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 13) or sys.exit(f"$(PYTHON) is Python {v[0]}.{v[1]}; accepted: 3.11 to 3.13, named so: PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile $(PIP_OPTIONS) -r requirements.txt
	@$(BIN)/python -W ignore -m compileall -q -j 0 .venv/lib > /dev/null || true
	touch $@

.PHONY: course lesson record record-predictions recipe lab test test-all all-of kit platform virtual-gpu virtual-gpu-test runner
