//! lowp for PyTorch: the module `lowp._lowp`, under the Python package in `python/lowp`.
//!
//! Python allocates memory and passes it as pointer, bytes and owner; each call passes the stream (`place.rs`). The crates that
//! this one uses decide what is quantized, gathered and updated, and how. The Python package implements the interfaces that
//! PyTorch requires of a tensor class and of an optimizer.
//!
//! # Example
//!
//! The library is loaded by Python, which `lowp.quantize(t, "mxfp8")` calls; in Rust the same cast is:
//!
//! ```
//! use lowp_format::{AnyRecipe, RecipeOptions, Shape};
//! use lowp_kernels::{Cpu, Quantized};
//!
//! let recipe = AnyRecipe::from_name("mxfp8", &RecipeOptions::default())?;
//! let weight = Quantized::encode(&Cpu, recipe, Shape::new(32, 64), &[0.5; 32 * 64])?;
//! assert_eq!(weight.decode()?, vec![0.5; 32 * 64]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use pyo3::prelude::*;

mod cast;
mod casts;
mod error;
mod file;
mod flat;
mod gather;
mod locks;
#[cfg(all(feature = "cuda", unix))]
mod native;
mod optimizer;
mod place;
mod plan;
mod planned;
#[cfg(feature = "cuda")]
mod products;
mod ranks;
mod recent;
mod recipe;
mod scales;
mod state;
mod tensor;

/// The module.
#[pymodule]
fn _lowp(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("LowpError", module.py().get_type::<error::LowpError>())?;
    module.add("VERSION", env!("CARGO_PKG_VERSION"))?;
    module.add("HAS_CUDA", cfg!(feature = "cuda"))?;
    module.add("FILE_DEFAULTS", lowp_file::select::DEFAULTS.to_vec())?;
    module.add_class::<recipe::Recipe>()?;
    module.add_class::<gather::Shard>()?;
    module.add_class::<gather::Gather>()?;
    module.add_class::<gather::GatherInput>()?;
    module.add_class::<gather::GatherOutput>()?;
    module.add_class::<recipe::Buffer>()?;
    module.add_class::<optimizer::Optimizer>()?;
    module.add_class::<casts::Casts>()?;
    module.add_class::<file::File>()?;
    module.add_class::<flat::FlatCasts>()?;
    #[cfg(feature = "cuda")]
    module.add_class::<products::Products>()?;
    #[cfg(all(feature = "cuda", unix))]
    {
        module.add_function(wrap_pyfunction!(native::register_operators, module)?)?;
        module.add_function(wrap_pyfunction!(native::take_error, module)?)?;
        module.add_function(wrap_pyfunction!(native::describe_operand, module)?)?;
        module.add_function(wrap_pyfunction!(native::describe_layer, module)?)?;
        module.add_function(wrap_pyfunction!(native::forget_codes, module)?)?;
        module.add_function(wrap_pyfunction!(native::release_layer, module)?)?;
    }
    module.add_function(wrap_pyfunction!(recipe::recipes, module)?)?;
    module.add_function(wrap_pyfunction!(scales::scale_places, module)?)?;
    module.add_function(wrap_pyfunction!(plan::plan, module)?)?;
    module.add_function(wrap_pyfunction!(cast::quantize, module)?)?;
    module.add_function(wrap_pyfunction!(file::save, module)?)?;
    module.add_function(wrap_pyfunction!(state::encode_state, module)?)?;
    module.add_function(wrap_pyfunction!(state::decode_state, module)?)?;
    Ok(())
}
