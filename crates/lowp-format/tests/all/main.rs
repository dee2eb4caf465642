//! The integration tests of this crate, one file per subject, linked once.

mod block_cuts;
mod codec_exhaustive;
mod format_laws;
mod gather_laws;
mod layout_snapshots;
mod random_numbers;
mod rank_tables;
mod recipe_answers;
mod recipe_options;
mod remainders;
mod scale_rules;
mod state_blocks;
mod stochastic_rounding;
