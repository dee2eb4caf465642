// The encode of anything that no tiles know: any block shape, stochastic rounding of such blocks, transposed wide
// entries. Correct first; every value is read once for its block's amax
// and once per output.
#pragma once
#include <lowp/forms.cuh>
#include <lowp/hadamard.cuh>
#include <lowp/philox.cuh>
#include <lowp/scale_rule.cuh>
#include <lowp/tile.cuh>

namespace lowp {

// A rectangle of a matrix, clipped to it.
struct Rectangle {
  uint64_t row, col;
  uint32_t rows, cols;

  static __device__ __forceinline__ Rectangle clipped(uint64_t row, uint64_t col, uint32_t rows, uint32_t cols,
                                                      uint64_t all_rows, uint64_t all_cols) {
    return {row, col, uint32_t(min(uint64_t(rows), all_rows - row)), uint32_t(min(uint64_t(cols), all_cols - col))};
  }
};

struct GenericEncode {
  const Encode& job;
  Philox philox;
  float* multipliers;  // shared, UNIT_BLOCKS

  __device__ __forceinline__ float rounded(uint64_t row, uint64_t col) const {
    float x = load_source(job.source, job.source_code, row * job.cols + col);
    return job.via_bf16 ? round_bf16(x) : x;
  }

  // The value that is quantized.
  __device__ __forceinline__ float value(const Pass& pass, uint64_t row, uint64_t col) const {
    if (!pass.ingredients.hadamard) return rounded(row, col);
    uint64_t first = row / 16 * 16;
    if (first + 16 > job.rows) return round_bf16(rounded(row, col));
    return transformed([&](uint32_t i) { return rounded(first + i, col); }, uint32_t(row - first));
  }

  // The rule of the tensor, or of the line of element (row, col).
  __device__ __forceinline__ ScaleRule rule(const Pass& pass, uint64_t row, uint64_t col) const {
    return ScaleRule::of(pass.ingredients, outer_entry(pass.ingredients, row, col));
  }

  // The scale of a block that four over six chooses (numerics 20.1), by one thread.
  __device__ __noinline__ Scaled choose(const Pass& pass, const Rectangle& block, const ScaleRule& rule, float amax) const {
    uint32_t entries[2];
    rule.candidates(amax, entries);
    float errors[2];
#pragma unroll 1
    for (int c = 0; c < 2; ++c) {
      ChoiceError error{rule.two_level_multiplier(entries[c]), E4m3::decode(entries[c]), rule.tensor, pass.ingredients.largest,
                        pass.ingredients.squares != 0};
      bool square = pass.block_rows > 1 && pass.block_cols > 1;
      float rows[16], sum = 0.0f;
      for (uint32_t r = 0; r < 16; ++r) rows[r] = 0.0f;
      for (uint32_t r = 0; r < block.rows; ++r) {
        for (uint32_t k = 0; k < block.cols; ++k) {
          float e = error.of(value(pass, block.row + r, block.col + k));
          if (square) {
            rows[r] = __fadd_rn(rows[r], e);
          } else {
            sum = __fadd_rn(sum, e);
          }
        }
      }
      for (uint32_t half = 8; square && half > 0; half /= 2) {
        for (uint32_t r = 0; r < half; ++r) rows[r] = __fadd_rn(rows[r], rows[r + half]);
      }
      errors[c] = square ? rows[0] : sum;
    }
    uint32_t entry = errors[1] < errors[0] ? entries[1] : entries[0];
    return {entry, rule.two_level_multiplier(entry)};
  }

  // The amax of one block, by `lanes` threads of a warp or by all of them; in thread 0 of those.
  __device__ __forceinline__ float partial_amax(const Pass& pass, const Rectangle& block, uint32_t thread, uint32_t threads) const {
    float a = 0.0f;
    uint32_t count = block.rows * block.cols;  // sides are at most 4096
#pragma unroll 1
    for (uint32_t e = thread; e < count; e += threads) {
      a = max_abs(a, value(pass, block.row + e / block.cols, block.col + e % block.cols));
    }
    return a;
  }

  // Scales of all blocks of a unit, and their multipliers into shared memory.
  __device__ void scales(const Pass& pass, const Rectangle& unit) const {
    uint32_t down = (unit.rows + pass.block_rows - 1) / pass.block_rows;
    uint32_t across = (unit.cols + pass.block_cols - 1) / pass.block_cols;
    uint64_t top = unit.row / pass.block_rows, left = unit.col / pass.block_cols;
    uint64_t rows = cdiv(job.rows, pass.block_rows), cols = cdiv(job.cols, pass.block_cols);
    // A thread, a warp or all threads take a block, by its size.
    uint64_t size = uint64_t(pass.block_rows) * pass.block_cols;
    uint32_t threads = size <= 32 ? 1 : size <= 4096 ? 32 : THREADS;
    uint32_t thread = threadIdx.x % threads;
    uint32_t blocks = down * across, step = THREADS / threads;
    uint32_t rounds = (blocks + step - 1) / step;
#pragma unroll 1
    for (uint32_t round = 0; round < rounds; ++round) {
      uint32_t b = round * step + threadIdx.x / threads;
      bool active = b < blocks;
      uint32_t r = active ? b / across : 0, c = active ? b % across : 0;
      float a = 0.0f;
      Rectangle block{};
      if (active) {
        block = Rectangle::clipped(unit.row + uint64_t(r) * pass.block_rows, unit.col + uint64_t(c) * pass.block_cols,
                                   pass.block_rows, pass.block_cols, job.rows, job.cols);
        a = partial_amax(pass, block, thread, threads);
      }
      if (threads == 32) a = all_max(a, 31);
      if (threads == THREADS) {
        __syncthreads();
        a = block_max(a);
      }
      if (active && thread == 0) {
        ScaleRule of_block = rule(pass, block.row, block.col);
        Scaled s = of_block.rule == RULE_FOUR_OVER_SIX ? choose(pass, block, of_block, a) : of_block.block(a);
        multipliers[b] = s.multiplier;
        for (int transposed = 0; transposed < 2; ++transposed) {
          uint64_t at = transposed ? (left + c) * rows + top + r : (top + r) * cols + left + c;
          if (pass.scale[transposed]) store(pass, pass.scale[transposed], at, s.entry);
          if (pass.form[transposed].to) {
            spread(job, pass, transposed, top + r, left + c, s.entry, [&](uint64_t index, uint32_t entry) {
              store(pass, pass.form[transposed].to, index, entry);
            });
          }
        }
      }
    }
  }

  __device__ __forceinline__ void store(const Pass& pass, uint64_t base, uint64_t index, uint32_t entry) const {
    if (pass.ingredients.rule != RULE_BLOCK_F32) {
      pointer<uint8_t>(base)[index] = uint8_t(entry);
    } else {
      store_f32(base + 4 * index, entry);
    }
  }

  // The code of one element.
  __device__ __forceinline__ uint32_t code(const Pass& pass, const Rectangle& unit, uint64_t row, uint64_t col) const {
    float x = value(pass, row, col);
    if (pass.block_rows) {
      uint32_t across = (unit.cols + pass.block_cols - 1) / pass.block_cols;
      uint32_t r = uint32_t(row - unit.row) / pass.block_rows, c = uint32_t(col - unit.col) / pass.block_cols;
      x = __fmul_rn(x, multipliers[r * across + c]);
    } else if (pass.ingredients.rule == RULE_TENSOR) {
      x = __fmul_rn(x, tensor_value(pass.ingredients, outer_entry(pass.ingredients, row, col)));
    }
    switch (pass.ingredients.element) {
      case E4M3: return E4m3::one(x);
      case E5M2: return E5m2::one(x);
      case E2M1: {
        if (!job.stochastic) return E2m1::one(x);
        return E2m1::stochastic(x, philox.byte(job.first + row * job.cols + col));
      }
      case BF16: return narrow(x);
      default: return __float_as_uint(x);
    }
  }

  // All codes of a unit, row-major (`transposed` 0) or transposed.
  __device__ void codes(const Pass& pass, const Rectangle& unit, int transposed) const {
    uint32_t bits = code_bits(pass.ingredients.element), packed = bits == 4 ? 2 : 1;
    uint32_t inner = transposed ? unit.rows : unit.cols, outer = transposed ? unit.cols : unit.rows;
    uint32_t entries = (inner + packed - 1) / packed;
    uint64_t pitch = code_bytes(pass.ingredients.element, transposed ? job.rows : job.cols);
#pragma unroll 1
    for (uint32_t e = threadIdx.x; e < outer * entries; e += THREADS) {
      uint32_t i = e / entries, j = e % entries * packed;
      uint64_t row = unit.row + (transposed ? j : i), col = unit.col + (transposed ? i : j);
      uint64_t line = transposed ? col : row, at = transposed ? row : col;
      uint8_t* to = pointer<uint8_t>(transposed ? pass.data[1] : pass.data[0]) + line * pitch + at * bits / 8;
      // A nibble after the last element is 0.
      uint32_t entry = 0, count = min(packed, inner - j);
#pragma unroll 1
      for (uint32_t k = 0; k < count; ++k) {
        entry |= code(pass, unit, row + (transposed ? k : 0), col + (transposed ? 0 : k)) << (4 * k);
      }
#pragma unroll 1
      for (uint32_t b = 0; b < max(bits / 8, 1u); ++b) to[b] = uint8_t(entry >> (8 * b));
    }
  }

  // Encodes a tile: whole units of every pass.
  __device__ void tile(uint64_t row, uint64_t col) const {
    Rectangle tile = Rectangle::clipped(row, col, job.tile_rows, job.tile_cols, job.rows, job.cols);
    for (uint32_t p = 0; p < job.passes; ++p) {
      const Pass& pass = job.pass[p];
      for (uint32_t r = 0; r < tile.rows; r += pass.unit_rows) {
        for (uint32_t c = 0; c < tile.cols; c += pass.unit_cols) {
          Rectangle unit = Rectangle::clipped(row + r, col + c, pass.unit_rows, pass.unit_cols, job.rows, job.cols);
          __syncthreads();
          if (pass.block_rows) scales(pass, unit);
          __syncthreads();
          if (pass.data[0]) codes(pass, unit, 0);
          if (pass.data[1]) codes(pass, unit, 1);
        }
      }
    }
  }
};

// Encodes one tile; `multipliers` is shared memory for UNIT_BLOCKS. Not inlined: the tiled paths
// should not pay for its registers.
__device__ __noinline__ void encode_generic(const Encode& job, const Step* step, uint32_t index, float* multipliers) {
  uint64_t random_step = job.stochastic ? step->random_step : 0;
  uint32_t across = uint32_t(job.tiles_across);
  GenericEncode encode{job, {job.seed, job.stream + (random_step << 32)}, multipliers};
  encode.tile(uint64_t(index / across) * job.tile_rows, uint64_t(index % across) * job.tile_cols);
}

}  // namespace lowp
