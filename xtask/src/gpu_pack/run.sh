#!/bin/sh
# Runs the GPU tests of lowp and measures its kernels; results go to the folder that is named first.
# Needs NVIDIA's driver and nothing else. With a second GPU more tests run, most of which need NCCL (libnccl.so.2
# on LD_LIBRARY_PATH). Tests of products need cuBLASLt (libcublasLt.so.13 or .12 there).
#   ./run.sh OUT            tests, then the bench
#   ./run.sh OUT tests      only the tests; further arguments go to the test program
#   ./run.sh OUT failures   only those of ranks that are killed, stopped or wrong, with a table of the seconds until all
#                           others have ended; further arguments go to their program
#   ./run.sh OUT bench      only the bench; further arguments go to `lowp bench`
#   ./run.sh OUT peers      one sitting of the bench, TransformerEngine, PyTorch (of $PYTHON, else python3) and torchao, as
#                           one table; a missed bar of $BARS (else h200.toml, empty for none) fails; further arguments
#                           (--filter TEXT, --shrink N, --runs N) go to peers/table.py
#   ./run.sh OUT sanitize   the tests under compute-sanitizer, without that of 2^31 elements and without NCCL, which
#                           tries calls that fail
set -u
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?the folder for results}
what=${2:-all}
[ $# -gt 0 ] && shift
[ $# -gt 0 ] && shift
mkdir -p "$out"
export LOWP_REQUIRE_GPU=1
export LOWP_GOLDEN="$here/golden"
failed=0
case $what in
all | tests)
  "$here/kernel-tests" cuda --nocapture --test-threads 4 "$@" >"$out/tests.txt" 2>&1 || failed=1
  [ $# -gt 0 ] || for tests in gemm-tests shard-tests optim-tests transformer-tests; do
    "$here/$tests" cuda --nocapture --test-threads 1 >>"$out/tests.txt" 2>&1 || failed=1
  done
  # Multicast over NVLink is no part of what is tested, and some machines lack the rights for it.
  [ $# -gt 0 ] ||
    NCCL_NVLS_ENABLE=0 "$here/nccl-tests" cuda --nocapture --test-threads 1 >>"$out/tests.txt" 2>&1 || failed=1
  grep '^[0-9a-f]\{16\} ' "$out/tests.txt" >"$out/digests.txt"
  grep -E '^test |^test result|panicked|^error' "$out/tests.txt" | tail -n 60
  ;;
esac
case $what in
all | tests | failures)
  if [ $# -eq 0 ] || [ "$what" = failures ]; then
    (
      [ $# -gt 0 ] || set -- cuda
      NCCL_NVLS_ENABLE=0 "$here/nccl-failures" --nocapture --test-threads 1 "$@"
    ) >"$out/failures.txt" 2>&1 || failed=1
    grep -oE '\| [0-9]+ x cuda .*|^test result.*|.* panicked .*|^skipped.*' "$out/failures.txt"
  fi
  ;;
esac
case $what in
all | bench)
  if [ -x "$here/lowp" ]; then
    "$here/lowp" bench --device cuda --json "$out/bench.json" "$@" >"$out/bench.txt" || failed=1
    cat "$out/bench.txt"
  fi
  ;;
esac
case $what in
peers)
  "${PYTHON:-python3}" "$here/peers/table.py" "$out" --lowp "$here/lowp" --te "$here/te" --torchao "$here/torchao.whl" \
    --bars "${BARS-$here/h200.toml}" "$@" || failed=1
  ;;
sanitize)
  for tool in memcheck racecheck; do
    # Errors of the driver are returned, and some tests ask for them.
    compute-sanitizer --tool $tool --report-api-errors no --error-exitcode 9 --print-limit 20 \
      "$here/kernel-tests" cuda --skip cuda_large --skip cuda_ranks --test-threads 1 "$@" >"$out/$tool.txt" 2>&1 || failed=1
    echo "$tool: $(tail -n 1 "$out/$tool.txt")"
  done
  ;;
esac
exit $failed
