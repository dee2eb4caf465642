//! A quantized model as tensors of floats.

use crate::decoding::Decoder;
use crate::dtypes::OutputDtype;
use crate::error::{Result, mend_file};
use crate::interchange::hub::Hub;
use crate::keys;
use crate::meta::{self, Quantized};
use crate::out::Out;
use crate::outputs::{Group, Outputs};
use crate::progress::Progress;
use crate::quantize::copied_metadata;
use crate::remedy::Remedy;
pub use crate::round::Overflows;
use crate::unpack::orientation;
use crate::write::Item;
use lowp_format::Orientation;
use lowp_kernels::Backend;
use std::collections::BTreeMap;

/// A quantized model that is to be decoded.
#[derive(Debug)]
pub struct Dequantize<'a> {
    hub: &'a Hub,
    tensors: BTreeMap<String, Quantized>,
}

/// What was decoded.
#[derive(Debug)]
pub struct Dequantized {
    /// Tensors that were decoded.
    pub decoded: usize,
    /// Tensors that were written.
    pub tensors: usize,
    /// Bytes that were written.
    pub bytes: u64,
    /// Values that became infinite.
    pub overflows: Overflows,
}

impl<'a> Dequantize<'a> {
    /// The model in `hub`.
    ///
    /// # Errors
    /// It holds no quantized tensor.
    pub fn new(hub: &'a Hub) -> Result<Self> {
        let tensors = meta::quantized(&hub.model)?;
        if tensors.is_empty() {
            return Err(mend_file(
                hub.model.path(),
                "it holds no quantized tensor",
                Remedy::GiveQuantized,
            ));
        }
        Ok(Self { hub, tensors })
    }

    /// Writes its tensors to `out`, the quantized ones decoded on `backend` for `requested`, or for the first orientation there is, and
    /// rounded to `float`.
    ///
    /// # Errors
    /// A tensor cannot be read or decoded so, or the output cannot be written.
    pub fn write<B: Backend>(
        &self,
        backend: &B,
        requested: Option<Orientation>,
        float: OutputDtype,
        out: Out,
        progress: &dyn Progress,
    ) -> Result<Dequantized> {
        let Hub {
            model, other_files, ..
        } = self.hub;
        let passed = meta::others(model, &self.tensors).map(Item::input);
        let mut groups: Vec<Group<'_>> = passed.map(Group::of).collect();
        let mut jobs: Vec<(&Quantized, Orientation)> = Vec::new();
        for tensor in self.tensors.values() {
            let orientation = orientation(model, tensor, requested)?;
            groups.push(Group::decoded(jobs.len(), tensor, float));
            jobs.push((tensor, orientation));
        }
        let decoder = Decoder::new(backend, float);
        let make = Box::new(|job: usize| {
            let (tensor, orientation) = jobs[job];
            decoder.tensor(model, tensor, Some(orientation))
        });
        let mut metadata = copied_metadata(model);
        metadata.remove(keys::FORMAT_KEY);
        let outputs = Outputs::sorted(groups, metadata, make);
        let bytes = out.write([model], &outputs, progress, |target| {
            other_files.copy_all(target)
        })?;
        let (decoded, tensors) = (self.tensors.len(), outputs.groups.len());
        drop(outputs);
        Ok(Dequantized {
            decoded,
            tensors,
            bytes,
            overflows: decoder.overflows,
        })
    }
}
