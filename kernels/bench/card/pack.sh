#!/bin/bash
# Collect in a folder what a GPU machine without network lacks: pack.sh DIR [PYTHON_VERSION, default 3.12]
set -eu
into=${1:?usage: pack.sh DIR [PYTHON_VERSION]}
version=${2:-3.12}
root=$(cd "$(dirname "$0")/../../.." && pwd)
mkdir -p "$into/wheels"
# The machine has torch, triton and transformers; these are the engine's other packages.
"$root/.venv/bin/pip" download --quiet --no-deps --only-binary=:all: --python-version "$version" --dest "$into/wheels" \
  llguidance tritonclient gguf jsonschema jsonschema-specifications referencing rpds-py python-rapidjson
model=$("$root/.venv/bin/python" -c 'from paged_client.serving.demo_model import default_directory; print(default_directory())')
mkdir -p "$into/cache/models"
cp -rL "$model" "$into/cache/models/"
echo "$into: $(du -sh "$into" | cut -f1)"
