#!/bin/bash
# Run groups of `make bench-gpu` on a machine without network: run.sh DIR GROUP ..., with the folder of pack.sh.
# OUT: folder of the results (default: a new one in kernels/bench/results). PYTHON: default python3.
set -eu
packed=$(cd "${1:?usage: run.sh DIR GROUP ...}" && pwd)
shift
root=$(cd "$(dirname "$0")/../../.." && pwd)
python=${PYTHON:-python3}
: "${1:?usage: run.sh DIR GROUP ...}"
if [ ! -d "$packed/installed" ]; then
  rm -rf "$packed/unfinished"
  "$python" -m pip install --quiet --no-index --no-deps --target "$packed/unfinished" "$packed"/wheels/*.whl
  mv "$packed/unfinished" "$packed/installed"
fi
export PYTHONPATH="$root:$root/kernels:$root/client:$packed/installed${PYTHONPATH:+:$PYTHONPATH}"
export PAGED_CACHE_DIR="$packed/cache" TRITON_CACHE_DIR="$packed/compiled"
cd "$root"
exec "$python" -m paged_bench.on_gpu --group "$@" --minutes "${MINUTES:-10}" ${OUT:+--out "$OUT"}
