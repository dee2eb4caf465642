//! The table that a launch reads, and the only definition of it: what the host plans once and leaves on the
//! device, as plain data. [`headers`] say the same in C++, for the kernels.
//!
//! The build script and `cargo xtask cuda` include this module, so it uses nothing of the crate.

mod declare;
mod jobs;
mod values;

pub(crate) use jobs::*;
pub(crate) use values::*;

/// What stands before the structs.
const JOBS: &str = "\
// Written by `cargo xtask cuda` from src/cuda/table: change that.
//
// The table that a launch reads: what the host plans once and leaves on the device. One launch
// covers any number of tensors, recipes and dtypes.
//
// Every kernel has the same signature and one thread block per tile:
//
//   lowp_*<<<tile_count, threads>>>(const Tile* tiles, const Job* jobs, const Step* step, uint32_t flags)
//
// Block b does tile `tiles[b].index` of `jobs[tiles[b].job]`. `step` holds what changes from run to
// run; no pointer in a job ever does, so a launch can be captured in a graph and replayed.
//
// A pointer is 8 bytes; 0 says that the buffer is absent. Sizes and indices are 64-bit. Structs have
// no implicit padding.
#pragma once
#include <lowp/values.cuh>

namespace lowp {
";

/// What stands before the constants.
const VALUES: &str = "\
// Written by `cargo xtask cuda` from src/cuda/table: change that.
//
// Sizes of tiles, and what the fields of the structs of jobs.cuh may hold.
#pragma once
#include <cstdint>

namespace lowp {

";

/// The files of `cuda/include/lowp` that say in C++ what this module says, by name.
#[allow(
    dead_code,
    reason = "of those who include this module the backend alone does not write headers"
)]
pub(crate) fn headers() -> [(&'static str, String); 2] {
    let [constants, values, structs] = [values::constants(), values::values(), jobs::structs()];
    let close = "\n}  // namespace lowp\n";
    [
        ("jobs.cuh", format!("{JOBS}{structs}{close}")),
        ("values.cuh", format!("{VALUES}{constants}{values}{close}")),
    ]
}
