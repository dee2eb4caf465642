//! The conversion instructions of each target, read from what the compiler makes of `lowp/codec.cuh`: it computes what it believes a
//! target not to have, so a wrong belief shows in the speed alone.

use std::fs;
use std::path::Path;

use anyhow::{Result, anyhow, ensure};

use crate::command::target_dir;
use lowp_nvcc::{Arch, Nvcc};

/// Every conversion that has an instruction somewhere.
const PROBE: &str = "\
#include <lowp/codec.cuh>
using namespace lowp;
extern \"C\" __global__ void probe(const float* x, uint32_t* y) {
  y[0] = E4m3::pair(x[0], x[1]);
  y[1] = E5m2::pair(x[0], x[1]);
  y[2] = E2m1::pair(x[0], x[1]);
  y[3] = E2m1::eight([&](int i) { return x[i]; });
}
";

/// The instructions, to nearest even and saturating.
const INSTRUCTIONS: [&str; 3] = ["e4m3x2", "e5m2x2", "e2m1x2"];

/// Those that a target has: FP8 from Ada on, FP4 in the families of Blackwell. PTX for every later device is of no family.
fn expected(target: &str) -> &'static [&'static str] {
    match target {
        "compute_80" => &[],
        "compute_100f" | "compute_120f" => &INSTRUCTIONS,
        _ => &INSTRUCTIONS[..2],
    }
}

fn found(ptx: &str) -> Vec<&'static str> {
    let has = |name: &&str| ptx.contains(&format!("cvt.rn.satfinite.{name}.f32"));
    INSTRUCTIONS.into_iter().filter(has).collect()
}

fn compare(target: &str, ptx: &str) -> Result<()> {
    let (found, expected) = (found(ptx), expected(target));
    ensure!(
        found == expected,
        "the kernels convert by [{}] on {target}, and it has [{}]; mend LOWP_FP8_CVT and LOWP_FP4_CVT in lowp/policy.cuh",
        found.join(", "),
        expected.join(", "),
    );
    Ok(())
}

/// Compiles the probe for every target of `archs`, with the headers below `sources`.
pub(super) fn check(nvcc: &Nvcc, sources: &Path, archs: &[Arch]) -> Result<()> {
    let folder = target_dir()?.join("cuda-conversions");
    fs::create_dir_all(&folder)?;
    let probe = folder.join("probe.cu");
    fs::write(&probe, PROBE)?;
    for target in archs.iter().flat_map(Arch::targets) {
        let ptx = nvcc.ptx(&probe, &sources.join("include"), target, &folder);
        compare(target, &ptx.map_err(|why| anyhow!("{why}"))?)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PTX: &str = "{ .reg .b8 c; cvt.rn.satfinite.e2m1x2.f32 c, %f1, %f2; cvt.u32.u8 %r1, c; }\n\
                       cvt.rn.satfinite.e4m3x2.f32 %rs1, %f2, %f1;\n\
                       cvt.rn.satfinite.e5m2x2.f32 %rs2, %f2, %f1;\n";

    #[test]
    fn a_target_without_its_instruction_is_named() {
        for target in ["compute_100f", "compute_120f"] {
            assert!(compare(target, PTX).is_ok());
            let computed = PTX.replace("e2m1x2", "f16x2");
            let error = compare(target, &computed).unwrap_err().to_string();
            assert!(
                error.contains(target) && error.contains("LOWP_FP4_CVT"),
                "{error}"
            );
        }
        assert!(compare("compute_90", PTX).is_err());
        assert!(compare("compute_80", "add.rn.f32").is_ok());
    }
}
