//! Updates of states in fp8, and of masters in bf16 or in two halves, which have kernels of their own.

use lowp_format::ShardTiles;

use super::super::handle::Cuda;
use super::super::module::Kernel;
use super::super::table::{Amax, Encode, FLAT_COLS, STATE_BLOCK, StoredUpdate, code, path, stored};
use super::job::{Job, aligned};
use super::{amax, encode, update};
use crate::{AmaxJob, KernelError, Master, MasterDtype, StateDtype, UpdateAmax, UpdateJob};

/// By the path of the jobs, which is one for each launch; the last one is of masters in halves, which have one path.
const KERNELS: [Kernel; 4] = [
    Kernel::new("lowp_update_stored_wide"),
    Kernel::new("lowp_update_stored_transposed"),
    Kernel::new("lowp_update_stored_other"),
    Kernel::new("lowp_update_halves"),
];

/// What one plan launches: updates, then amaxes of lines and encodes of those whose tiles would cut blocks of states.
#[derive(Default)]
pub(crate) struct StoredRows {
    pub(crate) updates: Vec<StoredUpdate>,
    pub(crate) amaxes: Vec<Amax>,
    pub(crate) encodes: Vec<Encode>,
}

/// Whether `job` has a row here.
pub(crate) fn takes(job: &UpdateJob<Cuda>) -> bool {
    job.is_stochastic() || job.master.dtype() == MasterDtype::Bf16Plus16
}

/// The rows of all `jobs` that are taken.
pub(crate) fn rows<'j>(
    backend: &Cuda,
    jobs: impl Iterator<Item = &'j UpdateJob<Cuda>>,
) -> Result<StoredRows, KernelError> {
    let mut rows = StoredRows::default();
    for job in jobs {
        let whole = row(backend, job)?;
        if !whole.cuts_blocks() {
            rows.updates.push(whole);
            continue;
        }
        // The update is of runs of elements, and what follows reads its masters.
        let tensor = |amax: &UpdateAmax<Cuda>| UpdateAmax {
            lines: [None; 2],
            ..amax.clone()
        };
        let alone = UpdateJob {
            amax: job.amax.as_ref().map(tensor),
            encode: None,
            ..job.clone()
        };
        rows.updates.push(row(backend, &alone)?);
        rows.amaxes.extend(amax::jobs(&lines(job)));
        if let Some(job) = &job.encode {
            rows.encodes.extend(encode::jobs(backend, job)?);
        }
    }
    Ok(rows)
}

/// The amaxes of the lines of a master.
fn lines(job: &UpdateJob<Cuda>) -> Vec<AmaxJob<Cuda>> {
    let lined = job.amax.iter().zip(job.master.values());
    let lined = lined.map(|(amax, master)| AmaxJob {
        shape: amax.shape,
        start: 0,
        source: master.clone(),
        source_rounding: job.source_rounding,
        out: amax.out.clone(),
        tensor: None,
        blocks: amax.blocks().collect(),
        hadamard: false,
    });
    lined.filter(|job| !job.blocks.is_empty()).collect()
}

fn row(backend: &Cuda, job: &UpdateJob<Cuda>) -> Result<StoredUpdate, KernelError> {
    let random = job.random.filter(|_| job.is_stochastic());
    let random = random.unwrap_or_default();
    let tiles = random.tiles.filter(|tiles| !tiles.are_in_order());
    let of_tiles = |number: fn(&ShardTiles) -> usize| tiles.as_ref().map_or(0, number) as u64;
    let mut states = [stored::F32; 2];
    for (to, state) in states.iter_mut().zip(&job.states) {
        *to = stored_as(state.dtype());
    }
    Ok(StoredUpdate {
        update: update::job(backend, job)?,
        seed: random.seed,
        stream: random.stream,
        first: random.first as u64,
        tile_rows: of_tiles(|tiles| tiles.tile().rows),
        tile_cols: of_tiles(|tiles| tiles.tile().cols),
        tiles_across: of_tiles(ShardTiles::across),
        master: match job.master.dtype() {
            MasterDtype::F32 => stored::F32,
            MasterDtype::Bf16 => stored::BF16,
            MasterDtype::Bf16Plus16 => stored::BF16_PLUS_16,
        },
        remainder: remainder(job)?,
        states,
        ..StoredUpdate::default()
    })
}

/// Where the remainders of masters in halves are. Kernels read entries of two bytes.
fn remainder(job: &UpdateJob<Cuda>) -> Result<u64, KernelError> {
    let Master::Bf16Plus16 {
        parameter,
        remainder,
    } = &job.master
    else {
        return Ok(0);
    };
    for pointer in [parameter.pointer(), remainder.pointer()] {
        if !aligned(pointer, 0, 2) {
            let size = size_of::<u16>();
            return Err(KernelError::Misaligned { pointer, size });
        }
    }
    Ok(remainder.pointer())
}

fn stored_as(dtype: StateDtype) -> u8 {
    match dtype {
        StateDtype::F32 => stored::F32,
        StateDtype::Bf16 => stored::BF16,
        StateDtype::Fp8 => stored::FP8,
    }
}

/// Bytes of four elements.
fn chunk(stored: u8) -> u64 {
    match stored {
        stored::F32 => 16,
        stored::BF16 | stored::BF16_PLUS_16 => 8,
        _ => 4,
    }
}

impl StoredUpdate {
    /// Whether a tile would have a part of a block of states.
    fn cuts_blocks(mut self) -> bool {
        self.lay_out();
        let encode = &self.update.encode;
        let sides = [encode.cols, encode.tile_cols.into()];
        let whole = sides.map(|side| side.is_multiple_of(STATE_BLOCK.into()));
        self.states.contains(&stored::FP8) && encode.path != path::FLAT && whole != [true; 2]
    }

    /// The kernel of a job that was laid out.
    fn kernel_of(&self) -> Kernel {
        let [wide, transposed, other, halves] = KERNELS;
        match self.update.encode.path {
            _ if self.master == stored::BF16_PLUS_16 => halves,
            path::WIDE | path::FLAT => wide,
            path::TRANSPOSED => transposed,
            _ => other,
        }
    }
}

impl Job for StoredUpdate {
    const KERNELS: &'static [Kernel] = &KERNELS;
    const BACKWARDS: bool = true;

    fn launches(mut jobs: Vec<Self>) -> Vec<Vec<Self>> {
        jobs.iter_mut().for_each(Job::lay_out);
        let of = |kernel| jobs.iter().filter(move |job| job.kernel_of() == kernel);
        KERNELS.map(|kernel| of(kernel).copied().collect()).into()
    }

    fn kernel(jobs: &[Self]) -> Kernel {
        jobs.first().map_or(KERNELS[0], Self::kernel_of)
    }

    fn lay_out(&mut self) {
        let Self { update, states, .. } = self;
        let grad = match update.grad_code {
            code::BF16 => stored::BF16,
            _ => stored::F32,
        };
        let vectors = [
            (update.master, self.master),
            (self.remainder, self.master),
            (update.states[0], states[0]),
            (update.states[1], states[1]),
            (update.grad, grad),
        ];
        let vectors = vectors.iter();
        // Four elements have the random words of one counter, and lanes of a row share a counter of 32, which follow each other in the matrix.
        let run = if self.tile_cols == 0 { 4 } else { 32 };
        let flat = update.encode.passes == 0 && update.lines == [0; 2];
        let cols = if flat { FLAT_COLS } else { update.encode.cols };
        let counters = [self.first, self.tile_cols, cols];
        let counters = counters.iter().all(|at| at.is_multiple_of(run));
        let aligned_fours = vectors.fold(true, |all, &(at, stored)| {
            all && aligned(at, 0, chunk(stored))
        });
        // Encodes that read a master in bf16 again load eight of its elements at a time.
        let aligned_eights = self.master != stored::BF16
            || (aligned(update.master, 0, 16) && cols.is_multiple_of(8));
        let whole = counters && aligned_fours && aligned_eights;
        // Encodes in the pass of the update are of the values in its registers, which are binary32.
        update.lay_out_with(whole);
        if self.master == stored::BF16 {
            update.encode.source_code = code::BF16;
        }
    }

    fn tiles(&self) -> u64 {
        self.update.tiles()
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::table::{Ingredients, Pass, Update, rule, vector};
    use super::*;

    /// A matrix of eight rows with FP8 codes of a tensor scale, in rows or also transposed; without any where `encoded` is false.
    fn job(cols: u64, [encoded, transposed]: [bool; 2], states: [u8; 2]) -> StoredUpdate {
        let made = Ingredients {
            element: code::E4M3,
            rule: rule::TENSOR,
            ..Ingredients::default()
        };
        let pass = Pass {
            ingredients: made,
            data: [16, if transposed { 16 } else { 0 }],
            ..Pass::default()
        };
        let [rows, cols, passes] = match encoded {
            true => [8, cols, 1],
            false => [0; 3],
        };
        StoredUpdate {
            update: Update {
                len: 8 * cols,
                encode: Encode {
                    rows,
                    cols,
                    pass: [pass, Pass::default()],
                    passes: passes as u8,
                    ..Encode::default()
                },
                ..Update::default()
            },
            states,
            ..StoredUpdate::default()
        }
    }

    #[test]
    fn only_blocks_of_codes_are_cut() {
        let [f32, fp8] = [[stored::F32; 2], [stored::FP8, stored::F32]];
        for cols in 1..200 {
            for order in [[true, false], [true, true], [false; 2]] {
                let cuts = order[0] && cols % 32 != 0;
                assert_eq!(job(cols, order, fp8).cuts_blocks(), cuts, "{cols}");
                assert!(!job(cols, order, f32).cuts_blocks(), "{cols}");
            }
        }
    }

    #[test]
    fn a_launch_has_jobs_of_one_path() {
        let orders = [[true, true], [false; 2], [true, false], [true, true]];
        let jobs = orders.map(|order| job(64, order, [stored::FP8; 2]));
        let launches = StoredUpdate::launches(jobs.into());
        let found: Vec<_> = launches
            .iter()
            .map(|jobs| (StoredUpdate::kernel(jobs).name, jobs.len()))
            .collect();
        let [wide, transposed, ..] = KERNELS.map(|kernel| kernel.name);
        // None has no launch.
        assert_eq!(found, [(wide, 2), (transposed, 2), (wide, 0), (wide, 0)]);
    }

    #[test]
    fn masters_in_bf16_are_vectors_of_eight() {
        for (at, cols, whole) in [
            (0, 64, true),
            (8, 64, false),
            (16, 64, true),
            (0, 36, false),
            (0, 40, true),
        ] {
            for (master, whole) in [
                (stored::BF16, whole),
                (stored::F32, at % 16 == 0 && cols % 4 == 0),
            ] {
                let mut job = job(cols, [true, false], [stored::F32; 2]);
                (job.master, job.update.master) = (master, at);
                job.lay_out();
                let found = job.update.encode.vector & vector::SOURCE != 0;
                assert_eq!(found, whole, "{at}, {cols}, {master}");
            }
        }
    }

    /// Four elements have the words of one counter, and in shard tiles 32 of a row those of consecutive ones.
    #[test]
    fn vectors_have_whole_counters() {
        for (first, tile_cols, whole) in [
            (0, 0, true),
            (4, 0, true),
            (5, 0, false),
            (64, 64, true),
            (64, 48, false),
            (16, 64, false),
        ] {
            let mut job = job(64, [true, false], [stored::F32; 2]);
            (job.first, job.tile_cols) = (first, tile_cols);
            job.lay_out();
            let found = job.update.encode.vector & vector::SOURCE != 0;
            assert_eq!(found, whole, "{first}, {tile_cols}");
        }
    }
}
