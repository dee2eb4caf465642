//! Reductions of [`LocalComm`]: every sum in rank order.

use std::sync::Arc;

use lowp_kernels::Backend;

use super::{LocalComm, count};
use crate::ShardError;
use crate::comm::post::{Op, Payload, Post};
use crate::comm::{Communicator, GradWire, ReduceItem};

/// Elements that a reduction handles at a time; two chunks of f32 stay in a core's cache.
const CHUNK: usize = 1 << 15;

/// Host memory of reductions, reused.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    sum: Vec<f32>,
    piece: Vec<f32>,
}

impl<B: Backend> LocalComm<B> {
    /// Folds every rank's vector, in rank order, into the scratch sum.
    pub(super) fn all_reduce(
        &self,
        op: Op,
        values: &B::Buffer<f32>,
        fold: impl Fn(f32, f32) -> f32,
    ) -> Result<(), ShardError> {
        let scratch = &mut *self.begin();
        let len = self.backend().len(values);
        let payload = Payload::Floats(vec![values.clone()]);
        let post = self.post(op, 1, vec![len], payload);
        self.exchange(post, |posts| {
            // The vector of one rank is its own sum and maximum.
            if self.size == 1 {
                return Ok(());
            }
            scratch.sum.resize(len, 0.0);
            scratch.piece.resize(len, 0.0);
            for (rank, peer) in floats(posts, 0).enumerate() {
                if rank == 0 {
                    self.backend().read(peer, 0, &mut scratch.sum)?;
                    continue;
                }
                self.backend().read(peer, 0, &mut scratch.piece)?;
                for (sum, &x) in scratch.sum.iter_mut().zip(&scratch.piece) {
                    *sum = fold(*sum, x);
                }
            }
            Ok(())
        })?;
        if self.size > 1 {
            // Everybody has read; only now may this rank's vector change.
            self.backend()
                .write(values, 0, &scratch.sum)
                .map_err(|e| self.reject(e.into()))?;
        }
        count(&self.counters.all_reduce, 4 * len);
        count(&self.counters.calls, 1);
        Ok(())
    }

    /// The sum of one item's own range.
    pub(super) fn reduce_item(
        &self,
        posts: &[Arc<Post<B>>],
        index: usize,
        item: &ReduceItem<'_, B>,
        wire: GradWire,
        scratch: &mut Scratch,
    ) -> Result<(), ShardError> {
        let own = item.ranges[self.rank].clone();
        if self.size == 1 && wire == GradWire::F32 && !item.accumulate {
            self.backend().copy(item.grad, own.clone(), item.out, 0)?;
            count(&self.counters.reduce_scatter, own.len() * wire.bytes());
            return Ok(());
        }
        for start in own.clone().step_by(CHUNK) {
            let len = CHUNK.min(own.end - start);
            scratch.sum.resize(len, 0.0);
            scratch.piece.resize(len, 0.0);
            for (rank, peer) in floats(posts, index).enumerate() {
                self.backend().read(peer, start, &mut scratch.piece)?;
                for (sum, &x) in scratch.sum.iter_mut().zip(&scratch.piece) {
                    let x = wire.apply(x);
                    *sum = if rank == 0 { x } else { *sum + x };
                }
            }
            let to = start - own.start;
            if item.accumulate {
                self.backend().read(item.out, to, &mut scratch.piece)?;
                for (sum, &x) in scratch.sum.iter_mut().zip(&scratch.piece) {
                    *sum += x;
                }
            }
            self.backend().write(item.out, to, &scratch.sum)?;
            count(&self.counters.reduce_scatter, len * wire.bytes());
        }
        Ok(())
    }
}

/// Every rank's float buffer number `item`, in rank order. Posts were compared, so all have it.
fn floats<B: Backend>(
    posts: &[Arc<Post<B>>],
    item: usize,
) -> impl Iterator<Item = &B::Buffer<f32>> {
    posts.iter().filter_map(move |post| match &post.payload {
        Payload::Floats(buffers) => buffers.get(item),
        _ => None,
    })
}
