//! [`Documents`]: the positions that tokens of packed documents see, on the device.

use half::bf16;
use lowp_kernels::{Backend, Cuda, CudaBuffer};

use super::TransformerError;
use super::ops::Ops;
use super::place::{Arena, bytes};
use crate::places::DocumentPlaces;

type Done<T = ()> = Result<T, TransformerError>;

/// Which tokens a token sees, where it does not see all before it.
#[derive(Debug)]
pub(super) struct Documents {
    /// For each token the first position of its sequence that it sees.
    pub(super) first: CudaBuffer<u8>,
    /// What cuDNN adds to scores, `[sequence, position, position]`.
    pub(super) mask: Option<CudaBuffer<bf16>>,
}

impl Documents {
    pub(super) fn new(arena: &Arena, places: &DocumentPlaces) -> Done<Self> {
        let mask = places.mask.as_ref().map(|place| arena.values(place));
        Ok(Self {
            first: arena.codes(&places.first)?,
            mask: mask.transpose()?,
        })
    }

    /// Gives the device what the tokens of a batch see: all before them where that is not said.
    pub(super) fn upload(
        &self,
        cuda: &Cuda,
        ops: &Ops,
        [tokens, seq]: [usize; 2],
        first_seen: Option<&[u32]>,
    ) -> Done {
        let seen: Vec<u32> = match first_seen {
            // Of its own position on, at most.
            Some(seen) => (0..seq as u32)
                .cycle()
                .zip(seen)
                .map(|(own, &first)| first.min(own))
                .collect(),
            None => vec![0; tokens],
        };
        cuda.write(&self.first, 0, &bytes(&seen))?;
        match &self.mask {
            Some(mask) => ops.document_mask(&self.first, mask, [tokens, seq]),
            None => Ok(()),
        }
    }
}
