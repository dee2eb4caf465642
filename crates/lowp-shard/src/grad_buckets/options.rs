//! [`GradBucketOptions`]: how gradients travel. [`Reduction`]: when.

use lowp_comm::GradWire;
use lowp_kernels::FloatDtype;

/// How gradients gather and travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GradBucketOptions {
    /// Gradients of at most this many bytes go together; a larger one goes by itself. Fewer, larger buckets use links
    /// better (between two H200, f32 in buckets of 32, 128 and 1024 MiB: 0.68, 0.78 and 0.94 of the speed of one reduce-scatter);
    /// smaller ones start earlier and take less memory. 128 MiB.
    pub bytes: usize,
    /// Storage of full gradients. bf16 gradients travel as they are.
    pub dtype: FloatDtype,
    /// The dtype in which f32 gradients travel.
    pub wire: GradWire,
}

impl Default for GradBucketOptions {
    fn default() -> Self {
        Self {
            bytes: 128 << 20,
            dtype: FloatDtype::F32,
            wire: GradWire::F32,
        }
    }
}

/// What becomes of the gradients of a micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// They stay on the rank, which adds them in f32 to those that it has: of a micro-batch that is not the last one of its step. Full
    /// gradients in f32 have memory of their own from then on.
    Keep,
    /// They are reduced and scattered, bucket by bucket, with those that the rank kept. Replicas are added at the end of the step.
    #[default]
    Scatter,
    /// As `Scatter`, but replicas are added bucket by bucket, too: of the last micro-batch of its step. Buckets that no
    /// earlier step has sent, and those that were sent more than once in a micro-batch, wait for the end of the step all the same.
    Finish,
}
