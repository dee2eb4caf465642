//! Reductions of [`LocalComm`]: every sum in rank order.

use lowp_kernels::{Backend, Source};

use super::{Brought, LocalComm};
use crate::CommError;
use crate::comm::{Communicator, GradWire, ReduceItem};
use crate::control::call::Call;
use crate::control::post::Post;

/// Elements that a reduction handles at a time; two chunks of f32 stay in a core's cache.
const CHUNK: usize = 1 << 15;

/// Host memory of reductions, reused.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    sum: Vec<f32>,
    piece: Vec<f32>,
}

impl<B: Backend> LocalComm<B> {
    /// Folds every rank's vectors, in rank order, into `buffers`.
    pub(super) fn fold(
        &self,
        call: Call,
        buffers: &[&B::Buffer<f32>],
        fold: impl Fn(f32, f32) -> f32,
        scratch: &mut Scratch,
    ) -> Result<(), CommError> {
        let sources = buffers.iter().map(|&values| Source::F32(values.clone()));
        let brought = Brought::Floats(sources.collect(), self.backend.clone());
        let lens: Vec<usize> = buffers.iter().map(|b| self.backend.len(b)).collect();
        self.round(call, brought, |posts| {
            // The vector of one rank is its own sum and maximum.
            if posts.len() == 1 {
                return Ok(());
            }
            scratch.sum.resize(lens.iter().sum(), 0.0);
            let mut sums = &mut *scratch.sum;
            for (item, &len) in lens.iter().enumerate() {
                let (sum, rest) = sums.split_at_mut(len);
                sums = rest;
                scratch.piece.resize(len, 0.0);
                for (rank, peer) in floats(posts, item).enumerate() {
                    if rank == 0 {
                        peer.read(&self.backend, 0, sum)?;
                        continue;
                    }
                    peer.read(&self.backend, 0, &mut scratch.piece)?;
                    for (sum, &x) in sum.iter_mut().zip(&scratch.piece) {
                        *sum = fold(*sum, x);
                    }
                }
            }
            Ok(())
        })?;
        if self.world_size() > 1 {
            // Everybody has read; only now may this rank's vectors change.
            let mut sums = &*scratch.sum;
            for (values, len) in buffers.iter().zip(lens) {
                let (sum, rest) = sums.split_at(len);
                self.backend.write(values, 0, sum)?;
                sums = rest;
            }
        }
        Ok(())
    }

    /// Sums every rank's gradients over this rank's ranges.
    pub(super) fn sum_ranges(
        &self,
        call: Call,
        items: &[ReduceItem<'_, B>],
        wire: GradWire,
        scratch: &mut Scratch,
    ) -> Result<(), CommError> {
        let grads = items.iter().map(|i| i.grad.clone()).collect();
        let brought = Brought::Floats(grads, self.backend.clone());
        self.round(call, brought, |posts| {
            for (i, item) in items.iter().enumerate() {
                self.sum_range(posts, i, item, wire, scratch)?;
            }
            Ok(())
        })
    }

    /// The sum of one item's own range.
    fn sum_range(
        &self,
        posts: &[Post<Brought<B>>],
        index: usize,
        item: &ReduceItem<'_, B>,
        wire: GradWire,
        scratch: &mut Scratch,
    ) -> Result<(), CommError> {
        let own = item.ranges[self.rank()].clone();
        match item.grad {
            Source::F32(grad) if posts.len() == 1 && wire == GradWire::F32 && !item.accumulate => {
                self.backend.copy(grad, own, item.out, 0)?;
                return Ok(());
            }
            _ => {}
        }
        for start in own.clone().step_by(CHUNK) {
            let len = CHUNK.min(own.end - start);
            scratch.sum.resize(len, 0.0);
            scratch.piece.resize(len, 0.0);
            for (rank, peer) in floats(posts, index).enumerate() {
                peer.read(&self.backend, start, &mut scratch.piece)?;
                for (sum, &x) in scratch.sum.iter_mut().zip(&scratch.piece) {
                    let x = wire.apply(x);
                    *sum = if rank == 0 { x } else { *sum + x };
                }
            }
            let to = start - own.start;
            if item.accumulate {
                self.backend.read(item.out, to, &mut scratch.piece)?;
                for (sum, &x) in scratch.sum.iter_mut().zip(&scratch.piece) {
                    *sum += x;
                }
            }
            self.backend.write(item.out, to, &scratch.sum)?;
        }
        Ok(())
    }
}

/// Every rank's float buffer number `item`, in rank order. Calls were compared, so all have it.
fn floats<B: Backend>(posts: &[Post<Brought<B>>], item: usize) -> impl Iterator<Item = &Source<B>> {
    posts.iter().filter_map(move |post| match &post.payload {
        Brought::Floats(buffers, _) => buffers.get(item),
        _ => None,
    })
}
