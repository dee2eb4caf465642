// Sums over the GPUs of one process: each adds, in rank order, the parts of its own elements where they lie in the memory of all GPUs.
// GPUs wait for each other twice: before they read, for the parts, and afterwards for those that read theirs. Kernels of one block wait, so that
// those that read are not in the way of others, nor of each other, while a GPU is late.
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

__device__ bool is_stopped(const PeerGroup& group) { return *pointer<volatile uint32_t>(group.stop) != 0; }

// Waits until `flag` is `run`. Whether it is; not where the group was stopped.
__device__ bool wait(const PeerGroup& group, const uint64_t* flag, uint64_t run) {
  for (uint32_t spins = 0; acquire(flag) < run; ++spins) {
    if (spins % 64 == 63) {
      if (is_stopped(group)) return false;
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

// One block: says where this GPU's part of each of `count` items begins and that they are there, and waits for those of all GPUs. `shape` says which
// items they are: nothing is added where the GPUs have different ones, or the group was stopped.
extern "C" __global__ void __launch_bounds__(PEER_THREADS)
    peers_meet(const PeerGroup* group_at, const uint64_t* own, uint64_t count, uint64_t shape) {
  __shared__ uint32_t skip;
  const PeerGroup& group = *group_at;
  const int world = int(group.world), rank = int(group.rank);
  Mailbox& mailbox = *pointer<Mailbox>(group.mailboxes[rank]);
  const uint64_t run = mailbox.runs + 1;
  if (threadIdx.x == 0) skip = is_stopped(group);
  __syncthreads();
  if (!skip) {
    for (uint64_t i = threadIdx.x; i < count * world; i += PEER_THREADS) {
      pointer<Mailbox>(group.mailboxes[i % world])->parts[rank + world * (i / world)] = own[i / world];
    }
    if (threadIdx.x < world) pointer<Mailbox>(group.mailboxes[threadIdx.x])->shapes[rank] = shape;
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x < world) {
      release(&pointer<Mailbox>(group.mailboxes[threadIdx.x])->arrived[rank], run);
      bool arrived = wait(group, &mailbox.arrived[threadIdx.x], run);
      if (!arrived || *(volatile uint64_t*)&mailbox.shapes[threadIdx.x] != shape) skip = 1;
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) mailbox.skip = skip;
}

// The sums of `count` items.
extern "C" __global__ void __launch_bounds__(PEER_THREADS)
    sum_peers(const PeerGroup* group_at, const PeerItem* items, uint64_t count) {
  __shared__ uint64_t parts[PEER_PARTS];
  const PeerGroup& group = *group_at;
  const int world = int(group.world);
  const Mailbox& mailbox = *pointer<Mailbox>(group.mailboxes[group.rank]);
  if (mailbox.skip || is_stopped(group)) return;
  for (uint64_t i = threadIdx.x; i < count * world; i += PEER_THREADS) parts[i] = mailbox.parts[i];
  __syncthreads();
  uint64_t item = 0, before = 0;
  for (uint64_t tile = blockIdx.x;; tile += gridDim.x) {
    while (item < count && tile >= items[item].tiles_end) before = items[item++].tiles_end;
    if (item == count) return;
    tile_of(items[item], parts + item * world, world, tile - before);
  }
}

// One block: says that this GPU has read, and waits until all have. What they read may be written or freed afterwards.
extern "C" __global__ void __launch_bounds__(PEER_THREADS) peers_leave(const PeerGroup* group_at) {
  __shared__ uint32_t stopped;
  const PeerGroup& group = *group_at;
  const int world = int(group.world), rank = int(group.rank);
  Mailbox& mailbox = *pointer<Mailbox>(group.mailboxes[rank]);
  const uint64_t run = mailbox.runs + 1;
  if (threadIdx.x == 0) stopped = is_stopped(group);
  __syncthreads();
  if (threadIdx.x < world && !stopped) {
    __threadfence_system();
    release(&pointer<Mailbox>(group.mailboxes[threadIdx.x])->done[rank], run);
    if (!wait(group, &mailbox.done[threadIdx.x], run)) stopped = 1;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    // A GPU that was reading when the group was stopped reads on: 50 ms are enough for a bucket.
    for (int i = 0; stopped && i < 50000; ++i) __nanosleep(1000);
    mailbox.runs = run;
  }
}
