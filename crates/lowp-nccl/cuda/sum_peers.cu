// Sums over the GPUs of one process: each adds, in rank order, the parts of its own elements where they lie in the memory of all GPUs.
// The kernels of a group wait for each other twice: before they read, for the parts, and before they end, for those that read theirs.
#include <lowp/memory.cuh>

#include "peers.cuh"

namespace lowp {

// Rows of 16 bytes that a thread has of a tile, and parts whose loads are in flight together.
constexpr int ROWS = 4;
constexpr int AHEAD = 4;

__device__ __forceinline__ uint64_t acquire(const uint64_t* at) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}
__device__ __forceinline__ void release(uint64_t* at, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
__device__ __forceinline__ uint4 load16_remote(uint64_t at) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at));
  return v;
}

// Waits until `flag` is `run`. Whether it is; not where the group was stopped.
__device__ bool wait(const PeerGroup& group, const uint64_t* flag, uint64_t run) {
  for (uint32_t spins = 0; acquire(flag) < run; ++spins) {
    if (spins % 64 == 63) {
      if (*pointer<volatile uint32_t>(group.stop)) return false;
      __nanosleep(200);
    }
  }
  return true;
}

template <bool HALF>
__device__ __forceinline__ void add(float (&sums)[HALF ? 8 : 4], const uint4& words, bool first) {
  const uint32_t bits[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if constexpr (HALF) {
      float low = widen_low(bits[j]), high = widen_high(bits[j]);
      sums[2 * j] = first ? low : __fadd_rn(sums[2 * j], low);
      sums[2 * j + 1] = first ? high : __fadd_rn(sums[2 * j + 1], high);
    } else {
      float x = __uint_as_float(bits[j]);
      sums[j] = first ? x : __fadd_rn(sums[j], x);
    }
  }
}

// Writes `sums` at `out`, or adds them to what is there.
template <int COUNT>
__device__ __forceinline__ void put(const float (&sums)[COUNT], uint64_t out, bool accumulate) {
#pragma unroll
  for (int j = 0; j < COUNT; j += 4) {
    float4 x = make_float4(sums[j], sums[j + 1], sums[j + 2], sums[j + 3]);
    if (accumulate) {
      float4 earlier = *pointer<float4>(out + 4 * j);
      x = make_float4(__fadd_rn(earlier.x, x.x), __fadd_rn(earlier.y, x.y), __fadd_rn(earlier.z, x.z),
                      __fadd_rn(earlier.w, x.w));
    }
    *pointer<float4>(out + 4 * j) = x;
  }
}

// Elements `first` to `end` of an item, of which 16-byte words are aligned.
template <bool HALF>
__device__ __forceinline__ void words_of(const PeerItem& item, const uint64_t* parts, int world, uint64_t first, uint64_t end) {
  constexpr int VALUES = HALF ? 8 : 4;
  constexpr int BYTES = HALF ? 2 : 4;
  float sums[ROWS][VALUES];
  constexpr uint32_t ROW = PEER_THREADS * VALUES;
  const uint64_t at = first + threadIdx.x * VALUES;
#pragma unroll 1
  for (int next = 0; next < world; next += AHEAD) {
    uint4 words[AHEAD][ROWS];
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      if (next + a < world) {
        uint64_t part = parts[next + a] + item.offset + at * BYTES;
#pragma unroll
        for (int row = 0; row < ROWS; ++row)
          if (at + row * ROW + VALUES <= end) words[a][row] = load16_remote(part + row * (ROW * BYTES));
      }
    }
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      if (next + a < world) {
#pragma unroll
        for (int row = 0; row < ROWS; ++row) add<HALF>(sums[row], words[a][row], next + a == 0);
      }
    }
  }
#pragma unroll
  for (int row = 0; row < ROWS; ++row)
    if (at + row * ROW + VALUES <= end) put(sums[row], item.out + (at + row * ROW) * 4, item.accumulate);
}

// One element of an item, at any address.
__device__ __forceinline__ void one_of(const PeerItem& item, const uint64_t* parts, int world, uint64_t i) {
  float sum = 0.0f;
  for (int rank = 0; rank < world; ++rank) {
    uint64_t part = parts[rank] + item.offset;
    float x = item.half ? widen(pointer<volatile uint16_t>(part)[i]) : pointer<volatile float>(part)[i];
    sum = rank == 0 ? x : __fadd_rn(sum, x);
  }
  float* out = pointer<float>(item.out) + i;
  *out = item.accumulate ? __fadd_rn(*out, sum) : sum;
}

__device__ __forceinline__ void tile_of(const PeerItem& item, const uint64_t* parts, int world, uint64_t tile) {
  uint64_t values = item.half ? 8 : 4, elements = PEER_THREADS * ROWS * values;
  uint64_t first = tile * elements, end = min(first + elements, item.len);
  uint64_t address = item.out;
  for (int rank = 0; rank < world; ++rank) address |= parts[rank] + item.offset;
  uint64_t words_end = address % 16 ? first : first + (end - first) / values * values;
  if (words_end > first) {
    item.half ? words_of<true>(item, parts, world, first, words_end) : words_of<false>(item, parts, world, first, words_end);
  }
  for (uint64_t i = words_end + threadIdx.x; i < end; i += PEER_THREADS) one_of(item, parts, world, i);
}

}  // namespace lowp

using namespace lowp;

// `items` has `count` sums, and `own` where this GPU's part of each begins.
extern "C" __global__ void __launch_bounds__(PEER_THREADS)
    sum_peers(const PeerGroup* group_at, const PeerItem* items, const uint64_t* own, uint64_t count) {
  __shared__ uint64_t parts[PEER_PARTS];
  __shared__ uint64_t run;
  __shared__ uint32_t first, last, stopped;
  const PeerGroup& group = *group_at;
  const int world = int(group.world), rank = int(group.rank);
  Mailbox& mailbox = *pointer<Mailbox>(group.mailboxes[rank]);
  if (threadIdx.x == 0) {
    first = atomicAdd(&mailbox.started, 1) == 0;
    run = *(volatile uint64_t*)&mailbox.runs + 1;
    stopped = 0;
  }
  __syncthreads();
  // Whichever block is first says where this GPU's parts begin, and that they are there.
  if (first) {
    for (uint64_t i = threadIdx.x; i < count * world; i += PEER_THREADS) {
      pointer<Mailbox>(group.mailboxes[i % world])->parts[rank + world * (i / world)] = own[i / world];
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x < world) release(&pointer<Mailbox>(group.mailboxes[threadIdx.x])->arrived[rank], run);
  }
  if (threadIdx.x < world && !wait(group, &mailbox.arrived[threadIdx.x], run)) stopped = 1;
  __syncthreads();
  if (!stopped) {
    for (uint64_t i = threadIdx.x; i < count * world; i += PEER_THREADS) parts[i] = ((volatile uint64_t*)mailbox.parts)[i];
    __syncthreads();
    uint64_t item = 0, before = 0;
    for (uint64_t tile = blockIdx.x;; tile += gridDim.x) {
      while (item < count && tile >= items[item].tiles_end) before = items[item++].tiles_end;
      if (item == count) break;
      tile_of(items[item], parts + item * world, world, tile - before);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(&mailbox.finished, 1) == gridDim.x - 1;
  }
  __syncthreads();
  // Whichever is last says that this GPU has read, and waits until all have: what they read may then be written again.
  if (last) {
    if (threadIdx.x < world && !stopped) {
      release(&pointer<Mailbox>(group.mailboxes[threadIdx.x])->done[rank], run);
      wait(group, &mailbox.done[threadIdx.x], run);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      mailbox.started = mailbox.finished = 0;
      mailbox.runs = run;
    }
  }
}
