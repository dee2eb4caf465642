//! What to do about an input that cannot be taken, by commands and options.

use lowp_file::error::Remedy;

pub(super) fn said(remedy: &Remedy) -> String {
    match remedy {
        Remedy::Quantize => {
            "quantize the model first (lowp quantize), or convert it if another program quantized it (lowp import)".to_owned()
        }
        Remedy::QuantizeForBoth => "leave out --usage, or quantize the model with --usage both".to_owned(),
        Remedy::GiveQuantized => "give a file that `lowp quantize` wrote".to_owned(),
        Remedy::Dequantize => "give the model that it was quantized from, or decode it first (lowp dequantize)".to_owned(),
        Remedy::Import => "give the model that it was quantized from, or convert it first (lowp import)".to_owned(),
        Remedy::GiveReference => "give the model that was quantized as --reference".to_owned(),
        Remedy::GiveWhole => {
            "give the whole model, or decode it with the program that wrote it (`lowp export --help` has a table of what is read)".to_owned()
        }
        Remedy::Unshard => "gather the folder with `lowp unshard` first".to_owned(),
        Remedy::GiveRankFiles { first } => format!("give a folder that `lowp shard` wrote ({first}, ..)"),
        Remedy::KeepOneWorld => "keep only the files that one `lowp shard` wrote".to_owned(),
        Remedy::ExportCheckpoint => "`lowp export FOLDER -o DIR --to bf16` makes a model of it".to_owned(),
        Remedy::GiveCheckpoint => {
            "`lowp export FOLDER -o DIR --to bf16` makes a model of the checkpoint, whose folder this file is in, and `lowp inspect` and \
             `lowp verify` take that folder, too"
                .to_owned()
        }
        Remedy::GiveTrained => "give a checkpoint of `lowp train --save`".to_owned(),
        Remedy::ExportValues => "export the values by --to bf16 or --to fp32, or an earlier step".to_owned(),
        Remedy::Target { targets } => {
            format!("give --to {} (`lowp export --help` has a table)", targets.join(", "))
        }
        Remedy::TargetOrBoth { target } => format!("quantize it for both, or give --to {target}"),
        Remedy::TargetOrLeaveOut { targets } => {
            format!("give --to {}, or leave it out when you quantize (--ignore)", targets.join(", "))
        }
        Remedy::LeaveOut => "leave it out when you quantize (--ignore)".to_owned(),
        Remedy::QuantizeFewer => "quantize fewer tensors (--tensors, --ignore)".to_owned(),
    }
}
