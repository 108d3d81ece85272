# The README's commands in a container, for the CPU and for NVIDIA GPUs; docs/platforms.md says how to build and start it.
FROM python:3.12-slim

RUN apt-get update \
    && apt-get install --yes --no-install-recommends git libatomic1 make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /a3c-mp
COPY Makefile pyproject.toml requirements.txt requirements-all.txt ./
# Where torch comes from: by default the build with CUDA. The index of its CPU builds is on pytorch.org ("Get started").
ARG TORCH_INDEX=""
RUN PIP_EXTRA_INDEX_URL="$TORCH_INDEX" PIP_NO_CACHE_DIR=1 make .venv/.installed-all
COPY . .
RUN touch .venv/.installed .venv/.installed-all
CMD ["make", "train"]
