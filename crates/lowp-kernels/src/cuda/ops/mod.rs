//! The operations of the device: a file for each. It has the kernels, fills the jobs of the table (`table`)
//! from those of a caller, which were checked, and says how a launch of them is cut into tiles.
//!
//! A job is filled with its buffers, shapes and ingredients; [`job::Job::lay_out`] adds what follows from
//! them (paths, tile sizes, alignment), so that one launch covers any number of jobs.

pub(super) mod amax;
pub(super) mod decode;
pub(super) mod encode;
pub(super) mod encode_ring;
pub(super) mod flat_encode;
pub(super) mod history;
mod ingredients;
pub(super) mod interleave;
pub(super) mod job;
pub(super) mod momentum;
pub(super) mod normalize;
pub(super) mod rearrange;
pub(super) mod repack;
pub(super) mod round;
pub(super) mod step_scalars;
pub(super) mod stored;
pub(super) mod sum;
pub(super) mod sum_parts;
pub(super) mod sum_squares;
pub(super) mod transpose;
pub(super) mod update;

use super::module::Kernel;
use super::table;
use job::Job;

/// Every kernel, by operation.
pub(super) const KERNELS: [&[Kernel]; 19] = [
    table::Update::KERNELS,
    table::StoredUpdate::KERNELS,
    table::Amax::KERNELS,
    table::Decode::KERNELS,
    table::Encode::KERNELS,
    encode_ring::KERNELS,
    table::FlatEncode::KERNELS,
    table::History::KERNELS,
    table::Interleave::KERNELS,
    table::Momentum::KERNELS,
    table::Normalize::KERNELS,
    table::Rearrange::KERNELS,
    table::Repack::KERNELS,
    table::Round::KERNELS,
    table::StepScalars::KERNELS,
    table::Sum::KERNELS,
    table::SumParts::KERNELS,
    table::SumSquares::KERNELS,
    table::Transpose::KERNELS,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_have_distinct_names() {
        let mut names: Vec<_> = KERNELS.concat().iter().map(|kernel| kernel.name).collect();
        names.sort_unstable();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]));
    }
}
