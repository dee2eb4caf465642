//! What each kernel needs of a multiprocessor, read from the compiler's report (`ptxas -v`).

use std::fmt;

/// Bytes of registers that a thread may write to memory and read again: little beside the hundreds of bytes that it moves.
const SPILLS: usize = 64;

/// Kernels that may spill more, on which architecture, and how much. Those of many ingredients have rare paths, and more blocks of threads
/// at a time pay for what these keep in memory: measured on an H200 (`target/gpu-pack/run.sh OUT peers`) for sm_90. sm_80 and sm_120 were not measured; the
/// code of sm_80 is like that of Hopper.
const MAY_SPILL: [(&str, &str, usize); 19] = [
    ("lowp_adamw", "sm_80", 512),
    ("lowp_adamw", "sm_90", 512),
    ("lowp_adamw_other", "sm_80", 192),
    ("lowp_adamw_other", "sm_90", 128),
    ("lowp_decode_bf16", "sm_80", 128),
    ("lowp_encode_blocks_bf16", "sm_80", 384),
    ("lowp_encode_blocks_bf16", "sm_90", 384),
    ("lowp_encode_mixed_bf16", "sm_80", 576),
    ("lowp_encode_mixed_bf16", "sm_90", 576),
    ("lowp_encode_mixed_f32", "sm_80", 384),
    ("lowp_encode_mixed_f32", "sm_90", 384),
    ("lowp_encode_ring_two_level_random", "sm_80", 128),
    ("lowp_encode_ring_two_level_random", "sm_90", 128),
    ("lowp_encode_ring_two_level_transformed", "sm_90", 128),
    ("lowp_flat_encode", "sm_80", 128),
    ("lowp_flat_encode", "sm_90", 128),
    ("lowp_round_two_level_random", "sm_90", 128),
    ("lowp_update_stored_other", "sm_80", 128),
    ("lowp_update_stored_wide", "sm_120f", 128),
];

/// What the report of a kernel begins with.
pub(super) const KERNEL: &str = "Compiling entry function '";

#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Row {
    unit: String,
    kernel: String,
    arch: String,
    registers: usize,
    stack: usize,
    spills: usize,
    shared: usize,
}

#[derive(Debug, Default)]
pub(super) struct Resources {
    rows: Vec<Row>,
}

impl Row {
    fn may_spill(&self) -> usize {
        let mut exempt = MAY_SPILL.iter();
        let own = (&*self.kernel, &*self.arch);
        let exempt = exempt.find(|(kernel, arch, _)| (*kernel, *arch) == own);
        exempt.map_or(SPILLS, |(.., most)| *most)
    }
}

impl Resources {
    pub(super) fn add(&mut self, unit: &str, log: &str) {
        let mut row: Option<Row> = None;
        for line in log.lines() {
            if let Some((_, rest)) = line.split_once(KERNEL) {
                let mut names = rest.split('\'');
                let kernel = names.next().unwrap_or_default().to_owned();
                let arch = names.nth(1).unwrap_or_default().to_owned();
                row = Some(Row {
                    unit: unit.to_owned(),
                    kernel,
                    arch,
                    ..Row::default()
                });
            } else if let Some(row) = &mut row {
                let number = |what| number_before(line, what);
                if line.contains("bytes stack frame") {
                    row.stack = number(" bytes stack frame");
                    row.spills = number(" bytes spill stores") + number(" bytes spill loads");
                } else if line.contains("Used ") {
                    row.registers = number(" registers");
                    row.shared = number(" bytes smem");
                    self.rows.push(row.clone());
                }
            }
        }
        self.rows.sort();
    }

    /// `kernel (arch)` of those that keep registers in memory.
    pub(super) fn spilling(&self) -> Vec<String> {
        self.rows
            .iter()
            .filter(|row| row.spills > row.may_spill())
            .map(|row| format!("{} ({})", row.kernel, row.arch))
            .collect()
    }
}

/// The number that stands before `what`; 0 if `what` is not there.
fn number_before(line: &str, what: &str) -> usize {
    line.split_once(what)
        .and_then(|(before, _)| before.rsplit(|c: char| !c.is_ascii_digit()).next())
        .and_then(|digits| digits.parse().ok())
        .unwrap_or(0)
}

impl fmt::Display for Resources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.rows.iter().map(|row| row.kernel.len()).max();
        let width = width.unwrap_or(0);
        writeln!(
            f,
            "{:width$}  {:8} {:>9} {:>6} {:>6} {:>7}",
            "kernel", "arch", "registers", "stack", "spills", "shared"
        )?;
        for row in &self.rows {
            let Row {
                kernel,
                arch,
                registers,
                stack,
                spills,
                shared,
                ..
            } = row;
            writeln!(
                f,
                "{kernel:width$}  {arch:8} {registers:9} {stack:6} {spills:6} {shared:7}"
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'encode_e4m3' for 'sm_90'
ptxas info    : Function properties for encode_e4m3
    16 bytes stack frame, 80 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16 bytes cumulative stack size, 4224 bytes smem
ptxas info    : Compile time = 20.1 ms
ptxas info    : Compiling entry function 'amax' for 'sm_100f'
ptxas info    : Function properties for amax
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers, 380 bytes cmem[0]
";

    #[test]
    fn the_report_is_read() {
        let mut table = Resources::default();
        table.add("encode", LOG);
        let row = |kernel: &str, arch: &str, [registers, stack, spills, shared]: [usize; 4]| Row {
            unit: "encode".into(),
            kernel: kernel.into(),
            arch: arch.into(),
            registers,
            stack,
            spills,
            shared,
        };
        assert_eq!(
            table.rows,
            [
                row("amax", "sm_100f", [12, 0, 0, 0]),
                row("encode_e4m3", "sm_90", [40, 16, 120, 4224]),
            ]
        );
    }

    #[test]
    fn a_kernel_that_spills_is_named() {
        let mut table = Resources::default();
        table.add("encode", LOG);
        assert_eq!(table.spilling(), ["encode_e4m3 (sm_90)"]);
        let mut few = Resources::default();
        few.add("encode", &LOG.replace("80 bytes", "24 bytes"));
        assert_eq!(few.spilling(), [""; 0]);
        // What an architecture may is no reason for another.
        let exempt = LOG.replace("encode_e4m3", "lowp_adamw_other");
        for (arch, spilling) in [
            ("sm_90", vec![]),
            ("sm_100f", vec!["lowp_adamw_other (sm_100f)"]),
        ] {
            let mut table = Resources::default();
            table.add("adamw", &exempt.replace("sm_90", arch));
            assert_eq!(table.spilling(), spilling);
        }
        let mut more = Resources::default();
        more.add("adamw", &exempt.replace("80 bytes", "100 bytes"));
        assert_eq!(more.spilling(), ["lowp_adamw_other (sm_90)"]);
    }
}
