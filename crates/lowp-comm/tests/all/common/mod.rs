//! What the tests share.

mod ranks;

pub(crate) use lowp_comm::CommError as Failure;
pub(crate) use ranks::*;
