//! Quantized safetensors files: open, decode, write, verify, shard, import and export them.
//!
//! A quantized tensor is several tensors of a file, and an entry in its metadata (docs/decisions/0005-files.md): any reader
//! of safetensors can read the bytes, and this crate knows their meaning. [`Model`] opens a file or an index, [`Hub`] a Hugging Face
//! folder. Files are written under a temporary name, and get their final name when they are complete. [`quantize()`], [`dequantize`], [`Export`] and
//! [`Import`] cast and decode in bands of rows, so that their memory does not grow with the model. [`NewModel`] casts tensors
//! whose values are in memory, one after the other, and [`Model::decode`] returns all values of a tensor.
//!
//! ```
//! use lowp_file::{Model, NewModel, Setup};
//! use lowp_format::{AnyRecipe, RecipeOptions};
//! # let folder = std::env::temp_dir().join(format!("lowp-file-{}", std::process::id()));
//! # std::fs::create_dir_all(&folder)?;
//! # let (path, other) = (folder.join("q.safetensors"), folder.join("other.safetensors"));
//! let setup = Setup::new(AnyRecipe::from_name("mxfp8", &RecipeOptions::default())?);
//! # NewModel::default().quantize("w.weight", &[64, 128], &[1.5; 64 * 128], setup)?.write(&path)?;
//!
//! // What `lowp quantize` wrote, or another program with this crate.
//! let model = Model::open(&path)?;
//! let values = model.decode("w.weight")?;
//!
//! let halves: Vec<f32> = values.iter().map(|value| value / 2.0).collect();
//! let mut new = NewModel::default();
//! new.quantize("v.weight", &[64, 128], &halves, setup)?;
//! new.write(&other)?;
//! assert_eq!(Model::open(&other)?.decode("v.weight")?, [0.75; 64 * 128]);
//! # std::fs::remove_dir_all(&folder)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod checkpoint;
pub mod codes;
pub mod dequantize;
pub mod dtypes;
pub mod error;
pub mod export;
pub mod files;
pub mod inspect;
pub mod json;
#[cfg(target_os = "linux")]
pub mod lost_pages;
pub mod model;
pub mod patterns;
pub mod process;
pub mod quantize;
pub mod ranks;
pub mod select;
pub mod text;
pub mod verify;

mod bands;
mod buffer_bytes;
mod cast;
mod decoding;
mod difference;
mod digest;
mod fields;
mod flat;
mod foreign;
mod groups;
mod header;
mod import;
mod interchange;
mod keys;
mod limits;
mod meta;
mod mmap;
mod new_model;
mod options;
mod out;
mod output;
mod outputs;
mod pack;
mod progress;
mod rank_names;
mod region;
mod remedy;
mod reuse;
mod round;
mod source;
mod stamp;
mod stats;
mod temporary;
mod unpack;
mod write;

pub use error::{FileError, Result};
pub use export::Export;
pub use import::{Import, Values};
pub use interchange::hub::{self, Hub};
pub use model::Model;
pub use new_model::NewModel;
pub use out::Out;
pub use progress::Progress;
pub use quantize::quantize;
pub use select::Setup;
