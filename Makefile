PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: test bubblewrap test-slow test-faults test-cluster lint types sweep policies methods train-tiny lock dist clean

test: lint types bubblewrap
	$(BIN)/python -m pytest -m "not slow and not cluster" -n auto

# Installs the sandbox for generated programs. If that is not possible, the tests that need it are skipped.
bubblewrap:
	@if [ -f /etc/debian_version ] && [ "$$(id -u)" = 0 ] && ! command -v bwrap >/dev/null; then \
		apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends bubblewrap || \
			echo "warning: bubblewrap could not be installed" >&2; fi

test-slow: $(VENV)/installed-dev bubblewrap
	$(BIN)/python -m pytest -m alone -n 0 -o faulthandler_timeout=1800; alone=$$?; \
	$(BIN)/python -m pytest -m "slow and not cluster and not alone" -n auto -o faulthandler_timeout=1800 && exit $$alone

# Injects faults into real sweeps; see tools/README.md. FAULTS=1000 runs the long campaign and PAGE=docs/faults.md writes
# its results. With JOURNAL=faults.jsonl, an interrupted campaign continues where it stopped.
FAULTS ?= 120
SEED ?= 0
test-faults: $(VENV)/installed
	$(BIN)/python -m tools.faults --runs $(FAULTS) --seed $(SEED) $(if $(PAGE),--write $(PAGE)) \
		$(if $(JOURNAL),--journal $(JOURNAL))

# Two Slurm nodes, `ray up`, an autoscaler and failing nodes, each node in its own namespaces. Needs Debian and root.
# Installs missing programs without starting their services.
CLUSTER_PACKAGES := munge slurm-wlm openssh-server rsync tmux iproute2
test-cluster: $(VENV)/installed-dev
	@if [ -f /etc/debian_version ] && [ "$$(id -u)" = 0 ] && ! dpkg -s $(CLUSTER_PACKAGES) >/dev/null 2>&1; then \
		apt-get update -q && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
			apt-get install -qy --no-install-recommends $(CLUSTER_PACKAGES); fi
	$(BIN)/python -m pytest -m cluster -n 2 --dist loadfile -rs

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed-dev
	$(BIN)/mypy

# Runs nine configurations on at most 100 documents per subject; without a GPU, the bundled model on its own documents.
sweep: $(VENV)/installed
	$(BIN)/python -m orchestrator.sweep --tasks gsm8k,minerva_math --limit 100

# Compares policies with k1 at other decode settings, on all bundled documents: four sweeps, one report.
BATCH ?= 1
TASKS ?= gsm8k,minerva_math
POLICIES := k1_first,k1_middle,k1_last,k2_first,k2_middle,k2_last,k3_first,k3_middle,k3_last,stale=2,stale=3,skip_middle,$\
adaptive=0.1_first,adaptive=0.3_first,adaptive=0.1_middle,adaptive=0.3_middle,$\
trim=0.1_middle,trim=0.25_middle,trim=0.25_middle.random,trim=0.1_all,trim=0.25_all,trim=0.25_all.random,$\
mlp=2_middle,mlp=2_all,attn=2_middle,attn=2_all
SWEEP := $(BIN)/python -m orchestrator.sweep --model tiny --data bundled --tasks $(TASKS) --batch-size $(BATCH)
NAME := policies-b$(BATCH)
policies: $(VENV)/installed
	$(SWEEP) --name $(NAME) --policies $(POLICIES)
	$(SWEEP) --name $(NAME)-threshold --policies k1 --threshold 0.95,0.9,0.8,0.7,0.5
	$(SWEEP) --name $(NAME)-small-block --policies k1 --small-block 8,4,16,32
	$(SWEEP) --name $(NAME)-block-cache --policies k1 --block-cache on,off
	$(BIN)/python -m orchestrator.report $(foreach part,/ -threshold -small-block -block-cache,results/$(NAME)$(part)) \
		--out results/$(NAME)/all

# Compares published methods at three budgets with the grid and with k1 at other decode settings: three sweeps, one report.
# LIMIT=20 takes the first 20 documents of each task.
LIMIT ?=
METHODS := k1_first,k1_middle,k1_last,k2_first,k2_middle,k3_first,skip_middle,skip_middle.every,stale=2,trim=0.25_all,$\
delayed=0_all,delayed=1_all,delayed=3_all,dllm=0.1_2-35,dllm=0.25_2-35,dllm=0.5_2-35,elastic=0.1_all,elastic=0.3_all,$\
elastic=1_all,es=0.25_4-35,es=0.5_4-35,es=0.75_4-35,focus=0.25_2-35,focus=0.5_2-35,focus=0.75_2-35
REVEAL := threshold=0.95,threshold=0.9,threshold=0.7,threshold=0.5,margin=0.9,margin=0.5,entropy=0.1,entropy=0.5,$\
klass=0.9,klass=0.7,credit=0.95,credit=0.9,topk=1,topk=2,topk=3,factor=0.5,factor=1
methods: $(VENV)/installed
	$(SWEEP) $(if $(LIMIT),--limit $(LIMIT)) --name methods --policies $(METHODS)
	$(SWEEP) $(if $(LIMIT),--limit $(LIMIT)) --name methods-reveal --policies k1 --reveal $(REVEAL)
	$(SWEEP) $(if $(LIMIT),--limit $(LIMIT)) --name methods-small-block --policies k1 --small-block 8,4,16,32
	$(BIN)/python -m orchestrator.report $(foreach part,/ -reveal -small-block,results/methods$(part)) --out results/methods/all

# Trains the bundled model: writes prompts and answers, then trains for at most 75 minutes on 2 cores. An interrupted run
# continues; the model's files are replaced when training has finished.
train-tiny: $(VENV)/installed
	@mkdir -p build
	$(BIN)/python -m tools.bundled.training_lines --out build/tiny.jsonl
	$(BIN)/python -m tools.tiny.train --data build/tiny.jsonl --out sampler/tiny --checkpoint build/tiny.safetensors

# The marker files are written last, so an interrupted installation is repeated.
$(VENV)/installed: pyproject.toml constraints.txt requirements.lock
	$(call install,requirements.lock)

$(VENV)/installed-dev: pyproject.toml constraints.txt requirements-dev.lock
	$(call install,requirements-dev.lock)
	@touch $(VENV)/installed

define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) must be Python 3.11 or newer; choose another one: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --require-hashes --no-deps --requirement $(1)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@
endef

# Writes the lock files: each package in the version of constraints.txt, with the hashes of all its files. torch and the
# packages that only torch needs are left out: its builds (CPU, CUDA, ROCm) differ in hashes, not in version. Needs uv.
OF_TORCH := torch triton cuda-bindings cuda-pathfinder cuda-toolkit $(addprefix nvidia-,cublas cuda-cupti cuda-nvrtc \
	cuda-runtime cudnn-cu13 cufft cufile curand cusolver cusparse cusparselt-cu13 nccl-cu13 nvjitlink nvshmem-cu13 nvtx)
LOCK := uv pip compile --quiet --no-sources --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
	--constraint constraints.txt $(addprefix --no-emit-package ,$(OF_TORCH))
lock:
	$(LOCK) pyproject.toml --extra build --output-file requirements.lock
	$(LOCK) pyproject.toml --extra dev --output-file requirements-dev.lock

# Builds the wheel and the source archive. The same commit always gives the same bytes.
export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 315532800)
dist:
	rm -rf dist build/sdist && mkdir -p dist build/sdist
	$(BIN)/python -c "import setuptools.build_meta as backend; backend.build_sdist('build')" > build/dist.log
	tar -xzf build/*.tar.gz -C build/sdist && chmod -R u=rwX,go=rX build/sdist
	tar --sort=name --mtime=@$(SOURCE_DATE_EPOCH) --owner=0 --group=0 --numeric-owner -cf - -C build/sdist . | \
		gzip -9n > dist/$$(basename build/*.tar.gz) && rm build/*.tar.gz
	cd build/sdist/* && $(abspath $(BIN))/python -c \
		"import setuptools.build_meta as backend; backend.build_wheel('$(CURDIR)/dist')" > $(CURDIR)/build/dist.log
	@sha256sum dist/*

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
