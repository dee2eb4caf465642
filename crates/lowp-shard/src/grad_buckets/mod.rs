//! [`GradBuckets`]: full gradients on their way to the ranks that own their elements, while backward goes on.

use std::ops::Range;
use std::sync::Arc;

use lowp_kernels::{Backend, FloatDtype, Source};

use crate::ShardError;
use lowp_comm::{
    CallLog, CallNames, CallOrder, Collective, CommError, CompareAmong, GradWire, MeshComm,
    Started, or_abort,
};

mod param;
mod slabs;

pub use param::GradParam;
use param::{Param, State, describe};
pub use slabs::grad_slabs;
use slabs::{Slab, Slabs};

/// How gradients gather and travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GradBucketOptions {
    /// Gradients of at most this many bytes go together; a larger one goes by itself. Fewer, larger buckets use links
    /// better (between two H200, f32 in buckets of 32, 128 and 1024 MiB: 0.68, 0.78 and 0.94 of the speed of one reduce-scatter);
    /// smaller ones start earlier and take less memory. 128 MiB.
    pub bytes: usize,
    /// Storage of full gradients. bf16 gradients travel as they are.
    pub dtype: FloatDtype,
    /// The dtype in which f32 gradients travel.
    pub wire: GradWire,
}

impl Default for GradBucketOptions {
    fn default() -> Self {
        Self {
            bytes: 128 << 20,
            dtype: FloatDtype::F32,
            wire: GradWire::F32,
        }
    }
}

/// The buckets of gradients of `lens` elements, as ranges of the list: those that follow each other go together up to `most` elements.
pub fn grad_bucket_ranges(lens: &[usize], most: usize) -> Vec<Range<usize>> {
    let mut buckets: Vec<Range<usize>> = Vec::new();
    let mut filled = 0;
    for (at, &len) in lens.iter().enumerate() {
        match buckets.last_mut() {
            Some(last) if filled + len <= most => {
                last.end = at + 1;
                filled += len;
            }
            _ => {
                buckets.push(at..at + 1);
                filled = len;
            }
        }
    }
    buckets
}

/// Full gradients of a rank, in buckets. A bucket is reduced and scattered over the shard group as soon as backward has given
/// it all gradients, on the communicator's stream, after the work that wrote them and beside the work that follows.
///
/// For each gradient: take memory for it ([`GradBuckets::grad`]), have the stream write it, and [`GradBuckets::push`] it.
/// When a micro-batch ends, [`GradBuckets::flush`] sends what did not fill its bucket, and when a step ends
/// [`GradBuckets::finish`] adds the replicas and orders the sums before the stream's later work. Gradients of
/// micro-batches are added. All ranks push the same parameters in the same order.
///
/// Parameters that follow each other in the list share buckets, so list them in the order of backward. Two buckets have
/// memory at a time, unless more are written at once; a third one waits, on the device, for the first. Where ranks wait for
/// each other on the host there is one.
///
/// A graph can capture a step, and repeats it: from its first gradient to [`GradBuckets::finish`] or
/// [`GradBuckets::discard`], as no other work can follow what is sent within a capture.
#[derive(Debug)]
pub struct GradBuckets<B: Backend> {
    backend: B,
    mesh: MeshComm<B>,
    wire: GradWire,
    params: Vec<Param<B>>,
    buckets: Vec<Bucket<B>>,
    slabs: Slabs<B>,
    last: Option<Started<B>>,
    /// Why a bucket was not sent: it may have been added in part.
    failed: Option<ShardError>,
    /// The parameters that were sent in this step, bucket after bucket.
    order: CallOrder,
    /// Of all parameters.
    names: Arc<[String]>,
    /// Steps that ended.
    steps: u64,
}

/// Steps whose end compares them where ranks do not meet on the host: what a program does differently on its ranks it mostly does
/// from the first one on. Later ones are compared by the optimizer ([`Reduced::done`]).
const COMPARED: u64 = 2;

/// Behind the parameters of a bucket in [`GradBuckets::order`]: ranks send the same buckets, and not only the same gradients.
const SENT: u64 = u64::MAX;

/// The gradients of a step.
#[derive(Clone, Debug)]
pub struct Reduced {
    /// Contributions that arrived, by parameter.
    pub contributions: Vec<usize>,
    /// What was sent, for `AdamW::compare` of lowp-optim: no step is applied whose ranks sent different gradients.
    pub done: CallLog,
}

#[derive(Debug)]
struct Bucket<B: Backend> {
    params: Range<usize>,
    len: usize,
    /// Parameters whose gradient waits in it.
    pushed: usize,
    slab: Option<Slab<B>>,
}

impl<B: Backend> GradBuckets<B> {
    /// Plans the buckets of `params`, whose gradients work of `backend` writes. Collective over all ranks of the mesh.
    ///
    /// # Errors
    /// Ranges for another number of ranks or that do not tile the gradient, sums of another length than this rank's range, or
    /// ranks that planned differently.
    pub fn new(
        backend: &B,
        mesh: &MeshComm<B>,
        params: Vec<GradParam<B>>,
        options: GradBucketOptions,
    ) -> Result<Self, ShardError> {
        let shard = &*mesh.shard;
        let (rank, world) = (shard.rank(), shard.world_size());
        let checked = params
            .iter()
            .try_for_each(|p| p.check(backend, rank, world));
        // Replicas add sums by their place in the list.
        let everyone = &*mesh.world;
        or_abort(everyone, checked)?;
        everyone
            .control()
            .all_equal("the gradient buckets", &describe(&params, options))?;
        let most = options.bytes / options.dtype.bytes();
        let lens: Vec<usize> = params.iter().map(GradParam::len).collect();
        let buckets = grad_bucket_ranges(&lens, most)
            .into_iter()
            .map(|params| Bucket {
                len: lens[params.clone()].iter().sum(),
                params,
                pushed: 0,
                slab: None,
            });
        let buckets: Vec<Bucket<B>> = buckets.collect();
        let mut params = params.into_iter();
        let mut planned = Vec::with_capacity(lens.len());
        for (number, bucket) in buckets.iter().enumerate() {
            let mut end = 0;
            for given in params.by_ref().take(bucket.params.len()) {
                let start = end;
                end += given.len();
                planned.push(Param {
                    given,
                    bucket: number,
                    place: start..end,
                    state: State::Idle,
                    grad: None,
                    arrived: 0,
                });
            }
        }
        let names = planned.iter().map(|param| param.given.name.clone());
        let names: Arc<[String]> = names.collect();
        let lens: Vec<usize> = buckets.iter().map(|bucket| bucket.len).collect();
        let at_once = if shard.is_enqueued() { 2 } else { 1 };
        Ok(Self {
            slabs: Slabs::new(backend, options.dtype, (&lens, most), at_once),
            backend: backend.clone(),
            mesh: mesh.clone(),
            wire: options.wire,
            params: planned,
            buckets,
            last: None,
            failed: None,
            order: CallOrder::default(),
            names,
            steps: 0,
        })
    }

    /// Number of buckets.
    pub fn len(&self) -> usize {
        self.buckets.len()
    }

    /// Whether there are no buckets.
    pub fn is_empty(&self) -> bool {
        self.buckets.is_empty()
    }

    /// Bytes of all memory for full gradients so far.
    pub fn resident_bytes(&self) -> usize {
        self.slabs.bytes()
    }

    /// Contributions to the gradient of `param` that were sent in this step; 0 for a parameter that is not there.
    pub fn arrived(&self, param: usize) -> usize {
        self.params.get(param).map_or(0, |p| p.arrived)
    }

    /// The same of all parameters.
    pub fn contributions(&self) -> Vec<usize> {
        self.params.iter().map(|p| p.arrived).collect()
    }

    /// Memory for the full gradient of `param`, with whatever it holds: work of the stream writes it before
    /// [`GradBuckets::push`]. Where a gradient of the parameter waits in its bucket already (a layer that is used twice)
    /// the bucket is sent first.
    ///
    /// # Errors
    /// No such parameter, no room, or a failure of another rank; where the bucket is sent, memory of it that was taken for
    /// another gradient and not pushed.
    pub fn grad(&mut self, param: usize) -> Result<Source<B>, ShardError> {
        let taken = self.try_grad(param);
        or_abort(&*self.mesh.shard, taken)
    }

    fn try_grad(&mut self, param: usize) -> Result<Source<B>, ShardError> {
        let bucket = self.param(param)?.bucket;
        if self.params[param].state == State::Pushed {
            self.send(bucket)?;
        }
        if let Some(grad) = &self.params[param].grad {
            return Ok(grad.clone());
        }
        let Bucket { len, slab, .. } = &mut self.buckets[bucket];
        let slab = match slab {
            Some(slab) => slab,
            None => slab.insert(self.slabs.take(*len)?),
        };
        let param = &mut self.params[param];
        let grad = slab.values.view(&self.backend, param.place.clone())?;
        param.grad = Some(grad.clone());
        param.state = State::Taken;
        Ok(grad)
    }

    /// Says that the stream has been given the work that writes the gradient of `param`. The last one of a bucket
    /// sends it. Collective.
    ///
    /// # Errors
    /// No such parameter, no memory was taken for it, or a failure of another rank.
    pub fn push(&mut self, param: usize) -> Result<(), ShardError> {
        let pushed = self.try_push(param);
        or_abort(&*self.mesh.shard, pushed)
    }

    fn try_push(&mut self, param: usize) -> Result<(), ShardError> {
        let found = self.param(param)?;
        if found.state != State::Taken {
            return Err(ShardError::NoGradMemory {
                name: found.given.name.clone(),
            });
        }
        let bucket = found.bucket;
        self.params[param].state = State::Pushed;
        let Bucket { params, pushed, .. } = &mut self.buckets[bucket];
        *pushed += 1;
        if *pushed == params.len() {
            self.send(bucket)?;
        }
        Ok(())
    }

    /// Sends buckets that not all parameters gave a gradient: a micro-batch ends. Collective.
    ///
    /// # Errors
    /// Memory that was taken for a gradient that was not pushed, or a failure of another rank. A world of one rank may go on
    /// after a failure of its device, behind [`GradBuckets::discard`].
    pub fn flush(&mut self) -> Result<(), ShardError> {
        let flushed = (0..self.buckets.len()).try_for_each(|bucket| self.send(bucket));
        or_abort(&*self.mesh.shard, flushed)
    }

    /// Sends what was pushed of a bucket. Once that has failed nothing is sent until the step is discarded.
    fn send(&mut self, bucket: usize) -> Result<(), ShardError> {
        self.failed.clone().map_or(Ok(()), Err)?;
        let Bucket {
            params,
            pushed,
            slab,
            ..
        } = &mut self.buckets[bucket];
        let first = params.start;
        let params = &mut self.params[params.clone()];
        if let Some(open) = params.iter().find(|p| p.state == State::Taken) {
            return Err(ShardError::GradNotPushed {
                name: open.given.name.clone(),
            });
        }
        if slab.is_none() {
            return Ok(());
        }
        let items: Vec<_> = params.iter().filter_map(Param::item).collect();
        let batch = Collective::ReduceScatter(&items, self.wire);
        let after = self.backend.record().map_err(CommError::from);
        let label = format!("bucket {bucket}");
        let started = after.and_then(|after| self.mesh.shard.start(&after, &label, batch));
        let started = started
            .map_err(ShardError::from)
            .inspect_err(|error| self.failed = Some(error.clone()))?;
        for (at, param) in params.iter_mut().enumerate() {
            if param.state == State::Pushed {
                param.arrived += 1;
                (param.state, param.grad) = (State::Idle, None);
                self.order.push((first + at) as u64);
            }
        }
        self.order.push(SENT);
        *pushed = 0;
        if let Some(slab) = slab.take() {
            self.slabs.give_back(slab, started.clone());
        }
        self.last = Some(started);
        Ok(())
    }

    /// Ends a step: sends what is left, sums over the replicas, and has later work of the stream follow. Counts from zero
    /// afterwards. Collective.
    ///
    /// # Errors
    /// As [`GradBuckets::flush`]; ranks that pushed different parameters or in another order. These are found here in every step where
    /// ranks wait for each other on the host, and in the first two elsewhere; in later ones by the optimizer's step ([`Reduced::done`]),
    /// or by the time limit where ranks sent buckets of different lengths.
    pub fn finish(&mut self) -> Result<Reduced, ShardError> {
        self.flush()?;
        let finished = self.try_finish();
        or_abort(&*self.mesh.world, finished)
    }

    fn try_finish(&mut self) -> Result<Reduced, ShardError> {
        self.follow()?;
        let done = self.compare_sent()?;
        let sums = self.params.iter().filter(|p| p.arrived > 0);
        let sums: Vec<_> = sums.map(|p| &p.given.out).collect();
        if self.mesh.mesh.replicate > 1 && !sums.is_empty() {
            let after = self.backend.record()?;
            let started = self.mesh.replicate.start(
                &after,
                "gradients of replicas",
                Collective::Sum(&sums),
            )?;
            started.wait(&self.backend)?;
        }
        let arrived = self
            .params
            .iter_mut()
            .map(|p| std::mem::take(&mut p.arrived));
        Ok(Reduced {
            contributions: arrived.collect(),
            done,
        })
    }

    /// Forgets the gradients of this step, for example after a micro-batch that failed on this rank: what is on its way
    /// arrives and does not count. Not collective, but every rank must do it at the same place.
    ///
    /// # Errors
    /// The device failed.
    pub fn discard(&mut self) -> Result<(), ShardError> {
        self.follow()?;
        for param in &mut self.params {
            (param.state, param.grad, param.arrived) = (State::Idle, None, 0);
        }
        self.order = CallOrder::default();
        for bucket in &mut self.buckets {
            bucket.pushed = 0;
            if let Some(slab) = bucket.slab.take() {
                self.slabs.give_back_unsent(slab);
            }
        }
        Ok(())
    }

    /// Compares what the ranks sent and in which order, in every step where they meet on the host anyway: gradients of one length
    /// that different ranks sent for different parameters were added.
    fn compare_sent(&mut self) -> Result<CallLog, ShardError> {
        let (world, shards) = (&*self.mesh.world, self.mesh.mesh.shard);
        let done = CallLog {
            what: "the gradients of a step",
            among: CompareAmong::World,
            order: std::mem::take(&mut self.order),
            names: CallNames::Params(Arc::clone(&self.names)),
        };
        if !world.is_enqueued() || self.steps < COMPARED {
            done.compare(world.control(), shards)?;
        }
        self.steps += 1;
        Ok(done)
    }

    /// Has later work of the stream follow all buckets that were sent: their memory is free for it.
    fn follow(&mut self) -> Result<(), ShardError> {
        if self.failed.is_some() {
            // Also one that was sent in part.
            self.backend.wait_for(self.mesh.shard.backend())?;
            self.failed = None;
        }
        if let Some(last) = &self.last {
            last.wait(&self.backend)?;
            self.last = None;
            self.slabs.followed();
        }
        Ok(())
    }

    fn param(&self, param: usize) -> Result<&Param<B>, ShardError> {
        let len = self.params.len();
        let found = self.params.get(param);
        found.ok_or(ShardError::NoSuchGrad { param, len })
    }
}
