//! `lowp recipes --device`: which products run for which recipe.

use crate::columns::Columns;
use crate::device::Device;
use anyhow::Result;
use lowp_format::{AnyRecipe, Recipe};
use lowp_gemm::table::{GemmKind, Pass};
use lowp_kernels::KernelCode;
use std::str::FromStr;

/// A device that is here, or a GPU by its architecture.
#[derive(Clone, Debug)]
pub(crate) enum On {
    Device(Device),
    Architecture(i32, i32),
}

impl FromStr for On {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some(number) = text.strip_prefix("sm_") else {
            return match text.parse() {
                Ok(device) => Ok(Self::Device(device)),
                Err(why) => Err(format!("{why}, or an architecture such as `sm_90`")),
            };
        };
        match number.parse::<i32>() {
            Ok(known) if (50..1000).contains(&known) && known.to_string() == number => {
                Ok(Self::Architecture(known / 10, known % 10))
            }
            _ => Err(format!(
                "sm_{number} is not an architecture; Hopper is sm_90"
            )),
        }
    }
}

/// A row per recipe: the products of its layers.
pub(super) fn table(on: &On) -> Result<String> {
    let capability = match on {
        On::Device(Device::Cpu) => None,
        On::Device(Device::Cuda(ordinal)) => Some(capability(*ordinal)?),
        On::Architecture(major, minor) => Some((*major, *minor)),
    };
    let mut table = Columns::new(
        &[
            "recipe",
            Pass::ALL[0].name(),
            Pass::ALL[1].name(),
            Pass::ALL[2].name(),
        ],
        &[0, 1, 2, 3],
    );
    for recipe in AnyRecipe::all() {
        let products = Pass::ALL.map(|pass| match capability {
            None => "f32".to_owned(),
            Some(capability) => {
                let kind = GemmKind::of_recipe(&recipe, pass, capability);
                kind.describe().to_owned()
            }
        });
        table.own_words([recipe.name().to_owned()].into_iter().chain(products));
    }
    let note = match capability {
        None => "The CPU multiplies decoded values.".to_owned(),
        Some((major, minor)) => {
            let narrow = if major >= 10 {
                "Products with scales per 32 and 16 have not run on such a GPU yet."
            } else {
                "Blackwell multiplies codes with scales per 32 and 16, too (`--device sm_100`)."
            };
            format!(
                "Compute capability {major}.{minor}. Codes are multiplied by cuBLASLt; operands of bf16 products that hold codes are \
                 decoded\nfirst. {narrow}\n{}",
                kernels(KernelCode::of((major, minor)))
            )
        }
    };
    Ok(format!("{}{note}\n", table.render()))
}

/// What runs lowp's kernels.
fn kernels(code: Option<KernelCode>) -> String {
    let Some(code) = code else {
        return "lowp's kernels need compute capability 8.0.".to_owned();
    };
    let made = if code.is_ptx() {
        "PTX, which the driver compiles: no code is of this family of GPUs"
    } else {
        "code of this family of GPUs"
    };
    let conversions = match (code.fp8, code.fp4) {
        (true, true) => "conversions to FP8, FP4 and E8M0 are instructions",
        (true, false) => "conversions to FP8 are instructions, those to FP4 and E8M0 are computed",
        (false, _) => "all conversions are computed",
    };
    format!(
        "lowp's kernels run as {} ({made}); {conversions}.",
        code.name
    )
}

#[cfg(feature = "cuda")]
fn capability(ordinal: usize) -> Result<(i32, i32)> {
    Ok(lowp_transformer::capability(&crate::device::open(
        ordinal,
    )?)?)
}

#[cfg(not(feature = "cuda"))]
fn capability(_: usize) -> Result<(i32, i32)> {
    crate::device::without_cuda()
}
