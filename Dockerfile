# An image with this project and the versions of constraints.txt, for CPUs (the default) or for NVIDIA GPUs:
#   docker build --tag=my-image .
#   docker build --tag=my-image --build-arg=VARIANT=cuda .
# How to run it: docs/launchers.md, "Containers". tests/test_docker.py checks this file.
ARG VARIANT=cpu

FROM python:3.11.14-slim-bookworm AS base
ARG USER_ID=1000
# The kernels of this project, DeepSpeed's and Triton's are compiled at their first use, for the machine that runs.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid="$USER_ID" hybrid \
    && install --directory --owner=hybrid --group=hybrid /home/hybrid/.cache
WORKDIR /opt/hybrid-engine
COPY constraints.txt ./

FROM base AS for-cpu
RUN pip install --no-cache-dir --no-deps --constraint=constraints.txt \
    --index-url=https://download.pytorch.org/whl/cpu torch
ENV DS_ACCELERATOR=cpu OMP_NUM_THREADS=1

FROM nvidia/cuda:13.0.2-devel-ubuntu22.04 AS toolkit

FROM base AS for-cuda
# DeepSpeed compiles its CUDA operators with nvcc, of the CUDA that PyPI's torch 2.13.0 is built for.
COPY --from=toolkit /usr/local/cuda-13.0 /usr/local/cuda
ENV CUDA_HOME=/usr/local/cuda

FROM for-${VARIANT}
COPY pyproject.toml README.md LICENSE ./
COPY hybrid hybrid
COPY rlhf_examples rlhf_examples
COPY configs configs
RUN pip install --no-cache-dir --constraint=constraints.txt ".[examples,math,server,trl]"
USER hybrid
CMD ["hybrid", "doctor"]
