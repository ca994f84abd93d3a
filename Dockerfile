# Planning, reports and the what-if page, without torch:
#   docker build -t magicdec . && docker run --rm magicdec plan --model llama-3.1-8b
# With torch, to run, calibrate and demo on a CPU:
#   docker build -t magicdec-run --build-arg EXTRA=[run] --build-arg INDEX=https://download.pytorch.org/whl/cpu .
#   docker run --rm -v "$PWD:/work" magicdec-run demo
FROM python:3.11-slim
ARG EXTRA=""
ARG INDEX=""
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY magicdec magicdec
RUN if [ -n "$INDEX" ]; then pip install --no-cache-dir --constraint constraints.txt --index-url "$INDEX" torch; fi \
    && pip install --no-cache-dir --constraint constraints.txt ".$EXTRA"
WORKDIR /work
ENTRYPOINT ["magicdec"]
CMD ["plan"]
