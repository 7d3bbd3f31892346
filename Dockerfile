# One image for the server and for sites. It holds protofed alone: kits, data and runs are mounted and never copied in.
FROM python:3.11-slim
WORKDIR /build
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt torch==2.13.0
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir -c constraints.txt ".[deploy]"
RUN useradd --create-home --uid 1000 protofed && install -d -o protofed -g protofed /federation
USER protofed
WORKDIR /federation
ENTRYPOINT ["protofed"]
CMD ["--help"]
