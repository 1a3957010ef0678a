# Everything a newcomer types. Each target sets up what it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# More than cores: most tests wait for processes and servers.
JOBS   ?= 5
# The image's target for image-check: cpu, cuda or tpu.
IMAGE  ?= cpu

.PHONY: help demo test check bench soak peers-install peers docs image-check release-check requirements clean
help:            ## what there is
	@grep -hE '^[a-z-]+: .*##|^[a-z-]+:  *##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(VENV)/.ready: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --require-hashes -r requirements.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

demo: $(VENV)/.ready  ## extract the embedded model's activations over the embedded ARC tasks
	$(BIN)/spile extract

test: $(VENV)/.ready  ## the tests, in minutes
	$(BIN)/pytest -n $(JOBS) --dist worksteal -m "not slow and not soak" tests

check: $(VENV)/.ready  ## format, lint, types, rooms
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(BIN)/python scripts/audit.py

bench: $(VENV)/.ready  ## what this machine reaches, beside the alternatives
	$(BIN)/python -m bench

soak: $(VENV)/.ready  ## every randomized and slow case
	$(BIN)/pytest -n $(JOBS) --dist worksteal tests

# Over what .venv has: torch, jax, datasets and pandas are not installed twice.
.venv-peers/.ready: $(VENV)/.ready
	$(PYTHON) -m venv .venv-peers
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"), "$(CURDIR)/src", sep="\n")' \
	  > "$$(.venv-peers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
	.venv-peers/bin/pip install --quiet 'torch==2.13.0' 'sae-lens==6.54.12' 'torchdata==0.11.0' 'peft>=0.17'
	@touch $@

peers-install: .venv-peers/.ready

peers: peers-install  ## other people's programs read what we write, in an environment of their own
	.venv-peers/bin/python -m pytest -p no:cacheprovider tests/peers

docs: $(VENV)/.ready  ## the documentation as a site in build/site; every link and reference must resolve
	$(BIN)/python scripts/make_cli_reference.py
	$(BIN)/python scripts/make_api_reference.py
	test -x build/docs-venv/bin/mkdocs || { $(PYTHON) -m venv build/docs-venv && build/docs-venv/bin/pip install --quiet 'mkdocs==1.6.1' 'mkdocs-material==9.8.1'; }
	NO_MKDOCS_2_WARNING=1 build/docs-venv/bin/mkdocs build --strict --quiet

release-check:   ## sdist and wheel, built, installed into an empty environment, and the demo run from there
	PYTHON=$(PYTHON) scripts/release_check.sh

image-check:     ## build the container image for real, without a container engine (root, buildah, debootstrap), and try it
	scripts/image_check.sh $(IMAGE)

requirements: $(VENV)/.ready  ## pin every dependency anew, with hashes
	$(BIN)/pip-compile --quiet --strip-extras --generate-hashes --allow-unsafe --no-header --no-emit-index-url \
	  --no-emit-find-links --no-emit-trusted-host --extra data --extra dev -o requirements.txt pyproject.toml
	if command -v uv > /dev/null; then lock="uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	  --no-header --no-annotate --no-emit-index-url"; \
	  echo uv | $$lock --extra tpu -c requirements.txt pyproject.toml - -o src/spile/fleet/requirements.txt && \
	  $$lock --extra cuda -c src/spile/fleet/requirements.txt pyproject.toml | \
	  sed -n '/^\(jax-cuda\|nvidia-\)/,/[^\\]$$/p' > src/spile/fleet/requirements-cuda.txt; \
	else echo "no uv: what machines of a fleet install stays as it was"; fi

clean:           ## remove what the targets made
	rm -rf $(VENV) .venv-peers activations .bench build dist
