//! [`HostComm`]: data by way of the host, for ranks that are processes without a common device.

use std::ops::Range;
use std::sync::Arc;

use lowp_kernels::{Backend, Element};

use super::{Collective, Communicator, Counters, GatherItem, GradWire, ReduceItem, Traffic};
use crate::{CommError, Control, MAX_ALL_GATHER, or_abort};

/// One rank of a group whose data travel as the small values of a [`Control`] do: each rank's whole, to all ranks.
/// For tests and for training on CPUs; between GPUs NCCL moves data.
///
/// Sums are in rank order: the bits of [`LocalComm`](super::LocalComm).
#[derive(Debug)]
pub struct HostComm<B: Backend> {
    control: Arc<dyn Control>,
    backend: B,
    /// Most bytes of all ranks that travel at once.
    most: usize,
    counters: Counters,
}

impl<B: Backend> HostComm<B> {
    /// The rank of `control`, with its data on the stream of `backend`.
    pub fn new(control: Arc<dyn Control>, backend: &B) -> Self {
        Self::with_most(control, backend, MAX_ALL_GATHER)
    }

    /// The same where at most `most` bytes of all ranks together travel at once, or a byte of each: more are given in turn.
    pub fn with_most(control: Arc<dyn Control>, backend: &B, most: usize) -> Self {
        Self {
            control,
            backend: backend.clone(),
            most,
            counters: Counters::default(),
        }
    }

    /// Gives the content of this rank's pieces to all ranks, and returns theirs; all together are `total` bytes.
    fn round(
        &self,
        label: &str,
        batch: Collective<'_, B>,
        own: Vec<u8>,
        total: usize,
    ) -> Result<Vec<Vec<u8>>, CommError> {
        let call = batch.call(label, &self.backend);
        // Once per batch, as the data of others can only be understood if the lengths are the same.
        self.control
            .all_equal(batch.name(), &call.describe_whole())?;
        let world = self.control.members().len();
        // So many times, as each rank's part of its bytes may be a byte longer than the quotient.
        let times = total.div_ceil(self.most.saturating_sub(world).max(1));
        if times <= 1 {
            return self.control.all_gather(batch.name(), own);
        }
        let part = own.len().div_ceil(times);
        let mut all = vec![Vec::new(); world];
        for time in 0..times {
            let [from, to] = [time, time + 1].map(|time| own.len().min(time * part));
            let parts = self
                .control
                .all_gather(batch.name(), own[from..to].to_vec())?;
            for (all, part) in all.iter_mut().zip(parts) {
                all.extend(part);
            }
        }
        Ok(all)
    }

    fn gather(&self, label: &str, items: &[GatherItem<'_, B>]) -> Result<(), CommError> {
        let mut own = Vec::new();
        for item in items {
            own.extend(self.backend.download(item.source)?);
        }
        let ranges = items.iter().flat_map(|item| item.ranges);
        let total = ranges.map(ExactSizeIterator::len).sum();
        let all = self.round(label, Collective::AllGather(items), own, total)?;
        for (rank, bytes) in all.iter().enumerate() {
            let mut rest = bytes.as_slice();
            for item in items {
                let range = &item.ranges[rank];
                let (piece, next) = self.cut(rank, rest, range.len())?;
                self.backend.write(item.dest, range.start, piece)?;
                rest = next;
            }
        }
        Ok(())
    }

    /// Folds `own` of every rank, in rank order.
    fn fold(
        &self,
        label: &str,
        batch: Collective<'_, B>,
        own: &[f32],
        fold: impl Fn(f32, f32) -> f32,
    ) -> Result<Vec<f32>, CommError> {
        let bytes: Vec<u8> = own.iter().flat_map(|x| x.to_le_bytes()).collect();
        let total = bytes.len() * self.control.members().len();
        let all = self.round(label, batch, bytes, total)?;
        let mut sum = Vec::new();
        for (rank, bytes) in all.iter().enumerate() {
            let (bytes, _) = self.cut(rank, bytes, 4 * own.len())?;
            let (words, _) = bytes.as_chunks::<4>();
            let theirs = words.iter().map(|&word| f32::from_le_bytes(word));
            if rank == 0 {
                sum.extend(theirs);
            } else {
                sum.iter_mut()
                    .zip(theirs)
                    .for_each(|(sum, x)| *sum = fold(*sum, x));
            }
        }
        Ok(sum)
    }

    fn reduce(
        &self,
        label: &str,
        items: &[ReduceItem<'_, B>],
        wire: GradWire,
    ) -> Result<(), CommError> {
        let mut own: Vec<f32> = Vec::new();
        let mut places: Vec<Range<usize>> = Vec::new();
        for item in items {
            let start = own.len();
            let to = item.ranges.iter().map(|range| range.end).max().unwrap_or(0);
            own.resize(start + to, 0.0);
            item.grad.read(&self.backend, 0, &mut own[start..])?;
            own[start..].iter_mut().for_each(|x| *x = wire.apply(*x));
            let range = &item.ranges[self.control.rank()];
            places.push(start + range.start..start + range.end);
        }
        let sums = self.fold(
            label,
            Collective::ReduceScatter(items, wire),
            &own,
            |a, b| a + b,
        )?;
        for (item, place) in items.iter().zip(places) {
            let mut sum = sums[place].to_vec();
            if item.accumulate {
                let before = self.read(item.out)?;
                sum.iter_mut().zip(before).for_each(|(sum, x)| *sum += x);
            }
            self.backend.write(item.out, 0, &sum)?;
        }
        Ok(())
    }

    fn read<T: Element>(&self, buffer: &B::Buffer<T>) -> Result<Vec<T>, CommError> {
        Ok(self.backend.download(buffer)?)
    }

    /// The first `len` bytes of what `rank` sent, and the rest.
    fn cut<'a>(
        &self,
        rank: usize,
        bytes: &'a [u8],
        len: usize,
    ) -> Result<(&'a [u8], &'a [u8]), CommError> {
        bytes
            .split_at_checked(len)
            .ok_or_else(|| CommError::Failed {
                rank: self.control.members()[rank],
                message: format!("it sent {} bytes where {len} belong", bytes.len()),
            })
    }
}

impl<B: Backend> From<HostComm<B>> for Arc<dyn Communicator<B>> {
    fn from(comm: HostComm<B>) -> Self {
        Arc::new(comm)
    }
}

impl<B: Backend> Communicator<B> for HostComm<B> {
    fn control(&self) -> &dyn Control {
        &*self.control
    }

    fn backend(&self) -> &B {
        &self.backend
    }

    fn is_enqueued(&self) -> bool {
        false
    }

    fn enqueue(&self, label: &str, batch: Collective<'_, B>) -> Result<(), CommError> {
        let run = || {
            batch.check(&self.backend, self.rank(), self.world_size())?;
            match batch {
                Collective::AllGather(items) => self.gather(label, items),
                Collective::ReduceScatter(items, wire) => self.reduce(label, items, wire),
                Collective::Max(values) => {
                    let folded = self.fold(label, batch, &self.read(values)?, f32::max)?;
                    Ok(self.backend.write(values, 0, &folded)?)
                }
                Collective::Sum(buffers) => {
                    let mut own = Vec::new();
                    for values in buffers {
                        own.extend(self.read(values)?);
                    }
                    let mut rest = &*self.fold(label, batch, &own, |a, b| a + b)?;
                    for values in buffers {
                        let (sum, next) = rest.split_at(self.backend.len(values));
                        self.backend.write(values, 0, sum)?;
                        rest = next;
                    }
                    Ok(())
                }
            }
        };
        or_abort(self, run())?;
        self.counters.add(&self.backend, self.rank(), batch);
        Ok(())
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator<B>>, CommError> {
        let control = self.control.split(color, key)?;
        Ok(Arc::new(Self::with_most(control, &self.backend, self.most)))
    }

    fn count(&self, sent: Traffic) {
        self.counters.repeat(sent);
    }

    fn traffic(&self) -> Traffic {
        self.counters.traffic()
    }
}
