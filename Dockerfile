# The image that a run's pods start from. scripts/image builds it; docs/image.md explains it.
# Plain Dockerfile syntax without BuildKit's additions, so that docker, podman and buildah build the same.

# All stages must start from the same image: the virtual environment points at its Python. scripts/image-pins looks the
# digest up again; it is that of all architectures.
ARG BASE=python:3.11-slim-trixie@sha256:90744cff8f32887f075c47d747a173ff333e9e98801667af93c357fa9f5e28ff

FROM ${BASE} AS debian
# Debian packages to add, such as gcc=4:14.2.0-1, and the day of snapshot.debian.org that has these versions when the
# mirrors have moved on. They are unpacked, not installed, so that the image needs no RUN on top of its base; each
# leaves its description where makers of bills of materials look for it.
ARG PACKAGES=
ARG SNAPSHOT=
RUN mkdir -p /debs/partial /debian/usr/lib /debian/var/lib/dpkg/status.d \
    && fetch() { apt-get update -q && apt-get install -qy --no-install-recommends --download-only \
        -o Dir::Cache::archives=/debs -o APT::Sandbox::User=root $PACKAGES; } \
    && if [ -n "$PACKAGES" ] && ! fetch; then \
        [ -n "$SNAPSHOT" ] || exit 1; \
        . /etc/os-release; \
        echo "deb [check-valid-until=no] http://snapshot.debian.org/archive/debian/$SNAPSHOT $VERSION_CODENAME main" \
            > /etc/apt/sources.list.d/snapshot.list; \
        fetch || exit 1; fi \
    && for package in /debs/*.deb; do \
        if [ -f "$package" ]; then \
            dpkg-deb --extract "$package" /debian \
                && dpkg-deb --field "$package" > "/debian/var/lib/dpkg/status.d/$(dpkg-deb --field "$package" Package)" \
                || exit 1; fi; done \
    # They are links to those in /usr in the base, which copied folders of such names would be in the way of.
    && for folder in lib lib64; do if [ -d "/debian/$folder" ]; then \
        mkdir -p "/debian/usr/$folder" && cp -a "/debian/$folder/." "/debian/usr/$folder/" && rm -r "/debian/$folder"; fi; done

FROM ${BASE} AS system
COPY --from=debian /debian /
# What Triton does with the compiler when a run begins: a module of Python's. Found out here where that cannot be made.
RUN if command -v gcc >/dev/null; then \
        echo '#include <Python.h>' | gcc -shared -fPIC -x c - -o /tmp/module.so \
            -I"$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')" \
        && python3 -c 'import ctypes; ctypes.PyDLL("/tmp/module.so")' && rm /tmp/module.so \
        || { echo "The compiler cannot make modules of Python's. Take a BASE with Python's headers, or the slim variant." >&2; \
            exit 1; }; fi

FROM ${BASE} AS dependencies
# cpu or cuda: which build of PyTorch the image is meant to hold, checked below.
ARG VARIANT=cpu
# Address of a package index to take PyTorch from; empty: the one that pip is set up with.
ARG TORCH_INDEX=
# Which of kubetune's extras; tracking and jupyter are not what training needs.
ARG EXTRAS=hub,vision,s3
# Compiled below: pip's bytecode holds the times of its sources, which copies between stages need not keep, and a
# read-only root could not keep what Python would then compile anew at every start.
ENV PIP_NO_COMPILE=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# pip stays in an environment of its own, and so out of the image.
RUN python3 -m venv /pip && python3 -m venv --without-pip /opt/kubetune && mkdir /outputs
WORKDIR /source
COPY constraints.txt pyproject.toml ./
RUN /pip/bin/pip --python /opt/kubetune/bin/python install --no-deps ${TORCH_INDEX:+--index-url=$TORCH_INDEX} \
        "$(grep '^torch==' constraints.txt)" \
    && if grep -q '^cuda.*= None' /opt/kubetune/lib/python3*/site-packages/torch/version.py; \
        then found=cpu; else found=cuda; fi \
    && if [ "$found" != "$VARIANT" ]; then \
        echo "VARIANT is $VARIANT, but the package index gave PyTorch's $found build." >&2; \
        echo "Set TORCH_INDEX to the address of PyTorch's $VARIANT index; it stands at pytorch.org, Get started." >&2; \
        exit 1; fi
# Without the package itself, so that a change of its code does not install or push all of this again.
RUN python3 -c 'import sys, tomllib; \
project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
extras = [project["optional-dependencies"][name] for name in sys.argv[1].split(",") if name]; \
print(*project["dependencies"], *sum(extras, []), sep="\n")' "$EXTRAS" > requirements.txt \
    && /pip/bin/pip --python /opt/kubetune/bin/python install --constraint constraints.txt -r requirements.txt \
    # 80 MB of programs that test PyTorch itself.
    && rm -rf /opt/kubetune/lib/python3*/site-packages/torch/test \
    # Some packages carry files for other versions of Python, which cannot be compiled; nothing imports them.
    && { python3 -m compileall -qq -j 0 --invalidation-mode unchecked-hash /opt/kubetune/lib || true; }

FROM dependencies AS package
COPY README.md LICENSE ./
COPY src src
COPY scripts/sbom.py /source/
COPY --from=system /var/lib/dpkg /dpkg
ARG VERSION=
# --no-build-isolation: with the setuptools that constraints.txt pins.
RUN /pip/bin/pip --python /opt/kubetune/bin/python install --no-deps --no-build-isolation --prefix=/package . \
    && python3 -m compileall -q --invalidation-mode unchecked-hash -s /package -p /opt/kubetune /package/lib \
    && python3 sbom.py kubetune "${VERSION:-unknown}" --python /opt/kubetune/lib /package/lib /usr/local/lib \
        --dpkg /dpkg > /package/sbom.cdx.json

# No RUN from here on: nothing of the build, such as its mounts, leaves a trace.
FROM ${BASE}
ARG BASE
ARG VARIANT=cpu
ARG VERSION=
ARG REVISION=
LABEL org.opencontainers.image.title="kubetune" \
      org.opencontainers.image.description="Fine-tune language models from one YAML file (${VARIANT})" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE}"
COPY --from=debian /debian /
COPY --from=dependencies /opt/kubetune /opt/kubetune
COPY --from=package /package /opt/kubetune
COPY --from=dependencies --chown=10001:10001 /outputs /outputs
# The root file system may be read-only, and whoever runs this need not be in /etc/passwd: libraries put their caches
# below XDG_CACHE_HOME or HOME, and torch asks for the user's name. Pods set the same variables to their volumes.
ENV PATH=/opt/kubetune/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    USER=kubetune \
    XDG_CACHE_HOME=/tmp/cache \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
# A number, since Kubernetes cannot tell whether a name is root's.
USER 10001:10001
WORKDIR /outputs
ENTRYPOINT ["kubetune"]
CMD ["--help"]
