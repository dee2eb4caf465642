//! [`HostComm`]: data by way of the host, for ranks that are processes without a common device.

use std::ops::Range;
use std::sync::Arc;

use half::bf16;
use lowp_kernels::{Backend, Element};

use super::{
    Collective, Communicator, Counters, Direction, GatherItem, GradWire, OwnedItem, OwnedPiece,
    ReduceItem, Traffic, spanned,
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
        let of = |rank: usize| {
            let ranges = items.iter().map(|item| item.ranges[rank].len());
            ranges.collect()
        };
        self.give(batch.name(), &own, 1, of, |rank, item, start, bytes| {
            let GatherItem { dest, ranges, .. } = items[item];
            Ok(self
                .backend
                .write(dest, ranges[rank].start + start, bytes)?)
        })
    }

    fn move_owned(
        &self,
        label: &str,
        items: &[OwnedItem<'_, B>],
        direction: Direction,
    ) -> Result<(), CommError> {
        const BYTES: usize = size_of::<bf16>();
        let batch = Collective::Owned(items, direction);
        self.agree(label, batch)?;
        let own = self.control.rank();
        let mut bytes = Vec::new();
        for OwnedPiece { item, of } in direction.sent(items, own) {
            let place = items[item].place(&self.backend, own, of)?;
            let all = 0..self.backend.len::<bf16>(&place);
            bytes.extend(self.backend.start_read_bytes(&place, all)?.wait()?);
        }
        let all = 0..self.control.members().len();
        let sent: Vec<_> = all.map(|rank| direction.sent(items, rank)).collect();
        let of = |rank: usize| {
            let lens = sent[rank]
                .iter()
                .map(|piece| BYTES * items[piece.item].ranges[piece.of].len());
            lens.collect()
        };
        self.give(
            batch.name(),
            &bytes,
            BYTES,
            of,
            |rank, number, start, bytes| {
                let piece = sent[rank][number];
                if rank == own || direction.ends(items, piece)[1] != own {
                    return Ok(());
                }
                let place = items[piece.item].place(&self.backend, own, piece.of)?;
                let words = bytes.as_chunks::<BYTES>().0.iter();
                let values: Vec<bf16> = words.map(|&word| bf16::from_le_bytes(word)).collect();
                Ok(self.backend.write(&place, start / BYTES, &values)?)
            },
        )?;
        let owned = items.iter().filter(|item| item.owner == own);
        owned
            .clone()
            .try_for_each(|item| item.copy_own(&self.backend, direction))
    }

    /// Gives the bytes of every rank to all: `own` are this rank's, and `of` returns the lengths of a rank's parts, multiples of `unit`. `put`
    /// takes what a rank sent of one of its parts: rank, part, the byte of the part that it begins at, and the bytes. What
    /// travels at once begins at a multiple of `unit`.
    fn give(
        &self,
        name: &'static str,
        own: &[u8],
        unit: usize,
        of: impl Fn(usize) -> Vec<usize>,
        put: impl Fn(usize, usize, usize, &[u8]) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let world = self.control.members().len();
        let parts: Vec<Vec<usize>> = (0..world).map(of).collect();
        let lens: Vec<usize> = parts.iter().map(|parts| parts.iter().sum()).collect();
        let total: usize = lens.iter().sum();
        // So many turns, as what a rank gives at once may be a unit longer than the quotient.
        let most = self.most_at_once.saturating_sub(world * unit).max(1);
        let turns = total.div_ceil(most).max(1);
        for turn in 0..turns {
            let given = |rank: usize| {
                let len = lens[rank];
                let each = len.div_ceil(turns).next_multiple_of(unit);
                let [from, to] = [turn, turn + 1].map(|turn| len.min(turn * each));
                from..to
            };
            let own = own[given(self.control.rank())].to_vec();
            let all = self.control.all_gather(name, own)?;
            for (rank, bytes) in all.iter().enumerate() {
                let given = given(rank);
                let bytes = self.sent(rank, bytes, given.len())?;
                let mut start = 0;
                for (part, len) in parts[rank].iter().enumerate() {
                    let end = start + len;
                    let (from, to) = (start.max(given.start), end.min(given.end));
                    if from < to {
                        let bytes = &bytes[from - given.start..to - given.start];
                        put(rank, part, from - start, bytes)?;
                    }
                    start = end;
                }
            }
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
                Collective::Owned(items, direction) => self.move_owned(label, items, direction),
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
