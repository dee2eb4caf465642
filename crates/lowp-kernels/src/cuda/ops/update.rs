//! Updates by the rules of optimizers, alone and fused with an encode.

use lowp_format::Orientation;

use super::super::handle::Cuda;
use super::super::module::Kernel;
use super::super::table::{
    Encode, FLAT_COLS, FLAT_TILE, Update, WIDE_COLS, WIDE_ROWS, code, path, update_rule,
};
use super::encode;
use super::job::{Job, Vector, aligned, bits, cdiv, of_one_kind, via_bf16};
use crate::{KernelError, Master, Rule, State, UpdateJob};

/// The kernels of AdamW and Adam with L2, then those of all other rules: of any jobs, and of one kind.
const KERNELS: [Kernel; 10] = [
    Kernel::new("lowp_adamw"),
    Kernel::new("lowp_adamw_wide"),
    Kernel::new("lowp_adamw_transposed"),
    Kernel::new("lowp_adamw_e8m0_fp4"),
    Kernel::new("lowp_adamw_other"),
    Kernel::new("lowp_update"),
    Kernel::new("lowp_update_wide"),
    Kernel::new("lowp_update_transposed"),
    Kernel::new("lowp_update_e8m0_fp4"),
    Kernel::new("lowp_update_other"),
];

fn rule_code(rule: Rule) -> u8 {
    match rule {
        Rule::AdamW => update_rule::ADAMW,
        Rule::AdamL2 => update_rule::ADAM_L2,
        Rule::Lion => update_rule::LION,
        Rule::Sgd => update_rule::SGD,
        Rule::SgdMomentum => update_rule::SGD_MOMENTUM,
        Rule::SgdNesterov => update_rule::SGD_NESTEROV,
        Rule::Muon | Rule::Moonlight => update_rule::MUON,
    }
}

fn is_adam(job: &Update) -> bool {
    matches!(job.rule, update_rule::ADAMW | update_rule::ADAM_L2)
}

pub(crate) fn job(backend: &Cuda, job: &UpdateJob<Cuda>) -> Result<Update, KernelError> {
    let master = match &job.master {
        Master::Values(values) => Vector::new(values).pointer,
        Master::Bf16Plus16 { parameter, .. } => parameter.pointer(),
    };
    let grad = Vector::new(&job.grad);
    let (mut states, mut state_codes) = ([0; Rule::MOST_STATES], [code::F32; Rule::MOST_STATES]);
    for (index, state) in job.states.iter().enumerate() {
        match state {
            State::Values(values) => {
                let values = Vector::new(values);
                (states[index], state_codes[index]) = (values.pointer, values.code);
            }
            State::Fp8(bytes) => states[index] = bytes.pointer(),
        }
    }
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
    Ok(Update {
        master,
        states,
        grad: grad.pointer,
        amax: amax
            .and_then(|amax| Some(amax.out.at(amax.tensor?)))
            .unwrap_or(0),
        lines: Orientation::ALL.map(|orientation| line(orientation).unwrap_or(0)),
        len: grad.len,
        group: u32::try_from(job.group).unwrap_or(u32::MAX),
        state_codes,
        grad_code: grad.code,
        rule: rule_code(job.rule),
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

impl Update {
    /// Fills the fields that follow from the others; `whole` says that four elements of each vector are aligned, from the first on.
    pub(super) fn lay_out_with(&mut self, whole: bool) {
        let flat = self.encode.passes == 0 && self.lines == [0; 2];
        let cols = if flat { FLAT_COLS } else { self.encode.cols };
        self.encode.source = self.master;
        self.encode.source_code = code::F32;
        self.encode.lay_out_with(whole && cols.is_multiple_of(4));
        if self.lines != [0; 2] && self.encode.path == path::FLAT {
            // Lines are of the matrix.
            self.encode.path = path::WIDE;
            [self.encode.tile_rows, self.encode.tile_cols] = [WIDE_ROWS, WIDE_COLS];
            self.encode.tiles_across = cdiv(self.encode.cols, WIDE_COLS.into());
        }
    }
}

impl Job for Update {
    const KERNELS: &'static [Kernel] = &KERNELS;
    const BACKWARDS: bool = true;

    fn launches(jobs: Vec<Self>) -> Vec<Vec<Self>> {
        let (adam, others) = jobs.into_iter().partition(is_adam);
        vec![adam, others]
    }

    fn kernel(jobs: &[Self]) -> Kernel {
        let adam = jobs.first().is_none_or(is_adam);
        let [all, wide, transposed, e8m0_fp4, other] =
            std::array::from_fn(|at| KERNELS[at + if adam { 0 } else { 5 }]);
        let kind = |job: &Self| {
            Some(match job.encode.path {
                path::WIDE | path::FLAT | path::TRANSPOSED if job.lines != [0; 2] => return None,
                path::WIDE | path::FLAT => wide,
                path::TRANSPOSED if job.encode.is_e8m0_fp4() => e8m0_fp4,
                path::TRANSPOSED => transposed,
                _ => other,
            })
        };
        of_one_kind(jobs, kind).unwrap_or(all)
    }

    fn lay_out(&mut self) {
        let chunk = |code: u8| bits(code) / 2;
        let mut states = self.states.iter().zip(&self.state_codes);
        let whole = aligned(self.master, 0, 16)
            && states.all(|(&state, &code)| aligned(state, 0, chunk(code)))
            && aligned(self.grad, 0, chunk(self.grad_code));
        self.lay_out_with(whole);
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
