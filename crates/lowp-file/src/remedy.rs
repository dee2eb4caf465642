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
        f.write_str(match self {
            Self::Quantize => {
                "quantize the model first, or import it if another program quantized it"
            }
            Self::QuantizeForBoth => "decode the other orientation, or quantize it for both",
            Self::GiveQuantized => "give a model that is quantized",
            Self::Dequantize => "give the model that it was quantized from, or decode it first",
            Self::Import => "give the model that it was quantized from, or import it first",
            Self::GiveReference => "give the model that was quantized",
            Self::GiveWhole => "give the whole model, or decode it with the program that wrote it",
            Self::Unshard => "gather the folder first",
            Self::GiveRankFiles { first } => {
                return write!(f, "give a folder of them ({first}, ..)");
            }
            Self::KeepOneWorld => "keep those of one world",
            Self::ExportCheckpoint => "an export makes a model of it",
            Self::GiveCheckpoint => "give the checkpoint, the folder that this file is in",
            Self::GiveTrained => "give the checkpoint of a model",
            Self::ExportValues => "export values, in bf16 or f32, or an earlier step",
            Self::Target { targets } => return write!(f, "export to {}", targets.join(", ")),
            Self::TargetOrBoth { target } => {
                return write!(f, "quantize it for both, or export to {target}");
            }
            Self::TargetOrLeaveOut { targets } => {
                let targets = targets.join(", ");
                return write!(f, "export to {targets}, or leave it out when you quantize");
            }
            Self::LeaveOut => "leave it out when you quantize",
            Self::QuantizeFewer => "quantize fewer tensors",
        })
    }
}
