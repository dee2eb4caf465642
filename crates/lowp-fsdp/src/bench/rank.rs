//! What one rank measures: gathers, gradients and optimizer steps, next to a plain collective and a plain copy.

use std::sync::Arc;
use std::time::Instant;

use lowp_comm::{Communicator, GatherItem, GradWire, Mesh, MeshComm, ReduceItem, ordered};
use lowp_format::{AnyRecipe, Phase, Recipe, Role, Shape};
use lowp_kernels::bench::copy_rate;
use lowp_kernels::{Backend, Cuda, CudaMark, FloatDtype, Source};
use lowp_optim::{
    Group, Optimizer, OptimizerBuilder, ParamId, ParamSpec, PendingStep, StepOptions,
};
use lowp_shard::{
    GatherGroup, GatherPool, GradBucketOptions, GradBuckets, GradParam, ShardSpec, ShardedTensor,
};

use super::{RankRow, RankRows, Result, Size};
use crate::cost::Bandwidth;

/// Layers and width of the model: 1.007 billion parameters in 80 weights.
const LAYERS: usize = 20;
const WIDTH: usize = 2048;
/// The recipe of rows that are of none.
pub(super) const ANY: &str = "any";
/// The row of steps over masters and states in page-locked memory of the host.
pub(super) const OFFLOADED: &str = "optimizer step, offloaded";
/// Runs before timing starts: ranks connect, gathers become graphs.
pub(super) const WARM_UP: usize = 3;
/// Calls between two looks at the clock: what one waits for the host for is nothing beside them.
pub(super) const CALLS: usize = 8;
/// Steps of the optimizer after which memory is looked at.
const STEPS: usize = 200;

/// The weights of one block.
fn block(width: usize) -> [Shape; 4] {
    [
        Shape::new(3 * width, width),
        Shape::new(width, width),
        Shape::new(4 * width, width),
        Shape::new(width, 4 * width),
    ]
}

/// Parameters of the model, whose sides are divided by `shrink`.
pub(super) fn parameters(shrink: usize) -> usize {
    let weights = block(WIDTH / shrink).map(|shape| shape.elements());
    LAYERS * weights.iter().sum::<usize>()
}

/// An optimizer that is measured.
pub(super) struct Stepped {
    optimizer: Optimizer<Cuda>,
    ids: Vec<ParamId>,
    /// Elements of this rank, and bytes of its shards.
    pub(super) elements: usize,
    codes: usize,
}

impl Stepped {
    pub(super) fn step(&mut self) -> Result<PendingStep<Cuda>> {
        // The gradients stay where they are.
        let ids = self.ids.iter();
        ids.for_each(|&id| self.optimizer.mark_ready(id));
        Ok(self.optimizer.step(&StepOptions::default())?)
    }
}

/// One rank.
pub(super) struct Rank<'a> {
    pub(super) cuda: Cuda,
    pub(super) comm: Arc<dyn Communicator<Cuda>>,
    pub(super) size: Size,
    /// Where what runs now is said.
    pub(super) say: &'a (dyn Fn(&str) + Sync),
}

impl Rank<'_> {
    pub(super) fn measure(&self, filter: Option<&str>) -> Result<RankRows> {
        let wanted = |operation: &str, recipe: &str| {
            filter.is_none_or(|text| operation.contains(text) || recipe.contains(text))
        };
        let mut report = RankRows {
            parameters: parameters(self.size.shrink),
            copy_gb_per_s: copy_rate(&self.cuda, self.size.shrink)?,
            small_copy_microseconds: self.small_copy()?,
            rows: Vec::new(),
        };
        if self.size.offload {
            for recipe in AnyRecipe::all() {
                if wanted(OFFLOADED, recipe.name()) {
                    report.rows.extend(self.offloaded_step(recipe)?);
                }
            }
            return Ok(report);
        }
        if wanted("gather", ANY) {
            report.rows.extend(self.gathers_by_size()?);
        }
        for recipe in AnyRecipe::all() {
            if wanted("gather", recipe.name()) {
                report.rows.extend(self.gather(recipe)?);
            }
        }
        for dtype in [FloatDtype::F32, FloatDtype::Bf16] {
            if wanted("gradients", dtype.name()) {
                report.rows.extend(self.reduce(dtype)?);
            }
        }
        for recipe in AnyRecipe::all() {
            if wanted("step", recipe.name()) {
                report.rows.push(self.step(recipe, report.copy_gb_per_s)?);
            }
        }
        Ok(report)
    }

    /// The row of an operation with `bytes` in full that took `milliseconds`, next to a plain collective of the same bytes that took
    /// `raw`.
    pub(super) fn row(
        &self,
        operation: &str,
        recipe: &str,
        bytes: usize,
        milliseconds: f64,
        raw: f64,
    ) -> RankRow {
        // What comes from other ranks.
        let arrive = bytes - bytes / self.comm.world_size();
        RankRow {
            operation: operation.to_owned(),
            recipe: recipe.to_owned(),
            bytes,
            milliseconds,
            gb_per_s: arrive as f64 / milliseconds / 1e6,
            share: raw / milliseconds,
            host_microseconds_per_weight: None,
        }
    }

    pub(super) fn say(&self, text: &str) {
        if self.comm.rank() == 0 {
            (self.say)(text);
        }
    }

    /// This rank's shards of all weights.
    fn shards(&self, recipe: AnyRecipe) -> Result<Vec<ShardedTensor<Cuda>>> {
        let (world, rank) = (self.comm.world_size(), self.comm.rank());
        let shapes = (0..LAYERS).flat_map(|_| block(WIDTH / self.size.shrink));
        let shard = |shape| {
            let spec = ShardSpec::new(&recipe, shape, world, rank)?;
            Ok(ShardedTensor::new(&self.cuda, recipe, spec)?)
        };
        shapes.map(shard).collect()
    }

    /// All ranks begin together.
    pub(super) fn together(&self) -> Result<()> {
        self.cuda.synchronize()?;
        self.comm.backend().synchronize()?;
        Ok(self.comm.control().barrier()?)
    }

    /// Median milliseconds of `call` on the device, all ranks together: the slowest rank's.
    pub(super) fn timed(&self, call: impl FnMut() -> Result<()>) -> Result<f64> {
        self.timed_by(CALLS, call)
    }

    /// The same of so many calls between two looks at the clock.
    pub(super) fn timed_by(
        &self,
        calls: usize,
        mut call: impl FnMut() -> Result<()>,
    ) -> Result<f64> {
        for _ in 0..WARM_UP {
            call()?;
        }
        let mut times = Vec::new();
        for _ in 0..self.size.runs {
            self.together()?;
            let begin = self.cuda.mark()?;
            for _ in 0..calls {
                call()?;
            }
            let end: CudaMark = self.cuda.mark()?;
            times.push(f64::from(begin.milliseconds_to(&end)?) / calls as f64);
        }
        self.slowest(times)
    }

    /// The largest of the medians of all ranks.
    pub(super) fn slowest(&self, mut times: Vec<f64>) -> Result<f64> {
        times.sort_by(f64::total_cmp);
        let median = times[times.len() / 2];
        let bits = median.to_bits().to_le_bytes().to_vec();
        let all = self.comm.control().all_gather("a time", bits)?;
        let of = |bytes: &Vec<u8>| {
            let bytes: [u8; 8] = bytes.as_slice().try_into().unwrap_or_default();
            f64::from_bits(u64::from_le_bytes(bytes))
        };
        Ok(all.iter().map(of).fold(0.0, f64::max))
    }

    /// One plain all-gather of `bytes`, then the gather of all weights for forward, and the host's part of gathers by block.
    fn gather(&self, recipe: AnyRecipe) -> Result<Vec<RankRow>> {
        self.say(&format!("gather  {}", recipe.name()));
        let shards = self.shards(recipe)?;
        let weights = shards.len();
        let pool = GatherPool::new(&self.cuda);
        let group =
            |shards| GatherGroup::new(&self.cuda, Arc::clone(&self.comm), &pool, shards, true);
        let mut all = group(shards.clone())?;
        let sent: usize = (0..weights)
            .filter_map(|param| all.plan(param, Phase::Forward))
            .map(|plan| plan.wire_bytes())
            .sum();
        let gathered = self.timed(|| {
            all.unshard(Phase::Forward)?;
            all.reshard();
            Ok(())
        })?;
        let host_all = self.host(weights, || {
            all.prefetch(Phase::Forward)?;
            all.unshard(Phase::Forward)?;
            all.reshard();
            Ok(())
        })?;
        drop(all);
        let mut blocks = Vec::new();
        for shards in shards.chunks(block(WIDTH).len()) {
            blocks.push(group(shards.to_vec())?);
        }
        let mut by_block = || -> Result<()> {
            for block in &mut blocks {
                block.prefetch(Phase::Forward)?;
                block.unshard(Phase::Forward)?;
                block.reshard();
            }
            Ok(())
        };
        let in_blocks = self.timed(&mut by_block)?;
        let host_blocks = self.host(weights, by_block)?;
        drop(blocks);
        let raw = self.plain_gather(sent)?;
        let row = |operation: &str, milliseconds: f64, host| RankRow {
            host_microseconds_per_weight: host,
            ..self.row(operation, recipe.name(), sent, milliseconds, raw)
        };
        Ok(vec![
            row(Bandwidth::ALL_GATHER, raw, None),
            row("gather of all weights", gathered, Some(host_all)),
            row("the same, block by block", in_blocks, Some(host_blocks)),
        ])
    }

    /// Milliseconds of one all-gather of `bytes` in one buffer.
    pub(super) fn plain_gather(&self, bytes: usize) -> Result<f64> {
        let comm = &*self.comm;
        let world = comm.world_size();
        let piece = bytes.div_ceil(world);
        let (source, dest) = (
            self.cuda.alloc::<u8>(piece)?,
            self.cuda.alloc::<u8>(world * piece)?,
        );
        let ranges: Vec<_> = (0..world).map(|r| r * piece..(r + 1) * piece).collect();
        let item = GatherItem {
            source: &source,
            dest: &dest,
            ranges: &ranges,
        };
        self.timed(|| {
            Ok(ordered(&self.cuda, comm, || {
                comm.all_gather(std::slice::from_ref(&item))
            })?)
        })
    }

    /// The gradients of all weights, in buckets, next to one plain collective of the same bytes: a reduce-scatter where
    /// NCCL adds them (f32), and an all-gather elsewhere.
    fn reduce(&self, dtype: FloatDtype) -> Result<Vec<RankRow>> {
        const OPERATION: &str = "gradients in buckets";
        self.say(&format!("{OPERATION}  {}", dtype.name()));
        let (rank, world) = (self.comm.rank(), self.comm.world_size());
        let (mut params, mut elements) = (Vec::new(), 0);
        for (number, shape) in (0..LAYERS)
            .flat_map(|_| block(WIDTH / self.size.shrink))
            .enumerate()
        {
            let end = |rank| rank * shape.elements() / world;
            let ranges: Vec<_> = (0..world).map(|rank| end(rank)..end(rank + 1)).collect();
            elements += shape.elements();
            params.push(GradParam {
                block: None,
                name: number.to_string(),
                out: self.cuda.alloc(ranges[rank].len())?,
                ranges,
            });
        }
        let mesh = MeshComm::new(Mesh::sharded(world), Arc::clone(&self.comm))?;
        let count = params.len();
        let options = GradBucketOptions {
            dtype,
            ..GradBucketOptions::default()
        };
        let mut buckets = GradBuckets::new(&self.cuda, &mesh, params, options)?;
        let mut backward = || -> Result<()> {
            for param in 0..count {
                // Nothing writes it: what the gradients are takes no part.
                buckets.grad(param)?;
                buckets.push(param)?;
            }
            buckets.finish()?;
            Ok(())
        };
        let milliseconds = self.timed(&mut backward)?;
        let host = self.host(count, backward)?;
        drop(buckets);
        let bytes = dtype.bytes() * elements;
        let (plain, raw) = match dtype {
            FloatDtype::F32 => (
                "one reduce-scatter of the same bytes",
                self.plain_reduce(elements)?,
            ),
            FloatDtype::Bf16 => (Bandwidth::ALL_GATHER, self.plain_gather(bytes)?),
        };
        let row = |operation: &str, milliseconds: f64, host| RankRow {
            host_microseconds_per_weight: host,
            ..self.row(operation, dtype.name(), bytes, milliseconds, raw)
        };
        Ok(vec![
            row(plain, raw, None),
            row(OPERATION, milliseconds, Some(host)),
        ])
    }

    /// Milliseconds of one reduce-scatter of `elements` f32 values in one buffer.
    fn plain_reduce(&self, elements: usize) -> Result<f64> {
        let comm = &*self.comm;
        let piece = elements / comm.world_size();
        let ends = (0..comm.world_size()).map(|rank| rank * piece..(rank + 1) * piece);
        let ranges: Vec<_> = ends.collect();
        let grad = Source::F32(self.cuda.alloc(piece * comm.world_size())?);
        let out = self.cuda.alloc::<f32>(piece)?;
        let item = ReduceItem {
            grad: &grad,
            memory: 0,
            ranges: &ranges,
            out: &out,
            accumulate: false,
        };
        self.timed(|| {
            Ok(ordered(&self.cuda, comm, || {
                comm.reduce_scatter(std::slice::from_ref(&item), GradWire::F32)
            })?)
        })
    }

    /// Microseconds of the calling thread per weight.
    fn host(&self, weights: usize, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
        for _ in 0..WARM_UP {
            call()?;
        }
        let mut times = Vec::new();
        for _ in 0..self.size.runs {
            self.together()?;
            let begun = Instant::now();
            call()?;
            times.push(begun.elapsed().as_secs_f64() * 1e6 / weights as f64);
        }
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }

    /// An optimizer over all weights, each of which has a gradient.
    pub(super) fn stepped(&self, recipe: AnyRecipe) -> Result<Stepped> {
        let mut builder = OptimizerBuilder::new(Arc::clone(&self.comm))
            .on(&self.cuda)
            .offload(self.size.offload);
        let group = builder.group(Group::default());
        let (mut ids, mut elements, mut codes) = (vec![], 0, 0);
        let shards = self.shards(recipe)?;
        for (number, shard) in shards.iter().enumerate() {
            let len = shard.spec().elements().len();
            let master = (0..len)
                .map(|i| ((i % 251) as f32 - 125.0) * 1e-3)
                .collect();
            ids.push(builder.param(
                shard.local(),
                ParamSpec::new(format!("{number}"), group, master),
            )?);
            elements += len;
            codes += shard.resident_bytes();
        }
        let mut optimizer = builder.build()?;
        for (&id, shard) in ids.iter().zip(&shards) {
            let len = shard.spec().elements().len();
            // None is zero: a quotient of zeros takes longer, and no gradient is all zeros.
            let grad: Vec<f32> = (0..len)
                .map(|i| ((i % 241) as f32 - 120.5) * 1e-4)
                .collect();
            optimizer.set_grad(id, &grad)?;
        }
        Ok(Stepped {
            optimizer,
            ids,
            elements,
            codes,
        })
    }

    /// A step of the optimizer over all weights, collectives included.
    fn step(&self, recipe: AnyRecipe, copy: f64) -> Result<RankRow> {
        self.say(&format!("step  {}", recipe.name()));
        self.together()?;
        let [before, _] = self.cuda.memory()?;
        let mut stepped = self.stepped(recipe)?;
        let (elements, codes, weights) = (stepped.elements, stepped.codes, stepped.ids.len());
        let mut step = || stepped.step();
        for _ in 0..WARM_UP {
            let _applied = step()?.wait()?;
        }
        let mut outcomes = Vec::new();
        let milliseconds = self.timed(|| {
            outcomes.push(step()?);
            Ok(())
        })?;
        outcomes.clear();
        let host = self.host(weights, || {
            outcomes.push(step()?);
            Ok(())
        })?;
        outcomes.clear();
        self.together()?;
        let [settled, _] = self.cuda.memory()?;
        for _ in 0..STEPS {
            let _applied = step()?.wait()?;
        }
        self.together()?;
        let [after, _] = self.cuda.memory()?;
        // Masters, gradients and two moments.
        let accounted = 16 * elements + codes;
        self.say(&format!(
            "  memory: {} MB used, {} MB by the account, {} MB more after {STEPS} steps",
            before.saturating_sub(settled) / 1_000_000,
            accounted / 1_000_000,
            settled.saturating_sub(after) / 1_000_000
        ));
        // Gradients are read for the norm, too; amaxes of the tensor or its lines need a second pass over the masters.
        let kernels = recipe.quantizers(Role::Weight).kernels();
        let waits = kernels.iter().any(|key| key.scale.waits_for_amax());
        let passes = if waits { 4 } else { 0 };
        let bytes = elements * (4 + 28 + passes) + codes;
        let gb_per_s = bytes as f64 / milliseconds / 1e6;
        Ok(RankRow {
            operation: "optimizer step".to_owned(),
            recipe: recipe.name().to_owned(),
            bytes,
            milliseconds,
            gb_per_s,
            share: gb_per_s / copy,
            host_microseconds_per_weight: Some(host),
        })
    }
}
