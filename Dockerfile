# Build for the CPU, or with kernels for NVIDIA GPUs from a Pascal (P100) on:
#   docker build -t brats_seg .
#   docker build -t brats_seg:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu126 .
FROM python:3.11-slim
ARG TORCH=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# what the NVIDIA container toolkit passes on; the CUDA libraries come with torch
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# torch first: the layer of some GB stays when the source changes
RUN pip install --no-cache-dir torch==${TORCH} --index-url ${TORCH_INDEX}
WORKDIR /opt/brats_seg
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY brats_seg ./brats_seg
RUN pip install --no-cache-dir --constraint constraints.txt '.[tensorboard,survival]'
RUN brats-seg --version
# caches of the package and of matplotlib, for a user of any number
ENV HOME=/tmp
WORKDIR /work
USER 1000
ENTRYPOINT ["brats-seg"]
CMD ["--help"]
