//! Optimizer steps over masters and states in page-locked memory of the host, next to plain copies of the same bytes.

use lowp_format::{AnyRecipe, Recipe};
use lowp_kernels::{Backend, Cuda, CudaBuffer};

use super::rank::{OFFLOADED, Rank, parameters};
use super::{RankRow, Result};
use crate::cost::master_passes;

/// Bytes of one plain copy.
const COPY: usize = 256 << 20;

/// Bytes of masters and moments of all ranks, in a model whose sides are divided by `shrink`.
pub fn offloaded_bytes(shrink: usize) -> usize {
    3 * size_of::<f32>() * parameters(shrink)
}

/// Copies in one direction, by a stream of their own.
struct BusCopies {
    stream: Cuda,
    from: CudaBuffer<u8>,
    to: CudaBuffer<u8>,
    bytes: usize,
}

impl Rank<'_> {
    /// Plain copies of the bytes that a step moves over the bus, in both directions at once, then the step.
    pub(super) fn offloaded_step(&self, recipe: AnyRecipe) -> Result<[RankRow; 2]> {
        self.say(&format!("{OFFLOADED}  {}", recipe.name()));
        let mut stepped = self.stepped(recipe)?;
        let mut outcomes = Vec::new();
        let milliseconds = self.timed_by(1, || {
            outcomes.push(stepped.step()?);
            Ok(())
        })?;
        drop(outcomes);
        let masters = size_of::<f32>() * stepped.elements;
        drop(stepped);
        // Two moments, and a master as often as the step passes over it.
        let passes = master_passes(&recipe, false) as usize;
        let (read, written) = ((2 + passes) * masters, 3 * masters);
        let raw = self.both_ways(read, written)?;
        let row = |operation: &str, milliseconds: f64| RankRow {
            operation: operation.to_owned(),
            recipe: recipe.name().to_owned(),
            bytes: read + written,
            milliseconds,
            gb_per_s: (read + written) as f64 / milliseconds / 1e6,
            share: raw / milliseconds,
            host_microseconds_per_weight: None,
        };
        Ok([
            row("copies both ways of the same bytes", raw),
            row(OFFLOADED, milliseconds),
        ])
    }

    /// Milliseconds of copies of `read` bytes from page-locked memory and of `written` bytes to it, at once.
    fn both_ways(&self, read: usize, written: usize) -> Result<f64> {
        let host = self.cuda.with_host_buffers();
        let way = |from: &Cuda, to: &Cuda, bytes| -> Result<BusCopies> {
            Ok(BusCopies {
                stream: self.cuda.fork()?,
                from: from.alloc(COPY)?,
                to: to.alloc(COPY)?,
                bytes,
            })
        };
        let ways = [
            way(&host, &self.cuda, read)?,
            way(&self.cuda, &host, written)?,
        ];
        self.timed_by(1, || {
            for way in &ways {
                way.stream.wait_for(&self.cuda)?;
            }
            for at in (0..read.max(written)).step_by(COPY) {
                for way in &ways {
                    let len = COPY.min(way.bytes.saturating_sub(at));
                    way.stream.copy::<u8>(&way.from, 0..len, &way.to, 0)?;
                }
            }
            for way in &ways {
                self.cuda.wait_for(&way.stream)?;
            }
            Ok(())
        })
    }
}
