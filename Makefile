# make train      set up what training needs, then train Pong
# make play       watch a trained policy, in a window or as game.mp4; POLICY=runs/NAME: one of your own
# make test       set up the rest, then test; test-fast: on every save; test-slow: what CI leaves out
# make check      format, lint, types
# make gpu-check  what --cuda does on this machine's GPU, in one file (docs/gpu.md)
# make docs       the documentation as pages with search, in site/: python3 -m http.server --directory site
# make tensorboard, format, clean
# PYTHON makes $(VENV) and has no effect once that exists; for another one: make clean, then make PYTHON=python3.12 train
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
RUNS ?= runs
POLICY ?= zoo/PongNoFrameskip-v4.safetensors

.PHONY: help train play test test-fast test-slow gpu-check check format docs tensorboard clean

train: $(VENV)/.installed
	$(BIN)/python train_a3c_data.py $(ARGS)

play: $(VENV)/.installed
	$(BIN)/python play.py "$(POLICY)" --episodes 1 $(if $(DISPLAY)$(WAYLAND_DISPLAY),--window,--video game.mp4) $(ARGS)

test: $(VENV)/.installed-all
	$(BIN)/python -m pytest -n $$(($$(nproc) + 1)) --maxprocesses 8 --dist worksteal $(ARGS)

test-fast: $(VENV)/.installed-all
	$(BIN)/python -m pytest -n $$(nproc) --maxprocesses 8 --dist worksteal -m 'not slow and not whole' tests/unit $(ARGS)

test-slow: $(VENV)/.installed-all
	$(BIN)/python -m pytest -m slow $(ARGS)

gpu-check: $(VENV)/.installed-all
	$(BIN)/python bench/gpu_check.py $(ARGS)

check: $(VENV)/.installed-all
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

format: $(VENV)/.installed-all
	$(BIN)/python -m ruff format .
	$(BIN)/python -m ruff check --fix .

docs: $(VENV)/.installed-all
	$(BIN)/python -m mkdocs build $(ARGS)

tensorboard: $(VENV)/.installed
	$(BIN)/python -m tensorboard.main --logdir "$(RUNS)"

help:
	@sed -n 's/^# //p' Makefile

$(VENV)/.installed: requirements.txt pyproject.toml
	@$(or $(wildcard $(BIN)/python),$(PYTHON)) -c 'import sys; (3, 11) <= sys.version_info < (3, 15) or sys.exit("Python 3.11 to 3.14 is needed: make PYTHON=python3.12 train, after make clean")'
	@echo "installing torch and the other packages: a minute or more"
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

$(VENV)/.installed-all: requirements-all.txt $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-all.txt
	touch $@

clean:
	rm -rf "$(VENV)"
