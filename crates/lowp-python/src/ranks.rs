//! [`Ranks`]: the ranks of a process group of `torch.distributed`, as lowp's crates see them.

use std::sync::{Arc, Mutex, PoisonError};

use lowp_shard::{
    Collective, Communicator, Control, Counters, HostComm, LocalComm, ShardError, Traffic,
};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::place::Place;

/// What ranks tell each other, by a Python object with `rank`, `world` and `exchange(tag, bytes) -> list[bytes]`.
///
/// A rank that fails says so in the round in which the others wait for it, so every rank gets its message. Who waits in a
/// collective of the device, and not in a round, has the time limit of the process group.
pub(crate) struct Ranks {
    object: Py<PyAny>,
    rank: usize,
    members: Vec<usize>,
    failure: Mutex<Option<ShardError>>,
}

impl std::fmt::Debug for Ranks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ranks({} of {})", self.rank, self.members.len())
    }
}

const WELL: u8 = 0;
const FAILED: u8 = 1;

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

    fn round(&self, tag: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>, ShardError> {
        let all = Python::attach(|py| {
            let bytes = PyBytes::new(py, bytes);
            let answer = self.object.call_method1(py, "exchange", (tag, bytes))?;
            answer.extract::<Vec<Vec<u8>>>(py)
        });
        all.map_err(|error| ShardError::Failed {
            rank: self.rank,
            message: format!("torch.distributed, {tag}: {error}"),
        })
    }

    fn set(&self, cause: ShardError) -> ShardError {
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

    fn exchange(&self, tag: &str, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, ShardError> {
        self.failure().map_or(Ok(()), Err)?;
        let mut own = vec![WELL];
        own.extend(bytes);
        let mut all = self.round(tag, &own).map_err(|error| self.set(error))?;
        for (rank, bytes) in all.iter_mut().enumerate() {
            match bytes.first() {
                Some(&WELL) => drop(bytes.drain(..1)),
                _ => {
                    let message = bytes.get(1..).unwrap_or_default();
                    let message = String::from_utf8_lossy(message).into_owned();
                    return Err(self.set(ShardError::Failed { rank, message }));
                }
            }
        }
        Ok(all)
    }

    fn split(&self, _color: usize, _key: usize) -> Result<Arc<dyn Control>, ShardError> {
        let message =
            "a process group of PyTorch cannot be split here; give the groups of a device mesh";
        Err(ShardError::Failed {
            rank: self.rank,
            message: message.to_owned(),
        })
    }

    fn fail(&self, cause: ShardError) -> ShardError {
        if let Some(known) = self.failure() {
            return known;
        }
        // The others wait in the next round, or have found the same and come to it.
        let cause = self.set(cause);
        if self.members.len() > 1 {
            let mut own = vec![FAILED];
            own.extend(cause.to_string().into_bytes());
            // If it fails, too, the time limit of the process group ends the others.
            drop(self.round("failure", &own));
        }
        cause
    }

    fn failure(&self) -> Option<ShardError> {
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
    /// Calls a collective of PyTorch on the backend's stream. Its error is of this rank until [`Control::fail`] tells the others.
    fn call(&self, method: &str, spans: &[std::ops::Range<usize>]) -> Result<(), ShardError> {
        let args: Vec<(usize, usize)> = spans.iter().map(|s| (s.start, s.len())).collect();
        let stream = self.host.backend().raw_stream()?;
        let done = Python::attach(|py| self.ranks.object.call_method1(py, method, (args, stream)));
        done.map(drop).map_err(|error| ShardError::Failed {
            rank: self.ranks.rank,
            message: format!("torch.distributed, {method}: {error}"),
        })
    }
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

    fn enqueue(&self, label: &str, batch: Collective<'_, B>) -> Result<(), ShardError> {
        let backend = self.host.backend();
        match batch {
            Collective::AllGather([item]) if self.on_device && even(item.ranges) => {
                let spans = [backend.span(item.source), backend.span(item.dest)];
                self.call("all_gather", &spans)?;
            }
            Collective::Max(values) if self.on_device => {
                let span = backend.span(values);
                if !span.is_empty() {
                    self.call("maximum", &[span])?;
                }
            }
            other => return self.host.enqueue(label, other),
        }
        self.counters.add(backend, self.ranks.rank, batch);
        Ok(())
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator<B>>, ShardError> {
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
            all_reduce_bytes: own.all_reduce_bytes + host.all_reduce_bytes,
            calls: own.calls + host.calls,
        }
    }
}

/// Whether the ranges follow each other and are of one length, as an all-gather of PyTorch has them.
fn even(ranges: &[std::ops::Range<usize>]) -> bool {
    let len = ranges.first().map_or(0, ExactSizeIterator::len);
    let place =
        |(rank, range): (usize, &std::ops::Range<usize>)| *range == (rank * len..(rank + 1) * len);
    len > 0 && ranges.iter().enumerate().all(place)
}
