//! AdamW, alone and fused with an encode.

use lowp_format::Orientation;

use super::super::handle::Cuda;
use super::super::module::Kernel;
use super::super::table::{Adamw, Encode, FLAT_COLS, FLAT_TILE, WIDE_COLS, WIDE_ROWS, code, path};
use super::encode;
use super::job::{Job, aligned, bits, cdiv, of_one_kind, source, via_bf16};
use crate::{AdamMode, AdamwJob, KernelError};

const ADAMW: Kernel = Kernel::new("lowp_adamw");
const WIDE: Kernel = Kernel::new("lowp_adamw_wide");
const TRANSPOSED: Kernel = Kernel::new("lowp_adamw_transposed");
const E8M0_FP4: Kernel = Kernel::new("lowp_adamw_e8m0_fp4");
const OTHER: Kernel = Kernel::new("lowp_adamw_other");

pub(crate) fn job(backend: &Cuda, job: &AdamwJob<Cuda>) -> Result<Adamw, KernelError> {
    let (grad, grad_code, len) = source(&job.grad);
    let [(exp_avg, exp_avg_code, _), (exp_avg_sq, exp_avg_sq_code, _)] =
        job.moments.values().map(source);
    // The shape of amaxes was checked where lines have some.
    let amax = job.amax.as_ref();
    let lined = amax.filter(|amax| amax.blocks().next().is_some());
    let encode = match &job.encode {
        None => {
            let shape = lined.map(|amax| amax.shape);
            Encode {
                rows: shape.map_or(0, |shape| shape.rows as u64),
                cols: shape.map_or(0, |shape| shape.cols as u64),
                via_bf16: via_bf16(job.source_rounding),
                ..Encode::default()
            }
        }
        Some(job) => one_row(encode::jobs(backend, job)?)?,
    };
    let line = |orientation: Orientation| {
        let amax = lined.filter(|amax| amax.shape.elements() > 0)?;
        amax.lines[orientation as usize].map(|start| amax.out.at(start))
    };
    Ok(Adamw {
        master: job.master.pointer(),
        exp_avg,
        exp_avg_sq,
        grad,
        amax: amax
            .and_then(|amax| Some(amax.out.at(amax.tensor?)))
            .unwrap_or(0),
        lines: Orientation::ALL.map(|orientation| line(orientation).unwrap_or(0)),
        len,
        group: u32::try_from(job.group).unwrap_or(u32::MAX),
        exp_avg_code,
        exp_avg_sq_code,
        grad_code,
        l2: u8::from(job.mode == AdamMode::L2),
        encode,
    })
}

/// The update is done once, so one row must fill every target: a second target of one part and order
/// becomes a pass of its own.
fn one_row(rows: Vec<Encode>) -> Result<Encode, KernelError> {
    let too_many = || KernelError::FusedTargets;
    let (first, others) = rows.split_first().ok_or_else(too_many)?;
    let mut row = *first;
    for other in others {
        if other.outer.iter().any(|outer| outer.to != 0) {
            return Err(too_many());
        }
        for pass in &other.pass[..usize::from(other.passes)] {
            let free = row.pass.get_mut(usize::from(row.passes));
            *free.ok_or_else(too_many)? = *pass;
            row.passes += 1;
        }
    }
    Ok(row)
}

impl Job for Adamw {
    const KERNELS: &'static [Kernel] = &[ADAMW, WIDE, TRANSPOSED, E8M0_FP4, OTHER];
    const BACKWARDS: bool = true;

    fn kernel(jobs: &[Self]) -> Kernel {
        let kind = |job: &Self| {
            Some(match job.encode.path {
                path::WIDE | path::FLAT | path::TRANSPOSED if job.lines != [0; 2] => return None,
                path::WIDE | path::FLAT => WIDE,
                path::TRANSPOSED if job.encode.is_e8m0_fp4() => E8M0_FP4,
                path::TRANSPOSED => TRANSPOSED,
                _ => OTHER,
            })
        };
        of_one_kind(jobs, kind).unwrap_or(ADAMW)
    }

    fn lay_out(&mut self) {
        let chunk = |code: u8| bits(code) / 2;
        let flat = self.encode.passes == 0 && self.lines == [0; 2];
        let cols = if flat { FLAT_COLS } else { self.encode.cols };
        let source = cols.is_multiple_of(4)
            && aligned(self.master, 0, 16)
            && aligned(self.exp_avg, 0, chunk(self.exp_avg_code))
            && aligned(self.exp_avg_sq, 0, chunk(self.exp_avg_sq_code))
            && aligned(self.grad, 0, chunk(self.grad_code));
        self.encode.source = self.master;
        self.encode.source_code = code::F32;
        self.encode.lay_out_with(source);
        if self.lines != [0; 2] && self.encode.path == path::FLAT {
            // Lines are of the matrix.
            self.encode.path = path::WIDE;
            [self.encode.tile_rows, self.encode.tile_cols] = [WIDE_ROWS, WIDE_COLS];
            self.encode.tiles_across = cdiv(self.encode.cols, WIDE_COLS.into());
        }
    }

    fn tiles(&self) -> u64 {
        let encode = &self.encode;
        if encode.path == path::FLAT {
            let writes = encode.outer.iter().any(|outer| outer.to != 0);
            cdiv(self.len, FLAT_TILE).max(u64::from(writes))
        } else if encode.passes == 0 {
            cdiv(encode.rows, WIDE_ROWS.into()) * encode.tiles_across
        } else {
            self.encode.tiles()
        }
    }
}
