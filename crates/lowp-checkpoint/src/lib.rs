//! Checkpoints of training whose tensors are sharded over ranks.
//!
//! A checkpoint is a folder: one safetensors file per rank with the [`Piece`]s of tensors that the rank has, and
//! `index.json` with the places and checksums of the pieces of every tensor, and the notes of the trainer.
//! Any number of ranks loads any blocks of tensors ([`Checkpoint::read`]); pieces are bytes, and no arithmetic touches
//! them.
//!
//! [`Saver`] writes in the background, into a folder with a temporary name, which gets its final name after the files of all ranks and
//! the index are on the disk. If a run stops in between, the previous checkpoint stays the latest.
//!
//! ```
//! use lowp_checkpoint::{Block, Checkpoint, Dtype, Piece, Saver};
//! use lowp_comm::threads;
//! use std::time::Duration;
//!
//! let folder = std::env::temp_dir().join(format!("lowp-checkpoint-{}", std::process::id()));
//! let control = threads(1, Duration::from_secs(10)).swap_remove(0);
//! let mut saver = Saver::new(control, &folder, None)?;
//! let piece = Piece {
//!     name: "weight".to_owned(),
//!     dtype: Dtype::F32,
//!     full: [2, 2],
//!     block: Block::whole([2, 2]),
//!     bytes: [1.0f32, 2.0, 3.0, 4.0].iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>(),
//! };
//! saver.start(7, vec![piece], serde_json::json!({ "seed": 1 }))?;
//! saver.finish()?;
//!
//! let checkpoint = Checkpoint::latest(&folder)?;
//! assert_eq!((checkpoint.step(), &checkpoint.about()["seed"]), (7, &serde_json::json!(1)));
//! let row = Block { start: [1, 0], shape: [1, 2] };
//! assert_eq!(checkpoint.read("weight", Dtype::F32, [2, 2], row)?, [3.0f32, 4.0].map(f32::to_le_bytes).concat());
//! # std::fs::remove_dir_all(&folder)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod block;
mod document;
mod elements;
mod error;
mod folder;
mod header;
mod index;
mod list;
mod rank_file;
mod reader;
mod saver;
mod spans;
mod sync;
mod unfinished;
mod version1;
mod weight_record;
mod writer;
mod writing;

pub use block::{Block, Dtype, Late, Piece};
pub use error::CheckpointError;
pub use folder::{
    check_writable, folder_of, is_checkpoint, is_of_checkpoints, latest, lock, steps,
};
pub use header::{HEADER_LENGTH, HeaderEntry, MAX_HEADER, header};
pub use index::checksum;
pub use reader::{Checkpoint, Reads, TensorInfo};
pub use saver::Saver;
pub use sync::sync_folder;
pub use unfinished::remove_unfinished;
pub use weight_record::{is_weight_record, weight_record};
pub use writer::rank_of_file;
