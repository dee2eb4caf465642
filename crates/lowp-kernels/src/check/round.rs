//! The checks of roundings: ingredients and shapes that are rounded in one pass, and targets beside values.

use half::bf16;
use lowp_format::{Orientation, Usage};

use super::access::Mode;
use super::encode::compact;
use super::planner::{Done, Planner, elements};
use crate::ingredients::{rounded_axis, rounds};
use crate::{Backend, KernelError, RoundJob, Source, Target};

impl<B: Backend> Planner<'_, B> {
    pub(super) fn round(&mut self, index: usize, job: &RoundJob<B>) -> Done {
        let RoundJob { encode, values } = job;
        let all = elements(encode.shape)?;
        if !matches!(encode.source, Source::Bf16(_)) || !rounds(&encode.kernels, encode.shape) {
            return Err(KernelError::NotRounded {
                kernels: Box::new(encode.kernels),
                dtype: encode.source.dtype(),
                shape: encode.shape,
            });
        }
        self.source(index, "source", &encode.source, all)?;
        let rounded = Orientation::ALL
            .into_iter()
            .filter(|o| values[*o as usize].is_some())
            .fold(Usage::empty(), |all, o| all | o.usage());
        for (at, target) in encode.targets.iter().enumerate() {
            compact(target, "a rounding")?;
            let key = target.spec.key;
            let again = |other: &Target<B>| other.spec.key == key;
            let kernels = Orientation::ALL.into_iter().zip(&encode.kernels);
            let mut serving = kernels.filter(|(o, _)| key.usage.contains(o.usage()));
            let other = serving.any(|(o, kernel)| target.spec.axes[0] != rounded_axis(kernel, o));
            let beside = key.usage == Usage::BOTH || rounded.intersects(key.usage) || other;
            if beside && !key.part.is_outer() || encode.targets[..at].iter().any(again) {
                return Err(KernelError::RoundTarget { key });
            }
        }
        self.encode_beside(index, encode, rounded)?;
        for (values, what) in values.iter().zip(["rowwise values", "columnwise values"]) {
            if let Some(values) = values {
                self.whole::<bf16>(index, what, values, all, Mode::Write)?;
            }
        }
        Ok(())
    }
}
