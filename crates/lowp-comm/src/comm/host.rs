//! [`HostComm`]: data by way of the host, for ranks that are processes without a common device.

use std::ops::Range;
use std::sync::Arc;

use lowp_kernels::{Backend, Element};

use super::{
    Collective, Communicator, Counters, GatherItem, GradWire, ReduceItem, Traffic, spanned,
};
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
    most_at_once: usize,
    counters: Counters,
}

impl<B: Backend> HostComm<B> {
    /// The rank of `control`, with its data on the stream of `backend`.
    pub fn new(control: Arc<dyn Control>, backend: &B) -> Self {
        Self::with_most(control, backend, MAX_ALL_GATHER)
    }

    /// The same where at most `most` bytes of all ranks together travel at once, or a value of each: more are given in turns, so that a rank
    /// holds no more of the others.
    pub fn with_most(control: Arc<dyn Control>, backend: &B, most: usize) -> Self {
        Self {
            control,
            backend: backend.clone(),
            most_at_once: most,
            counters: Counters::default(),
        }
    }

    /// Compares the whole batch, as the data of others can only be understood if the lengths are the same.
    fn agree(&self, label: &str, batch: Collective<'_, B>) -> Result<(), CommError> {
        let call = batch.call(label, &self.backend);
        self.control.all_equal(batch.name(), &call.describe_whole())
    }

    fn gather(&self, label: &str, items: &[GatherItem<'_, B>]) -> Result<(), CommError> {
        let batch = Collective::AllGather(items);
        self.agree(label, batch)?;
        let mut own = Vec::new();
        for item in items {
            own.extend(self.backend.download(item.source)?);
        }
        let world = self.control.members().len();
        let lens = |rank: usize| items.iter().map(move |item| item.ranges[rank].len());
        let total: usize = (0..world).flat_map(lens).sum();
        // So many turns, as each rank's part of its bytes may be a byte longer than the quotient.
        let turns = total
            .div_ceil(self.most_at_once.saturating_sub(world).max(1))
            .max(1);
        for turn in 0..turns {
            let part = |rank: usize| {
                let len: usize = lens(rank).sum();
                let [from, to] = [turn, turn + 1].map(|turn| len.min(turn * len.div_ceil(turns)));
                from..to
            };
            let own = own[part(self.control.rank())].to_vec();
            let all = self.control.all_gather(batch.name(), own)?;
            for (rank, bytes) in all.iter().enumerate() {
                self.put(items, rank, part(rank), bytes)?;
            }
        }
        Ok(())
    }

    /// Writes what `rank` sent, `part` of the bytes of its pieces, to where it belongs.
    fn put(
        &self,
        items: &[GatherItem<'_, B>],
        rank: usize,
        part: Range<usize>,
        bytes: &[u8],
    ) -> Result<(), CommError> {
        let bytes = self.sent(rank, bytes, part.len())?;
        let mut start = 0;
        for item in items {
            let range = &item.ranges[rank];
            let end = start + range.len();
            let (from, to) = (start.max(part.start), end.min(part.end));
            if from < to {
                let piece = &bytes[from - part.start..to - part.start];
                self.backend
                    .write(item.dest, range.start + from - start, piece)?;
            }
            start = end;
        }
        Ok(())
    }

    /// Folds the `values` of every rank, in rank order, each turn's as they arrive.
    fn fold(
        &self,
        label: &str,
        batch: Collective<'_, B>,
        mut values: Vec<f32>,
        fold: impl Fn(f32, f32) -> f32,
    ) -> Result<Vec<f32>, CommError> {
        self.agree(label, batch)?;
        let of_turn = self.most_at_once / 4 / self.control.members().len();
        for values in values.chunks_mut(of_turn.max(1)) {
            let own = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            let all = self.control.all_gather(batch.name(), own)?;
            for (rank, bytes) in all.iter().enumerate() {
                let (words, _) = self.sent(rank, bytes, 4 * values.len())?.as_chunks::<4>();
                for (value, &word) in values.iter_mut().zip(words) {
                    let theirs = f32::from_le_bytes(word);
                    *value = match rank {
                        0 => theirs,
                        _ => fold(*value, theirs),
                    };
                }
            }
        }
        Ok(values)
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
            let elements = spanned(item.ranges);
            own.resize(start + elements.len(), 0.0);
            let grad = &mut own[start..];
            item.grad.read(&self.backend, elements.start, grad)?;
            grad.iter_mut().for_each(|x| *x = wire.apply(*x));
            let range = &item.ranges[self.control.rank()];
            places.push(match range.is_empty() {
                true => start..start,
                false => start + range.start - elements.start..start + range.end - elements.start,
            });
        }
        let sums = self.fold(
            label,
            Collective::ReduceScatter(items, wire),
            own,
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

    /// What `rank` sent, if it is `len` bytes.
    fn sent<'a>(&self, rank: usize, bytes: &'a [u8], len: usize) -> Result<&'a [u8], CommError> {
        match bytes.len() == len {
            true => Ok(bytes),
            false => Err(CommError::Failed {
                rank: self.control.members()[rank],
                message: format!("it sent {} bytes where {len} belong", bytes.len()),
            }),
        }
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
                    let folded = self.fold(label, batch, self.read(values)?, f32::max)?;
                    Ok(self.backend.write(values, 0, &folded)?)
                }
                Collective::Sum(buffers) => {
                    let mut own = Vec::new();
                    for values in buffers {
                        own.extend(self.read(values)?);
                    }
                    let mut rest = &*self.fold(label, batch, own, |a, b| a + b)?;
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
        Ok(Arc::new(Self::with_most(
            control,
            &self.backend,
            self.most_at_once,
        )))
    }

    fn count(&self, sent: Traffic) {
        self.counters.repeat(sent);
    }

    fn traffic(&self) -> Traffic {
        self.counters.traffic()
    }
}
