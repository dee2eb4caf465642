//! A communicator that notes what passes through it.

use std::mem::take;
use std::sync::{Arc, Mutex, PoisonError};

use lowp_comm::{Collective, CommError, Communicator, Control, Direction, Traffic};
use lowp_kernels::{Backend, Cpu};

/// One collective call of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// The bytes of this rank's piece of every item.
    AllGather(Vec<Vec<u8>>),
    /// Number of items.
    ReduceScatter(usize),
    /// Number of items, and where they go.
    Owned(usize, Direction),
    /// Number of entries.
    AllReduceMax(usize),
    /// Number of entries.
    AllReduceSum(usize),
    /// The ranks tell each other something on the host.
    HostGather(String),
    /// A split.
    Split,
}

/// The calls of a rank, in their order.
type Calls = Arc<Mutex<Vec<Call>>>;

fn note(calls: &Calls, call: Call) {
    let mut calls = calls.lock().unwrap_or_else(PoisonError::into_inner);
    calls.push(call);
}

/// A communicator that notes every call and passes it on to another one.
#[derive(Debug)]
pub struct Spy {
    inner: Arc<dyn Communicator<Cpu>>,
    control: SpyControl,
}

/// Its control.
#[derive(Debug)]
struct SpyControl {
    inner: Arc<dyn Communicator<Cpu>>,
    calls: Calls,
}

impl Spy {
    /// A spy on `inner`.
    pub fn new(inner: Arc<dyn Communicator<Cpu>>) -> Arc<Self> {
        let control = SpyControl {
            inner: Arc::clone(&inner),
            calls: Arc::default(),
        };
        Arc::new(Self { inner, control })
    }

    /// The calls since the last time.
    pub fn take(&self) -> Vec<Call> {
        let calls = &self.control.calls;
        take(&mut calls.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn note(&self, call: Call) {
        note(&self.control.calls, call);
    }
}

impl Control for SpyControl {
    fn rank(&self) -> usize {
        self.inner.control().rank()
    }

    fn members(&self) -> &[usize] {
        self.inner.control().members()
    }

    fn all_gather(&self, tag: &str, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
        note(&self.calls, Call::HostGather(tag.to_owned()));
        self.inner.control().all_gather(tag, bytes)
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Control>, CommError> {
        note(&self.calls, Call::Split);
        self.inner.control().split(color, key)
    }

    fn fail(&self, cause: CommError) -> CommError {
        self.inner.control().fail(cause)
    }

    fn failure(&self) -> Option<CommError> {
        self.inner.control().failure()
    }
}

impl Communicator<Cpu> for Spy {
    fn control(&self) -> &dyn Control {
        &self.control
    }

    fn backend(&self) -> &Cpu {
        self.inner.backend()
    }

    fn is_enqueued(&self) -> bool {
        self.inner.is_enqueued()
    }

    fn enqueue(&self, label: &str, batch: Collective<'_, Cpu>) -> Result<(), CommError> {
        self.note(match batch {
            Collective::AllGather(items) => {
                let pieces = items.iter().map(|item| Cpu.download(item.source));
                Call::AllGather(pieces.collect::<Result<_, _>>()?)
            }
            Collective::ReduceScatter(items, _) => Call::ReduceScatter(items.len()),
            Collective::Owned(items, direction) => Call::Owned(items.len(), direction),
            Collective::Max(values) => Call::AllReduceMax(values.len()),
            Collective::Sum(values) => Call::AllReduceSum(values.len()),
        });
        self.inner.enqueue(label, batch)
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator<Cpu>>, CommError> {
        self.note(Call::Split);
        self.inner.split(color, key)
    }

    fn count(&self, sent: Traffic) {
        self.inner.count(sent);
    }

    fn traffic(&self) -> Traffic {
        self.inner.traffic()
    }
}
