# vLLM with the connector. Build from the clone's root:
#   docker build -f deploy/images/vllm.Dockerfile -t vllm-kvstore:0.1.0 .
FROM vllm/vllm-openai:v0.32.0
COPY pyproject.toml README.md LICENSE /src/
COPY kvstore /src/kvstore
COPY connector /src/connector
COPY kernels /src/kernels
# Without the extra `node`: vLLM keeps its grpcio and protobuf. Constrained by what the image has.
RUN pip freeze --exclude-editable > /tmp/have.txt \
 && pip install --no-cache-dir -c /tmp/have.txt '/src[cuda]' \
 && rm -r /src /tmp/have.txt
ENV PYTHONSAFEPATH=1
