//! Compiles one loop for several instruction sets and picks the widest that the machine has.
//!
//! A [`Kernel`] is ordinary safe code over [`Lanes`]; its `run` must be `#[inline(always)]`, with
//! everything hot below it, so that it is compiled anew for each set. Rust never contracts or
//! reorders float arithmetic, so every set gives the same bits.

#[cfg(target_arch = "aarch64")]
use super::Neon;
#[cfg(target_arch = "x86_64")]
use super::{Avx2, Avx512};
use super::{Lanes, Portable};

/// A loop to be compiled for every instruction set.
pub(crate) trait Kernel {
    /// What the loop returns.
    type Out;
    /// The loop. Implementations are `#[inline(always)]`.
    fn run<L: Lanes>(self, lanes: L) -> Self::Out;
}

/// An instruction set that the machine has: the proofs within come from detection only.
#[derive(Clone, Copy, Debug)]
pub enum Isa {
    /// What the compiler may assume everywhere.
    Portable,
    /// 256-bit vectors.
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    /// 512-bit vectors.
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    /// 128-bit vectors of Arm.
    #[cfg(target_arch = "aarch64")]
    Neon(Neon),
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,bmi1,bmi2,popcnt")]
fn avx2<K: Kernel>(kernel: K, lanes: Avx2) -> K::Out {
    kernel.run(lanes)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,bmi1,bmi2,popcnt,avx512f,avx512bw,avx512dq,avx512vl")]
fn avx512<K: Kernel>(kernel: K, lanes: Avx512) -> K::Out {
    kernel.run(lanes)
}

impl Isa {
    /// The sets of this machine, narrowest first.
    pub fn all() -> Vec<Isa> {
        #[allow(unused_mut, reason = "some architectures have no further sets")]
        let mut sets = vec![Isa::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            sets.extend(Avx2::detect().map(Isa::Avx2));
            sets.extend(Avx512::detect().map(Isa::Avx512));
        }
        #[cfg(target_arch = "aarch64")]
        sets.push(Isa::Neon(Neon));
        sets
    }

    /// The widest set of this machine.
    pub fn best() -> Isa {
        Self::all().pop().unwrap_or(Isa::Portable)
    }

    /// Runs `kernel` compiled for this set.
    #[inline]
    #[cfg_attr(
        target_arch = "x86_64",
        expect(
            unsafe_code,
            reason = "calls code compiled for a CPU feature that was detected"
        )
    )]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Out {
        match self {
            Isa::Portable => kernel.run(Portable),
            // SAFETY: the proof is made only where its instructions were detected.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(lanes) => unsafe { avx2(kernel, lanes) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512(lanes) => unsafe { avx512(kernel, lanes) },
            #[cfg(target_arch = "aarch64")]
            Isa::Neon(lanes) => kernel.run(lanes),
        }
    }
}
