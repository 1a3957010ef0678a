# One image of spile under every engine: spile docker build --target cpu | cuda | tpu, or docker compose up.
# The base needs nothing but a Python that is new enough; what is installed is pinned by hash in requirements.txt.
# `make base-image` pins the base to the digest that its tag has at that moment.
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /build
RUN python3 -m venv tools && python3 -m venv --without-pip /opt/spile
COPY requirements.txt pyproject.toml ./
COPY scripts/runtime_requirements.py scripts/
# datasets and pyarrow for the data commands, and Ray for nodes of a cluster.
RUN tools/bin/python scripts/runtime_requirements.py --extra=data --extra=ray > runtime.txt \
 && tools/bin/pip --python /opt/spile/bin/python install --require-hashes -r runtime.txt
COPY README.md LICENSE ./
COPY src src
RUN tools/bin/python scripts/runtime_requirements.py hatchling > build.txt \
 && tools/bin/pip install --require-hashes -r build.txt \
 && tools/bin/pip wheel --no-deps --no-build-isolation --wheel-dir wheels . \
 && tools/bin/pip --python /opt/spile/bin/python install --no-deps wheels/*.whl

# The accelerators' libraries, pinned by hash like those of fleet machines.
FROM build AS build-tpu
RUN sed -n '/^libtpu==/,/[^\\]$/p' src/spile/fleet/requirements.txt > tpu.txt && test -s tpu.txt \
 && tools/bin/pip --python /opt/spile/bin/python install --require-hashes --no-deps -r tpu.txt
FROM build AS build-cuda
RUN tools/bin/pip --python /opt/spile/bin/python install --require-hashes --no-deps \
      -r src/spile/fleet/requirements-cuda.txt

# Not root, and at home under any number: --user gives mounted files their owner.
FROM ${BASE} AS runtime
ENV PATH=/opt/spile/bin:$PATH HOME=/home/spile PYTHONUNBUFFERED=1
RUN useradd --uid 1000 --create-home spile && mkdir /work && chmod 1777 /work /home/spile
WORKDIR /work
USER 1000
CMD ["spile", "extract"]

FROM runtime AS tpu
COPY --from=build-tpu /opt/spile /opt/spile
FROM runtime AS cuda
COPY --from=build-cuda /opt/spile /opt/spile
# For compose.yaml and demos: cpu with the fake bucket and the fake cloud, which no wheel contains.
FROM runtime AS dev
COPY --from=build /opt/spile /opt/spile
COPY tests/__init__.py /opt/fakes/tests/
COPY tests/fakes /opt/fakes/tests/fakes
ENV PYTHONPATH=/opt/fakes
FROM runtime AS cpu
COPY --from=build /opt/spile /opt/spile
