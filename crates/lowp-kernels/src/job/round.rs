//! [`RoundJob`]: values as low-precision codes hold them, without the codes.

use half::bf16;
use lowp_format::{Orientation, Usage};

use super::EncodeJob;
use crate::Backend;

/// Rounds a matrix of bfloat16 to what its codes decode to, in one pass: `decode(encode(source))`, in bfloat16, for each orientation that
/// has values. Codes and scales of the other one are targets of `encode`.
///
/// [`crate::rounds`] says which ingredients and shapes have such a pass.
#[derive(Clone, Debug)]
pub struct RoundJob<B: Backend> {
    /// Shape, ingredients, source and, by orientation, what is known of the tensor; Compact targets of orientations without values, at
    /// most one for each part.
    pub encode: EncodeJob<B>,
    /// Where the decoded values of each orientation go, rowwise first: `shape.elements()` in row-major order.
    pub values: [Option<B::Buffer<bf16>>; 2],
}

impl<B: Backend> RoundJob<B> {
    /// The orientations that have values.
    pub fn rounded(&self) -> Usage {
        let mut usage = Usage::empty();
        for orientation in Orientation::ALL {
            if self.values[orientation as usize].is_some() {
                usage |= orientation.usage();
            }
        }
        usage
    }
}
