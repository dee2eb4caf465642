//! States of an optimizer in fp8 as values, and back: a state of one dtype in an optimizer of another.

use lowp_kernels::{Backend, State, StateName};
use pyo3::prelude::*;

use crate::error::Error;
use crate::place::{Device, DeviceArg, MemoryArg, Place, on_device};

fn name_of(name: &str) -> Result<StateName, Error> {
    let known = StateName::from_name(name);
    known.ok_or_else(|| Error::new(format!("there is no state {name:?}")))
}

/// Rounds float32 values of the state `name` to nearest, and writes codes and scales.
#[pyfunction]
pub(crate) fn encode_state(
    py: Python<'_>,
    device: DeviceArg,
    name: &str,
    values: MemoryArg,
    state: MemoryArg,
) -> Result<(), Error> {
    let (device, name) = (Device::new(&device)?, name_of(name)?);
    py.detach(|| {
        on_device!(&device, |backend| {
            let values = backend.download(&backend.wrap::<f32>(values.into())?)?;
            State::Fp8(backend.wrap(state.into())?).upload(backend, name, &values)?;
            Ok(())
        })
    })
}

/// Writes the values of codes and scales of the state `name`, exactly.
#[pyfunction]
pub(crate) fn decode_state(
    py: Python<'_>,
    device: DeviceArg,
    name: &str,
    state: MemoryArg,
    values: MemoryArg,
) -> Result<(), Error> {
    let (device, name) = (Device::new(&device)?, name_of(name)?);
    py.detach(|| {
        on_device!(&device, |backend| {
            let decoded = State::Fp8(backend.wrap(state.into())?).download(backend, name)?;
            Ok(backend.write(&backend.wrap::<f32>(values.into())?, 0, &decoded)?)
        })
    })
}
