//! The rows of a bench as a table and as JSON.

use crate::columns::Columns;
use lowp_fsdp::bench::RankRows;
#[cfg(feature = "cuda")]
use lowp_kernels::bench::Timing;
use serde::Serialize;
use std::fmt;

#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    pub(super) operation: String,
    /// The recipe, or `-`.
    pub(super) recipe: String,
    /// Tensors and their shape.
    pub(super) shape: String,
    /// Median device time of one run.
    pub(super) microseconds: f64,
    /// Fastest and slowest run.
    pub(super) range_microseconds: [f64; 2],
    /// Inputs read and outputs written once per pass.
    pub(super) compulsory_bytes: usize,
    pub(super) gb_per_s: f64,
    /// The rate as a part of the copy's.
    pub(super) share: f64,
    pub(super) launches: usize,
    /// Median time of the calling thread for one run.
    pub(super) host_microseconds: f64,
}

#[cfg(feature = "cuda")]
impl Row {
    /// The row of `names` that took `timing`, next to a copy of this rate.
    pub(super) fn new(names: [String; 3], timing: &Timing, copy_gb_per_s: f64) -> Self {
        let [operation, recipe, shape] = names;
        let runs = &timing.runs_microseconds;
        let gb_per_s = timing.compulsory_bytes as f64 / timing.microseconds / 1e3;
        Self {
            operation,
            recipe,
            shape,
            microseconds: timing.microseconds,
            range_microseconds: [runs[0], runs[runs.len() - 1]],
            compulsory_bytes: timing.compulsory_bytes,
            gb_per_s,
            share: gb_per_s / copy_gb_per_s,
            launches: timing.launches,
            host_microseconds: timing.host_microseconds,
        }
    }
}

/// All rows, and what they are compared with.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    pub(super) device: String,
    /// Bytes read and written by a device-to-device copy of large buffers, in 10^9 per second.
    pub(super) copy_gb_per_s: f64,
    pub(super) rows: Vec<Row>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let header = [
            "operation",
            "recipe",
            "shape",
            "us",
            "GB",
            "GB/s",
            "share",
            "launches",
            "host us",
        ];
        let mut table = Columns::new(&header, &[0, 1, 2]);
        for row in &self.rows {
            table.row([
                row.operation.clone(),
                row.recipe.clone(),
                row.shape.clone(),
                format!("{:.1}", row.microseconds),
                format!("{:.3}", row.compulsory_bytes as f64 / 1e9),
                format!("{:.0}", row.gb_per_s),
                format!("{:.3}", row.share),
                row.launches.to_string(),
                format!("{:.1}", row.host_microseconds),
            ]);
        }
        write!(
            f,
            "{}: a copy moves {:.0} GB/s (read and written)\n\n{}",
            self.device,
            self.copy_gb_per_s,
            table.render()
        )
    }
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct RanksReport {
    pub(super) device: String,
    pub(super) ranks: usize,
    /// Who adds gradients in f32.
    pub(super) sums: &'static str,
    /// The least number of thread blocks that NCCL moves data with; 0 is its own choice.
    pub(super) min_ctas: u32,
    #[serde(flatten)]
    pub(super) measured: RankRows,
}

impl fmt::Display for RanksReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let header = [
            "operation",
            "recipe",
            "GB",
            "ms",
            "GB/s",
            "share",
            "host us/weight",
        ];
        let mut table = Columns::new(&header, &[0, 1]);
        for row in &self.measured.rows {
            let host = row.host_microseconds_per_weight;
            table.row([
                row.operation.clone(),
                row.recipe.clone(),
                format!("{:.3}", row.bytes as f64 / 1e9),
                format!("{:.3}", row.milliseconds),
                format!("{:.0}", row.gb_per_s),
                format!("{:.3}", row.share),
                host.map_or_else(|| "-".to_owned(), |host| format!("{host:.2}")),
            ]);
        }
        let blocks = match self.min_ctas {
            0 => "thread blocks as NCCL chooses".to_owned(),
            least => format!("at least {least} thread blocks"),
        };
        let exchange = match self.ranks {
            1 => String::new(),
            _ => format!("sums by {}, {blocks}; ", self.sums),
        };
        write!(
            f,
            "{} x {}, {:.3} billion parameters; {exchange}a copy moves {:.0} GB/s (read and written)\n\n{}",
            self.ranks,
            self.device,
            self.measured.parameters as f64 / 1e9,
            self.measured.copy_gb_per_s,
            table.render()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_one_line() {
        let row = Row {
            operation: "encode".to_owned(),
            recipe: "a recipe".to_owned(),
            shape: "2 x 4x4".to_owned(),
            microseconds: 2.0,
            range_microseconds: [1.0, 3.0],
            compulsory_bytes: 6_000_000,
            gb_per_s: 3000.0,
            share: 0.9,
            launches: 1,
            host_microseconds: 4.25,
        };
        let report = Report {
            device: "a device".to_owned(),
            copy_gb_per_s: 3333.0,
            rows: vec![row],
        };
        assert_eq!(
            report.to_string(),
            "a device: a copy moves 3333 GB/s (read and written)\n\n\
             operation  recipe    shape     us     GB  GB/s  share  launches  host us\n\
             encode     a recipe  2 x 4x4  2.0  0.006  3000  0.900         1      4.2\n"
        );
    }
}
