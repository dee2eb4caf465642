//! [`Remedy`]: what to do about an input that cannot be taken.

use std::fmt;

/// What to do about an input that cannot be taken. A program with commands and options for it says so in their names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// Quantize the model, or import that of another program.
    Quantize,
    /// Quantize it for both orientations, or decode another one.
    QuantizeForBoth,
    /// Give something that is quantized.
    GiveQuantized,
    /// Give the model before it was quantized, or decode it.
    Dequantize,
    /// Give the model before it was quantized, or import it.
    Import,
    /// Give the model that was quantized, for comparison.
    GiveReference,
    /// Give a whole model, or decode it with the program that wrote it.
    GiveWhole,
    /// Gather the rank files.
    Unshard,
    /// Give the files of all ranks.
    GiveRankFiles {
        /// What the first of them is called.
        first: String,
    },
    /// Keep the files of one world.
    KeepOneWorld,
    /// Export the checkpoint.
    ExportCheckpoint,
    /// Give the checkpoint that the file is a part of.
    GiveCheckpoint,
    /// Give the checkpoint of a model.
    GiveTrained,
    /// Export values, or an earlier step.
    ExportValues,
    /// Choose one of these targets.
    Target {
        /// What they are called.
        targets: Vec<&'static str>,
    },
    /// Choose this target, or quantize the weight for both orientations.
    TargetOrBoth {
        /// What it is called.
        target: &'static str,
    },
    /// Choose one of these targets, or leave the weight as it is when the model is quantized.
    TargetOrLeaveOut {
        /// What they are called.
        targets: Vec<&'static str>,
    },
    /// Leave the weight as it is when the model is quantized.
    LeaveOut,
    /// Quantize fewer tensors.
    QuantizeFewer,
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Quantize => f.write_str(
                "quantize the model first, or import it if another program quantized it",
            ),
            Self::QuantizeForBoth => {
                f.write_str("decode the other orientation, or quantize it for both")
            }
            Self::GiveQuantized => f.write_str("give a model that is quantized"),
            Self::Dequantize => {
                f.write_str("give the model that it was quantized from, or decode it first")
            }
            Self::Import => {
                f.write_str("give the model that it was quantized from, or import it first")
            }
            Self::GiveReference => f.write_str("give the model that was quantized"),
            Self::GiveWhole => {
                f.write_str("give the whole model, or decode it with the program that wrote it")
            }
            Self::Unshard => f.write_str("gather the folder first"),
            Self::GiveRankFiles { first } => write!(f, "give a folder of them ({first}, ..)"),
            Self::KeepOneWorld => f.write_str("keep those of one world"),
            Self::ExportCheckpoint => f.write_str("an export makes a model of it"),
            Self::GiveCheckpoint => {
                f.write_str("give the checkpoint, the folder that this file is in")
            }
            Self::GiveTrained => f.write_str("give the checkpoint of a model"),
            Self::ExportValues => f.write_str("export values, in bf16 or f32, or an earlier step"),
            Self::Target { targets } => write!(f, "export to {}", targets.join(", ")),
            Self::TargetOrBoth { target } => {
                write!(f, "quantize it for both, or export to {target}")
            }
            Self::TargetOrLeaveOut { targets } => write!(
                f,
                "export to {}, or leave it out when you quantize",
                targets.join(", ")
            ),
            Self::LeaveOut => f.write_str("leave it out when you quantize"),
            Self::QuantizeFewer => f.write_str("quantize fewer tensors"),
        }
    }
}
