# docker build -t shoal .
# docker run --rm shoal demo
# docker run -it -p 4001:4001 -v shoal:/data shoal up --listen /ip4/0.0.0.0/tcp/4001 --announce /ip4/PUBLIC-ADDRESS/tcp/4001
#
# PIP_ARGS chooses the package index, and with it the build of PyTorch: for the CPU alone, which makes the smallest image,
#   --build-arg PIP_ARGS="--extra-index-url INDEX" --build-arg TORCH_SPEC="torch==2.13.0+cpu"
# where INDEX is the one that PyTorch's install page names. For CUDA likewise with +cu130 or another version; then run the image
# with --gpus all. For x86-64 and arm64 (not built by us): docker buildx build --platform linux/amd64,linux/arm64 .
# docker/check.sh, which builds without a registry, names a base of its own.
ARG BASE=python:3.11-slim
FROM ${BASE} AS build

ARG TORCH_SPEC="torch==2.13.0"
ARG PIP_ARGS=""

WORKDIR /opt/shoal
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY shoal shoal
COPY optim optim
COPY swarm swarm
COPY verification verification
COPY node node
# In place of the constraint on torch comes TORCH_SPEC, so that another build or version can be chosen.
# Then goes what nobody needs who runs a node: tests, and what one compiles against (torch.compile on a processor wants it, and g++).
RUN { grep -v '^torch' constraints.txt; echo "$TORCH_SPEC"; } > /tmp/constraints.txt \
    && python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir $PIP_ARGS -c /tmp/constraints.txt "$TORCH_SPEC" ".[watch]" \
    && /opt/venv/bin/pip uninstall --yes pip \
    && cd /opt/venv/lib/python3*/site-packages \
    && rm -rf torch/include torch/test torch/lib/*.a \
    && find torch/bin -type f ! -name torch_shm_manager -delete \
    && find numpy scipy sympy networkx -depth -type d -name tests -exec rm -rf {} +

FROM ${BASE}
COPY --from=build /opt/venv /opt/venv
COPY docker/health.sh /usr/local/bin/shoal-health

# The key and the runs (checkpoints, metrics) are in /data; whoever deletes the volume deletes the node's identity.
RUN useradd --create-home --uid 1000 shoal && mkdir /data && chown shoal:shoal /data
ENV XDG_CONFIG_HOME=/data/config PATH=/opt/venv/bin:$PATH
USER shoal
WORKDIR /data
VOLUME /data
EXPOSE 4001/tcp 4001/udp
HEALTHCHECK --interval=30s --timeout=10s --start-period=3m CMD ["shoal-health"]
ENTRYPOINT ["shoal"]
CMD ["--help"]
