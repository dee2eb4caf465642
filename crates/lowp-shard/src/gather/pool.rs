//! [`GatherPool`]: destination buffers and planned local work, shared by groups of equal geometry.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lowp_format::{BufferKey, BufferSpec, GatherPlan, GatherStep, Phase, Recipe, Usage};
use lowp_kernels::{Backend, Element, InterleaveJob, KernelError, TransposeJob, Work};

use super::scratch::Free;
use super::steps::{GatherTarget, run_steps};
use crate::ShardError;

/// What a group gathers, and from where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exchange {
    /// What forward needs, from the shards; and what backward needs, unless that gathers again.
    Forward,
    /// What backward needs, from the shards.
    Backward,
    /// What backward needs, from the parts that a smaller group kept.
    Parts,
}

impl Exchange {
    pub(super) const ALL: [Exchange; 3] = [Exchange::Forward, Exchange::Backward, Exchange::Parts];
}

impl From<Phase> for Exchange {
    fn from(phase: Phase) -> Self {
        match phase {
            Phase::Forward => Exchange::Forward,
            Phase::Backward => Exchange::Backward,
        }
    }
}

/// The gathers of one parameter. What the shards cannot serve, and what the policy does not need, has none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ParamPlans {
    pub(super) exchanges: [Option<GatherPlan>; 3],
    /// Ranks that keep parts together.
    pub(super) group: usize,
}

impl ParamPlans {
    pub(super) fn plan(&self, exchange: impl Into<Exchange>) -> Option<&GatherPlan> {
        self.exchanges[exchange.into() as usize].as_ref()
    }
}

/// Where one buffer of one parameter goes.
#[derive(Debug)]
pub(super) struct Move<B: Backend> {
    pub(super) param: usize,
    pub(super) key: BufferKey,
    pub(super) dest: B::Buffer<u8>,
    pub(super) ranges: Vec<Range<usize>>,
}

/// One exchange of a group into one set of destination buffers.
#[derive(Debug)]
pub(super) struct ExchangeWork<B: Backend> {
    pub(super) moves: Vec<Move<B>>,
    /// Local work after the gather, in order.
    pub(super) local: Vec<B::Plan>,
}

/// Destination buffers of a whole group, for all exchanges.
#[derive(Debug)]
pub(super) struct DestinationSet<B: Backend> {
    pub(super) id: u64,
    /// Per parameter.
    buffers: Vec<Vec<(BufferKey, B::Buffer<u8>)>>,
    exchanges: [ExchangeWork<B>; 3],
}

impl<B: Backend> DestinationSet<B> {
    pub(super) fn exchange(&self, exchange: Exchange) -> &ExchangeWork<B> {
        &self.exchanges[exchange as usize]
    }

    pub(super) fn buffer(&self, param: usize, key: BufferKey) -> Option<&B::Buffer<u8>> {
        self.buffers[param]
            .iter()
            .find(|(k, _)| *k == key)
            .map(|(_, buffer)| buffer)
    }
}

/// Arrival buffers of interleaved pieces, by parameter and buffer.
type Arrivals<B> = Vec<((usize, BufferKey), <B as Backend>::Buffer<u8>)>;

/// Sets of one geometry that no group uses at the moment.
#[derive(Debug)]
struct Geometry<B: Backend> {
    plans: Arc<[ParamPlans]>,
    /// Each with the point behind its last use.
    free: Vec<(Arc<DestinationSet<B>>, B::Event)>,
}

#[derive(Debug)]
pub(super) struct Inner<B: Backend> {
    geometries: Vec<Geometry<B>>,
    pub(super) scratch: Vec<Free<B>>,
    pub(super) allocations: u64,
    bytes: usize,
    sets: u64,
    groups: u64,
}

/// The memory that gathered weights of one rank live in.
///
/// A group borrows a set of destination buffers when it unshards and gives it back when it
/// reshards, so layers of equal shapes take turns in the same memory and nothing is allocated
/// from the second step on. A set is lent again behind the work of its last user. Local work (interleave, transpose) is planned once per set.
#[derive(Debug)]
pub struct GatherPool<B: Backend> {
    pub(super) backend: B,
    inner: Mutex<Inner<B>>,
}

impl<B: Backend> GatherPool<B> {
    /// An empty pool.
    pub fn new(backend: &B) -> Arc<Self> {
        let inner = Inner {
            geometries: Vec::new(),
            scratch: Vec::new(),
            allocations: 0,
            bytes: 0,
            sets: 0,
            groups: 0,
        };
        Arc::new(Self {
            backend: backend.clone(),
            inner: Mutex::new(inner),
        })
    }

    /// Number of buffers allocated so far. Constant from the second step on.
    pub fn allocations(&self) -> u64 {
        self.lock().allocations
    }

    /// Bytes of all buffers of the pool, scratch included. It frees none, so this is also the most
    /// that it ever held.
    pub fn resident_bytes(&self) -> usize {
        self.lock().bytes
    }

    /// Number of destination sets made so far.
    pub fn sets(&self) -> u64 {
        self.lock().sets
    }

    /// The number of a new group that uses the pool.
    pub(super) fn next_group(&self) -> u64 {
        let mut inner = self.lock();
        inner.groups += 1;
        inner.groups - 1
    }

    /// Changes under this lock are whole even if a backend panicked in between.
    pub(super) fn lock(&self) -> MutexGuard<'_, Inner<B>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of the geometry `plans`.
    pub(super) fn geometry(&self, plans: &Arc<[ParamPlans]>) -> usize {
        let mut inner = self.lock();
        if let Some(found) = inner.geometries.iter().position(|g| g.plans == *plans) {
            return found;
        }
        inner.geometries.push(Geometry {
            plans: Arc::clone(plans),
            free: Vec::new(),
        });
        inner.geometries.len() - 1
    }

    /// Borrows a set, made now if none is free, for work of `streams`, the first of which does the
    /// last of it. They follow whoever used the memory before.
    pub(super) fn lease(
        self: &Arc<Self>,
        geometry: usize,
        streams: [&B; 2],
    ) -> Result<Lease<B>, ShardError> {
        let mut inner = self.lock();
        let set = match self.take(&mut inner.geometries[geometry].free, streams)? {
            Some(set) => set,
            None => {
                let plans = Arc::clone(&inner.geometries[geometry].plans);
                let set = Arc::new(self.make(&mut inner, &plans)?);
                for stream in streams {
                    stream.wait_for(&self.backend)?;
                }
                set
            }
        };
        Ok(Lease {
            pool: Arc::clone(self),
            geometry,
            set,
            stream: streams[0].clone(),
        })
    }

    /// A free set, behind its last use. One that was given back within a capture stays with the graph, which
    /// writes to it at every launch.
    fn take(
        &self,
        free: &mut Vec<(Arc<DestinationSet<B>>, B::Event)>,
        streams: [&B; 2],
    ) -> Result<Option<Arc<DestinationSet<B>>>, ShardError> {
        for at in (0..free.len()).rev() {
            let last_use = &free[at].1;
            match streams.iter().try_for_each(|stream| stream.wait(last_use)) {
                Ok(()) => return Ok(Some(free.remove(at).0)),
                Err(KernelError::InCapture { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(None)
    }

    /// Memory of one group, which nobody else gets.
    pub(super) fn bytes(&self, len: usize) -> Result<B::Buffer<u8>, ShardError> {
        self.alloc(&mut self.lock(), len)
    }

    pub(super) fn alloc<T: Element>(
        &self,
        inner: &mut Inner<B>,
        len: usize,
    ) -> Result<B::Buffer<T>, ShardError> {
        let buffer = self.backend.alloc(len)?;
        inner.allocations += 1;
        inner.bytes += len * size_of::<T>();
        Ok(buffer)
    }

    fn make(
        &self,
        inner: &mut Inner<B>,
        plans: &[ParamPlans],
    ) -> Result<DestinationSet<B>, ShardError> {
        let mut buffers = Vec::with_capacity(plans.len());
        for param in plans {
            let mut own: Vec<(BufferKey, B::Buffer<u8>)> = Vec::new();
            for plan in param.exchanges.iter().flatten() {
                for step in &plan.steps {
                    let spec = step.spec();
                    let replicated = matches!(step, GatherStep::Replicated { .. });
                    if !replicated && own.iter().all(|(key, _)| *key != spec.key) {
                        own.push((spec.key, self.alloc(inner, spec.bytes(plan.full))?));
                    }
                }
            }
            buffers.push(own);
        }
        let mut arrivals = Arrivals::<B>::new();
        let [forward, backward, parts] = Exchange::ALL
            .map(|exchange| self.work(inner, plans, &buffers, &mut arrivals, exchange));
        inner.sets += 1;
        Ok(DestinationSet {
            id: inner.sets,
            buffers,
            exchanges: [forward?, backward?, parts?],
        })
    }

    fn work(
        &self,
        inner: &mut Inner<B>,
        plans: &[ParamPlans],
        buffers: &[Vec<(BufferKey, B::Buffer<u8>)>],
        arrivals: &mut Arrivals<B>,
        exchange: Exchange,
    ) -> Result<ExchangeWork<B>, ShardError> {
        let (mut moves, mut interleave, mut transpose) = (Vec::new(), Vec::new(), Vec::new());
        for (param, plan) in plans.iter().enumerate() {
            let Some(plan) = plan.plan(exchange) else {
                continue;
            };
            let ranks = match exchange {
                Exchange::Parts => plans[param].group,
                Exchange::Forward | Exchange::Backward => plan.cuts.world(),
            };
            let mut recorded = Recorded {
                pool: self,
                inner,
                param,
                plan,
                ranks,
                buffers: &buffers[param],
                arrivals,
                moves: &mut moves,
                interleave: &mut interleave,
                transpose: &mut transpose,
            };
            run_steps(plan, &mut recorded)?;
        }
        let mut local = Vec::new();
        if !interleave.is_empty() {
            local.push(self.backend.plan(Work::Interleave(interleave))?);
        }
        if !transpose.is_empty() {
            local.push(self.backend.plan(Work::Transpose(transpose))?);
        }
        Ok(ExchangeWork { moves, local })
    }
}

/// The steps of one parameter's plan, recorded beside those of the group's other parameters.
struct Recorded<'a, B: Backend> {
    pool: &'a GatherPool<B>,
    inner: &'a mut Inner<B>,
    param: usize,
    plan: &'a GatherPlan,
    /// Those that take part.
    ranks: usize,
    buffers: &'a [(BufferKey, B::Buffer<u8>)],
    arrivals: &'a mut Arrivals<B>,
    moves: &'a mut Vec<Move<B>>,
    interleave: &'a mut Vec<InterleaveJob<B>>,
    transpose: &'a mut Vec<TransposeJob<B>>,
}

impl<B: Backend> GatherTarget<B> for Recorded<'_, B> {
    type Error = ShardError;

    fn full(&mut self, spec: &BufferSpec, _: usize) -> Result<B::Buffer<u8>, ShardError> {
        self.filled(spec.key)
    }

    fn filled(&self, key: BufferKey) -> Result<B::Buffer<u8>, ShardError> {
        let found = self.buffers.iter().find(|(known, _)| *known == key);
        found
            .map(|(_, buffer)| buffer.clone())
            .ok_or_else(|| missing(self.plan, key))
    }

    fn arrivals(&mut self, spec: &BufferSpec, bytes: usize) -> Result<B::Buffer<u8>, ShardError> {
        let name = (self.param, spec.key);
        // Several exchanges may fetch it.
        if let Some((_, known)) = self.arrivals.iter().find(|(known, _)| *known == name) {
            return Ok(known.clone());
        }
        let buffer = self.pool.alloc::<u8>(self.inner, bytes)?;
        self.arrivals.push((name, buffer.clone()));
        Ok(buffer)
    }

    fn fetch(
        &mut self,
        spec: &BufferSpec,
        dest: B::Buffer<u8>,
        mut ranges: Vec<Range<usize>>,
    ) -> Result<(), ShardError> {
        ranges.truncate(self.ranks);
        self.moves.push(Move {
            param: self.param,
            key: spec.key,
            dest,
            ranges,
        });
        Ok(())
    }

    fn interleave(&mut self, job: InterleaveJob<B>) -> Result<(), ShardError> {
        self.interleave.push(job);
        Ok(())
    }

    fn transpose(&mut self, job: TransposeJob<B>) -> Result<(), ShardError> {
        self.transpose.push(job);
        Ok(())
    }

    fn replicated(&mut self, _: &BufferSpec) -> Result<(), ShardError> {
        // The shard's own buffer serves.
        Ok(())
    }
}

fn missing(plan: &GatherPlan, key: BufferKey) -> ShardError {
    lowp_format::FormatError::MissingBuffer {
        key,
        usage: plan.usage,
    }
    .into()
}

/// Accepts plans whose derived buffers are exact transposes of their sources.
pub(crate) fn check_derived<R: Recipe>(recipe: &R, plan: &GatherPlan) -> Result<(), ShardError> {
    let all = recipe.buffers(Usage::BOTH);
    for step in &plan.steps {
        if let GatherStep::Derive { spec, from } = step {
            let from = all.iter().find(|s| s.key == *from).unwrap_or(spec);
            check_transpose(recipe.name(), spec, from, plan)?;
        }
    }
    Ok(())
}

fn check_transpose(
    recipe: &'static str,
    spec: &BufferSpec,
    from: &BufferSpec,
    plan: &GatherPlan,
) -> Result<(), ShardError> {
    let [outer, inner] = from.entries(plan.full);
    let why = if spec.code != from.code {
        "their entries are encoded differently"
    } else if spec.axes == from.axes {
        "both follow the same axes (give the buffer Usage::BOTH and let it serve both)"
    } else if spec.entries(plan.full) != [inner, outer] {
        "their entry counts are not exchanged"
    } else {
        return Ok(());
    };
    let (buffer, from) = (spec.key.to_string(), from.key.to_string());
    Err(ShardError::NotATranspose {
        recipe,
        buffer,
        from,
        why,
    })
}

/// A borrowed set; goes back to the pool when dropped, to be lent behind the work that its stream has by
/// then.
#[derive(Debug)]
pub(super) struct Lease<B: Backend> {
    pool: Arc<GatherPool<B>>,
    geometry: usize,
    pub(super) set: Arc<DestinationSet<B>>,
    stream: B,
}

impl<B: Backend> Drop for Lease<B> {
    fn drop(&mut self) {
        // A device that cannot say when it is done does not get the memory again.
        if let Ok(last_use) = self.stream.record() {
            let set = Arc::clone(&self.set);
            let mut inner = self.pool.lock();
            inner.geometries[self.geometry].free.push((set, last_use));
        }
    }
}
