//! Compiles one loop for several instruction sets and picks the widest that the machine has.
//!
//! A [`Kernel`] is ordinary safe code; its `run` must be `#[inline(always)]`, with everything hot
//! below it, so that the compiler vectorises it anew for each set. Rust never contracts or
//! reorders float arithmetic, so every set gives the same bits.

/// A loop to be compiled for every instruction set.
pub(crate) trait Kernel {
    /// What the loop returns.
    type Out;
    /// The loop. Implementations are `#[inline(always)]`.
    fn run(self) -> Self::Out;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    Baseline,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

/// Proof that the machine has an instruction set: values come from detection only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Isa(Level);

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,bmi1,bmi2,popcnt")]
fn avx2<K: Kernel>(kernel: K) -> K::Out {
    kernel.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,bmi1,bmi2,popcnt,avx512f,avx512bw,avx512dq,avx512vl")]
fn avx512<K: Kernel>(kernel: K) -> K::Out {
    kernel.run()
}

impl Isa {
    /// The sets of this machine, narrowest first.
    pub(crate) fn all() -> Vec<Isa> {
        #[allow(unused_mut)]
        let mut sets = vec![Isa(Level::Baseline)];
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            if has!("avx2") && has!("fma") && has!("bmi1") && has!("bmi2") && has!("popcnt") {
                sets.push(Isa(Level::Avx2));
                if has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl") {
                    sets.push(Isa(Level::Avx512));
                }
            }
        }
        sets
    }

    /// The widest set of this machine.
    pub(crate) fn best() -> Isa {
        Self::all().pop().unwrap_or(Isa(Level::Baseline))
    }

    /// Runs `kernel` compiled for this set.
    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Out {
        match self.0 {
            Level::Baseline => kernel.run(),
            // SAFETY: `all` makes this value only where the features were detected.
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => unsafe { avx2(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => unsafe { avx512(kernel) },
        }
    }
}
