//! A communicator that counts what would move: rank of a group whose other ranks do the same, and are not there.

use std::sync::{Arc, Mutex};

use lowp_comm::{
    Collective, CommError, Communicator, Control, Counters, GatherItem, Traffic, even, is_large,
};
use lowp_kernels::Cpu;

/// What NCCL would do for all-gathers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Batches of large pieces, and of small ones.
    pub(crate) exchanges: usize,
    /// All-gathers, or broadcasts of each rank's piece where pieces differ in length.
    pub(crate) operations: usize,
    /// Bytes of this rank's pieces.
    pub(crate) sent: usize,
}

impl Counts {
    fn add(&mut self, rank: usize, items: &[GatherItem<'_, Cpu>]) {
        let large = items.iter().filter(|item| is_large(item.ranges)).count();
        self.exchanges += usize::from(large > 0) + usize::from(large < items.len());
        for item in items {
            let pieces = item.ranges.iter().filter(|range| !range.is_empty());
            self.operations += even(item.ranges).map_or(pieces.count(), |_| 1);
            self.sent += item.ranges[rank].len();
        }
    }
}

/// One rank of a group whose other ranks do the same.
#[derive(Debug)]
pub(crate) struct CountingComm {
    rank: usize,
    members: Vec<usize>,
    counts: Mutex<Counts>,
    counters: Counters,
}

impl CountingComm {
    pub(crate) fn new(rank: usize, world: usize) -> Arc<Self> {
        Arc::new(Self {
            rank,
            members: (0..world).collect(),
            counts: Mutex::default(),
            counters: Counters::default(),
        })
    }

    pub(crate) fn take(&self) -> Counts {
        std::mem::take(&mut *self.counts.lock().expect("counts"))
    }
}

impl Control for CountingComm {
    fn rank(&self) -> usize {
        self.rank
    }

    fn members(&self) -> &[usize] {
        &self.members
    }

    fn all_gather(&self, _tag: &str, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
        Ok(vec![bytes; self.members.len()])
    }

    fn split(&self, _color: usize, key: usize) -> Result<Arc<dyn Control>, CommError> {
        Ok(Self::new(key, self.members.len()))
    }

    fn fail(&self, cause: CommError) -> CommError {
        cause
    }

    fn failure(&self) -> Option<CommError> {
        None
    }
}

impl Communicator<Cpu> for CountingComm {
    fn control(&self) -> &dyn Control {
        self
    }

    fn backend(&self) -> &Cpu {
        &Cpu
    }

    fn is_enqueued(&self) -> bool {
        true
    }

    fn enqueue(&self, _label: &str, batch: Collective<'_, Cpu>) -> Result<(), CommError> {
        batch.check(&Cpu, self.rank, self.members.len())?;
        if let Collective::AllGather(items) = batch {
            let mut counts = self.counts.lock().expect("counts");
            counts.add(self.rank, items);
        }
        self.counters.add(&Cpu, self.rank, batch);
        Ok(())
    }

    fn split(&self, _color: usize, key: usize) -> Result<Arc<dyn Communicator<Cpu>>, CommError> {
        Ok(Self::new(key, self.members.len()))
    }

    fn count(&self, sent: Traffic) {
        self.counters.repeat(sent);
    }

    fn traffic(&self) -> Traffic {
        self.counters.traffic()
    }
}
