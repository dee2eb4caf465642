//! What changes from run to run of a plan, and what a step makes of it on the device: [`StepScalars`]
//! with its [`GroupScalars`], and the records that [`crate::StepScalarsJob`] reads and writes. Layouts in
//! bytes: docs/numerics.md 12.8.

use crate::KernelError;
use crate::power::power;

/// The scalars of a parameter group (docs/numerics.md 12). A rule that has no use for one does not read it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupScalars {
    /// Learning rate of the step, with the factor of its schedule.
    pub lr: f32,
    /// Adam: decay of the first moment. Lion: what `exp_avg` is in the sum whose sign counts. SGD: the momentum.
    pub beta1: f32,
    /// Adam: decay of the second moment. Lion: decay of `exp_avg`.
    pub beta2: f32,
    /// Adam: added to the root of the second moment.
    pub eps: f32,
    /// Weight decay; 0 decays nothing. Adam with L2 and SGD add the decay to the gradient, other rules to the update.
    pub weight_decay: f32,
    /// `f32(1 - beta1^step)`, the power in binary64; 1 without bias correction.
    pub correction1: f32,
    /// `f32(1 - beta2^step)`, the power in binary64; 1 without bias correction.
    pub correction2: f32,
    /// Whether [`crate::StepScalarsJob`] makes corrections of the betas, or 1. Nothing else reads it.
    pub bias_correction: bool,
}

/// What language models are mostly trained with: lr 1e-3, betas 0.9 and 0.95, eps 1e-8, weight decay
/// 0.1; corrections of 1, and bias correction where a device makes them.
impl Default for GroupScalars {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            correction1: 1.0,
            correction2: 1.0,
            bias_correction: true,
        }
    }
}

impl GroupScalars {
    /// Bytes of a group.
    const BYTES: usize = 32;

    /// Sets both bias corrections for `step`, which starts at 1.
    #[must_use]
    pub fn at_step(self, step: u64) -> Self {
        let correction = |beta: f32| canonical((1.0 - power(f64::from(beta), step)) as f32);
        Self {
            correction1: correction(self.beta1),
            correction2: correction(self.beta2),
            ..self
        }
    }

    fn put(&self, to: &mut Vec<u8>) {
        let fields = [
            self.lr,
            self.beta1,
            self.beta2,
            self.eps,
            self.weight_decay,
            self.correction1,
            self.correction2,
        ];
        fields.into_iter().for_each(|x| to.extend(x.to_le_bytes()));
        to.extend(u32::from(self.bias_correction).to_le_bytes());
    }

    fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        Self {
            lr: float(bytes, 0),
            beta1: float(bytes, 4),
            beta2: float(bytes, 8),
            eps: float(bytes, 12),
            weight_decay: float(bytes, 16),
            correction1: float(bytes, 20),
            correction2: float(bytes, 24),
            bias_correction: word(bytes, 28) != 0,
        }
    }
}

/// What changes from run to run of one plan.
#[derive(Clone, Debug, PartialEq)]
pub struct StepScalars {
    /// One set per parameter group.
    pub groups: Vec<GroupScalars>,
    /// Gradients are multiplied by this before use (clipping, loss scale); 1 leaves their bits.
    pub grad_scale: f32,
    /// Separates the random numbers of this run from those of others with the same key.
    pub random_step: u64,
    /// The run changes nothing: the step of a gradient that is not finite.
    pub skip: bool,
    /// [`crate::StepScalarsJob`] scales gradients of a larger norm down to it; infinity leaves all as
    /// they are. Nothing else reads it.
    pub max_norm: f32,
}

impl Default for StepScalars {
    fn default() -> Self {
        Self {
            groups: Vec::new(),
            grad_scale: 1.0,
            random_step: 0,
            skip: false,
            max_norm: f32::INFINITY,
        }
    }
}

impl StepScalars {
    /// Bytes before the groups.
    const HEADER: usize = 32;

    /// Bytes of the scalars of `groups` parameter groups.
    pub const fn bytes(groups: usize) -> usize {
        Self::HEADER.saturating_add(groups.saturating_mul(GroupScalars::BYTES))
    }

    /// The scalars as a device has them (docs/numerics.md 12.8).
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(Self::bytes(self.groups.len()));
        bytes.extend(self.random_step.to_le_bytes());
        bytes.extend(self.grad_scale.to_le_bytes());
        bytes.extend(u32::from(self.skip).to_le_bytes());
        bytes.extend(self.max_norm.to_le_bytes());
        let groups = u32::try_from(self.groups.len()).unwrap_or(u32::MAX);
        bytes.extend(groups.to_le_bytes());
        bytes.extend([0; 8]);
        self.groups.iter().for_each(|group| group.put(&mut bytes));
        bytes
    }

    /// The scalars that [`StepScalars::to_bytes`] laid out. The length says how many groups there are.
    ///
    /// # Errors
    /// [`KernelError::Length`] if no number of groups has this length.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, KernelError> {
        Self::groups_in(bytes.len())?;
        let groups = bytes[Self::HEADER..].as_chunks().0;
        Ok(Self {
            groups: groups.iter().map(GroupScalars::from_bytes).collect(),
            random_step: long(bytes, 0),
            grad_scale: float(bytes, 8),
            skip: word(bytes, 12) != 0,
            max_norm: float(bytes, 16),
        })
    }

    /// The groups of scalars of `len` bytes.
    pub(crate) fn groups_in(len: usize) -> Result<usize, KernelError> {
        let groups = len
            .saturating_sub(Self::HEADER)
            .div_ceil(GroupScalars::BYTES);
        let needed = Self::bytes(groups);
        if len != needed {
            return Err(KernelError::Length {
                what: "the scalars of a step".to_owned(),
                needed,
                found: len,
            });
        }
        Ok(groups)
    }
}

/// What a rank contributes to the gradient norm of a step, and to the check that all ranks do the same
/// one.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GradContribution {
    /// The sum of squares of its gradients: the first word of [`crate::SumSquaresJob::out`].
    pub sum_squares: f64,
    /// How many of its gradients are not finite: the second word.
    pub non_finite: u64,
    /// A value that all ranks must have in common, such as a digest of what else the step depends on.
    pub consensus: u64,
    /// A value that the ranks of a replica must have in common.
    pub within: u64,
}

impl GradContribution {
    /// Bytes of a part.
    pub const BYTES: usize = 32;
    /// Bytes of it that [`crate::SumSquaresJob`] writes; the host writes those after them.
    pub const SUMS: usize = 16;

    /// The part as a device has it.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let words = [
            self.sum_squares.to_bits(),
            self.non_finite,
            self.consensus,
            self.within,
        ];
        record(words)
    }

    /// The part that [`GradContribution::to_bytes`] laid out.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        Self {
            sum_squares: f64::from_bits(long(bytes, 0)),
            non_finite: long(bytes, 8),
            consensus: long(bytes, 16),
            within: long(bytes, 24),
        }
    }
}

/// How many steps were applied, and how many skipped: the state of [`crate::StepScalarsJob`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepCounts {
    /// Steps that were applied.
    pub applied: u64,
    /// Steps that were skipped because a gradient was not finite or ranks disagreed.
    pub skipped: u64,
}

impl StepCounts {
    /// Bytes of the counts.
    pub const BYTES: usize = 16;

    /// The counts as a device has them.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        record([self.applied, self.skipped])
    }

    /// The counts that [`StepCounts::to_bytes`] laid out.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        Self {
            applied: long(bytes, 0),
            skipped: long(bytes, 8),
        }
    }
}

/// What became of a step: the output of [`crate::StepScalarsJob`] for the host.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepRecord {
    /// The gradient norm of the replica, after `grad_scale`.
    pub norm: f64,
    /// Non-finite gradients of all ranks.
    pub non_finite: u64,
    /// Steps applied so far, this one included.
    pub steps: u64,
    /// Steps skipped so far, this one included.
    pub skipped: u64,
    /// The factor that brings the norm down to the largest allowed, at most 1.
    pub clip: f32,
    /// Whether this step is applied.
    pub applied: bool,
    /// The first rank whose [`GradContribution::consensus`] is not that of rank 0.
    pub consensus: Option<usize>,
    /// The first replica whose sum of squares is not that of replica 0; only looked for where every
    /// gradient is finite.
    pub replicas: Option<usize>,
    /// The first rank whose [`GradContribution::within`] is not that of the first rank of its replica.
    pub within: Option<usize>,
}

impl StepRecord {
    /// Bytes of a report.
    pub const BYTES: usize = 64;

    /// The report as a device has it.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let after = |index: Option<usize>| {
            let index = index.map(|index| u32::try_from(index).unwrap_or(u32::MAX));
            index.map_or(0, |index| index.saturating_add(1))
        };
        record([
            self.norm.to_bits(),
            self.non_finite,
            self.steps,
            self.skipped,
            pair(self.clip.to_bits(), u32::from(self.applied)),
            pair(after(self.consensus), after(self.replicas)),
            pair(after(self.within), 0),
            0,
        ])
    }

    /// The report that a device wrote.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let before = |at| (word(bytes, at) as usize).checked_sub(1);
        Self {
            norm: f64::from_bits(long(bytes, 0)),
            non_finite: long(bytes, 8),
            steps: long(bytes, 16),
            skipped: long(bytes, 24),
            clip: float(bytes, 32),
            applied: word(bytes, 36) != 0,
            consensus: before(40),
            replicas: before(44),
            within: before(48),
        }
    }
}

/// `x`; one bit pattern for every NaN, which arithmetic may choose.
pub(crate) fn canonical(x: f32) -> f32 {
    if x.is_nan() { f32::NAN } else { x }
}

/// Words in little-endian bytes.
fn record<const WORDS: usize, const BYTES: usize>(words: [u64; WORDS]) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    for (to, word) in bytes.as_chunks_mut().0.iter_mut().zip(words) {
        *to = word.to_le_bytes();
    }
    bytes
}

/// Four bytes of a record. Those that it does not have are zero.
fn word(bytes: &[u8], at: usize) -> u32 {
    let bytes = bytes.get(at..).and_then(<[u8]>::first_chunk);
    bytes.map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

fn float(bytes: &[u8], at: usize) -> f32 {
    f32::from_bits(word(bytes, at))
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from(word(bytes, at)) | u64::from(word(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn scalars_survive_their_bytes(
            words in prop::collection::vec(any::<u32>(), 4),
            groups in prop::collection::vec(prop::array::uniform8(any::<u32>()), 0..4),
            skip: bool,
        ) {
            let scalars = StepScalars {
                groups: groups.iter().map(|words| {
                    let [a, b, c, d, e, f, g] = [0, 1, 2, 3, 4, 5, 6].map(|i| f32::from_bits(words[i]));
                    GroupScalars {
                        lr: a, beta1: b, beta2: c, eps: d, weight_decay: e,
                        correction1: f, correction2: g, bias_correction: words[7] % 2 == 1,
                    }
                }).collect(),
                grad_scale: f32::from_bits(words[0]),
                random_step: u64::from(words[1]) << 32 | u64::from(words[2]),
                skip,
                max_norm: f32::from_bits(words[3]),
            };
            let bytes = scalars.to_bytes();
            prop_assert_eq!(bytes.len(), StepScalars::bytes(groups.len()));
            // Compared as bytes: some are NaN.
            prop_assert_eq!(StepScalars::from_bytes(&bytes).unwrap().to_bytes(), bytes);
        }

        #[test]
        fn records_survive_their_bytes(bytes in prop::collection::vec(any::<u8>(), 64)) {
            let mut bytes: [u8; 64] = bytes.try_into().unwrap();
            let part = GradContribution::from_bytes(bytes.first_chunk().unwrap());
            prop_assert_eq!(&part.to_bytes()[..], &bytes[..32]);
            let counts = StepCounts::from_bytes(bytes.first_chunk().unwrap());
            prop_assert_eq!(&counts.to_bytes()[..], &bytes[..16]);
            bytes[36..40].copy_from_slice(&1u32.to_le_bytes());
            bytes[52..].fill(0);
            let report = StepRecord::from_bytes(&bytes);
            prop_assert_eq!(report.to_bytes(), bytes);
        }
    }

    #[test]
    fn fields_lie_where_the_definition_says() {
        let group = GroupScalars {
            lr: 1.0,
            beta1: 2.0,
            beta2: 3.0,
            eps: 4.0,
            weight_decay: 5.0,
            correction1: 6.0,
            correction2: 7.0,
            bias_correction: true,
        };
        let scalars = StepScalars {
            groups: vec![group],
            grad_scale: 0.5,
            random_step: 0x1_0000_0002,
            skip: true,
            max_norm: 0.25,
        };
        let float = f32::to_bits;
        let header = [2, 1, float(0.5), 1, float(0.25), 1, 0, 0];
        let fields = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0].map(float);
        let words: Vec<u32> = header.into_iter().chain(fields).chain([1]).collect();
        let expected: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
        assert_eq!(scalars.to_bytes(), expected);

        let report = StepRecord {
            norm: 2.5,
            non_finite: 1,
            steps: 2,
            skipped: 3,
            clip: 0.5,
            applied: true,
            consensus: Some(4),
            replicas: None,
            within: Some(6),
        };
        let bytes = report.to_bytes();
        let words: Vec<u32> = (0..16).map(|i| word(&bytes, 4 * i)).collect();
        let norm = 2.5f64.to_bits();
        let [low, high] = [norm as u32, (norm >> 32) as u32];
        let expected = [low, high, 1, 0, 2, 0, 3, 0, float(0.5), 1, 5, 0, 7, 0, 0, 0];
        assert_eq!(words, expected);
    }

    #[test]
    fn other_lengths_are_errors() {
        for len in [0, 1, 31, 33, 63, 65] {
            let error = StepScalars::from_bytes(&vec![0; len]).unwrap_err();
            let needed = if len <= 32 {
                32
            } else {
                (len - 1) / 32 * 32 + 32
            };
            let what = "the scalars of a step".to_owned();
            let found = len;
            assert_eq!(
                error,
                KernelError::Length {
                    what,
                    needed,
                    found
                }
            );
        }
    }
}
