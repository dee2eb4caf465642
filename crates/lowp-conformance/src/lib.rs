//! The conformance suite: every kernel of a backend against [`lowp_kernels::reference`], and laws between
//! them. One suite for all backends: a [`Rig`] is what it runs on.
//!
//! # Example
//!
//! The tests of a backend: [`suite!`] makes one of every law. `rig` next to it says on what they run.
//!
//! ```
//! mod conformance {
//!     use lowp_conformance::Rig;
//!     use lowp_kernels::Cpu;
//!
//!     mod rig {
//!         use super::*;
//!
//!         /// As the backend is used.
//!         pub fn once(test: impl Fn(&Rig<Cpu>)) {
//!             test(&Rig::new(Cpu, "CPU"));
//!         }
//!
//!         /// In every way in which it can run: with few threads and with many, for example.
//!         pub use once as everywhere;
//!
//!         /// In all of these ways at once.
//!         pub fn together(test: impl Fn(&[Rig<Cpu>])) {
//!             once(|rig| test(std::slice::from_ref(rig)));
//!         }
//!     }
//!
//!     lowp_conformance::suite!();
//! }
//! ```

use half::bf16;
use lowp_format::{
    Axis, BufferKey, BufferSpec, Code, KernelKey, MxScale, Origin, PaddedForm, Part, Philox,
    ScaleRule, Shape, SourceRounding, Usage,
};

use case::{
    CURRENT, Case, LINES, Oracle, Outer, ROW_MAJOR, TRANSPOSED, bits, case, cases, inputs,
    observed, shapes,
};
use lowp_kernels::{
    Backend, EncodeJob, FloatDtype, KernelError, Slot, Source, StepScalars, Target, TensorInput,
    Work,
};

mod case;
mod fence;
mod rig;
mod suite;

// The laws, which `suite!` names.
#[doc(hidden)]
pub mod amax;
#[doc(hidden)]
pub mod decode;
#[doc(hidden)]
pub mod digests;
#[doc(hidden)]
pub mod encode;
#[doc(hidden)]
pub mod errors;
#[doc(hidden)]
pub mod flat;
#[doc(hidden)]
pub mod forms;
#[doc(hidden)]
pub mod golden;
#[doc(hidden)]
pub mod history;
#[doc(hidden)]
pub mod layout;
#[doc(hidden)]
pub mod momentum;
#[doc(hidden)]
pub mod mutated;
#[doc(hidden)]
pub mod observed;
#[doc(hidden)]
pub mod round;
#[doc(hidden)]
pub mod step_scalars;
#[doc(hidden)]
pub mod sum;
#[doc(hidden)]
pub mod time;
#[doc(hidden)]
pub mod update;
#[doc(hidden)]
pub mod update_checks;
#[doc(hidden)]
pub mod values;
#[doc(hidden)]
pub mod views;
#[doc(hidden)]
pub mod whole_tiles;

#[cfg(all(test, feature = "cuda"))]
mod cuda;
#[cfg(all(test, feature = "cuda"))]
mod cuda_large;
#[cfg(all(test, feature = "nccl"))]
mod cuda_ranks;
#[cfg(all(test, feature = "cuda"))]
mod cuda_streams;
#[cfg(test)]
mod scalars_read;

pub use fence::{Fence, Fenced};
pub use rig::Rig;

/// Random cases of a law. No file remembers failing ones: the suite also runs where there are no
/// sources, and a failure names its input.
fn cases_of(count: u32) -> proptest::test_runner::Config {
    proptest::test_runner::Config {
        cases: count,
        failure_persistence: None,
        ..Default::default()
    }
}

/// Values of every kind: ordinary ones, wide exponents, any bit pattern, ties, zeros, NaN and Inf.
fn values(count: usize, seed: u64, special: bool) -> Vec<f32> {
    let random = Philox::new(seed, 7);
    (0..count as u64)
        .map(|i| {
            let words @ [kind, bits, ..] = random.block(i);
            // Nearly normal: the sum of four uniform numbers takes no logarithm, and these tests need many.
            let sum: f64 = words.map(f64::from).iter().sum();
            let normal = ((sum / 4_294_967_296.0 - 2.0) * 3f64.sqrt()) as f32;
            match kind % 32 {
                0 => normal * 2f32.powi((bits % 80).cast_signed() - 40),
                1 => (bits % 97) as f32 * 0.25 - 12.0,
                2 => {
                    if bits % 2 == 0 {
                        0.0
                    } else {
                        -0.0
                    }
                }
                3 if special && bits % 16 == 0 => f32::NAN,
                3 if special && bits % 16 == 1 => f32::NEG_INFINITY,
                3 if special && bits % 16 == 2 => f32::from_bits(bits),
                3 => f32::from_bits(bits % 0x0080_0000),
                _ => normal,
            }
        })
        .collect()
}

fn source<B: Backend>(rig: &Rig<B>, values: &[f32], half: bool) -> (Source<B>, Vec<f32>) {
    if half {
        let values: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
        let widened = values.iter().map(|x| x.to_f32()).collect();
        (Source::Bf16(rig.buffer(&values)), widened)
    } else {
        (Source::F32(rig.buffer(values)), values.to_vec())
    }
}

/// An encode of `source` into fresh buffers for `specs`, filled with garbage, under known entries.
fn encode_job<B: Backend>(
    rig: &Rig<B>,
    case: &Case,
    specs: &[BufferSpec],
    shape: Shape,
    source: Source<B>,
    outer: &Outer,
) -> EncodeJob<B> {
    let target =
        |spec: &BufferSpec| Target::new(*spec, rig.buffer(&vec![0xA5u8; spec.bytes(shape)]));
    EncodeJob {
        shape,
        kernels: case.kernels(),
        source,
        source_rounding: SourceRounding::F32,
        tensor: inputs(rig, case, outer, |_, slot| TensorInput::Known(slot)),
        targets: specs.iter().map(target).collect(),
        stochastic: None,
    }
}

fn contents<B: Backend>(rig: &Rig<B>, targets: &[Target<B>]) -> Vec<(BufferKey, Vec<u8>)> {
    let content = |t: &Target<B>| (t.spec.key, rig.content::<u8>(&t.bytes));
    targets.iter().map(content).collect()
}

#[cfg(test)]
mod on_cpu {
    use crate::rig::cpu as rig;

    crate::suite!();
}

#[cfg(all(test, feature = "cuda"))]
mod on_cuda {
    use crate::rig::device as rig;

    crate::suite!();
}
