# docker build --target cpu -t rec_sdk_torch .          # the tables on a CPU
# docker build --target npu -t rec_sdk_torch:npu .      # torch_npu on the emulated NPU, beside it
# docker run --rm rec_sdk_torch                         # what works: the doctor
# docker run --rm -v "$PWD:/job" rec_sdk_torch:npu .venv-npu/bin/python -m rec_sdk_torch.emulate /job/train.py
#
# PIP_EXTRA_INDEX_URL names an index with torch's CPU builds; the default one has those with CUDA, of several GB.
FROM python:3.11-bookworm AS cpu
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
ENV PIP_EXTRA_INDEX_URL=${PIP_EXTRA_INDEX_URL} PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
RUN apt-get update && apt-get install -y --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/rec_sdk_torch
# The requirements first: a change of the sources then installs nothing again.
COPY Makefile requirements*.txt ./
RUN make .venv/.installed
COPY . .
RUN make build
ENV PATH=/opt/rec_sdk_torch/.venv/bin:${PATH}
CMD ["python", "-m", "rec_sdk_torch.doctor"]

FROM cpu AS npu
RUN make build-npu
CMD [".venv-npu/bin/python", "-m", "rec_sdk_torch.emulate", "-m", "rec_sdk_torch.doctor"]
