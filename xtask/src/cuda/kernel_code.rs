//! The conversion instructions of each kernel, read from its code for Blackwell: where a kernel computes what the device has an
//! instruction for, only the speed shows it.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};
use lowp_nvcc::Arch;

use crate::command::answer;

/// Instructions that convert from f32 to E2M1 and, rounding up, to E8M0.
const INSTRUCTIONS: [&str; 2] = ["F2FP.SATFINITE.E2M1.", "F2FP.SATFINITE.E8."];

/// Kernels that encode codes of E2M1, and scales of E8M0.
const KERNELS: [&[&str]; 2] = [
    &[
        "lowp_adamw",
        "lowp_adamw_e8m0_fp4",
        "lowp_adamw_other",
        "lowp_adamw_transposed",
        "lowp_encode",
        "lowp_encode_e8m0_fp4_f32",
        "lowp_encode_mixed_bf16",
        "lowp_encode_mixed_f32",
        "lowp_encode_ring_e8m0_fp4",
        "lowp_encode_ring_e8m0_fp4_fp8",
        "lowp_encode_ring_f32_e8m0_fp4_fp8",
        "lowp_encode_ring_f32_two_level_e8m0",
        "lowp_encode_ring_two_level",
        "lowp_encode_ring_two_level_e8m0",
        "lowp_encode_ring_two_level_square",
        "lowp_encode_ring_two_level_transformed",
        "lowp_encode_transposed_bf16",
        "lowp_encode_transposed_f32",
        "lowp_flat_encode",
        "lowp_round",
        "lowp_round_two_level",
        "lowp_update",
        "lowp_update_e8m0_fp4",
        "lowp_update_other",
        "lowp_update_stored_other",
        "lowp_update_stored_transposed",
        "lowp_update_transposed",
    ],
    &[
        "lowp_adamw",
        "lowp_adamw_e8m0_fp4",
        "lowp_adamw_other",
        "lowp_adamw_wide",
        "lowp_encode",
        "lowp_encode_e8m0_fp4_f32",
        "lowp_encode_mixed_bf16",
        "lowp_encode_mixed_f32",
        "lowp_encode_ring_e8m0_fp4_fp8",
        "lowp_encode_ring_e8m0_fp8",
        "lowp_encode_ring_f32_e8m0_fp4_fp8",
        "lowp_encode_ring_f32_two_level_e8m0",
        "lowp_encode_ring_two_level_e8m0",
        "lowp_encode_stream_bf16",
        "lowp_encode_stream_f32",
        "lowp_encode_wide_bf16",
        "lowp_flat_encode",
        "lowp_round",
        "lowp_round_e8m0_fp8",
        "lowp_update",
        "lowp_update_e8m0_fp4",
        "lowp_update_other",
        "lowp_update_stored_other",
        "lowp_update_stored_transposed",
        "lowp_update_stored_wide",
        "lowp_update_wide",
    ],
];

/// Rounds at random, which no instruction does. Its instructions belong to the path for values that are not finite, which all rings have.
const CAREFUL: &str = "lowp_encode_ring_two_level_random";

/// How many of the instructions a kernel has.
type Counts = BTreeMap<String, [usize; 2]>;

/// Adds up what `cuobjdump -sass` prints of code for one architecture.
fn count(text: &str) -> Counts {
    let mut kernels = Counts::new();
    let mut kernel = String::new();
    for line in text.lines() {
        if let Some((_, name)) = line.split_once("Function : ") {
            kernel = name.trim().to_owned();
            kernels.insert(kernel.clone(), [0; 2]);
        } else if let Some(counts) = kernels.get_mut(&kernel) {
            for (count, name) in counts.iter_mut().zip(INSTRUCTIONS) {
                *count += usize::from(line.contains(name));
            }
        }
    }
    kernels
}

fn compare(target: &str, counts: &Counts) -> Result<()> {
    let of = |kernel: &str| counts.get(kernel).copied().unwrap_or_default();
    for (at, (kernels, name)) in KERNELS.iter().zip(INSTRUCTIONS).enumerate() {
        let without = kernels.iter().filter(|kernel| {
            let of_ring = kernel.starts_with("lowp_encode_ring");
            of(kernel)[at] <= if of_ring { of(CAREFUL)[at] } else { 0 }
        });
        let without: Vec<_> = without.copied().collect();
        ensure!(
            without.is_empty(),
            "{target} has {name}, and these kernels compute what it does: {}; mend lowp/codec.cuh or lowp/fp4.cuh, or the list in \
             xtask/src/cuda/kernel_code.rs",
            without.join(", ")
        );
    }
    Ok(())
}

/// Reads the code for families of `archs` in the fat binaries of `units` in `folder`; `programs` has cuobjdump and nvdisasm.
pub(super) fn check(
    programs: &Path,
    folder: &Path,
    units: &[String],
    archs: &[Arch],
) -> Result<()> {
    let families = archs.iter().filter(|arch| arch.is_family());
    let code = families.flat_map(Arch::code);
    for target in code.filter(|code| code.starts_with("sm_")) {
        let mut counts = Counts::new();
        for unit in units {
            let mut command = Command::new(programs.join("cuobjdump"));
            command.args(["-sass", "-arch", target.trim_end_matches('f')]);
            command
                .arg(folder.join(unit))
                .env("NVDISASM_PATH", programs);
            counts.extend(count(&String::from_utf8_lossy(&answer(command)?)));
        }
        ensure!(
            !counts.is_empty(),
            "cuobjdump finds no code for {target} in {}",
            folder.display()
        );
        compare(target, &counts)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed() -> String {
        let code = |kernel: &str, lines: usize, of: &str| {
            let line = format!("        /*0400*/   {of}F32.PACK_AB_MERGE_C R5, R6, R7, RZ ;\n");
            format!("\t\tFunction : {kernel}\n{}", line.repeat(lines))
        };
        let mut text = String::new();
        for kernel in KERNELS[0].iter().chain(KERNELS[1]) {
            if !text.contains(&format!("{kernel}\n")) {
                text += &code(kernel, 2, INSTRUCTIONS[0]);
                text += &code("", 2, INSTRUCTIONS[1]).replace("\t\tFunction : \n", "");
            }
        }
        text + &code(CAREFUL, 1, INSTRUCTIONS[0])
    }

    #[test]
    fn a_kernel_that_computes_its_codes_is_named() {
        assert!(compare("sm_100f", &count(&printed())).is_ok());
        for kernel in ["lowp_adamw", "lowp_encode_ring_two_level"] {
            let mut counts = count(&printed());
            // As many as the path that is not its own.
            counts.insert(kernel.to_owned(), [usize::from(kernel.contains("ring")), 2]);
            let error = compare("sm_100f", &counts).unwrap_err().to_string();
            assert!(error.contains(": ") && error.contains(kernel), "{error}");
            assert!(error.contains("E2M1"), "{error}");
        }
    }
}
