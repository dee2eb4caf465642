//! The integration tests of this crate, one file per subject, linked once.

mod counts;
mod cut_rows;
mod flat_params;
mod missing;
mod muon;
mod one_graph;
mod ranks_that_differ;
mod remainders;
mod states;
