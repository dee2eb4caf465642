//! [`MasterDtype`]: how an optimizer stores the values that it updates, and what a [`Master`] of such values can do.

use half::bf16;
use lowp_format::codec::remainder::{join, split};

use crate::{Backend, FloatDtype, KernelError, Master, Source};

/// Storage of a master.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MasterDtype {
    /// binary32.
    #[default]
    F32,
    /// bfloat16, rounded stochastically on store (docs/numerics.md 23.4).
    Bf16,
    /// 16 bits beside a parameter in bfloat16: together a binary32 (docs/numerics.md 23.5).
    Bf16Plus16,
}

impl MasterDtype {
    /// Every dtype.
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::Bf16Plus16];

    /// Bytes of one element beside its parameter.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::Bf16Plus16 => 2,
        }
    }

    /// `f32`, `bf16` or `bf16+16`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Bf16Plus16 => "bf16+16",
        }
    }

    /// The dtype of the values.
    pub const fn float(self) -> FloatDtype {
        match self {
            Self::F32 | Self::Bf16Plus16 => FloatDtype::F32,
            Self::Bf16 => FloatDtype::Bf16,
        }
    }
}

impl From<FloatDtype> for MasterDtype {
    fn from(dtype: FloatDtype) -> Self {
        match dtype {
            FloatDtype::F32 => Self::F32,
            FloatDtype::Bf16 => Self::Bf16,
        }
    }
}

impl<B: Backend> Master<B> {
    /// What the values are stored as.
    pub fn dtype(&self) -> MasterDtype {
        match self {
            Self::Values(values) => values.dtype().into(),
            Self::Bf16Plus16 { .. } => MasterDtype::Bf16Plus16,
        }
    }

    /// The values, where they are not in halves.
    pub fn values(&self) -> Option<&Source<B>> {
        match self {
            Self::Values(values) => Some(values),
            Self::Bf16Plus16 { .. } => None,
        }
    }

    /// Number of values.
    pub fn len(&self, backend: &B) -> usize {
        match self {
            Self::Values(values) => values.len(backend),
            Self::Bf16Plus16 { remainder, .. } => backend.len::<u8>(remainder) / 2,
        }
    }

    /// Whether there are no values.
    pub fn is_empty(&self, backend: &B) -> bool {
        self.len(backend) == 0
    }

    /// Checks that the values lie on the device of `backend`.
    ///
    /// # Errors
    /// They lie on another one.
    pub fn owned_by(&self, backend: &B) -> Result<(), KernelError> {
        match self {
            Self::Values(values) => values.owned_by(backend),
            Self::Bf16Plus16 {
                parameter,
                remainder,
            } => {
                backend.owns::<u8>(parameter)?;
                backend.owns::<u8>(remainder)
            }
        }
    }

    /// All values as f32, which is exact.
    ///
    /// # Errors
    /// The device failed, or the host has no room.
    pub fn download(&self, backend: &B) -> Result<Vec<f32>, KernelError> {
        match self {
            Self::Values(values) => values.download(backend),
            Self::Bf16Plus16 {
                parameter,
                remainder,
            } => {
                let parameters = backend.download(parameter)?;
                Ok(joined(&parameters, &backend.download(remainder)?).collect())
            }
        }
    }

    /// Replaces all values: rounded to nearest even in bf16, exact in the other dtypes.
    ///
    /// # Errors
    /// Another number of values; nothing is replaced then.
    pub fn upload(&self, backend: &B, values: &[f32]) -> Result<(), KernelError> {
        let (found, needed) = (values.len(), self.len(backend));
        if found != needed {
            let what = "the values of a master".to_owned();
            return Err(KernelError::Length {
                what,
                needed,
                found,
            });
        }
        match self {
            Self::Values(to) => to.write(backend, 0, values),
            Self::Bf16Plus16 {
                parameter,
                remainder,
            } => {
                let [mut parameters, mut remainders] = [(); 2].map(|()| vec![0; 2 * found]);
                let [to_p, to_r] =
                    [&mut parameters, &mut remainders].map(|bytes| bytes.as_chunks_mut::<2>().0);
                for ((&x, to_p), to_r) in values.iter().zip(to_p).zip(to_r) {
                    let (p, r) = split(x);
                    (*to_p, *to_r) = (p.to_le_bytes(), r.to_le_bytes());
                }
                backend.write(parameter, 0, &parameters)?;
                backend.write(remainder, 0, &remainders)
            }
        }
    }
}

/// The values of parameters and remainders that were read as they are stored.
pub fn joined<'a>(
    parameters: &'a [u8],
    remainders: &'a [u8],
) -> impl ExactSizeIterator<Item = f32> + 'a {
    let [parameters, remainders] = [parameters, remainders].map(|bytes| bytes.as_chunks::<2>().0);
    let each = parameters.iter().zip(remainders);
    each.map(|(&p, &r)| join(bf16::from_le_bytes(p), i16::from_le_bytes(r)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cpu;

    #[test]
    fn another_number_of_values_replaces_nothing() {
        let half = || Cpu.alloc::<u8>(8).expect("room");
        let halves = || Master::Bf16Plus16 {
            parameter: half(),
            remainder: half(),
        };
        let values = |dtype| Source::alloc(&Cpu, dtype, 4).expect("room").into();
        for master in [values(FloatDtype::F32), values(FloatDtype::Bf16), halves()] {
            let first = [1.5, -2.0, 0.0, 3.0];
            master.upload(&Cpu, &first).expect("four values");
            for others in [&[1.0; 3][..], &[1.0; 5]] {
                let error = master.upload(&Cpu, others).expect_err("another number");
                let KernelError::Length { needed, found, .. } = error else {
                    panic!("{error}");
                };
                assert_eq!((needed, found), (4, others.len()));
            }
            assert_eq!(master.download(&Cpu).expect("values"), first);
        }
    }
}
