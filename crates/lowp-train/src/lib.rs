//! The training loop over sharded low-precision weights: data, schedule, evaluation, checkpoints and a precision tail, for any network.
//!
//! A [`Model`] defines the parameters of a network, a [`Network`] runs forward and backward with this rank's shards of them, [`Data`]
//! provides batches, and a [`Config`] has the settings of the training. Every rank of a run calls [`Training::rank`], as a thread or a process.
//!
//! ```
//! use lowp_candle::transformer::Transformer;
//! use lowp_train::{Config, Run, Text, Training};
//! use lowp_kernels::Cpu;
//! use lowp_comm::{Mesh, run_ranks};
//! use lowp_transformer::GptConfig;
//! use std::time::Duration;
//!
//! let gpt = GptConfig { dim: 32, layers: 1, heads: 2, seq: 16, ..GptConfig::default() };
//! let text = Text::new(b"one two three ".repeat(40), gpt.seq)?;
//! let (run, ranks) = (Run::parse("mxfp8")?, Mesh::sharded(2));
//! let config = Config { steps: 4, warmup: 1, batch: 8, mesh: ranks, ..Config::new(gpt) };
//! let results = run_ranks(&Cpu, 2, Duration::from_secs(60), |_, comm| {
//!     Training::new(&run, &config, &text).rank(&Cpu, comm, |model, place| Ok(Transformer::new(gpt, model, place.threads, false)?))
//! })?;
//! assert!(results[0].train_loss[3] < results[0].train_loss[0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod batch;
pub mod chart;
mod checkpoints;
mod codes;
mod config;
mod costs;
pub mod data;
mod defaults;
mod error;
mod forms;
mod log;
pub mod loss_picture;
pub mod machine;
mod metrics;
pub mod network;
mod optimizer;
mod outcome;
pub mod peak;
mod pretrained;
mod rank;
pub mod result;
mod run;
pub mod summary;
pub mod text;
pub mod tokens;
pub mod training;

pub use batch::Batch;
pub use checkpoints::{Checkpoints, ResumedAt};
pub use codes::LayerCodes;
pub use config::{Config, MAX_BATCH};
pub use data::{Data, Sampler};
pub use error::{TrainError, shown_value};
pub use log::RunLog;
pub use metrics::Metrics;
pub use network::{Model, Network};
pub use optimizer::Optimizer;
pub use pretrained::{HubValues, Pretrained};
pub use run::Run;
pub use text::Text;
pub use tokens::{Mixture, Tokens};
pub use training::Training;
