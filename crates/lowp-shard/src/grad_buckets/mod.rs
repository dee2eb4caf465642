//! [`GradBuckets`]: full gradients on their way to the ranks that own their elements, while backward goes on.

use std::ops::Range;
use std::sync::Arc;

use lowp_kernels::{Backend, FloatDtype, Source};

use crate::ShardError;
use lowp_comm::{
    CallLog, CallNames, CallOrder, Collective, CompareAmong, GradWire, MeshComm, Started, or_abort,
};

mod kept;
mod options;
mod param;
mod reducers;
mod slabs;

use kept::{Addition, KeptGrads};
pub use options::{GradBucketOptions, Reduction};
pub use param::GradParam;
use param::{GradState, Param, describe};
pub use reducers::GRAD_REDUCERS;
use reducers::Reducers;
pub use slabs::{GradLen, GradSlabs, grad_bucket_ranges, grad_slabs};
use slabs::{Slab, Slabs};

/// Full gradients of a rank, in buckets. A bucket is reduced and scattered over the shard group as soon as backward has given
/// it all gradients, on a stream of the communicator, after the work that wrote them and beside the work that follows. Consecutive buckets have
/// different streams ([`Communicator::beside`](lowp_comm::Communicator::beside)): one is added up while the next one travels.
///
/// For each gradient: take memory for it ([`GradBuckets::grad`]), have the stream write it, and [`GradBuckets::push`] it.
/// When a micro-batch ends, [`GradBuckets::flush`] sends what did not fill its bucket, and when a step ends
/// [`GradBuckets::finish`] adds the replicas and orders the sums before the stream's later work. Gradients of
/// micro-batches are added: on the rank or after the reduction, as [`GradBuckets::begin`] says. All ranks push the same parameters in
/// the same order.
///
/// Parameters that follow each other in the list share buckets, so list them in the order of backward. Two buckets have
/// memory at a time, unless more are written at once; a third one waits, on the device, for the first. Where ranks wait for
/// each other on the host there is one.
///
/// A graph can capture a step after the first two, and repeats it: from its first gradient to [`GradBuckets::finish`] or
/// [`GradBuckets::discard`], as no other work can follow what is sent within a capture.
#[derive(Debug)]
pub struct GradBuckets<B: Backend> {
    backend: B,
    mesh: MeshComm<B>,
    wire: GradWire,
    params: Vec<Param<B>>,
    buckets: Vec<Bucket<B>>,
    slabs: Slabs<B>,
    reduction: Reduction,
    reducers: Reducers<B>,
    /// The last addition of replicas.
    last_of_replicas: Option<Started<B>>,
    /// Why a bucket was not sent: it may have been added in part.
    failed: Option<ShardError>,
    /// The parameters that were sent in this step, bucket after bucket.
    order: CallOrder,
    /// The names of all parameters.
    names: Arc<[String]>,
    /// Steps that ended.
    steps: u64,
}

impl<B: Backend> Drop for GradBuckets<B> {
    fn drop(&mut self) {
        self.mesh.forget_reductions();
    }
}

/// Steps whose end compares them where ranks do not meet on the host: what a program does differently on its ranks it mostly does
/// from the first one on. Later ones are compared by the optimizer ([`Reduced::done`]).
const COMPARED: u64 = 2;

/// Follows the parameters of a bucket in [`GradBuckets::order`]: ranks send the same buckets, and not only the same gradients.
const SENT: u64 = u64::MAX;

/// The gradients of a step.
#[derive(Clone, Debug)]
pub struct Reduced {
    /// Contributions that arrived, by parameter.
    pub contributions: Vec<usize>,
    /// What was sent, for `Optimizer::compare` of lowp-optim: no step is applied whose ranks sent different gradients.
    pub done: CallLog,
}

#[derive(Debug)]
struct Bucket<B: Backend> {
    params: Range<usize>,
    len: usize,
    /// Parameters whose gradient waits in the bucket.
    pushed: usize,
    slab: Option<Slab<B>>,
    kept: Option<KeptGrads<B>>,
    /// How often it was sent in this micro-batch.
    sends: usize,
    history: History,
    /// Whether its replicas were added in this step.
    added: bool,
}

/// How often a bucket was sent in each micro-batch of the steps so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum History {
    /// No step that ended has sent it.
    None,
    Once,
    /// More than once in some micro-batch.
    Often,
}

impl<B: Backend> Bucket<B> {
    fn new(params: Range<usize>, len: usize) -> Self {
        Self {
            params,
            len,
            pushed: 0,
            slab: None,
            kept: None,
            sends: 0,
            history: History::None,
            added: false,
        }
    }
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
        let grads = params.iter();
        let grads = grads.map(|param| GradLen::new(&param.ranges, param.block));
        let grads: Vec<GradLen> = grads.collect();
        let buckets = grad_bucket_ranges(&grads, most).into_iter();
        let buckets = buckets.map(|params| {
            let len = lens[params.clone()].iter().sum();
            Bucket::new(params, len)
        });
        let buckets: Vec<Bucket<B>> = buckets.collect();
        let mut params = params.into_iter();
        let mut planned: Vec<Param<B>> = Vec::with_capacity(lens.len());
        for (number, bucket) in buckets.iter().enumerate() {
            let mut start = 0;
            for given in params.by_ref().take(bucket.params.len()) {
                let len = given.len();
                planned.push(Param::new(given, number, start));
                start += len;
            }
        }
        let names = planned.iter().map(|param| param.given.name.clone());
        let names: Arc<[String]> = names.collect();
        let lens: Vec<usize> = buckets.iter().map(|bucket| bucket.len).collect();
        let at_once = if shard.is_enqueued() { 2 } else { 1 };
        Ok(Self {
            reduction: Reduction::default(),
            reducers: or_abort(shard, Reducers::new(&mesh.shard))?,
            last_of_replicas: None,
            slabs: Slabs::new(backend, options.dtype, &lens, most, at_once),
            backend: backend.clone(),
            mesh: mesh.clone(),
            wire: options.wire,
            params: planned,
            buckets,
            failed: None,
            order: CallOrder::default(),
            names,
            steps: 0,
        })
    }

    /// Number of buckets, each of which is reduced by one collective.
    pub fn len(&self) -> usize {
        self.buckets.len()
    }

    /// Whether there are no buckets.
    pub fn is_empty(&self) -> bool {
        self.buckets.is_empty()
    }

    /// Bytes of all memory for full gradients so far.
    pub fn resident_bytes(&self) -> usize {
        let kept = self.buckets.iter().filter_map(|b| b.kept.as_ref());
        self.slabs.bytes() + kept.map(|kept| kept.bytes(&self.backend)).sum::<usize>()
    }

    /// Says what becomes of the gradients from here on, until the step ends or is discarded: [`Reduction::Scatter`] where nothing is said.
    /// Those that were pushed before go first. Collective.
    ///
    /// # Errors
    /// As [`GradBuckets::flush`].
    pub fn begin(&mut self, reduction: Reduction) -> Result<(), ShardError> {
        self.flush()?;
        self.reduction = reduction;
        Ok(())
    }

    /// Contributions to the gradient of `param` that were sent in this step; 0 for a parameter that is not there.
    pub fn arrived(&self, param: usize) -> usize {
        self.params.get(param).map_or(0, |p| p.arrived)
    }

    /// Contributions to each gradient that were sent in this step, as [`GradBuckets::arrived`] counts them.
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
        if self.params[param].state == GradState::Pushed {
            self.close(bucket)?;
        }
        if let Some(grad) = &self.params[param].grad {
            return Ok(grad.clone());
        }
        let in_place = self.is_written_in_place(param);
        let Bucket {
            len, slab, kept, ..
        } = &mut self.buckets[bucket];
        let param = &mut self.params[param];
        let place = param.place.clone();
        let grad = if in_place {
            let kept = match kept {
                Some(kept) => kept,
                None => kept.insert(KeptGrads::new(&self.backend, *len)?),
            };
            kept.follow_reader(&self.backend)?;
            kept.at(&self.backend, place)?
        } else {
            let slab = match slab {
                Some(slab) => slab,
                None => slab.insert(self.slabs.take(*len)?),
            };
            slab.values.view(&self.backend, place)?
        };
        param.grad = Some(grad.clone());
        (param.state, param.in_place) = (GradState::Taken, in_place);
        Ok(grad)
    }

    /// The memory that was taken for the gradient of `param` and not pushed.
    ///
    /// # Errors
    /// No such parameter, or there is none.
    pub fn taken(&self, param: usize) -> Result<Source<B>, ShardError> {
        let found = self.param(param)?;
        let taken = found
            .grad
            .as_ref()
            .filter(|_| found.state == GradState::Taken);
        taken.cloned().ok_or_else(|| ShardError::NoGradMemory {
            name: found.given.name.clone(),
        })
    }

    /// Whether the gradient of `param` is written where it is kept: the first one, in the dtype that is kept, of a bucket of which something
    /// is or will be kept.
    fn is_written_in_place(&self, param: usize) -> bool {
        let param = &self.params[param];
        self.slabs.dtype() == FloatDtype::F32
            && param.kept == 0
            && (self.reduction == Reduction::Keep || self.keeps(param.bucket))
    }

    /// Whether something of `bucket` is kept.
    fn keeps(&self, bucket: usize) -> bool {
        let params = self.buckets[bucket].params.clone();
        self.params[params].iter().any(|param| param.kept > 0)
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
        self.taken(param)?;
        let bucket = self.params[param].bucket;
        self.params[param].state = GradState::Pushed;
        let Bucket { params, pushed, .. } = &mut self.buckets[bucket];
        *pushed += 1;
        if *pushed == params.len() {
            self.close(bucket)?;
        }
        Ok(())
    }

    /// Sends buckets that not all parameters gave a gradient, or keeps what is in them: a micro-batch ends. Collective.
    ///
    /// # Errors
    /// Memory that was taken for a gradient that was not pushed, or a failure of another rank. A world of one rank may go on
    /// after a failure of its device, once it called [`GradBuckets::discard`].
    pub fn flush(&mut self) -> Result<(), ShardError> {
        let flushed = (0..self.buckets.len()).try_for_each(|bucket| self.close(bucket));
        self.buckets.iter_mut().for_each(|bucket| bucket.sends = 0);
        or_abort(&*self.mesh.shard, flushed)
    }

    /// Keeps or sends what was pushed of a bucket. Once that has failed nothing is sent until the step is discarded.
    fn close(&mut self, bucket: usize) -> Result<(), ShardError> {
        self.failed.clone().map_or(Ok(()), Err)?;
        let Bucket { params, pushed, .. } = &self.buckets[bucket];
        let mut params = self.params[params.clone()].iter();
        if let Some(open) = params.find(|p| p.state == GradState::Taken) {
            return Err(ShardError::GradNotPushed {
                name: open.given.name.clone(),
            });
        }
        let (waits, keeps) = (*pushed > 0, self.keeps(bucket));
        let closed = match self.reduction {
            Reduction::Keep if waits => self.keep(bucket),
            Reduction::Scatter | Reduction::Finish if keeps => {
                self.keep(bucket).and_then(|()| self.send(bucket))
            }
            Reduction::Scatter | Reduction::Finish if waits => self.send(bucket),
            _ => Ok(()),
        };
        closed.inspect_err(|error| self.failed = Some(error.clone()))
    }

    /// Adds what was pushed of a bucket to what is kept of it.
    fn keep(&mut self, bucket: usize) -> Result<(), ShardError> {
        let Bucket {
            params,
            pushed,
            slab,
            kept,
            len,
            ..
        } = &mut self.buckets[bucket];
        let mut additions = Vec::new();
        for param in &mut self.params[params.clone()] {
            if param.state == GradState::Pushed {
                if !param.in_place {
                    additions.push(Addition {
                        place: param.place.clone(),
                        adds: param.kept > 0,
                    });
                }
                param.kept += 1;
                param.release();
            }
        }
        *pushed = 0;
        let Some(slab) = slab.take() else {
            return Ok(());
        };
        let kept = match kept {
            Some(kept) => kept,
            None => kept.insert(KeptGrads::new(&self.backend, *len)?),
        };
        kept.add(&self.backend, &slab.values, additions)?;
        self.slabs.give_back_unsent(slab);
        Ok(())
    }

    /// Sends what is kept of a bucket, or what was pushed of one of which nothing is kept.
    fn send(&mut self, bucket: usize) -> Result<(), ShardError> {
        let number = bucket;
        let bucket = &mut self.buckets[number];
        let params = bucket.params.clone();
        bucket.sends += 1;
        if bucket.sends > 1 || bucket.added {
            bucket.history = History::Often;
        }
        if bucket.added {
            let mut names = self.params[params].iter();
            let name = names.find(|p| p.kept > 0 || p.state == GradState::Pushed);
            return Err(ShardError::GradAfterReplicas {
                name: name.map_or_else(String::new, |p| p.given.name.clone()),
            });
        }
        let mut items = Vec::new();
        // Parameters, and how many contributions of each are sent.
        let mut sent: Vec<(usize, usize)> = Vec::new();
        for (at, param) in params.clone().zip(&self.params[params.clone()]) {
            if let (Some(kept), 1..) = (&bucket.kept, param.kept) {
                items.push(param.item(0, kept.values()));
                sent.push((at, param.kept));
            } else if let (Some(slab), GradState::Pushed) = (&bucket.slab, param.state) {
                items.push(param.item(1, &slab.values));
                sent.push((at, 1));
            }
        }
        // What is kept travels as what it was made of.
        let wire = match self.slabs.dtype() {
            FloatDtype::F32 => self.wire,
            FloatDtype::Bf16 => GradWire::Bf16,
        };
        let after = self.backend.record()?;
        let batch = Collective::ReduceScatter(&items, wire);
        let started = self.reducers.start(number, &after, batch)?;
        for (at, contributions) in sent {
            let param = &mut self.params[at];
            param.arrived += contributions;
            param.kept = 0;
            param.release();
            let order = std::iter::repeat_n(at as u64, contributions);
            order.for_each(|at| self.order.push(at));
        }
        self.order.push(SENT);
        bucket.pushed = 0;
        match (bucket.slab.take(), &mut bucket.kept) {
            (Some(slab), _) => self.slabs.give_back(slab, started),
            (None, Some(kept)) => kept.sent(started),
            (None, None) => {}
        }
        self.add_early(number)
    }

    /// Adds the replicas of a bucket that was sent for the last time in this step, while backward goes on.
    fn add_early(&mut self, number: usize) -> Result<(), ShardError> {
        let bucket = &mut self.buckets[number];
        let is_last = self.reduction == Reduction::Finish && bucket.history == History::Once;
        if !is_last || self.mesh.mesh.replicate == 1 {
            return Ok(());
        }
        bucket.added = true;
        let params = &self.params[bucket.params.clone()];
        let sums: Vec<_> = arrived(params).collect();
        let after = self.reducers.record(number)?;
        let label = format!("replicas of bucket {number}");
        self.add_replicas(&after, &label, &sums)
    }

    /// Sums over the replicas, as work that follows the point `after`.
    fn add_replicas(
        &mut self,
        after: &B::Event,
        label: &str,
        sums: &[B::Buffer<f32>],
    ) -> Result<(), ShardError> {
        if self.mesh.mesh.replicate > 1 && !sums.is_empty() {
            let sums: Vec<_> = sums.iter().collect();
            let batch = Collective::Sum(&sums);
            let started = self.mesh.replicate.start(after, label, batch)?;
            self.last_of_replicas = Some(started);
        }
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
        if self.reduction == Reduction::Keep {
            self.begin(Reduction::Scatter)?;
        }
        self.flush()?;
        let finished = self.try_finish();
        or_abort(&*self.mesh.world, finished)
    }

    fn try_finish(&mut self) -> Result<Reduced, ShardError> {
        self.follow()?;
        let done = self.compare_sent()?;
        let rest = self.buckets.iter().filter(|bucket| !bucket.added);
        let rest = rest.flat_map(|bucket| arrived(&self.params[bucket.params.clone()]));
        let sums: Vec<_> = rest.collect();
        let after = self.backend.record()?;
        self.add_replicas(&after, "gradients of replicas", &sums)?;
        self.follow()?;
        for bucket in &mut self.buckets {
            let mut params = self.params[bucket.params.clone()].iter();
            if bucket.history == History::None && params.any(|param| param.arrived > 0) {
                bucket.history = History::Once;
            }
        }
        self.begin_step();
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
        self.params.iter_mut().for_each(Param::forget);
        self.order = CallOrder::default();
        self.begin_step();
        for bucket in &mut self.buckets {
            bucket.pushed = 0;
            if let Some(slab) = bucket.slab.take() {
                self.slabs.give_back_unsent(slab);
            }
        }
        Ok(())
    }

    fn begin_step(&mut self) {
        self.reduction = Reduction::default();
        for bucket in &mut self.buckets {
            (bucket.sends, bucket.added) = (0, false);
        }
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
            self.reducers.follow_failed(&self.backend)?;
            self.backend.wait_for(self.mesh.replicate.backend())?;
            self.failed = None;
        }
        if self.reducers.follow(&self.backend)? {
            self.slabs.followed();
            let kept = self.buckets.iter_mut();
            kept.filter_map(|bucket| bucket.kept.as_mut())
                .for_each(KeptGrads::followed);
        }
        if let Some(last) = self.last_of_replicas.take() {
            last.wait(&self.backend)?;
        }
        Ok(())
    }

    fn param(&self, param: usize) -> Result<&Param<B>, ShardError> {
        let len = self.params.len();
        let found = self.params.get(param);
        found.ok_or(ShardError::NoSuchGrad { param, len })
    }
}

/// The sums of those of `params` of which something arrived.
fn arrived<B: Backend>(params: &[Param<B>]) -> impl Iterator<Item = B::Buffer<f32>> {
    let arrived = params.iter().filter(|param| param.arrived > 0);
    arrived.map(|param| param.given.out.clone())
}
