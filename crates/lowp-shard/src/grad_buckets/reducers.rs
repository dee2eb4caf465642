//! [`Reducers`]: the communicators that reduce buckets. One adds up its bucket while another moves the next one.

use std::sync::Arc;

use lowp_comm::{Collective, CommError, Communicator, Started};
use lowp_kernels::Backend;

/// How many communicators reduce buckets, each on a stream of its own, where ranks do not wait for each other on the host: bucket `n` is reduced by number
/// `n % GRAD_REDUCERS`, so each stages its own buckets alone.
pub const GRAD_REDUCERS: usize = 2;

/// Communicators of the same ranks.
#[derive(Debug)]
pub(super) struct Reducers<B: Backend> {
    all: Vec<Reducer<B>>,
}

#[derive(Debug)]
struct Reducer<B: Backend> {
    comm: Arc<dyn Communicator<B>>,
    /// The last bucket that was sent and is not followed.
    last: Option<Started<B>>,
}

impl<B: Backend> Reducers<B> {
    /// Of the ranks of `comm`, which reduces all buckets itself where others gain nothing. Collective.
    pub(super) fn new(comm: &Arc<dyn Communicator<B>>) -> Result<Self, CommError> {
        let mut comms = Vec::new();
        for _ in 0..GRAD_REDUCERS {
            comms.extend(comm.beside()?);
        }
        if comms.len() < GRAD_REDUCERS {
            comms = vec![Arc::clone(comm)];
        }
        let all = comms.into_iter().map(|comm| Reducer { comm, last: None });
        Ok(Self { all: all.collect() })
    }

    fn of(&self, bucket: usize) -> usize {
        bucket % self.all.len()
    }

    /// Starts the reduction of `bucket`, as work that follows the point `after`.
    pub(super) fn start(
        &mut self,
        bucket: usize,
        after: &B::Event,
        batch: Collective<'_, B>,
    ) -> Result<Started<B>, CommError> {
        let reducer = self.of(bucket);
        let Reducer { comm, last } = &mut self.all[reducer];
        let started = comm.start(after, &format!("bucket {bucket}"), batch)?;
        *last = Some(started.clone());
        Ok(started)
    }

    /// The point after the reductions that the communicator of `bucket` was given so far.
    pub(super) fn record(&self, bucket: usize) -> Result<B::Event, CommError> {
        Ok(self.all[self.of(bucket)].comm.backend().record()?)
    }

    /// Has later work of `stream` follow all buckets that were sent. Whether there were any.
    pub(super) fn follow(&mut self, stream: &B) -> Result<bool, CommError> {
        let mut any = false;
        for Reducer { last, .. } in &mut self.all {
            if let Some(started) = last {
                started.wait(stream)?;
                *last = None;
                any = true;
            }
        }
        Ok(any)
    }

    /// Has later work of `stream` follow everything, also a bucket that was sent in part.
    pub(super) fn follow_failed(&self, stream: &B) -> Result<(), CommError> {
        let mut all = self.all.iter();
        all.try_for_each(|reducer| Ok(stream.wait_for(reducer.comm.backend())?))
    }
}
