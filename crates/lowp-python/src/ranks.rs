//! [`Ranks`]: the ranks of a process group of `torch.distributed`, as lowp's crates see them.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use lowp_comm::{
    Collective, CommError, Communicator, Control, Counters, Direction, GatherItem, HostComm,
    LocalComm, OwnedItem, Traffic,
};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::place::Place;

/// What ranks tell each other, by a Python object with `rank`, `world`, `exchange(tag, bytes) -> list[bytes]` and `fail(message)`, which
/// waits for nobody.
///
/// A rank that fails says so in the next round, so every rank that comes to it gets its message. Who waits in a
/// collective of the device, and not in a round, has the time limit of the process group.
pub(crate) struct Ranks {
    object: Py<PyAny>,
    rank: usize,
    members: Vec<usize>,
    failure: Mutex<Option<CommError>>,
}

impl std::fmt::Debug for Ranks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ranks({} of {})", self.rank, self.members.len())
    }
}

impl Ranks {
    pub(crate) fn new(object: Py<PyAny>) -> PyResult<Self> {
        let (rank, world): (usize, usize) = Python::attach(|py| {
            let object = object.bind(py);
            Ok::<_, PyErr>((
                object.getattr("rank")?.extract()?,
                object.getattr("world")?.extract()?,
            ))
        })?;
        Ok(Self {
            object,
            rank,
            members: (0..world).collect(),
            failure: Mutex::new(None),
        })
    }

    /// What the error of a call of the object means: the failure of a rank that gave its cause, ranks that are at different calls, or
    /// an error of `torch.distributed` here.
    fn heard(&self, py: Python<'_>, op: &str, error: &PyErr) -> CommError {
        let value = error.value(py);
        let named = |name| value.getattr(name).ok().filter(|found| !found.is_none());
        if let Some(Ok((rank, message))) = named("failed").map(|found| found.extract()) {
            return CommError::Failed { rank, message };
        }
        if let Some(Ok(calls)) = named("calls").map(|found| found.extract::<Vec<String>>()) {
            let call = |(rank, call)| format!("rank {rank} is at {call}");
            let descriptions = calls.iter().enumerate().map(call).collect();
            let what = "the next call".to_owned();
            return CommError::Mismatch { what, descriptions };
        }
        CommError::Transport {
            op: op.into(),
            rank: self.rank,
            why: error.to_string(),
        }
    }

    fn set(&self, cause: CommError) -> CommError {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.get_or_insert(cause).clone()
    }
}

impl Control for Ranks {
    fn rank(&self) -> usize {
        self.rank
    }

    fn members(&self) -> &[usize] {
        &self.members
    }

    fn all_gather(&self, tag: &str, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
        self.failure().map_or(Ok(()), Err)?;
        Python::attach(|py| {
            let bytes = PyBytes::new(py, &bytes);
            let answer = self.object.call_method1(py, "exchange", (tag, bytes));
            let all = answer.and_then(|answer| answer.extract::<Vec<Vec<u8>>>(py));
            all.map_err(|error| self.set(self.heard(py, tag, &error)))
        })
    }

    fn split(&self, _color: usize, _key: usize) -> Result<Arc<dyn Control>, CommError> {
        let message =
            "a process group of PyTorch cannot be split here; give the groups of a device mesh";
        Err(CommError::Failed {
            rank: self.rank,
            message: message.to_owned(),
        })
    }

    fn fail(&self, cause: CommError) -> CommError {
        if let Some(known) = self.failure() {
            return known;
        }
        let cause = self.set(cause);
        let message = match &cause {
            // Every rank finds that in the same round.
            CommError::Mismatch { .. } => return cause,
            CommError::Failed { message, .. } => message.clone(),
            other => other.to_string(),
        };
        if self.members.len() > 1 {
            // If it fails, too, the time limit of the process group ends the others.
            let sent =
                Python::attach(|py| self.object.call_method1(py, "fail", (message,)).map(drop));
            drop(sent);
        }
        cause
    }

    fn failure(&self) -> Option<CommError> {
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.clone()
    }
}

/// Data between the ranks: by PyTorch's collectives on the device where the object has them, by the host elsewhere.
#[derive(Debug)]
pub(crate) struct TorchComm<B: Place> {
    host: HostComm<B>,
    ranks: Arc<Ranks>,
    on_device: bool,
    counters: Counters,
}

/// The communicator of `ranks`, a Python object; without one, of this rank alone.
pub(crate) fn communicator<B: Place>(
    backend: &B,
    ranks: Option<Py<PyAny>>,
) -> PyResult<Arc<dyn Communicator<B>>> {
    let Some(object) = ranks else {
        return Ok(LocalComm::solo(backend).into());
    };
    let on_device = Python::attach(|py| object.getattr(py, "on_device")?.extract::<bool>(py))?;
    let ranks = Arc::new(Ranks::new(object)?);
    let control: Arc<dyn Control> = Arc::clone(&ranks) as _;
    Ok(Arc::new(TorchComm {
        host: HostComm::new(control, backend),
        ranks,
        on_device,
        counters: Counters::default(),
    }))
}

impl<B: Place> TorchComm<B> {
    /// Calls a collective of PyTorch on the backend's stream. An error whose cause no other rank gave is of this rank, until
    /// [`Control::fail`] tells the others.
    fn call<'py, A>(&self, method: &str, spans: A) -> Result<(), CommError>
    where
        A: for<'a> IntoPyObject<'a>,
    {
        let stream = self.host.backend().raw_stream()?;
        Python::attach(|py| {
            let done = self.ranks.object.call_method1(py, method, (spans, stream));
            done.map(drop)
                .map_err(|error| match self.ranks.heard(py, method, &error) {
                    heard @ CommError::Failed { .. } => self.ranks.set(heard),
                    own => own,
                })
        })
    }
}

impl<B: Place> TorchComm<B> {
    /// One call with what this rank sends and receives, in the order in which the senders send; a rank that has nothing to move calls, too.
    fn move_owned(
        &self,
        items: &[OwnedItem<'_, B>],
        direction: Direction,
    ) -> Result<(), CommError> {
        let (backend, rank) = (self.host.backend(), self.ranks.rank);
        let mut own = items.iter().filter(|item| item.owner == rank);
        own.try_for_each(|item| item.copy_own(backend, direction))?;
        let mut moves = Vec::new();
        for sender in 0..self.ranks.members.len() {
            for piece in direction.sent(items, sender) {
                let ends = direction.ends(items, piece);
                if ends.contains(&rank) {
                    let memory = items[piece.item].place(backend, rank, piece.of)?;
                    moves.push((place(&backend.span(&memory)), ends));
                }
            }
        }
        self.call("move", moves)
    }
}

/// Where memory lies, as Python takes it: address and bytes.
fn place(span: &Range<usize>) -> (usize, usize) {
    (span.start, span.len())
}

impl<B: Place> Communicator<B> for TorchComm<B> {
    fn control(&self) -> &dyn Control {
        &*self.ranks
    }

    fn backend(&self) -> &B {
        self.host.backend()
    }

    fn is_enqueued(&self) -> bool {
        self.on_device
    }

    fn enqueue(&self, label: &str, batch: Collective<'_, B>) -> Result<(), CommError> {
        let backend = self.host.backend();
        if !self.on_device {
            return self.host.enqueue(label, batch);
        }
        batch.check(backend, self.ranks.rank, self.ranks.members.len())?;
        match batch {
            Collective::AllGather(items) => {
                let dests = |item: &GatherItem<'_, B>| {
                    let start = backend.span(item.dest).start;
                    let of = |range: &Range<usize>| (start + range.start, range.len());
                    item.ranges.iter().map(of).collect::<Vec<_>>()
                };
                let spans = items
                    .iter()
                    .map(|item| (place(&backend.span(item.source)), dests(item)));
                self.call("all_gather", spans.collect::<Vec<_>>())?;
            }
            Collective::Max(values) => {
                let span = backend.span(values);
                if !span.is_empty() {
                    self.call("maximum", place(&span))?;
                }
            }
            Collective::Owned(items, direction) => self.move_owned(items, direction)?,
            Collective::ReduceScatter(..) | Collective::Sum(_) => {
                return Err(CommError::Transport {
                    op: batch.name().into(),
                    rank: self.ranks.rank,
                    why: "process groups of PyTorch sum no gradients of lowp on GPUs; leave sums of gradients to FSDP2".to_owned(),
                });
            }
        }
        self.counters.add(backend, self.ranks.rank, batch);
        Ok(())
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator<B>>, CommError> {
        self.host.split(color, key)
    }

    fn count(&self, sent: Traffic) {
        self.counters.repeat(sent);
    }

    fn traffic(&self) -> Traffic {
        let (own, host) = (self.counters.traffic(), self.host.traffic());
        Traffic {
            all_gather_bytes: own.all_gather_bytes + host.all_gather_bytes,
            reduce_scatter_bytes: own.reduce_scatter_bytes + host.reduce_scatter_bytes,
            passed_on_bytes: own.passed_on_bytes + host.passed_on_bytes,
            owned_bytes: own.owned_bytes + host.owned_bytes,
            all_reduce_bytes: own.all_reduce_bytes + host.all_reduce_bytes,
            calls: own.calls + host.calls,
        }
    }
}
