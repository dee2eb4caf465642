//! [`Values`]: the values of the tensors of a model in f32, whatever their dtype or quantized form.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use lowp_format::{Orientation, Recipe, Usage};
use lowp_kernels::{Backend, Cpu};

use super::find;
use super::weight::Weight;
use crate::error::{FileError, Result, file_error};
use crate::interchange::config;
use crate::interchange::hub::Hub;
use crate::meta;
use crate::source::f32_values;
use crate::text::{dims, shown};
use crate::unpack::decode;

/// The tensors of a model by name, those that another program quantized or `lowp quantize` wrote as their values.
#[derive(Debug)]
pub struct Values<'a> {
    hub: &'a Hub,
    /// Those that another program quantized.
    weights: BTreeMap<String, Weight<'a>>,
}

impl<'a> Values<'a> {
    /// The tensors of the model in `hub`.
    ///
    /// # Errors
    /// Its configuration says that weights are in a form that is not read.
    pub fn new(hub: &'a Hub) -> Result<Self> {
        config::check(hub)?;
        let weights = find::weights(hub)?.into_iter();
        let weights = weights.map(|weight| (weight.tensor.name.clone(), weight));
        Ok(Self {
            hub,
            weights: weights.collect(),
        })
    }

    /// Whether there is a tensor called `name`.
    pub fn has(&self, name: &str) -> bool {
        self.weights.contains_key(name) || self.hub.model.get(name).is_some()
    }

    /// The names of all tensors; one that is quantized has one name, whatever it is stored as.
    ///
    /// # Errors
    /// Metadata of quantized tensors that make no sense.
    pub fn names(&self) -> Result<BTreeSet<String>> {
        let own = meta::quantized(&self.hub.model)?;
        let stored: BTreeSet<String> = self.weights.values().flat_map(Weight::names).collect();
        let plain = meta::others(&self.hub.model, &own).map(|tensor| tensor.name.to_owned());
        let mut names: BTreeSet<String> = plain.filter(|name| !stored.contains(name)).collect();
        names.extend(self.weights.keys().cloned());
        names.extend(own.into_keys());
        Ok(names)
    }

    /// The values `elements` of the flattened tensor `name`, which has the dimensions `shape`. A tensor that is quantized is decoded
    /// whole.
    ///
    /// # Errors
    /// There is no such tensor, it has another shape, or it cannot be read.
    pub fn read(&self, name: &str, shape: &[usize], elements: Range<usize>) -> Result<Vec<f32>> {
        let model = &self.hub.model;
        let whole = if let Some(weight) = self.weights.get(name) {
            let tensor = &weight.tensor;
            self.check(name, &tensor.text.shape, shape)?;
            let codes = weight.quantized(&tensor.recipe.buffers(Usage::ROWWISE))?;
            Cpu.download(&decode(&Cpu, &codes, Orientation::Rowwise)?)?
        } else {
            match model.get(name) {
                Some(tensor) if tensor.shape == shape => {
                    return f32_values(&tensor, elements);
                }
                Some(tensor) if crate::meta::find(model, name)?.is_none() => {
                    return Err(self.unlike(name, tensor.shape, shape));
                }
                _ => model.decode(name)?,
            }
        };
        self.check(name, &[whole.len()], &[shape.iter().product()])?;
        Ok(whole[elements].to_vec())
    }

    fn check(&self, name: &str, found: &[usize], expected: &[usize]) -> Result<()> {
        match found == expected {
            true => Ok(()),
            false => Err(self.unlike(name, found, expected)),
        }
    }

    fn unlike(&self, name: &str, found: &[usize], expected: &[usize]) -> FileError {
        file_error!(
            self.hub.model.path(),
            "'{}' is {}, and the model of config.json has {} there",
            shown(name),
            dims(found),
            dims(expected)
        )
    }
}
