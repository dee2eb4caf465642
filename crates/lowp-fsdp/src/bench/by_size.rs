//! Gathers of single weights by size, and copies: what `lowp plan --bandwidth` reads.

use std::sync::{Arc, Mutex, PoisonError};

use half::bf16;
use lowp_format::{
    AnyRecipe, Code, GatherPlan, GatherStep, Phase, PhasePlans, Recipe, ReshardAfterForward,
    RowCuts, Shape, Usage,
};
use lowp_kernels::{Backend, Cuda, CudaMark};
use lowp_shard::{
    Exchange, GatherGroup, GatherPoint, GatherPool, GatherWatch, ShardSpec, ShardedTensor,
};

use super::rank::{ANY, CALLS, Rank, WARM_UP};
use super::{BenchError, RankRow, Result};
use crate::cost::Bandwidth;

/// Powers of two of the bytes that are gathered: 256 KiB to 256 MiB.
const SMALLEST: u32 = 18;
const LARGEST: u32 = 28;
/// Columns of a weight that is gathered by itself: scales of its blocks need no padding.
const COLS: usize = 1024;

/// Bytes of a copy that keeps the device busy for 0.1 ms.
const AHEAD: usize = 256 << 20;
/// Bytes of a copy that leaves nothing else in caches.
const BETWEEN: usize = 64 << 20;
/// Bytes of a small copy and of the large one before it, and how many of both are in a graph: more than caches have.
const FEW: usize = 512 << 10;
const MANY: usize = 12 << 20;
const COPIES: usize = 16;

/// The gathers of a weight over `ranks`.
fn plans(recipe: AnyRecipe, shape: Shape, ranks: usize) -> Result<PhasePlans> {
    let cuts = RowCuts::new(shape.rows, ranks, recipe.row_quantum(Usage::BOTH))?;
    let reshard = ReshardAfterForward::Yes;
    Ok(PhasePlans::new(&recipe, shape, &cuts, reshard)?)
}

/// The recipe that gathers the most bytes of those that gather codes and scales for forward.
fn with_scales() -> Result<AnyRecipe> {
    let shape = Shape::new(COLS, COLS);
    let mut most = None;
    for recipe in AnyRecipe::all() {
        let GatherPlan { steps, .. } = &plans(recipe, shape, 1)?.forward;
        let bytes: usize = steps.iter().map(GatherStep::wire_bytes).sum();
        let is_sent = |step: &GatherStep| matches!(step, GatherStep::Concat { .. });
        let is_pair = steps.len() == 2 && steps.iter().all(is_sent);
        if is_pair && most.is_none_or(|(least, _)| bytes > least) {
            most = Some((bytes, recipe));
        }
    }
    let found = most.map(|(_, recipe)| recipe);
    found.ok_or(BenchError::NoRecipe {
        what: "with scales",
    })
}

impl Rank<'_> {
    /// Plain all-gathers and gathers of single weights, by size.
    pub(super) fn gathers_by_size(&self) -> Result<Vec<RankRow>> {
        self.say("gather  by size");
        let world = self.comm.world_size();
        let plain = AnyRecipe::plain(Code::Bf16).ok_or(BenchError::NoRecipe { what: "of bf16" })?;
        let scaled = with_scales()?;
        let mut rows = Vec::new();
        for power in SMALLEST..=LARGEST {
            let bytes = (1usize << power) / self.size.shrink;
            let shape = |width: usize| Shape::new((bytes / width / COLS).max(1), COLS);
            let mut gathers = vec![(
                Bandwidth::GATHER,
                ANY,
                self.gather_of_one(plain, shape(size_of::<bf16>()))?,
            )];
            // Codes and scales are apart where those are large and these are not, and always where they are copied.
            let plans = plans(scaled, shape(1), world)?;
            if world == 1 || Exchange::new(&[&plans.forward], world).batches() == 2 {
                let gather = self.gather_of_one(scaled, shape(1))?;
                gathers.push((Bandwidth::SCALED_GATHER, scaled.name(), gather));
            }
            for (operation, recipe, (bytes, milliseconds)) in gathers {
                let raw = self.plain_gather(bytes)?;
                if operation == Bandwidth::GATHER {
                    rows.push(self.row(Bandwidth::ALL_GATHER, ANY, bytes, raw, raw));
                }
                rows.push(self.row(operation, recipe, bytes, milliseconds, raw));
            }
        }
        Ok(rows)
    }

    /// Microseconds that a copy of few bytes takes in a graph after a copy of many, as scales are copied after codes.
    pub(super) fn small_copy(&self) -> Result<f64> {
        let [from, to] = [self.cuda.alloc::<u8>(AHEAD)?, self.cuda.alloc(AHEAD)?];
        let times = [false, true].map(|small| {
            let copies = |number: usize| {
                let at = number * (MANY + FEW);
                self.cuda.copy::<u8>(&from, at..at + MANY, &to, at)?;
                match small {
                    true => self
                        .cuda
                        .copy::<u8>(&from, at + MANY..at + MANY + FEW, &to, at + MANY),
                    false => Ok(()),
                }
            };
            let graph = self.cuda.capture(|| (0..COPIES).try_for_each(copies))?;
            self.timed(|| Ok(self.cuda.launch(&graph)?))
        });
        let [without, with] = times;
        Ok(((with? - without?) * 1e3 / COPIES as f64).max(0.0))
    }

    /// Bytes of one weight's gather, and its milliseconds between two marks of the stream that gathers. Several weights are gathered one after
    /// the other, and between two of them the device is at other work, as in training: caches have nothing of a weight when it is gathered again.
    fn gather_of_one(&self, recipe: impl Recipe, shape: Shape) -> Result<(usize, f64)> {
        let (comm, pool) = (&self.comm, GatherPool::new(&self.cuda));
        let marks: Arc<Mutex<Vec<(GatherPoint, CudaMark)>>> = Arc::default();
        let weight = |_| -> Result<_> {
            let spec = ShardSpec::new(&recipe, shape, comm.world_size(), comm.rank())?;
            let shards = vec![ShardedTensor::new(&self.cuda, recipe, spec)?];
            let mut group = GatherGroup::new(&self.cuda, Arc::clone(comm), &pool, shards, true)?;
            let to = Arc::clone(&marks);
            group.watch(GatherWatch::new(move |stream: &Cuda, point| {
                let mark = (point, stream.mark()?);
                to.lock().unwrap_or_else(PoisonError::into_inner).push(mark);
                Ok(())
            }));
            Ok(group)
        };
        // Of large ones caches keep nothing anyhow.
        let count = (AHEAD / (shape.elements() * 2)).clamp(1, CALLS);
        let mut weights = (0..count).map(weight).collect::<Result<Vec<_>>>()?;
        let plan = weights[0].plan(0, Phase::Forward);
        let bytes = plan.map_or(0, GatherPlan::wire_bytes);
        let [from, to] = [self.cuda.alloc::<u8>(AHEAD)?, self.cuda.alloc(AHEAD)?];
        for _ in 0..WARM_UP + self.size.runs {
            self.together()?;
            // The device is busy until the host has given it all gathers, as in training.
            for _ in 0..CALLS {
                self.cuda.copy::<u8>(&from, 0..AHEAD, &to, 0)?;
            }
            for call in 0..CALLS {
                let weight = &mut weights[call % count];
                weight.unshard(Phase::Forward)?;
                self.cuda.copy::<u8>(&from, 0..BETWEEN, &to, 0)?;
                weight.reshard();
            }
        }
        let marks = marks.lock().unwrap_or_else(PoisonError::into_inner);
        let mut times = Vec::new();
        for pair in marks.windows(2) {
            if let [(GatherPoint::Begin, begin), (GatherPoint::End, end)] = pair {
                times.push(f64::from(begin.milliseconds_to(end)?));
            }
        }
        times.drain(..times.len().min(WARM_UP * CALLS));
        Ok((bytes, self.slowest(times)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lowp_format::Part;

    #[test]
    fn scales_are_gathered_after_codes() -> Result<()> {
        let recipe = with_scales()?;
        let rowwise = recipe.stored(Usage::ROWWISE);
        let parts: Vec<Part> = rowwise.iter().map(|spec| spec.key.part).collect();
        assert_eq!(parts, [Part::Data, Part::BlockScale]);
        assert_eq!(rowwise[0].bytes(Shape::new(64, COLS)), 64 * COLS);
        Ok(())
    }
}
