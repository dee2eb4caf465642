//! [`Tokens`]: a batch, and its memory on the device.

use lowp_kernels::{Backend, Cuda, CudaBuffer};

use super::TransformerError;
use super::linear::Shared;
use super::place::bytes;

type Done<T = ()> = Result<T, TransformerError>;

/// A batch: whole sequences of tokens, and what follows each.
#[derive(Clone, Copy, Debug)]
pub struct Tokens<'a> {
    /// The ids of the tokens, sequence after sequence.
    pub inputs: &'a [u32],
    /// The token after each, or [`Batch::IGNORED`].
    ///
    /// [`Batch::IGNORED`]: lowp_train::Batch::IGNORED
    pub targets: &'a [u32],
    /// For each token the first position of its sequence that it sees, where it does not see all before it
    /// ([`MicroBatch::documents`](crate::MicroBatch::documents)).
    pub first_seen: Option<&'a [u32]>,
}

/// The batch on the device.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) ids: CudaBuffer<u8>,
    pub(super) targets: CudaBuffer<u8>,
    /// Where the tokens of each id begin in `order`, and their places in the batch.
    pub(super) starts: CudaBuffer<u8>,
    pub(super) order: CudaBuffer<u8>,
    /// The same by position.
    pub(super) by_position: [CudaBuffer<u8>; 2],
}

impl Tokens<'_> {
    /// Whether they are as many as `tokens`, of a vocabulary of `vocab`, and fit a model whose documents are apart or not.
    pub(super) fn check(&self, tokens: usize, vocab: usize, documents: bool) -> Done {
        let ignored = lowp_train::Batch::IGNORED;
        let lists = [
            (Some(self.inputs), None),
            (Some(self.targets), Some(ignored)),
            (self.first_seen, None),
        ];
        for list in lists.iter().filter_map(|(list, _)| *list) {
            if list.len() != tokens {
                return Err(TransformerError::Batch {
                    found: list.len(),
                    expected: tokens,
                });
            }
        }
        for (ids, ignored) in &lists[..2] {
            let mut ids = ids.iter().copied().flatten();
            if let Some(id) = ids.find(|&&id| id as usize >= vocab && Some(id) != *ignored) {
                return Err(TransformerError::Unsupported(format!(
                    "token {id} in a vocabulary of {vocab}"
                )));
            }
        }
        if self.first_seen.is_some() && !documents {
            let why = "documents are apart, and the model was built for those that are not: set `MicroBatch::documents`";
            return Err(TransformerError::Unsupported(why.to_owned()));
        }
        Ok(())
    }
}

impl Batch {
    /// Memory for `sequences` of `seq` tokens.
    pub(super) fn new(shared: &Shared, sequences: usize, seq: usize) -> Done<Self> {
        let Shared {
            cuda,
            arena,
            places,
            ..
        } = shared;
        let [starts, order] = positions_of(sequences, seq);
        Ok(Self {
            ids: arena.codes(&places.ids)?,
            targets: arena.codes(&places.targets)?,
            starts: arena.codes(&places.starts)?,
            order: arena.codes(&places.order)?,
            by_position: [cuda.upload(&bytes(&starts))?, cuda.upload(&bytes(&order))?],
        })
    }

    /// Gives the device tokens that were checked.
    pub(super) fn upload(&self, cuda: &Cuda, batch: Tokens<'_>, vocab: usize) -> Done {
        let mut starts = vec![0u32; vocab + 1];
        for &id in batch.inputs {
            starts[id as usize + 1] += 1;
        }
        for id in 0..vocab {
            starts[id + 1] += starts[id];
        }
        let mut next = starts.clone();
        let mut order = vec![0u32; batch.inputs.len()];
        for (place, &id) in (0u32..).zip(batch.inputs) {
            let at = &mut next[id as usize];
            order[*at as usize] = place;
            *at += 1;
        }
        let lists = [
            (&self.ids, batch.inputs),
            (&self.targets, batch.targets),
            (&self.starts, &starts),
            (&self.order, &order),
        ];
        for (buffer, list) in lists {
            cuda.write(buffer, 0, &bytes(list))?;
        }
        Ok(())
    }
}

/// The tokens of each position in the order of sequences: where they begin, and their places.
fn positions_of(sequences: usize, seq: usize) -> [Vec<u32>; 2] {
    let starts = (0..=seq).map(|p| (p * sequences) as u32).collect();
    let order = (0..seq).flat_map(|p| (0..sequences).map(move |s| (s * seq + p) as u32));
    [starts, order.collect()]
}
