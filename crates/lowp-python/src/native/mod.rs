//! Operators of PyTorch in native code: what a layer calls in each forward and backward runs without Python. They are registered through
//! PyTorch's C functions, which are found at run time and are the same in each of its versions.

mod casts;
mod layers;
mod operators;
mod products;
mod torch;

pub(crate) use layers::{describe_layer, describe_operand, forget_codes, release_layer};
pub(crate) use operators::{register_operators, take_error};
